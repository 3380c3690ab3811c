// Sixteen lanes of small integers at a time, at every instruction set level; see simd.h.
//
// Sums of products are exact, so they are the same at every level. Besides arithmetic this provides:
//   dot4(acc, w, a)          acc + the four unsigned bytes of each lane of w times the four signed bytes of a
//   pair_of(w, s[, z])       nibbles s and s + 4 of each lane minus z (or 8); `right` turns them into operands of Bf16
//   floats_of(w, s)          the same nibbles as 4-bit floats
//   load_powers(p)           2**(byte - 127) for each byte; 0 for byte 0, which is off by 2**-127
//   largest_magnitude(x, n)  the bits of the largest |x| of n bf16, NaN above all; n is a multiple of 32
//   store_rounded(p, a)      a to nearest, ties to even, as 16 int8, or at AVX2 as 16 int16 as below; |a| <= 127
//   store_bytes(p, a)        whole numbers in 0 .. 255, as 16 unsigned bytes
//   dot2(acc, w, a)          acc + the two signed 16-bit numbers of each lane of w times those of a
//   bytes_apart(w, i)        the signed bytes i and i + 2 of each lane as two 16-bit numbers
//   store_shorts(p, a)       a to nearest, as 16 int16, each four in the order 0, 2, 1, 3; |a| <= 32767
#pragma once

#include "simd.h"

namespace PAGODA_NS {

PAGODA_INLINE float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// If the largest magnitude of numbers that are rounded together is below this, all become zero; 127 or 32767 divided by
// anything larger is finite.
constexpr float FAINT = 0x1p-100f;

// The largest |x| of n bf16, NaN if one is not finite; n is a multiple of 16.
PAGODA_INLINE float largest_finite(const uint16_t* x, int n) {
  f16 most = zero(), poison = zero();
  for (int i = 0; i < n; i += 16) {
    const f16 v = load_bf16(x + i);
    most = max(most, max(v, zero() - v));
    poison = poison + v * zero();
  }
  return max_lane(most) + sum(poison);
}

#if PAGODA_LEVEL >= 1
PAGODA_INLINE uint32_t largest_u16(__m256i a) {  // inverted, because there is an instruction for the minimum of eight
  __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  return 0xffffu & ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1))));
}
PAGODA_INLINE void store_fours(int16_t* p, __m256i a) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256((__m256i*)p, _mm256_shuffle_epi8(a, order));
}
#endif

#if PAGODA_LEVEL >= 2  // AVX-512: one register

// Accumulators have a type with 32-bit lanes. To the compiler an __m512i has 64-bit lanes; it would copy each accumulator
// back and forth around every product.
typedef int32_t i32x16 __attribute__((vector_size(64)));
struct ints { i32x16 v; };
struct quads { __m512i v; };        // 16 x 4 unsigned bytes, or 16 x 8 nibbles
struct zero_points { __m512i v; };  // 16 x 2 equal int16
typedef pairs weight_pairs;         // see pair_of

PAGODA_INLINE ints set1(int32_t x) { return {(i32x16)_mm512_set1_epi32(x)}; }
PAGODA_INLINE ints operator+(ints a, ints b) { return {a.v + b.v}; }
PAGODA_INLINE ints operator*(ints a, ints b) { return {a.v * b.v}; }
PAGODA_INLINE int32_t sum(ints a) { return _mm512_reduce_add_epi32((__m512i)a.v); }
PAGODA_INLINE f16 to_float(ints a) { return {_mm512_cvtepi32_ps((__m512i)a.v)}; }
PAGODA_INLINE ints load(const int32_t* p) { return {(i32x16)_mm512_loadu_si512(p)}; }
PAGODA_INLINE void store(int32_t* p, ints a) { _mm512_storeu_si512(p, (__m512i)a.v); }
PAGODA_INLINE ints load_u8(const uint8_t* p) { return {(i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PAGODA_INLINE f16 load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PAGODA_INLINE quads load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
PAGODA_INLINE quads low_nibbles(quads a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
PAGODA_INLINE quads high_nibbles(quads a) { return low_nibbles({_mm512_srli_epi32(a.v, 4)}); }

PAGODA_INLINE quads bytes_apart(quads a, int i) { return {_mm512_srai_epi16(i ? a.v : _mm512_slli_epi16(a.v, 8), 8)}; }

PAGODA_INLINE void store_quads(uint32_t* p, quads a) { _mm512_storeu_si512(p, a.v); }

#ifdef __AVX512VNNI__
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  return {(i32x16)_mm512_dpwssd_epi32((__m512i)acc.v, w.v, _mm512_set1_epi32((int)a))};
}
PAGODA_INLINE ints dot4(ints acc, quads w, uint32_t a) {
  return {(i32x16)_mm512_dpbusd_epi32((__m512i)acc.v, w.v, _mm512_set1_epi32((int)a))};
}
PAGODA_INLINE ints dot4_nibbles(ints acc, quads w, uint32_t a) { return dot4(acc, w, a); }
#else
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  return {acc.v + (i32x16)_mm512_madd_epi16(w.v, _mm512_set1_epi32((int)a))};
}
// Multiplies bytes 0 and 2 of a lane, then 1 and 3, as 16-bit numbers: the instruction for bytes would saturate.
PAGODA_INLINE ints dot4(ints acc, quads w, uint32_t a) {
  __m512i x = _mm512_set1_epi32((int)a);
  __m512i a_even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(255)), a_even);
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(x, 8));
  return {acc.v + (i32x16)even + (i32x16)odd};
}
PAGODA_INLINE ints dot4_nibbles(ints acc, quads w, uint32_t a) {  // 2 x 15 x 127 is far from saturating
  __m512i two = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32((int)a));
  return {acc.v + (i32x16)_mm512_madd_epi16(two, _mm512_set1_epi16(1))};
}
#endif

PAGODA_INLINE zero_points load_zeros(const uint8_t* p) {
  __m512i z = (__m512i)load_u8(p).v;
  return {_mm512_or_si512(z, _mm512_slli_epi32(z, 16))};
}
// Entry i of 32: the integer i (below 16) or i - 32, as bf16.
PAGODA_INLINE __m512i signed_table() {
  alignas(64) static const uint16_t t[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
      0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  return _mm512_load_si512(t);
}
// Entry i: (i % 16) - 8 as bf16. The fifth index bit, which belongs to the next nibble, is ignored.
PAGODA_INLINE __m512i middle_table() {
  alignas(64) static const uint16_t t[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return _mm512_load_si512(t);
}
// Entry i: the E2M1 float with the bits i % 16, as bf16.
PAGODA_INLINE __m512i float_table() {
  alignas(64) static const uint16_t t[32] = {
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
      0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
      0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  return _mm512_load_si512(t);
}
PAGODA_INLINE weight_pairs pair_of(quads a, int s) {
  return {_mm512_permutexvar_epi16(_mm512_srli_epi32(a.v, 4 * s), middle_table())};
}
PAGODA_INLINE weight_pairs floats_of(quads a, int s) {
  return {_mm512_permutexvar_epi16(_mm512_srli_epi32(a.v, 4 * s), float_table())};
}
PAGODA_INLINE f16 load_powers(const uint8_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32((__m512i)load_u8(p).v, 23))}; }
PAGODA_INLINE weight_pairs pair_of(quads a, int s, zero_points z) {
  __m512i level = _mm512_and_si512(_mm512_srli_epi32(a.v, 4 * s), _mm512_set1_epi16(15));
  return {_mm512_permutexvar_epi16(_mm512_sub_epi16(level, z.v), signed_table())};
}

PAGODA_INLINE uint32_t largest_magnitude(const uint16_t* x, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 32)
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff)));
  return largest_u16(_mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1)));
}
PAGODA_INLINE ints store_rounded(int8_t* p, f16 a) {
  __m512i whole = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(whole));
  return {(i32x16)whole};
}
// 64 bf16 times `factor`, rounded as by `store_rounded`, -> p; returns total + their sums, whose lanes have no order. Conversions
// are cheap and narrowing is not, so neighbours are joined before they are narrowed.
PAGODA_INLINE ints round_64(const uint16_t* x, f16 factor, int8_t* p, ints total) {
  alignas(64) static const uint16_t low_halves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  __m512i two[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const pairs both{_mm512_loadu_si512(x + 32 * i)};
    const __m512i low = _mm512_cvtps_epi32((even(both) * factor).v), high = _mm512_cvtps_epi32((odd(both) * factor).v);
    two[i] = _mm512_ternarylogic_epi32(_mm512_set1_epi32(255), low, _mm512_slli_epi32(high, 8), 0xca);  // low's where 255 has ones
  }
  const __m512i levels = _mm512_permutex2var_epi16(two[0], _mm512_load_si512(low_halves), two[1]), one = _mm512_set1_epi8(1);
  _mm512_storeu_si512(p, levels);
#ifdef __AVX512VNNI__
  return {(i32x16)_mm512_dpbusd_epi32((__m512i)total.v, one, levels)};
#else
  return {total.v + (i32x16)_mm512_madd_epi16(_mm512_maddubs_epi16(one, levels), _mm512_set1_epi16(1))};
#endif
}
PAGODA_INLINE void store_bytes(uint8_t* p, f16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
PAGODA_INLINE void store_shorts(int16_t* p, f16 a) { store_fours(p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v))); }

#elif PAGODA_LEVEL == 1  // AVX2 + F16C: two registers

}  // namespace PAGODA_NS
#include "ints_avx2.h"
namespace PAGODA_NS {

#else  // plain C++, left to the compiler

typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
struct ints { i32x16 v; };
struct quads { u32x16 v; };
#define PAGODA_EACH for (int i = 0; i < 16; ++i)

PAGODA_INLINE ints set1(int32_t x) { return {i32x16{} + x}; }
PAGODA_INLINE ints operator+(ints a, ints b) { return {a.v + b.v}; }
PAGODA_INLINE ints operator*(ints a, ints b) { return {a.v * b.v}; }
PAGODA_INLINE int32_t sum(ints a) { int32_t r = 0; PAGODA_EACH r += a.v[i]; return r; }
PAGODA_INLINE f16 to_float(ints a) { f16 r; PAGODA_EACH r.v[i] = (float)a.v[i]; return r; }
PAGODA_INLINE ints load_u8(const uint8_t* p) { ints r; PAGODA_EACH r.v[i] = p[i]; return r; }
// The bits give an exponent that is 112 too small, which the product corrects, also for subnormals, but not for infinity.
PAGODA_INLINE f16 load_half(const uint16_t* p) {
  f16 r;
  PAGODA_EACH r.v[i] = as_float((uint32_t)(p[i] & 0x7fff) << 13 | (uint32_t)(p[i] & 0x8000) << 16) * 0x1p112f;
  return r;
}
PAGODA_INLINE quads load_quads(const void* p) { quads r; memcpy(&r.v, p, 64); return r; }
PAGODA_INLINE quads low_nibbles(quads a) { return {a.v & 0x0f0f0f0f}; }
PAGODA_INLINE quads high_nibbles(quads a) { return {a.v >> 4 & 0x0f0f0f0f}; }
PAGODA_INLINE f16 nibble(quads a, int s) { return to_float({(i32x16)(a.v >> (4 * s) & 15)}); }
PAGODA_INLINE f16 nibble_less_8(quads a, int s) { return nibble(a, s) - set1(8.0f); }
PAGODA_INLINE f16 float_nibble(quads a, int s) {
  static const float t[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  f16 r;
  PAGODA_EACH r.v[i] = t[a.v[i] >> (4 * s) & 15];
  return r;
}
PAGODA_INLINE f16 load_powers(const uint8_t* p) { f16 r; PAGODA_EACH r.v[i] = as_float((uint32_t)p[i] << 23); return r; }
PAGODA_INLINE ints dot4(ints acc, quads w, uint32_t a) {
  for (int byte = 0; byte < 32; byte += 8) acc.v += (i32x16)(w.v >> byte & 255) * (int32_t)(int8_t)(a >> byte);
  return acc;
}
PAGODA_INLINE ints dot4_nibbles(ints acc, quads w, uint32_t a) { return dot4(acc, w, a); }
PAGODA_INLINE ints load(const int32_t* p) { ints r; memcpy(&r.v, p, 64); return r; }
PAGODA_INLINE void store(int32_t* p, ints a) { memcpy(p, &a.v, 64); }
PAGODA_INLINE quads bytes_apart(quads a, int i) {
  const i16x32 w = (i16x32)a.v;
  return {(u32x16)((i ? w : w << 8) >> 8)};
}
#ifdef __SSE2__  // every x86-64: 32-bit multiplication is slow, and compilers do not see that these are 16-bit numbers
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  const __m128i x = _mm_set1_epi32((int)a);
  __m128i part[4], sums[4];
  memcpy(part, &w.v, 64);
  memcpy(sums, &acc.v, 64);
  for (int i = 0; i < 4; ++i) sums[i] = _mm_add_epi32(sums[i], _mm_madd_epi16(part[i], x));
  memcpy(&acc.v, sums, 64);
  return acc;
}
#else
PAGODA_INLINE ints dot2(ints acc, quads w, uint32_t a) {
  acc.v += ((i32x16)(w.v << 16) >> 16) * (int32_t)(int16_t)a + ((i32x16)w.v >> 16) * ((int32_t)a >> 16);
  return acc;
}
#endif

PAGODA_INLINE uint32_t largest_magnitude(const uint16_t* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) most = (x[i] & 0x7fffu) > most ? x[i] & 0x7fffu : most;
  return most;
}
PAGODA_INLINE ints store_rounded(int8_t* p, f16 a) {
  a = round(min(max(a, set1(-127.0f)), set1(127.0f)));  // a conversion of NaN would be undefined
  ints r;
  PAGODA_EACH r.v[i] = (int32_t)a.v[i];
  PAGODA_EACH p[i] = (int8_t)r.v[i];
  return r;
}
PAGODA_INLINE void store_bytes(uint8_t* p, f16 a) { PAGODA_EACH p[i] = (uint8_t)(int32_t)a.v[i]; }
PAGODA_INLINE void store_shorts(int16_t* p, f16 a) {
  a = round(min(max(a, set1(-32767.0f)), set1(32767.0f)));
  PAGODA_EACH p[(i & ~3) | (i & 1) << 1 | (i >> 1 & 1)] = (int16_t)a.v[i];
}
#undef PAGODA_EACH

#endif

// How the micro-kernel multiplies 16-bit integers by signed bytes, in fours instead of pairs: see Bf16. Rows are in the
// order of `store_shorts`, because a pass takes every other byte of a word.
struct Int16Bytes {
  typedef int32_t Value;
  typedef ints Sum;
  typedef int16_t Number;
  typedef uint32_t Left;  // two of a row
  typedef quads Right;
  static constexpr bool WHOLE = true;
  static constexpr int IN_WORD = 4, PASSES = 2;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) { return bytes_apart(load_quads(b), pass); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int pass, Right b) {
    uint32_t two;
    memcpy(&two, a + pass, 4);
    return dot2(acc, b, two);
  }
};

#if PAGODA_LEVEL < 2  // a pair is two floats, because Bf16 would convert it to these anyway
struct zero_points { f16 v; };
struct weight_pairs { f16 even, odd; };

PAGODA_INLINE zero_points load_zeros(const uint8_t* p) { return {to_float(load_u8(p))}; }
PAGODA_INLINE weight_pairs pair_of(quads a, int s, zero_points z) { return {nibble(a, s) - z.v, nibble(a, s + 4) - z.v}; }
PAGODA_INLINE weight_pairs pair_of(quads a, int s) { return {nibble_less_8(a, s), nibble_less_8(a, s + 4)}; }
PAGODA_INLINE weight_pairs floats_of(quads a, int s) { return {float_nibble(a, s), float_nibble(a, s + 4)}; }
PAGODA_INLINE f16 right(weight_pairs b, int pass) { return pass == 0 ? b.odd : b.even; }
#else
PAGODA_INLINE Bf16::Right right(weight_pairs b, int pass) { return Bf16::right(b, pass); }
#endif

}  // namespace PAGODA_NS
