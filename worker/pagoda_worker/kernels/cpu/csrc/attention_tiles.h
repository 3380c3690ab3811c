// Attention over bf16 keys and values with tiles of the matrix unit: one to sixteen lines at a time.
//
// Products take 32 dims of a key, or 32 tokens starting at a multiple of 32, always in the same order; a token that a line
// does not see has probability 0. So here too a line's bits do not depend on the other lines of its tile.
#pragma once

#include "attention_wide.h"

namespace PAGODA_NS {

#ifdef __AMX_BF16__
PAGODA_INLINE bool by_tiles(const AttentionArgs& a) { return !a.kv.k_scales && a.kv.dim % 32 == 0; }

// Gathers the chunks of groups [first, last) of the split that begins at `from`, whose values are valid up to token `end`.
// What lies beyond is undefined and zeroed here: a NaN must not be multiplied by a probability of 0.
static void gather_chunks(const AttentionArgs& a, int from, int first, int last, int end, AttentionScratch& s) {
  const size_t dim = (size_t)a.kv.dim, group_words = 8 * dim;
  for (int g = first; g < last; g += 2) {
    const uint32_t* const* words = s.values.words + g;
    const int known = end - from - 16 * g;
    const uint32_t*& chunk = s.chunks.words[g / 2];
    chunk = words[0];
    if (known >= CHUNK_TOKENS && words[1] == words[0] + group_words) continue;
    uint32_t* copy = s.chunks.copies[g / 2];
    chunk = copy;
    for (int half = 0; half < 2; ++half) {
      const int tokens = known - 16 * half, pairs = tokens <= 0 ? 0 : tokens < 16 ? (tokens + 1) / 2 : 8;
      memcpy(copy + half * group_words, pairs ? words[half] : copy, pairs * dim * 4);
      memset(copy + half * group_words + pairs * dim, 0, (8 - pairs) * dim * 4);
    }
  }
}

// The first tile of an item prefetches for all of them. If keys are also the values, the prefetch goes to the second-level
// cache, which has room for all of them: the arithmetic is so fast that requests to the first level, which can have few in
// flight, would stall its own reads.
PAGODA_INLINE void fetch_by_tiles(const AttentionArgs& a, const void* p) {
  if (kept_once(a)) prefetch_l2(p);
  else prefetch_once(p);
}

// Scores of `rows` lines and 16 x GROUPS tokens from t on.
template <int GROUPS>
static void score_by_tiles(const AttentionArgs& a, const View& v, int rows, int t, AttentionScratch& s) {
  const int* position = s.position + v.line;
  const int end = (v.last - v.from + 15) / 16, first = (t - v.from) / 16;
  const uint32_t* keys[GROUPS];
  const uint32_t* ahead[GROUPS];
  for (int g = 0; g < GROUPS; ++g) {  // past the end: any readable group, masked below
    keys[g] = s.keys.words[first + g < end ? first + g : end - 1];
    ahead[g] = s.keys.ahead[first + g < end ? first + g : end - 1];
  }
  asm volatile("" ::: "memory");  // as for tile_sums
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (GROUPS == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0; d < a.kv.dim; d += 32) {
    const size_t at = (size_t)d / 2 * 16;
    _tile_loadd(4, &s.pairs.q[v.line][d], sizeof s.pairs.q[0]);
    _tile_loadd(6, keys[0] + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys[1] + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    for (int row = 0; v.line == 0 && row < 16; ++row)
      for (int g = 0; g < GROUPS; ++g) fetch_by_tiles(a, ahead[g] + at + 16 * row);
    if constexpr (GROUPS == 4) {
      _tile_loadd(6, keys[2] + at, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, keys[3] + at, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  float* to = &s.scores[0][t - v.from];
  _tile_stored(0, to, sizeof s.scores[0]);
  _tile_stored(1, to + 16, sizeof s.scores[0]);
  if constexpr (GROUPS == 4) {
    _tile_stored(2, to + 32, sizeof s.scores[0]);
    _tile_stored(3, to + 48, sizeof s.scores[0]);
  }
  const bool seen_by_all = t + 16 * GROUPS <= position[0] + 1 && (!a.window || t > position[rows - 1] - a.window);
  shape_scores(a, v, rows, t, t + 16 * GROUPS, seen_by_all, s);
}

// Probabilities of a split times its values, for GROUPS x 16 dims from `d` on.
template <int GROUPS>
static void values_by_tiles(const AttentionArgs& a, const View& v, int rows, int d, const Part* part, AttentionScratch& s) {
  const size_t dim = (size_t)a.kv.dim, stride = s.values.stride, at = (size_t)(d - s.values.first_dim);
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (GROUPS == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int t = v.first; t < v.last; t += CHUNK_TOKENS) {
    const int group = (t - v.from) / 16;
    lay_until(a, group + 2, s);
    const uint32_t* words = s.chunks.words[group / 2] + at;
    _tile_loadd(4, &s.pairs.probs[v.probs][t - v.from], sizeof s.pairs.probs[0]);
    _tile_loadd(6, words, 4 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, words + 16, 4 * stride);
    _tile_dpbf16ps(1, 4, 7);
    for (int half = 0; v.line == 0 && half < 2 && 16 * half < v.last - t; ++half)
      for (int row = 0; row < 8; ++row)
        for (int g = 0; g < GROUPS; ++g)
          fetch_by_tiles(a, s.values.ahead[group + half] + row * stride + at + 16 * g);
    if constexpr (GROUPS == 4) {
      _tile_loadd(6, words + 32, 4 * stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, words + 48, 4 * stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  alignas(64) float sums[TILE_LINES][16 * GROUPS];
  _tile_stored(0, sums[0], sizeof sums[0]);
  _tile_stored(1, sums[0] + 16, sizeof sums[0]);
  if constexpr (GROUPS == 4) {
    _tile_stored(2, sums[0] + 32, sizeof sums[0]);
    _tile_stored(3, sums[0] + 48, sizeof sums[0]);
  }
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < 16 * GROUPS; i += 16) {
      if (part) store(part->values + (v.line + r) * dim + d + i, load(&sums[r][i]));
      else merge_values(&s.acc[v.line + r][d + i], load(&sums[r][i]), s.scale_old[v.line + r], s.scale_new[v.line + r]);
    }
}

// See weigh_tile.
static void weigh_by_tiles(const AttentionArgs& a, const View& v, int rows, const Part* part, AttentionScratch& s) {
  begin_scores(v, rows, s);
  int t = v.first;
  for (; t + 32 < v.last; t += 64) score_by_tiles<4>(a, v, rows, t, s);
  for (; t < v.last; t += 32) score_by_tiles<2>(a, v, rows, t, s);
  tile_softmax<Bf16>(v, rows, part, s);
  if (const int end = (v.last - v.from + 15) / 16; end % 2)  // only the first half of the last chunk is seen
    for (int r = 0; r < rows; ++r) store_left(&s.pairs.probs[v.probs + r][16 * end], zero());
}

// See gain_tile.
static void gain_by_tiles(const AttentionArgs& a, const View& v, int rows, int d, int end, const Part* part,
                          AttentionScratch& s) {
  for (; d + 64 <= end; d += 64) values_by_tiles<4>(a, v, rows, d, part, s);
  for (; d < end; d += 32) values_by_tiles<2>(a, v, rows, d, part, s);
}
#else
PAGODA_INLINE bool by_tiles(const AttentionArgs&) { return false; }
#endif

}  // namespace PAGODA_NS
