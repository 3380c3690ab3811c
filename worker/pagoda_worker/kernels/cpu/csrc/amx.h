// The micro-kernel for the matrix unit (AMX): C[rows][32] += A[rows][K] * B, 32 rows at a time, from the same panels as
// elsewhere.
//
// Here too each output has its own accumulation chain: pair rows are added sixteen at a time, in index order. The result
// does not depend on how many other rows a tile has.
#pragma once

#ifdef __AMX_BF16__
#include <utility>

#include "simd.h"

namespace PAGODA_NS {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BLOCK = 2 * TILE_ROWS;  // rows at a time
constexpr int TILE_WORDS = 16;             // four-byte words in a row of a tile; also words of K in one product
constexpr int PANEL_STRIDE = 128;          // bytes between words of K; a panel has 32 columns side by side

// Tiles 0 and 1 hold the sums of the upper rows for the panel's two halves, 2 and 3 those of the lower rows; 4 and 5 hold
// rows, 6 and 7 the panel. The destructor releases them: while in use, the system saves them at every context switch.
class Tiles {
 public:
  // For `rows` rows in all. With more than sixteen, every tile has sixteen rows, the last of which may be unused.
  explicit Tiles(int rows) {
    Shape shape = {};
    shape.palette = 1;
    const int height = rows < TILE_ROWS ? rows : TILE_ROWS;
    for (int t = 0; t < 8; ++t) {
      shape.rows[t] = (uint8_t)(t < 6 ? height : TILE_ROWS);
      shape.row_bytes[t] = 4 * TILE_WORDS;
    }
    asm volatile("" : : "r"(&shape) : "memory");  // not every compiler knows that the next line reads all of it
    _tile_loadconfig(&shape);
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

 private:
  struct alignas(64) Shape {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

// Prefetches `step` bytes with each product. For a single block of rows: the same panel, from memory into the second-level
// cache and, closer to use, into the first. For several blocks: the next panel, into a cache that has room for both.
struct TileAhead {
  const char* at;
  size_t step;
  bool single;

  PAGODA_INLINE_MEMBER TileAhead(const void* panel, size_t bytes, size_t product_bytes, int rows) {
    const size_t blocks = (size_t)(rows + TILE_BLOCK - 1) / TILE_BLOCK;
    single = blocks == 1;
    step = product_bytes / blocks / 64 * 64;
    at = (const char*)panel + (single ? FAR_AHEAD : bytes);
  }
  PAGODA_INLINE_MEMBER void fetch() {
    for (const char* to = at + step; at < to; at += 64) {
      if (single) prefetch_twice(at);
      else prefetch_l2(at);
    }
  }
  // Skips bytes of the same panel that belong to no product.
  PAGODA_INLINE_MEMBER void skip(size_t bytes) {
    if (single) at += bytes;
  }
};

// Where the rows of tiles are: the upper tile's at `at`, `stride` bytes apart; the lower tile's `lower` bytes further; those
// of the next product `step` bytes further.
struct TileRows {
  const char* at;
  size_t stride, lower, step;
};

// Products of pairs of bf16, or of bytes: signed in rows, and unsigned or signed in the panel. A macro, because the
// intrinsics need tile numbers as literals.
enum class TileProduct { PAIRS, BYTES, SIGNED };
#define PAGODA_TILE_PRODUCT(kind, c, a, b)                                \
  if constexpr (kind == TileProduct::PAIRS) _tile_dpbf16ps(c, a, b);      \
  else if constexpr (kind == TileProduct::BYTES) _tile_dpbsud(c, a, b);   \
  else _tile_dpbssd(c, a, b)

// Sums still held in tiles, and where to store them. Each is stored just before its tile is reused, between products that do
// not wait for the store. Storing all four at the end would take as long as a product of all four.
class Unstored {
 public:
  // Must be called before the sums are read, unless they are read only alongside the products that follow.
  PAGODA_INLINE_MEMBER void store() {
    if (at_ == nullptr) return;
    _tile_stored(0, at_, PANEL_STRIDE);
    _tile_stored(1, at_ + PANEL_STRIDE / 2, PANEL_STRIDE);
    if (lower_) {
      _tile_stored(2, at_ + TILE_ROWS * PANEL_STRIDE, PANEL_STRIDE);
      _tile_stored(3, at_ + TILE_ROWS * PANEL_STRIDE + PANEL_STRIDE / 2, PANEL_STRIDE);
    }
    at_ = nullptr;
  }
  // From now on the tiles hold the sums at `to`, with LOWER those of the lower rows too. Returns where their current sums
  // belong.
  template <bool LOWER>
  PAGODA_INLINE_MEMBER char* next(char* to) {
    if (lower_ != LOWER) store();
    lower_ = LOWER;
    return std::exchange(at_, to);
  }

 private:
  char* at_ = nullptr;
  bool lower_ = false;
};

// Starts a tile of sums at `to` and stores what it held to `before`, unless it continues with the same sums.
#define PAGODA_TILE_BEGIN(t, offset)                                                \
  if (!goes_on) {                                                                   \
    if (before) _tile_stored(t, before + (offset), PANEL_STRIDE);                   \
    if constexpr (BEGIN) _tile_zero(t);                                             \
    else _tile_loadd(t, to + (offset), PANEL_STRIDE);                               \
  }

// sums [rows][32] = (with BEGIN) or += `products` products of sixteen words each, at least one; LOWER: there are more than
// sixteen rows.
// Rows are streamed, leaving the first-level cache to the panel. beside() is called with every product: vector units work in
// parallel with the matrix unit.
template <TileProduct KIND, bool LOWER, bool BEGIN, typename BESIDE>
static void tile_sums(TileRows a, const char* panel, int products, TileAhead& ahead, void* sums, Unstored& unstored,
                      BESIDE& beside) {
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read what was written before
  constexpr int HALF = PANEL_STRIDE / 2, BELOW = TILE_ROWS * PANEL_STRIDE;
  char* const to = (char*)sums;
  char* const before = unstored.next<LOWER>(to);
  bool goes_on = !BEGIN && before == to;
  for (int i = 0; i < products; ++i, a.at += a.step, panel += TILE_WORDS * PANEL_STRIDE) {
    PAGODA_TILE_BEGIN(0, 0)
    _tile_stream_loadd(4, a.at, a.stride);
    _tile_loadd(6, panel, PANEL_STRIDE);
    PAGODA_TILE_PRODUCT(KIND, 0, 4, 6);
    PAGODA_TILE_BEGIN(1, HALF)
    _tile_loadd(7, panel + HALF, PANEL_STRIDE);
    ahead.fetch();
    PAGODA_TILE_PRODUCT(KIND, 1, 4, 7);
    if constexpr (LOWER) {
      PAGODA_TILE_BEGIN(2, BELOW)
      _tile_stream_loadd(5, a.at + a.lower, a.stride);
      PAGODA_TILE_PRODUCT(KIND, 2, 5, 6);
      PAGODA_TILE_BEGIN(3, BELOW + HALF)
      PAGODA_TILE_PRODUCT(KIND, 3, 5, 7);
    }
    goes_on = true;
    beside();
  }
}

template <TileProduct KIND, typename BESIDE>
PAGODA_INLINE void tile_sums(int rows, bool begin, const TileRows& a, const void* panel, int products, TileAhead& ahead,
                             void* sums, Unstored& unstored, BESIDE&& beside) {
  const char* words = (const char*)panel;
  if (rows > TILE_ROWS) {
    if (begin) tile_sums<KIND, true, true>(a, words, products, ahead, sums, unstored, beside);
    else tile_sums<KIND, true, false>(a, words, products, ahead, sums, unstored, beside);
  } else {
    if (begin) tile_sums<KIND, false, true>(a, words, products, ahead, sums, unstored, beside);
    else tile_sums<KIND, false, false>(a, words, products, ahead, sums, unstored, beside);
  }
}

// Rows in the order in which tiles read them: 64 bytes of each of sixteen rows for one product, then for the next. So they
// form one stream, and the row length cannot make rows collide in a cache set.
struct TileOrder {
  size_t row_bytes;  // a multiple of 64

  static constexpr size_t PRODUCT = 64;
  PAGODA_INLINE_MEMBER size_t total(int rows) const { return (size_t)(rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * row_bytes; }
  PAGODA_INLINE_MEMBER size_t at(int row, size_t byte) const {
    const size_t tile = ((size_t)(row / TILE_ROWS) * row_bytes + byte / PRODUCT * PRODUCT) * TILE_ROWS;
    return tile + (size_t)(row % TILE_ROWS) * PRODUCT + byte % PRODUCT;
  }
  PAGODA_INLINE_MEMBER TileRows tile(const void* rows, int row, int product) const {
    return {(const char*)rows + at(row, (size_t)product * PRODUCT), PRODUCT, TILE_ROWS * row_bytes, TILE_ROWS * PRODUCT};
  }
};

}  // namespace PAGODA_NS
#endif
