// Rotary embedding of queries and keys, on a CPU: the twin of rotary_ref.
//
// In:  T tokens' heads of D, each contiguous, anywhere in memory; a table [P, R] of [cos | sin] in
//      fp32. Out: contiguous copies, R dimensions from `offset` on turned, the others as they were.
// Invariant: the reference's bits.
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for

template <class T> struct Heads {
  T* out;
  const T* in;
  int64_t count, token_stride, head_stride;

  void turn_token(int64_t t, const float* angles, const Turn& turn) const {
    for (int64_t h = 0; h < count; h++)
      turn.head(out + (t * count + h) * turn.D, in + t * token_stride + h * head_stride, angles);
  }
};

}  // namespace

// k: null for queries alone. axes: null for positions [T], else positions are [3, T].
// Returns -1, or the first token whose position has no row in the table.
extern "C" int64_t nanoinfer_rotary(int is_bf16, int is_interleaved, int is_conjugate, void* q_out,
                                    void* k_out, const void* q, const void* k,
                                    const int64_t* positions, const int64_t* axes,
                                    const float* table, int64_t T, int64_t H, int64_t KV,
                                    int64_t D, int64_t P, int64_t R, int64_t offset, int64_t q_t,
                                    int64_t q_h, int64_t k_t, int64_t k_h, int threads) {
  const Angles angles{table, positions, axes, T, P, R};
  const Turn turn{D, R, offset, is_interleaved, is_conjugate};
  const int64_t invalid = angles.first_invalid();
  if (invalid >= 0) return invalid;
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    const Heads<E> query{typed, (const E*)q, H, q_t, q_h};
    const Heads<E> key{(E*)k_out, (const E*)k, k ? KV : 0, k_t, k_h};
#pragma omp parallel num_threads(threads) if (T * (H + KV) * D > MIN_PARALLEL)
    {
      std::vector<float> buffer(R);
#pragma omp for
      for (int64_t t = 0; t < T; t++) {
        const float* row = angles.row(t, buffer.data());
        query.turn_token(t, row, turn);
        key.turn_token(t, row, turn);
      }
    }
  };
  is_bf16 ? run((bf16*)q_out) : run((float*)q_out);
  return -1;
}
