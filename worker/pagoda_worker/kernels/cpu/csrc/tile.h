// The one micro-kernel: C[ROWS][GROUPS x 16] += A[ROWS][K] * B, where B lies in panels of 16 columns with K in pairs.
//
// There is a single accumulation chain over all of K per output, in index order. That is why a row's bits depend neither on
// how many rows are in the tile nor on which thread computes it. The same code multiplies activations with weights,
// queries with keys, and probabilities with values.
#pragma once

#include "simd.h"

namespace PAGODA_NS {

// b[g] points at the first pair row of group g; the next pair row is `stride` words on. Where `ahead` is given, what lies
// there in the same way is fetched meanwhile, a few lines at a time, because more than the hardware can wait for at once
// would hold up the arithmetic; by itself it falls behind as soon as there are a few rows to multiply.
template <int ROWS, int GROUPS>
PAGODA_INLINE void tile(const uint16_t* a, size_t lda, const uint32_t* const* b, size_t stride, int num_pairs,
                        f16 (&acc)[ROWS][GROUPS], const uint32_t* const* ahead = nullptr) {
  for (int k = 0; k < num_pairs; ++k) {
    pairs column[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g) {
      column[g] = load_pairs(b[g] + k * stride);
      if (ahead) prefetch(ahead[g] + k * stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      uint32_t pair;
      memcpy(&pair, a + r * lda + 2 * k, 4);
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; ++g) acc[r][g] = dot2(acc[r][g], pair, column[g]);
    }
  }
}

// Calls f.template operator()<N>() for the N that equals n, 1 <= n <= MAX.
template <int MAX, typename F>
PAGODA_INLINE void with_rows(int n, F&& f) {
  if constexpr (MAX > 1) {
    if (n < MAX) {
      with_rows<MAX - 1>(n, f);
      return;
    }
  }
  f(std::integral_constant<int, MAX>{});
}

}  // namespace PAGODA_NS
