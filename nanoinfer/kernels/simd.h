// Vectors of floats for all kernels, in the compiler's own vector types: one body serves AVX-512,
// AVX2 and Neon. bf16 is a float's upper half: widening is a shift, narrowing rounds to even.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
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
typedef int32_t vi __attribute__((vector_size(BYTES)));
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
void store(bf16* p, vf x) {  // to nearest even, of no NaN
  const vu bits = (vu)x + 0x7fff + (((vu)x >> 16) & 1);
  const vh halves = __builtin_convertvector(bits >> 16, vh);
  std::memcpy(p, &halves, sizeof(halves));
}

// A unit is 32 bits of values: one float, or two bf16. acc += the products of their values.
vf multiply_add(float, vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }

// Pairs of bf16 are multiplied as they are where that has twice the rate of fp32. Intel has the
// instruction, too, at half of it (build.py).
#if defined(__AVX512BF16__) && !defined(HAS_SLOW_PAIRS)
constexpr bool HAS_PAIRS = true;
vf multiply_add(bf16, vf acc, vu a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool HAS_PAIRS = false;
#endif

// What values of T are when they are multiplied.
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, bf16> && !HAS_PAIRS, float, T>;

float widen(float x) { return x; }
float widen(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  return read<float>(&bits);
}
template <class T> void to_operands(const T* x, int64_t n, Operand<T>* out) {
  for (int64_t i = 0; i < n; i++)
    if constexpr (std::is_same_v<T, Operand<T>>)
      out[i] = x[i];
    else
      out[i] = widen(x[i]);
}
void narrow(float x, float* p) { *p = x; }
void narrow(float x, bf16* p) {  // to nearest even; NaN stays NaN
  const uint32_t bits = read<uint32_t>(&x);
  *p = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

void narrow(vf x, float* p) { store(p, x); }
void narrow(vf x, bf16* p) {
  const vu bits = ((vu)x + 0x7fff + (((vu)x >> 16) & 1)) >> 16;
  const vh halves = __builtin_convertvector(x == x ? bits : vu{} + 0x7fc0, vh);
  std::memcpy(p, &halves, sizeof(halves));
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

template <int N = W, class V> float largest(V x) {  // the same; of no NaN
  if constexpr (N == 1) {
    return x[0];
  } else {
    typename Half<N>::type halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return largest<N / 2>(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

// sum(v[0]), sum(v[1]), ... of W vectors.
vf sums(const vf* v) {
#if defined(__AVX512F__)  // added while they are transposed: three instructions a sum
  __m512 quads[4];  // four vectors each: in every 128 bits their sums of that part
  for (int i = 0; i < 4; i++, v += 4) {
    const __m512 a = v[0], b = v[1], c = v[2], d = v[3];
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    quads[i] = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return (vf)fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
#else
  vf all;
  for (int i = 0; i < W; i++) all[i] = sum(v[i]);
  return all;
#endif
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

vf sigmoid(vf g) {  // the same
  const vf e = exp_of_negative(g < 0.f ? g : -g);
  return (g < 0.f ? e : vf{} + 1.f) / (1.f + e);
}

using Floats = std::unique_ptr<float[], decltype(&std::free)>;
Floats allocate(int64_t n) {  // not initialised, whole cache lines
  return Floats((float*)std::aligned_alloc(64, (n / 16 + 1) * 64), std::free);
}

// f(n) with n, from 1 to N, as a type.
template <int N, class F> void with_constant(int n, F f) {
  if (n == N) return f(std::integral_constant<int, N>{});
  if constexpr (N > 1) with_constant<N - 1>(n, f);
}

// f(group, first row): rows in groups of 8, 4, 2, 1, the size as a type.
template <int R = 8, class F> void in_groups(int rows, F f, int r = 0) {
  for (; rows - r >= R; r += R) f(std::integral_constant<int, R>{}, r);
  if constexpr (R > 1) in_groups<R / 2>(rows, f, r);
}

}  // namespace
