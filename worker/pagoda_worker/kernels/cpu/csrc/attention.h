// Paged attention for prefill and decode in one kernel.
//
// Keys are processed in splits of 256 tokens at absolute positions. Each split yields its own (max, sum, weighted values),
// and the splits are merged left to right. None of this depends on how a prompt was chunked or what else is in the batch,
// so a row's bits are the same in prefill, in decode and after a prefix cache hit. Nor does it matter which thread computes
// a split: if there is little other work, threads share a row's splits, and the last to finish merges them in the same
// order with the same arithmetic (see shares.h).
#pragma once

#include "attention_tiles.h"

namespace PAGODA_NS {

// The first token seen from `position` on, rounded down to where a tile of scores may begin.
PAGODA_INLINE int first_seen(const AttentionArgs& a, int position) {
  return a.window && position >= a.window ? (position - a.window + 1) / 32 * 32 : 0;
}

// The splits [first, last) that some line sees part of.
struct Splits {
  int first, last;
};
PAGODA_INLINE Splits splits_between(const AttentionArgs& a, int first_position, int last_position, int length) {
  return {first_seen(a, first_position) / SPLIT, (end_seen(a, last_position, length) - 1) / SPLIT + 1};
}

PAGODA_INLINE int tiles_of(const AttentionArgs& a, int count) {
  const int most = by_tiles(a) ? TILE_LINES : MAX_ROWS;
  return (count + most - 1) / most;
}

// Calls f(view, rows) for the tiles of `count` gathered lines that see part of the split that begins at `from`. Positions
// ascend, so each tile's visible range begins and ends no earlier than that of the tile before it.
template <typename F>
PAGODA_INLINE void each_tile(const AttentionArgs& a, const AttentionScratch& s, int count, int from, F&& f) {
  const int tiles = tiles_of(a, count);
  const bool wide = widens(a, count), together = wide || kept_once(a);  // all tiles before the first meets the values
  for (int t = 0; t < tiles; ++t) {
    const int line = count * t / tiles, next = count * (t + 1) / tiles;
    const int seen = first_seen(a, s.position[line]), after = end_seen(a, s.position[next - 1], s.length);
    const int first = seen > from ? seen : from, last = after < from + SPLIT ? after : from + SPLIT;
    const View v{line, from, first, last, together ? line : 0, wide ? line : 0};
    if (v.first < v.last) f(v, next - line);
  }
}

// Processes the tiles of `count` gathered lines over groups [first, last) of the split that begins at `from`, with
// weigh(view, rows) and gain(view, rows, first dim, last dim).
template <typename WEIGH, typename GAIN>
PAGODA_INLINE void attend_tiles(const AttentionArgs& a, int count, int from, int first, int last, int end, AttentionScratch& s,
                                WEIGH&& weigh, GAIN&& gain) {
  if (!kept_once(a))
    return each_tile(a, s, count, from, [&](const View& v, int rows) { weigh(v, rows), gain(v, rows, 0, a.kv.dim); });
  each_tile(a, s, count, from, weigh);
  for (int d = 0; d < a.kv.dim; d += LAID_DIMS) {
    const int after = d + LAID_DIMS < a.kv.dim ? d + LAID_DIMS : a.kv.dim;
    lay_from(a, d, first, last, end - from, by_tiles(a), s);
    each_tile(a, s, count, from, [&](const View& v, int rows) { gain(v, rows, d, after); });
  }
}

// Processes the gathered lines over one split.
static void attend_split(const AttentionArgs& a, int count, const int32_t* table, int head, int split, const Part* part,
                         AttentionScratch& s) {
  const int begin = first_seen(a, s.position[0]), end = end_seen(a, s.position[count - 1], s.length), from = split * SPLIT;
  const int low = begin > from ? begin - from : 0, high = end - from < SPLIT ? end - from : SPLIT;
  s.laid.next = SPLIT_GROUPS;  // nothing to lay out, unless `lay_from` is called
  locate(a, table, head, from, low / 16, (high + 15) / 16, end, s.keys, s.values);
#ifdef __AMX_BF16__
  if (by_tiles(a)) {
    const int many = tiles_of(a, count);
    const Tiles tiles((count + many - 1) / many);  // some tiles may have one row less
    if (!kept_once(a)) gather_chunks(a, from, low / 16, (high + 15) / 16, end, s);
    return attend_tiles(
        a, count, from, low / 16, (high + 15) / 16, end, s,
        [&](const View& v, int rows) { weigh_by_tiles(a, v, rows, part, s); },
        [&](const View& v, int rows, int d, int after) { gain_by_tiles(a, v, rows, d, after, part, s); });
  }
#endif
#if PAGODA_LEVEL == 1
  if (widens(a, count))
    return attend_wide(a, from, low / 16, (high + 15) / 16, part, s, [&](auto&& f) { each_tile(a, s, count, from, f); });
#endif
  attend_tiles(
      a, count, from, low / 16, (high + 15) / 16, end, s,
      [&](const View& v, int rows) {
        with_rows<MAX_ROWS>(rows, [&](auto rows) {
          if (a.kv.k_scales) weigh_tile<Int16Bytes, decltype(rows)::value>(a, v, part, s);
          else weigh_tile<Bf16, decltype(rows)::value>(a, v, part, s);
        });
      },
      [&](const View& v, int rows, int d, int after) {
        with_rows<MAX_ROWS>(rows, [&](auto rows) {
          if (a.kv.k_scales) gain_tile<Int16Bytes, decltype(rows)::value>(a, v, d, after, part, s);
          else gain_tile<Bf16, decltype(rows)::value>(a, v, d, after, part, s);
        });
      });
}

// The number of items of a row and kv head: its lines, in token order, are cut into items of LINES.
PAGODA_INLINE int items_per_head(const AttentionArgs& a, int row) {
  int lines = (a.query_starts[row + 1] - a.query_starts[row]) * (a.heads / a.kv.heads);
  return (lines + LINES - 1) / LINES;
}

// The lines of one item: `count` lines from `from` on, among those of `row` that share kv head `head`.
struct Lines {
  int row, head, from, count, begin, group;

  // Line i of q or out, in which tokens are `stride` elements apart; 0: contiguous.
  template <typename T>
  PAGODA_INLINE_MEMBER T* line_of(T* all, const AttentionArgs& a, int i, int stride = 0) const {
    const size_t token = (size_t)(begin + (from + i) / group), dim = (size_t)a.kv.dim;
    return all + token * (stride ? (size_t)stride : a.heads * dim) + (head * group + (from + i) % group) * dim;
  }
};

// item = part of the row's lines * kv_heads + kv head
PAGODA_INLINE Lines lines_of(const AttentionArgs& a, int row, int item) {
  const int group = a.heads / a.kv.heads, begin = a.query_starts[row], from = item / a.kv.heads * LINES;
  const int lines = (a.query_starts[row + 1] - begin) * group, count = lines - from < LINES ? lines - from : LINES;
  return {row, item % a.kv.heads, from, count, begin, group};
}

// Quantises a query to 16-bit integers; returns their scale, NaN if any value is not finite.
static float round_query(const uint16_t* q, int16_t* levels, int dim) {
  const float largest = largest_finite(q, dim);
  const f16 factor = short_factor(largest);
  for (int d = 0; d < dim; d += 16) store_shorts(levels + d, load_bf16(q + d) * factor);
  return largest / LARGEST_SHORT;
}

static void gather(const AttentionArgs& a, const Lines& lines, AttentionScratch& s) {
  const int length = a.query_starts[lines.row + 1] - lines.begin;
  s.length = a.context_lens[lines.row];
  s.bias = a.bias ? a.bias + (size_t)lines.head * a.stride + a.zero : nullptr;
  for (int i = 0; i < lines.count; ++i) {
    const uint16_t* q = lines.line_of(a.q, a, i, a.q_stride);
    if (a.kv.k_scales) s.query_scales[i] = round_query(q, s.fours.q[i], a.kv.dim);
    else for (int d = 0; d < a.kv.dim; d += 16) store_left(&s.pairs.q[i][d], load_bf16(q + d));
    s.position[i] = a.context_lens[lines.row] - length + (lines.from + i) / lines.group;
  }
}

// Initialises the running state: nothing seen yet.
static void clear(const AttentionArgs& a, const Lines& lines, AttentionScratch& s) {
  for (int i = 0; i < lines.count; ++i) {
    s.top[i] = MASKED;
    s.sum[i] = 0.0f;
    memset(s.acc[i], 0, sizeof(float) * (size_t)a.kv.dim);
  }
}

// Normalises and writes the results, after all splits.
static void finish(const AttentionArgs& a, const Lines& lines, const AttentionScratch& s) {
  for (int i = 0; i < lines.count; ++i) {
    float total = s.sum[i], rescale = 1.0f;
    if (a.sinks) {  // one more column, which has a weight but no value
      float sink = a.sinks[lines.head * lines.group + (lines.from + i) % lines.group];
      float top = s.top[i] > sink ? s.top[i] : sink;
      float both[16] = {s.top[i] - top, sink - top};
      store(both, exp(load(both)));
      rescale = both[0];
      total = total * both[0] + both[1];
    }
    f16 factor = set1(rescale / total);
    uint16_t* out = lines.line_of(a.out, a, i);
    for (int d = 0; d < a.kv.dim; d += 16) store_bf16(out + d, load(&s.acc[i][d]) * factor);
  }
}

static void attend(const AttentionArgs& a, const Lines& lines, AttentionScratch& s) {
  gather(a, lines, s);
  clear(a, lines, s);
  const Splits seen = splits_between(a, s.position[0], s.position[lines.count - 1], s.length);
  const int32_t* table = a.block_tables + (size_t)lines.row * a.max_blocks;
  for (int split = seen.first; split < seen.last; ++split) attend_split(a, lines.count, table, lines.head, split, nullptr, s);
  finish(a, lines, s);
}

}  // namespace PAGODA_NS
