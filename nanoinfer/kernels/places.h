// Where sequences of a step lie, and the slots of their states: what causal_conv.cpp and
// gated_delta.cpp are both given.
#pragma once
#include <cstdint>

namespace {

// The first sequence whose slots or tokens are out of bounds, or -1.
int64_t first_invalid(const int32_t* cu_seqlens_q, const int32_t* sources, const int32_t* slots,
                      int64_t S, int64_t num_tokens, int64_t num_slots) {
  for (int64_t s = 0; s < S; s++) {
    const bool ok = sources[s] >= 0 && sources[s] < num_slots && slots[s] >= 0 &&
                    slots[s] < num_slots && cu_seqlens_q[s] <= cu_seqlens_q[s + 1] &&
                    cu_seqlens_q[0] >= 0 && cu_seqlens_q[s + 1] <= num_tokens;
    if (!ok) return s;
  }
  return -1;
}

}  // namespace
