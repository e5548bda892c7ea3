// y = x W^T + b for a weight that lies in blocks, on a CPU: the twin of linear_ref.
//
// In:  x [M, K] rows; W in blocks of 64 of its N rows; for int8 a scale for each of them.
// Out: y [M, N], bf16 or fp32, summed in fp32 (bf16) or int32 (int8), rounded once.
// Invariant: the bits of a row of y depend on its own x only, not on M or the number of threads.
//
// int8: each row of x is quantised first, to 0..255 (the instruction wants one unsigned side), which
// needs an offset: sum (u - zero) w = sum u w - zero * sum w, where the last sum is W's alone.
#include <algorithm>
#include <cmath>
#include <memory>

#include "blocks.h"

namespace {

// f(m, n, count, sums): y[m][n .. n + count], for all m and n. Threads share N out equally.
// panel(first, count): `count` rows of x from `first` on, as `multiply` wants them; called by all.
template <class T, class V, class S, class P, class F>
void for_each_row(const Shape& s, const void* blocks, int threads, P panel, F f) {
  const int64_t halves = (s.N + HALF - 1) / HALF;  // the last may stand out
#pragma omp parallel num_threads(threads)
  {
    const Floats room = allocate(std::min(s.M, PANEL) * BLOCK);
    S* sums = (S*)room.get();
    const Floats own = allocate(s.M < MANY_ROWS ? 0 : SPLIT_UNITS<T>);
    for (int64_t first = 0; first < s.M; first += PANEL) {
      const Shape shape{std::min(PANEL, s.M - first), s.N, s.K, s.stride};
      const char* x = panel(first, shape.M);
#pragma omp for
      for (int64_t thread = 0; thread < threads; thread++) {
        const int64_t end = halves * (thread + 1) / threads;
        for (int64_t i = halves * thread / threads, count; i < end; i += count) {
          count = i % 2 == 0 && i + 1 < end ? 2 : 1;
          multiply<T, V>(x, shape, (const uint32_t*)blocks, i * HALF, count * HALF, sums,
                         (uint32_t*)own.get());
          for (int64_t m = 0; m < shape.M; m++)
            f(first + m, i * HALF, std::min(count * HALF, s.N - i * HALF), sums + m * BLOCK);
        }
      }
    }
  }
}

// x = (value - zero) * scale: the whole range of a row, in which 0 is exact (quantize_tokens).
struct Scale { float scale; int32_t zero; };

template <class T> Scale quantize_row(const T* x, int64_t K, uint8_t* values) {
  float low = 0, high = 0;
  bool has_nan = false;  // then the row of y is NaN
  for (int64_t k = 0; k < K; k++) {
    const float value = widen(x[k]);
    low = value < low ? value : low;
    high = value > high ? value : high;
    has_nan |= value != value;
  }
  const float scale = std::max(high - low, 1e-4f) / 255;
  const float zero = std::nearbyint(-low / scale);
  for (int64_t k = 0; k < K; k++) {
    const float value = std::nearbyint(widen(x[k]) / scale) + zero;
    values[k] = int32_t(value < 0 ? 0 : value > 255 ? 255 : value);
  }
  return {has_nan ? NAN : scale, int32_t(zero)};
}

}  // namespace

extern "C" int nanoinfer_has_pairs() { return HAS_PAIRS; }

// Rows of x and y are `x_stride` and `y_stride` values apart.
extern "C" void nanoinfer_linear_bf16(int is_fp32_out, void* out, const bf16* x, const void* blocks,
                                      const bf16* bias, int64_t M, int64_t N, int64_t K,
                                      int64_t x_stride, int64_t y_stride, int threads) {
  // Rows of x where they are, or widened; LINE, for rows that are 4 KiB apart push each other out.
  const int64_t stride = HAS_PAIRS ? x_stride : K + LINE;
  const std::unique_ptr<Operand<bf16>[]> own(
      new Operand<bf16>[HAS_PAIRS ? 0 : std::min(M, PANEL) * stride]);
  const auto panel = [&](int64_t first, int64_t count) {
    if (HAS_PAIRS) return (const char*)(x + first * x_stride);
#pragma omp for
    for (int64_t m = 0; m < count; m++)
      to_operands(x + (first + m) * x_stride, K, own.get() + m * stride);
    return (const char*)own.get();
  };
  const auto run = [&](auto* y) {
    for_each_row<bf16, vf, float>(
        {M, N, K, stride * int64_t(sizeof(Operand<bf16>))}, blocks, threads, panel,
        [&](int64_t m, int64_t n, int64_t count, const float* sums) {
          auto* row = y + m * y_stride + n;
          int64_t i = 0;
          for (; i + W <= count; i += W)
            narrow(load(sums + i) + (bias ? load(bias + n + i) : vf{}), row + i);
          for (; i < count; i++) narrow(sums[i] + (bias ? widen(bias[n + i]) : 0), row + i);
        });
  };
  is_fp32_out ? run((float*)out) : run((bf16*)out);
}

// sums_of_w: of each row of W. scratch: M times a Scale and K bytes.
extern "C" void nanoinfer_linear_int8(int is_bf16, int is_fp32_out, void* out, const void* x,
                                      const void* blocks, const float* bias, const float* scales,
                                      const int32_t* sums_of_w, void* scratch, int64_t M,
                                      int64_t N, int64_t K, int64_t x_stride, int64_t y_stride,
                                      int threads) {
  Scale* of_row = (Scale*)scratch;
  uint8_t* values = (uint8_t*)(of_row + M);
#pragma omp parallel for num_threads(threads) if (M > 1)
  for (int64_t m = 0; m < M; m++)
    of_row[m] = is_bf16 ? quantize_row((const bf16*)x + m * x_stride, K, values + m * K)
                        : quantize_row((const float*)x + m * x_stride, K, values + m * K);
  const auto run = [&](auto* y) {
    for_each_row<int8_t, vi, int32_t>(
        {M, N, K, K}, blocks, threads,
        [&](int64_t first, int64_t) { return (const char*)(values + first * K); },
        [&](int64_t m, int64_t n, int64_t count, const int32_t* sums) {
          auto* row = y + m * y_stride + n;
          for (int64_t i = 0; i < count; i++) {
            const float sum = sums[i] - of_row[m].zero * sums_of_w[n + i];
            narrow(sum * of_row[m].scale * scales[n + i] + (bias ? bias[n + i] : 0), row + i);
          }
        });
  };
  is_fp32_out ? run((float*)out) : run((bf16*)out);
}
