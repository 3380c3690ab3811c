// Keys that are also the values and stored once (latents): how values are read from stored keys.
//
// Scores need neighbouring dims of a token side by side; products with probabilities need neighbouring tokens of a dim. No
// order serves both, so stored keys are laid out as values, LAID_DIMS dims of a split at a time, which stay in the nearest
// caches while all lines of an item use them. The products are the same, and in the same order, as with stored values.
#pragma once

#include "attention_cells.h"

namespace PAGODA_NS {

// Lays out words of keys' dims [0, dims) as values. Only the first `tokens` of 16 tokens are valid; the others become zero.
#if PAGODA_LEVEL >= 2
static void lay_pairs(const uint32_t* key, int tokens, int dims, uint32_t* to) {
  const __mmask16 known = (__mmask16)((1u << tokens) - 1);
  const __m512i swap = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int d = 0; d < dims; d += 16, key += 8 * 16) {
    __m512i by_dims[8], four[2][4];  // four: of even and of odd pairs of tokens, four dims of each, by lanes of 128 bits
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) by_dims[i] = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(known, key + 16 * i), swap);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      four[0][i] = _mm512_unpacklo_epi64(by_dims[2 * i], by_dims[2 * i + 1]);
      four[1][i] = _mm512_unpackhi_epi64(by_dims[2 * i], by_dims[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i* x = four[odd];
      const __m512i low = _mm512_shuffle_i64x2(x[0], x[1], 0x44), low_after = _mm512_shuffle_i64x2(x[2], x[3], 0x44);
      const __m512i high = _mm512_shuffle_i64x2(x[0], x[1], 0xee), high_after = _mm512_shuffle_i64x2(x[2], x[3], 0xee);
      uint32_t* row = to + odd * LAID_DIMS + d;
      _mm512_storeu_si512(row, _mm512_shuffle_i64x2(low, low_after, 0x88));
      _mm512_storeu_si512(row + 2 * LAID_DIMS, _mm512_shuffle_i64x2(low, low_after, 0xdd));
      _mm512_storeu_si512(row + 4 * LAID_DIMS, _mm512_shuffle_i64x2(high, high_after, 0x88));
      _mm512_storeu_si512(row + 6 * LAID_DIMS, _mm512_shuffle_i64x2(high, high_after, 0xdd));
    }
  }
}
#elif PAGODA_LEVEL == 1
static void lay_pairs(const uint32_t* key, int tokens, int dims, uint32_t* to) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i swap = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int half = 0; half < 2; ++half) {
    const __m256i known = _mm256_cmpgt_epi32(_mm256_set1_epi32(tokens - 8 * half), lane);
    for (int d = 0; d < dims; d += 8) {
      __m256i by_dims[4], four[2][2];  // as above, of eight dims and four pairs of tokens
      const int* from = (const int*)key + 8 * d + 8 * half;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) by_dims[i] = _mm256_shuffle_epi8(_mm256_maskload_epi32(from + 16 * i, known), swap);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        four[0][i] = _mm256_unpacklo_epi64(by_dims[2 * i], by_dims[2 * i + 1]);
        four[1][i] = _mm256_unpackhi_epi64(by_dims[2 * i], by_dims[2 * i + 1]);
      }
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t* row = to + (4 * half + odd) * LAID_DIMS + d;
        _mm256_storeu_si256((__m256i*)row, _mm256_permute2x128_si256(four[odd][0], four[odd][1], 0x20));
        _mm256_storeu_si256((__m256i*)(row + 2 * LAID_DIMS), _mm256_permute2x128_si256(four[odd][0], four[odd][1], 0x31));
      }
    }
  }
}
#else
static void lay_pairs(const uint32_t* key, int tokens, int dims, uint32_t* to) {
  for (int t = 0; t < 16; t += 2, to += LAID_DIMS)
    for (int d = 0; d < dims; d += 2) {
      const uint32_t* at = key + 8 * d + t;
      const uint32_t even = t < tokens ? at[0] : 0, odd = t + 1 < tokens ? at[1] : 0;
      to[d] = (even & 0xffff) | odd << 16;
      to[d + 1] = even >> 16 | (odd & 0xffff0000);
    }
}
#endif

// The same for fours of bytes.
static void lay_fours(const uint32_t* key, int tokens, int dims, uint32_t* to) {
  for (int t = 0; t < 16; t += 4, to += LAID_DIMS)
    for (int d = 0; d < dims; ++d) {
      const uint8_t* at = (const uint8_t*)(key + 4 * (d / 4 * 4) + t) + d % 4;
      uint32_t word = 0;
      for (int i = 0; i < 4 && t + i < tokens; ++i) word |= (uint32_t)at[4 * i] << 8 * i;
      to[d] = word;
    }
}

// Lays out group g of a split, LAID_DIMS dims from `values.first_dim` on. What lies beyond the last token is undefined.
static void lay_group(const AttentionArgs& a, int g, AttentionScratch& s) {
  const int dim = s.values.first_dim, dims = a.kv.dim - dim < LAID_DIMS ? a.kv.dim - dim : LAID_DIMS;
  const int in_word = a.kv.k_scales ? 4 : 2, left = s.laid.tokens - 16 * g, tokens = left < 0 ? 0 : left < 16 ? left : 16;
  const auto key = [&](int group) { return s.keys.words[group < s.laid.last ? group : s.laid.last - 1] + dim / in_word * 16; };
  uint32_t* to = s.laid.words + (size_t)g * LAID_DIMS * 16 / in_word;
  s.values.words[g] = to;
#ifdef __AMX_BF16__
  if (g % 2 == 0) s.chunks.words[g / 2] = to;
#endif
  for (int i = 0; i < dims * 16 / in_word; i += 16) prefetch(key(g + 1) + i);
  if (in_word == 4) lay_fours(key(g), tokens, dims, to);
  else lay_pairs(key(g), tokens, dims, to);
}

// Lays out those groups before `end` that are not yet laid out.
PAGODA_INLINE void lay_until(const AttentionArgs& a, int end, AttentionScratch& s) {
  for (; s.laid.next < end; ++s.laid.next) lay_group(a, s.laid.next, s);
}

// From now on `values` covers the dims from `dim` on; groups [first, last) have `tokens` valid tokens. `dim` ascends from call
// to call. on_the_way: tiles of the matrix unit lay values out as they go (`lay_until`), in parallel with the arithmetic.
static void lay_from(const AttentionArgs& a, int dim, int first, int last, int tokens, bool on_the_way, AttentionScratch& s) {
  const size_t group_words = (size_t)LAID_DIMS * 16 / (a.kv.k_scales ? 4 : 2);
  s.values.first_dim = dim;
  s.values.stride = LAID_DIMS;
  if (dim) for (int g = first; g < last; ++g) s.values.ahead[g] += group_words;
  s.laid.next = first;
  s.laid.last = last;
  s.laid.tokens = tokens;
  if (!on_the_way) lay_until(a, last, s);
}

}  // namespace PAGODA_NS
