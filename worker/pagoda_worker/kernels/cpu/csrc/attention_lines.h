// Computes scores, probabilities, and probabilities times values for some lines over one split, with vector instructions.
// attention_tiles.h does the same with the matrix unit.
#pragma once

#include "attention_once.h"

namespace PAGODA_NS {

// Before the first scores of a split.
PAGODA_INLINE void begin_scores(const View& v, int rows, AttentionScratch& s) {
  for (int r = 0; r < rows; ++r) store(s.peaks[v.scores + r], set1(MASKED));
}

// Turns products into scores of lines [0, rows) and tokens [begin, end), masked unless every line sees all of them, and
// updates each line's per-lane maxima.
PAGODA_INLINE void shape_scores(const AttentionArgs& a, const View& v, int rows, int begin, int end, bool seen_by_all,
                                AttentionScratch& s) {
  for (int r = 0; r < rows; ++r)
    for (int first = begin; first < end; first += 16) {
      float* at = &s.scores[v.scores + r][first - v.from];
      f16 x = load(at) * set1(a.scale);
      if (a.softcap != 0.0f) x = tanh(x * set1(1.0f / a.softcap)) * set1(a.softcap);
      const int position = s.position[v.line + r];
      if (s.bias) x = x + load(s.bias + first - position);
      if (!seen_by_all) {
        x = keep_below(x, first, end_seen(a, position, s.length), set1(MASKED));
        if (a.window) x = keep_below(set1(MASKED), first, position - a.window + 1, x);
      }
      store(at, x);
      float* peaks = s.peaks[v.scores + r];
      store(peaks, max(load(peaks), x));
    }
}

// Prefetches the same offset in each group of `ahead`; PAST: bypassing the caches.
template <int GROUPS, bool PAST>
PAGODA_INLINE void fetch(const uint32_t* const* ahead, size_t words) {
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; ++g)
    if constexpr (PAST) prefetch_past(ahead[g] + words);
    else prefetch(ahead[g] + words);
}

// A tile that also prefetches. Each way to prefetch has its own loop, to keep the choice out of the iterations.
template <typename NUMBERS, int ROWS, int GROUPS, typename ROWS_OF_A>
PAGODA_INLINE void tile_fetching(ROWS_OF_A lines, const uint32_t* const* groups, const uint32_t* const* ahead, size_t stride,
                                 int words, bool past, typename NUMBERS::Sum (&acc)[ROWS][GROUPS]) {
  if (PAGODA_LEVEL >= 2 && past)
    tile<NUMBERS>(lines, groups, stride, words, acc, [&](int k) PAGODA_INLINE_MEMBER { fetch<GROUPS, true>(ahead, k * stride); });
  else
    tile<NUMBERS>(lines, groups, stride, words, acc, [&](int k) PAGODA_INLINE_MEMBER { fetch<GROUPS, false>(ahead, k * stride); });
}

// Queries times keys, `words` words of each. If registers are few, this is a separate function, to have all of them.
template <typename NUMBERS, int ROWS, int GROUPS>
PAGODA_INLINE void multiply_inline(const void* q, const uint32_t* const* keys, const uint32_t* const* ahead, int words, bool past,
                                   typename NUMBERS::Sum (&acc)[ROWS][GROUPS]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g) acc[r][g] = typename NUMBERS::Sum{};
  tile_fetching<NUMBERS>(Rows<ROWS, sizeof(Operands<NUMBERS>::q[0])>(q), keys, ahead, 16, words, past, acc);
}
template <typename NUMBERS, int ROWS>
static __attribute__((noinline)) void multiply_apart(const void* q, const uint32_t* keys, const uint32_t* ahead, int words,
                                                     bool past, typename NUMBERS::Value* products) {
  typename NUMBERS::Sum acc[ROWS][1];
  multiply_inline<NUMBERS>(q, &keys, &ahead, words, past, acc);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) store(products + 16 * r, acc[r][0]);
}
template <typename NUMBERS, int ROWS, int GROUPS>
PAGODA_INLINE void multiply(const void* q, const uint32_t* const* keys, const uint32_t* const* ahead, int words, bool past,
                            typename NUMBERS::Sum (&acc)[ROWS][GROUPS]) {
  if constexpr (GROUPS == 1) {
    alignas(64) typename NUMBERS::Value products[16 * ROWS];
    multiply_apart<NUMBERS, ROWS>(q, keys[0], ahead[0], words, past, products);
    for (int r = 0; r < ROWS; ++r) acc[r][0] = load(products + 16 * r);
  } else {
    multiply_inline<NUMBERS>(q, keys, ahead, words, past, acc);
  }
}

PAGODA_INLINE f16 to_float(f16 a) { return a; }

// Products of ROWS lines with 16 x GROUPS tokens from t on, whose groups are `group`, -> scores.
template <typename NUMBERS, int ROWS, int GROUPS>
PAGODA_INLINE void keep_scores(const AttentionArgs& a, const View& v, int t, const int (&group)[GROUPS],
                               const typename NUMBERS::Sum (&acc)[ROWS][GROUPS], AttentionScratch& s) {
  const int* position = s.position + v.line;
  const bool seen_by_all =
      t + 16 * GROUPS <= end_seen(a, position[0], s.length) && (!a.window || t > position[ROWS - 1] - a.window);
  const bool plain = seen_by_all && a.softcap == 0.0f && !s.bias;
  const f16 scale = set1(plain ? a.scale : 1.0f);
  f16 key_scale[GROUPS];
  for (int g = 0; g < GROUPS; ++g) key_scale[g] = NUMBERS::WHOLE ? load(s.keys.scales[group[g]]) : zero();
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    f16 peak = load(s.peaks[v.scores + r]);
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g) {
      f16 x = to_float(acc[r][g]);
      if constexpr (NUMBERS::WHOLE) x = x * (key_scale[g] * set1(s.query_scales[v.line + r]));
      x = x * scale;
      store(&s.scores[v.scores + r][t - v.from + 16 * g], x);
      peak = max(peak, x);
    }
    if (plain) store(s.peaks[v.scores + r], peak);
  }
  if (!plain) shape_scores(a, v, ROWS, t, t + 16 * GROUPS, seen_by_all, s);
}

// Scores of ROWS lines and 16 x GROUPS tokens from t on.
template <typename NUMBERS, int ROWS, int GROUPS>
static void score_tile(const AttentionArgs& a, const View& v, int t, AttentionScratch& s) {
  const int end = (v.last - v.from + 15) / 16;
  int group[GROUPS];
  const uint32_t* keys[GROUPS];
  const uint32_t* ahead[GROUPS];
  for (int g = 0; g < GROUPS; ++g) {  // past the end: any readable group, masked below
    group[g] = (t - v.from) / 16 + g < end ? (t - v.from) / 16 + g : end - 1;
    keys[g] = s.keys.words[group[g]];
    ahead[g] = s.keys.ahead[group[g]];
  }
  typename NUMBERS::Sum acc[ROWS][GROUPS];
  multiply<NUMBERS>(operands(s, NUMBERS()).q[v.line], keys, ahead, a.kv.dim / NUMBERS::IN_WORD, fetched_past(a), acc);
  keep_scores<NUMBERS>(a, v, t, group, acc, s);
}

template <typename NUMBERS, int ROWS>
static void split_scores(const AttentionArgs& a, const View& v, AttentionScratch& s) {
  begin_scores(v, ROWS, s);
  int t = v.first;
  constexpr int GROUPS = groups_of(ROWS, 2);
  if constexpr (ROWS * 4 <= ACCUMULATORS)  // few rows need more columns for enough independent chains
    for (; t + 32 < v.last; t += 64) score_tile<NUMBERS, ROWS, 4>(a, v, t, s);
  for (; t < v.last; t += 16 * GROUPS) score_tile<NUMBERS, ROWS, GROUPS>(a, v, t, s);
}

// e^x for x <= 0, as 2^n * p(r), |r| <= 1/2, with a polynomial of degree 4: the relative error, 3e-6 and 7e-8 |x|, is small
// beside that of rounding to bf16 or to 16 bits, which follows. e^0 is 1, and 0 is what is left of a masked score.
PAGODA_INLINE f16 probability(f16 x) {
  const f16 least = set1(-87.0f), t = max(least, x) * set1(1.44269504088896341f);
  const Exponent n = exponent(t);
  const f16 r = t - n.value;
  f16 p = fma(set1(9.582852923e-3f), r, set1(5.590642482e-2f));
  p = fma(p, r, set1(2.402409861e-1f));
  p = fma(p, r, set1(6.931241934e-1f));
  return unless_below(x, least, scale2(fma(p, r, set1(1.0f)), n));
}

// Scores of N lines -> bf16 probabilities relative to the split's own maximum, and the sum of the rounded probabilities. A
// line that sees nothing of the split has sum 0. Two lines at once, because one alone is bound by the latency of its chain.
template <int N>
PAGODA_INLINE void probabilities(const View& v, int r, AttentionScratch& s, const f16 (&shift)[N], f16 (&total)[N], Bf16) {
  for (int i = v.first - v.from; i < v.last - v.from; i += 16)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      Bf16::Number* probs = &s.pairs.probs[v.probs + r + n][i];
      store_left(probs, probability(load(&s.scores[v.scores + r + n][i]) - shift[n]));
      total[n] = total[n] + load_left(probs);
    }
}

// The same, but probabilities are multiplied by the scales of their values and quantised; the sum is taken before that.
template <int N>
PAGODA_INLINE void probabilities(const View& v, int r, AttentionScratch& s, const f16 (&shift)[N], f16 (&total)[N], Int16Bytes) {
  const int begin = v.first - v.from, end = v.last - v.from;
  f16 most[N], poison[N];
  for (int n = 0; n < N; ++n) most[n] = poison[n] = zero();
  for (int i = begin; i < end; i += 16) {
    // Scales past the last token were never written: a stale NaN must not be multiplied by a probability of 0.
    const f16 scale = keep_below(load(s.values.scales[i / 16]), v.from + i, v.last, zero());
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const f16 p = probability(load(&s.scores[v.scores + r + n][i]) - shift[n]), scaled = p * scale;
      store(&s.scores[v.scores + r + n][i], scaled);
      total[n] = total[n] + p;
      most[n] = max(most[n], scaled);
      poison[n] = poison[n] + scaled * zero();  // NaN if a scale is not finite
    }
  }
  for (int n = 0; n < N; ++n) {
    const float largest = max_lane(most[n]) + sum(poison[n]);
    const f16 factor = short_factor(largest);
    s.prob_scales[v.probs + r + n] = largest / LARGEST_SHORT;
    for (int i = begin; i < end; i += 16) store_shorts(&s.fours.probs[v.probs + r + n][i], load(&s.scores[v.scores + r + n][i]) * factor);
  }
}

template <typename NUMBERS, int N>
static void split_softmax(const View& v, int r, AttentionScratch& s, float* top, float* sum_out) {
  f16 total[N], shift[N];
  for (int n = 0; n < N; ++n) {
    top[n] = max_lane(load(s.peaks[v.scores + r + n]));
    shift[n] = set1(top[n] <= MASKED ? 0.0f : top[n]);
    total[n] = zero();
  }
  probabilities(v, r, s, shift, total, NUMBERS());
  for (int n = 0; n < N; ++n) sum_out[n] = sum(total[n]);
}

// The results of lines over one split, kept separate from those over other splits.
struct Part {
  float *top, *sum;  // [lines]
  float* values;     // [lines, dim]
};

// Merges a split's weighted values into the running ones of a line; the same arithmetic wherever they are merged.
PAGODA_INLINE void merge_values(float* run, f16 split, float scale_old, float scale_new) {
  store(run, load(run) * set1(scale_old) + split * set1(scale_new));
}

// Products of ROWS lines with GROUPS x 16 dims of values from `dim_first` on, to `part` or to the running accumulators.
template <typename NUMBERS, int ROWS, int GROUPS>
PAGODA_INLINE void keep_values(const AttentionArgs& a, const View& v, int dim_first, const Part* part,
                               const typename NUMBERS::Sum (&acc)[ROWS][GROUPS], AttentionScratch& s) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g)
      if (const int d = dim_first + 16 * g; d < a.kv.dim) {
        f16 x = to_float(acc[r][g]);
        if constexpr (NUMBERS::WHOLE) x = x * set1(s.prob_scales[v.probs + r]);
        if (part) store(part->values + (size_t)(v.line + r) * a.kv.dim + d, x);
        else merge_values(&s.acc[v.line + r][d], x, s.scale_old[v.line + r], s.scale_new[v.line + r]);
      }
}

// Probabilities of a split times its values, for GROUPS x 16 dims from `dim_first` on, merged into the running accumulators
// or stored to `part` as they are. Not inlined either.
template <typename NUMBERS, int ROWS, int GROUPS>
static __attribute__((noinline)) void split_values(const AttentionArgs& a, const View& v, int dim_first, const Part* part,
                                                   AttentionScratch& s) {
  constexpr int IN_WORD = NUMBERS::IN_WORD;
  typename NUMBERS::Sum acc[ROWS][GROUPS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g) acc[r][g] = typename NUMBERS::Sum{};
  const auto* probs = operands(s, NUMBERS()).probs + v.probs;
  const size_t stride = s.values.stride;
  const bool past = fetched_past(a);
  for (int t = v.first; t < v.last; t += 16) {
    const int group = (t - v.from) / 16, words = v.last - t < 16 ? (v.last - t + IN_WORD - 1) / IN_WORD : 16 / IN_WORD;
    const uint32_t* groups[GROUPS];
    const uint32_t* ahead[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
      const int d = dim_first + (dim_first + 16 * g < a.kv.dim ? 16 * g : 0) - s.values.first_dim;
      groups[g] = s.values.words[group] + d;
      ahead[g] = s.values.ahead[group] + d;
    }
    tile_fetching<NUMBERS>(Rows<ROWS, sizeof probs[0]>(&probs[0][t - v.from]), groups, ahead, stride, words, past, acc);
  }
  keep_values<NUMBERS>(a, v, dim_first, part, acc, s);
}

// Merges the maxima and sums of a split into the running ones of `rows` lines from `line` on; sets the factors for values.
// Tiles ascend, so what the vector stores write past a tile's factors belongs to the next tile.
PAGODA_INLINE void merge_sums(AttentionScratch& s, int line, int rows, float (&top)[16], const float (&total)[16]) {
  float *scale_old = s.scale_old + line, *scale_new = s.scale_new + line;
  float old_top[16] = {};
  memcpy(old_top, s.top + line, sizeof(float) * (size_t)rows);
  const f16 merged = max(load(old_top), load(top));
  store(scale_old, exp(load(old_top) - merged));
  store(scale_new, exp(load(top) - merged));
  store(top, merged);
  for (int r = 0; r < rows; ++r) {
    s.top[line + r] = top[r];
    s.sum[line + r] = s.sum[line + r] * scale_old[r] + total[r] * scale_new[r];
  }
}

// Merges a tile's results over a split into those over the splits before it.
static void merge_tile(const AttentionArgs& a, int line, int rows, const Part& part, AttentionScratch& s) {
  float top[16] = {}, total[16] = {};
  memcpy(top, part.top + line, sizeof(float) * (size_t)rows);
  memcpy(total, part.sum + line, sizeof(float) * (size_t)rows);
  merge_sums(s, line, rows, top, total);
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < a.kv.dim; d += 16)
      merge_values(&s.acc[line + r][d], load(part.values + (size_t)(line + r) * a.kv.dim + d), s.scale_old[line + r],
                   s.scale_new[line + r]);
}

// Scores of a tile of lines -> probabilities; their sums go to `part` or are merged into the running ones.
template <typename NUMBERS>
PAGODA_INLINE void tile_softmax(const View& v, int rows, const Part* part, AttentionScratch& s) {
  float top[16] = {}, total[16] = {};
  for (int r = 0; r + 1 < rows; r += 2) split_softmax<NUMBERS, 2>(v, r, s, top + r, total + r);
  if (rows % 2) split_softmax<NUMBERS, 1>(v, rows - 1, s, top + rows - 1, total + rows - 1);
  if (part) {
    memcpy(part->top + v.line, top, sizeof(float) * (size_t)rows);
    memcpy(part->sum + v.line, total, sizeof(float) * (size_t)rows);
  } else {
    merge_sums(s, v.line, rows, top, total);
  }
}

// Computes the probabilities of a tile of lines over a split.
template <typename NUMBERS, int ROWS>
static __attribute__((noinline)) void weigh_tile(const AttentionArgs& a, const View& v, const Part* part, AttentionScratch& s) {
  split_scores<NUMBERS, ROWS>(a, v, s);
  tile_softmax<NUMBERS>(v, ROWS, part, s);
}

// Multiplies these by dims [d, end) of the split's values, into the running accumulators or into `part`.
template <typename NUMBERS, int ROWS>
static __attribute__((noinline)) void gain_tile(const AttentionArgs& a, const View& v, int d, int end, const Part* part, AttentionScratch& s) {
  // With few rows there are registers for wide tiles, which read values in one stream instead of several passes.
  if constexpr (ROWS * 8 <= ACCUMULATORS)
    for (; d + 128 <= end; d += 128) split_values<NUMBERS, ROWS, 8>(a, v, d, part, s);
  if constexpr (ROWS * 4 <= ACCUMULATORS)
    for (; d + 64 <= end; d += 64) split_values<NUMBERS, ROWS, 4>(a, v, d, part, s);
  constexpr int GROUPS = groups_of(ROWS, 2);
  for (; d < end; d += 16 * GROUPS) split_values<NUMBERS, ROWS, GROUPS>(a, v, d, part, s);
}

}  // namespace PAGODA_NS
