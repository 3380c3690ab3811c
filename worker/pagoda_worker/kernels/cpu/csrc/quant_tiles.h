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

// Words of nibbles -> those of bytes, [words][PANEL] -> [2 * words][PANEL].
static void unpack_nibbles(const uint8_t* words, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i, words += PANEL_ROW, out += 2 * PANEL)
    for (int c = 0; c < PANEL; c += 16) {
      const quads w = load_quads(words + 4 * c);
      store_quads(out + c, low_nibbles(w));
      store_quads(out + PANEL + c, high_nibbles(w));
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

// totals [rows][PANEL] += a group's sums, scaled.
template <typename FORM>
static void add_scaled(const uint8_t* head, int rows, const float* sums, float* totals) {
  for (int c = 0; c < PANEL; c += 16) {
    const f16 scale = load_scales<FORM>(head, c);
    for (int r = 0; r < rows; ++r) {
      float* total = totals + r * PANEL + c;
      store(total, fma(load(sums + r * PANEL + c), scale, load(total)));
    }
  }
}

// Rows [first, last), a block, through one panel whose groups are whole products. What the products of some rows come to is
// scaled and added, and in the end goes through the epilogue, while the matrix unit is at those of the next rows.
template <typename FORM>
static void tile_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
  constexpr size_t PRODUCT_BYTES = (size_t)PRODUCT_INPUTS<FORM> * PANEL * FORM::BITS / 8;
  alignas(64) std::conditional_t<FORM::ROUNDED, int32_t, float> sums[BLOCK * PANEL];
  alignas(64) uint32_t unpacked[FORM::BITS == 4 ? TILE_CHUNK * TILE_WORDS * PANEL : 1];
  SegmentSums<BLOCK> totals;
  const int group = op.form.group, segment_groups = op.k / group / op.segments, products = group / PRODUCT_INPUTS<FORM>;
  TileAhead ahead(panel, quant_panel_bytes(op.form, op.k), PRODUCT_BYTES, last - first, FETCH_AHEAD);
  const Tiles tiles(last - first);
  Finishing finishing(op, column);
  for (int segment = 0, g = 0; segment < op.segments; ++segment) {
    totals.start(segment, 0, last - first);
    for (const int end = g + segment_groups; g < end; ++g, panel += group_bytes<FORM>(group)) {
      ahead.skip(FORM::HEAD_BYTES);
      const auto add = [&](int rows, int from, int parts) {
        const int at = from - first;
        float* total = totals.of(segment, at);
        if constexpr (FORM::ROUNDED) add_scaled<FORM, false>(in.rounded, from, rows, g, panel, sums + at * PANEL, total);
        else add_scaled<FORM>(panel, rows, sums + at * PANEL, total);
        if (g + 1 < end) return;
        totals.end(segment, at, rows);
        if (segment + 1 == op.segments) finishing.start(totals.total(at), rows, from, parts);
      };
      for (int done = 0, count; done < products; done += count) {
        count = products - done < TILE_CHUNK ? products - done : TILE_CHUNK;
        const void* words = panel + FORM::HEAD_BYTES + (size_t)done * PRODUCT_BYTES;
        if constexpr (!FORM::ROUNDED) unpack_pairs<FORM>(panel, (const uint8_t*)words, count * TILE_WORDS / 4, unpacked);
        else if constexpr (FORM::BITS == 4) unpack_nibbles((const uint8_t*)words, count * TILE_WORDS / 2, unpacked);
        if constexpr (FORM::BITS == 4) words = unpacked;
        const bool whole = done + count == products, all = whole && g + 1 == end && segment + 1 == op.segments;
        int before = 0;
        in_tile_blocks(first, last, [&](int rows, int from) {
          if (all) finishing.expect(rows, from, count);
          auto* sum = sums + (from - first) * PANEL;
          const auto beside = [&]() PAGODA_INLINE_MEMBER { finishing.some(); };
          if constexpr (FORM::ROUNDED) {
            tile_sums<true>(rows, done == 0, in.rounded.tile(from, g * products + done), words, count, ahead, sum, beside);
          } else {
            const int product = (g - segment * segment_groups) * products + done;
            tile_sums<false>(rows, done == 0, in.left.tile(from, segment, product), words, count, ahead, sum, beside);
          }
          if (whole && before > 0) add(before, from - before, count);
          before = rows;
        });
        if (whole) add(before, last - before, 1);
      }
    }
  }
  finishing.rest();
}

}  // namespace PAGODA_NS
