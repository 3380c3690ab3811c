// Sixteen floats at a time, at every instruction set level.
//
// All kernels are written once, in terms of `f16` (16 floats) and `pairs` (16 pairs of bf16). A level defines how the sixteen
// map to registers; lane order and the order in which lanes are summed are the same everywhere. Each level is its own
// translation unit and compiles all of this in its own namespace (see level.cpp); every function is static, so that the
// linker can never pick another level's copy.
#pragma once

#include <cstdint>
#include <cstring>

#if PAGODA_LEVEL >= 1
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if PAGODA_LEVEL == 0  // sixteen numbers exceed the registers anyway; unforced inlining compiles in a third of the time
#define PAGODA_INLINE static inline
#define PAGODA_INLINE_MEMBER
#else
#define PAGODA_INLINE static inline __attribute__((always_inline))
#define PAGODA_INLINE_MEMBER __attribute__((always_inline))
#endif

namespace PAGODA_NS {

// LARGE plus a number ends, in its bits, in the nearest whole number.
constexpr float LARGE = 12582912.0f;

#if PAGODA_LEVEL >= 2  // AVX-512: one register

struct f16 { __m512 v; };
struct pairs { __m512i v; };  // 16 x (bf16 low, bf16 high)

PAGODA_INLINE f16 zero() { return {_mm512_setzero_ps()}; }
PAGODA_INLINE f16 set1(float x) { return {_mm512_set1_ps(x)}; }
PAGODA_INLINE f16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PAGODA_INLINE void store(float* p, f16 a) { _mm512_storeu_ps(p, a.v); }
PAGODA_INLINE f16 operator+(f16 a, f16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PAGODA_INLINE f16 operator-(f16 a, f16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PAGODA_INLINE f16 operator*(f16 a, f16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PAGODA_INLINE f16 operator/(f16 a, f16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PAGODA_INLINE f16 fma(f16 a, f16 b, f16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PAGODA_INLINE f16 max(f16 a, f16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PAGODA_INLINE f16 min(f16 a, f16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PAGODA_INLINE f16 round(f16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// A small number rounded to an exponent, and a * 2^exponent; neither a nor the result may be subnormal or infinite. A NaN that
// comes from bf16, whose low bits are zero, stays NaN.
struct Exponent { f16 value; };
PAGODA_INLINE Exponent exponent(f16 a) { return {round(a)}; }
PAGODA_INLINE f16 scale2(f16 a, Exponent n) { return {_mm512_scalef_ps(a.v, n.value.v)}; }
// lane i of `a` where first + i < limit, else `other`
PAGODA_INLINE f16 keep_below(f16 a, int first, int limit, f16 other) {
  int n = limit - first;
  __mmask16 m = n >= 16 ? 0xffff : (n <= 0 ? 0 : (__mmask16)((1u << n) - 1));
  return {_mm512_mask_blend_ps(m, other.v, a.v)};
}
// lanes of `a`, but 0 where x < limit, which a NaN is not
PAGODA_INLINE f16 unless_below(f16 x, f16 limit, f16 a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
PAGODA_INLINE f16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
PAGODA_INLINE __m256i to_bf16(f16 a) {  // to nearest, ties to even; NaN stays NaN
  __m512i x = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(x, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
PAGODA_INLINE pairs load_pairs(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
PAGODA_INLINE void store_pairs(uint32_t* p, pairs a) { _mm512_storeu_si512(p, a.v); }
PAGODA_INLINE f16 odd(pairs a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xffff0000)))}; }
PAGODA_INLINE f16 even(pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
#if PAGODA_LEVEL >= 3  // AVX-512 BF16
// Subnormal numbers become 0, as the bf16 dot product treats them anyway.
PAGODA_INLINE void store_bf16_normal(uint16_t* p, f16 a) {
  const __m256bh bits = _mm512_cvtneps_pbh(a.v);
  memcpy(p, &bits, 32);
}
PAGODA_INLINE void store_bf16(uint16_t* p, f16 a) {
  constexpr int QUIET_NAN = 1, SUBNORMAL = 32, SIGNALING_NAN = 128;  // what the instruction rounds differently
  if (__builtin_expect(_mm512_fpclass_ps_mask(a.v, QUIET_NAN | SUBNORMAL | SIGNALING_NAN), 0))
    _mm256_storeu_si256((__m256i*)p, to_bf16(a));
  else store_bf16_normal(p, a);
}
PAGODA_INLINE f16 rounded(f16 a) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(a.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
#else
PAGODA_INLINE void store_bf16(uint16_t* p, f16 a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }
PAGODA_INLINE void store_bf16_normal(uint16_t* p, f16 a) { store_bf16(p, a); }
PAGODA_INLINE f16 in_order(f16 a) { return a; }
#endif
constexpr int MAX_ROWS = 12;      // of a tile
constexpr int ACCUMULATORS = 24;  // of a tile of several groups: one each of the 32 registers

#elif PAGODA_LEVEL == 1  // AVX2 + FMA: two registers

struct f16 { __m256 lo, hi; };
struct pairs { __m256i lo, hi; };

PAGODA_INLINE f16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PAGODA_INLINE f16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PAGODA_INLINE f16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PAGODA_INLINE void store(float* p, f16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
#define PAGODA_BOTH(name, op) \
  PAGODA_INLINE f16 name(f16 a, f16 b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
PAGODA_BOTH(operator+, _mm256_add_ps)
PAGODA_BOTH(operator-, _mm256_sub_ps)
PAGODA_BOTH(operator*, _mm256_mul_ps)
PAGODA_BOTH(operator/, _mm256_div_ps)
PAGODA_BOTH(max, _mm256_max_ps)
PAGODA_BOTH(min, _mm256_min_ps)
#undef PAGODA_BOTH
PAGODA_INLINE f16 fma(f16 a, f16 b, f16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
PAGODA_INLINE f16 round(f16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
struct Exponent { f16 value, bits; };
PAGODA_INLINE Exponent exponent(f16 a) {
  const f16 bits = a + set1(LARGE);
  return {bits - set1(LARGE), bits};
}
PAGODA_INLINE __m256 scale2_half(__m256 a, __m256 bits) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(bits), 23)));
}
PAGODA_INLINE f16 scale2(f16 a, Exponent n) { return {scale2_half(a.lo, n.bits.lo), scale2_half(a.hi, n.bits.hi)}; }
PAGODA_INLINE f16 keep_below(f16 a, int first, int limit, f16 other) {
  __m256i n = _mm256_set1_epi32(limit - first);
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane));
  __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, _mm256_add_epi32(lane, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(other.lo, a.lo, lo), _mm256_blendv_ps(other.hi, a.hi, hi)};
}
PAGODA_INLINE f16 unless_below(f16 x, f16 limit, f16 a) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), a.hi)};
}
PAGODA_INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
PAGODA_INLINE f16 load_bf16(const uint16_t* p) {
  return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PAGODA_INLINE __m256i bf16_above(__m256 a) {  // the nearest bf16 in the upper half of each lane, anything in the lower
  __m256i x = _mm256_castps_si256(a);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(x, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
}
PAGODA_INLINE __m256 rounded_half(__m256 a) {
  return _mm256_castsi256_ps(_mm256_and_si256(bf16_above(a), _mm256_set1_epi32((int)0xffff0000)));
}
PAGODA_INLINE __m128i narrow(__m256 a) {
  __m256i r = _mm256_srli_epi32(bf16_above(a), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
PAGODA_INLINE void store_bf16(uint16_t* p, f16 a) {
  _mm_storeu_si128((__m128i*)p, narrow(a.lo));
  _mm_storeu_si128((__m128i*)(p + 8), narrow(a.hi));
}
PAGODA_INLINE pairs load_pairs(const uint32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
PAGODA_INLINE void store_pairs(uint32_t* p, pairs a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
PAGODA_INLINE void store_bf16_normal(uint16_t* p, f16 a) { store_bf16(p, a); }
PAGODA_INLINE f16 odd(pairs a) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(a.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.hi, mask))};
}
// A shuffle, because on many processors a shift would compete with the multiplications for a port.
PAGODA_INLINE __m256 even_half(__m256i a) {
  const __m256i up = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13,
                                      -1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(a, up));
}
PAGODA_INLINE f16 even(pairs a) { return {even_half(a.lo), even_half(a.hi)}; }
// Forces a sum to be computed before the next one. Otherwise the compiler defers sums until registers run out.
template <typename SUM>
PAGODA_INLINE SUM in_order(SUM a) {
  asm("" : "+x"(a.lo), "+x"(a.hi));
  return a;
}
constexpr int MAX_ROWS = 6;      // of a tile: with one group 12 of 16 registers
constexpr int ACCUMULATORS = 4;  // of a tile of several groups, whose columns need registers too

#else  // plain C++, left to the compiler

struct f16 { float v[16]; };
struct pairs { uint32_t v[16]; };
#define PAGODA_EACH for (int i = 0; i < 16; ++i)

PAGODA_INLINE f16 set1(float x) { f16 r; PAGODA_EACH r.v[i] = x; return r; }
PAGODA_INLINE f16 zero() { return set1(0.0f); }
PAGODA_INLINE f16 load(const float* p) { f16 r; memcpy(r.v, p, 64); return r; }
PAGODA_INLINE void store(float* p, f16 a) { memcpy(p, a.v, 64); }
PAGODA_INLINE f16 operator+(f16 a, f16 b) { PAGODA_EACH a.v[i] += b.v[i]; return a; }
PAGODA_INLINE f16 operator-(f16 a, f16 b) { PAGODA_EACH a.v[i] -= b.v[i]; return a; }
PAGODA_INLINE f16 operator*(f16 a, f16 b) { PAGODA_EACH a.v[i] *= b.v[i]; return a; }
PAGODA_INLINE f16 operator/(f16 a, f16 b) { PAGODA_EACH a.v[i] /= b.v[i]; return a; }
PAGODA_INLINE f16 fma(f16 a, f16 b, f16 c) { return a * b + c; }
PAGODA_INLINE f16 max(f16 a, f16 b) { PAGODA_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
PAGODA_INLINE f16 min(f16 a, f16 b) { PAGODA_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
PAGODA_INLINE f16 round(f16 a) { PAGODA_EACH a.v[i] = __builtin_nearbyintf(a.v[i]); return a; }
struct Exponent { f16 value; };
PAGODA_INLINE Exponent exponent(f16 a) { return {round(a)}; }
PAGODA_INLINE f16 scale2(f16 a, Exponent n) {
  PAGODA_EACH {
    const float large = n.value.v[i] + LARGE;  // a conversion of NaN would be undefined
    uint32_t e;
    memcpy(&e, &large, 4);
    e = (e + 127) << 23;
    float f;
    memcpy(&f, &e, 4);
    a.v[i] *= f;
  }
  return a;
}
PAGODA_INLINE f16 keep_below(f16 a, int first, int limit, f16 other) {
  PAGODA_EACH if (first + i >= limit) a.v[i] = other.v[i];
  return a;
}
PAGODA_INLINE f16 unless_below(f16 x, f16 limit, f16 a) {
  PAGODA_EACH a.v[i] = x.v[i] < limit.v[i] ? 0.0f : a.v[i];
  return a;
}
PAGODA_INLINE float widen(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
PAGODA_INLINE uint16_t narrow(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  if (f != f) return 0x7fc0;
  return (uint16_t)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}
PAGODA_INLINE f16 load_bf16(const uint16_t* p) { f16 r; PAGODA_EACH r.v[i] = widen(p[i]); return r; }
PAGODA_INLINE void store_bf16(uint16_t* p, f16 a) { PAGODA_EACH p[i] = narrow(a.v[i]); }
PAGODA_INLINE void store_bf16_normal(uint16_t* p, f16 a) { store_bf16(p, a); }
PAGODA_INLINE pairs load_pairs(const uint32_t* p) { pairs r; memcpy(r.v, p, 64); return r; }
PAGODA_INLINE void store_pairs(uint32_t* p, pairs a) { memcpy(p, a.v, 64); }
PAGODA_INLINE f16 odd(pairs a) { f16 r; PAGODA_EACH r.v[i] = widen((uint16_t)(a.v[i] >> 16)); return r; }
PAGODA_INLINE f16 even(pairs a) { f16 r; PAGODA_EACH r.v[i] = widen((uint16_t)a.v[i]); return r; }
PAGODA_INLINE f16 in_order(f16 a) { return a; }
constexpr int MAX_ROWS = 2;
constexpr int ACCUMULATORS = 4;
#undef PAGODA_EACH

#endif

// How the micro-kernel multiplies bf16 numbers (see tile.h). Without an instruction for pairs of bf16, rows are widened to
// floats, and a pair takes two passes over the accumulators, the odd halves before the even ones.
struct Bf16 {
  typedef float Value;
  typedef f16 Sum;
  static constexpr bool WHOLE = false;
  static constexpr int IN_WORD = 2;
  static constexpr int WORD_ROWS = 1;  // of a row of pairs
#if PAGODA_LEVEL >= 3
  typedef uint16_t Left;
  typedef pairs Right;
  static constexpr int PASSES = 1;
  PAGODA_INLINE_MEMBER static Right right(pairs b, int) { return b; }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int, Right b) {
    int32_t pair;
    memcpy(&pair, a, 4);
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b.v)};
  }
#else
  typedef float Left;
  typedef f16 Right;
  static constexpr int PASSES = 2;
  PAGODA_INLINE_MEMBER static Right right(pairs b, int pass) { return pass == 0 ? odd(b) : even(b); }
  PAGODA_INLINE_MEMBER static Sum add(Sum acc, const Left* a, int pass, Right b) { return in_order(fma(set1(a[1 - pass]), b, acc)); }
#endif
  typedef Left Number;
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) { return right(load_pairs(b), pass); }
};

#if PAGODA_LEVEL == 1
// The same with words that were widened before. That is worth it if many rows are multiplied by them, because the loop over
// these then has nothing to do but to load and to multiply.
template <int WIDTH>
struct WideBf16 : Bf16 {
  static constexpr int WORD_ROWS = 2;
  // In a register: the compiler would read it from memory for each row again.
  PAGODA_INLINE_MEMBER static Right right(const uint32_t* b, int pass) { return in_order(load((const float*)b + pass * WIDTH)); }

  // `count` rows of WIDTH pairs, `stride` words apart -> two rows of floats for each, in the order of the passes.
  PAGODA_INLINE_MEMBER static void widen(const uint32_t* words, size_t stride, int count, float* to) {
    for (int k = 0; k < count; ++k, words += stride, to += WORD_ROWS * WIDTH)
      for (int c = 0; c < WIDTH; c += 16)
        for (int pass = 0; pass < PASSES; ++pass) store(to + pass * WIDTH + c, Bf16::right(words + c, pass));
  }
};
#endif

#if PAGODA_LEVEL >= 1
PAGODA_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
PAGODA_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
PAGODA_INLINE void prefetch_past(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }
// Whether prefetches of data that is read once should bypass the caches. That makes reads several times slower on Intel's
// processors, which read fastest into the second-level cache, because it can have more lines in flight than the first.
PAGODA_INLINE bool past_caches() { return __builtin_cpu_is("amd"); }
// Whether it is faster to widen a linear layer's bf16 weights once for many rows. AMD's processors, which start more vector
// instructions at once, widen them beside the multiplications.
PAGODA_INLINE bool widens_apart() { return !__builtin_cpu_is("amd"); }
#else
PAGODA_INLINE void prefetch(const void*) {}
PAGODA_INLINE void prefetch_l2(const void*) {}
PAGODA_INLINE void prefetch_past(const void*) {}
PAGODA_INLINE bool past_caches() { return false; }
#endif
// For a stream that is read once, where `far` is FAR_AHEAD bytes ahead: from memory into the second-level cache, and what is
// NEAR_AHEAD bytes ahead from there into the first.
constexpr int FAR_AHEAD = 16384, NEAR_AHEAD = 4096;
PAGODA_INLINE void prefetch_twice(const char* far) {
  prefetch_l2(far);
  prefetch(far - FAR_AHEAD + NEAR_AHEAD);
}
// For data that is read once. Each choice would need its own loop, for which AVX2 lacks registers.
PAGODA_INLINE void prefetch_once(const void* p, bool past = past_caches()) {
  if (PAGODA_LEVEL >= 2 && past) prefetch_past(p);
  else prefetch(p);
}

// The same reduction tree at every level: lanes 0..7 with 8..15, then 4, 2, 1.
#if PAGODA_LEVEL >= 2
PAGODA_INLINE __m256 first_half(f16 a) { return _mm512_castps512_ps256(a.v); }
PAGODA_INLINE __m256 second_half(f16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
#elif PAGODA_LEVEL == 1
PAGODA_INLINE __m256 first_half(f16 a) { return a.lo; }
PAGODA_INLINE __m256 second_half(f16 a) { return a.hi; }
#endif
#if PAGODA_LEVEL >= 1
#define PAGODA_TREE(name, op)                                                 \
  PAGODA_INLINE float name(f16 a) {                                           \
    __m256 x = _mm256_##op##_ps(first_half(a), second_half(a));               \
    __m128 y = _mm_##op##_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); \
    y = _mm_##op##_ps(y, _mm_movehl_ps(y, y));                                \
    return _mm_cvtss_f32(_mm_##op##_ss(y, _mm_shuffle_ps(y, y, 1)));          \
  }
PAGODA_TREE(sum, add)
PAGODA_TREE(max_lane, max)
#undef PAGODA_TREE
#else
PAGODA_INLINE float sum(f16 a) {
  for (int half = 8; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
PAGODA_INLINE float max_lane(f16 a) {
  for (int half = 8; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
#endif

// e^x as 2^n * p(r), |r| <= ln2/2, with a polynomial of degree 6 (relative error about 2e-7). Our own, because libm's
// differs between versions and vector widths. Below -87 the result is 0, so a masked score of -1e30 gives exactly 0. NaN stays
// NaN, here as below: of two operands, min and max return the second if one is NaN.
PAGODA_INLINE f16 exp(f16 x) {
  f16 tiny = set1(-87.0f);
  f16 y = min(set1(88.0f), max(tiny, x));
  Exponent n = exponent(y * set1(1.44269504088896341f));
  f16 r = fma(n.value, set1(-0.693359375f), y);
  r = fma(n.value, set1(2.12194440e-4f), r);
  f16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return unless_below(x, tiny, scale2(p, n));
}

#if PAGODA_LEVEL >= 3
PAGODA_INLINE void store_left(uint16_t* p, f16 a) { store_bf16_normal(p, a); }
PAGODA_INLINE f16 load_left(const uint16_t* p) { return load_bf16(p); }
#else
PAGODA_INLINE f16 rounded(f16 a) {
#if PAGODA_LEVEL == 1
  return {rounded_half(a.lo), rounded_half(a.hi)};
#else
  uint16_t t[16];
  store_bf16(t, a);
  return load_bf16(t);
#endif
}
PAGODA_INLINE void store_left(float* p, f16 a) { store(p, rounded(a)); }
PAGODA_INLINE f16 load_left(const float* p) { return load(p); }
#endif

PAGODA_INLINE f16 silu(f16 x) { return x / (set1(1.0f) + exp(zero() - x)); }
// tanh(x) = 1 - 2 / (e^2x + 1)
PAGODA_INLINE f16 tanh(f16 x) {
  return set1(1.0f) - set1(2.0f) / (exp(min(set1(80.0f), x + x)) + set1(1.0f));
}
PAGODA_INLINE f16 gelu_tanh(f16 x) {
  f16 inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}
// x * P(X <= x) for a normal X. P - 1/2 is x times a quotient of polynomials in x^2, with an error below 1e-7; beyond the
// range of the fit the tail is negligible. The division is exact: approximate ones differ between processor vendors.
PAGODA_INLINE f16 gelu(f16 x) {
  const f16 end = set1(5.6f), begin = zero() - end;
  const f16 y = min(end, max(begin, x)), z = y * y;
  f16 p = set1(2.214532557e-8f), q = set1(1.180212621e-6f);
  p = fma(p, z, set1(6.356535323e-6f));
  q = fma(q, z, set1(7.510197611e-5f));
  p = fma(p, z, set1(1.738508436e-4f));
  q = fma(q, z, set1(1.912978711e-3f));
  p = fma(p, z, set1(4.707260057e-3f));
  q = fma(q, z, set1(2.894009277e-2f));
  p = fma(p, z, set1(3.437611461e-2f));
  q = fma(q, z, set1(2.528338432e-1f));
  p = fma(p, z, set1(3.989422321e-1f));
  q = fma(q, z, set1(1.0f));
  return x * unless_below(x, begin, fma(y, p / q, set1(0.5f)));
}

}  // namespace PAGODA_NS
