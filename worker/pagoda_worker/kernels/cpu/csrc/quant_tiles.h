// Weights of 8 or 4 bits that meet inputs of 8, by tiles of the matrix unit. Nibbles are unpacked to bytes, once for all rows
// of a block.
#pragma once

#include "quant.h"

namespace PAGODA_NS {

// From so many rows on tiles are quicker, with 4 bits because words are unpacked for them; sums of whole numbers are the same
// either way.
constexpr int LEAST_TILE_ROWS[2] = {16, 4};  // with 4 bits, with 8
static bool tiles_take(const QuantForm& form, int rows) {
  return form.input_bits == 8 && form.group % (4 * TILE_WORDS) == 0 && rows >= LEAST_TILE_ROWS[form.bits == 8];
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

// Rows [first, last), a block, through one panel whose groups are whole products. What the products of some rows come to is
// scaled and added, and in the end goes through the epilogue, while the matrix unit is at those of the next rows.
template <typename FORM>
static void byte_panel(const LinearOp& op, const RoundedRows& in, int first, int last, const uint8_t* panel, int column) {
  constexpr size_t PRODUCT_BYTES = TILE_WORDS * PANEL_ROW * FORM::BITS / 8;
  alignas(64) int32_t sums[BLOCK * PANEL];
  alignas(64) uint32_t unpacked[FORM::BITS == 4 ? TILE_CHUNK * TILE_WORDS * PANEL : 1];
  SegmentSums<BLOCK> totals;
  const int group = op.form.group, segment_groups = op.k / group / op.segments, products = group / (4 * TILE_WORDS);
  TileAhead ahead(panel, quant_panel_bytes(op.form, op.k), PRODUCT_BYTES, last - first, FETCH_AHEAD);
  const Tiles tiles(last - first);
  Finishing finishing(op, column);
  for (int segment = 0, g = 0; segment < op.segments; ++segment) {
    totals.start(segment, 0, last - first);
    for (const int end = g + segment_groups; g < end; ++g, panel += group_bytes<FORM>(group)) {
      ahead.skip(FORM::HEAD_BYTES);
      const auto add = [&](int rows, int from, int parts) {
        const int at = from - first;
        add_scaled<FORM, false>(in, from, rows, g, panel, sums + at * PANEL, totals.of(segment, at));
        if (g + 1 < end) return;
        totals.end(segment, at, rows);
        if (segment + 1 == op.segments) finishing.start(totals.total(at), rows, from, parts);
      };
      for (int done = 0, count; done < products; done += count) {
        count = products - done < TILE_CHUNK ? products - done : TILE_CHUNK;
        const void* words = panel + FORM::HEAD_BYTES + (size_t)done * PRODUCT_BYTES;
        if constexpr (FORM::BITS == 4) {
          unpack_nibbles((const uint8_t*)words, count * TILE_WORDS / 2, unpacked);
          words = unpacked;
        }
        const bool whole = done + count == products, all = whole && g + 1 == end && segment + 1 == op.segments;
        int before = 0;
        in_tile_blocks(first, last, [&](int rows, int from) {
          if (all) finishing.expect(rows, from, count);
          int32_t* sum = sums + (from - first) * PANEL;
          tile_sums<true>(rows, done == 0, in.tile(from, g * products + done), words, count, ahead, sum,
                          [&]() PAGODA_INLINE_MEMBER { finishing.some(); });
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
