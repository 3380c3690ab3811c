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

// Some inputs of a group: those from its first one on if they begin it, those up to its last one if they end it.
struct Stretch {
  const uint8_t* head;     // of the group
  const float* scales;     // of the group's rows, from the first row of a tile on
  const int32_t* offsets;
  bool begins, ends;
};

template <typename FORM>
PAGODA_INLINE Stretch stretch_of(const RoundedRows& rows, int from, int group, const uint8_t* head, bool begins, bool ends) {
  if constexpr (FORM::ROUNDED) return {head, rows.scales(from, group), rows.offsets(from, group), begins, ends};
  else return {head, nullptr, nullptr, begins, ends};
}

template <typename FORM>
PAGODA_INLINE f16 add_group(f16 total, ints sum, const Stretch& its, int row, f16 scale, int column) {
  return add_group<FORM>(total, sum, its.scales[row], its.offsets[row], its.head, scale, column);
}
template <typename FORM>
PAGODA_INLINE f16 add_group(f16 total, f16 sum, const Stretch&, int, f16 scale, int) {
  return fma(sum, scale, total);
}

template <typename FORM>
PAGODA_INLINE void begin_sum(ints& sum, const Stretch& its, int row) { sum = set1(FORM::MIDDLE ? its.offsets[row] : 0); }
template <typename FORM>
PAGODA_INLINE void begin_sum(f16& sum, const Stretch&, int) { sum = zero(); }

// Multiplies these inputs of ROWS rows by `count` rows of words, from this column on. The sums of a group that does not
// begin or end here are in `sums` [ROWS][PANEL]; one that ends is scaled and added to `totals` [ROWS][PANEL]. Not inlined, as
// add_pairs.
template <typename FORM, typename NUMBERS, int ROWS, int GROUPS, Fetch FETCH>
static __attribute__((noinline)) void add_stretch(Rows<ROWS> x, const uint32_t* words, int count, const Stretch& its, int column,
                                                  Ahead& ahead_, typename NUMBERS::Value* sums, float* totals) {
  const uint32_t* const groups[2] = {words + column, words + column + 16};
  Ahead ahead = ahead_;
  typename NUMBERS::Sum acc[ROWS][GROUPS];
  sums += column, totals += column;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) begin_sum<FORM>(acc[r][g], its, r);
  if (!its.begins)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int g = 0; g < GROUPS; ++g) acc[r][g] = load(sums + r * PANEL + 16 * g);
  tile<NUMBERS>(x, groups, NUMBERS::WORD_ROWS * PANEL, count, acc, [&](int) PAGODA_INLINE_MEMBER { ahead.fetch<FETCH>(); });
  if constexpr (FETCH != Fetch::NOTHING) ahead_ = ahead;
  if (its.ends) {
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) {
      const f16 scale = load_scales<FORM>(its.head, column + 16 * g);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        float* total = totals + r * PANEL + 16 * g;
        store(total, add_group<FORM>(load(total), acc[r][g], its, r, scale, column + 16 * g));
      }
    }
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) store(sums + r * PANEL + 16 * g, acc[r][g]);
}

// The same for all columns of a panel: at once if the registers suffice for this many rows.
template <typename FORM, typename NUMBERS, int ROWS, Fetch FETCH>
PAGODA_INLINE void add_stretch(Rows<ROWS> x, const uint32_t* words, int count, const Stretch& its, Ahead& ahead,
                               typename NUMBERS::Value* sums, float* totals) {
  constexpr int GROUPS = groups_of(ROWS, 2);
  for (int column = 0; column < PANEL; column += 16 * GROUPS)
    add_stretch<FORM, NUMBERS, ROWS, GROUPS, FETCH>(x, words, count, its, column, ahead, sums, totals);
}

// --- packed words -----------------------------------------------------------------------------------------------------------

// add_stretch, prefetching as `ahead.how` says.
template <typename FORM, typename NUMBERS, int ROWS>
PAGODA_INLINE void add_words(Rows<ROWS> x, const uint32_t* words, int count, const Stretch& its, Ahead& ahead,
                             typename NUMBERS::Value* sums, float* totals) {
  if (ahead.how == Fetch::PAST) add_stretch<FORM, NUMBERS, ROWS, Fetch::PAST>(x, words, count, its, ahead, sums, totals);
  else if (ahead.how == Fetch::TWICE) add_stretch<FORM, NUMBERS, ROWS, Fetch::TWICE>(x, words, count, its, ahead, sums, totals);
  else add_stretch<FORM, NUMBERS, ROWS, Fetch::NEAR>(x, words, count, its, ahead, sums, totals);
}

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

template <int ROWS, typename FORM>
PAGODA_INLINE void begin_nibbles(const Stretch& its, int32_t* sums) {
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < PANEL; c += 16) {
      ints sum;
      begin_sum<FORM>(sum, its, r);
      store(sums + r * PANEL + c, sum);
    }
}
template <int ROWS, typename FORM>
PAGODA_INLINE void end_nibbles(const Stretch& its, const int32_t* sums, float* totals) {
  for (int c = 0; c < PANEL; c += 16) {
    const f16 scale = load_scales<FORM>(its.head, c);
    for (int r = 0; r < ROWS; ++r) {
      float* total = totals + r * PANEL + c;
      store(total, add_group<FORM>(load(total), load(sums + r * PANEL + c), its, r, scale, c));
    }
  }
}

#ifdef __AVXVNNI__
constexpr bool NIBBLES_IN_TURNS = true;
#else
constexpr bool NIBBLES_IN_TURNS = false;
typedef Nibbles NibbleBytes;
#endif
template <typename FORM>
constexpr bool IN_TURNS = FORM::BITS == 8 || NIBBLES_IN_TURNS;

// One group, whose words begin behind `head`, added to the totals of ROWS rows from `from` on.
template <int ROWS, typename FORM>
PAGODA_INLINE void word_group(const RoundedRows& rows, int from, int group, int g, const uint8_t* head, Ahead& ahead,
                              float* totals) {
  alignas(64) int32_t sums[ROWS * PANEL];
  const uint32_t* words = (const uint32_t*)(head + FORM::HEAD_BYTES);
  const uint8_t* levels = rows.levels(from) + (size_t)g * group * sizeof(Rounded<FORM>);
  ahead.skip(FORM::HEAD_BYTES);
  if constexpr (IN_TURNS<FORM>) {
    typedef typename std::conditional<FORM::BITS == 8, Bytes, NibbleBytes>::type NUMBERS;
    const int count = group / FORM::WORD;
    for (int begin = 0, turn; begin < count; begin += turn) {
      turn = count - begin < TURN ? count - begin : TURN;
      const Rows<ROWS> x(levels + (size_t)begin * 2 * sizeof(typename NUMBERS::Left), rows.stride());
      const Stretch its = stretch_of<FORM>(rows, from, g, head, begin == 0, begin + turn == count);
      add_words<FORM, NUMBERS, ROWS>(x, words + (size_t)begin * PANEL, turn, its, ahead, sums, totals);
    }
  } else {
    const Stretch its = stretch_of<FORM>(rows, from, g, head, true, true);
    begin_nibbles<ROWS, FORM>(its, sums);
    add_nibbles(Rows<ROWS>(levels, rows.stride()), words, group, ahead, sums);
    end_nibbles<ROWS, FORM>(its, sums, totals);
  }
}

template <typename FORM>
static void word_panel(const LinearOp& op, const RoundedRows& rows, int first, int last, const uint8_t* panel, int column) {
  const int group = op.form.group, segment_groups = op.k / group / op.segments;
  const int turns = IN_TURNS<FORM> ? 2 / groups_of(last - first < MAX_ROWS ? last - first : MAX_ROWS, 2) : 1;
  Ahead ahead(panel, quant_panel_bytes(op.form, op.k), last - first, MostRows{0, 0}, MAX_ROWS, turns);
  in_tiles(first, last, [&](auto count, int from) {
    constexpr int ROWS = decltype(count)::value;
    SegmentSums<ROWS> totals;
    const uint8_t* at = panel;
    for (int segment = 0, g = 0; segment < op.segments; ++segment) {
      totals.start(segment, 0, ROWS);
      for (const int end = g + segment_groups; g < end; ++g, at += group_bytes<FORM>(group))
        word_group<ROWS, FORM>(rows, from, group, g, at, ahead, totals.of(segment, 0));
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
      const Rows<ROWS> x = inputs_of<ROWS, FORM>(in, from, (size_t)g * group + begin);
      const Stretch its = stretch_of<FORM>(in.rounded, from, g, panel, begin == 0, begin + inputs == group);
      add_stretch<FORM, NUMBERS, ROWS, Fetch::NOTHING>(x, words, inputs / 2, its, nothing, sums[from - first],
                                                    totals + (from - first) * PANEL);
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
