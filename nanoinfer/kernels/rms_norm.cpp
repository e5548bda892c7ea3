// RMSNorm over rows, on a CPU: the twin of all references in rms_norm.py.
//
// In:  x (and the residual, the gate) as T x H rows of N, each contiguous, anywhere in memory: q and
//      k are normalised where the fused projection left them. Out: contiguous rows.
// Invariant: rounds where the reference rounds (the sum, the normalised row, the product), and a
// row's bits depend on that row only.
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for
constexpr float FP8_MAX = 448, MIN_AMAX = 1e-4f;

template <class T> void add_row(T* __restrict out, const T* x, const T* residual, int64_t N) {
  std::transform(x, x + N, residual, out,
                 [](T one, T other) { return rounded<T>(widen(one) + widen(other)); });
}

template <class T> void gate_row(T* __restrict out, const T* gate, int64_t N) {
  float wide[W];
  for (int64_t i = 0; i < N; i += W) {
    const int count = std::min<int64_t>(W, N - i);
    for (int k = 0; k < W; k++) wide[k] = widen(gate[i + std::min(k, count - 1)]);
    store(wide, silu(load(wide)));
    for (int k = 0; k < count; k++) narrow(widen(out[i + k]) * wide[k], out + i + k);
  }
}

uint8_t to_e4m3(float x) {  // |x| <= 448; to nearest even; NaN stays NaN
  const uint32_t bits = read<uint32_t>(&x), sign = bits >> 31 << 7, magnitude = bits & 0x7fffffff;
  if (x != x) return 0x7f | sign;
  const float size = std::fabs(x);
  if (size < 0x1p-6f) return sign | (uint32_t)std::nearbyint(size * 512);  // steps of 2^-9
  return sign | ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
}

// Where the scale of (row t, group g) lies: t * row + g / 4 * pack + g % 4 * one, in scales.
struct Scales {
  void* data;
  int64_t row, pack, one;
  int is_packed;

  float put(int64_t t, int64_t g, float scale) const {
    const int64_t at = t * row + g / 4 * pack + g % 4 * one;
    if (!is_packed) return ((float*)data)[at] = scale;
    const uint32_t bits = read<uint32_t>(&scale);
    const uint32_t exponent = std::min((bits >> 23) + ((bits & 0x7fffff) != 0), 255u);
    const uint32_t power = exponent << 23;
    ((uint8_t*)data)[at] = exponent;
    return read<float>(&power);
  }
};

template <class T>
void quantize_row(uint8_t* out, const Scales& scales, const T* x, int64_t t, int64_t N,
                  int64_t group_size) {
  for (int64_t g = 0; g < N / group_size; g++, x += group_size, out += group_size) {
    float amax = MIN_AMAX;
    bool has_nan = false;
    for (int64_t i = 0; i < group_size; i++) {
      amax = std::max(amax, std::fabs(widen(x[i])));
      has_nan |= std::isnan(widen(x[i]));
    }
    const float scale = scales.put(t, g, has_nan ? NAN : amax / FP8_MAX);
    for (int64_t i = 0; i < group_size; i++) {
      const float value = widen(x[i]) / scale;
      out[i] = to_e4m3(value > FP8_MAX ? FP8_MAX : value < -FP8_MAX ? -FP8_MAX : value);
    }
  }
}

// Rows of x, and what is done to each; null where there is nothing to do.
template <class T, class Weight> struct Norm {
  const T *x, *residual, *gate;
  const Weight* weight;
  T* added;
  int64_t H, N;
  const int64_t* strides;  // of x, residual, gate: of a token and of a head
  float eps, out_scale;

  void row(T* out, int64_t i) const {
    const auto offset = [&](int k) { return i / H * strides[2 * k] + i % H * strides[2 * k + 1]; };
    const T* from = x + offset(0);
    if (added) {
      add_row(added + i * N, from, residual + offset(1), N);
      from = added + i * N;
    }
    norm_row(out, from, weight, N, eps, out_scale);
    if (gate) gate_row(out, gate + offset(2), N);
  }
};

// f(a null pointer to the rows' type, one to the weight's type).
template <class F> void with_types(int is_bf16, int is_weight_fp32, F f) {
  if (!is_bf16) return f((float*)0, (float*)0);
  is_weight_fp32 ? f((bf16*)0, (float*)0) : f((bf16*)0, (bf16*)0);
}

}  // namespace

// strides: six, of a token and a head of x, of the residual, of the gate. added: null, or where
// x + residual goes. gate: or null.
extern "C" void nanoinfer_rms_norm(int is_bf16, int is_weight_fp32, void* out, void* added,
                                   const void* x, const void* residual, const void* gate,
                                   const void* weight, int64_t T, int64_t H, int64_t N,
                                   const int64_t* strides, float eps, float out_scale,
                                   int threads) {
  with_types(is_bf16, is_weight_fp32, [&](auto* value, auto* scale) {
    using E = std::remove_pointer_t<decltype(value)>;
    using Weight = std::remove_pointer_t<decltype(scale)>;
    const Norm<E, Weight> norm{(const E*)x, (const E*)residual, (const E*)gate,
                               (const Weight*)weight, (E*)added, H, N, strides, eps, out_scale};
#pragma omp parallel for num_threads(threads) if (T * H * N > MIN_PARALLEL)
    for (int64_t i = 0; i < T * H; i++) norm.row((E*)out + i * N, i);
  });
}

// Rows of x [T, N] to FP8 in the same pass. copy: null, or where the rows go before. scale_strides:
// as in Scales.
extern "C" void nanoinfer_rms_norm_quantized(int is_bf16, int is_weight_fp32, void* values,
                                             void* scales, void* copy, void* added, const void* x,
                                             const void* residual, const void* weight, int64_t T,
                                             int64_t N, const int64_t* strides, int64_t group_size,
                                             int is_packed, const int64_t* scale_strides,
                                             float eps, float out_scale, int threads) {
  const Scales out{scales, scale_strides[0], scale_strides[1], scale_strides[2], is_packed};
  with_types(is_bf16, is_weight_fp32, [&](auto* value, auto* scale) {
    using E = std::remove_pointer_t<decltype(value)>;
    using Weight = std::remove_pointer_t<decltype(scale)>;
    const Norm<E, Weight> norm{(const E*)x, (const E*)residual, nullptr,
                               (const Weight*)weight, (E*)added, 1, N, strides, eps, out_scale};
#pragma omp parallel num_threads(threads) if (T * N > MIN_PARALLEL)
    {
      std::vector<E> buffer(copy ? 0 : N);
#pragma omp for
      for (int64_t t = 0; t < T; t++) {
        E* row = copy ? (E*)copy + t * N : buffer.data();
        norm.row(row, t);
        quantize_row((uint8_t*)values + t * N, out, row, t, N, group_size);
      }
    }
  });
}
