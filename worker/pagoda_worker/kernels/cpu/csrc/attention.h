// Paged attention for prefill and decode in one kernel.
//
// Keys are attended to in splits of 256 tokens at absolute positions. Each split yields (max, sum, weighted values) from
// scratch and the splits are merged left to right. Nothing in this depends on how a prompt was chunked or what else is in
// the batch, so a row's bits are the same in prefill, in decode and after a prefix hit.
//
// Cache layout, readable by the micro-kernel without repacking:
//   keys    [block][kv head][block_size/16][head_dim/2][16]   pairs of neighbouring dims, 16 tokens to a group
//   values  [block][kv head][block_size/2][head_dim]          pairs of neighbouring tokens
#pragma once

#include "linear.h"

namespace PAGODA_NS {

constexpr int SPLIT = 256;
constexpr float MASKED = -1e30f;
constexpr int FEW_ROWS = 4;  // up to so many lines a tile waits for memory rather than for arithmetic

struct AttentionArgs {
  const uint16_t* q;  // [tokens, heads, dim]
  const uint32_t* k_cache;
  const uint32_t* v_cache;
  uint16_t* out;  // [tokens, heads * dim]
  const int32_t* block_tables;  // [rows, max_blocks]
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* context_lens;  // [rows]
  const float* sinks;           // [heads] or null
  int max_blocks, block_size, heads, kv_heads, dim, window;  // window 0: none
  float scale, softcap;                                      // softcap 0: none
};

// `rows` lines of scratch: scores, probabilities, the running (max, sum, accumulator) of each line.
struct AttentionScratch {
  float scores[MAX_ROWS][SPLIT];
  uint16_t probs[MAX_ROWS][SPLIT];
  float acc[MAX_ROWS][256];
  float top[MAX_ROWS], sum[MAX_ROWS];
};

// A line is one (token, head of the group). Its queries lie `lda` apart only within a token, so lines are gathered.
struct Lines {
  uint16_t q[MAX_ROWS][256];
  int position[MAX_ROWS];
  int count;
};

// One block's keys (or values) of one head, `words` long. Blocks lie anywhere, so the hardware cannot foresee the next one.
PAGODA_INLINE const uint32_t* chunk(const uint32_t* cache, const AttentionArgs& a, const int32_t* table, int head, int token,
                                    size_t words) {
  return cache + ((size_t)table[token / a.block_size] * a.kv_heads + head) * words;
}
PAGODA_INLINE void fetch_ahead(const uint32_t* from, size_t words) {
  for (size_t i = 0; i < words; i += 16) prefetch(from + i);
}

PAGODA_INLINE f16 shaped(f16 s, const AttentionArgs& a) {
  s = s * set1(a.scale);
  if (a.softcap != 0.0f) s = tanh(s * set1(1.0f / a.softcap)) * set1(a.softcap);
  return s;
}

template <int ROWS>
static void split_scores(const AttentionArgs& a, const Lines& l, const int32_t* table, int head, int from, int to,
                         AttentionScratch& s) {
  const size_t group_words = (size_t)a.dim / 2 * 16;
  const size_t head_words = (size_t)a.block_size / 16 * group_words;
  for (int t = from; t < to; t += 32) {
    if (ROWS <= FEW_ROWS)
      fetch_ahead(t + 32 < to ? chunk(a.k_cache, a, table, head, t + 32, head_words)
                              : chunk(a.v_cache, a, table, head, from, head_words),
                  head_words);
    const uint32_t* groups[2];
    for (int g = 0; g < 2; ++g) {
      int token = t + 16 * g < to ? t + 16 * g : t;  // past the end: any readable group, masked below
      groups[g] = chunk(a.k_cache, a, table, head, token, head_words) + (size_t)(token % a.block_size) / 16 * group_words;
    }
    f16 acc[ROWS][2];
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = zero();
    tile<ROWS, 2>(&l.q[0][0], 256, groups, 16, a.dim / 2, acc);
    for (int r = 0; r < ROWS; ++r)
      for (int g = 0; g < 2; ++g) {
        int first = t + 16 * g;
        f16 x = keep_below(shaped(acc[r][g], a), first, l.position[r] + 1, set1(MASKED));
        if (a.window && first <= l.position[r] - a.window)
          x = keep_below(set1(MASKED), first, l.position[r] - a.window + 1, x);
        store(&s.scores[r][first - from], x);
      }
  }
}

// Scores -> bf16 probabilities relative to the split's own maximum; returns nothing for a line that is masked throughout.
static bool split_softmax(AttentionScratch& s, int r, int width, float& top, float& sum_out) {
  f16 m = set1(MASKED);
  for (int i = 0; i < width; i += 16) m = max(m, load(&s.scores[r][i]));
  top = max_lane(m);
  if (top <= MASKED) return false;
  f16 total = zero(), shift = set1(top);
  for (int i = 0; i < width; i += 16) {
    f16 p = rounded(exp(load(&s.scores[r][i]) - shift));
    total = total + p;
    store_bf16(&s.probs[r][i], p);
  }
  sum_out = sum(total);
  return true;
}

// Probabilities of a split times its values, for GROUPS x 16 dims from `dim_first` on, into the running accumulators.
template <int ROWS, int GROUPS>
static void split_values(const AttentionArgs& a, const int32_t* table, int head, int from, int tokens, int dim_first,
                         const float (&scale_old)[ROWS], const float (&scale_new)[ROWS], AttentionScratch& s) {
  f16 acc[ROWS][GROUPS];
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g) acc[r][g] = zero();
  for (int t = from; t < from + tokens; t += a.block_size) {
    int pairs_here = (from + tokens - t < a.block_size ? from + tokens - t + 1 : a.block_size) / 2;
    const size_t head_words = (size_t)a.block_size / 2 * a.dim;
    const uint32_t* v = chunk(a.v_cache, a, table, head, t, head_words) + dim_first;
    if (ROWS <= FEW_ROWS && dim_first == 0 && t + a.block_size < from + tokens)
      fetch_ahead(chunk(a.v_cache, a, table, head, t + a.block_size, head_words), head_words);
    const uint32_t* groups[GROUPS];
    for (int g = 0; g < GROUPS; ++g) groups[g] = v + (dim_first + 16 * g < a.dim ? 16 * g : 0);
    tile<ROWS, GROUPS>(&s.probs[0][t - from], SPLIT, groups, (size_t)a.dim, pairs_here, acc);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g)
      if (dim_first + 16 * g < a.dim) {
        float* run = &s.acc[r][dim_first + 16 * g];
        store(run, load(run) * set1(scale_old[r]) + acc[r][g] * set1(scale_new[r]));
      }
}

template <int ROWS>
static void attend_split(const AttentionArgs& a, const Lines& l, const int32_t* table, int head, int from, int to,
                         AttentionScratch& s) {
  int padded = (to - from + 31) / 32 * 32;
  split_scores<ROWS>(a, l, table, head, from, to, s);
  float scale_old[ROWS], scale_new[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    float top, total;
    if (!split_softmax(s, r, padded, top, total)) {  // sees nothing of this split: as if it were not there
      memset(s.probs[r], 0, sizeof s.probs[r]);
      scale_old[r] = 1.0f;
      scale_new[r] = 0.0f;
      continue;
    }
    float merged = s.top[r] > top ? s.top[r] : top;
    float both[16] = {s.top[r] - merged, top - merged};
    store(both, exp(load(both)));
    scale_old[r] = both[0];
    scale_new[r] = both[1];
    s.top[r] = merged;
    s.sum[r] = s.sum[r] * both[0] + total * both[1];
  }
  // Few rows leave registers for wide tiles, which read values as one stream instead of in several passes.
  int tokens = to - from, d = 0;
  if constexpr (ROWS * 8 <= 2 * MAX_ROWS)
    for (; d + 128 <= a.dim; d += 128)
      split_values<ROWS, 8>(a, table, head, from, tokens, d, scale_old, scale_new, s);
  if constexpr (ROWS * 4 <= 2 * MAX_ROWS)
    for (; d + 64 <= a.dim; d += 64)
      split_values<ROWS, 4>(a, table, head, from, tokens, d, scale_old, scale_new, s);
  for (; d < a.dim; d += 32) split_values<ROWS, 2>(a, table, head, from, tokens, d, scale_old, scale_new, s);
}

// One item of work: up to MAX_ROWS lines of one row and one kv head, over the whole context they see.
template <int ROWS>
static void attend_lines(const AttentionArgs& a, const Lines& l, const int32_t* table, int head, AttentionScratch& s) {
  int last = 0, first = l.position[0];
  for (int r = 0; r < ROWS; ++r) {
    last = l.position[r] > last ? l.position[r] : last;
    first = l.position[r] < first ? l.position[r] : first;
    s.top[r] = MASKED;
    s.sum[r] = 0.0f;
    memset(s.acc[r], 0, sizeof s.acc[r]);
  }
  int begin = 0;
  if (a.window && first >= a.window) begin = (first - a.window + 1) / SPLIT * SPLIT;
  for (int from = begin; from <= last; from += SPLIT)
    attend_split<ROWS>(a, l, table, head, from, from + SPLIT < last + 1 ? from + SPLIT : last + 1, s);
}

// Lines per token tile: whole tokens if a token's group fits, else a part of one token's group.
PAGODA_INLINE int tokens_per_tile(const AttentionArgs& a) {
  int group = a.heads / a.kv_heads;
  return group >= MAX_ROWS ? 1 : MAX_ROWS / group;
}
PAGODA_INLINE int parts_per_token(const AttentionArgs& a) {
  int group = a.heads / a.kv_heads;
  return (group + MAX_ROWS - 1) / MAX_ROWS;
}

// item = ((query tile * parts) + part) * kv_heads + kv head, for one row.
static void attention_item(const AttentionArgs& a, int row, int item, AttentionScratch& s) {
  int group = a.heads / a.kv_heads, head = item % a.kv_heads, rest = item / a.kv_heads;
  int parts = parts_per_token(a), part = rest % parts, step = tokens_per_tile(a);
  int begin = a.query_starts[row], length = a.query_starts[row + 1] - begin;
  int t0 = rest / parts * step, t1 = t0 + step < length ? t0 + step : length;
  int g0 = group * part / parts, g1 = group * (part + 1) / parts;
  Lines l;
  l.count = 0;
  for (int t = t0; t < t1; ++t)
    for (int g = g0; g < g1; ++g) {
      memcpy(l.q[l.count], a.q + ((size_t)(begin + t) * a.heads + head * group + g) * a.dim, 2 * (size_t)a.dim);
      l.position[l.count++] = a.context_lens[row] - length + t;
    }
  with_rows<MAX_ROWS>(l.count, [&](auto count) {
    attend_lines<decltype(count)::value>(a, l, a.block_tables + (size_t)row * a.max_blocks, head, s);
  });
  int i = 0;
  for (int t = t0; t < t1; ++t)
    for (int g = g0; g < g1; ++g, ++i) {
      int query_head = head * group + g;
      float total = s.sum[i], rescale = 1.0f;
      if (a.sinks) {  // one more column that has a weight but no value
        float top = s.top[i] > a.sinks[query_head] ? s.top[i] : a.sinks[query_head];
        float both[16] = {s.top[i] - top, a.sinks[query_head] - top};
        store(both, exp(load(both)));
        rescale = both[0];
        total = total * both[0] + both[1];
      }
      f16 factor = set1(rescale / total);
      uint16_t* out = a.out + ((size_t)(begin + t) * a.heads + query_head) * a.dim;
      for (int d = 0; d < a.dim; d += 16) store_bf16(out + d, load(&s.acc[i][d]) * factor);
    }
}

}  // namespace PAGODA_NS
