// The micro-kernel for vector units: C[ROWS][GROUPS x 16] += A[ROWS][K] * B, where B is stored in panels of 16 columns with
// K in pairs. `amx.h` has the micro-kernel for the matrix unit.
//
// Each output has a single accumulation chain over all of K, in index order (in a layer with segments, over one segment).
// That is why a row's bits depend neither on how many rows are in the tile nor on which thread computes it. The same code
// multiplies activations by weights, queries by keys, and probabilities by values. NUMBERS defines how two numbers are
// multiplied; see Bf16 in simd.h.
#pragma once

#include "simd.h"

namespace PAGODA_NS {

// Pointers into ROWS rows that are `stride` bytes apart. If the stride is a compile-time constant (STRIDE), one pointer
// serves all rows. Otherwise one pointer serves three rows, using the scaled index of a memory operand, because there are
// not enough registers for a pointer per row.
template <int ROWS, int STRIDE = 0>
struct Rows {
  static constexpr int SHARE = STRIDE ? ROWS : 3, POINTERS = (ROWS + SHARE - 1) / SHARE;
  const char* at[POINTERS];
  size_t stride;

  PAGODA_INLINE_MEMBER Rows(const void* first, size_t stride_ = STRIDE) : stride(STRIDE ? STRIDE : stride_) {
#pragma GCC unroll 8
    for (int i = 0; i < POINTERS; ++i) at[i] = (const char*)first + i * SHARE * stride;
  }
  template <typename T>
  PAGODA_INLINE_MEMBER const T* row(int row, int offset = 0) const {
    return (const T*)(at[row / SHARE] + row % SHARE * stride + offset);
  }
  PAGODA_INLINE_MEMBER uint32_t word(int row_, int offset = 0) const {
    uint32_t word;
    memcpy(&word, row<char>(row_, offset), 4);
    return word;
  }
  PAGODA_INLINE_MEMBER void move(int bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < POINTERS; ++i) at[i] += bytes;
  }
};

// b[g] points at the first pair row of group g; the next pair row is `stride` words further on. fetch(k), called in every
// iteration, prefetches a few lines of later data: more than the hardware can have in flight would stall the arithmetic,
// and the hardware prefetcher alone falls behind as soon as there are a few rows to multiply.
template <typename NUMBERS, int ROWS, int GROUPS, typename ROWS_OF_A, typename FETCH>
PAGODA_INLINE void tile(ROWS_OF_A a, const uint32_t* const* b, size_t stride, int num_pairs,
                        typename NUMBERS::Sum (&acc)[ROWS][GROUPS], FETCH&& fetch) {
  typedef typename NUMBERS::Left Left;
#pragma GCC unroll 1
  for (int k = 0; k < num_pairs; ++k, a.move(2 * sizeof(Left))) {
#pragma GCC unroll 2
    for (int pass = 0; pass < NUMBERS::PASSES; ++pass) {
      typename NUMBERS::Right column[GROUPS];
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; ++g) column[g] = NUMBERS::right(b[g] + k * stride, pass);
      if (pass == 0) fetch(k);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; ++g) acc[r][g] = NUMBERS::add(acc[r][g], a.template row<Left>(r), pass, column[g]);
    }
  }
}

// Groups that a tile of `rows` rows computes at once, out of `most`: as many as the accumulators allow.
constexpr int groups_of(int rows, int most) { return most > 1 && rows * most > ACCUMULATORS ? groups_of(rows, most / 2) : most; }

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
