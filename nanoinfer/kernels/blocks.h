// Products of rows with a weight that lies in blocks: what linear.cpp and moe.cpp share.
//
// Few rows read W as fast as memory delivers it. For that the order in memory is the order of use:
//
//     W [N, K]  ->  blocks [N / 64][K / P][64][P],   P values of a row fill 32 bits: 2 bf16, 4 int8
//
//     a step, 256 bytes:   n0: k0 k1 | n1: k0 k1 | ... | n63: k0 k1
//
// One vector of a step times the same P values of x in every lane adds P products to each of its
// lanes, in one instruction where the CPU has a fast one (vdpbf16ps, vpdpbusd). Elsewhere bf16 is
// multiplied as fp32: rows of x are widened before, a vector of W is split into its even and its odd
// values, which costs a tile two instructions; for many tiles it is done once, before them.
//
// A tile keeps R rows x C vectors of sums in registers, so that a vector of W serves R rows and a
// value of x serves C vectors; more rows are more tiles, which find the block in cache.
#pragma once
#include <algorithm>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 64;        // rows of W
constexpr int64_t HALF = BLOCK / 2;  // what threads share out
constexpr int64_t CHUNK = 256;       // steps at a time: as much of a block as the cache holds
constexpr int64_t LINE = 16;         // units in a cache line
constexpr int64_t LINES = BLOCK / LINE;           // of a step
constexpr int64_t PANEL = HAS_PAIRS ? 512 : 256;  // rows of x at a time: as many as the cache holds

// How many vectors of operands a vector of W's units is split into: 2 where bf16 is widened.
template <class T> constexpr int SPLIT = sizeof(Operand<T>) / sizeof(T);
template <class T> constexpr int64_t SPLIT_UNITS = SPLIT<T> == 2 ? 2 * CHUNK * BLOCK : 0;
constexpr int64_t MANY_ROWS = 192;  // of x: from here on a chunk is split before it is multiplied

// Vectors of sums of a tile, which leave registers for the operands; its rows at most; and how many
// vectors it is wide then, and when it has fewer.
constexpr int SUMS = BYTES == 32 ? 12 : 24;
constexpr bool HAS_FEW = BYTES == 32;  // registers
template <class T>
constexpr int R_MAX = SUMS / (HAS_FEW || (BYTES == 64 && SPLIT<T> == 2) ? 2 : 4);
constexpr int width(int rows) {
  int vectors = 2;
  while (2 * vectors * W <= BLOCK && 2 * vectors * rows <= SUMS) vectors *= 2;
  return vectors;
}

// Four int8 of W, four uint8 of x.
vi multiply_add(int8_t, vi acc, vu w, vu x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#else
  for (int i = 0; i < 4; i++)
    acc += ((vi)(w << (24 - 8 * i)) >> 24) * (vi)(x >> (8 * i) & 255);
  return acc;
#endif
}

// sums [R][BLOCK] += R rows of x (rows apart by `stride` bytes) times C vectors of n steps.
// Meanwhile `lines` cache lines a step are fetched from `next` on.
template <int R, int C, class T, class V, class S>
void tile(const char* x, int64_t stride, const uint32_t* w, int64_t n, S* sums,
          const uint32_t* next, int64_t lines) {
  V acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = read<V>(sums + r * BLOCK + c * W);
  const char* rows[] = {x, x + 4 * stride, x + 8 * stride};  // a register for each row is too many
  for (int64_t k = 0; k < n; k++) {
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(next + (k * lines + i) * LINE, 0, 2);
    for (int half = 0; half < SPLIT<T>; half++) {
      vu weights[C];
      for (int c = 0; c < C; c++) {
        weights[c] = read<vu>(w + k * BLOCK + c * W);
        if (SPLIT<T> == 2) weights[c] = half == 0 ? weights[c] << 16 : weights[c] & 0xffff0000u;
      }
      for (int r = 0; r < R; r++) {
        const vu values = vu{} + read<uint32_t>(rows[r / 4] + r % 4 * stride);
        for (int c = 0; c < C; c++)
          acc[r][c] = multiply_add(Operand<T>(), acc[r][c], weights[c], values);
      }
      for (const char*& row : rows) row += 4;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) std::memcpy(sums + r * BLOCK + c * W, &acc[r][c], BYTES);
}

struct Shape { int64_t M, N, K, stride; };  // stride: between rows of x, in bytes

// sums [M][BLOCK] += rows of x times `columns` columns of n steps, from w on. Each tile fetches its
// share of `all` cache lines a step, from `next` on.
template <class T, class V, class S>
void multiply_steps(const char* x, const Shape& s, const uint32_t* w, int64_t n, int64_t columns,
                    S* sums, const uint32_t* next, int64_t all) {
  const int64_t tiles = (s.M + R_MAX<T> - 1) / R_MAX<T>;
  int64_t fetched = 0;
  for (int64_t t = 0; t < tiles; t++) {  // of nearly equal height
    const int64_t m = t * s.M / tiles, rows = (t + 1) * s.M / tiles - m;
    with_constant<R_MAX<T>>(rows, [&](auto height) {
      constexpr int C = width(height);
      const int64_t passes = tiles * ((columns + C * W - 1) / (C * W));
      for (int64_t c = 0; c < columns; c += C * W) {
        const int64_t lines = std::min((all + passes - 1) / passes, all - fetched);
        const bool is_whole = columns - c >= C * W;
        const auto run = is_whole ? tile<height, C, T, V, S>
                                  : tile<height, std::min<int>(C, HALF / W), T, V, S>;
        run(x + m * s.stride, s.stride, w + c, n, sums + m * BLOCK + c,
            next + fetched * n * LINE, lines);
        fetched += lines;
      }
    });
  }
}

// `columns` columns of n steps of bf16 -> 2 n steps of fp32.
void split_steps(const uint32_t* w, int64_t n, int64_t columns, uint32_t* out) {
  for (int64_t k = 0; k < n; k++)
    for (int64_t c = 0; c < columns; c += W) {
      const vu x = read<vu>(w + k * BLOCK + c), parts[2] = {x << 16, x & 0xffff0000u};
      for (int i = 0; i < 2; i++) std::memcpy(out + (2 * k + i) * BLOCK + c, &parts[i], BYTES);
    }
}

// sums [M][BLOCK] of `columns` rows of W, which is of T, from row n on. own: SPLIT_UNITS<T>.
template <class T, class V, class S>
void multiply(const char* x, const Shape& s, const uint32_t* blocks, int64_t n, int64_t columns,
              S* sums, uint32_t* own) {
  const int64_t steps = s.K * sizeof(T) / 4;
  const uint32_t* w = blocks + n / BLOCK * steps * BLOCK + n % BLOCK;
  std::fill(sums, sums + s.M * BLOCK, S(0));
  for (int64_t k = 0; k < steps; k += CHUNK, x += 4 * SPLIT<T> * CHUNK, w += CHUNK * BLOCK) {
    const int64_t count = std::min(CHUNK, steps - k);
    const uint32_t* next = w + count * BLOCK;
    if constexpr (SPLIT<T> == 2)
      if (s.M >= MANY_ROWS) {
        split_steps(w, count, columns, own);
        multiply_steps<float, V>(x, s, own, 2 * count, columns, sums, next, LINES / 2);
        continue;
      }
    multiply_steps<T, V>(x, s, w, count, columns, sums, next, LINES);
  }
}

}  // namespace
