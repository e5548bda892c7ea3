// Vectors of floats for all kernels, in the compiler's own vector types: one body serves AVX-512,
// AVX2 and Neon. bf16 is a float's upper half: widening is a shift, narrowing rounds to even.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// A vector is one register of floats; as many sums as ACCUMULATORS leave registers for operands.
#if defined(__AVX512F__)
constexpr int BYTES = 64, ACCUMULATORS = 16;
#elif defined(__AVX__)
constexpr int BYTES = 32, ACCUMULATORS = 8;
#else
constexpr int BYTES = 16, ACCUMULATORS = 16;
#endif
typedef float vf __attribute__((vector_size(BYTES)));
typedef uint32_t vu __attribute__((vector_size(BYTES)));
typedef uint16_t vh __attribute__((vector_size(BYTES / 2)));
typedef uint16_t bf16;

constexpr int W = BYTES / 4;  // lanes

template <class To, class From> To read(const From* p) {
  To x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
vf load(const float* p) { return read<vf>(p); }
#if defined(__AVX512F__)  // GCC 12 makes seven instructions of the generic form
vf load(const bf16* p) { return (vf)((vu)_mm512_cvtepu16_epi32(read<__m256i>(p)) << 16); }
#else
vf load(const bf16* p) { return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16); }
#endif
void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }

float widen(float x) { return x; }
float widen(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  return read<float>(&bits);
}
void narrow(float x, float* p) { *p = x; }
void narrow(float x, bf16* p) {  // to nearest even; NaN stays NaN
  const uint32_t bits = read<uint32_t>(&x);
  *p = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

template <int N> struct Half { typedef float type __attribute__((vector_size(2 * N))); };

template <int N = W, class V> float sum(V x) {  // the halves are added until one lane is left
  if constexpr (N == 1) {
    return x[0];
  } else {
    typename Half<N>::type halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return sum<N / 2>(halves[0] + halves[1]);
  }
}

vf exp2(vf x) {  // for x <= 0, relative error about 2e-7; 2^-inf is 0, NaN stays NaN
  const vf y = x < -126.f ? vf{} - 126.f : x;
  const vf shifted = y + 12582912.f;        // 1.5 * 2^23: its low bits are y's nearest integer
  const vf f = y - (shifted - 12582912.f);  // [-0.5, 0.5]
  vf p = vf{} + 1.540353e-4f;               // Taylor: ln(2)^k / k!
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    p = p * f + c;
  const vf power = (vf)(((vu)shifted + 127) << 23);
  return x < -126.f ? vf{} : p * power;
}

// e^x for x <= 0, relative error about 3e-7; 0 below -87. x = n ln(2) + r, ln(2) in two parts of
// which n times the first is exact: x log2(e) rounded alone would lose |x| * 1e-7.
vf exp_of_negative(vf x) {
  const vf y = x < -87.f ? vf{} - 87.f : x;
  const vf shifted = y * 1.44269504f + 12582912.f;  // its low bits are the integer n, see exp2
  const vf n = shifted - 12582912.f;
  const vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  const vf power = (vf)(((vu)shifted + 127) << 23);
  return x < -87.f ? vf{} : exp2(r * 1.44269504f) * power;  // |r| is small: any sign will do
}

// g / (1 + e^-g), where e^-|g| alone is computed: it never overflows.
vf silu(vf g) {
  const vf e = exp_of_negative(g < 0.f ? g : -g);
  return (g < 0.f ? g * e : g) / (1.f + e);
}

// f(group, first row): rows in groups of 8, 4, 2, 1, the size as a type.
template <int R = 8, class F> void in_groups(int rows, F f, int r = 0) {
  for (; rows - r >= R; r += R) f(std::integral_constant<int, R>{}, r);
  if constexpr (R > 1) in_groups<R / 2>(rows, f, r);
}

}  // namespace
