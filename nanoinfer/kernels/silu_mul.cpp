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
