// RMSNorm over rows, on a CPU: the twin of rms_norm_ref and, with a residual, of add_rms_norm_ref.
//
// In:  x (and the residual) as T x H rows of N, each contiguous, anywhere in memory: q and k are
//      normalised where the fused projection left them. Out: contiguous rows.
// Invariant: rounds where the reference rounds (the sum, the normalised row, the product), and a
// row's bits depend on that row only. The order of the sum of squares is our own, so that a bf16
// result may fall on the other side of a rounding, rarely.
#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for

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

template <class T>
void norm_row(T* __restrict out, const T* x, const T* weight, int64_t N, float eps) {
  const float factor = 1 / std::sqrt(sum_of_squares(x, N) / N + eps);
  std::transform(x, x + N, weight, out, [&](T value, T scale) {
    return rounded<T>(widen(rounded<T>(widen(value) * factor)) * widen(scale));
  });
}

template <class T> void add_row(T* __restrict out, const T* x, const T* residual, int64_t N) {
  std::transform(x, x + N, residual, out,
                 [](T one, T other) { return rounded<T>(widen(one) + widen(other)); });
}

}  // namespace

// Row (t, h) of x starts at t * x_t + h * x_h elements. added, residual: null, or where x + residual
// goes and what is added, with its own strides.
extern "C" void nanoinfer_rms_norm(int is_bf16, void* out, void* added, const void* x,
                                   const void* residual, const void* weight, int64_t T, int64_t H,
                                   int64_t N, int64_t x_t, int64_t x_h, int64_t residual_t,
                                   int64_t residual_h, float eps, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
#pragma omp parallel for num_threads(threads) if (T * H * N > MIN_PARALLEL)
    for (int64_t i = 0; i < T * H; i++) {
      const int64_t t = i / H, h = i % H;
      const E* row = (const E*)x + t * x_t + h * x_h;
      if (added) {
        E* sums = (E*)added + i * N;
        add_row(sums, row, (const E*)residual + t * residual_t + h * residual_h, N);
        row = sums;
      }
      norm_row(typed + i * N, row, (const E*)weight, N, eps);
    }
  };
  is_bf16 ? run((bf16*)out) : run((float*)out);
}
