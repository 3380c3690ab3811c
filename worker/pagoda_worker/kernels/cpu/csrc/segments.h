// The inputs of a matrix fall into segments, whose sums are added in a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
//
// So the layer on a quarter of the inputs, in two segments of eight, has as its sum what is a node of the tree of the whole:
// shards of any number that divides the segments add up to the same bits.
#pragma once

#include "simd.h"

namespace PAGODA_NS {

constexpr int PANEL = 32;  // columns

// Of ROWS rows, segment after segment. Where a segment is summed up lie, before it, the sums that still wait for theirs to
// be added: as many as its number has ones, so with up to eight segments there are four places.
template <int ROWS>
class SegmentSums {
 public:
  // Where rows from `row` on are summed up, [..][PANEL].
  PAGODA_INLINE_MEMBER float* of(int segment, int row) { return places_[__builtin_popcount((unsigned)segment)][row]; }
  PAGODA_INLINE_MEMBER void start(int segment, int row, int rows) {
    memset(of(segment, row), 0, (size_t)rows * sizeof places_[0][0]);
  }
  // The segment's sum is added to its neighbour's, what they are together to that of theirs, and so on.
  PAGODA_INLINE_MEMBER void put(int segment, int row, int column, f16 sum) {
    for (; segment & 1; segment >>= 1) sum = load(of(segment >> 1, row) + column) + sum;
    store(of(segment, row) + column, sum);
  }
  // The same of what was summed up in place.
  PAGODA_INLINE_MEMBER void end(int segment, int row, int rows) {
    if ((segment & 1) == 0) return;
    const float* from = of(segment, row);
    for (int i = 0; i < rows * PANEL; i += 16) put(segment, row, i, load(from + i));
  }
  // Of all segments, once the last has ended.
  PAGODA_INLINE_MEMBER float* total(int row) { return places_[0][row]; }

 private:
  alignas(64) float places_[4][ROWS][PANEL];
};

}  // namespace PAGODA_NS
