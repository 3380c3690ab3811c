// How attention is cut into pieces: into items, and if these would leave threads idle, into shares of an item's splits.
//
// A share stores the result of each of its splits, unmerged. The last of an item's shares to finish merges all of them, left
// to right, as a single thread would have done along the way. So sharing does not change any bit.
#pragma once

#include "attention.h"

namespace PAGODA_NS {

constexpr int SHARED_LINES = 16;  // rows with more lines have enough arithmetic, and would need too much memory
constexpr int BUSY = 16;           // pieces per thread that keep all of them busy to the end

PAGODA_INLINE int row_lines(const AttentionArgs& a, int row) {
  return (a.query_starts[row + 1] - a.query_starts[row]) * (a.heads / a.kv.heads);
}
PAGODA_INLINE int row_items(const AttentionArgs& a, int row) {
  return items_per_head(a, row) * a.kv.heads;
}
PAGODA_INLINE Splits row_splits(const AttentionArgs& a, int row) {
  const int length = a.query_starts[row + 1] - a.query_starts[row], end = a.context_lens[row];
  return splits_between(a, end - length, end - 1, end);
}
PAGODA_INLINE int count_of(const Splits& s) { return s.last - s.first; }

// The number of shares of each of a row's items, if a share has at most `splits` splits.
PAGODA_INLINE int row_shares(const AttentionArgs& a, int row, int splits) {
  if (splits == 0 || row_lines(a, row) > SHARED_LINES) return 1;
  return (count_of(row_splits(a, row)) + splits - 1) / splits;
}
// Floats that an item of the row needs for the results of its splits.
PAGODA_INLINE size_t item_floats(const AttentionArgs& a, int row) {
  return (size_t)count_of(row_splits(a, row)) * row_lines(a, row) * (a.kv.dim + 2);
}

// Items are cut if whole ones could keep some thread waiting for more than an eighth of the time. Then every item larger than
// half of a thread's share of the work is cut.
static Cut attention_cut(const AttentionArgs& a, int rows, int threads) {
  Cut cut{0, 0, 0, 0};
  long work = 0, largest = 0;
  for (int row = 0; row < rows; ++row) {
    const int splits = count_of(row_splits(a, row));
    cut.pieces += row_items(a, row);
    work += (long)row_items(a, row) * splits;
    largest = splits > largest ? splits : largest;
  }
  const long turns = (cut.pieces + threads - 1) / threads;  // items per thread, if all were as large as the largest
  if (threads == 1 || cut.pieces >= BUSY * threads || 8 * threads * turns * largest <= 9 * work) return cut;
  cut.splits = (int)((work + 2 * threads - 1) / (2 * threads));
  cut.pieces = 0;
  for (int row = 0; row < rows; ++row) {
    const int shares = row_shares(a, row, cut.splits);
    cut.pieces += row_items(a, row) * shares;
    if (shares > 1) cut.floats += row_items(a, row) * item_floats(a, row), cut.counters += (size_t)row_items(a, row);
  }
  return cut;
}

PAGODA_INLINE Part part_at(const AttentionArgs& a, float* floats, int lines, int split) {
  float* at = floats + (size_t)split * lines * (a.kv.dim + 2);
  return {at, at + lines, at + 2 * lines};
}

// Computes share `index` of `shares` of an item, whose parts are stored at `floats`; `done` counts finished shares.
static void attend_share(const AttentionArgs& a, const Lines& lines, int index, int shares, float* floats, int32_t* done,
                         AttentionScratch& s) {
  gather(a, lines, s);
  const Splits seen = splits_between(a, s.position[0], s.position[lines.count - 1], s.length);
  const int count = count_of(seen), last = (int)((long)count * (index + 1) / shares);
  const int32_t* table = a.block_tables + (size_t)lines.row * a.max_blocks;
  for (int i = (int)((long)count * index / shares); i < last; ++i) {
    const Part part = part_at(a, floats, lines.count, i);
    attend_split(a, lines.count, table, lines.head, seen.first + i, &part, s);
  }
  if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < shares) return;
  *done = 0;  // for the next operation
  clear(a, lines, s);
  for (int i = 0; i < count; ++i) {
    const Part part = part_at(a, floats, lines.count, i);
    each_tile(a, s, lines.count, (seen.first + i) * SPLIT, [&](const View& v, int rows) { merge_tile(a, v.line, rows, part, s); });
  }
  finish(a, lines, s);
}

// Computes pieces [first, last), ordered by row, then by share, then by item.
static void attend_pieces(const AttentionArgs& a, const Work& work, int first, int last, AttentionScratch& s) {
  int row = 0, before = 0;
  size_t floats = 0, shared = 0;  // of the rows before this one
  for (int piece = first; piece < last;) {
    const int shares = row_shares(a, row, work.cut.splits), items = row_items(a, row);
    for (; piece < last && piece < before + items * shares; ++piece) {
      const int item = (piece - before) % items;
      const Lines lines = lines_of(a, row, item);
      if (shares == 1) attend(a, lines, s);
      else attend_share(a, lines, (piece - before) / items, shares, work.floats + floats + item * item_floats(a, row),
                        work.done + shared + item, s);
    }
    before += items * shares;
    if (shares > 1) floats += items * item_floats(a, row), shared += (size_t)items;
    ++row;
  }
}

}  // namespace PAGODA_NS
