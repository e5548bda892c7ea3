// One token id for each row of logits, on a CPU: the twin of draw_ref.
//
// In:  logits [R, V] fp32, rows `stride` apart, overwritten with scores; how each row is drawn.
// Out: ids [R]. A row is read from memory once: the passes that follow find it in the cache.
//
//     score = (logit - largest) / temperature                             so that none is > 0
//     least = the smallest score that min_p, then top_k, then top_p leave
//     id    = argmax of score + noise(key, id) over scores >= least       of equals the lowest
//
// Noise is below MAX_NOISE and above `best` for a given hash and more, so a vector of ids is hashed
// only if a score can still win, and logarithms are taken only where the hash can.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "simd.h"

namespace {

constexpr uint32_t MASK = (1u << 24) - 1;
constexpr size_t NUM_SORTED = 1024;  // scores: a larger pool is split, never sorted
constexpr int RANGES = 1024;          // of scores; the last holds all that are below LOWEST
constexpr float PER_UNIT = 32, LOWEST = -(RANGES - 1) / PER_UNIT;
typedef std::vector<float> Pool;

template <class V> V mix(V x) {  // murmur3's finaliser: of one value, or of a vector of them
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

double gumbel(uint32_t hash) { return -std::log(-std::log((hash + 0.5) / (MASK + 1.0))); }
const double MAX_NOISE = gumbel(MASK);

uint32_t smallest_hash(double noise) {  // whose noise may be `noise` or more
  const double least = std::exp(-std::exp(-noise)) * (MASK + 1.0) - 1;
  return least < 1 ? 0 : uint32_t(least);
}

bool any(vi lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < W; i++) found |= lanes[i];
  return found != 0;
#endif
}

// f(vector, first id) over a row; the last vector is filled up with -inf.
template <class F> void for_each_vector(const float* row, int64_t V, F f) {
  int64_t i = 0;
  for (; i + W <= V; i += W) f(load(row + i), i);
  if (i == V) return;
  float rest[W];
  std::fill(std::copy(row + i, row + V, rest), rest + W, -INFINITY);
  f(load(rest), i);
}

float largest(const float* row, int64_t V) {
  vf top = vf{} - INFINITY;
  for_each_vector(row, V, [&](vf x, int64_t) { top = x > top ? x : top; });
  return *std::max_element((float*)&top, (float*)&top + W);
}

// The `count` largest scores that are >= least, and what ties with the last of them.
Pool top_of(const float* row, int64_t V, size_t count, float least) {
  Pool pool;
  size_t full = 0;
  const auto cut = [&] {
    std::nth_element(pool.begin(), pool.begin() + count - 1, pool.end(), std::greater<>());
    least = pool[count - 1];
    pool.erase(std::remove_if(pool.begin(), pool.end(), [&](float x) { return x < least; }),
               pool.end());
    full = 2 * pool.size() + 4096;  // of the size now: ties may be more than `count`
  };
  for_each_vector(row, V, [&](vf x, int64_t) {
    if (!any((vi)(x >= least))) return;
    for (int i = 0; i < W; i++)
      if (x[i] >= least && x[i] > -INFINITY) pool.push_back(x[i]);
    if (pool.size() >= std::max(full, 2 * count + 4096)) cut();
  });
  if (pool.size() > count) cut();
  return pool;
}

double mass_of(const float* scores, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i++) total += std::exp(scores[i]);
  return total;
}

// The first score at which the mass from the largest down is `target`; else `none`.
float reach(Pool& pool, double target, float none) {
  std::sort(pool.begin(), pool.end(), std::greater<>());
  double mass = 0;
  for (float score : pool)
    if ((mass += std::exp(score)) >= target) return score;
  return none;
}

// As in quickselect: split the pool in the middle of its range, go on with the part that counts.
float search(Pool pool, double target) {
  while (pool.size() > NUM_SORTED) {
    const auto [low, high] = std::minmax_element(pool.begin(), pool.end());
    if (*low == *high) return *low;
    const float middle = (*low + *high) / 2, split = middle > *low ? middle : *high;
    const auto lower =
        std::partition(pool.begin(), pool.end(), [&](float x) { return x >= split; });
    const double mass = mass_of(pool.data(), lower - pool.begin());
    if (mass >= target) {
      pool.erase(lower, pool.end());
    } else {
      pool.erase(pool.begin(), lower);
      target -= mass;
    }
  }
  const float last = *std::min_element(pool.begin(), pool.end());
  return reach(pool, target, last);  // `last`: top_p is within rounding of 1
}

// The same for a whole row: its mass is added up in narrow ranges of scores first, and only the
// range where `share` of it is reached is searched.
float search_row(const float* row, int64_t V, double share, float least) {
  double masses[RANGES] = {};
  const auto range_of = [](vf x) {
    return __builtin_convertvector((x > LOWEST ? x : vf{} + LOWEST) * -PER_UNIT, vi);  // NaN, too
  };
  for_each_vector(row, V, [&](vf x, int64_t) {
    const vf mass = x >= least ? exp_of_negative(x) : vf{};
    const vi range = range_of(x);
    for (int i = 0; i < W; i++) masses[range[i]] += mass[i];
  });
  double before = 0;
  const double target = share * std::accumulate(masses, masses + RANGES, 0.);
  int found = 0;
  while (found + 1 < RANGES && before + masses[found] < target) before += masses[found++];
  Pool pool;
  for_each_vector(row, V, [&](vf x, int64_t) {
    const vi hits = (vi)(x >= least) & (range_of(x) == found);
    if (!any(hits)) return;
    for (int i = 0; i < W; i++)
      if (hits[i] && x[i] > -INFINITY) pool.push_back(x[i]);
  });
  return pool.empty() ? least : search(pool, target - before);
}

struct Filters { int64_t top_k; float top_p, min_p; };

// The smallest score that the filters leave.
float threshold(const float* row, int64_t V, const Filters& filters) {
  float least = std::log(filters.min_p);
  Pool top;
  if (filters.top_k > 0 && filters.top_k < V) {
    top = top_of(row, V, filters.top_k, least);
    if (top.size() >= size_t(filters.top_k)) least = *std::min_element(top.begin(), top.end());
  }
  if (!(filters.top_p < 1)) return least;
  if (!top.empty()) return search(top, filters.top_p * mass_of(top.data(), top.size()));
  return search_row(row, V, filters.top_p, least);
}

// The argmax of score + noise; `mixed` holds mix(id).
int64_t draw(const float* row, int64_t V, float least, uint32_t key, const uint32_t* mixed) {
  int64_t winner = 0;
  double best = -INFINITY;
  uint32_t needed = 0;
  float limit = least;
  for_each_vector(row, V, [&](vf x, int64_t first) {
    if (!any((vi)(x >= limit))) return;
    const vu hashes = mix(read<vu>(mixed + first) ^ key) & MASK;
    if (!any((vi)(x >= limit) & (vi)(hashes >= needed))) return;
    for (int i = 0; i < W; i++) {
      if (!(x[i] >= limit) || hashes[i] < needed || first + i >= V) continue;
      const double noisy = x[i] + gumbel(hashes[i]);
      if (noisy <= best) continue;
      best = noisy, winner = first + i;
      needed = smallest_hash(best);
      limit = std::max(least, float(best - MAX_NOISE - 1e-3));
    }
  });
  return winner;
}

}  // namespace

// temperatures [R]: 0 takes the largest. top_k: 0 is off; top_p: 1 is off; min_p: 0 is off.
extern "C" void nanoinfer_draw(float* logits, int64_t R, int64_t V, int64_t stride,
                               const float* temperatures, const int64_t* top_k, const float* top_p,
                               const float* min_p, const uint32_t* keys, int64_t* ids,
                               int threads) {
  std::vector<uint32_t> mixed(V + W);
  for (int64_t i = 0; i < V + W; i++) mixed[i] = mix(uint32_t(i));
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (R > 1)
  for (int64_t r = 0; r < R; r++) {
    float* row = logits + r * stride;
    const float top = largest(row, V), temperature = temperatures[r];
    if (temperature == 0) {
      ids[r] = (std::find(row, row + V, top) - row) % V;  // 0 where all are NaN
      continue;
    }
    for (int64_t i = 0; i < V; i++) row[i] = (row[i] - top) / temperature;
    const float least = threshold(row, V, {top_k[r], top_p[r], min_p[r]});
    ids[r] = draw(row, V, least, keys[r], mixed.data());
  }
}
