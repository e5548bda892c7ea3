// x * sigmoid(gate) over heads, on a CPU: the twin of sigmoid_mul_ref.
//
// In:  x [T, H, D] contiguous, gates of the same shape, strided. Out: [T, H, D], contiguous.
// Invariant: the sigmoid is rounded to the tensor's dtype before it is multiplied, as in the
// reference, and an element's bits do not depend on where in the row it stands.
#include "simd.h"

namespace {

constexpr int64_t MIN_PARALLEL = 16384;  // elements that are worth waking threads for

template <class T> void head(T* out, const T* x, const T* gate, int64_t D) {
  for (int64_t i = 0; i < D; i += W) {
    const int n = D - i < W ? D - i : W;
    T gates[W] = {}, factors[W];
    std::memcpy(gates, gate + i, n * sizeof(T));
    store(factors, sigmoid(load(gates)));
    for (int j = 0; j < n; j++) narrow(widen(x[i + j]) * widen(factors[j]), out + i + j);
  }
}

}  // namespace

extern "C" void nanoinfer_sigmoid_mul(int is_bf16, void* out, const void* x, const void* gate,
                                      int64_t T, int64_t H, int64_t D, int64_t row_stride,
                                      int64_t head_stride, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
#pragma omp parallel for num_threads(threads) if (T * H * D > MIN_PARALLEL)
    for (int64_t i = 0; i < T * H; i++)
      head(typed + i * D, (const E*)x + i * D,
           (const E*)gate + i / H * row_stride + i % H * head_stride, D);
  };
  is_bf16 ? run((bf16*)out) : run((float*)out);
}
