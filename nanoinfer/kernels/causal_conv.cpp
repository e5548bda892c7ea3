// Causal convolution with silu, on a CPU: the twin of causal_conv_ref.
//
// In:  T rows of C channels, K taps [K, C] in fp32, the K - 1 rows before each sequence's first.
// Out: T rows; the last K - 1 rows of each sequence, in its slot.
// Invariant: a sequence may read and write the same slot; source 0 is zeros, whatever it holds.
//
// Channels never meet, so that lanes are channels and threads share them out. The kept rows are
// copied in front of the chunk's first ones only where the chunk is shorter than the taps reach.
#include <algorithm>
#include <vector>

#include "places.h"
#include "simd.h"

namespace {

constexpr int64_t CHANNELS = 8 * W;  // of an item

template <class T> struct Conv {
  T *y, *state;
  const T* x;
  const float* weight;
  const int32_t *cu_seqlens_q, *sources, *slots;
  int64_t C, K, stride;

  // Channels c .. c + n of sequence s. kept: K - 1 rows of n, a copy: the slot may be written.
  void run(int64_t s, int64_t c, int64_t n, T* kept) const {
    const int64_t first = cu_seqlens_q[s], last = cu_seqlens_q[s + 1], K1 = K - 1;
    if (first == last) return;
    for (int64_t j = 0; j < K1; j++) {
      const T* row = state + (sources[s] * K1 + j) * C + c;
      if (sources[s] == 0)
        std::fill(kept + j * n, kept + (j + 1) * n, T(0));
      else
        std::copy(row, row + n, kept + j * n);
    }
    const auto row_at = [&](int64_t t) {  // row t of the sequence, its past too
      return t < 0 ? kept + (K1 + t) * n : x + (first + t) * stride + c;
    };
    std::vector<const T*> rows(K);
    for (int64_t t = 0; t < last - first; t++) {
      for (int64_t j = 0; j < K; j++) rows[j] = row_at(t - K1 + j);
      mix(rows.data(), weight + c, n, y + (first + t) * C + c);
    }
    for (int64_t j = 0; j < K1; j++) {
      const T* row = row_at(last - first - K1 + j);
      std::copy(row, row + n, state + (slots[s] * K1 + j) * C + c);
    }
  }

  // out = silu(sum of rows, each times its taps); the sum is rounded, as the reference's is.
  void mix(const T* const* rows, const float* taps, int64_t n, T* out) const {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      vf sum = {};
      for (int64_t j = 0; j < K; j++) sum += load(taps + j * C + i) * load(rows[j] + i);
      T rounded[W];
      store(rounded, sum);
      store(out + i, silu(load(rounded)));
    }
    for (; i < n; i++) {
      float sum = 0;
      for (int64_t j = 0; j < K; j++) sum += taps[j * C + i] * widen(rows[j][i]);
      narrow(sum, out + i);
      narrow(silu(vf{} + widen(out[i]))[0], out + i);
    }
  }
};

}  // namespace

// Returns -1, or the first sequence whose slots or tokens are out of bounds.
extern "C" int64_t nanoinfer_causal_conv(int is_bf16, void* y, void* state, const void* x,
                                         const float* weight, const int32_t* cu_seqlens_q,
                                         const int32_t* sources, const int32_t* slots, int64_t S,
                                         int64_t T, int64_t C, int64_t K, int64_t num_slots,
                                         int64_t stride, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    const Conv<E> conv{typed,   (E*)state, (const E*)x, weight, cu_seqlens_q,
                       sources, slots,     C,           K,      stride};
    const int64_t invalid = first_invalid(cu_seqlens_q, sources, slots, S, T, num_slots);
    if (invalid >= 0) return invalid;
    const int64_t parts = (C + CHANNELS - 1) / CHANNELS;
#pragma omp parallel num_threads(threads) if (S * parts > 1)
    {
      std::vector<E> kept(K * CHANNELS);
#pragma omp for
      for (int64_t i = 0; i < S * parts; i++) {
        const int64_t c = i % parts * CHANNELS;
        conv.run(i / parts, c, std::min(CHANNELS, C - c), kept.data());
      }
    }
    return int64_t(-1);
  };
  return is_bf16 ? run((bf16*)y) : run((float*)y);
}
