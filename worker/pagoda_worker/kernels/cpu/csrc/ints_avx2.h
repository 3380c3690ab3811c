// The functions listed in ints.h, for AVX2 with F16C and optionally AVX-VNNI: sixteen lanes are two registers.
#pragma once

#include "ints.h"

namespace PAGODA_NS {

typedef int32_t i32x8 __attribute__((vector_size(32)));  // as for AVX-512
struct ints { i32x8 lo, hi; };
struct quads { __m256i lo, hi; };

PAGODA_INLINE ints set1(int32_t x) { return {(i32x8)_mm256_set1_epi32(x), (i32x8)_mm256_set1_epi32(x)}; }
PAGODA_INLINE ints operator+(ints a, ints b) { return {a.lo + b.lo, a.hi + b.hi}; }
PAGODA_INLINE ints operator*(ints a, ints b) { return {a.lo * b.lo, a.hi * b.hi}; }
PAGODA_INLINE int32_t sum(ints a) {
  __m256i both = (__m256i)(a.lo + a.hi);
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
PAGODA_INLINE f16 to_float(ints a) { return {_mm256_cvtepi32_ps((__m256i)a.lo), _mm256_cvtepi32_ps((__m256i)a.hi)}; }
PAGODA_INLINE ints load_u8(const uint8_t* p) {
  return {(i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
PAGODA_INLINE f16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PAGODA_INLINE quads load_quads(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
PAGODA_INLINE quads low_nibbles(quads a) {
  return {_mm256_and_si256(a.lo, _mm256_set1_epi8(15)), _mm256_and_si256(a.hi, _mm256_set1_epi8(15))};
}
PAGODA_INLINE quads high_nibbles(quads a) { return low_nibbles({_mm256_srli_epi32(a.lo, 4), _mm256_srli_epi32(a.hi, 4)}); }

PAGODA_INLINE __m256i bytes_apart(__m256i a, int i) { return _mm256_srai_epi16(i ? a : _mm256_slli_epi16(a, 8), 8); }
PAGODA_INLINE quads bytes_apart(quads a, int i) { return {bytes_apart(a.lo, i), bytes_apart(a.hi, i)}; }
// The same for unsigned bytes.
PAGODA_INLINE __m256i every_other_byte(__m256i a, int i) { return i ? _mm256_srli_epi16(a, 8) : _mm256_and_si256(a, _mm256_set1_epi16(255)); }
PAGODA_INLINE quads every_other_byte(quads a, int i) { return {every_other_byte(a.lo, i), every_other_byte(a.hi, i)}; }

#ifdef __AVXVNNI__
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  const __m256i x = _mm256_set1_epi32((int)a);
  return {(i32x8)_mm256_dpwssd_avx_epi32((__m256i)acc.lo, w.lo, x), (i32x8)_mm256_dpwssd_avx_epi32((__m256i)acc.hi, w.hi, x)};
}
PAGODA_INLINE ints dot4(ints acc, quads w, uint32_t a) {
  const __m256i x = _mm256_set1_epi32((int)a);
  return {(i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc.lo, w.lo, x), (i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc.hi, w.hi, x)};
}
#else
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  const __m256i x = _mm256_set1_epi32((int)a);
  acc.lo += (i32x8)_mm256_madd_epi16(w.lo, x);
  acc.hi += (i32x8)_mm256_madd_epi16(w.hi, x);
  return in_order(acc);
}
#endif
typedef int16_t i16x16 __attribute__((vector_size(32)));
struct halves { i16x16 lo, hi; };  // 16 x 2 integers of 16 bits
PAGODA_INLINE ints both(halves a) {
  const __m256i one = _mm256_set1_epi16(1);
  return {(i32x8)_mm256_madd_epi16((__m256i)a.lo, one), (i32x8)_mm256_madd_epi16((__m256i)a.hi, one)};
}
// How the micro-kernel multiplies nibbles by bytes, eight of each instead of a pair: see Bf16. Sums have 16 bits, which hold
// MOST times eight products: each half gets four products of each eight, each at most 15 * 127.
struct Nibbles {
  typedef halves Sum;
  typedef uint32_t Left;
  typedef quads Right;
  static constexpr int PASSES = 2, MOST = 4;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) {
    return pass == 0 ? low_nibbles(load_quads(b)) : high_nibbles(load_quads(b));
  }
  PAGODA_INLINE_MEMBER static Sum products(const Left* a, int pass, Right b) {
    int32_t four;
    memcpy(&four, a + pass, 4);
    const __m256i x = _mm256_set1_epi32(four);
    return {(i16x16)_mm256_maddubs_epi16(b.lo, x), (i16x16)_mm256_maddubs_epi16(b.hi, x)};
  }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int pass, Right b) {
    const Sum more = products(a, pass, b);
    acc.lo += more.lo;
    acc.hi += more.hi;
    return in_order(acc);
  }
};
PAGODA_INLINE ints dot4_nibbles(ints acc, quads w, uint32_t a) { return acc + both(Nibbles::products(&a, 0, w)); }

PAGODA_INLINE ints load(const int32_t* p) {
  return {(i32x8)_mm256_loadu_si256((const __m256i*)p), (i32x8)_mm256_loadu_si256((const __m256i*)p + 1)};
}
PAGODA_INLINE void store(int32_t* p, ints a) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)a.lo);
  _mm256_storeu_si256((__m256i*)p + 1, (__m256i)a.hi);
}
#ifdef __AVXVNNI__
// How the micro-kernel multiplies unsigned by signed bytes, four instead of a pair: see Bf16.
struct Bytes {
  typedef int32_t Value;
  typedef ints Sum;
  typedef int8_t Number;
  typedef int16_t Left;
  typedef quads Right;
  static constexpr int PASSES = 1, WORD_ROWS = 1;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int) { return load_quads(b); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int, Right b) {
    uint32_t four;
    memcpy(&four, a, 4);
    return dot4(acc, b, four);
  }
};
// The same for nibbles, eight instead of a pair.
struct NibbleBytes {
  typedef int32_t Value;
  typedef ints Sum;
  typedef int8_t Number;
  typedef uint32_t Left;
  typedef quads Right;
  static constexpr int PASSES = 2, WORD_ROWS = 1;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) { return Nibbles::right(b, pass); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int pass, Right b) {
    uint32_t four;
    memcpy(&four, a + pass, 4);
    return dot4(acc, b, four);
  }
};
#else
// The same with 16-bit numbers, because the instruction for bytes would saturate. Rows are in the order of `store_shorts`,
// because a pass takes every other byte of a word.
struct Bytes {
  typedef int32_t Value;
  typedef ints Sum;
  typedef int16_t Number;
  typedef uint32_t Left;  // two of a row
  typedef quads Right;
  static constexpr int PASSES = 2, WORD_ROWS = 1;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) { return every_other_byte(load_quads(b), pass); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int pass, Right b) {
    uint32_t two;
    memcpy(&two, a + pass, 4);
    return dot2(acc, b, two);
  }
};
// The same with words that were widened before, in the order of the passes: pairs of 16-bit numbers. See WideBf16.
struct WideBytes {
  typedef int32_t Value;
  typedef ints Sum;
  typedef int16_t Left;
  typedef quads Right;
  static constexpr int PASSES = 1, WORD_ROWS = 1;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int) { return in_order(load_quads(b)); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int, Right b) {
    uint32_t two;
    memcpy(&two, a, 4);
    return dot2(acc, b, two);
  }
};
#endif
PAGODA_INLINE void store_quads(uint32_t* p, quads a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)p + 1, a.hi);
}

PAGODA_INLINE f16 nibble(quads a, int s) {  // nibble s of every lane
  __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a.lo, 4 * s), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a.hi, 4 * s), mask))};
}

// Nibble s minus 8. The nibble is put in the mantissa of a float so large that its bits count as integers; that float and 8
// are then subtracted together. This takes one operation less than a conversion, and kinds with a higher throughput.
PAGODA_INLINE __m256 nibble_less_8(__m256i a, int s) {
  if (s >= 5) a = _mm256_srli_epi32(a, 20), s -= 5;  // there are 23 bits
  const __m256i bits = _mm256_and_si256(a, _mm256_set1_epi32(15 << 4 * s)), large = _mm256_set1_epi32((127 + 23 - 4 * s) << 23);
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(bits, large)), _mm256_set1_ps((float)((1 << (23 - 4 * s)) + 8)));
}
PAGODA_INLINE f16 nibble_less_8(quads a, int s) { return {nibble_less_8(a.lo, s), nibble_less_8(a.hi, s)}; }

// The last three bits of a lane choose the magnitude; the one before them, moved to the front, is the sign.
PAGODA_INLINE __m256 float_nibble(__m256i a) {
  const __m256 t = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(a, _mm256_set1_epi32(8)), 28);
  return _mm256_or_ps(_mm256_permutevar8x32_ps(t, a), _mm256_castsi256_ps(sign));
}
PAGODA_INLINE f16 float_nibble(quads a, int s) {
  return {float_nibble(_mm256_srli_epi32(a.lo, 4 * s)), float_nibble(_mm256_srli_epi32(a.hi, 4 * s))};
}
PAGODA_INLINE f16 load_powers(const uint8_t* p) {
  const ints e = load_u8(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32((__m256i)e.lo, 23)), _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)e.hi, 23))};
}

PAGODA_INLINE __m256i magnitudes(const uint16_t* x) {
  return _mm256_and_si256(_mm256_loadu_si256((const __m256i*)x), _mm256_set1_epi16(0x7fff));
}
PAGODA_INLINE uint32_t largest_magnitude(const uint16_t* x, int n) {
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 16) most = _mm256_max_epu16(most, magnitudes(x + i));
  return largest_u16(most);
}
PAGODA_INLINE ints round_bytes(f16 a, __m128i& bytes) {
  __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return {(i32x8)lo, (i32x8)hi};
}
PAGODA_INLINE ints store_rounded(int8_t* p, f16 a) {
  __m128i bytes;
  const ints whole = round_bytes(a, bytes);
  _mm_storeu_si128((__m128i*)p, bytes);
  return whole;
}
PAGODA_INLINE ints store_rounded(int16_t* p, f16 a) {
  __m128i bytes;
  const ints whole = round_bytes(a, bytes);
  store_fours(p, _mm256_cvtepi8_epi16(bytes));
  return whole;
}
PAGODA_INLINE void store_bytes(uint8_t* p, f16 a) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));  // lanes lo, hi, lo, hi
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1)));
}
PAGODA_INLINE void store_shorts(int16_t* p, f16 a) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  store_fours(p, _mm256_permute4x64_epi64(packed, 0xd8));
}

}  // namespace PAGODA_NS
