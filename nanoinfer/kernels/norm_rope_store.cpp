// Norm of q and k, rotation, store of k and v, on a CPU: the twin of norm_rope_store_ref.
//
// In:  T tokens' heads of D, each contiguous, anywhere in memory: where the fused projection left
//      them. Out: queries, contiguous; keys and values in their slots of the caches.
// Invariants: the bits of the three kernels that it replaces; nothing is written if any position or
// slot is out of bounds.
#include <vector>

#include "heads.h"
#include "rows.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for

template <class T> struct Heads {
  const T* data;
  int64_t count, token_stride, head_stride;

  const T* at(int64_t t, int64_t h) const { return data + t * token_stride + h * head_stride; }
};

// The heads of one token, normalised if there is a weight, turned, written one behind the other.
template <class T, class Weight>
void norm_and_turn(T* out, const Heads<T>& heads, int64_t t, const Weight* weight,
                   const float* angles, const Turn& turn, float eps, T* buffer) {
  for (int64_t h = 0; h < heads.count; h++) {
    const T* head = heads.at(t, h);
    if (weight) {
      norm_row(buffer, head, weight, turn.D, eps, 1);
      head = buffer;
    }
    turn.head(out + h * turn.D, head, angles);
  }
}

// A cache of heads in 8 bits, with a scale for each.
struct Cache8 {
  void* values;
  float* scales;
  int is_e4m3, is_rotated;

  // x: room for a head in whole vectors.
  template <class T> void put(int64_t at, const T* head, int64_t D, float* x) const {
    std::transform(head, head + D, x, [](T value) { return widen(value); });
    if (is_rotated) hadamard(x, D);
    scales[at] = is_e4m3 ? quantize_head(x, D, (e4m3*)values + at * D)
                         : quantize_head(x, D, (int8_t*)values + at * D);
  }
};

template <class T> void turn_heads(T* heads, int64_t count, int64_t D, float* x) {
  for (int64_t h = 0; h < count; h++, heads += D) {
    std::transform(heads, heads + D, x, [](T value) { return widen(value); });
    hadamard(x, D);
    std::transform(x, x + D, heads, rounded<T>);
  }
}

}  // namespace

// k_scales, v_scales: null unless the cache is in 8 bits. q_weight, k_weight: null without norms.
// axes: null for positions [T], else positions are [3, T].
// Returns -1; or the first token whose position has no row in the table; or T plus the first token
// whose slot is out of bounds.
extern "C" int64_t nanoinfer_norm_rope_store(
    int is_bf16, int is_weight_fp32, int is_interleaved, int is_e4m3, int is_rotated, void* q_out,
    void* k_cache, void* v_cache, float* k_scales, float* v_scales, const void* q, const void* k,
    const void* v, const void* q_weight, const void* k_weight, const int64_t* positions,
    const int64_t* axes, const float* table, const int64_t* slots,
    int64_t T, int64_t H, int64_t KV, int64_t D, int64_t P, int64_t R, int64_t offset,
    int64_t num_slots, int64_t q_t, int64_t q_h, int64_t k_t, int64_t k_h, int64_t v_t,
    int64_t v_h, float eps, int threads) {
  const Angles angles{table, positions, axes, T, P, R};
  const Turn turn{D, R, offset, is_interleaved, 0};
  const int64_t invalid = angles.first_invalid();
  if (invalid >= 0) return invalid;
  for (int64_t t = 0; t < T; t++)
    if (slots[t] < 0 || slots[t] >= num_slots) return T + t;
  const auto run = [&](auto* typed, auto* weight) {
    using E = std::remove_pointer_t<decltype(typed)>;
    using Weight = std::remove_pointer_t<decltype(weight)>;
    const Heads<E> queries{(const E*)q, H, q_t, q_h}, keys{(const E*)k, KV, k_t, k_h};
    const Heads<E> values{(const E*)v, KV, v_t, v_h};
    const bool is_plain = k_scales == nullptr;
    const Cache8 k8{k_cache, k_scales, is_e4m3, is_rotated};
    const Cache8 v8{v_cache, v_scales, is_e4m3, is_rotated};
#pragma omp parallel num_threads(threads) if (T * (H + KV) * D > MIN_PARALLEL)
    {
      std::vector<float> row(R);
      std::vector<E> head(D), turned(is_plain ? 0 : KV * D);
      std::vector<float> wide(is_plain ? 0 : D + W);
#pragma omp for
      for (int64_t t = 0; t < T; t++) {
        const float* at = angles.row(t, row.data());
        const int64_t slot = slots[t] * KV;  // its first head
        E* turned_k = is_plain ? (E*)k_cache + slot * D : turned.data();
        norm_and_turn(typed + t * H * D, queries, t, (const Weight*)q_weight, at, turn, eps,
                      head.data());
        norm_and_turn(turned_k, keys, t, (const Weight*)k_weight, at, turn, eps, head.data());
        for (int64_t h = 0; h < KV; h++) {
          if (is_plain) {
            std::copy(values.at(t, h), values.at(t, h) + D, (E*)v_cache + (slot + h) * D);
          } else {
            k8.put(slot + h, turned_k + h * D, D, wide.data());
            v8.put(slot + h, values.at(t, h), D, wide.data());
          }
        }
        if (is_rotated) turn_heads(typed + t * H * D, H, D, wide.data());
      }
    }
  };
  if (!is_bf16)
    run((float*)q_out, (float*)0);
  else if (is_weight_fp32)
    run((bf16*)q_out, (float*)0);
  else
    run((bf16*)q_out, (bf16*)0);
  return -1;
}
