// The best noisy score of a row, where only large noise can win: the twin of draw_wide_ref.
//
// In:  scores [V], at most 0; the row's key; the least hash whose noise is large enough; threshold.
// Out: the id with the largest score + noise among those with score >= threshold, the lowest of
// equals. Hashing all ids is cheap (the first loop is vectorised); logarithms are taken for few.
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t CHUNK = 256;
constexpr uint32_t MASK = (1u << 24) - 1;

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

double gumbel(uint32_t hash) { return -std::log(-std::log((hash + 0.5) / (MASK + 1.0))); }

}  // namespace

extern "C" int64_t nanoinfer_draw_wide(const float* scores, int64_t V, uint32_t key,
                                       uint32_t smallest_hash, float threshold) {
  int64_t winner = 0;
  double highest = -INFINITY;
  uint32_t hashes[CHUNK];
  for (int64_t begin = 0; begin < V; begin += CHUNK) {
    for (uint32_t i = 0; i < CHUNK; i++) hashes[i] = mix(key ^ mix(uint32_t(begin) + i)) & MASK;
    for (int64_t i = 0; i < CHUNK && begin + i < V; i++) {
      if (hashes[i] < smallest_hash || !(scores[begin + i] >= threshold)) continue;
      const double noisy = scores[begin + i] + gumbel(hashes[i]);
      if (noisy > highest) highest = noisy, winner = begin + i;
    }
  }
  return winner;
}
