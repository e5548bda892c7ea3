// Norm of q and k, rotation, store of k and v, on a CPU: the twin of norm_rope_store_ref.
//
// In:  T tokens' heads of D, each contiguous, anywhere in memory: where the fused projection left
//      them. Out: queries, contiguous; keys and values in their slots of the caches.
// Invariants: the bits of the three kernels that it replaces; nothing is written if any position or
// slot is out of bounds.
#include <vector>

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

}  // namespace

// q_weight, k_weight: null without norms. axes: null for positions [T], else positions are [3, T].
// Returns -1; or the first token whose position has no row in the table; or T plus the first token
// whose slot is out of bounds.
extern "C" int64_t nanoinfer_norm_rope_store(
    int is_bf16, int is_weight_fp32, int is_interleaved, void* q_out, void* k_cache, void* v_cache,
    const void* q, const void* k, const void* v, const void* q_weight, const void* k_weight,
    const int64_t* positions, const int64_t* axes, const float* table, const int64_t* slots,
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
#pragma omp parallel num_threads(threads) if (T * (H + KV) * D > MIN_PARALLEL)
    {
      std::vector<float> row(R);
      std::vector<E> head(D);
#pragma omp for
      for (int64_t t = 0; t < T; t++) {
        const float* at = angles.row(t, row.data());
        const int64_t slot = slots[t] * KV * D;
        norm_and_turn(typed + t * H * D, queries, t, (const Weight*)q_weight, at, turn, eps,
                      head.data());
        norm_and_turn((E*)k_cache + slot, keys, t, (const Weight*)k_weight, at, turn, eps,
                      head.data());
        for (int64_t h = 0; h < KV; h++)
          std::copy(values.at(t, h), values.at(t, h) + D, (E*)v_cache + slot + h * D);
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
