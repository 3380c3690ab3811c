// y = x W^T for 8-bit and 4-bit weights, with the epilogues of linear.h. kernels/quantized.py defines the formats.
//
// A panel is one sequential stream. For each group of inputs that share scales it holds, for 32 columns:
//   scales   [32] float32 (8 bits) or float16 (4 bits); for floats one byte each, the exponent
//   zeros    [32] uint8, or minima [32] float16, if the matrix has any
//   levels   8 bits: [group/4][32] words, one byte per input
//            4 bits, input rounded to 8: [group/8][32] words, inputs 0..3 in the low nibbles of the bytes, 4..7 in the high
//            4 bits, input in bf16: [group/8][32] words, even inputs in the nibbles of the low half, odd in the high half
//
// Levels are unsigned, because the instruction multiplies unsigned by signed bytes. Zeros are then handled by one number per
// row and group: sum((level - zero) * a) = sum(level * a) - zero * sum(a), exact in integers. Minima are multiplied by the same
// number, and added after their group. Groups of a segment are added in order, in float32: one chain per output, so that a
// row's bits depend on that row alone.
//
// 4-bit levels may also be floats (E2M1: sign, two exponent bits, one mantissa bit); their input is bf16.
#pragma once

#include "ints.h"
#include "kept.h"
#include "linear.h"
#include "pointwise.h"
#include "program.h"

namespace PAGODA_NS {

enum class Levels { MIDDLE, ZEROS, FLOATS, MINIMA };  // what `QuantForm.levels` says

template <int BITS_, bool ROUNDED_, Levels LEVELS>
struct Form {
  static constexpr int BITS = BITS_;
  static constexpr bool ROUNDED = ROUNDED_;  // the input is rounded to 8 bits
  static constexpr bool MIDDLE = LEVELS == Levels::MIDDLE, ZEROS = LEVELS == Levels::ZEROS;
  static constexpr bool FLOATS = LEVELS == Levels::FLOATS, MINIMA = LEVELS == Levels::MINIMA;
  static constexpr int WORD = 32 / BITS;  // inputs per word
  static constexpr size_t SCALE_BYTES = PANEL * (BITS == 8 ? 4 : FLOATS ? 1 : 2);
  static constexpr size_t HEAD_BYTES = SCALE_BYTES + PANEL * (ZEROS ? 1 : MINIMA ? 2 : 0);
};

// Calls f with the Form that `form` describes.
template <typename F>
PAGODA_INLINE void with_form(const QuantForm& form, F&& f) {
  const bool zeros = form.levels == (int)Levels::ZEROS;
  if (form.bits == 8) return zeros ? f(Form<8, true, Levels::ZEROS>{}) : f(Form<8, true, Levels::MIDDLE>{});
  if (form.levels == (int)Levels::FLOATS) return f(Form<4, false, Levels::FLOATS>{});
  if (form.levels == (int)Levels::MINIMA) return f(Form<4, true, Levels::MINIMA>{});
  if (form.input_bits == 8) return zeros ? f(Form<4, true, Levels::ZEROS>{}) : f(Form<4, true, Levels::MIDDLE>{});
  return zeros ? f(Form<4, false, Levels::ZEROS>{}) : f(Form<4, false, Levels::MIDDLE>{});
}

template <typename FORM>
static size_t group_bytes(int group) {
  return FORM::HEAD_BYTES + (size_t)PANEL * group * FORM::BITS / 8;
}

static size_t quant_panel_bytes(const QuantForm& form, int k) {
  size_t bytes = 0;
  with_form(form, [&](auto f) { bytes = k / form.group * group_bytes<decltype(f)>(form.group); });
  return bytes;
}

// --- packing ---------------------------------------------------------------------------------------------------------

template <typename FORM>
PAGODA_INLINE uint32_t word_of(const uint8_t* level) {
  uint32_t word = 0;
  for (int i = 0; i < FORM::WORD; ++i) {
    int shift = FORM::BITS == 8 ? 8 * i : FORM::ROUNDED ? i % 4 * 8 + i / 4 * 4 : i % 2 * 16 + i / 2 * 4;
    word |= (uint32_t)level[i] << shift;
  }
  return word;
}

// Columns past n have scale 0, so their values are 0.
static void pack_quant_panel(const QuantSource& w, int panel, uint8_t* out) {
  with_form(w.form, [&](auto form) {
    using FORM = decltype(form);
    constexpr size_t SCALE = FORM::SCALE_BYTES / PANEL;
    const int group = w.form.group, groups = w.k / group;
    memset(out, 0, groups * group_bytes<FORM>(group));
    for (int c = 0; c < PANEL && panel * PANEL + c < w.n; ++c) {
      size_t column = (size_t)panel * PANEL + c;
      for (int g = 0; g < groups; ++g) {
        uint8_t* at = out + g * group_bytes<FORM>(group);
        memcpy(at + c * SCALE, (const uint8_t*)w.scales + (column * groups + g) * SCALE, SCALE);
        if (FORM::ZEROS) at[FORM::SCALE_BYTES + c] = w.zeros[column * groups + g];
        if (FORM::MINIMA) memcpy(at + FORM::SCALE_BYTES + 2 * c, w.minima + column * groups + g, 2);
        const uint8_t* level = w.levels + column * w.k + (size_t)g * group;
        for (int i = 0; i < group / FORM::WORD; ++i) {
          uint32_t word = word_of<FORM>(level + i * FORM::WORD);
          memcpy(at + FORM::HEAD_BYTES + ((size_t)i * PANEL + c) * 4, &word, 4);
        }
      }
    }
  });
}

// --- the input, rounded to 8 bits -------------------------------------------------------------------------------------

// Rows of x [rows, k] as level * scale. A row's levels and scales depend on that row alone.
#if PAGODA_LEVEL == 1 && !defined(__AVXVNNI__)
constexpr int LEVEL_BYTES = 2;  // the most bytes per rounded input
#else
constexpr int LEVEL_BYTES = 1;
#endif

class RoundedRows : public Kept {
 public:
  // Rounds rows [first, last), given as `x`, for a matrix of this form. LEVEL is int8_t, or int16_t if bytes are multiplied
  // as 16-bit numbers. TILED: they are stored in tile order, for which k is a multiple of 64.
  template <typename LEVEL, bool TILED = false>
  void take(const uint16_t* x, int first, int last, int k, const QuantForm& form, uint64_t use) {
    if (holds(first, use)) return;
    const int groups = k / form.group;
    rows_ = last - first;
    stride_ = apart((size_t)k * sizeof(LEVEL));
    size_t level_bytes = (size_t)rows_ * stride_;
#ifdef __AMX_INT8__
    if constexpr (TILED) {
      order_ = {(size_t)k};
      level_bytes = order_.total(rows_);
    }
#endif
    levels_ = reserve(level_bytes + (size_t)rows_ * groups * 8);
    scales_ = (float*)(levels_ + level_bytes);
    offsets_ = (int32_t*)(scales_ + (size_t)rows_ * groups);
    // If the zero level is the same everywhere, multiply it by the sum here.
    const int32_t zero = form.levels ? 1 : 1 << (form.bits - 1);
    for (int r = 0; r < rows_; ++r)
      for (int g = 0; g < groups; ++g) round_group<LEVEL, TILED>(x + (size_t)r * k, r, g, form.group, zero);
    hold(first, use);
  }

#ifdef __AMX_INT8__
  // The tile whose first row is `row`.
  TileRows tile(int row, int product) const { return order_.tile(levels_, row - first(), product); }
#endif
  // For rows from `row` on; those of a group are contiguous.
  const uint8_t* levels(int row) const { return levels_ + (size_t)(row - first()) * stride_; }
  size_t stride() const { return stride_; }  // bytes
  const float* scales(int row, int group) const { return scales_ + (size_t)group * rows_ + (row - first()); }
  // The correction for zeros or minima: -sum(level), times the middle level if that is zero everywhere.
  const int32_t* offsets(int row, int group) const { return offsets_ + (size_t)group * rows_ + (row - first()); }

 private:
  template <typename LEVEL, bool TILED>
  PAGODA_INLINE_MEMBER LEVEL* level(int row, size_t input) {
#ifdef __AMX_INT8__
    if constexpr (TILED) return (LEVEL*)(levels_ + order_.at(row, input));
#endif
    return (LEVEL*)(levels_ + (size_t)row * stride_) + input;
  }
  // Not inlined: within a larger function, gcc keeps the sum in memory.
  template <typename LEVEL, bool TILED>
  __attribute__((noinline)) void round_group(const uint16_t* x, int row, int group, int size, int32_t zero) {
    const size_t begin = (size_t)group * size;
    const uint16_t* from = x + begin;
    const float most = as_float(largest_magnitude(from, size) << 16);
    const f16 inverse = set1(most >= FAINT ? 127.0f / most : 0.0f);
    ints total = set1(0);
    LEVEL* const first = level<LEVEL, TILED>(row, begin);
    const auto to = [&](int i) PAGODA_INLINE_MEMBER { return TILED ? level<LEVEL, TILED>(row, begin + i) : first + i; };
    int i = 0;
#if PAGODA_LEVEL >= 2
    for (; i + 64 <= size; i += 64) total = round_64(from + i, inverse, to(i), total);
#endif
    for (; i < size; i += 16) total = total + store_rounded(to(i), load_bf16(from + i) * inverse);
    const size_t at = (size_t)group * rows_ + row;
    scales_[at] = most * (1.0f / 127.0f);  // propagates infinity and NaN
    offsets_[at] = -zero * sum(total);
  }

#ifdef __AMX_INT8__
  TileOrder order_ = {};
#endif
  uint8_t* levels_ = nullptr;
  size_t stride_ = 0;
  float* scales_ = nullptr;
  int32_t* offsets_ = nullptr;
  int rows_ = 0;
};

// --- tiles ------------------------------------------------------------------------------------------------------------

template <typename FORM>
PAGODA_INLINE f16 load_scales(const uint8_t* head, int column) {
  if constexpr (FORM::BITS == 8) return load((const float*)head + column);
  if constexpr (FORM::FLOATS) return load_powers(head + column);
  return load_half((const uint16_t*)head + column);
}

// total + a group's products of one rounded row, with this scale and offset, and 16 columns from `column` on. Unless the middle
// level is zero, `sum` is that of the levels themselves.
template <typename FORM>
PAGODA_INLINE f16 add_group(f16 total, ints sum, float row_scale, int32_t offset, const uint8_t* head, f16 scale, int column) {
  if constexpr (FORM::ZEROS) sum = sum + load_u8(head + FORM::SCALE_BYTES + column) * set1(offset);
  total = fma(to_float(sum), scale * set1(row_scale), total);
  if constexpr (FORM::MINIMA)
    total = fma(load_half((const uint16_t*)(head + FORM::SCALE_BYTES) + column) * set1(row_scale), set1(-(float)offset), total);
  return total;
}

// Adds the products of one group of ROWS rounded rows (the first at `a`) and the words of a panel: integers, exact.
template <int ROWS, typename FORM>
PAGODA_INLINE void group_sums(Rows<ROWS> a, const uint8_t* words, int group, Ahead& ahead, ints (&acc)[ROWS][2]) {
  for (int i = 0; i < group; i += FORM::WORD, words += PANEL_ROW, a.move(FORM::WORD)) {
    const quads w[2] = {load_quads(words), load_quads(words + 64)};
    ahead.fetch();
    if constexpr (FORM::BITS == 8) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const uint32_t four = a.word(r);
        acc[r][0] = dot4(acc[r][0], w[0], four);
        acc[r][1] = dot4(acc[r][1], w[1], four);
      }
    } else {
      const quads low[2] = {low_nibbles(w[0]), low_nibbles(w[1])}, high[2] = {high_nibbles(w[0]), high_nibbles(w[1])};
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const uint32_t first = a.word(r), second = a.word(r, 4);
        acc[r][0] = dot4_nibbles(dot4_nibbles(acc[r][0], low[0], first), high[0], second);
        acc[r][1] = dot4_nibbles(dot4_nibbles(acc[r][1], low[1], first), high[1], second);
      }
    }
  }
}

// The zero points of a group with this head, for 16 columns from c on; undefined if the form has none.
template <typename FORM>
PAGODA_INLINE zero_points zeros_at(const uint8_t* head, int c) {
  zero_points z;
  if constexpr (FORM::ZEROS) z = load_zeros(head + FORM::SCALE_BYTES + c);
  return z;
}

// Weights s and s + 4 of each lane's nibbles.
template <typename FORM>
PAGODA_INLINE weight_pairs weights_of(quads w, int s, zero_points z) {
  if constexpr (FORM::ZEROS) return pair_of(w, s, z);
  else if constexpr (FORM::FLOATS) return floats_of(w, s);
  else return pair_of(w, s);
}

// The same for bf16 rows: one chain in float32.
template <int ROWS, typename FORM>
PAGODA_INLINE void group_sums(Rows<ROWS> x, const uint8_t* head, int group, Ahead& ahead, f16 (&acc)[ROWS][2]) {
  const uint8_t* words = head + FORM::HEAD_BYTES;
  const zero_points z[2] = {zeros_at<FORM>(head, 0), zeros_at<FORM>(head, 16)};
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = zero();
  for (int i = 0; i < group; i += FORM::WORD, words += PANEL_ROW, x.move(FORM::WORD * sizeof(Bf16::Left))) {
    const quads w[2] = {load_quads(words), load_quads(words + 64)};
    ahead.fetch();
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const weight_pairs pair[2] = {weights_of<FORM>(w[0], s, z[0]), weights_of<FORM>(w[1], s, z[1])};
#pragma GCC unroll 2
      for (int pass = 0; pass < Bf16::PASSES; ++pass) {
        const Bf16::Right w0 = right(pair[0], pass), w1 = right(pair[1], pass);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const Bf16::Left* two = x.template row<Bf16::Left>(r, 2 * s * sizeof(Bf16::Left));
          acc[r][0] = Bf16::add(acc[r][0], two, pass, w0);
          acc[r][1] = Bf16::add(acc[r][1], two, pass, w1);
        }
      }
    }
  }
}

struct Inputs {  // in each of the forms that weights may need
  NormedRows normed;
  LeftRows left;
  RoundedRows rounded;
};

// Rows [from, from + ROWS) through a panel. Not inlined, so that each instance has all registers to itself.
template <int ROWS, typename FORM>
static __attribute__((noinline)) void quant_tile(const LinearOp& op, const Inputs& in, int from,
                                                 const uint8_t* panel, int column, Ahead& ahead) {
  const int group = op.form.group, segment_groups = op.k / group / op.segments;
  SegmentSums<ROWS> sums;
  for (int segment = 0, g = 0; segment < op.segments; ++segment) {
    f16 total[ROWS][2];
    for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = zero();
    for (const int end = g + segment_groups; g < end; ++g, panel += group_bytes<FORM>(group)) {
      ahead.skip(FORM::HEAD_BYTES);
      if constexpr (FORM::ROUNDED) {
        const float* scales = in.rounded.scales(from, g);
        const int32_t* offsets = in.rounded.offsets(from, g);
        ints acc[ROWS][2];
        for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = set1(FORM::MIDDLE ? offsets[r] : 0);
        const Rows<ROWS> levels(in.rounded.levels(from) + (size_t)g * group, in.rounded.stride());
        group_sums<ROWS, FORM>(levels, panel + FORM::HEAD_BYTES, group, ahead, acc);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          const f16 scale = load_scales<FORM>(panel, 16 * c);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            const f16 sum = add_group<FORM>(total[r][c], acc[r][c], scales[r], offsets[r], panel, scale, 16 * c);
            if (g + 1 == end) sums.put(segment, r, 16 * c, sum);
            else total[r][c] = sum;
          }
        }
      } else {
        f16 acc[ROWS][2];
        const Rows<ROWS> x(in.left.row(from) + (size_t)g * group, in.left.stride());
        group_sums<ROWS, FORM>(x, panel, group, ahead, acc);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          const f16 scale = load_scales<FORM>(panel, 16 * c);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            const f16 sum = fma(acc[r][c], scale, total[r][c]);
            if (g + 1 == end) sums.put(segment, r, 16 * c, sum);
            else total[r][c] = sum;
          }
        }
      }
    }
  }
  finish_rows(sums.total(0), ROWS, from, column, op);
}

// Rows [first, last) through one panel, group by group, without unpacking first.
constexpr int DIRECT_ROWS = PAGODA_LEVEL == 1 ? 2 : MAX_ROWS;
template <typename FORM>
constexpr MostRows MOST_ROWS = PAGODA_LEVEL >= 2 && FORM::BITS == 8 ? MostRows{3, 18} : MostRows{MAX_ROWS, 0};
template <typename FORM>
static void quant_panel_directly(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel,
                                 int column) {
  Ahead ahead(panel, quant_panel_bytes(op.form, op.k), last - first, MOST_ROWS<FORM>, DIRECT_ROWS);
  in_tiles<DIRECT_ROWS>(first, last, [&](auto count, int from) {
    quant_tile<decltype(count)::value, FORM>(op, in, from, panel, column, ahead);
  });
}

}  // namespace PAGODA_NS

#if PAGODA_LEVEL == 1
#include "quant_avx2.h"
#else
#ifdef __AMX_INT8__
#include "quant_tiles.h"
#endif
namespace PAGODA_NS {

// Prepares a block of rows [first, last), given as `x`, for `quant_panel`.
static void quant_take(Inputs& in, const uint16_t* x, int first, int last, const LinearOp& op, uint64_t use) {
#ifdef __AMX_INT8__
  if (tiles_take(op.form, last - first)) {
    if (op.form.input_bits == 8) in.rounded.take<int8_t, true>(x, first, last, op.k, op.form, use);
    else in.left.take_tiles(x, first, last, op.k, op.segments, op.x_stride, use);
    return;
  }
#endif
  if (op.form.input_bits == 8) in.rounded.take<int8_t>(x, first, last, op.k, op.form, use);
  else in.left.take(x, first, last, op.k, op.x_stride, use);
}

// A block of rows through one panel.
static void quant_panel(const LinearOp& op, const Inputs& in, int first, int last, const uint8_t* panel, int column) {
#ifdef __AMX_INT8__
  if (tiles_take(op.form, last - first)) {
    with_form(op.form, [&](auto form) { tile_panel<decltype(form)>(op, in, first, last, panel, column); });
    return;
  }
#endif
  with_form(op.form, [&](auto form) { quant_panel_directly<decltype(form)>(op, in, first, last, panel, column); });
}

}  // namespace PAGODA_NS
#endif
