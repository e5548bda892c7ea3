// What is done to one row, by more than one kernel: RMSNorm and rotation of a head.
//
// Invariant: rounds where the references round. The order of a sum of squares is our own, so that a
// bf16 result may fall on the other side of a rounding, rarely.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

// The reference of a rotation rounds both products before it adds them: a multiply and an add must
// not become one instruction.
#ifdef __clang__
#define NO_CONTRACTION
#define NO_CONTRACTION_HERE _Pragma("clang fp contract(off)")
#else
#define NO_CONTRACTION __attribute__((optimize("fp-contract=off")))
#define NO_CONTRACTION_HERE
#endif

namespace {

template <class T> T rounded(float x) {
  T y;
  narrow(x, &y);
  return y;
}

template <class T> float sum_of_squares(const T* x, int64_t N) {
  constexpr int SUMS = 4;
  vf acc[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * W <= N; i += SUMS * W)
    for (int k = 0; k < SUMS; k++) acc[k] += load(x + i + k * W) * load(x + i + k * W);
  for (; i + W <= N; i += W) acc[0] += load(x + i) * load(x + i);
  float total = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
  for (; i < N; i++) total += widen(x[i]) * widen(x[i]);
  return total;
}

// A weight of the row's type multiplies the rounded row; a wider one multiplies before rounding.
template <class T, class Weight>
void norm_row(T* __restrict out, const T* x, const Weight* weight, int64_t N, float eps,
              float out_scale) {
  const float factor = 1 / std::sqrt(sum_of_squares(x, N) / N + eps) * out_scale;
  std::transform(x, x + N, weight, out, [&](T value, Weight scale) {
    if constexpr (std::is_same_v<T, Weight>)
      return rounded<T>(widen(rounded<T>(widen(value) * factor)) * widen(scale));
    else
      return rounded<T>(widen(value) * factor * scale);
  });
}

// The angles of T tokens: rows [cos | sin] of R of the table [P, R]. With axes [R], column c is read
// from the row of position axes[c] of the token's three.
struct Angles {
  const float* table;
  const int64_t *positions, *axes;  // [T] without axes, else [3, T]
  int64_t T, P, R;

  int64_t first_invalid() const {  // token whose position has no row, or -1
    for (int64_t i = 0; i < (axes ? 3 : 1) * T; i++)
      if (positions[i] < 0 || positions[i] >= P) return i % T;
    return -1;
  }
  const float* row(int64_t t, float* buffer) const {
    if (!axes) return table + positions[t] * R;
    for (int64_t c = 0; c < R; c++) buffer[c] = table[positions[axes[c] * T + t] * R + c];
    return buffer;
  }
};

// y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, where x1 is x[i * STEP] and x2 lies `second` behind.
template <int STEP, class T>
NO_CONTRACTION void turn_pairs(T* __restrict y, const T* __restrict x, const float* cos,
                               const float* sin, float sign, int64_t half, int64_t second) {
  NO_CONTRACTION_HERE
  for (int64_t i = 0; i < half; i++) {
    const float x1 = widen(x[i * STEP]), x2 = widen(x[i * STEP + second]), s = sign * sin[i];
    narrow(x1 * cos[i] - x2 * s, y + i * STEP);
    narrow(x2 * cos[i] + x1 * s, y + i * STEP + second);
  }
}

// Which R of D dimensions are turned, which of them form a pair, and which way.
struct Turn {
  int64_t D, R, offset;
  int is_interleaved, is_conjugate;

  template <class T> void head(T* y, const T* x, const float* angles) const {
    const float *sin = angles + R / 2, sign = is_conjugate ? -1 : 1;
    std::copy(x, x + offset, y);
    std::copy(x + offset + R, x + D, y + offset + R);
    if (is_interleaved)
      turn_pairs<2>(y + offset, x + offset, angles, sin, sign, R / 2, 1);
    else
      turn_pairs<1>(y + offset, x + offset, angles, sin, sign, R / 2, R / 2);
  }
};

}  // namespace
