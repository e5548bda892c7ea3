// What attention does with a tile of scores: products with keys, softmax, products with values.
//
// In:  queries, keys and values of one head, in units of 32 bits (simd.h) of operands. Out: scores,
//      then their powers, and sums of values. Who reads which keys is paged_attention.cpp's to say.
// Invariant: the arithmetic of a row depends on that row and its keys only.
//
// With many rows the lanes of a vector are rows ("tile"); with few, dimensions, then keys ("stream",
// "of_row").
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace {

constexpr int ROWS = 128, KEYS = 64;  // a tile of scores
constexpr int GROUP = 2 * W;          // of its rows, side by side: what is multiplied at a time
constexpr float LOG2E = 1.44269504f;

template <class O> constexpr int P = 4 / sizeof(O);  // operands in a unit
typedef uint32_t unit;

vu broadcast(const void* p) { return vu{} + read<unit>((const char*)p); }

// A query as stream_products reads it: as it is; or widened, of each 2 W dimensions the even ones
// first, which are the lower halves of a vector of units.
template <class T, class O> void arrange(const T* q, int64_t D, O* out) {
  if constexpr (std::is_same_v<T, O>) {
    std::copy(q, q + D, out);
  } else {
    for (int64_t d = 0; d < D; d++) out[d / (2 * W) * 2 * W + d % 2 * W + d / 2 % W] = widen(q[d]);
  }
}

// Products of R arranged queries [row][D] and a key; lanes are dimensions. sums: a vector for each
// row, apart by W of them.
template <int R, class O, class T>
void stream_products(const O* q, const T* k, int64_t D, vf* sums) {
  vf acc[R] = {};
  for (int64_t d = 0; d < D; d += W * 4 / sizeof(T)) {
    const vu x = read<vu>(k + d);
    for (int r = 0; r < R; r++) {
      const O* row = q + r * D + d;
      if constexpr (std::is_same_v<T, O>) {
        acc[r] = multiply_add(T(), acc[r], x, read<vu>(row));
      } else {
        acc[r] += (vf)(x << 16) * load(row);
        acc[r] += (vf)(x & 0xffff0000u) * load(row + W);
      }
    }
  }
  for (int r = 0; r < R; r++) sums[r * W] = acc[r];
}

// s [key][GROUP] of C vectors of rows: q is [D / P][GROUP] units. N keys at a time, up to KEYS.
template <int C, class O>
void tile_scores(const unit* q, const O* const* k, int n, int64_t D, float factor, float* s) {
  constexpr int N = ACCUMULATORS / 2;
  for (int key = 0; key < n; key += N) {
    vf acc[N][C] = {};
    for (int64_t d = 0; d < D; d += P<O>)
      for (int i = 0; i < N; i++) {
        const vu x = broadcast(k[key + i] + d);
        for (int c = 0; c < C; c++)
          acc[i][c] = multiply_add(O(), acc[i][c], read<vu>(q + d / P<O> * GROUP + c * W), x);
      }
    for (int i = 0; i < N; i++)
      for (int c = 0; c < C; c++) store(s + (key + i) * GROUP + c * W, acc[i][c] * factor);
  }
}

vu to_units(float, const vf* p) { return (vu)p[0]; }
vu to_units(bf16, const vf* p) {  // two values in each lane, to nearest even
  vu x[2];
  for (int i = 0; i < 2; i++) x[i] = (vu)p[i] + 0x7fff + (((vu)p[i] >> 16) & 1);
  return (x[0] >> 16) | (x[1] & 0xffff0000u);
}

// s of one vector of rows becomes p, in units of keys: [key / P][GROUP].
// m, l: maximum and sum so far; decay: what old sums are worth.
template <class O> void softmax(float* s, int n, float* m, float* l, float* decay) {
  vf top = load(m);
  for (int key = 0; key < n; key++) {
    const vf x = load(s + key * GROUP);
    top = x > top ? x : top;
  }
  const vf old = exp2(load(m) - top);
  vf total = load(l) * old;
  for (int key = 0; key < n; key += P<O>) {
    vf p[P<O>] = {};
    for (int i = 0; i < P<O> && key + i < n; i++) {
      p[i] = exp2(load(s + (key + i) * GROUP) - top);
      total += p[i];
    }
    const vu x = to_units(O(), p);
    std::memcpy(s + key / P<O> * GROUP, &x, sizeof(x));
  }
  store(m, top), store(l, total), store(decay, old);
}

// The same for one row whose scores lie side by side; so do its p then, as values.
template <class O> void softmax_of_row(float* s, int n, float* m, float* l, float* decay) {
  while (n % W != 0) s[n++] = -INFINITY;
  vf top = vf{} + *m;
  for (int key = 0; key < n; key += W) {
    const vf x = load(s + key);
    top = x > top ? x : top;
  }
  const float highest = largest(top);
  vf total = {};
  for (int key = 0; key < n; key += W) {
    const vf p = exp2(load(s + key) - highest);
    store((O*)s + key, p);
    total += p;
  }
  *decay = std::exp2(*m - highest);
  *l = *l * *decay + sum(total);
  *m = highest;
}

// Units of W dimensions of P keys.
template <class O> vu pair(const float* const* v, int64_t d) { return read<vu>(v[0] + d); }
template <class O> vu pair(const bf16* const* v, int64_t d) {
  if constexpr (P<O> == 1) return (vu)load(v[0] + d);
  return __builtin_convertvector(read<vh>(v[0] + d), vu) | (vu)load(v[1] + d);
}
template <class O> vu pair(const unit* const* v, int64_t d) {  // made before
  return read<vu>(v[0] + d);
}

// o = o * decay + p v for R rows and C vectors of dimensions, from d on. p: units, `row_step` and
// `key_step` apart; v: n rows of them, or as many as make units.
template <class O, int R, int C, class V>
void add_values(const unit* p, int64_t row_step, int64_t key_step, const V* const* v, int n,
                const float* decay, float* o, int64_t d, int64_t width) {
  constexpr int STEP = std::is_same_v<V, unit> ? 1 : P<O>;
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * width + d + c * W) * decay[r];
  for (int i = 0; i < (n + P<O> - 1) / P<O>; i++)
    for (int c = 0; c < C; c++) {
      const vu x = pair<O>(v + i * STEP, d + c * W);
      for (int r = 0; r < R; r++)
        acc[r][c] = multiply_add(O(), acc[r][c], x, broadcast(p + i * key_step + r * row_step));
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(o + r * width + d + c * W, acc[r][c]);
}

template <class O, int R, class V>
void add_all_values(const unit* p, int64_t row_step, int64_t key_step, const V* const* v, int n,
                    const float* decay, float* o, int64_t width) {
  constexpr int C = std::min(8, ACCUMULATORS / R);
  int64_t d = 0;
  for (; d + C * W <= width; d += C * W)
    add_values<O, R, C>(p, row_step, key_step, v, n, decay, o, d, width);
  for (; d < width; d += W) add_values<O, R, 1>(p, row_step, key_step, v, n, decay, o, d, width);
}

}  // namespace
