// Tiles of the matrix unit: C[rows][32] += A[rows][K] * B, 32 rows at a time, from the same panels as everywhere.
//
// Each output has a chain of its own here too: pair rows go into it sixteen by sixteen, in index order. How many other rows
// are in a tile, and whether there are any, changes nothing.
#pragma once

#ifdef __AMX_BF16__
#include "simd.h"

namespace PAGODA_NS {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BLOCK = 2 * TILE_ROWS;  // rows at a time
constexpr int TILE_WORDS = 16;             // of four bytes in a row of a tile; also words of K in one product
constexpr int PANEL_STRIDE = 128;          // bytes between words of K, of which a panel has 32 side by side

// Tiles 0 and 1 are sums of the upper rows and the panel's two halves, 2 and 3 of the lower rows; 4 and 5 are rows, 6 and 7
// the panel. They are given back at the end: while they are in use the system saves them with every switch.
class Tiles {
 public:
  explicit Tiles(int rows) : lower(rows > TILE_ROWS) {
    Shape shape = {};
    shape.palette = 1;
    const int upper_rows = lower ? TILE_ROWS : rows;
    const int height[8] = {upper_rows, upper_rows, rows - upper_rows, rows - upper_rows,
                           upper_rows, rows - upper_rows, TILE_ROWS, TILE_ROWS};
    for (int t = 0; t < 8; ++t) {
      shape.rows[t] = (uint8_t)height[t];
      shape.row_bytes[t] = height[t] ? 4 * TILE_WORDS : 0;
    }
    asm volatile("" : : "r"(&shape) : "memory");  // all of it is read, which the next line does not tell every compiler
    _tile_loadconfig(&shape);
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  const bool lower;  // whether there are more than sixteen rows

 private:
  struct alignas(64) Shape {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

// What the tiles read later, `step` bytes for each product; nothing if that is 0.
struct TileAhead {
  const char* at;
  size_t step;
  PAGODA_INLINE_MEMBER void fetch() {
    for (const char* to = at + step; at < to; at += 64) prefetch(at);
  }
};

// Of pairs of bf16, or of bytes: signed ones of rows with unsigned ones of the panel. A macro, as the compiler's own wants
// numbers of tiles literally.
#define PAGODA_TILE_PRODUCT(bytes, c, a, b)      \
  if constexpr (bytes) _tile_dpbsud(c, a, b);    \
  else _tile_dpbf16ps(c, a, b)

// sums [rows][32] = so many products of sixteen words, of rows that lie `stride` bytes apart.
template <bool BYTES, bool LOWER>
static void tile_sums(const char* a, size_t stride, const char* panel, int products, TileAhead& ahead, void* sums) {
  asm volatile("" ::: "memory");  // what was written before is read: loads of tiles do not say so to the compiler
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (LOWER) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < products; ++i, a += 4 * TILE_WORDS, panel += TILE_WORDS * PANEL_STRIDE) {
    _tile_loadd(4, a, stride);
    _tile_loadd(6, panel, PANEL_STRIDE);
    _tile_loadd(7, panel + PANEL_STRIDE / 2, PANEL_STRIDE);
    ahead.fetch();
    PAGODA_TILE_PRODUCT(BYTES, 0, 4, 6);
    PAGODA_TILE_PRODUCT(BYTES, 1, 4, 7);
    if constexpr (LOWER) {
      _tile_loadd(5, a + TILE_ROWS * stride, stride);
      PAGODA_TILE_PRODUCT(BYTES, 2, 5, 6);
      PAGODA_TILE_PRODUCT(BYTES, 3, 5, 7);
    }
  }
  char* to = (char*)sums;
  _tile_stored(0, to, PANEL_STRIDE);
  _tile_stored(1, to + PANEL_STRIDE / 2, PANEL_STRIDE);
  if constexpr (LOWER) {
    to += TILE_ROWS * PANEL_STRIDE;
    _tile_stored(2, to, PANEL_STRIDE);
    _tile_stored(3, to + PANEL_STRIDE / 2, PANEL_STRIDE);
  }
}

template <bool BYTES>
PAGODA_INLINE void tile_sums(const Tiles& tiles, const void* a, size_t stride, const void* panel, int products,
                             TileAhead& ahead, void* sums) {
  if (tiles.lower) tile_sums<BYTES, true>((const char*)a, stride, (const char*)panel, products, ahead, sums);
  else tile_sums<BYTES, false>((const char*)a, stride, (const char*)panel, products, ahead, sums);
}

}  // namespace PAGODA_NS
#endif
