// y = x W^T with a fused epilogue.
//
// Weights are packed once into panels of 32 columns, [N/32][K/2][32] pairs, so that a panel is one sequential stream.
#pragma once

#include "amx.h"
#include "ints.h"
#include "kept.h"
#include "low_rank.h"
#include "program.h"
#include "segments.h"
#include "tile.h"

namespace PAGODA_NS {

constexpr size_t PANEL_ROW = 4 * PANEL;  // bytes
// Distance in bytes of what is prefetched once; may reach past the end. Where groups take turns, it spans a whole turn.
constexpr int FETCH_AHEAD = PAGODA_LEVEL >= 2 ? 8192 : 4096, TURNS_AHEAD = 16384;

// w: [n, k] bf16 row major -> panel p of [k/2][32] pairs. Columns past n are zero.
static void pack_panel(const uint16_t* w, int n, int k, int panel, uint32_t* out) {
  // One cache line of each row at a time, so that the output stays in the first-level cache until it is complete.
  for (int begin = 0; begin < k / 2; begin += 16)
    for (int c = 0; c < PANEL; ++c) {
      int column = panel * PANEL + c, end = begin + 16 < k / 2 ? begin + 16 : k / 2;
      const uint16_t* row = w + (size_t)column * k;
      for (int i = begin; i < end; ++i)
        out[(size_t)i * PANEL + c] = column < n ? (uint32_t)row[2 * i] | (uint32_t)row[2 * i + 1] << 16 : 0;
    }
}

PAGODA_INLINE void store_some(uint16_t* y, f16 a, int count) {
  if (count >= 16) {
    store_bf16_normal(y, a);
  } else if (count > 0) {
    uint16_t t[16];
    store_bf16_normal(t, a);
    memcpy(y, t, 2 * (size_t)count);
  }
}

PAGODA_INLINE f16 load_some(const uint16_t* p, int count) {
  if (count >= 16) return load_bf16(p);
  uint16_t t[16] = {};
  if (count > 0) memcpy(t, p, 2 * (size_t)count);
  return load_bf16(t);
}

PAGODA_INLINE f16 load_some(const float* p, int count) {
  if (count >= 16) return load(p);
  float t[16] = {};
  if (count > 0) memcpy(t, p, 4 * (size_t)count);
  return load(t);
}

PAGODA_INLINE f16 activated(f16 x, int activation) {
  switch (activation) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU: return gelu(x);
    default: return max(zero(), x);  // RELU; this order of operands propagates NaN
  }
}

// The gated activation of experts in some model families; propagates NaN.
PAGODA_INLINE f16 clamped(f16 gate, f16 up) {
  gate = min(set1(CLAMP), gate);
  up = max(set1(-CLAMP), min(set1(CLAMP), up));
  return rounded(gate / (set1(1.0f) + exp(set1(-CLAMPED_GAIN) * gate))) * (up + set1(1.0f));
}

// Offset of a row of y, in elements, if its rows have `width` of them.
PAGODA_INLINE size_t row_begin(const LinearOp& op, size_t row, int width) { return row * (size_t)(op.y_stride ? op.y_stride : width); }

PAGODA_INLINE void finish_row(f16 c0, f16 c1, size_t row, int column, const LinearOp& op) {
  const int n = op.n;
  if (op.bias) {
    c0 = c0 + load_bf16(op.bias + column);
    c1 = c1 + load_bf16(op.bias + column + 16);
  }
  if (op.activation > 0) {
    f16 gate = rounded(c0), up = rounded(c1);
    const f16 both = op.activation == CLAMPED ? clamped(gate, up) : rounded(activated(gate, op.activation)) * up;
    store_some((uint16_t*)op.y + row_begin(op, row, n / 2) + column / 2, both, (n - column) / 2);
    return;
  }
  if (op.activation < 0) {
    c0 = activated(rounded(c0), -op.activation);
    c1 = activated(rounded(c1), -op.activation);
  }
  if (op.out_f32) {
    if (op.softcap != 0.0f) {
      c0 = tanh(c0 * set1(1.0f / op.softcap)) * set1(op.softcap);
      c1 = tanh(c1 * set1(1.0f / op.softcap)) * set1(op.softcap);
    }
    float* out = (float*)op.y + row_begin(op, row, n) + column;
    if (n - column >= 32) {
      store(out, c0);
      store(out + 16, c1);
    } else {
      float t[32];
      store(t, c0);
      store(t + 16, c1);
      memcpy(out, t, 4 * (size_t)(n - column));
    }
    return;
  }
  uint16_t* out = (uint16_t*)op.y + row_begin(op, row, n) + column;
  store_some(out, c0, n - column);
  store_some(out + 16, c1, n - column - 16);
}

// Runs the epilogue on the rows of a tile. The accumulators are passed in memory, once: so there is only one copy of the
// epilogue, and no accumulator has its address taken, which would force it out of its register.
static __attribute__((noinline)) void finish_rows(float* tile, int rows, int first, int column, const LinearOp& op) {
  if (op.slots) expand(tile, rows, first, column, op);
  for (int r = 0; r < rows; ++r, tile += PANEL) finish_row(load(tile), load(tile + 16), (size_t)(first + r), column, op);
}
// Calls f(count, from) for tiles of at most MOST rows that cover [first, last); `count` is a compile-time constant.
template <int MOST = MAX_ROWS, typename F>
PAGODA_INLINE void in_tiles(int first, int last, F&& f) {
  int rows = last - first;
  int tiles = (rows + MOST - 1) / MOST;
  for (int t = 0; t < tiles; ++t) {
    int from = first + (int)((long)rows * t / tiles), to = first + (int)((long)rows * (t + 1) / tiles);
    with_rows<MOST>(to - from, [&](auto count) { f(count, from); });
  }
}

enum class Fetch : uint8_t { NOTHING, NEAR, L2, TWICE, PAST };  // as an int in Ahead, it makes gcc spill sums at AVX2

// For one kind of weights, with how many rows at most it is worth it to bypass the caches, whose lines are gone again if the
// arithmetic takes longer, and with how many the memory is slower than the arithmetic, so that lines go to the second-level
// cache.
struct MostRows {
  int past, l2;
};

// What to prefetch while rows pass a panel. A single tile fetches the same panel, some way ahead; that data need not stay in
// any cache. Several tiles find the panel in a near cache, and each fetches a share of the next panel. While memory is the
// slower, lines are fetched into the second-level cache, which can have more of them in flight than the first. A step covers
// one row of the panel, in each turn of a tile.
struct Ahead {
  const char* at;
  size_t step, half;
  bool single;
  Fetch how;

  PAGODA_INLINE_MEMBER Ahead(const void* panel, size_t bytes, int rows, MostRows most = {MAX_ROWS, 0},
                             int tile_rows = MAX_ROWS, int turns = 1) {
    const size_t tiles = (size_t)(rows + tile_rows - 1) / tile_rows, times = tiles * turns;
    step = (PANEL_ROW + times - 1) / times;
    half = step / 2;
    single = tiles == 1;
    how = single ? own(rows, most, turns) : rows <= most.l2 ? Fetch::L2 : Fetch::NEAR;
    at = (const char*)panel + (single ? own_distance(how, turns) : bytes);
  }
  // How a single tile fetches its own panel, and how far ahead.
  PAGODA_INLINE Fetch own(int rows, MostRows most, int turns) {
    if (turns > 1) return past_caches() ? Fetch::PAST : Fetch::NEAR;
    if (!past_caches()) return Fetch::TWICE;
    if (PAGODA_LEVEL == 1) return Fetch::NEAR;
    return rows <= most.past ? Fetch::PAST : Fetch::L2;
  }
  PAGODA_INLINE size_t own_distance(Fetch how, int turns) {
    return turns > 1 ? TURNS_AHEAD : how == Fetch::TWICE || how == Fetch::L2 ? FAR_AHEAD : FETCH_AHEAD;
  }
  PAGODA_INLINE_MEMBER void fetch() {
    if (how == Fetch::PAST) fetch<Fetch::PAST>();
    else if (how == Fetch::TWICE) fetch<Fetch::TWICE>();
    else if (how == Fetch::L2) fetch<Fetch::L2>();
    else fetch<Fetch::NEAR>();
  }
  template <Fetch FETCH>
  PAGODA_INLINE_MEMBER void fetch() {
    if constexpr (FETCH == Fetch::NOTHING) return;
    if constexpr (FETCH == Fetch::PAST) {
      prefetch_past(at);
      prefetch_past(at + half);
    } else if constexpr (FETCH == Fetch::L2) {
      prefetch_l2(at);
      prefetch_l2(at + half);
    } else if constexpr (FETCH == Fetch::TWICE) {
      prefetch_twice(at);
      prefetch_twice(at + half);
    } else {
      prefetch(at);
      prefetch(at + half);
    }
    at += step;
  }
  // Skips bytes of the same panel that are not rows.
  PAGODA_INLINE_MEMBER void skip(size_t bytes) {
    if (single) at += bytes;
  }
};

// Adds the products of ROWS rows and `num_pairs` pair rows of GROUPS groups to `sums` [ROWS][PANEL]. Not inlined, and
// instantiated for each way to prefetch, so that it has all registers to itself.
template <typename NUMBERS, int ROWS, int GROUPS, Fetch FETCH>
static __attribute__((noinline)) void add_pairs(Rows<ROWS> x, const uint32_t* panel, int num_pairs, Ahead& ahead_,
                                                typename NUMBERS::Value* sums) {
  const uint32_t* const groups[2] = {panel, panel + 16};
  Ahead ahead = ahead_;
  typename NUMBERS::Sum acc[ROWS][GROUPS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) acc[r][g] = load(sums + r * PANEL + 16 * g);
  tile<NUMBERS>(x, groups, NUMBERS::WORD_ROWS * PANEL, num_pairs, acc, [&](int) PAGODA_INLINE_MEMBER { ahead.fetch<FETCH>(); });
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) store(sums + r * PANEL + 16 * g, acc[r][g]);
  ahead_ = ahead;
}

// The same for both groups of a panel, at once if the registers suffice for this many rows.
template <typename NUMBERS, int ROWS, Fetch FETCH>
PAGODA_INLINE void add_both(Rows<ROWS> x, const uint32_t* panel, int num_pairs, Ahead& ahead, typename NUMBERS::Value* sums) {
  constexpr int GROUPS = groups_of(ROWS, 2);
  add_pairs<NUMBERS, ROWS, GROUPS, FETCH>(x, panel, num_pairs, ahead, sums);
  if constexpr (GROUPS == 1) add_pairs<NUMBERS, ROWS, 1, FETCH>(x, panel + 16, num_pairs, ahead, sums + 16);
}

// The same, prefetching as `ahead.how` says.
template <typename NUMBERS, int ROWS>
PAGODA_INLINE void add_both(Rows<ROWS> x, const uint32_t* panel, int num_pairs, Ahead& ahead, typename NUMBERS::Value* sums) {
  if (ahead.how == Fetch::PAST) add_both<NUMBERS, ROWS, Fetch::PAST>(x, panel, num_pairs, ahead, sums);
  else if (ahead.how == Fetch::TWICE) add_both<NUMBERS, ROWS, Fetch::TWICE>(x, panel, num_pairs, ahead, sums);
  else if (ahead.how == Fetch::L2) add_both<NUMBERS, ROWS, Fetch::L2>(x, panel, num_pairs, ahead, sums);
  else add_both<NUMBERS, ROWS, Fetch::NEAR>(x, panel, num_pairs, ahead, sums);
}

// Where the registers do not hold both groups of a panel for a full tile, groups and tiles take turns of TURN pair rows,
// which stay in the first-level cache until all rows have been multiplied by them.
constexpr int TURN = groups_of(MAX_ROWS, 2) == 2 ? 1 << 30 : 128;
constexpr int WIDE_TURN = 64;  // the same if pair rows are widened before,
constexpr int WIDE_ROWS = 40;  // which pays for itself with so many rows
constexpr int BLOCK = 256;     // rows of a block at most
constexpr MostRows MOST_BF16 = PAGODA_LEVEL >= 3 ? MostRows{8, 18} : PAGODA_LEVEL == 1 ? MostRows{0, 9} : MostRows{MAX_ROWS, 0};

#ifdef __AMX_BF16__
constexpr int TILE_CHUNK = 12;   // products of a panel that stay in the first-level cache while all rows of a block use them
constexpr int WHOLE_CHUNK = 16;  // the same if the panel has no more

// Calls f(rows, from) for each part of [first, last) that the tiles take at a time.
template <typename F>
PAGODA_INLINE void in_tile_blocks(int first, int last, F&& f) {
  for (int from = first; from < last; from += TILE_BLOCK) f(last - from < TILE_BLOCK ? last - from : TILE_BLOCK, from);
}

// Adds the remainder of a segment, shorter than one product.
static void add_rest(const LeftRows& x, int from, int rows, int at, int num_pairs, const uint32_t* panel, float* sums) {
  Ahead nothing(panel, 0, rows);
  in_tiles(0, rows, [&](auto count, int row) {
    constexpr int ROWS = decltype(count)::value;
    const Rows<ROWS> tile_rows(x.row(from + row) + 2 * at, x.stride());
    add_both<Bf16, ROWS, Fetch::NOTHING>(tile_rows, panel, num_pairs, nothing, sums + row * PANEL);
  });
}

// The end of a panel: rows whose sums are complete go through the epilogue, a few of them with every product of later rows.
// The epilogue writes one cache line of each row of y, far apart. These lines are prefetched with earlier products, also a
// few at a time: more than the hardware can have in flight would stall everything.
class Finishing {
 public:
  Finishing(const LinearOp& op, int column) : op_(op), column_(column) {
    const size_t size = op.out_f32 ? 4 : 2, shrunk = op.activation > 0 ? 2 : 1;
    line_bytes_ = size * row_begin(op, 1, op.n / (int)shrunk);
    y_ = (char*)op.y + size * (size_t)column / shrunk;
  }
  // From now on, each call of `some` prefetches one of `parts` parts of the lines of these rows.
  PAGODA_INLINE_MEMBER void expect(int rows, int first, int parts) {
    line_ = y_ + (size_t)first * line_bytes_, lines_ = rows, lines_part_ = (rows + parts - 1) / parts;
  }
  // From now on, each call also finishes one of `parts` parts of these rows, whose sums are `sums`. Parts are rounded up to
  // the number of tokens that adapters handle at once.
  PAGODA_INLINE_MEMBER void start(float* sums, int rows, int first, int parts) {
    rest();
    sums_ = sums, rows_ = rows, first_ = first;
    part_ = ((rows + parts - 1) / parts + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE * TOKENS_AT_ONCE;
  }
  PAGODA_INLINE_MEMBER void some() {
    for (int left = lines_part_; left > 0 && lines_ > 0; --left, --lines_, line_ += line_bytes_) __builtin_prefetch(line_, 1);
    if (rows_ > 0) finish(part_ < rows_ ? part_ : rows_);
  }
  PAGODA_INLINE_MEMBER void rest() {
    if (rows_ > 0) finish(rows_);
  }

 private:
  void finish(int rows) {
    finish_rows(sums_, rows, first_, column_, op_);
    sums_ += rows * PANEL, first_ += rows, rows_ -= rows;
  }
  const LinearOp& op_;
  const int column_;
  size_t line_bytes_;
  char *y_, *line_ = nullptr;
  int lines_ = 0, lines_part_ = 0;
  float* sums_ = nullptr;
  int rows_ = 0, first_ = 0, part_ = 0;
};

PAGODA_INLINE void linear_take(LeftRows& rows, const uint16_t* x, int first, int last, const LinearOp& op, uint64_t use) {
  rows.take_tiles(x, first, last, op.k, op.segments, op.x_stride, use);
}

// A block of rows [first, last) through one panel.
static void linear_panel(const LinearOp& op, const LeftRows& x, int first, int last, const uint32_t* panel, int column) {
  SegmentSums<BLOCK> sums;
  const int num_pairs = op.k / 2, segment_pairs = num_pairs / op.segments, products = segment_pairs / TILE_WORDS;
  const int chunk = products <= WHOLE_CHUNK ? WHOLE_CHUNK : TILE_CHUNK;
  const int rest = segment_pairs % TILE_WORDS;  // less than a product
  TileAhead ahead(panel, (size_t)num_pairs * PANEL_ROW, TILE_WORDS * PANEL_ROW, last - first);
  const Tiles tiles(last - first);
  Unstored unstored;
  Finishing finishing(op, column);
  for (int segment = 0; segment < op.segments; ++segment, panel += (size_t)segment_pairs * PANEL) {
    if (products == 0) sums.start(segment, 0, last - first);
    for (int done = 0, count; done < products; done += count) {
      count = products - done < chunk ? products - done : chunk;
      const uint32_t* words = panel + (size_t)done * TILE_WORDS * PANEL;
      const bool ends = done + count == products && rest == 0, all = ends && segment + 1 == op.segments;
      const auto stored = [&](int rows, int from, int parts) {
        if (ends) sums.end(segment, from - first, rows);
        if (all) finishing.start(sums.total(from - first), rows, from, parts);
      };
      int before = 0;
      in_tile_blocks(first, last, [&](int rows, int from) {
        if (all) finishing.expect(rows, from, count);
        tile_sums<TileProduct::PAIRS>(rows, done == 0, x.tile(from, segment, done), words, count, ahead,
                                      sums.of(segment, from - first), unstored,
                                      [&]() PAGODA_INLINE_MEMBER { finishing.some(); });
        if (before > 0) stored(before, from - before, count);
        before = rows;
      });
      if (done + count == products) unstored.store();
      stored(before, last - before, 1);
    }
    if (rest == 0) continue;
    const int at = products * TILE_WORDS;
    add_rest(x, first, last - first, segment * segment_pairs + at, rest, panel + (size_t)at * PANEL, sums.of(segment, 0));
    sums.end(segment, 0, last - first);
  }
  if (rest) finishing.start(sums.total(0), last - first, first, 1);
  finishing.rest();
}
#else
PAGODA_INLINE void linear_take(LeftRows& rows, const uint16_t* x, int first, int last, const LinearOp& op, uint64_t use) {
  rows.take(x, first, last, op.k, op.x_stride, use);
}

// A block of rows [first, last) through one panel.
template <typename NUMBERS>
static void panel_in_turns(const LinearOp& op, const LeftRows& x, int first, int last, const uint32_t* panel, int column) {
  constexpr bool WIDE = NUMBERS::WORD_ROWS > 1;
  constexpr int PAIRS = WIDE ? WIDE_TURN : TURN;
  alignas(64) float wide[WIDE ? PAIRS * NUMBERS::WORD_ROWS * PANEL : 1];
  SegmentSums<BLOCK> sums;
  const int num_pairs = op.k / 2, segment_pairs = num_pairs / op.segments;
  const int rows = last - first, turns = 2 / groups_of(rows < MAX_ROWS ? rows : MAX_ROWS, 2);
  Ahead ahead(panel, (size_t)num_pairs * PANEL_ROW, rows, MOST_BF16, MAX_ROWS, turns);
  for (int begin = 0; begin < num_pairs; begin += PAIRS) {
    const int end = num_pairs - begin < PAIRS ? num_pairs : begin + PAIRS;
    const uint32_t* words = panel + (size_t)begin * PANEL;
    if constexpr (WIDE) {
      NUMBERS::widen(words, PANEL, end - begin, wide);
      words = (const uint32_t*)wide;
    }
    in_tiles(first, last, [&](auto count, int from) {
      constexpr int ROWS = decltype(count)::value;
      const int place = num_pairs <= PAIRS ? 0 : from - first;
      for (int at = begin, to; at < end; at = to) {
        const int segment = at / segment_pairs, border = (segment + 1) * segment_pairs;
        to = border < end ? border : end;
        if (at == border - segment_pairs) sums.start(segment, place, ROWS);
        const Rows<ROWS> tile_rows(x.row(from) + 2 * at, x.stride());
        float* sum = sums.of(segment, place);
        add_both<NUMBERS, ROWS>(tile_rows, words + (size_t)(at - begin) * NUMBERS::WORD_ROWS * PANEL, to - at, ahead, sum);
        if (to == border) sums.end(segment, place, ROWS);
      }
      if (end == num_pairs) finish_rows(sums.total(place), ROWS, from, column, op);
    });
  }
}

static void linear_panel(const LinearOp& op, const LeftRows& x, int first, int last, const uint32_t* panel, int column) {
#if PAGODA_LEVEL == 1
  if (last - first >= WIDE_ROWS && widens_apart()) return panel_in_turns<WideBf16<PANEL>>(op, x, first, last, panel, column);
#endif
  panel_in_turns<Bf16>(op, x, first, last, panel, column);
}
#endif

}  // namespace PAGODA_NS
