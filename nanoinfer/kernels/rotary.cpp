// Rotary embedding of queries and keys, on a CPU: the twin of rotary_ref.
//
// In:  T tokens' heads of D, each contiguous, anywhere in memory; a table [P, R] of [cos | sin] in
//      fp32. Out: contiguous copies, dimensions i and i + R / 2 turned, those from R on as they were.
// Invariant: the reference's bits. It rounds both products before it adds them, so that here a
// multiply and an add must not become one instruction.
#ifndef __clang__
#pragma GCC optimize("fp-contract=off")
#endif
#include <algorithm>

#include "simd.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for

// One head: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
template <class T>
void turn(T* __restrict y, const T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float x1 = widen(x[i]), x2 = widen(x[i + half]);
    narrow(x1 * cos[i] - x2 * sin[i], y + i);
    narrow(x2 * cos[i] + x1 * sin[i], y + i + half);
  }
}

template <class T> struct Heads {
  T* out;
  const T* in;
  int64_t count, token_stride, head_stride;

  void turn_token(int64_t t, const float* row, int64_t D, int64_t R) const {
    for (int64_t h = 0; h < count; h++) {
      T* y = out + (t * count + h) * D;
      const T* x = in + t * token_stride + h * head_stride;
      turn(y, x, row, row + R / 2, R / 2);
      std::copy(x + R, x + D, y + R);
    }
  }
};

}  // namespace

// Returns -1, or the first token whose position has no row in the table.
extern "C" int64_t nanoinfer_rotary(int is_bf16, void* q_out, void* k_out, const void* q,
                                    const void* k, const int64_t* positions, const float* table,
                                    int64_t T, int64_t H, int64_t KV, int64_t D, int64_t P,
                                    int64_t R, int64_t q_t, int64_t q_h, int64_t k_t, int64_t k_h,
                                    int threads) {
  for (int64_t t = 0; t < T; t++)
    if (positions[t] < 0 || positions[t] >= P) return t;
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    const Heads<E> query{typed, (const E*)q, H, q_t, q_h};
    const Heads<E> key{(E*)k_out, (const E*)k, KV, k_t, k_h};
#pragma omp parallel for num_threads(threads) if (T * (H + KV) * D > MIN_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
      query.turn_token(t, table + positions[t] * R, D, R);
      key.turn_token(t, table + positions[t] * R, D, R);
    }
  };
  is_bf16 ? run((bf16*)q_out) : run((float*)q_out);
  return -1;
}
