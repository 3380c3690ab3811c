// Rows of a matrix in the form that tiles read, kept by a thread while it works through panels.
//
// A thread prepares the rows of a block when it reaches the block. Threads that share a block each prepare it themselves,
// which is cheaper than waiting for each other. A thread's buffer grows to the size of the largest block it has had.
#pragma once

#include <cstdlib>

#include "amx.h"
#include "simd.h"

namespace PAGODA_NS {

class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  ~Kept() { free(memory_); }

 protected:
  // Whether the rows from `first` on are already here. `use` identifies the operation and the call: see Work in program.h.
  bool holds(int first, uint64_t use) const { return use == use_ && first == first_; }
  void hold(int first, uint64_t use) {
    first_ = first;
    use_ = use;
  }
  // Discards the contents. Not a std::vector: the linker could give one level another level's copy of its code.
  uint8_t* reserve(size_t bytes) {
    use_ = 0;
    if (bytes <= size_) return memory_;
    free(memory_);
    size_ = (bytes + 4095) / 4096 * 4096;
    memory_ = (uint8_t*)aligned_alloc(64, size_);
    if (memory_ == nullptr) abort();
    return memory_;
  }
  int first() const { return first_; }
  // The stride for rows of `bytes` bytes. Rows a power of two apart would share a cache set.
  static size_t apart(size_t bytes) { return (bytes + 63) / 64 * 64 + 64; }

 private:
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
  int first_ = -1;
  uint64_t use_ = 0;
};

// Rows of bf16 as Bf16::Left.
class LeftRows : public Kept {
 public:
  // Takes rows [first, last), given as `x` [last - first, k]: `apart_by` elements from one to the next; 0: contiguous.
  void take(const uint16_t* x, int first, int last, int k, int apart_by, uint64_t use) {
    if (holds(first, use)) return;
    const size_t step = (size_t)(apart_by ? apart_by : k);
    if constexpr (sizeof(Bf16::Left) == 2) {
      rows_ = (const char*)x;
      stride_ = 2 * step;
    } else {
      stride_ = apart((size_t)k * sizeof(Bf16::Left));
      char* to = (char*)reserve((size_t)(last - first) * stride_);
      rows_ = to;
      for (int r = first; r < last; ++r, x += step, to += stride_) widen(x, (Bf16::Left*)to, k);
    }
    hold(first, use);
  }

#ifdef __AMX_BF16__
  // The same, for tiles that take each segment product by product.
  void take_tiles(const uint16_t* x, int first, int last, int k, int segments, int apart_by, uint64_t use) {
    if (holds(first, use)) return;
    segment_bytes_ = 2 * (size_t)k / segments;
    products_ = (int)(segment_bytes_ / TileOrder::PRODUCT);
    take(x, first, last, k, apart_by, use);
    tiles_ = nullptr;
    if (last - first > TILE_ROWS) order_tiles(last - first, segments);
    hold(first, use);
  }
  // The tile whose first row is `row`, for one product of a segment.
  TileRows tile(int row, int segment, int product) const {
    if (tiles_) return order_.tile(tiles_, row - first(), segment * products_ + product);
    const char* at = rows_ + (size_t)(row - first()) * stride_ + segment * segment_bytes_ + product * TileOrder::PRODUCT;
    return {at, stride_, 0, TileOrder::PRODUCT};
  }
#endif
  const Bf16::Left* row(int row) const { return (const Bf16::Left*)(rows_ + (size_t)(row - first()) * stride_); }
  size_t stride() const { return stride_; }  // bytes

 private:
  static void widen(const uint16_t* x, Bf16::Left* to, int k) {
    int i = 0;
    for (; i + 16 <= k; i += 16) store_left(to + i, load_bf16(x + i));
    for (; i < k; ++i) {
      const uint32_t bits = (uint32_t)x[i] << 16;
      memcpy(to + i, &bits, sizeof *to);
    }
  }

#ifdef __AMX_BF16__
  void order_tiles(int rows, int segments) {
    order_ = {(size_t)products_ * segments * TileOrder::PRODUCT};
    tiles_ = reserve(order_.total(rows));
    uint8_t* to = tiles_;
    for (int from = 0; from < rows; from += TILE_ROWS) {
      const int height = rows - from < TILE_ROWS ? rows - from : TILE_ROWS;
      for (int segment = 0; segment < segments; ++segment)
        for (int i = 0; i < products_; ++i, to += TILE_ROWS * TileOrder::PRODUCT) {
          const char* x = rows_ + from * stride_ + segment * segment_bytes_ + i * TileOrder::PRODUCT;
          for (int r = 0; r < height; ++r) memcpy(to + r * TileOrder::PRODUCT, x + r * stride_, TileOrder::PRODUCT);
        }
    }
  }

  uint8_t* tiles_ = nullptr;  // the rows in tile order, or null
  TileOrder order_ = {};
  size_t segment_bytes_ = 0;
  int products_ = 0;  // of a segment
#endif
  const char* rows_ = nullptr;
  size_t stride_ = 0;
};

}  // namespace PAGODA_NS
