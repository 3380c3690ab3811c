// What attention reads and what it works in: see attention.h.
//
// Cache layout, readable by the micro-kernel without repacking (tokens of a block and kv head lie together, 16 to a group):
//   keys    [block][kv head][block_size/16][head_dim/2][16]   pairs of neighbouring dims
//   values  [block][kv head][block_size/2][head_dim]          pairs of neighbouring tokens
// In int8 the same with fours instead of pairs, and every token has a scale:
//   scales  [block][kv head][block_size]
// Where values are keys, too, they are kept as keys; see attention_once.h.
//
// Keys and values in int8 are multiplied in whole numbers. What they meet is rounded to 16 bits, a query by its largest
// number and the probabilities of a split, times the scales of the values, by the largest of these: finer than bf16 is
// where it counts. Their sums are exact (a split has 256 products of 127 * 32767, and so has a head at most).
#pragma once

#include "linear.h"

namespace PAGODA_NS {

constexpr int SPLIT = 256;
constexpr int SPLIT_GROUPS = SPLIT / 16;
// Lines of a work item, at most: one read of keys and values from memory serves them all.
#ifdef __AMX_BF16__
constexpr int LINES = 96;
constexpr int TILE_LINES = TILE_ROWS;  // at most of what is computed together
#else
constexpr int LINES = 48;
constexpr int TILE_LINES = MAX_ROWS;
#endif
constexpr int AHEAD = 4;   // groups of keys between the one computed with and the one prefetched
constexpr int LAID_DIMS = 64;  // of values that are laid out at a time
constexpr float MASKED = -1e30f;
constexpr float LARGEST_SHORT = 32767.0f;

// By what numbers up to `largest` become whole ones of 16 bits; nothing, if there is none or one that is no number.
PAGODA_INLINE f16 short_factor(float largest) { return set1(largest >= FAINT ? LARGEST_SHORT / largest : 0.0f); }

struct AttentionArgs : AttentionOp {
  const int32_t* block_tables;  // [rows, max_blocks]
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* context_lens;  // [rows]
  int max_blocks;
};

// The keys, or the values, of one kv head in one split, by groups of 16 tokens.
struct Cells {
  const uint32_t* words[SPLIT_GROUPS];
  const uint32_t* ahead[SPLIT_GROUPS];  // what is read a little later. Blocks lie anywhere: the hardware cannot foresee it
  const float* scales[SPLIT_GROUPS];
  int first_dim;  // of values: the one that words and ahead begin with,
  size_t stride;  // and words from some tokens' to the next ones'
};

// What meets keys and values, as tiles of NUMBERS read it.
template <typename NUMBERS>
struct Operands {
  typename NUMBERS::Number q[LINES][MAX_DIM], probs[LINES][SPLIT];
};

#ifdef __AMX_BF16__
constexpr int CHUNK_TOKENS = 32;  // of the values that tiles multiply at a time
constexpr int SPLIT_CHUNKS = SPLIT / CHUNK_TOKENS;

// Where the values of a split lie in chunks, [CHUNK_TOKENS / 2][dim] pairs.
struct Chunks {
  const uint32_t* words[SPLIT_CHUNKS];
  alignas(64) uint32_t copies[SPLIT_CHUNKS][CHUNK_TOKENS / 2 * MAX_DIM];  // of those that do not lie so
};
#endif

// Values of a split that lie as keys, laid out as values; see attention_once.h.
struct Laid {
  int next, last;  // the group that is laid out next, and the one after the last that has tokens
  int tokens;      // of the split, that are there
  alignas(64) uint32_t words[SPLIT / 2 * LAID_DIMS];
};

// A line is one (token, head of the group). Its queries lie `lda` apart only within a token, so lines are gathered.
struct AttentionScratch {
  Operands<Bf16> pairs;
  Operands<Int16Bytes> fours;
  int position[LINES];
  int length;         // of the row, in tokens
  const float* bias;  // of the head, at the key that is the query itself; or null
  float query_scales[LINES], prob_scales[LINES];  // of fours
  float scores[TILE_LINES][SPLIT], peaks[TILE_LINES][16];
  float acc[LINES][MAX_DIM], top[LINES], sum[LINES];  // running, of each line
  float scale_old[LINES + 16], scale_new[LINES + 16];  // of each line, what its acc and its sums of a split are merged by
  Cells keys, values;
  Laid laid;
#ifdef __AMX_BF16__
  Chunks chunks;
#endif
};
PAGODA_INLINE Operands<Bf16>& operands(AttentionScratch& s, Bf16) { return s.pairs; }
PAGODA_INLINE Operands<Int16Bytes>& operands(AttentionScratch& s, Int16Bytes) { return s.fours; }

// Tokens [first, last) of the split that begins at `from`: what the lines [line, line + rows) of a tile see of it.
struct View {
  int line, from, first, last;
  int probs;  // the first of its rows of Operands::probs
};

// After the last token that somebody at `position` in a row of `length` tokens sees.
PAGODA_INLINE int end_seen(const AttentionArgs& a, int position, int length) {
  if (a.causal) return position + 1;
  return a.window && position + a.window < length ? position + a.window : length;
}

// Where the 16 tokens from `token` on lie in one layer's cache, in tokens.
PAGODA_INLINE size_t place(const AttentionArgs& a, const int32_t* table, int head, int token) {
  return ((size_t)table[token / a.kv.block_size] * a.kv.heads + head) * a.kv.block_size + token % a.kv.block_size;
}
PAGODA_INLINE const uint32_t* stored(const AttentionArgs& a, const void* cache, size_t place) {
  return (const uint32_t*)((const char*)cache + place * a.kv.dim * (a.kv.k_scales ? 1 : 2));
}

// Whether values are keys, and not kept beside them.
PAGODA_INLINE bool kept_once(const AttentionArgs& a) { return !a.kv.values; }
PAGODA_INLINE bool fetched_past(const AttentionArgs& a) { return past_caches() && !kept_once(a); }

// Finds groups [first, last) of the split that begins at `from`, of a context of `end` tokens.
static void locate(const AttentionArgs& a, const int32_t* table, int head, int from, int first, int last, int end,
                   Cells& keys, Cells& values) {
  const bool once = kept_once(a);
  values.first_dim = 0;
  values.stride = (size_t)a.kv.dim;
  for (int g = first; g < last; ++g) {
    const size_t at = place(a, table, head, from + 16 * g);
    keys.words[g] = stored(a, a.kv.keys, at);
    values.words[g] = once ? keys.words[g] : stored(a, a.kv.values, at);
    if (!a.kv.k_scales) continue;
    keys.scales[g] = a.kv.k_scales + at;
    values.scales[g] = once ? keys.scales[g] : a.kv.v_scales + at;
  }
  const auto next = [&](int group, const uint32_t* none) {  // of the next split
    const int token = from + SPLIT + 16 * group;
    return token < end ? stored(a, a.kv.keys, place(a, table, head, token)) : none;
  };
  for (int g = first; g < last; ++g) {  // after the keys come the values, and then the keys of the next split
    const int over = g + AHEAD - last;
    const bool inside = over < 0;
    const uint32_t* near = inside ? keys.words[g + AHEAD] : values.words[first + over < last ? first + over : first];
    // Keys that are values, too, are near by the time they are values: so both times some of the next ones are fetched.
    keys.ahead[g] = once && g % 2 == 0 ? next(g, near) : near;
    values.ahead[g] = once ? next(g, keys.words[g]) : inside ? values.words[g + AHEAD] : next(over, values.words[g]);
  }
}

}  // namespace PAGODA_NS
