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
//     p[key][row] = 2^(s - max so far)         online softmax (Milakov & Gimelshein, FlashAttention)
//     o[row]      = o[row] * decay + sum over keys of p[key][row] * v[key]
//
// The lanes of a vector are query rows in the first two lines (the queries are transposed once, the
// keys never, and the softmax has no horizontal step) and head dimensions in the third. With few
// rows, as in decoding, bandwidth is what counts: keys and values go straight from the cache into
// registers; with many, a tile of them is widened to fp32 once and used for all rows.
//
// Shapes: T tokens, S sequences, H query heads, KV kv heads, G = H / KV, D head dim (width: D
// rounded up to whole vectors), M blocks in a row of the table, B tokens in a block.
//
//     table row of one sequence:   [ 7 | 3 | 9 | 0 | 0 ]       B = 4, 10 tokens
//                                    |   |   |
//     cache (blocks anywhere):   7: [0 1 2 3]  3: [4 5 6 7]  9: [8 9 . .]    "." is never read
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// One register of floats. ACCUMULATORS leaves room for operands among the registers there are.
#if defined(__AVX512F__)
constexpr int BYTES = 64, ACCUMULATORS = 16;
#elif defined(__AVX__)
constexpr int BYTES = 32, ACCUMULATORS = 8;
#else
constexpr int BYTES = 16, ACCUMULATORS = 16;
#endif
constexpr int W = BYTES / 4;  // lanes
typedef float vf __attribute__((vector_size(BYTES)));
typedef int32_t vi __attribute__((vector_size(BYTES)));
typedef uint32_t vu __attribute__((vector_size(BYTES)));
typedef uint16_t vh __attribute__((vector_size(BYTES / 2)));
typedef uint16_t bf16;

constexpr int ROWS = 64, KEYS = 64;  // a tile of scores
constexpr int SPLIT = 256;           // keys in an item whose sequence fits one tile of rows
constexpr int STREAM_ROWS = 8;       // up to here keys are not worth widening

template <class V, class T> V read(const T* p) { V x; std::memcpy(&x, p, sizeof(V)); return x; }
vf splat(float x) { return x - vf{}; }
vf load(const float* p) { return read<vf>(p); }
vf load(const bf16* p) { return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16); }
void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }
void store(bf16* p, vf x) {  // round to nearest even; NaN stays NaN
  vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vh h = __builtin_convertvector(x == x ? rounded : vu{} + 0x7fc0, vh);
  std::memcpy(p, &h, sizeof(h));
}

template <class T> vf load_part(const T* p, int64_t n) {  // lanes from n on are 0
  if (n >= W) return load(p);
  T part[W] = {};
  std::copy(p, p + n, part);
  return load(part);
}
template <class T> void store_part(T* p, vf x, int64_t n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  std::copy(part, part + n, p);
}

float sum(vf x) {
  float lane[W];
  store(lane, x);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) lane[i] += lane[i + n];
  return lane[0];
}

vf exp2(vf x) {  // for x <= 0, relative error about 2e-7; 2^-inf is 0, NaN stays NaN
  vf y = x < -126.f ? splat(-126.f) : x;
  vf shifted = y + 12582912.f;           // 1.5 * 2^23: the low bits are now y's nearest integer
  vf f = y - (shifted - 12582912.f);     // [-0.5, 0.5]
  vf p = splat(1.540353e-4f);            // Taylor: ln(2)^k / k!
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    p = p * f + c;
  vf power = (vf)(((vu)shifted + 127) << 23);
  return x < -126.f ? vf{} : p * power;
}

// Scores of few rows: q is [row][width], keys come from the cache.
template <int R, class T>
void stream_scores(const float* q, const T* const* k, int n, int64_t width, float* s) {
  for (int key = 0; key < n; key++) {
    vf acc[R] = {};
    for (int64_t d = 0; d < width; d += W) {
      vf x = load(k[key] + d);
      for (int r = 0; r < R; r++) acc[r] += x * load(q + r * width + d);
    }
    for (int r = 0; r < R; r++) s[key * ROWS + r] = sum(acc[r]);
  }
}

// Scores of C vectors of rows: q is [dim][ROWS], k is fp32 [KEYS][width], a few keys at a time.
template <int C> void tile_scores(const float* q, const float* k, int n, int64_t width, float* s) {
  constexpr int N = ACCUMULATORS / 2;
  for (int key = 0; key < n; key += N, k += N * width) {
    vf acc[N][C] = {};
    for (int64_t d = 0; d < width; d++) {
      vf x[C];
      for (int c = 0; c < C; c++) x[c] = load(q + d * ROWS + c * W);
      for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] += x[c] * k[i * width + d];
    }
    for (int i = 0; i < N; i++)
      for (int c = 0; c < C; c++) store(s + (key + i) * ROWS + c * W, acc[i][c]);
  }
}

// One vector of rows: s becomes p; m, l: running maximum and sum; decay: what old sums are worth.
void softmax(float* s, int n, float* m, float* l, float* decay) {
  vf top = load(m);
  for (int key = 0; key < n; key++) {
    vf x = load(s + key * ROWS);
    top = x > top ? x : top;
  }
  vf old = exp2(load(m) - top), total = load(l) * old;
  for (int key = 0; key < n; key++) {
    vf p = exp2(load(s + key * ROWS) - top);
    store(s + key * ROWS, p);
    total += p;
  }
  store(m, top), store(l, total), store(decay, old);
}

// R rows by C vectors of head dimensions, from column d on.
template <int R, int C, class T>
void add_values(const float* p, const T* const* v, int n, const float* decay, float* o, int64_t d,
                int64_t width) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * width + d + c * W) * decay[r];
  for (int key = 0; key < n; key++) {
    vf x[C];
    for (int c = 0; c < C; c++) x[c] = load(v[key] + d + c * W);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] += x[c] * p[key * ROWS + r];
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(o + r * width + d + c * W, acc[r][c]);
}

template <int N> using Int = std::integral_constant<int, N>;
template <class F> void in_groups(int rows, F f) {  // f(group size as a type, first row)
  int r = 0;
  for (; rows - r >= 8; r += 8) f(Int<8>{}, r);
  if (rows - r >= 4) f(Int<4>{}, r), r += 4;
  if (rows - r == 3) f(Int<3>{}, r);
  if (rows - r == 2) f(Int<2>{}, r);
  if (rows - r == 1) f(Int<1>{}, r);
}

template <class T>
void add_all_values(int rows, const float* p, const T* const* v, int n, const float* decay,
                    float* o, int64_t width) {
  in_groups(rows, [&](auto group, int r) {
    constexpr int R = group, C = std::min(8, ACCUMULATORS / R);
    int64_t d = 0;
    for (; d + C * W <= width; d += C * W)
      add_values<R, C>(p + r, v, n, decay + r, o + r * width, d, width);
    for (; d < width; d += W)
      add_values<R, 1>(p + r, v, n, decay + r, o + r * width, d, width);
  });
}

using Floats = std::unique_ptr<float[], decltype(&std::free)>;
Floats allocate(int64_t n) {  // whole cache lines, not initialised
  return Floats((float*)std::aligned_alloc(64, (n * sizeof(float) / 64 + 1) * 64), std::free);
}

struct Item {
  int64_t sequence, first_row, rows, key_begin, key_end;
  int64_t part, parts;   // which of how many key ranges of these rows
  int64_t partial_rows;  // rows of all split items before this one
};

template <class T> struct Attention {
  T* out;
  const T *q, *k_cache, *v_cache;
  const int32_t *block_tables, *seq_lens, *cu_seqlens_q;
  int64_t num_tokens, S, M, num_blocks, B, H, KV, D, q_stride;
  float scale;
  int64_t G = H / KV, width = (D + W - 1) / W * W;
  int64_t partial_stride = width + 2;  // one partial row: [o | m | l]

  int64_t q_len(int64_t i) const { return cu_seqlens_q[i + 1] - cu_seqlens_q[i]; }
  int64_t position(int64_t i, int64_t row) const { return seq_lens[i] - q_len(i) + row / G; }
  int64_t token(const Item& it, int64_t r) const {
    return cu_seqlens_q[it.sequence] + (it.first_row + r) / G;
  }
  int64_t head(const Item& it, int64_t kv, int64_t r) const {
    return kv * G + (it.first_row + r) % G;
  }

  // The first sequence whose numbers would make us read out of bounds, or -1.
  int64_t find_invalid() const {
    for (int64_t i = 0; i < S; i++) {
      const int64_t len = seq_lens[i], blocks = (len + B - 1) / B;
      bool ok = (i > 0 || cu_seqlens_q[0] == 0) && q_len(i) >= 0 && len >= 0 && blocks <= M &&
                cu_seqlens_q[i + 1] <= num_tokens && (len == 0 || len >= q_len(i));
      const int32_t* table = block_tables + i * M;
      for (int64_t b = 0; ok && q_len(i) > 0 && b < blocks; b++)
        ok = table[b] >= 0 && table[b] < num_blocks;
      if (!ok) return i;
    }
    return -1;
  }

  std::vector<Item> plan() const {
    std::vector<Item> items;
    int64_t partial_rows = 0;
    for (int64_t i = 0; i < S; i++) {
      const int64_t all_rows = q_len(i) * G, tiles = (all_rows + ROWS - 1) / ROWS;
      for (int64_t tile = tiles - 1; tile >= 0; tile--) {  // longest first: threads end together
        const int64_t first = tile * ROWS, rows = std::min<int64_t>(ROWS, all_rows - first);
        const int64_t end = seq_lens[i] == 0 ? 0 : position(i, first + rows - 1) + 1;
        const int64_t parts = tiles == 1 ? std::max<int64_t>(1, (end + SPLIT - 1) / SPLIT) : 1;
        for (int64_t part = 0; part < parts; part++) {
          const int64_t stop = part + 1 == parts ? end : (part + 1) * SPLIT;
          items.push_back({i, first, rows, part * SPLIT, stop, part, parts, partial_rows});
          partial_rows += parts > 1 ? rows : 0;
        }
      }
    }
    return items;
  }

  int64_t scratch_floats() const { return 2 * (ROWS + KEYS) * width + KEYS * ROWS + 3 * ROWS; }

  void attend(const Item& it, int64_t kv, float* scratch, float* partials) const {
    float *queries = scratch, *wide_k = queries + ROWS * width, *wide_v = wide_k + KEYS * width;
    float *o = wide_v + KEYS * width, *s = o + ROWS * width;
    float *m = s + KEYS * ROWS, *l = m + ROWS, *decay = l + ROWS;
    const int rows = it.rows, lanes = (rows + W - 1) / W * W;
    const bool stream = rows <= STREAM_ROWS && width == D;
    std::fill(o, o + rows * width, 0.f);
    std::fill(s, m, 0.f);
    std::fill(m, l, -1e30f);  // finite, for -inf - -inf is NaN
    std::fill(l, decay, 0.f);
    load_queries(it, kv, stream, lanes, queries);

    const T *k[KEYS], *v[KEYS];
    for (int64_t begin = it.key_begin; begin < it.key_end; begin += KEYS) {
      const int n = std::min<int64_t>(KEYS, it.key_end - begin);
      find_keys(it.sequence, kv, begin, n, k, v);
      if (stream) {
        in_groups(rows, [&](auto group, int r) {
          stream_scores<group>(queries + r * width, k, n, width, s + r);
        });
      } else {
        widen(k, n, wide_k);
        widen(v, n, wide_v);
        int r = 0;
        for (; r + 2 * W <= lanes; r += 2 * W)
          tile_scores<2>(queries + r, wide_k, n, width, s + r);
        if (r < lanes) tile_scores<1>(queries + r, wide_k, n, width, s + r);
      }
      mask_future(it, begin, n, s);
      for (int r = 0; r < lanes; r += W) softmax(s + r, n, m + r, l + r, decay + r);
      if (stream) {
        add_all_values(rows, s, v, n, decay, o, width);
      } else {
        const float* rows_of_v[KEYS];
        for (int i = 0; i < n; i++) rows_of_v[i] = wide_v + i * width;
        add_all_values(rows, s, rows_of_v, n, decay, o, width);
      }
    }

    for (int r = 0; r < rows; r++) {
      float* row = o + r * width;
      if (it.parts == 1) {
        write_row(it, kv, r, row, l[r]);
      } else {
        float* partial = partial_row(it, kv, r, partials);
        std::copy(row, row + width, partial);
        partial[width] = m[r], partial[width + 1] = l[r];
      }
    }
  }

  // q * scale * log2(e), as [row][width] to stream, else transposed: [dim][ROWS].
  void load_queries(const Item& it, int64_t kv, bool stream, int lanes, float* queries) const {
    const float factor = scale * 1.44269504f;
    for (int r = 0; r < (stream ? it.rows : lanes); r++) {
      const int used = std::min<int>(r, it.rows - 1);  // a vector's rest repeats the last row
      const T* row = q + token(it, used) * q_stride + head(it, kv, used) * D;
      for (int64_t d = 0; d < width; d += W) {
        const vf x = load_part(row + d, D - d) * factor;
        if (stream) store(queries + r * width + d, x);
        else for (int i = 0; i < W; i++) queries[(d + i) * ROWS + r] = x[i];
      }
    }
  }

  void find_keys(int64_t i, int64_t kv, int64_t begin, int n, const T** k, const T** v) const {
    const int32_t* block = block_tables + i * M + begin / B;
    int64_t in_block = begin % B;
    for (int key = 0; key < n; key++) {
      const int64_t offset = ((*block * B + in_block) * KV + kv) * D;
      k[key] = k_cache + offset, v[key] = v_cache + offset;
      if (++in_block == B) in_block = 0, block++;
    }
  }

  void widen(const T* const* source, int n, float* wide) const {
    for (int key = 0; key < n; key++, wide += width)
      for (int64_t d = 0; d < width; d += W) store(wide + d, load_part(source[key] + d, D - d));
  }

  //   key:   .. 5 6 7      a row sees the keys up to its own position; only the last tiles,
  //   row 5:    x - -      from the first row's position on, have anything to hide
  //   row 6:    x x -
  void mask_future(const Item& it, int64_t begin, int n, float* s) const {
    for (int r = 0; r < it.rows; r++) {
      const int64_t seen = position(it.sequence, it.first_row + r) + 1 - begin;
      for (int64_t key = std::max<int64_t>(0, seen); key < n; key++) s[key * ROWS + r] = -INFINITY;
    }
  }

  float* partial_row(const Item& it, int64_t kv, int64_t r, float* partials) const {
    return partials + (it.partial_rows * KV + kv * it.rows + r) * partial_stride;
  }

  // Join the parts of an item's rows: each is worth 2^(its maximum - the largest).
  void merge(const Item* part, int64_t kv, float* partials, float* o) const {
    for (int r = 0; r < part->rows; r++) {
      float top = -INFINITY, total = 0;
      for (int p = 0; p < part->parts; p++)
        top = std::max(top, partial_row(part[p], kv, r, partials)[width]);
      std::fill(o, o + width, 0.f);
      for (int p = 0; p < part->parts; p++) {
        const float* row = partial_row(part[p], kv, r, partials);
        const float worth = std::exp2(row[width] - top);
        total += row[width + 1] * worth;
        for (int64_t d = 0; d < width; d++) o[d] += row[d] * worth;
      }
      write_row(*part, kv, r, o, total);
    }
  }

  void write_row(const Item& it, int64_t kv, int64_t r, const float* o, float l) const {
    T* row = out + (token(it, r) * H + head(it, kv, r)) * D;
    const float factor = l == 0 ? 0 : 1 / l;  // a padding row sees no key
    for (int64_t d = 0; d < D; d += W) store_part(row + d, load(o + d) * factor, D - d);
  }

  int64_t run(int threads) const {
    const int64_t invalid = find_invalid();
    if (invalid >= 0) return invalid;
    T* tail = out + (S > 0 ? cu_seqlens_q[S] : 0) * H * D;  // rows of no sequence
    std::fill(tail, out + num_tokens * H * D, T(0));
    const std::vector<Item> items = plan();
    int64_t rows = 0;
    for (const Item& it : items) rows += it.parts > 1 ? it.rows : 0;
    const auto partials = allocate(rows * KV * partial_stride);
    const int64_t count = items.size() * KV;
#pragma omp parallel num_threads(threads) if (count > 1)
    {
      const auto scratch = allocate(scratch_floats());
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++)
        attend(items[i / KV], i % KV, scratch.get(), partials.get());
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++)
        if (const Item& it = items[i / KV]; it.parts > 1 && it.part == 0)
          merge(&it, i % KV, partials.get(), scratch.get());
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
