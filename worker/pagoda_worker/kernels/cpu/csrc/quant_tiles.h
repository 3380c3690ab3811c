// 8-bit and 4-bit weights with tiles of the matrix unit. Nibbles are unpacked once for all rows of a block, to bytes or, for
// bf16 inputs, to bf16.
#pragma once

#include "quant.h"

namespace PAGODA_NS {

template <typename FORM>
constexpr int PRODUCT_INPUTS = (FORM::ROUNDED ? 4 : 2) * TILE_WORDS;

// Tiles are faster from this many rows on, with 4 bits later because words must be unpacked. Integer sums are the same either
// way; float sums are not, so tiles handle all of these.
constexpr int LEAST_TILE_ROWS[2] = {16, 4};  // with 4 bits, with 8
static bool tiles_take(const QuantForm& form, int rows) {
  if (form.input_bits == 16) return form.group % (2 * TILE_WORDS) == 0;
  return form.group % (4 * TILE_WORDS) == 0 && rows >= LEAST_TILE_ROWS[form.bits == 8];
}

// If the middle level is zero everywhere, nibbles are unpacked to signed values, and the rows' offsets are not used.
template <typename FORM>
constexpr bool SIGNED = FORM::BITS == 4 && FORM::ROUNDED && FORM::MIDDLE;

// Words of nibbles -> words of bytes, [words][PANEL] -> [2 * words][PANEL].
template <typename FORM>
static void unpack_nibbles(const uint8_t* words, int count, uint32_t* out) {
  const __m512i zero = _mm512_set1_epi8(SIGNED<FORM> ? 8 : 0);
  for (int i = 0; i < count; ++i, words += PANEL_ROW, out += 2 * PANEL)
    for (int c = 0; c < PANEL; c += 16) {
      const quads w = load_quads(words + 4 * c);
      store_quads(out + c, {_mm512_sub_epi8(low_nibbles(w).v, zero)});
      store_quads(out + PANEL + c, {_mm512_sub_epi8(high_nibbles(w).v, zero)});
    }
}

// Words of nibbles, of a group with this head -> words of pairs, [words][PANEL] -> [4 * words][PANEL].
template <typename FORM>
static void unpack_pairs(const uint8_t* head, const uint8_t* words, int count, uint32_t* out) {
  for (int c = 0; c < PANEL; c += 16) {
    const zero_points z = zeros_at<FORM>(head, c);
    for (int i = 0; i < count; ++i) {
      const quads w = load_quads(words + (size_t)i * PANEL_ROW + 4 * c);
      uint32_t* to = out + (size_t)4 * i * PANEL + c;
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s, to += PANEL) store_pairs(to, weights_of<FORM>(w, s, z));
    }
  }
}

// The words of a group's products [done, done + count): in place, or unpacked to `out`.
template <typename FORM>
PAGODA_INLINE const uint8_t* unpacked_words(const uint8_t* head, int done, int count, uint32_t* out) {
  const uint8_t* words = head + FORM::HEAD_BYTES + (size_t)done * PRODUCT_INPUTS<FORM> * PANEL * FORM::BITS / 8;
  if constexpr (FORM::BITS == 8) return words;
  if constexpr (FORM::ROUNDED) unpack_nibbles<FORM>(words, count * TILE_WORDS / 2, out);
  else unpack_pairs<FORM>(head, words, count * TILE_WORDS / 4, out);
  return (const uint8_t*)out;
}

constexpr int GROUPS_AT_ONCE = 2;  // the sums of more would not fit in the first-level cache

// Scales the sums of rows over some groups and adds them to their totals, a few rows with every product of later rows.
template <typename FORM>
class Scaling {
 public:
  typedef std::conditional_t<FORM::ROUNDED, int32_t, float> Sum;

  Scaling(const RoundedRows& rounded, int group) : rounded_(rounded), group_(group) {}
  // `sums` is [groups][TILE_BLOCK][PANEL] for rows from `from` on, `totals` [rows][PANEL]; the groups are those from number
  // `first` on, whose heads start at `head`. Each call of `some` then scales one of `parts` parts of the rows.
  PAGODA_INLINE_MEMBER void start(const Sum* sums, float* totals, int rows, int from, const uint8_t* head, int first, int groups,
                                  int parts) {
    sums_ = sums, totals_ = totals, rows_ = rows, from_ = from, head_ = head, first_ = first, groups_ = groups;
    part_ = ((rows + parts - 1) / parts + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  }
  PAGODA_INLINE_MEMBER void some() {
    if (rows_ > 0) scale(part_ < rows_ ? part_ : rows_);
  }
  PAGODA_INLINE_MEMBER void rest() {
    if (rows_ > 0) scale(rows_);
  }

 private:
  static constexpr int AT_ONCE = 8;  // rows whose totals fit in registers

  __attribute__((noinline)) void scale(int rows) {
    for (rows_ -= rows; rows >= AT_ONCE; rows -= AT_ONCE) add<AT_ONCE>();
    for (; rows > 0; --rows) add<1>();
  }
  template <int ROWS>
  PAGODA_INLINE_MEMBER void add() {
    f16 total[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < 2; ++c) total[r][c] = load(totals_ + r * PANEL + 16 * c);
    const uint8_t* head = head_;
    const Sum* sums = sums_;
    for (int g = first_; g < first_ + groups_; ++g, head += group_bytes<FORM>(group_), sums += TILE_BLOCK * PANEL) {
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const f16 scale = load_scales<FORM>(head, 16 * c);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const auto sum = load(sums + r * PANEL + 16 * c);
          if constexpr (FORM::ROUNDED) {
            const int32_t offset = rounded_.offsets(from_, g)[r];
            const ints whole = FORM::MIDDLE && !SIGNED<FORM> ? sum + set1(offset) : sum;
            total[r][c] = add_group<FORM>(total[r][c], whole, rounded_.scales(from_, g)[r], offset, head, scale, 16 * c);
          } else {
            total[r][c] = fma(sum, scale, total[r][c]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < 2; ++c) store(totals_ + r * PANEL + 16 * c, total[r][c]);
    sums_ += ROWS * PANEL, totals_ += ROWS * PANEL, from_ += ROWS;
  }
  const RoundedRows& rounded_;
  const int group_;
  const Sum* sums_ = nullptr;
  float* totals_ = nullptr;
  int rows_ = 0, from_ = 0, part_ = 0, first_ = 0, groups_ = 0;
  const uint8_t* head_ = nullptr;
};

// A block of rows [first, last) through one panel whose groups are whole products. The products of some rows are scaled and
// added, and at the end go through the epilogue, while the matrix unit works on those of the next rows.
//
// In a pass all rows are multiplied by some groups, or by part of one: as much of a panel as stays in the first-level cache.
template <typename FORM>
class TilePanel {
 public:
  TilePanel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column)
      : op_(op), in_(in), first_(first), last_(last), group_(op.form.group), panel_(panel), tiles_(last - first),
        ahead_(panel, quant_panel_bytes(op.form, op.k), PRODUCT_BYTES, last - first), scaling_(in.rounded, group_),
        finishing_(op, column) {}
  TilePanel(const TilePanel&) = delete;

  void run() {
    const int segment_groups = op_.k / group_ / op_.segments, at_once = products_ * GROUPS_AT_ONCE <= chunk_ ? GROUPS_AT_ONCE : 1;
    for (int g = 0; segment_ < op_.segments; ++segment_) {
      totals_.start(segment_, 0, last_ - first_);
      for (const int begin = g, end = g + segment_groups; g < end;) {
        const int groups = end - g < at_once ? end - g : at_once;
        if (products_ > chunk_) unstored_.store(), scaling_.rest();  // before the sums it reads are overwritten
        for (int done = 0; done < products_; done += chunk_) pass({g, groups, begin, done, g + groups == end});
        g += groups, panel_ += groups * group_bytes<FORM>(group_);
      }
    }
    finishing_.rest();
  }

 private:
  typedef typename Scaling<FORM>::Sum Sum;
  static constexpr size_t PRODUCT_BYTES = (size_t)PRODUCT_INPUTS<FORM> * PANEL * FORM::BITS / 8;
  static constexpr TileProduct KIND =
      !FORM::ROUNDED ? TileProduct::PAIRS : SIGNED<FORM> ? TileProduct::SIGNED : TileProduct::BYTES;

  // Groups [group, group + groups) of a segment that begins at group `segment`; of each, the products from `done` on.
  struct Pass {
    int group, groups, segment, done;
    bool ends;  // whether the pass ends the segment
  };

  PAGODA_INLINE_MEMBER void pass(const Pass& p) {
    const int count = products_ - p.done < chunk_ ? products_ - p.done : chunk_;
    const bool whole = p.done + count == products_, all = whole && p.ends && segment_ + 1 == op_.segments;
    const uint8_t* words[GROUPS_AT_ONCE];
    for (int i = 0; i < p.groups; ++i)
      words[i] = unpacked_words<FORM>(panel_ + i * group_bytes<FORM>(group_), p.done, count,
                                      unpacked_ + (FORM::BITS == 4 ? (size_t)i * count * TILE_WORDS * PANEL : 0));
    int before = 0;
    in_tile_blocks(first_, last_, [&](int rows, int from) {
      if (all) finishing_.expect(rows, from, p.groups * count);
      Sum* const sums = sums_ + (products_ > chunk_ ? from - first_ : turn_++ % 2 * GROUPS_AT_ONCE * TILE_BLOCK) * PANEL;
      for (int i = 0; i < p.groups; ++i) multiply(rows, from, p, i, words[i], count, sums + i * TILE_BLOCK * PANEL);
      if (!whole) return;
      scaled(before, from - before, p.ends, p.groups * count);
      scaling_.start(sums, totals_.of(segment_, from - first_), rows, from, panel_, p.group, p.groups, p.groups * count);
      before = rows;
    });
    if (whole && p.ends) unstored_.store(), scaled(before, last_ - before, true, 1);
  }

  PAGODA_INLINE_MEMBER void multiply(int rows, int from, const Pass& p, int i, const uint8_t* words, int count, Sum* sums) {
    if (p.done == 0) ahead_.skip(FORM::HEAD_BYTES);
    TileRows a;
    if constexpr (FORM::ROUNDED) a = in_.rounded.tile(from, (p.group + i) * products_ + p.done);
    else a = in_.left.tile(from, segment_, (p.group + i - p.segment) * products_ + p.done);
    tile_sums<KIND>(rows, p.done == 0, a, words, count, ahead_, sums, unstored_,
                    [&]() PAGODA_INLINE_MEMBER { scaling_.some(), finishing_.some(); });
  }

  // Completes the scaling of the previous rows, if any; if nothing is left to add to them, finishes them in `parts` parts.
  PAGODA_INLINE_MEMBER void scaled(int rows, int from, bool ends, int parts) {
    scaling_.rest();
    if (!ends || rows == 0) return;
    totals_.end(segment_, from - first_, rows);
    if (segment_ + 1 == op_.segments) finishing_.start(totals_.total(from - first_), rows, from, parts);
  }

  const LinearOp& op_;
  const Inputs& in_;
  const int first_, last_, group_;
  const int products_ = group_ / PRODUCT_INPUTS<FORM>, chunk_ = products_ <= WHOLE_CHUNK ? WHOLE_CHUNK : TILE_CHUNK;
  const uint8_t* panel_;
  int segment_ = 0, turn_ = 0;
  const Tiles tiles_;
  TileAhead ahead_;
  Scaling<FORM> scaling_;
  Finishing finishing_;
  Unstored unstored_;
  SegmentSums<BLOCK> totals_;
  alignas(64) Sum sums_[BLOCK * PANEL];  // of all rows if groups are split into parts, else of two of their blocks in turn
  static_assert(2 * GROUPS_AT_ONCE * TILE_BLOCK <= BLOCK);
  alignas(64) uint32_t unpacked_[FORM::BITS == 4 ? WHOLE_CHUNK * TILE_WORDS * PANEL : 1];
};

template <typename FORM>
static void tile_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
  TilePanel<FORM>(op, in, first, last, panel, column).run();
}

}  // namespace PAGODA_NS
