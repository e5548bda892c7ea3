// A head in 8 bits and its scale, and back: quantized_kv.py says what it is, for the kernels that
// store keys and values and those that read them.
//
// Invariants: the bits of the references. Vectors only: what is left of a head goes through one
// that is filled up with zeros.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

struct e4m3 {  // sign, 4 bits of exponent, 3 of mantissa: no infinity, 448 is the largest
  uint8_t bits;
};
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vs __attribute__((vector_size(W)));

template <class V> constexpr float LARGEST = std::is_same_v<V, int8_t> ? 127 : 448;
constexpr float ROUND = 12582912.f;   // 1.5 * 2^23: added, a float's low bits are its integer
constexpr float SMALLEST = 1 / 64.f;  // of e4m3's normal numbers

vf load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 takes the generic form apart
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(p)));
#else
  return __builtin_convertvector(read<vs>(p), vf);
#endif
}
vf load(const e4m3* p) {
#if defined(__AVX512F__)
  const vu code = (vu)_mm512_cvtepu8_epi32(read<__m128i>(p));
#else
  const vu code = __builtin_convertvector(read<vb>(p), vu);
#endif
  const vu size = (code & 0x7f) << 20;  // exponent and mantissa where a float has them
  const vf normal = (vf)(size + (120u << 23)), small = (vf)(size + (121u << 23)) - SMALLEST;
  return (vf)((vu)(normal < SMALLEST ? small : normal) | (code & 0x80) << 24);
}

void store(int8_t* p, vf x) {  // to nearest even, of at most 127
  const vs bytes = __builtin_convertvector((vi)(x + ROUND) - (vi)(vf{} + ROUND), vs);
  std::memcpy(p, &bytes, sizeof(bytes));
}
void store(e4m3* p, vf x) {  // to nearest even, of at most 448
  const vu bits = (vu)x & 0x7fffffff;
  const vu normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const vu small = (vu)((vf)bits * 512.f + ROUND) - (vu)(vf{} + ROUND);
  const vu code = ((vf)bits < SMALLEST ? small : normal) | ((vu)x >> 24 & 0x80);
  const vb bytes = __builtin_convertvector(code, vb);
  std::memcpy(p, &bytes, sizeof(bytes));
}

template <class T> void store(T* p, vf x, vf y) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
    std::memcpy(p, &both, sizeof(both));
    return;
  }
#endif
  store(p, x), store(p + W, y);
}

// out[d] = values[d] * scale
template <class V, class T> void widen_head(const V* values, float scale, int64_t D, T* out) {
  int64_t d = 0;
  for (; d + 2 * W <= D; d += 2 * W)
    store(out + d, load(values + d) * scale, load(values + d + W) * scale);
  for (; d + W <= D; d += W) store(out + d, load(values + d) * scale);
  if (d == D) return;
  V rest[W] = {};
  T wide[W];
  std::copy(values + d, values + D, rest);
  store(wide, load(rest) * scale);
  std::copy(wide, wide + D - d, out + d);
}

// x has room for whole vectors, which are filled up with zeros. Returns the scale.
template <class V> float quantize_head(float* x, int64_t D, V* values) {
  const int64_t width = (D + W - 1) / W * W;
  std::fill(x + D, x + width, 0.f);
  vf top = vf{} + 1e-20f;  // a head of zeros has a scale, too
  for (int64_t d = 0; d < width; d += W) {
    const vf y = (vf)((vu)load(x + d) & 0x7fffffff);
    top = y > top ? y : top;
  }
  float amax = top[0];
  for (int i = 1; i < W; i++) amax = std::max(amax, top[i]);
  const float scale = amax / LARGEST<V>;
  V last[W];
  for (int64_t d = 0; d < width; d += W) {
    vf y = load(x + d) / scale;
    y = y > LARGEST<V> ? vf{} + LARGEST<V> : y < -LARGEST<V> ? vf{} - LARGEST<V> : y;
    store(last, y);
    std::copy(last, last + std::min<int64_t>(W, D - d), values + d);
  }
  return scale;
}

// x = H x / sqrt(size), in pieces of the largest power of two that divides D.
inline void hadamard(float* x, int64_t D) {
  const int64_t size = D & -D;
  const float factor = 1 / std::sqrt(double(size));
  for (int64_t h = 1; h < size; h *= 2)
    for (int64_t i = 0; i < D; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b, x[j + h] = a - b;
      }
  for (int64_t d = 0; d < D; d++) x[d] *= factor;
}

}  // namespace
