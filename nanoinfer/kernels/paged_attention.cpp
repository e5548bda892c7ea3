// Attention over a paged KV cache, on a CPU: the twin of paged_attention_ref.
//
// In:  q, the paged caches (read in place), block tables, lengths. Out: one row for each row of q.
// Invariant: the arithmetic of a row depends on its own sequence only, never on its neighbours in
// the batch nor on the number of threads: tiles and splits are cut by fixed sizes.
//
// The work is cut into items: (sequence, kv head, up to ROWS query rows, a range of keys). A row is
// a (token, query head) pair; all query heads of one kv head are folded into the rows, so that a
// key is read once for all of them. An item walks over its keys, KEYS at a time:
//
//     s[key][row] = q[row] . k[key]            scores, in units of log2
//     p[key][row] = 2^(s - max so far)         online softmax, as in FlashAttention
//     o[row]      = o[row] * decay + sum over keys of p[key][row] * v[key]
//
// With many rows, a tile of keys is widened to fp32 once and used for all of them; the lanes of a
// vector are rows (the queries are transposed once, the keys never), so that neither scores nor
// softmax have a horizontal step. With few rows, as in decoding, bandwidth is what counts: keys and
// values go straight from the cache into registers, and the lanes are head dimensions, then keys.
//
// Shapes: T tokens, S sequences, H query heads, KV kv heads, G = H / KV, D head dim (width: D
// rounded up to whole vectors), M blocks in a row of the table, B tokens in a block.
//
//     a sequence of 10 tokens, B = 4, M = 5
//     its row of block_tables:  [   7   |   3   |   9   |   0   |   0   ]
//     positions in those blocks: 0 1 2 3 4 5 6 7 8 9 . .                     "." is never read
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

namespace {

constexpr int ROWS = 64, KEYS = 64;  // a tile of scores
constexpr int SPLIT = 256;           // keys of an item, if one tile holds all rows of its sequence
constexpr int STREAM_ROWS = 4;       // up to here keys are not worth widening
constexpr int STREAM_KEYS = 16;      // keys prefetched at a time: a CPU tracks only so many misses

// How scores lie: in a tile a vector holds rows, for few rows it holds keys.
struct Tile { static constexpr int64_t row_step = 1, key_step = ROWS; };
struct Stream { static constexpr int64_t row_step = KEYS, key_step = 1; };

// s of R rows: q is [row][width], keys come from the cache.
template <int R, class T>
void stream_scores(const float* q, const T* const* k, int n, int64_t width, float* s) {
  for (int key = 0; key < n; key++) {
    vf acc[R] = {};
    for (int64_t d = 0; d < width; d += W) {
      const vf x = load(k[key] + d);
      for (int r = 0; r < R; r++) acc[r] += x * load(q + r * width + d);
    }
    for (int r = 0; r < R; r++) s[r * KEYS + key] = sum(acc[r]);
  }
}

// s of C vectors of rows: q is [dim][ROWS], k is [key][width].
template <int C> void tile_scores(const float* q, const float* k, int n, int64_t width, float* s) {
  constexpr int N = ACCUMULATORS / 2;
  for (int key = 0; key < n; key += N, k += N * width) {
    vf acc[N][C] = {};
    for (int64_t d = 0; d < width; d++)
      for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] += load(q + d * ROWS + c * W) * k[i * width + d];
    for (int i = 0; i < N; i++)
      for (int c = 0; c < C; c++) store(s + (key + i) * ROWS + c * W, acc[i][c]);
  }
}

// s of one vector of rows becomes p; m, l: maximum and sum so far; decay: what old sums are worth.
void softmax(float* s, int n, float* m, float* l, float* decay) {
  vf top = load(m);
  for (int key = 0; key < n; key++) {
    const vf x = load(s + key * ROWS);
    top = x > top ? x : top;
  }
  const vf old = exp2(load(m) - top);
  vf total = load(l) * old;
  for (int key = 0; key < n; key++) {
    const vf p = exp2(load(s + key * ROWS) - top);
    store(s + key * ROWS, p);
    total += p;
  }
  store(m, top), store(l, total), store(decay, old);
}

// The same for one row whose scores lie side by side.
void softmax_of_row(float* s, int n, float* m, float* l, float* decay) {
  while (n % W != 0) s[n++] = -INFINITY;
  vf top = vf{} + *m;
  for (int key = 0; key < n; key += W) {
    const vf x = load(s + key);
    top = x > top ? x : top;
  }
  float highest = top[0];
  for (int i = 1; i < W; i++) highest = std::max(highest, top[i]);
  vf total = {};
  for (int key = 0; key < n; key += W) {
    const vf p = exp2(load(s + key) - highest);
    store(s + key, p);
    total += p;
  }
  *decay = std::exp2(*m - highest);
  *l = *l * *decay + sum(total);
  *m = highest;
}

// o = o * decay + p v for R rows and C vectors of head dimensions, from column d on.
template <class Layout, int R, int C, class T>
void add_values(const float* p, const T* const* v, int n, const float* decay, float* o, int64_t d,
                int64_t width) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * width + d + c * W) * decay[r];
  for (int key = 0; key < n; key++)
    for (int c = 0; c < C; c++) {
      const vf x = load(v[key] + d + c * W);
      for (int r = 0; r < R; r++) acc[r][c] += x * p[key * Layout::key_step + r * Layout::row_step];
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(o + r * width + d + c * W, acc[r][c]);
}

template <class Layout, class T>
void add_all_values(int rows, const float* p, const T* const* v, int n, const float* decay,
                    float* o, int64_t width) {
  in_groups(rows, [&](auto group, int r) {
    constexpr int R = group, C = std::min(8, ACCUMULATORS / R);
    int64_t d = 0;
    for (; d + C * W <= width; d += C * W)
      add_values<Layout, R, C>(p + r * Layout::row_step, v, n, decay + r, o + r * width, d, width);
    for (; d < width; d += W)
      add_values<Layout, R, 1>(p + r * Layout::row_step, v, n, decay + r, o + r * width, d, width);
  });
}

using Floats = std::unique_ptr<float[], decltype(&std::free)>;
Floats allocate(int64_t n) {  // not initialised, whole cache lines
  return Floats((float*)std::aligned_alloc(64, (n / 16 + 1) * 64), std::free);
}

struct Item {
  int64_t sequence, first_row, rows, key_begin, key_end;
  int64_t part, parts;  // which of how many ranges of keys
  int64_t results;      // where its results go, if they are to be joined with other parts'
};

template <class T> struct Attention {
  T* out;
  const T *q, *k_cache, *v_cache;
  const int32_t *block_tables, *seq_lens, *cu_seqlens_q;
  int64_t num_tokens, S, M, num_blocks, B, H, KV, D, q_stride;
  float scale;
  int64_t G = H / KV, width = (D + W - 1) / W * W;

  int64_t q_len(int64_t i) const { return cu_seqlens_q[i + 1] - cu_seqlens_q[i]; }
  int64_t position(int64_t i, int64_t row) const { return seq_lens[i] - q_len(i) + row / G; }
  int64_t token(const Item& it, int64_t r) const {
    return cu_seqlens_q[it.sequence] + (it.first_row + r) / G;
  }
  int64_t head(const Item& it, int64_t kv, int64_t r) const {
    return kv * G + (it.first_row + r) % G;
  }
  int64_t result_floats(int64_t rows) const { return rows * width + 2 * ROWS; }  // o, m, l

  // The first sequence whose numbers would make us read out of bounds, or -1.
  int64_t find_invalid() const {
    for (int64_t i = 0; i < S; i++) {
      const int64_t len = seq_lens[i], blocks = (len + B - 1) / B;
      bool ok = (i > 0 || cu_seqlens_q[0] == 0) && q_len(i) >= 0 && len >= 0 && blocks <= M &&
                cu_seqlens_q[i + 1] <= num_tokens && (len == 0 || len >= q_len(i));
      for (int64_t b = i * M; ok && q_len(i) > 0 && b < i * M + blocks; b++)
        ok = block_tables[b] >= 0 && block_tables[b] < num_blocks;
      if (!ok) return i;
    }
    return -1;
  }

  std::vector<Item> plan(int64_t& results) const {
    std::vector<Item> items;
    for (int64_t i = 0; i < S; i++) {
      const int64_t all_rows = q_len(i) * G, last_tile = (all_rows + ROWS - 1) / ROWS - 1;
      for (int64_t tile = last_tile; tile >= 0; tile--) {  // longest first: threads end together
        const int64_t first = tile * ROWS, rows = std::min<int64_t>(ROWS, all_rows - first);
        const int64_t end = seq_lens[i] == 0 ? 0 : position(i, first + rows - 1) + 1;
        const int64_t parts = last_tile > 0 || end == 0 ? 1 : (end + SPLIT - 1) / SPLIT;
        for (int64_t part = 0; part < parts; part++) {
          const int64_t stop = part + 1 == parts ? end : (part + 1) * SPLIT;
          items.push_back({i, first, rows, part * SPLIT, stop, part, parts, results});
        }
        if (parts > 1) results += parts * KV * result_floats(rows);
      }
    }
    return items;
  }

  // result: [o | m | l] of the item's rows. scratch: [queries | wide k | wide v | s | decay].
  void attend(const Item& it, int64_t kv, float* scratch, float* result) const {
    float *queries = scratch, *wide_k = queries + ROWS * width, *wide_v = wide_k + KEYS * width;
    float *s = wide_v + KEYS * width, *decay = s + KEYS * ROWS;
    float *o = result, *m = o + it.rows * width, *l = m + ROWS;
    const int rows = it.rows, lanes = (rows + W - 1) / W * W;
    const bool stream = rows <= STREAM_ROWS && width == D;
    std::fill(o, m, 0.f);
    std::fill(m, l, -1e30f);  // finite, for -inf - -inf is NaN
    std::fill(l, l + ROWS, 0.f);
    for (int r = 0; r < rows; r++)  // in units of log2; transposed in a tile
      for (int64_t d = 0; d < D; d++)
        queries[stream ? r * width + d : d * ROWS + r] =
            widen(q[token(it, r) * q_stride + head(it, kv, r) * D + d]) * scale * 1.44269504f;

    const int64_t step = stream ? STREAM_KEYS : KEYS;
    const T *keys[2][KEYS], *values[2][KEYS];  // of this tile, and of the next, which is prefetched
    const auto find = [&](int64_t begin) {
      const int64_t n = std::min(step, it.key_end - begin), slot = begin / step % 2;
      if (n > 0) find_keys(it.sequence, kv, begin, n, keys[slot], values[slot]);
    };
    const float* rows_of_v[KEYS];
    for (int key = 0; key < KEYS; key++) rows_of_v[key] = wide_v + key * width;
    for (int64_t begin = it.key_begin; begin < it.key_end; begin += step) {
      const int n = std::min(step, it.key_end - begin);
      const T **k = keys[begin / step % 2], **v = values[begin / step % 2];
      if (begin == it.key_begin) find(begin);
      find(begin + step);
      if (stream) {
        in_groups(rows, [&](auto group, int r) {
          stream_scores<group>(queries + r * width, k, n, width, s + r * KEYS);
        });
      } else {
        for (int key = 0; key < n; key++) {
          for (int64_t d = 0; d < D; d++) wide_k[key * width + d] = widen(k[key][d]);
          for (int64_t d = 0; d < D; d++) wide_v[key * width + d] = widen(v[key][d]);
        }
        int r = 0;
        for (; r + W < lanes; r += 2 * W) tile_scores<2>(queries + r, wide_k, n, width, s + r);
        if (r < lanes) tile_scores<1>(queries + r, wide_k, n, width, s + r);
      }
      if (stream) {
        hide_future<Stream>(it, begin, n, s);
        for (int r = 0; r < rows; r++) softmax_of_row(s + r * KEYS, n, m + r, l + r, decay + r);
        add_all_values<Stream>(rows, s, v, n, decay, o, width);
      } else {
        hide_future<Tile>(it, begin, n, s);
        for (int r = 0; r < lanes; r += W) softmax(s + r, n, m + r, l + r, decay + r);
        add_all_values<Tile>(rows, s, rows_of_v, n, decay, o, width);
      }
    }
  }

  void find_keys(int64_t i, int64_t kv, int64_t begin, int n, const T** k, const T** v) const {
    const int32_t* block = block_tables + i * M + begin / B;
    int64_t slot = begin % B;
    for (int key = 0; key < n; key++) {
      const int64_t offset = ((*block * B + slot) * KV + kv) * D;
      k[key] = k_cache + offset, v[key] = v_cache + offset;
      for (int64_t d = 0; d < D; d += 64 / sizeof(T)) {  // pages lie anywhere: no hardware guesses
        __builtin_prefetch(k[key] + d);
        __builtin_prefetch(v[key] + d);
      }
      if (++slot == B) slot = 0, block++;
    }
  }

  //     key:             4 5 6 7
  //     row at place 5:  x x . .    a row sees keys up to its own position
  //     row at place 6:  x x x .
  template <class Layout>
  void hide_future(const Item& it, int64_t begin, int n, float* s) const {
    for (int r = 0; r < it.rows; r++) {
      const int64_t seen = position(it.sequence, it.first_row + r) + 1 - begin;
      for (int64_t key = std::max<int64_t>(0, seen); key < n; key++)
        s[key * Layout::key_step + r * Layout::row_step] = -INFINITY;
    }
  }

  // Join the results of all parts, each worth 2^(its maximum - the largest), and round.
  void finish(const Item& it, int64_t kv, const float* results, float* scratch) const {
    const int64_t next = result_floats(it.rows), m = it.rows * width, l = m + ROWS;
    for (int r = 0; r < it.rows; r++) {
      float top = -INFINITY, total = 0;
      for (int part = 0; part < it.parts; part++)
        top = std::max(top, results[part * next + m + r]);
      std::fill(scratch, scratch + D, 0.f);
      for (int part = 0; part < it.parts; part++) {
        const float* result = results + part * next;
        const float worth = std::exp2(result[m + r] - top);
        total += result[l + r] * worth;
        for (int64_t d = 0; d < D; d++) scratch[d] += result[r * width + d] * worth;
      }
      const float factor = total == 0 ? 0 : 1 / total;  // a padding row sees no key
      T* row = out + (token(it, r) * H + head(it, kv, r)) * D;
      for (int64_t d = 0; d < D; d++) narrow(scratch[d] * factor, row + d);
    }
  }

  int64_t run(int threads) const {
    const int64_t invalid = find_invalid();
    if (invalid >= 0) return invalid;
    const int64_t owned = S > 0 ? cu_seqlens_q[S] : 0;
    std::fill(out + owned * H * D, out + num_tokens * H * D, T(0));
    int64_t floats = 0;
    const std::vector<Item> items = plan(floats);
    const Floats results = allocate(floats);
    const int64_t count = items.size() * KV;
    const auto result_of = [&](const Item& it, int64_t kv, int64_t part) {
      return results.get() + it.results + (kv * it.parts + part) * result_floats(it.rows);
    };
#pragma omp parallel num_threads(threads) if (count > 1)
    {
      const int64_t scratch_floats = (ROWS + 2 * KEYS) * width + KEYS * ROWS + ROWS;
      const Floats scratch = allocate(scratch_floats + result_floats(ROWS));
      // Dimensions from D on stay 0. Lanes without a row may hold anything: lanes never mix.
      if (width > D) std::fill(scratch.get(), scratch.get() + scratch_floats, 0.f);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++) {
        const Item& it = items[i / KV];
        float* own = scratch.get() + scratch_floats;
        float* result = it.parts > 1 ? result_of(it, i % KV, it.part) : own;
        attend(it, i % KV, scratch.get(), result);
        if (it.parts == 1) finish(it, i % KV, own, scratch.get());
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++)
        if (const Item& it = items[i / KV]; it.parts > 1 && it.part == 0)
          finish(it, i % KV, result_of(it, i % KV, 0), scratch.get());
    }
    return -1;
  }
};

}  // namespace

// Returns -1, or the first sequence whose lengths or blocks are out of bounds.
extern "C" int64_t nanoinfer_paged_attention(
    int is_bf16, void* out, const void* q, const void* k_cache, const void* v_cache,
    const int32_t* block_tables, const int32_t* seq_lens, const int32_t* cu_seqlens_q, int64_t T,
    int64_t S, int64_t M, int64_t num_blocks, int64_t B, int64_t H, int64_t KV, int64_t D,
    int64_t q_stride, float scale, int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    return Attention<E>{typed, (const E*)q, (const E*)k_cache, (const E*)v_cache, block_tables,
                        seq_lens, cu_seqlens_q, T, S, M, num_blocks, B, H, KV, D, q_stride,
                        scale}.run(threads);
  };
  return is_bf16 ? run((bf16*)out) : run((float*)out);
}

// Follows torch.set_num_threads exactly where this library and torch share one OpenMP runtime.
extern "C" int nanoinfer_omp_max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}
