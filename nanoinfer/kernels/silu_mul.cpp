// silu(gate) * up over rows, on a CPU: the twin of silu_mul_ref.
//
// In:  T rows of [gate | up], N each. Out: T rows of N, contiguous.
// Invariant: silu(gate) is rounded to the tensor's dtype before it is multiplied, as in the
// reference, and an element's bits do not depend on where in the row it stands.
#include <algorithm>

#include "simd.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for
constexpr int64_t CHUNK = 16 * W;

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

template <class T> void chunk(T* __restrict out, const T* gate, const T* up) {
  float wide[CHUNK];
  for (int i = 0; i < CHUNK; i += W) store(wide + i, silu(load(gate + i)));
  for (int i = 0; i < CHUNK; i++) {
    T rounded;
    narrow(wide[i], &rounded);
    narrow(widen(rounded) * widen(up[i]), out + i);
  }
}

}  // namespace

extern "C" void nanoinfer_silu_mul(int is_bf16, void* out, const void* gate_up, int64_t T,
                                   int64_t N, int64_t stride, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
#pragma omp parallel for num_threads(threads) if (T * N > MIN_PARALLEL)
    for (int64_t t = 0; t < T; t++) {
      const E *gate = (const E*)gate_up + t * stride, *up = gate + N;
      E* row = typed + t * N;
      int64_t i = 0;
      for (; i + CHUNK <= N; i += CHUNK) chunk(row + i, gate + i, up + i);
      if (i == N) continue;
      E rest[3][CHUNK] = {};  // a part of a chunk goes through a whole one
      std::copy(gate + i, gate + N, rest[1]);
      std::copy(up + i, up + N, rest[2]);
      chunk(rest[0], rest[1], rest[2]);
      std::copy(rest[0], rest[0] + (N - i), row + i);
    }
  };
  is_bf16 ? run((bf16*)out) : run((float*)out);
}
