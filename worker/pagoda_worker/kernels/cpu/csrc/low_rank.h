// The low-rank products that adapters add to a linear layer, as `add_low_rank` in kernels/reference.py defines them: first
// down to the ranks, then, in the layer's epilogue, up to its outputs. Both sum in a fixed order.
#pragma once

#include <cstring>

#include "program.h"
#include "segments.h"
#include "simd.h"
#include "tile.h"

namespace PAGODA_NS {

constexpr int RANKS_AT_ONCE = 4, TOKENS_AT_ONCE = 4;  // sums in registers; tokens are neighbours with the same adapter

PAGODA_INLINE f16 bf16_below(const uint16_t* p, int count) {
  if (count >= 16) return load_bf16(p);
  uint16_t t[16] = {};
  memcpy(t, p, 2 * (size_t)count);
  return load_bf16(t);
}

PAGODA_INLINE int slot_in(const float* low) {
  int32_t slot;
  memcpy(&slot, low, sizeof slot);
  return slot;
}

// Products of TOKENS tokens and RANKS lines of `a`.
template <int TOKENS, int RANKS>
static __attribute__((noinline)) void shrink_some(const ShrinkOp& op, const LowSlot& adapter, int row, int rank) {
  const uint16_t *x = op.x + (size_t)row * op.k, *a = adapter.a + (size_t)rank * op.k;
  f16 acc[TOKENS][RANKS];
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < RANKS; ++r) acc[t][r] = zero();
  const uint16_t* next = a + (size_t)RANKS * op.k;  // lines are too short for the hardware to find out that they are streams
  for (int i = 0; i < op.k; i += 16) {
    f16 lines[RANKS];
#pragma GCC unroll 4
    for (int r = 0; r < RANKS; ++r) {
      lines[r] = bf16_below(a + (size_t)r * op.k + i, op.k - i);
      prefetch(next + (size_t)r * op.k + i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
      const f16 values = bf16_below(x + (size_t)t * op.k + i, op.k - i);
#pragma GCC unroll 4
      for (int r = 0; r < RANKS; ++r) acc[t][r] = fma(values, lines[r], acc[t][r]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t) {
    float* low = op.low + (size_t)(row + t) * (LOW_HEAD + op.width) + LOW_HEAD + rank;
#pragma GCC unroll 4
    for (int r = 0; r < RANKS; ++r) low[r] = sum(acc[t][r]) * adapter.scales[rank + r];
  }
}

template <int TOKENS>
PAGODA_INLINE void shrink_tokens(const ShrinkOp& op, int slot, int row, int from) {
  const LowSlot& adapter = op.slots[slot];
  const int to = adapter.rank < from + 16 ? (int)adapter.rank : from + 16;
  int rank = from;
  for (; rank + RANKS_AT_ONCE <= to; rank += RANKS_AT_ONCE) shrink_some<TOKENS, RANKS_AT_ONCE>(op, adapter, row, rank);
  for (; rank < to; ++rank) shrink_some<TOKENS, 1>(op, adapter, row, rank);
}

static int shrink_pieces(const ShrinkOp& op, const Step& s) {
  return (s.num_tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE * (op.width / 16);
}

// The slot of a token, or -1 if nothing is added to it.
PAGODA_INLINE int32_t slot_of(const ShrinkOp& op, const Step& s, int token) {
  const int32_t slot = s.slots ? s.slots[token] : -1;
  return slot >= 0 && op.slots[slot].rank == 0 ? -1 : slot;
}

// A piece is 16 ranks for a few tokens; their first piece also writes the tokens' slots.
static void shrink_piece(const ShrinkOp& op, const Step& s, int item) {
  const int pieces = op.width / 16, first = item / pieces * TOKENS_AT_ONCE, from = item % pieces * 16;
  const int last = s.num_tokens - first < TOKENS_AT_ONCE ? s.num_tokens : first + TOKENS_AT_ONCE;
  for (int t = first; t < last;) {
    const int32_t slot = slot_of(op, s, t);
    int count = 1;
    while (t + count < last && slot_of(op, s, t + count) == slot) ++count;
    for (int i = 0; from == 0 && i < count; ++i)
      memcpy(op.low + (size_t)(t + i) * (LOW_HEAD + op.width), &slot, sizeof slot);
    if (slot >= 0) with_rows<TOKENS_AT_ONCE>(count, [&](auto tokens) { shrink_tokens<decltype(tokens)::value>(op, slot, t, from); });
    t += count;
  }
}

// Adds an adapter's part of 16 outputs to TOKENS lines of a tile.
template <int TOKENS>
PAGODA_INLINE void expand_some(const LowSlot& adapter, const float* low, size_t stride, int group, float* sums) {
  const int32_t* span = adapter.groups + 3 * group;
  const uint16_t* b = adapter.b + 16 * (size_t)span[2];
  f16 total[TOKENS];
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t) total[t] = zero();
  low += LOW_HEAD + span[0];
  for (int i = 0; i < span[1]; ++i) {
    const f16 line = load_bf16(b + 16 * i);
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) total[t] = fma(set1(low[t * stride + i]), line, total[t]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t) store(sums + t * PANEL, load(sums + t * PANEL) + total[t]);
}

// Fetches what `expand` will read for these rows and this panel, so that it arrives while they are multiplied.
PAGODA_INLINE void fetch_expansion(const LinearOp& op, int first, int last, int column) {
  const float* low = op.low + (size_t)first * (LOW_HEAD + op.low_width);
  for (int r = first, before = -1; r < last; ++r, low += LOW_HEAD + op.low_width) {
    const int slot = slot_in(low);
    if (slot < 0 || slot == before) continue;
    before = slot;
    const int32_t* span = op.slots[slot].groups + 3 * (column / 16);
    for (int half = 0; half < 2; ++half, span += 3)
      for (int i = 0; i < span[1]; i += 2) prefetch(op.slots[slot].b + 16 * ((size_t)span[2] + i));
  }
}

// Adds the adapters' part of a panel's outputs to the sums [rows][PANEL]. Rows without an adapter are not touched.
static __attribute__((noinline)) void expand(float* sums, int rows, int first, int column, const LinearOp& op) {
  const size_t stride = LOW_HEAD + op.low_width;
  const float* low = op.low + (size_t)first * stride;
  for (int r = 0; r < rows;) {
    const int slot = slot_in(low + r * stride);
    int count = 1;
    while (count < TOKENS_AT_ONCE && r + count < rows && slot_in(low + (r + count) * stride) == slot) ++count;
    for (int half = 0; slot >= 0 && half < 2; ++half)
      with_rows<TOKENS_AT_ONCE>(count, [&](auto tokens) {
        expand_some<decltype(tokens)::value>(op.slots[slot], low + r * stride, stride, column / 16 + half, sums + r * PANEL + 16 * half);
      });
    r += count;
  }
}

}  // namespace PAGODA_NS
