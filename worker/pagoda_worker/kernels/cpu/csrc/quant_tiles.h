// Weights of 8 or 4 bits by tiles of the matrix unit. Nibbles are unpacked, to bytes or to what meets inputs in bf16, once for
// all rows of a block.
#pragma once

#include "quant.h"

namespace PAGODA_NS {

template <typename FORM>
constexpr int PRODUCT_INPUTS = (FORM::ROUNDED ? 4 : 2) * TILE_WORDS;

// From so many rows on tiles are quicker, with 4 bits because words are unpacked for them; sums of whole numbers are the same
// either way. Those of floats are not, so tiles take them all.
constexpr int LEAST_TILE_ROWS[2] = {16, 4};  // with 4 bits, with 8
static bool tiles_take(const QuantForm& form, int rows) {
  if (form.input_bits == 16) return form.group % (2 * TILE_WORDS) == 0;
  return form.group % (4 * TILE_WORDS) == 0 && rows >= LEAST_TILE_ROWS[form.bits == 8];
}

// Where zero is the middle level everywhere, nibbles are unpacked to what they mean, and the rows' offsets have no part.
template <typename FORM>
constexpr bool SIGNED = FORM::BITS == 4 && FORM::ROUNDED && !FORM::ZEROS;

// Words of nibbles -> those of bytes, [words][PANEL] -> [2 * words][PANEL].
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

// Words of nibbles, of a group with this head -> those of pairs, [words][PANEL] -> [4 * words][PANEL].
template <typename FORM>
static void unpack_pairs(const uint8_t* head, const uint8_t* words, int count, uint32_t* out) {
  for (int c = 0; c < PANEL; c += 16) {
    zero_points z;
    if constexpr (FORM::ZEROS) z = load_zeros(head + FORM::SCALE_BYTES + c);
    for (int i = 0; i < count; ++i) {
      const quads w = load_quads(words + (size_t)i * PANEL_ROW + 4 * c);
      uint32_t* to = out + (size_t)4 * i * PANEL + c;
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s, to += PANEL) {
        if constexpr (FORM::ZEROS) store_pairs(to, pair_of(w, s, z));
        else if constexpr (FORM::FLOATS) store_pairs(to, floats_of(w, s));
        else store_pairs(to, pair_of(w, s));
      }
    }
  }
}

// The words of a group's products [done, done + count): where they lie, or unpacked to `out`.
template <typename FORM>
PAGODA_INLINE const uint8_t* unpacked_words(const uint8_t* head, int done, int count, uint32_t* out) {
  const uint8_t* words = head + FORM::HEAD_BYTES + (size_t)done * PRODUCT_INPUTS<FORM> * PANEL * FORM::BITS / 8;
  if constexpr (FORM::BITS == 8) return words;
  if constexpr (FORM::ROUNDED) unpack_nibbles<FORM>(words, count * TILE_WORDS / 2, out);
  else unpack_pairs<FORM>(head, words, count * TILE_WORDS / 4, out);
  return (const uint8_t*)out;
}

constexpr int GROUPS_AT_ONCE = 2;  // more would not leave room for their sums in the nearest cache

// What rows come to in some groups is scaled and added to their totals, a few rows with every product of the rows after them.
template <typename FORM>
class Scaling {
 public:
  typedef std::conditional_t<FORM::ROUNDED, int32_t, float> Sum;

  Scaling(const RoundedRows& rounded, int group) : rounded_(rounded), group_(group) {}
  // Sums are [groups][TILE_BLOCK][PANEL] of rows from `from` on, totals [rows][PANEL]; the first group's head is at `head`.
  // Each call of `some` is to scale one of so many parts of them.
  PAGODA_INLINE_MEMBER void start(const Sum* sums, float* totals, int rows, int from, const uint8_t* head, int first_group,
                                  int groups, int parts) {
    sums_ = sums, totals_ = totals, rows_ = rows, from_ = from, head_ = head, first_group_ = first_group, groups_ = groups;
    part_ = ((rows + parts - 1) / parts + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  }
  PAGODA_INLINE_MEMBER void some() {
    if (rows_ > 0) scale(part_ < rows_ ? part_ : rows_);
  }
  PAGODA_INLINE_MEMBER void rest() {
    if (rows_ > 0) scale(rows_);
  }

 private:
  static constexpr int AT_ONCE = 8;  // whose totals registers hold

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
    for (int g = 0; g < groups_; ++g, head += group_bytes<FORM>(group_), sums += TILE_BLOCK * PANEL) {
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const f16 scale = load_scales<FORM>(head, 16 * c);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          if constexpr (FORM::ROUNDED) {
            const int32_t offset = *(rounded_.offsets(from_, first_group_ + g) + r);
            ints sum = load(sums + r * PANEL + 16 * c);
            if constexpr (FORM::ZEROS) sum = sum + load_u8(head + FORM::SCALE_BYTES + 16 * c) * set1(offset);
            else if constexpr (!SIGNED<FORM>) sum = sum + set1(offset);
            total[r][c] = fma(to_float(sum), scale * set1(*(rounded_.scales(from_, first_group_ + g) + r)), total[r][c]);
          } else {
            total[r][c] = fma(load(sums + r * PANEL + 16 * c), scale, total[r][c]);
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
  int rows_ = 0, from_ = 0, part_ = 0, first_group_ = 0, groups_ = 0;
  const uint8_t* head_ = nullptr;
};

// Rows [first, last), a block, through one panel whose groups are whole products. What the products of some rows come to is
// scaled and added, and in the end goes through the epilogue, while the matrix unit is at those of the next rows.
//
// At a time rows meet some groups, or a part of one: so much of a panel as stays in the nearest cache.
template <typename FORM>
static void tile_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
  constexpr size_t PRODUCT_BYTES = (size_t)PRODUCT_INPUTS<FORM> * PANEL * FORM::BITS / 8;
  constexpr TileProduct KIND = !FORM::ROUNDED ? TileProduct::PAIRS : SIGNED<FORM> ? TileProduct::SIGNED : TileProduct::BYTES;
  typedef typename Scaling<FORM>::Sum Sum;
  const int group = op.form.group, segment_groups = op.k / group / op.segments, products = group / PRODUCT_INPUTS<FORM>;
  const int chunk = products <= WHOLE_CHUNK ? WHOLE_CHUNK : TILE_CHUNK;
  const int groups_at_once = products * GROUPS_AT_ONCE <= chunk ? GROUPS_AT_ONCE : 1;
  const bool whole_groups = products <= chunk;
  alignas(64) Sum sums[BLOCK * PANEL];  // of all rows where groups come in parts, else of two of their blocks in turn
  static_assert(2 * GROUPS_AT_ONCE * TILE_BLOCK <= BLOCK);
  alignas(64) uint32_t unpacked[FORM::BITS == 4 ? WHOLE_CHUNK * TILE_WORDS * PANEL : 1];
  SegmentSums<BLOCK> totals;
  TileAhead ahead(panel, quant_panel_bytes(op.form, op.k), PRODUCT_BYTES, last - first, FETCH_AHEAD);
  const Tiles tiles(last - first);
  Unstored unstored;
  Finishing finishing(op, column);
  Scaling<FORM> scaling(in.rounded, group);
  const auto beside = [&]() PAGODA_INLINE_MEMBER { scaling.some(), finishing.some(); };
  int turn = 0;
  for (int segment = 0, g = 0; segment < op.segments; ++segment) {
    totals.start(segment, 0, last - first);
    for (const int end = g + segment_groups; g < end;) {
      const int groups = end - g < groups_at_once ? end - g : groups_at_once;
      const bool ends = g + groups == end, all = ends && segment + 1 == op.segments;
      for (int done = 0, count; done < products; done += count) {
        count = products - done < chunk ? products - done : chunk;
        const uint8_t* words[GROUPS_AT_ONCE];
        for (int i = 0; i < groups; ++i)
          words[i] = unpacked_words<FORM>(panel + i * group_bytes<FORM>(group), done, count,
                                          unpacked + (FORM::BITS == 4 ? (size_t)i * count * TILE_WORDS * PANEL : 0));
        const bool whole = done + count == products;
        if (!whole_groups && done == 0) unstored.store(), scaling.rest();  // before what it reads is written over
        // Rows before these are scaled by now; where nothing is left to add, they are finished.
        const auto scaled = [&](int rows, int from, int parts) {
          scaling.rest();
          if (!ends || rows == 0) return;
          totals.end(segment, from - first, rows);
          if (all) finishing.start(totals.total(from - first), rows, from, parts);
        };
        int before = 0;
        in_tile_blocks(first, last, [&](int rows, int from) {
          if (all && whole) finishing.expect(rows, from, groups * count);
          Sum* const place = sums + (whole_groups ? turn++ % 2 * GROUPS_AT_ONCE * TILE_BLOCK : from - first) * PANEL;
          for (int i = 0; i < groups; ++i) {
            Sum* sum = place + i * TILE_BLOCK * PANEL;
            ahead.skip(done == 0 ? FORM::HEAD_BYTES : 0);
            TileRows a;
            if constexpr (FORM::ROUNDED) a = in.rounded.tile(from, (g + i) * products + done);
            else a = in.left.tile(from, segment, (g + i - segment * segment_groups) * products + done);
            tile_sums<KIND>(rows, done == 0, a, words[i], count, ahead, sum, unstored, beside);
          }
          if (!whole) return;
          scaled(before, from - before, groups * count);
          scaling.start(place, totals.of(segment, from - first), rows, from, panel, g, groups, groups * count);
          before = rows;
        });
        if (whole && ends) unstored.store(), scaled(before, last - before, 1);
      }
      g += groups, panel += groups * group_bytes<FORM>(group);
    }
  }
  finishing.rest();
}

}  // namespace PAGODA_NS
