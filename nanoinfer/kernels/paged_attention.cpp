// Attention over a paged KV cache, on a CPU: the twin of paged_attention_ref.
//
// In:  q, the paged caches (read in place), block tables, lengths. Out: one row for each row of q.
// Invariant: the arithmetic of a row depends on its own sequence only, never on its neighbours in
// the batch nor on the number of threads: tiles and splits are cut by fixed sizes.
//
// The work is cut into items: (sequence, kv heads, up to ROWS query rows, a range of keys). A row is
// a (token, query head) pair; all query heads of one kv head are folded into the rows, so that a
// key is read once for all of them. An item walks over its keys, KEYS at a time:
//
//     s[key][row] = q[row] . k[key]            scores, in units of log2
//     p[key][row] = 2^(s - max so far)         online softmax, as in FlashAttention
//     o[row]      = o[row] * decay + sum over keys of p[key][row] * v[key]
//
// Everything is multiplied in units of 32 bits (simd.h): for bf16, two dimensions of a head, or two
// keys of a value, which halves the work where the CPU is good at pairs; there p is rounded to bf16,
// too, as in FlashAttention, the sum that it is divided by is not. Elsewhere bf16 is widened first.
//
// With many rows the lanes of a vector are rows (queries are transposed once, keys never), so that
// neither scores nor softmax have a horizontal step. With few, as in decoding, bandwidth counts: an
// item takes all heads of its keys, since they lie side by side; lanes are head dimensions, then
// keys.
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

#include "attention_tiles.h"
#include "heads.h"

namespace {

constexpr int SPLIT = 64;            // keys of an item, if its sequence has few rows: so many
constexpr int SPLIT_ROWS = 64;
constexpr int STREAM_ROWS = 4;       // up to here bandwidth counts, not products
constexpr int AHEAD = 4;             // keys that are prefetched: pages lie anywhere

struct Item {
  int64_t sequence, first_row, rows, key_begin, key_end;
  int64_t part, parts;  // which of how many ranges of keys
  int64_t results;      // where its results go, if they are to be joined with other parts'
};

// A cache in 8 bits: its scales, and whether heads lie there turned (quantized_kv.py).
struct Scales {
  const float *k, *v;
  int is_e4m3, is_rotated;
};

template <class T> struct Attention {
  using O = Operand<T>;
  T* out;
  const T* q;
  const void *k_cache, *v_cache;
  Scales scales;
  const int32_t *block_tables, *seq_lens, *cu_seqlens_q;
  int64_t num_tokens, S, M, num_blocks, B, H, KV, D, q_stride;
  float scale;
  int64_t G = H / KV, width = (D + W - 1) / W * W;
  std::vector<float> zeros = std::vector<float>(KV * D);

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
        const bool is_split = all_rows <= SPLIT_ROWS && end > 0;
        const int64_t parts = is_split ? (end + SPLIT - 1) / SPLIT : 1;
        for (int64_t part = 0; part < parts; part++) {
          const int64_t stop = part + 1 == parts ? end : (part + 1) * SPLIT;
          items.push_back({i, first, rows, part * SPLIT, stop, part, parts, results});
        }
        if (parts > 1) results += parts * KV * result_floats(rows);
      }
    }
    return items;
  }

  // result: [o | m | l] of the item's rows.
  void begin(const Item& it, float* result) const {
    float *m = result + it.rows * width, *l = m + ROWS;
    std::fill(result, m, 0.f);
    std::fill(m, l, -1e30f);  // finite, for -inf - -inf is NaN
    std::fill(l, l + ROWS, 0.f);
  }

  const T* query(const Item& it, int64_t kv, int64_t r) const {
    return q + token(it, r) * q_stride + head(it, kv, r) * D;
  }

  bool is_stream(const Item& it) const {
    return it.rows <= STREAM_ROWS && D % (W * 4 / sizeof(T)) == 0;
  }

  // Few rows of all kv heads: keys are read in the order in which they lie, and their values, which
  // follow, are fetched meanwhile. scratch: [queries | products | s | widened]; results: one for
  // each head.
  template <int R> void attend_stream(const Item& it, float* scratch, float* const* results) const {
    O* queries = (O*)scratch;                    // [KV][R][D]
    vf* products = (vf*)(scratch + KV * R * D);  // [KV][R][W]
    float *scores = (float*)(products + KV * R * W), decay[R];  // [KV][R][KEYS]
    for (int64_t kv = 0; kv < KV; kv++) {
      begin(it, results[kv]);
      for (int r = 0; r < R; r++) arrange(query(it, kv, r), D, queries + (kv * R + r) * D);
    }
    T* widened = (T*)(scores + KV * R * KEYS);
    const int step = scales.k ? W : KEYS, ahead = scales.k ? 0 : AHEAD;  // what is widened is near
    const T *k[KEYS + AHEAD] = {}, *v[KEYS + AHEAD];
    for (int64_t begin = it.key_begin; begin < it.key_end; begin += step) {
      const int n = std::min<int64_t>(step, it.key_end - begin), padded = (n + W - 1) / W * W;
      find_keys(it, begin, padded + ahead, 0, KV, k, v, widened);
      for (int key = 0; key < padded; key++) {
        for (int64_t kv = 0; kv < KV; kv++) {
          for (int64_t d = kv * D; d < (kv + 1) * D; d += 64 / sizeof(T)) {
            __builtin_prefetch(k[key + ahead] + d, 0, 2);
            __builtin_prefetch(v[key] + d, 0, 2);
          }
          stream_products<R>(queries + kv * R * D, k[key] + kv * D, D,
                             products + kv * R * W + key % W);
        }
        for (int64_t i = 0; key % W == W - 1 && i < KV * R; i++)
          store(scores + i * KEYS + key - key % W, sums(products + i * W) * (scale * LOG2E));
      }
      for (int64_t kv = 0; kv < KV; kv++) {
        float *o = results[kv], *m = o + it.rows * width, *l = m + ROWS;
        float* s = scores + kv * R * KEYS;
        hide_future(it, 0, R, begin, n, s, KEYS, 1);
        for (int r = 0; r < R; r++) softmax_of_row<O>(s + r * KEYS, n, m + r, l + r, decay + r);
        add_all_values<O, R>((const unit*)s, KEYS, 1, v, n, decay, o, width);
        for (int key = 0; key < padded; key++) v[key] += D;  // the next head's
      }
    }
  }

  // Many rows of one kv head. scratch: [queries | v in units | s | decay | widened]; of queries and
  // s a group after the other, each [.][GROUP].
  void attend_tile(const Item& it, int64_t kv, float* scratch, float* result) const {
    unit *queries = (unit*)scratch, *wide_v = queries + ROWS * width;
    float *s = (float*)(wide_v + KEYS * width), *decay = s + KEYS * GROUP;
    O* widened = (O*)(decay + GROUP);
    float *o = result, *m = o + it.rows * width, *l = m + ROWS;
    begin(it, result);
    for (int r = 0; r < it.rows; r++) {
      const T* x = query(it, kv, r);
      unit* to = queries + r / GROUP * GROUP * width + r % GROUP;
      for (int64_t d = 0; d < D; d += P<O>) to[d / P<O> * GROUP] = to_unit(x + d);
    }
    const O *k[KEYS], *v[KEYS];
    const unit* units_of_v[KEYS];
    for (int key = 0; key < KEYS; key++) units_of_v[key] = wide_v + key * width;
    for (int64_t begin = it.key_begin; begin < it.key_end; begin += KEYS) {
      const int n = std::min<int64_t>(KEYS, it.key_end - begin);
      find_keys(it, begin, KEYS, kv, 1, k, v, widened);
      const bool are_units = P<O> == 1 && width == D;
      for (int key = 0; key < n && !are_units; key += P<O>)
        make_units(v + key, wide_v + key / P<O> * width);
      for (int first = 0; first < it.rows; first += GROUP) {
        const int rows = std::min<int>(GROUP, it.rows - first);
        const int64_t last = position(it.sequence, it.first_row + first + rows - 1);
        const int seen = std::min<int64_t>(n, last + 1 - begin);
        if (seen <= 0) continue;
        const auto scores = rows > W ? tile_scores<2, O> : tile_scores<1, O>;
        scores(queries + first * width, k, seen, D, scale * LOG2E, s);
        hide_future(it, first, rows, begin, seen, s, 1, GROUP);
        for (int r = 0; r < rows; r += W)
          softmax<O>(s + r, seen, m + first + r, l + first + r, decay + r);
        in_groups(rows, [&](auto group, int r) {
          add_all_values<O, group>((const unit*)s + r, 1, GROUP,
                                   are_units ? (const unit* const*)v : units_of_v, seen, decay + r,
                                   o + (first + r) * width, width);
        });
      }
    }
  }

  static unit to_unit(const T* x) {
    if constexpr (std::is_same_v<T, O>) return read<unit>(x);
    return unit(*x) << 16;
  }

  void make_units(const O* const* v, unit* out) const {
    for (int64_t d = 0; d < D; d++)
      if constexpr (P<O> == 2)
        out[d] = v[0][d] | unit(v[1][d]) << 16;
      else
        std::memcpy(out + d, v[0] + d, 4);
  }

  // `heads` kv heads, from `kv` on, of each of `count` keys from `begin` on. Behind the end: any k,
  // no v. Of a cache of another type, copies in `widened` [count][2][heads * D].
  template <class K>
  void find_keys(const Item& it, int64_t begin, int count, int64_t kv, int64_t heads, const K** k,
                 const K** v, K* widened) const {
    const int32_t* block = block_tables + it.sequence * M + begin / B;
    int64_t slot = begin % B;
    for (int key = 0; key < count; key++) {
      if (begin + key >= it.key_end) {
        k[key] = k[key - 1], v[key] = (const K*)zeros.data();  // 0 times it is no NaN
        continue;
      }
      const int64_t head = (*block * B + slot) * KV + kv;
      if (++slot == B) slot = 0, block++;
      if (scales.k || !std::is_same_v<T, K>) {
        k[key] = widened, v[key] = widened + heads * D;
        for (int64_t i = head; i < head + heads; i++, widened += D) widen(i, widened, heads * D);
        widened += heads * D;
      } else {
        k[key] = (const K*)k_cache + head * D, v[key] = (const K*)v_cache + head * D;
      }
    }
  }

  // Key and value of a head of a token, `apart` from each other.
  template <class K> void widen(int64_t head, K* out, int64_t apart) const {
    if constexpr (!std::is_same_v<T, K>)
      if (!scales.k) {
        to_operands((const T*)k_cache + head * D, D, out);
        to_operands((const T*)v_cache + head * D, D, out + apart);
        return;
      }
    const auto both = [&](auto* k, auto* v) {
      widen_head(k + head * D, scales.k[head], D, out);
      widen_head(v + head * D, scales.v[head], D, out + apart);
    };
    if (scales.is_e4m3)
      both((const e4m3*)k_cache, (const e4m3*)v_cache);
    else
      both((const int8_t*)k_cache, (const int8_t*)v_cache);
  }

  //     key:             4 5 6 7
  //     row at place 5:  x x . .    a row sees keys up to its own position
  //     row at place 6:  x x x .
  void hide_future(const Item& it, int first, int rows, int64_t begin, int n, float* s,
                   int64_t row_step, int64_t key_step) const {
    for (int r = 0; r < rows; r++) {
      const int64_t seen = position(it.sequence, it.first_row + first + r) + 1 - begin;
      for (int64_t key = std::max<int64_t>(0, seen); key < n; key++)
        s[key * key_step + r * row_step] = -INFINITY;
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
      if (scales.is_rotated) hadamard(scratch, D);
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
      const int64_t work_floats = std::max((ROWS + KEYS) * width + KEYS * ROWS + ROWS,
                                           KV * STREAM_ROWS * (D + W * W + KEYS));
      const int64_t widened_floats = 2 * D * std::max<int64_t>(KEYS, scales.k ? KV * W : 0);
      const int64_t scratch_floats = work_floats + widened_floats;
      const int64_t own_floats = std::max(result_floats(ROWS), KV * result_floats(STREAM_ROWS));
      const Floats scratch = allocate(scratch_floats + own_floats);
      // Dimensions from D on stay 0. Lanes without a row may hold anything: lanes never mix.
      std::fill(scratch.get(), scratch.get() + work_floats, 0.f);
      std::vector<float*> targets(KV);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++) {  // head after head: its keys stay in the cache
        const Item& it = items[i % items.size()];
        const int64_t first = i / items.size();
        if (is_stream(it) && first > 0) continue;  // done with the first head
        const int64_t last = is_stream(it) ? KV : first + 1;
        for (int64_t kv = first; kv < last; kv++)
          targets[kv] = it.parts > 1 ? result_of(it, kv, it.part)
                                     : scratch.get() + scratch_floats +
                                           (kv - first) * result_floats(it.rows);
        if (is_stream(it))
          with_constant<STREAM_ROWS>(it.rows, [&](auto rows) {
            attend_stream<rows>(it, scratch.get(), targets.data());
          });
        else
          attend_tile(it, first, scratch.get(), targets[first]);
        if (it.parts == 1)
          for (int64_t kv = first; kv < last; kv++) finish(it, kv, targets[kv], scratch.get());
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
// k_scales, v_scales: null unless the cache is in 8 bits.
extern "C" int64_t nanoinfer_paged_attention(
    int is_bf16, int is_e4m3, int is_rotated, void* out, const void* q, const void* k_cache,
    const void* v_cache, const float* k_scales, const float* v_scales, const int32_t* block_tables,
    const int32_t* seq_lens, const int32_t* cu_seqlens_q, int64_t T, int64_t S, int64_t M,
    int64_t num_blocks, int64_t B, int64_t H, int64_t KV, int64_t D, int64_t q_stride, float scale,
    int threads) {
  const auto run = [&](auto* typed) {
    using E = std::remove_pointer_t<decltype(typed)>;
    const Scales scales{k_scales, v_scales, is_e4m3, is_rotated};
    return Attention<E>{typed, (const E*)q, k_cache, v_cache, scales, block_tables, seq_lens,
                        cu_seqlens_q, T, S, M, num_blocks, B, H, KV, D, q_stride,
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
