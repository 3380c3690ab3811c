// A matrix's inputs are cut into segments, whose sums are added in a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
//
// So the sum of a shard with a quarter of the inputs, two of eight segments, is a node of the whole layer's tree: the sums of
// any number of shards that divides the segments add up to the same bits.
#pragma once

#include "simd.h"

namespace PAGODA_NS {

constexpr int PANEL = 32;  // columns

// Sums of ROWS rows, segment after segment. A segment is summed up behind the partial sums that still wait for their sibling:
// their number is the number of ones in the segment's binary index, so up to eight segments need four places.
template <int ROWS>
class SegmentSums {
 public:
  // Where this segment of rows from `row` on is summed up, [..][PANEL].
  PAGODA_INLINE_MEMBER float* of(int segment, int row) { return places_[__builtin_popcount((unsigned)segment)][row]; }
  PAGODA_INLINE_MEMBER void start(int segment, int row, int rows) {
    memset(of(segment, row), 0, (size_t)rows * sizeof places_[0][0]);
  }
  // Adds the segment's sum to its sibling's, their sum to that of their siblings, and so on up the tree.
  PAGODA_INLINE_MEMBER void put(int segment, int row, int column, f16 sum) {
    for (; segment & 1; segment >>= 1) sum = load(of(segment >> 1, row) + column) + sum;
    store(of(segment, row) + column, sum);
  }
  // The same for sums that were computed in place.
  PAGODA_INLINE_MEMBER void end(int segment, int row, int rows) {
    if ((segment & 1) == 0) return;
    const float* from = of(segment, row);
    for (int i = 0; i < rows * PANEL; i += 16) put(segment, row, i, load(from + i));
  }
  // The sum over all segments, once the last has ended.
  PAGODA_INLINE_MEMBER float* total(int row) { return places_[0][row]; }

 private:
  alignas(64) float places_[4][ROWS][PANEL];
};

}  // namespace PAGODA_NS
