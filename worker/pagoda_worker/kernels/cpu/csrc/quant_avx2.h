// 8-bit and 4-bit weights at AVX2, which has few registers and whose only instruction for bytes adds two products in 16 bits;
// AVX-VNNI has one that adds four in 32 bits. Either way, rounded rows are multiplied by packed words. Without AVX-VNNI:
//
// two products of 4 by 8 bits are at most 2 * 15 * 127, so that eight such sums still fit into 16 bits: `Nibbles`. Two
// products of 8 by 8 bits do not fit, and are multiplied as 16-bit numbers: `Bytes`.
//
// If there are many rows, 8-bit weights are unpacked to 16 bits once for all rows of a block; 4-bit weights with bf16 inputs
// are unpacked to floats unless the rows are few.
#pragma once

#include "quant.h"

namespace PAGODA_NS {

// The type in which rounded inputs are kept.
template <typename FORM>
using Rounded = typename std::conditional<FORM::BITS == 8, Bytes::Number, int8_t>::type;

// Prepares a block of rows [first, last), given as `x`, for `quant_panel`.
static void quant_take(Inputs& in, const uint16_t* x, int first, int last, const LinearOp& op, uint64_t use) {
  with_form(op.form, [&](auto form) {
    typedef decltype(form) FORM;
    if constexpr (!FORM::ROUNDED) in.left.take(x, first, last, op.k, op.x_stride, use);
    else in.rounded.take<Rounded<FORM>>(x, first, last, op.k, op.form, use);
  });
}

// Initialises a group's integer sums [ROWS][PANEL] with the rows' offsets.
template <int ROWS, typename FORM>
PAGODA_INLINE void begin_sums(const RoundedRows& in, int from, int group, int32_t* sums) {
  const int32_t* offsets = in.offsets(from, group);
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < PANEL; c += 16) store(sums + r * PANEL + c, set1(FORM::MIDDLE ? offsets[r] : 0));
}
// --- packed words -----------------------------------------------------------------------------------------------------------

// Adds the products of one group of ROWS rows and the words of a panel to `sums` [ROWS][PANEL].
template <int ROWS>
static __attribute__((noinline)) void add_nibbles(Rows<ROWS> x, const uint32_t* words, int group, Ahead& ahead_, int32_t* sums) {
  constexpr int INPUTS = Nibbles::MOST * 8;
  Ahead ahead = ahead_;
#pragma GCC unroll 1
  for (int i = 0; i < group; i += INPUTS, words += Nibbles::MOST * PANEL, x.move(INPUTS)) {
    for (int w = 0; w < Nibbles::MOST; ++w) ahead.fetch();
#pragma GCC unroll 1
    for (int c = 0; c < PANEL; c += 16) {
      halves acc[ROWS];
#pragma GCC unroll 8
      for (int part = 0; part < Nibbles::MOST * Nibbles::PASSES; ++part) {  // fully unrolled: too few for a loop
        const int word = part / Nibbles::PASSES, pass = part % Nibbles::PASSES;
        const quads b = Nibbles::right(words + c + word * PANEL, pass);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const uint32_t* a = x.template row<uint32_t>(r, 8 * word);
          acc[r] = part == 0 ? Nibbles::products(a, pass, b) : Nibbles::add(acc[r], a, pass, b);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) store(sums + r * PANEL + c, load(sums + r * PANEL + c) + both(acc[r]));
    }
  }
  ahead_ = ahead;
}

// The same for words of NUMBERS.
template <typename NUMBERS, int ROWS>
PAGODA_INLINE void add_turns(const uint8_t* levels, size_t stride, const uint32_t* words, int count, Ahead& ahead, int32_t* sums) {
  for (int begin = 0; begin < count; begin += TURN) {
    const Rows<ROWS> x(levels + (size_t)begin * 2 * sizeof(typename NUMBERS::Left), stride);
    const int turn = count - begin < TURN ? count - begin : TURN;
    add_both<NUMBERS, ROWS>(x, words + (size_t)begin * PANEL, turn, ahead, sums);
  }
}

#ifdef __AVXVNNI__
constexpr bool NIBBLES_IN_TURNS = true;
#else
constexpr bool NIBBLES_IN_TURNS = false;
typedef Nibbles NibbleBytes;
#endif

template <int ROWS, typename FORM>
PAGODA_INLINE void add_words(const uint8_t* levels, size_t stride, const uint32_t* words, int group, Ahead& ahead, int32_t* sums) {
  if constexpr (FORM::BITS == 8) add_turns<Bytes, ROWS>(levels, stride, words, group / FORM::WORD, ahead, sums);
  else if constexpr (NIBBLES_IN_TURNS) add_turns<NibbleBytes, ROWS>(levels, stride, words, group / FORM::WORD, ahead, sums);
  else add_nibbles(Rows<ROWS>(levels, stride), words, group, ahead, sums);
}

// totals [rows][PANEL] += a group's sums, scaled. If the middle level is zero, the sums include the rows' offsets.
template <typename FORM>
PAGODA_INLINE void add_scaled(const RoundedRows& in, int from, int rows, int group, const uint8_t* head,
                              const int32_t* sums, float* totals) {
  const float* scales = in.scales(from, group);
  const int32_t* offsets = in.offsets(from, group);
  for (int c = 0; c < PANEL; c += 16) {
    const f16 scale = load_scales<FORM>(head, c);
    for (int r = 0; r < rows; ++r) {
      float* total = totals + r * PANEL + c;
      store(total, add_group<FORM>(load(total), load(sums + r * PANEL + c), scales[r], offsets[r], head, scale, c));
    }
  }
}

template <typename FORM>
static void word_panel(const LinearOp& op, const RoundedRows& rows, int first, int last, const uint8_t* panel, int column) {
  const int group = op.form.group, segment_groups = op.k / group / op.segments;
  const bool in_turns = FORM::BITS == 8 || NIBBLES_IN_TURNS;
  const int turns = in_turns ? 2 / groups_of(last - first < MAX_ROWS ? last - first : MAX_ROWS, 2) : 1;
  Ahead ahead(panel, quant_panel_bytes(op.form, op.k), last - first, MAX_ROWS, turns);
  in_tiles(first, last, [&](auto count, int from) {
    constexpr int ROWS = decltype(count)::value;
    alignas(64) int32_t sums[ROWS * PANEL];
    SegmentSums<ROWS> totals;
    const uint8_t* at = panel;
    for (int segment = 0, g = 0; segment < op.segments; ++segment) {
      totals.start(segment, 0, ROWS);
      for (const int end = g + segment_groups; g < end; ++g, at += group_bytes<FORM>(group)) {
        ahead.skip(FORM::HEAD_BYTES);
        begin_sums<ROWS, FORM>(rows, from, g, sums);
        const uint8_t* levels = rows.levels(from) + (size_t)g * group * sizeof(Rounded<FORM>);
        add_words<ROWS, FORM>(levels, rows.stride(), (const uint32_t*)(at + FORM::HEAD_BYTES), group, ahead, sums);
        add_scaled<FORM>(rows, from, ROWS, g, at, sums, totals.of(segment, 0));
      }
      totals.end(segment, 0, ROWS);
    }
    finish_rows(totals.total(0), ROWS, from, column, op);
  });
}

// --- unpacked ---------------------------------------------------------------------------------------------------------

// What weights of this form are unpacked to.
#ifdef __AVXVNNI__
template <typename FORM>
using Unpacked = WideBf16<PANEL>;
#else
template <typename FORM>
using Unpacked = typename std::conditional<FORM::ROUNDED, WideBytes, WideBf16<PANEL>>::type;
#endif

constexpr int UNPACKED_ROWS = 96;  // the least for which unpacking bytes pays for itself
// Bytes that are unpacked at a time, and how many inputs these are.
constexpr int CHUNK_BYTES = 16384;
template <typename FORM>
constexpr int CHUNK = CHUNK_BYTES / PANEL / (FORM::ROUNDED ? 2 : 4);

// The words of `inputs` inputs of a group -> words of Unpacked.
template <typename FORM>
static void unpack(const uint8_t* head, const uint8_t* words, int inputs, uint32_t* out) {
  constexpr int ROWS = FORM::ROUNDED ? FORM::WORD / 2 : FORM::WORD;  // from one
  for (int i = 0; i < inputs; i += FORM::WORD, words += PANEL_ROW, out += ROWS * PANEL) {
    prefetch_once(words + FETCH_AHEAD);
    prefetch_once(words + FETCH_AHEAD + 64);
    for (int c = 0; c < PANEL; c += 16) {
      const quads w = load_quads(words + 4 * c);
      if constexpr (FORM::ROUNDED) {
        for (int row = 0; row < ROWS; ++row) store_quads(out + row * PANEL + c, every_other_byte(w, row));
      } else {
        for (int s = 0; s < 4; ++s) {
          const weight_pairs pair = weights_of<FORM>(w, s, zeros_at<FORM>(head, c));
          for (int pass = 0; pass < 2; ++pass) store((float*)out + (2 * s + pass) * PANEL + c, right(pair, pass));
        }
      }
    }
  }
}

// Adds a group's sums [ROWS][PANEL], of rows from `from` on, to their totals.
template <int ROWS, typename FORM>
PAGODA_INLINE void add_scaled(const Inputs& in, int from, int group, const uint8_t* head, const int32_t* sums, float* totals) {
  add_scaled<FORM>(in.rounded, from, ROWS, group, head, sums, totals);
}
template <int ROWS, typename FORM>
PAGODA_INLINE void add_scaled(const Inputs&, int, int, const uint8_t* head, const float* sums, float* totals) {
  for (int c = 0; c < PANEL; c += 16) {
    const f16 scale = load_scales<FORM>(head, c);
    for (int r = 0; r < ROWS; ++r) {
      float* total = totals + r * PANEL + c;
      store(total, fma(load(sums + r * PANEL + c), scale, load(total)));
    }
  }
}
template <int ROWS, typename FORM>
PAGODA_INLINE void begin_sums(const RoundedRows&, int, int, float* sums) {
  memset(sums, 0, ROWS * PANEL * sizeof *sums);
}

// Inputs from `input` on of ROWS rows from `from` on, as Unpacked multiplies them.
template <int ROWS, typename FORM>
PAGODA_INLINE Rows<ROWS> inputs_of(const Inputs& in, int from, size_t input) {
  if constexpr (FORM::ROUNDED) return {in.rounded.levels(from) + input * sizeof(Rounded<FORM>), in.rounded.stride()};
  else return {in.left.row(from) + input, in.left.stride()};
}

// Rows [first, last) through one group of a panel, added to their totals.
template <typename FORM>
PAGODA_INLINE void unpacked_group(const Inputs& in, int first, int last, const uint8_t* panel, int group, int g, float* totals) {
  typedef Unpacked<FORM> NUMBERS;
  alignas(64) uint32_t words[CHUNK_BYTES / sizeof(uint32_t)];
  alignas(64) typename NUMBERS::Value sums[BLOCK][PANEL];
  Ahead nothing(panel, 0, last - first);
  for (int begin = 0; begin < group; begin += CHUNK<FORM>) {
    const int inputs = group - begin < CHUNK<FORM> ? group - begin : CHUNK<FORM>;
    unpack<FORM>(panel, panel + FORM::HEAD_BYTES + (size_t)begin / FORM::WORD * PANEL_ROW, inputs, words);
    in_tiles(first, last, [&](auto count, int from) {
      constexpr int ROWS = decltype(count)::value;
      auto* to = sums[from - first];
      if (begin == 0) begin_sums<ROWS, FORM>(in.rounded, from, g, to);
      const Rows<ROWS> x = inputs_of<ROWS, FORM>(in, from, (size_t)g * group + begin);
      add_both<NUMBERS, ROWS, Fetch::NOTHING>(x, words, inputs / 2, nothing, to);
      if (begin + inputs == group) add_scaled<ROWS, FORM>(in, from, g, panel, to, totals + (from - first) * PANEL);
    });
  }
}

template <typename FORM>
static void unpacked_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
  SegmentSums<BLOCK> totals;
  const int group = op.form.group, segment_groups = op.k / group / op.segments;
  for (int segment = 0, g = 0; segment < op.segments; ++segment) {
    totals.start(segment, 0, last - first);
    for (const int end = g + segment_groups; g < end; ++g, panel += group_bytes<FORM>(group))
      unpacked_group<FORM>(in, first, last, panel, group, g, totals.of(segment, 0));
    totals.end(segment, 0, last - first);
  }
  finish_rows(totals.total(0), last - first, first, column, op);
}

// A block of rows through one panel.
static void quant_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
  with_form(op.form, [&](auto form) {
    typedef decltype(form) FORM;
    constexpr bool BYTES_APART = FORM::BITS == 8 && sizeof(Bytes::Number) == 2;
    const bool many = last - first >= UNPACKED_ROWS, few = last - first <= DIRECT_ROWS;
    if constexpr (BYTES_APART)
      if (many) return unpacked_panel<FORM>(op, in, first, last, panel, column);
    if constexpr (FORM::ROUNDED) word_panel<FORM>(op, in.rounded, first, last, panel, column);
    else if (few) quant_panel_directly<FORM>(op, in, first, last, panel, column);
    else unpacked_panel<FORM>(op, in, first, last, panel, column);
  });
}

}  // namespace PAGODA_NS
