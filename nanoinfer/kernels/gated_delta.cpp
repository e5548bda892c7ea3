// The gated delta rule token by token, on a CPU: the twin of gated_delta_ref.
//
// In:  q, k, v, a, b of T tokens, a state for each sequence and value head. Out: T x HV rows of DV,
//      the states after each sequence's last token.
// Invariant: the arithmetic of a head depends on its own sequence only. A sequence may read and
// write the same slot; source 0 is zeros, whatever it holds.
//
// The columns of a state never meet: column j holds what dimension j of the values was. An item is
// a (sequence, head, COLUMNS columns); its part of the state, [DK][COLUMNS], lies in the first cache
// while all tokens pass over it, and moves from and to memory once:
//
//     answer = k S, o = q S       one pass: read S once for both
//     u = beta (v - e^g answer)
//     o = e^g o + (q k) u         what q is answered by after the write, without reading it
//     S = e^g S + k u             a second pass, which finds S in the cache
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

constexpr int VECTORS = 4;
constexpr int64_t COLUMNS = VECTORS * W;
constexpr int64_t TOKENS = 32;  // that are prepared at a time
constexpr float EPS = 1e-6f;

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// What a token does to a head, in fp32.
struct Token { float decay, beta, qk; };

template <class T> struct Delta {
  T* out;
  float* state;
  const T *q, *k, *v, *a, *b;
  const float *A_log, *dt_bias;
  const int32_t *cu_seqlens_q, *sources, *slots;
  int64_t S, num_tokens, HK, HV, DK, DV, num_slots;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;

  int64_t find_invalid() const {
    for (int64_t s = 0; s < S; s++) {
      const bool ok = sources[s] >= 0 && sources[s] < num_slots && slots[s] >= 0 &&
                      slots[s] < num_slots && cu_seqlens_q[s] <= cu_seqlens_q[s + 1] &&
                      cu_seqlens_q[0] >= 0 && cu_seqlens_q[s + 1] <= num_tokens;
      if (!ok) return s;
    }
    return -1;
  }

  // x of length 1, times `scale`.
  void normalise(const T* x, float scale, float* to) const {
    float total = 0;
    for (int64_t i = 0; i < DK; i++) total += widen(x[i]) * widen(x[i]);
    const float factor = scale / std::sqrt(total + EPS);
    for (int64_t i = 0; i < DK; i++) to[i] = widen(x[i]) * factor;
  }

  Token prepare(int64_t t, int64_t head, float* query, float* key) const {
    const int64_t shared = head / (HV / HK);
    normalise(q + t * q_stride + shared * DK, 1 / std::sqrt(float(DK)), query);
    normalise(k + t * k_stride + shared * DK, 1, key);
    Token token{};
    const float step = softplus(widen(a[t * a_stride + head]) + dt_bias[head]);
    token.decay = std::exp(-std::exp(A_log[head]) * step);
    token.beta = 1 / (1 + std::exp(-widen(b[t * b_stride + head])));
    for (int64_t i = 0; i < DK; i++) token.qk += query[i] * key[i];
    return token;
  }

  // One token over a part of the state, in place.
  void step(const Token& token, const float* query, const float* key, const float* value,
            float* part, float* answer) const {
    vf asked[VECTORS] = {}, found[VECTORS] = {}, u[VECTORS];
    for (int64_t i = 0; i < DK; i++)
      for (int c = 0; c < VECTORS; c++) {
        const vf x = load(part + i * COLUMNS + c * W);
        found[c] += x * key[i], asked[c] += x * query[i];
      }
    for (int c = 0; c < VECTORS; c++) {
      u[c] = (load(value + c * W) - found[c] * token.decay) * token.beta;
      store(answer + c * W, asked[c] * token.decay + u[c] * token.qk);
    }
    for (int64_t i = 0; i < DK; i++)
      for (int c = 0; c < VECTORS; c++) {
        float* x = part + i * COLUMNS + c * W;
        store(x, load(x) * token.decay + u[c] * key[i]);
      }
  }

  // All tokens of sequence s over columns `first` .. of a head. scratch: [part | queries | keys].
  void run(int64_t s, int64_t head, int64_t first, float* scratch) const {
    const int64_t n = std::min(COLUMNS, DV - first), begin = cu_seqlens_q[s];
    const int64_t end = cu_seqlens_q[s + 1];
    if (begin == end) return;
    float *part = scratch, *queries = part + DK * COLUMNS, *keys = queries + TOKENS * DK;
    const float* from = state + (sources[s] * HV + head) * DK * DV + first;
    float* to = state + (slots[s] * HV + head) * DK * DV + first;
    if (sources[s] == 0 || n < COLUMNS) std::fill(part, part + DK * COLUMNS, 0.f);
    for (int64_t i = 0; i < DK && sources[s] != 0; i++)
      std::copy(from + i * DV, from + i * DV + n, part + i * COLUMNS);
    Token tokens[TOKENS];
    float value[COLUMNS] = {}, answer[COLUMNS];
    for (int64_t t = begin; t < end; t++) {
      const int64_t i = (t - begin) % TOKENS;
      if (i == 0)
        for (int64_t j = 0; j < std::min(TOKENS, end - t); j++)
          tokens[j] = prepare(t + j, head, queries + j * DK, keys + j * DK);
      const T* x = v + t * v_stride + head * DV + first;
      for (int64_t c = 0; c < n; c++) value[c] = widen(x[c]);
      step(tokens[i], queries + i * DK, keys + i * DK, value, part, answer);
      for (int64_t c = 0; c < n; c++) narrow(answer[c], out + (t * HV + head) * DV + first + c);
    }
    for (int64_t i = 0; i < DK; i++)
      std::copy(part + i * COLUMNS, part + i * COLUMNS + n, to + i * DV);
  }
};

}  // namespace

// Returns -1, or the first sequence whose slots or tokens are out of bounds.
extern "C" int64_t nanoinfer_gated_delta(
    int is_bf16, void* out, float* state, const void* q, const void* k, const void* v,
    const void* a, const void* b, const float* A_log, const float* dt_bias,
    const int32_t* cu_seqlens_q, const int32_t* sources, const int32_t* slots, int64_t S, int64_t T,
    int64_t HK, int64_t HV, int64_t DK, int64_t DV, int64_t num_slots, int64_t q_stride,
    int64_t k_stride, int64_t v_stride, int64_t a_stride, int64_t b_stride, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    const Delta<E> delta{
        typed, state, (const E*)q, (const E*)k, (const E*)v, (const E*)a, (const E*)b, A_log,
        dt_bias, cu_seqlens_q, sources, slots, S, T, HK, HV, DK, DV, num_slots, q_stride,
        k_stride, v_stride, a_stride, b_stride};
    const int64_t invalid = delta.find_invalid();
    if (invalid >= 0) return invalid;
    const int64_t parts = (DV + COLUMNS - 1) / COLUMNS, count = S * HV * parts;
#pragma omp parallel num_threads(threads) if (count > 1)
    {
      std::vector<float> scratch(DK * (COLUMNS + 2 * TOKENS));
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++)
        delta.run(i / parts / HV, i / parts % HV, i % parts * COLUMNS, scratch.data());
    }
    return int64_t(-1);
  };
  return is_bf16 ? run((bf16*)out) : run((float*)out);
}
