// Attention over bf16 keys and values at AVX2, if many lines share them: they are widened to floats once, not for each tile of
// lines, so that little is left to do beside multiplying.
//
// Tiles take turns with the keys of 16 tokens, then with 16 dims of a split's values, which stay in the first-level cache
// meanwhile. Every sum has the order that it has in attention_lines.h, and so the same bits.
#pragma once

#include "attention_lines.h"

namespace PAGODA_NS {

#if PAGODA_LEVEL == 1
typedef WideBf16<16> WideCells;
constexpr int WIDE_WORDS = WideCells::WORD_ROWS * 16;  // of a pair

// Whether `count` lines are enough.
PAGODA_INLINE bool widens(const AttentionArgs& a, int count) { return count > 2 * MAX_ROWS && !a.kv.k_scales && !kept_once(a); }

// Widens `count` rows of 16 pairs, `stride` words apart, and prefetches the same rows from `ahead` on.
PAGODA_INLINE void widen_fetching(const uint32_t* words, const uint32_t* ahead, size_t stride, int count, float* to) {
  for (int k = 0; k < count; ++k) prefetch(ahead + k * stride);
  WideCells::widen(words, stride, count, to);
}

// The sums of products of ROWS lines, STRIDE bytes apart, with widened words. keep(sums) is called where they are still in
// registers; to have all of these, the function is not inlined.
template <int ROWS, int STRIDE, typename KEEP>
static __attribute__((noinline)) void multiply_wide(const float* lines, const float* words, int num_pairs, KEEP&& keep) {
  f16 acc[ROWS][1];
  const uint32_t* const group[1] = {(const uint32_t*)words};
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) acc[r][0] = zero();
  tile<WideCells>(Rows<ROWS, STRIDE>(lines), group, WIDE_WORDS, num_pairs, acc, [](int) PAGODA_INLINE_MEMBER {});
  keep(acc);
}

// Scores of ROWS lines and the 16 tokens from t on, whose keys are widened.
template <int ROWS>
static void wide_scores(const AttentionArgs& a, const View& v, int t, AttentionScratch& s) {
  multiply_wide<ROWS, sizeof s.pairs.q[0]>(s.pairs.q[v.line], s.wide.words, a.kv.dim / 2, [&](const auto& acc) PAGODA_INLINE_MEMBER {
    const int group[1] = {(t - v.from) / 16};
    keep_scores<Bf16>(a, v, t, group, acc, s);
  });
}

// Probabilities of a split times 16 dims of its values from `dim` on, which are widened.
template <int ROWS>
static void wide_values(const AttentionArgs& a, const View& v, int dim, const Part* part, AttentionScratch& s) {
  const int first = v.first - v.from;
  const float *probs = &s.pairs.probs[v.probs][first], *words = s.wide.words + first / 2 * WIDE_WORDS;
  multiply_wide<ROWS, sizeof s.pairs.probs[0]>(probs, words, (v.last - v.first + 1) / 2, [&](const auto& acc) PAGODA_INLINE_MEMBER {
    keep_values<Bf16>(a, v, dim, part, acc, s);
  });
}

// Processes the tiles over groups [first, last) of the split that begins at `from`. each(f) calls f(view, rows) for each tile.
template <typename EACH>
PAGODA_INLINE void attend_wide(const AttentionArgs& a, int from, int first, int last, const Part* part, AttentionScratch& s,
                               EACH&& each) {
  each([&](const View& v, int rows) { begin_scores(v, rows, s); });
  for (int g = first; g < last; ++g) {
    widen_fetching(s.keys.words[g], s.keys.ahead[g], 16, a.kv.dim / 2, s.wide.words);
    each([&](const View& v, int rows) {
      if (const int t = from + 16 * g; v.first <= t && t < v.last)
        with_rows<MAX_ROWS>(rows, [&](auto rows) { wide_scores<decltype(rows)::value>(a, v, t, s); });
    });
  }
  each([&](const View& v, int rows) { tile_softmax<Bf16>(v, rows, part, s); });
  for (int d = 0; d < a.kv.dim; d += 16) {
    for (int g = first; g < last; ++g)
      widen_fetching(s.values.words[g] + d, s.values.ahead[g] + d, s.values.stride, 8, s.wide.words + 8 * g * WIDE_WORDS);
    each([&](const View& v, int rows) {
      with_rows<MAX_ROWS>(rows, [&](auto rows) { wide_values<decltype(rows)::value>(a, v, d, part, s); });
    });
  }
}
#else
PAGODA_INLINE bool widens(const AttentionArgs&, int) { return false; }
#endif

}  // namespace PAGODA_NS
