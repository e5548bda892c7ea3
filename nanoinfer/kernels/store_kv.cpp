// Copy rows into the slots of the paged caches, on a CPU: the twin of store_kv_ref.
//
// In:  a key and a value row for each token, each contiguous, anywhere in memory, and their slots.
// Invariant: nothing is written if any slot is out of bounds. Sizes and strides are bytes, so that
// one body serves all dtypes.
#include <cstdint>
#include <cstring>

// Returns -1, or the first token whose slot is out of bounds.
extern "C" int64_t nanoinfer_store_kv(void* k_cache, void* v_cache, const void* k, const void* v,
                                      const int64_t* slots, int64_t T, int64_t num_slots,
                                      int64_t row, int64_t k_stride, int64_t v_stride,
                                      int threads) {
  constexpr int64_t MIN_PARALLEL = 65536;  // bytes that are worth waking threads for
  for (int64_t t = 0; t < T; t++)
    if (slots[t] < 0 || slots[t] >= num_slots) return t;
#pragma omp parallel for num_threads(threads) if (2 * T * row > MIN_PARALLEL)
  for (int64_t t = 0; t < T; t++) {
    std::memcpy((char*)k_cache + slots[t] * row, (const char*)k + t * k_stride, row);
    std::memcpy((char*)v_cache + slots[t] * row, (const char*)v + t * v_stride, row);
  }
  return -1;
}
