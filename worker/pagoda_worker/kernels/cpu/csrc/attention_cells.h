// The data structures that attention reads and its scratch memory: see attention.h.
//
// Cache layout, readable by the micro-kernel without repacking (the tokens of a block and kv head are contiguous, in groups
// of 16):
//   keys    [block][kv head][block_size/16][head_dim/2][16]   pairs of neighbouring dims
//   values  [block][kv head][block_size/2][head_dim]          pairs of neighbouring tokens
// An int8 cache has fours instead of pairs, and a scale for every token:
//   scales  [block][kv head][block_size]
// If keys are also the values, they are stored as keys; see attention_once.h.
//
// int8 keys and values are multiplied in integer arithmetic. The other operand is rounded to 16 bits: a query scaled by its
// largest magnitude, and the probabilities of a split, times the scales of the values, by their largest. That is finer than
// bf16 where it matters. The sums are exact (at most 256 products of 127 * 32767 per split).
#pragma once

#include "linear.h"

namespace PAGODA_NS {

constexpr int SPLIT = 256;
constexpr int SPLIT_GROUPS = SPLIT / 16;
// The most lines of a work item, which share one read of keys and values from memory.
#ifdef __AMX_BF16__
constexpr int LINES = 96;
constexpr int TILE_LINES = TILE_ROWS;  // the most lines computed together
#else
constexpr int LINES = 48;
constexpr int TILE_LINES = MAX_ROWS;
#endif
#if PAGODA_LEVEL == 1
constexpr int SCORE_LINES = LINES;  // whose scores are kept at once
#else
constexpr int SCORE_LINES = TILE_LINES;
#endif
constexpr int AHEAD = 4;   // prefetch distance, in groups of keys
constexpr int LAID_DIMS = 64;  // dims of values that are laid out at a time
constexpr float MASKED = -1e30f;
constexpr float LARGEST_SHORT = 32767.0f;

// The factor that scales numbers up to `largest` to 16-bit integers; 0 if `largest` is below FAINT or NaN.
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
  const uint32_t* ahead[SPLIT_GROUPS];  // to prefetch: blocks are scattered, so the hardware cannot predict them
  const float* scales[SPLIT_GROUPS];
  int first_dim;  // of values: the dim that `words` and `ahead` begin with
  size_t stride;  // of values: words from one word of tokens to the next
};

// The operands that keys and values are multiplied by, as tiles of NUMBERS read them.
template <typename NUMBERS>
struct Operands {
  typename NUMBERS::Number q[LINES][MAX_DIM], probs[LINES][SPLIT];
};

#ifdef __AMX_BF16__
constexpr int CHUNK_TOKENS = 32;  // tokens whose values tiles multiply at a time
constexpr int SPLIT_CHUNKS = SPLIT / CHUNK_TOKENS;

// The values of a split in chunks, [CHUNK_TOKENS / 2][dim] pairs.
struct Chunks {
  const uint32_t* words[SPLIT_CHUNKS];
  alignas(64) uint32_t copies[SPLIT_CHUNKS][CHUNK_TOKENS / 2 * MAX_DIM];  // of chunks that are not contiguous in the cache
};
#endif

#if PAGODA_LEVEL == 1
// Keys of 16 tokens, or 16 dims of the values of a split, as floats; see attention_wide.h.
struct Wide {
  alignas(64) float words[16 * (MAX_DIM > SPLIT ? MAX_DIM : SPLIT)];
};
#endif

// Values of a split that are stored as keys, laid out as values; see attention_once.h.
struct Laid {
  int next, last;  // the group to lay out next, and one past the last group with tokens
  int tokens;      // present in the split
  alignas(64) uint32_t words[SPLIT / 2 * LAID_DIMS];
};

// A line is one (token, query head of the group). Queries are evenly spaced only within a token, so lines are gathered.
struct AttentionScratch {
  Operands<Bf16> pairs;
  Operands<Int16Bytes> fours;
  int position[LINES];
  int length;         // of the row, in tokens
  const float* bias;  // of the head, pointing at the entry for distance 0; or null
  float query_scales[LINES], prob_scales[LINES];  // of `fours`
  float scores[SCORE_LINES][SPLIT], peaks[SCORE_LINES][16];
  float acc[LINES][MAX_DIM], top[LINES], sum[LINES];  // running state of each line
  float scale_old[LINES + 16], scale_new[LINES + 16];  // factors that merge each line's running state with a split's
  Cells keys, values;
  Laid laid;
#ifdef __AMX_BF16__
  Chunks chunks;
#endif
#if PAGODA_LEVEL == 1
  Wide wide;
#endif
};
PAGODA_INLINE Operands<Bf16>& operands(AttentionScratch& s, Bf16) { return s.pairs; }
PAGODA_INLINE Operands<Int16Bytes>& operands(AttentionScratch& s, Int16Bytes) { return s.fours; }

// Tokens [first, last) of the split that begins at `from`: the part seen by lines [line, line + rows) of a tile.
struct View {
  int line, from, first, last;
  int probs;   // its first row in Operands::probs
  int scores;  // its first row in AttentionScratch::scores and peaks
};

// One past the last token seen from `position`, in a row of `length` tokens.
PAGODA_INLINE int end_seen(const AttentionArgs& a, int position, int length) {
  if (a.causal) return position + 1;
  return a.window && position + a.window < length ? position + a.window : length;
}

// Offset of the 16 tokens from `token` on in one layer's cache, in tokens.
PAGODA_INLINE size_t place(const AttentionArgs& a, const int32_t* table, int head, int token) {
  return ((size_t)table[token / a.kv.block_size] * a.kv.heads + head) * a.kv.block_size + token % a.kv.block_size;
}
PAGODA_INLINE const uint32_t* stored(const AttentionArgs& a, const void* cache, size_t place) {
  return (const uint32_t*)((const char*)cache + place * a.kv.dim * (a.kv.k_scales ? 1 : 2));
}

// Whether keys are also the values, so that no values are stored.
PAGODA_INLINE bool kept_once(const AttentionArgs& a) { return !a.kv.values; }
PAGODA_INLINE bool fetched_past(const AttentionArgs& a) { return past_caches() && !kept_once(a); }

// Locates groups [first, last) of the split that begins at `from`, in a context of `end` tokens.
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
  const auto next = [&](int group, const uint32_t* none) {  // a group of the next split
    const int token = from + SPLIT + 16 * group;
    return token < end ? stored(a, a.kv.keys, place(a, table, head, token)) : none;
  };
  for (int g = first; g < last; ++g) {  // prefetch order: keys, values, then the keys of the next split
    const int over = g + AHEAD - last;
    const bool inside = over < 0;
    const uint32_t* near = inside ? keys.words[g + AHEAD] : values.words[first + over < last ? first + over : first];
    // Keys that are also values are in a near cache by the second use, so both uses prefetch some of the next split.
    keys.ahead[g] = once && g % 2 == 0 ? next(g, near) : near;
    values.ahead[g] = once ? next(g, keys.words[g]) : inside ? values.words[g + AHEAD] : next(over, values.words[g]);
  }
}

}  // namespace PAGODA_NS
