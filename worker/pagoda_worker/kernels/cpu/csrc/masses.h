// Sixteen logits at a time as bit masks and as integers, and exact sums of the integers. See sampling.h for the reason.
#pragma once

#include "sample_call.h"
#include "simd.h"

namespace PAGODA_NS {

constexpr float UNIT = 17592186044416.0f;       // 2^44
constexpr double WHOLE = 4503599627370496.0;    // 2^52: added to a double, leaves its rounded value in the low bits
constexpr uint64_t WHOLE_BITS = 0x4330000000000000u;
constexpr float INF = __builtin_inff(), LOWEST = -3.402823466e38f;

PAGODA_INLINE uint64_t bits(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  return u;
}
// x in [0, 2^52) to the nearest integer, ties to even.
PAGODA_INLINE uint64_t whole(float x) { return bits((double)x + WHOLE) - WHOLE_BITS; }

// The natural logarithm of a positive number, with an error within 2e-16, relative or absolute. Our own, because libms round
// differently. x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and log m = 2 (s + s^3 / 3 + s^5 / 5 ..), s = (m - 1) / (m + 1).
static double log(double x) {
  int e = 0;
  uint64_t u = bits(x);
  if (u < (uint64_t)1 << 52) e = -54, u = bits(x * 18014398509481984.0);  // subnormal: 2^54 times as much
  e += (int)(u >> 52) - 1023;
  u = (u & (((uint64_t)1 << 52) - 1)) | (uint64_t)1023 << 52;
  double m, series = 0.0;
  memcpy(&m, &u, 8);
  if (m > 1.4142135623730951) m *= 0.5, ++e;
  double s = (m - 1.0) / (m + 1.0), square = s * s;
  for (int n = 23; n > 1; n -= 2) series = (series + 1.0 / n) * square;
  return e * 0.6931471805599453 + (2.0 * s + 2.0 * s * series);
}

// The sum of `whole` over lanes. Every vector also adds 16 WHOLE_BITS, modulo 2^64, which `total` subtracts.
#if PAGODA_LEVEL >= 2
struct Mass { __m512i v; int vectors; };
PAGODA_INLINE Mass no_mass() { return {_mm512_setzero_si512(), 0}; }
PAGODA_INLINE void add(Mass& m, f16 w) {
  __m512d unit = _mm512_set1_pd(WHOLE);
  __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(w.v)), hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w.v, 1));
  m.v = _mm512_add_epi64(m.v, _mm512_castpd_si512(_mm512_add_pd(lo, unit)));
  m.v = _mm512_add_epi64(m.v, _mm512_castpd_si512(_mm512_add_pd(hi, unit)));
  m.vectors++;
}
PAGODA_INLINE void wholes(f16 w, uint64_t* to) {
  const __m512d unit = _mm512_set1_pd(WHOLE);
  const __m512i off = _mm512_set1_epi64((long long)WHOLE_BITS);
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(w.v)), hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w.v, 1));
  _mm512_storeu_si512(to, _mm512_sub_epi64(_mm512_castpd_si512(_mm512_add_pd(lo, unit)), off));
  _mm512_storeu_si512(to + 8, _mm512_sub_epi64(_mm512_castpd_si512(_mm512_add_pd(hi, unit)), off));
}
PAGODA_INLINE void truncated(f16 x, int32_t* to) { _mm512_storeu_si512(to, _mm512_cvttps_epi32(x.v)); }
PAGODA_INLINE unsigned above(f16 x, f16 limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ); }
PAGODA_INLINE unsigned equal(f16 x, f16 y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_EQ_OQ); }
#elif PAGODA_LEVEL == 1
struct Mass { __m256i v; int vectors; };
PAGODA_INLINE Mass no_mass() { return {_mm256_setzero_si256(), 0}; }
PAGODA_INLINE void add_quarter(Mass& m, __m128 w) {
  __m256d x = _mm256_add_pd(_mm256_cvtps_pd(w), _mm256_set1_pd(WHOLE));
  m.v = _mm256_add_epi64(m.v, _mm256_castpd_si256(x));
}
PAGODA_INLINE void add(Mass& m, f16 w) {
  add_quarter(m, _mm256_castps256_ps128(w.lo));
  add_quarter(m, _mm256_extractf128_ps(w.lo, 1));
  add_quarter(m, _mm256_castps256_ps128(w.hi));
  add_quarter(m, _mm256_extractf128_ps(w.hi, 1));
  m.vectors++;
}
PAGODA_INLINE void wholes_quarter(__m128 w, uint64_t* to) {
  const __m256i x = _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(w), _mm256_set1_pd(WHOLE)));
  _mm256_storeu_si256((__m256i*)to, _mm256_sub_epi64(x, _mm256_set1_epi64x((long long)WHOLE_BITS)));
}
PAGODA_INLINE void wholes(f16 w, uint64_t* to) {
  wholes_quarter(_mm256_castps256_ps128(w.lo), to);
  wholes_quarter(_mm256_extractf128_ps(w.lo, 1), to + 4);
  wholes_quarter(_mm256_castps256_ps128(w.hi), to + 8);
  wholes_quarter(_mm256_extractf128_ps(w.hi, 1), to + 12);
}
PAGODA_INLINE void truncated(f16 x, int32_t* to) {
  _mm256_storeu_si256((__m256i*)to, _mm256_cvttps_epi32(x.lo));
  _mm256_storeu_si256((__m256i*)(to + 8), _mm256_cvttps_epi32(x.hi));
}
#define PAGODA_BITS(x, y, how) \
  (unsigned)(_mm256_movemask_ps(_mm256_cmp_ps(x.lo, y.lo, how)) | _mm256_movemask_ps(_mm256_cmp_ps(x.hi, y.hi, how)) << 8)
PAGODA_INLINE unsigned above(f16 x, f16 limit) { return PAGODA_BITS(x, limit, _CMP_GT_OQ); }
PAGODA_INLINE unsigned equal(f16 x, f16 y) { return PAGODA_BITS(x, y, _CMP_EQ_OQ); }
#undef PAGODA_BITS
#else
struct Mass { uint64_t v[16]; int vectors; };
PAGODA_INLINE Mass no_mass() { return {}; }
PAGODA_INLINE void add(Mass& m, f16 w) {
  for (int i = 0; i < 16; ++i) m.v[i] += bits((double)w.v[i] + WHOLE);
  m.vectors++;
}
PAGODA_INLINE void wholes(f16 w, uint64_t* to) {
  for (int i = 0; i < 16; ++i) to[i] = whole(w.v[i]);
}
PAGODA_INLINE void truncated(f16 x, int32_t* to) {  // undefined for values outside the range of int
  for (int i = 0; i < 16; ++i) to[i] = x.v[i] > -1e9f && x.v[i] < 1e9f ? (int32_t)x.v[i] : 0;
}
PAGODA_INLINE unsigned above(f16 x, f16 limit) {
  unsigned r = 0;
  for (int i = 0; i < 16; ++i) r |= (unsigned)(x.v[i] > limit.v[i]) << i;
  return r;
}
PAGODA_INLINE unsigned equal(f16 x, f16 y) {
  unsigned r = 0;
  for (int i = 0; i < 16; ++i) r |= (unsigned)(x.v[i] == y.v[i]) << i;
  return r;
}
#endif
PAGODA_INLINE uint64_t total(const Mass& m) {
  uint64_t lanes[sizeof m.v / 8], sum = 0;
  memcpy(lanes, &m.v, sizeof lanes);
  for (uint64_t lane : lanes) sum += lane;
  return sum - 16 * WHOLE_BITS * (uint64_t)m.vectors;
}

// f(first token, its sixteen logits) over tokens [first, last) of a row; lanes past the end are -inf.
template <typename F>
PAGODA_INLINE void each_vector(const float* row, int first, int last, F f) {
  int i = first;
  for (; i + 16 <= last; i += 16) f(i, load(row + i));
  if (i == last) return;
  float rest[16];
  for (int lane = 0; lane < 16; ++lane) rest[lane] = i + lane < last ? row[i + lane] : -INF;
  f(i, load(rest));
}
// The same for one slice.
template <typename F>
PAGODA_INLINE void each_in_slice(const float* row, int vocab, int slice, F f) {
  int first = slice * SLICE;
  each_vector(row, first, first + SLICE < vocab ? first + SLICE : vocab, f);
}

}  // namespace PAGODA_NS
