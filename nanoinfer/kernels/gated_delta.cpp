// The gated delta rule token by token, on a CPU: the twin of gated_delta_ref.
//
// In:  q, k, v, a, b of T tokens, a state for each sequence and value head. Out: T x HV rows of DV,
//      the states after each sequence's last token.
// Invariant: the arithmetic of a head depends on its own sequence only. A sequence may read and
// write the same slot; source 0 is zeros, whatever it holds.
//
// The columns of a state never meet: column j holds what dimension j of the values was. So a few
// columns of it, which fit the first cache, can meet one token after the other:
//
//     answer = k S, o = q S       one pass: read S once for both
//     u = beta (v - e^g answer)
//     o = e^g o + (q k) u         what q is answered by after the write, without reading it
//     S = e^g S + k u             a second pass, which finds S in the cache
//
// For a single token, as in decoding, memory is the limit: a row of S is read as it lies, and both
// passes work in place.
#include <algorithm>
#include <cmath>

#include "places.h"
#include "simd.h"

namespace {

constexpr int WIDE = ACCUMULATORS / 2;  // vectors of columns of one token
constexpr int NARROW = 2;               // of many tokens: a part of the state fits the first cache
constexpr int64_t COLUMNS = NARROW * W;
constexpr int64_t TOKENS = 32;  // that are prepared at a time
constexpr float EPS = 1e-6f;

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

float dot(const float* x, const float* y, int64_t N) {
  vf acc[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= N; i += 2 * W)
    for (int j = 0; j < 2; j++) acc[j] += load(x + i + j * W) * load(y + i + j * W);
  float total = sum(acc[0] + acc[1]);
  for (; i < N; i++) total += x[i] * y[i];
  return total;
}

// What a token does to a head, in fp32.
struct Token { float decay, beta, qk; };

// One token over V vectors of columns of a state, whose DK rows lie `stride` apart.
template <int V>
void step(const Token& token, const float* query, const float* key, const float* value,
          const float* from, float* to, int64_t stride, int64_t DK, float* answer) {
  vf asked[V] = {}, found[V] = {}, u[V];
  for (int64_t i = 0; i < DK; i++)
    for (int c = 0; c < V; c++) {
      const vf x = load(from + i * stride + c * W);
      found[c] += x * key[i], asked[c] += x * query[i];
    }
  for (int c = 0; c < V; c++) {
    u[c] = (load(value + c * W) - found[c] * token.decay) * token.beta;
    store(answer + c * W, asked[c] * token.decay + u[c] * token.qk);
  }
  for (int64_t i = 0; i < DK; i++)
    for (int c = 0; c < V; c++)
      store(to + i * stride + c * W,
            load(from + i * stride + c * W) * token.decay + u[c] * key[i]);
}

template <class T> struct Delta {
  T* out;
  float* state;
  const T *q, *k, *v, *a, *b;
  const float *A_log, *dt_bias;
  const int32_t *cu_seqlens_q, *sources, *slots;
  int64_t HK, HV, DK, DV;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;

  // x of length 1, times `scale`.
  void normalise(const T* x, float scale, float* to) const {
    std::transform(x, x + DK, to, [](T value) { return widen(value); });
    const float factor = scale / std::sqrt(dot(to, to, DK) + EPS);
    for (int64_t i = 0; i < DK; i++) to[i] *= factor;
  }

  Token prepare(int64_t t, int64_t head, float rate, float* query, float* key) const {
    const int64_t shared = head / (HV / HK);
    normalise(q + t * q_stride + shared * DK, 1 / std::sqrt(float(DK)), query);
    normalise(k + t * k_stride + shared * DK, 1, key);
    const float step = softplus(widen(a[t * a_stride + head]) + dt_bias[head]);
    const float beta = 1 / (1 + std::exp(-widen(b[t * b_stride + head])));
    return {std::exp(-rate * step), beta, dot(query, key, DK)};
  }

  // Columns first .. first + n of one token's values, and of its answers.
  void read_value(int64_t t, int64_t head, int64_t first, int64_t n, float* value) const {
    const T* x = v + t * v_stride + head * DV + first;
    std::transform(x, x + n, value, [](T one) { return widen(one); });
  }
  void write_answer(int64_t t, int64_t head, int64_t first, int64_t n, const float* answer) const {
    T* y = out + (t * HV + head) * DV + first;
    for (int64_t c = 0; c < n; c++) narrow(answer[c], y + c);
  }

  // Some columns of a state: `from` (null: zeros) `to`, by way of `part`.
  void run_part(const Token* tokens, int64_t t, int64_t count, int64_t head, int64_t first,
                const float* from, float* to, const float* queries, const float* keys,
                float* part) const {
    const int64_t n = std::min(COLUMNS, DV - first);
    float value[COLUMNS] = {}, answer[COLUMNS];
    if (!from || n < COLUMNS) std::fill(part, part + DK * COLUMNS, 0.f);
    for (int64_t i = 0; from && i < DK; i++)
      std::copy(from + i * DV + first, from + i * DV + first + n, part + i * COLUMNS);
    for (int64_t j = 0; j < count; j++) {
      read_value(t + j, head, first, n, value);
      step<NARROW>(tokens[j], queries + j * DK, keys + j * DK, value, part, part, COLUMNS, DK,
                   answer);
      write_answer(t + j, head, first, n, answer);
    }
    for (int64_t i = 0; i < DK; i++)
      std::copy(part + i * COLUMNS, part + i * COLUMNS + n, to + i * DV + first);
  }

  // All tokens of a head of sequence s. scratch: [part | queries | keys], in whole lines.
  void run(int64_t s, int64_t head, float* scratch) const {
    float *part = scratch, *queries = part + DK * COLUMNS, *keys = queries + TOKENS * DK;
    const int64_t size = DK * DV, end = cu_seqlens_q[s + 1];
    const float* from = sources[s] ? state + (sources[s] * HV + head) * size : nullptr;
    float* to = state + (slots[s] * HV + head) * size;
    const float rate = std::exp(A_log[head]);
    for (int64_t t = cu_seqlens_q[s], count; t < end; t += count, from = to) {
      Token tokens[TOKENS];
      count = std::min(TOKENS, end - t);
      for (int64_t j = 0; j < count; j++)
        tokens[j] = prepare(t + j, head, rate, queries + j * DK, keys + j * DK);
      int64_t first = 0;
      for (; count == 1 && from && first + WIDE * W <= DV; first += WIDE * W) {
        float value[WIDE * W], answer[WIDE * W];
        read_value(t, head, first, WIDE * W, value);
        step<WIDE>(tokens[0], queries, keys, value, from + first, to + first, DV, DK, answer);
        write_answer(t, head, first, WIDE * W, answer);
      }
      for (; first < DV; first += COLUMNS)
        run_part(tokens, t, count, head, first, from, to, queries, keys, part);
    }
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
        dt_bias, cu_seqlens_q, sources, slots, HK, HV, DK, DV, q_stride, k_stride,
        v_stride, a_stride, b_stride};
    const int64_t invalid = first_invalid(cu_seqlens_q, sources, slots, S, T, num_slots);
    if (invalid >= 0) return invalid;
#pragma omp parallel num_threads(threads) if (S * HV > 1)
    {
      const Floats scratch = allocate(DK * (2 * TOKENS + COLUMNS));
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < S * HV; i++) delta.run(i / HV, i % HV, scratch.get());
    }
    return int64_t(-1);
  };
  return is_bf16 ? run((bf16*)out) : run((float*)out);
}
