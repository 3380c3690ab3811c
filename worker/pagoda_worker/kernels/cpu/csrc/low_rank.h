// What adapters add to a linear layer, by `add_low_rank` in kernels/reference.py: first down to the ranks, then, in the
// epilogue of the layer, up to its outputs. Both add in one order, whatever else is computed.
#pragma once

#include <cstring>

#include "program.h"
#include "simd.h"

namespace PAGODA_NS {

constexpr int RANKS_AT_ONCE = 4;

PAGODA_INLINE f16 bf16_below(const uint16_t* p, int count) {
  if (count >= 16) return load_bf16(p);
  uint16_t t[16] = {};
  memcpy(t, p, 2 * (size_t)count);
  return load_bf16(t);
}

// Products of x [k] with so many lines of a.
template <int RANKS>
PAGODA_INLINE void shrink_ranks(const uint16_t* x, const uint16_t* a, int k, const float* scales, float* low) {
  f16 acc[RANKS];
#pragma GCC unroll 4
  for (int r = 0; r < RANKS; ++r) acc[r] = zero();
  for (int i = 0; i < k; i += 16) {
    const f16 values = bf16_below(x + i, k - i);
#pragma GCC unroll 4
    for (int r = 0; r < RANKS; ++r) acc[r] = fma(values, bf16_below(a + (size_t)r * k + i, k - i), acc[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < RANKS; ++r) low[r] = sum(acc[r]) * scales[r];
}

// A piece is 16 of the ranks for a token; the first of them also says which slot that has.
static void shrink_piece(const ShrinkOp& op, const int32_t* slots, int item) {
  const int pieces = op.width / 16, row = item / pieces, from = item % pieces * 16;
  const uint16_t* x = op.x + (size_t)row * op.k;
  float* low = op.low + (size_t)row * (LOW_HEAD + op.width);
  int32_t slot = slots ? slots[row] : -1;
  if (slot >= 0 && op.slots[slot].rank == 0) slot = -1;
  if (from == 0) memcpy(low, &slot, sizeof slot);
  if (slot < 0) return;
  const LowSlot& adapter = op.slots[slot];
  const int to = adapter.rank < from + 16 ? (int)adapter.rank : from + 16;
  int rank = from;
  for (; rank + RANKS_AT_ONCE <= to; rank += RANKS_AT_ONCE)
    shrink_ranks<RANKS_AT_ONCE>(x, adapter.a + (size_t)rank * op.k, op.k, adapter.scales + rank, low + LOW_HEAD + rank);
  for (; rank < to; ++rank)
    shrink_ranks<1>(x, adapter.a + (size_t)rank * op.k, op.k, adapter.scales + rank, low + LOW_HEAD + rank);
}

PAGODA_INLINE int slot_in(const float* low) {
  int32_t slot;
  memcpy(&slot, low, sizeof slot);
  return slot;
}

// What an adapter adds to 16 outputs of a token.
PAGODA_INLINE f16 expanded(const LowSlot& adapter, const float* low, int group) {
  const int32_t* span = adapter.groups + 3 * group;
  const uint16_t* b = adapter.b + 16 * (size_t)span[2];
  f16 total = zero();
  for (int i = 0; i < span[1]; ++i) total = fma(set1(low[LOW_HEAD + span[0] + i]), load_bf16(b + 16 * i), total);
  return total;
}

}  // namespace PAGODA_NS
