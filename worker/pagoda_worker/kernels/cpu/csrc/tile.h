// The micro-kernel of vector units (`amx.h` has that of the matrix unit): C[ROWS][GROUPS x 16] += A[ROWS][K] * B, where B lies in panels of 16 columns with K in pairs.
//
// There is a single accumulation chain over all of K per output, in index order (where a layer has segments, K is one of
// them). That is why a row's bits depend neither on how many rows are in the tile nor on which thread computes it. The
// same code multiplies activations with weights, queries with keys, and probabilities with values. How two numbers are
// multiplied is said by NUMBERS; see Bf16 in simd.h.
#pragma once

#include "simd.h"

namespace PAGODA_NS {

// Pointers into ROWS rows that lie `stride` bytes apart: STRIDE if that is known, when one will do for all. Else rows are
// reached in threes from one pointer, by what a memory operand can add to it, because a pointer for each would not fit into
// the registers.
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

// b[g] points at the first pair row of group g; the next pair row is `stride` words on. fetch(k) is called along the way, for
// what is read later: a few lines at a time, because more than the hardware can wait for at once would hold up the arithmetic;
// by itself it falls behind as soon as there are a few rows to multiply.
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

// Groups of a tile of so many rows, if there are `most`.
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
