// Choosing tokens: what sampler.py defines, with thresholds where it sorts.
//
// Weights are whole numbers: exp((logit - top) / temperature) in units of 2^-44, computed in float and rounded once per
// token. Sums of them are exact, so it matters neither who adds up what in which order nor how much of a row was looked
// at: a token's probability is its weight over the survivors' total, to the last bit. What is below half a unit weighs
// nothing; a million such tokens would hold 3e-8 of the mass.
//
// The order of tokens is found as far as it is needed. A row's tokens fall into buckets by depth, (top - logit) /
// temperature in eighths, with a count and a mass each; the bucket in which a threshold is crossed is the only one whose
// tokens are fetched, and of these the same is done again until few are left to sort. Most rows end within the first 8 temperatures, so only those are counted at first.
#pragma once

#include <cstdlib>

#include "sample_call.h"
#include "simd.h"

namespace PAGODA_NS {

// --- sixteen lanes as bits and as whole numbers -------------------------------------------------------------------------

constexpr float UNIT = 17592186044416.0f;       // 2^44
constexpr double WHOLE = 4503599627370496.0;    // 2^52: added to a double, leaves its rounded value in the low bits
constexpr uint64_t WHOLE_BITS = 0x4330000000000000u;
constexpr float INF = __builtin_inff(), LOWEST = -3.402823466e38f;

PAGODA_INLINE uint64_t bits(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  return u;
}
// x in [0, 2^52) to the nearest whole number, ties to even.
PAGODA_INLINE uint64_t whole(float x) { return bits((double)x + WHOLE) - WHOLE_BITS; }

// The natural logarithm of a positive number, within 2e-16 of its size or of 1: ours, because every libm has bits of
// its own. x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and log m = 2 (s + s^3 / 3 + s^5 / 5 ..), s = (m - 1) / (m + 1).
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

// The sum of `whole` over lanes. Every vector adds 16 WHOLE_BITS too, modulo 2^64, which `total` takes off.
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
PAGODA_INLINE void truncated(f16 x, int32_t* to) {  // of what is no int, anything
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

// --- maxima -------------------------------------------------------------------------------------------------------------

static float slice_max(const float* row, int vocab, int slice) {
  f16 top = set1(-INF), wrong = zero(), lowest = set1(LOWEST);
  each_in_slice(row, vocab, slice, [&](int, f16 x) {
    top = max(x, top);                           // of two lanes that do not compare, `max` is the second
    wrong = fma(max(lowest, x), zero(), wrong);  // 0, but a NaN for a NaN or an infinity other than -inf
  });
  return sum(wrong) == 0.0f ? max_lane(top) : __builtin_nanf("");
}

// The highest of a row; NaN if any slice's is one.
static float highest(const float* maxima, int slices) {
  float top = -INF;
  for (int s = 0; s < slices; ++s) {
    if (maxima[s] != maxima[s]) return maxima[s];
    top = maxima[s] > top ? maxima[s] : top;
  }
  return top;
}

static int first_of_highest(const float* row, int vocab, const float* maxima, float top) {
  int s = 0;
  while (maxima[s] != top) ++s;
  int i = s * SLICE;
  while (i + 16 <= vocab && !equal(load(row + i), set1(top))) i += 16;
  while (row[i] != top) ++i;
  return i;
}

// --- weights and buckets ------------------------------------------------------------------------------------------------

constexpr int NEAR = 64, LAST = BUCKETS - 1;
constexpr float PER_BUCKET = 0.125f;

// How a row's tokens are weighed, and which of its buckets are filled: [0, edge). `whole`: its total mass is wanted.
// `counted`: so are counts of tokens.
struct Weighing {
  float top, scale;
  int edge;
  bool whole, counted;
};

PAGODA_INLINE f16 height(f16 x, const Weighing& w) { return (x - set1(w.top)) * set1(w.scale); }
PAGODA_INLINE float height(float x, const Weighing& w) { return (x - w.top) * w.scale; }
PAGODA_INLINE f16 weight(f16 height) { return exp(height) * set1(UNIT); }
// Bucket b holds heights in (-(b + 1) / 8, -b / 8].
PAGODA_INLINE int bucket_of(float height) {
  float b = height * (-1.0f / PER_BUCKET);
  return b < (float)LAST ? (int)b : LAST;
}
PAGODA_INLINE int past(int bucket) { return bucket < LAST ? bucket + 1 : LAST; }

// The first buckets that hold `k` tokens, known by maxima of as many slices.
static int edge_of(int k, const float* maxima, int slices, const Weighing& w) {
  int counts[BUCKETS] = {}, b = -1;
  for (int s = 0; s < slices; ++s) counts[bucket_of(height(maxima[s], w))]++;
  while (k > 0) k -= counts[++b];
  return past(b);
}

static int tokens_kept(const SampleRow& row, int vocab) {
  return 0 < row.top_k && row.top_k < vocab ? row.top_k : vocab;
}

static Weighing weighing_of(const SampleCall& c, int r) {
  const SampleRow& row = c.rows[r];
  int slices = num_slices(c), k = tokens_kept(row, c.vocab);
  const float* maxima = c.maxima + (size_t)r * slices;
  double scale = 1.0 / row.temperature;
  Weighing w{highest(maxima, slices), scale < -(double)LOWEST ? (float)scale : -LOWEST, NEAR, false, k < c.vocab};
  if (!(w.top > -INF)) return w;
  w.whole = k == c.vocab && row.min_p <= 0.0;
  if (k <= slices && k < c.vocab) w.edge = edge_of(k, maxima, slices, w);
  if (k == c.vocab && !w.whole) w.edge = past(bucket_of((float)log(row.min_p)));
  return w;
}

// Buckets that neighbouring lanes fill each for themselves: one that all tokens fall into would have each wait for the last.
constexpr int WAYS = 4;
struct Tally {
  Bucket ways[WAYS][BUCKETS];
};
template <bool COUNTED>
PAGODA_INLINE void tally(Tally& t, unsigned lanes, const int32_t* places, const uint64_t* masses) {
  const auto add = [&](int lane) PAGODA_INLINE_MEMBER {
    Bucket& bucket = t.ways[lane % WAYS][places[lane]];
    if constexpr (COUNTED) bucket.count++;
    bucket.mass += masses[lane];
  };
  if (lanes == 0xffffu) {
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; ++lane) add(lane);
    return;
  }
  for (; lanes; lanes &= lanes - 1) add(__builtin_ctz(lanes));
}

// Counts tokens of slices [first, last) into buckets [from, to); returns the mass of all of them if that is wanted.
static uint64_t fill(const float* row, int vocab, const float* maxima, int first, int last, const Weighing& w, int from,
                     int to, bool all, Bucket* buckets) {
  Tally t;
  for (auto& way : t.ways) memset(way + from, 0, (size_t)(to - from) * sizeof(Bucket));
  f16 high = set1(-PER_BUCKET * from), low = set1(-PER_BUCKET * to);
  float reach = -PER_BUCKET * (all ? LAST : to);
  Mass mass = no_mass();
  for (int s = first; s < last; ++s) {
    if (!(height(maxima[s], w) > reach)) continue;
    each_in_slice(row, vocab, s, [&](int, f16 x) PAGODA_INLINE_MEMBER {
      f16 h = height(x, w);
      unsigned lanes = above(h, low) & ~above(h, high);
      if (!all && !lanes) return;
      f16 weights = weight(h);
      if (all) add(mass, weights);
      if (!lanes) return;
      alignas(64) int32_t places[16];
      alignas(64) uint64_t masses[16];
      truncated(h * set1(-1.0f / PER_BUCKET), places);
      wholes(weights, masses);
      if (w.counted) tally<true>(t, lanes, places, masses);
      else tally<false>(t, lanes, places, masses);
    });
  }
  for (auto& way : t.ways)
    for (int b = from; b < to; ++b) {
      buckets[b].count += way[b].count;
      buckets[b].mass += way[b].mass;
    }
  return total(mass);
}

PAGODA_INLINE void share(uint64_t& sum, uint64_t value) {
  if (value) __atomic_fetch_add(&sum, value, __ATOMIC_RELAXED);
}

// --- the order, as far as it is needed ----------------------------------------------------------------------------------

struct Candidate {
  uint32_t key;  // ascending in the order of logits
  int32_t id;
  uint64_t mass;
};

struct Found {
  int id;
  uint64_t mass;  // of the tokens up to it and its own
};

// The tokens of a bucket, in the order of ids. Two arrays, because a selection moves what it keeps from one to the other.
struct Candidates {
  Candidate* items = nullptr;
  Candidate* other = nullptr;
  int count = 0, room = 0;

  ~Candidates() {
    free(items);
    free(other);
  }

  // For 16 more.
  void make_room() {
    if (count + 16 <= room) return;
    room = room ? 2 * room : 1024;
    items = (Candidate*)realloc(items, (size_t)room * sizeof(Candidate));
    other = (Candidate*)realloc(other, (size_t)room * sizeof(Candidate));
    if (!items || !other) abort();
  }

  // In the order of keys, of equal ones in that of ids: the first token with which the tokens up to it are `wanted`, or
  // with which their mass is, if that is how they are counted. There are as many. What is not near it is not sorted.
  Found reach(uint64_t wanted, bool by_mass) {
    uint64_t mass = 0, seen = 0;  // of the tokens that come before all of these
    while (count > FEW) {
      uint32_t lowest = items[0].key, highest = lowest;
      for (int i = 1; i < count; ++i) {
        lowest = items[i].key < lowest ? items[i].key : lowest;
        highest = items[i].key > highest ? items[i].key : highest;
      }
      if (lowest == highest) break;
      const int shift = 24 - (__builtin_clz(highest - lowest) < 24 ? __builtin_clz(highest - lowest) : 24);
      Bucket bins[256] = {};
      for (int i = 0; i < count; ++i) {
        Bucket& bin = bins[(items[i].key - lowest) >> shift];
        bin.count++;
        bin.mass += items[i].mass;
      }
      uint32_t b = 0;
      for (; (by_mass ? mass + bins[b].mass : seen + bins[b].count) < wanted; ++b) {
        mass += bins[b].mass;
        seen += bins[b].count;
      }
      keep(lowest, b, shift);
    }
    sort_few();
    for (int i = 0;; ++i) {
      mass += items[i].mass;
      if ((by_mass ? mass : ++seen) >= wanted) return {items[i].id, mass};
    }
  }

 private:
  static constexpr int FEW = 32;

  void keep(uint32_t lowest, uint32_t bin, int shift) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      other[kept] = items[i];
      kept += (items[i].key - lowest) >> shift == bin;
    }
    Candidate* rest = other;
    other = items;
    items = rest;
    count = kept;
  }

  void sort_few() {
    for (int i = 1; i < count; ++i) {
      Candidate one = items[i];
      int at = i;
      for (; at > 0 && items[at - 1].key > one.key; --at) items[at] = items[at - 1];
      items[at] = one;
    }
  }
};

PAGODA_INLINE uint32_t order_key(float logit) {
  float x = 0.0f - logit;  // one zero of the two
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Questions about the order of one row. Buckets beyond `edge` are filled when a question goes that far.
struct Search {
  const float* row;
  int vocab, slices;
  const float* maxima;
  Weighing w;
  Bucket* buckets;
  Candidates& candidates;

  // Makes bucket b known; false for the last, whose tokens weigh nothing.
  bool known(int b) {
    if (b < w.edge) return true;
    if (b == LAST) return false;
    fill(row, vocab, maxima, 0, slices, w, w.edge, LAST, false, buckets);
    w.edge = LAST;
    return true;
  }

  // Fetches the tokens of heights in (low, high].
  void fetch(float low, float high) {
    candidates.count = 0;
    for (int s = 0; s < slices; ++s) {
      if (!(height(maxima[s], w) > low)) continue;
      each_in_slice(row, vocab, s, [&](int first, f16 x) PAGODA_INLINE_MEMBER {
        f16 h = height(x, w);
        unsigned lanes = above(h, set1(low)) & ~above(h, set1(high));
        if (!lanes) return;
        float logits[16];
        uint64_t masses[16];
        store(logits, x);
        wholes(weight(h), masses);
        candidates.make_room();
        for (; lanes; lanes &= lanes - 1) {
          int lane = __builtin_ctz(lanes);
          candidates.items[candidates.count++] = {order_key(logits[lane]), first + lane, masses[lane]};
        }
      });
    }
  }
  void fetch(int b) { fetch(-PER_BUCKET * (b + 1), -PER_BUCKET * b); }

  // The mass of the first k tokens.
  uint64_t mass_of_first(uint64_t k) {
    uint64_t mass = 0;
    for (int b = 0; known(b); ++b) {
      if (buckets[b].count > k) {
        fetch(b);
        return mass + candidates.reach(k, false).mass;
      }
      k -= buckets[b].count;
      mass += buckets[b].mass;
      if (k == 0) break;
    }
    return mass;
  }

  // The lesser of `mass` and the mass of all tokens of at least this height.
  uint64_t capped(uint64_t mass, float least) {
    uint64_t sum = 0;
    int end = bucket_of(least);
    for (int b = 0; b < end && known(b); ++b) {
      sum += buckets[b].mass;
      if (sum >= mass) return mass;
    }
    if (end < LAST) {
      fetch(__builtin_nextafterf(least, -INF), -PER_BUCKET * end);
      for (int i = 0; i < candidates.count; ++i) sum += candidates.items[i].mass;
    }
    return sum < mass ? sum : mass;
  }

  // The first token with which the mass reaches `wanted`, which is no more than there is.
  Found reach(uint64_t wanted) {
    uint64_t mass = 0;
    int b = 0;
    for (; known(b) && mass + buckets[b].mass < wanted; ++b) mass += buckets[b].mass;
    fetch(b);
    Found found = candidates.reach(wanted - mass, true);
    return {found.id, mass + found.mass};
  }
};

// Philox4x32-10 as in philox.py: 53 random bits.
static uint64_t random53(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c[4] = {choice, position, 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    uint64_t left = (uint64_t)c[0] * 0xD2511F53u, right = (uint64_t)c[2] * 0xCD9E8D57u;
    c[0] = (uint32_t)(right >> 32) ^ c[1] ^ k[0];
    c[1] = (uint32_t)right;
    c[2] = (uint32_t)(left >> 32) ^ c[3] ^ k[1];
    c[3] = (uint32_t)left;
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return ((uint64_t)c[0] << 32 | c[1]) >> 11;
}

// Each filter keeps a prefix of the order, so the survivors' mass is the least of theirs, and the token is where the
// draw falls in it.
static int draw(const SampleRow& row, uint64_t mass, Search& search) {
  int k = tokens_kept(row, search.vocab);
  if (k < search.vocab) mass = search.mass_of_first((uint64_t)k);
  if (row.min_p > 0.0) mass = search.capped(mass, (float)log(row.min_p));
  if (row.top_p < 1.0) {  // a share of what the others left
    double share = __builtin_ceil(row.top_p * (double)mass);
    uint64_t wanted = share < (double)mass ? (uint64_t)share : mass;
    mass = search.reach(wanted).mass;
  }
  uint64_t u = random53(row.seed, row.choice, row.position);
  return search.reach((uint64_t)((unsigned __int128)u * mass >> 53) + 1).id;
}

// --- changes ------------------------------------------------------------------------------------------------------------

// The arithmetic of penalties.py, operation by operation.
static void change(float* row, int vocab, const SampleRow& s) {
  if (s.num_allowed) {
    float* kept = (float*)malloc((size_t)s.num_allowed * sizeof(float));
    if (!kept) abort();
    for (int i = 0; i < s.num_allowed; ++i) kept[i] = row[s.allowed[i]];
    for (int t = 0; t < vocab; ++t) row[t] = -INF;
    for (int i = 0; i < s.num_allowed; ++i) row[s.allowed[i]] = kept[i];
    free(kept);
  }
  for (int i = 0; i < s.num_masked; ++i) row[s.masked[i]] = -INF;
  for (int i = 0; i < s.num_bias; ++i) row[s.bias_ids[i]] += s.bias[i];
  for (int i = 0; i < s.num_seen; ++i) {
    float& x = row[s.seen[i]];
    x = x > 0.0f ? x / s.repetition : x * s.repetition;
    x -= s.frequency * (float)s.times[i];
    x -= s.presence * (s.times[i] > 0 ? 1.0f : 0.0f);
  }
}

// --- log-probabilities --------------------------------------------------------------------------------------------------

// The first `wanted` tokens in order, or all there are, by insertion.
static int first_tokens(const float* row, int vocab, const float* maxima, int wanted, int32_t* ids) {
  float values[MAX_TOP];
  int count = 0;
  for (int s = 0; s * SLICE < vocab; ++s) {
    if (count == wanted && (count == 0 || !(maxima[s] > values[count - 1]))) continue;
    each_in_slice(row, vocab, s, [&](int first, f16 x) {
      if (count == wanted && !above(x, set1(values[count - 1]))) return;
      for (int id = first; id < first + 16 && id < vocab; ++id) {
        if (count == wanted && !(row[id] > values[count - 1])) continue;
        int at = count < wanted ? count++ : count - 1;
        for (; at > 0 && row[id] > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = row[id], ids[at] = id;
      }
    });
  }
  return count;
}

static int rank_of(const float* row, int vocab, const float* maxima, int token) {
  int rank = 1;
  f16 value = set1(row[token]);
  for (int s = 0; s * SLICE < vocab; ++s) {
    if (maxima[s] < row[token]) continue;
    each_in_slice(row, vocab, s, [&](int first, f16 x) {
      unsigned before = token >= first + 16 ? 0xffffu : token <= first ? 0u : (1u << (token - first)) - 1;
      rank += __builtin_popcount(above(x, value) | (equal(x, value) & before));
    });
  }
  return rank;
}

static void report(const SampleCall& c, int r, float top, SampleResult& out) {
  const float* row = c.raw[r] ? c.raw[r] : c.logits + (size_t)r * c.vocab;
  const float* maxima = c.raw_maxima + (size_t)r * num_slices(c);
  double log_mass = (double)top + log((double)c.raw_mass[r] / (double)UNIT);
  out.logprob = (float)((double)row[out.token] - log_mass);
  out.rank = rank_of(row, c.vocab, maxima, out.token);
  int count = first_tokens(row, c.vocab, maxima, c.rows[r].num_top, out.top_ids);
  for (int i = 0; i < count; ++i) out.top_logprobs[i] = (float)((double)row[out.top_ids[i]] - log_mass);
}

// --- phases -------------------------------------------------------------------------------------------------------------

static void choose(const SampleCall& c, int r) {
  static thread_local Candidates candidates;
  const SampleRow& row = c.rows[r];
  SampleResult& out = c.results[r];
  int slices = num_slices(c);
  const float* logits = c.logits + (size_t)r * c.vocab;
  const float* maxima = c.maxima + (size_t)r * slices;
  float raw_top = highest(c.raw_maxima + (size_t)r * slices, slices), top = highest(maxima, slices);
  out.status = !(raw_top > -INF) || top != top ? NOT_A_NUMBER : top == -INF ? NOTHING_ALLOWED : CHOSEN;
  if (out.status != CHOSEN) return;
  if (row.given >= 0) {
    out.token = row.given;
  } else if (!draws(row)) {
    out.token = first_of_highest(logits, c.vocab, maxima, top);
  } else {
    Search search{logits, c.vocab, slices, maxima, weighing_of(c, r), c.buckets + (size_t)r * BUCKETS, candidates};
    out.token = draw(row, search.w.whole ? c.total[r] : ~(uint64_t)0, search);
  }
  if (reports(row)) report(c, r, raw_top, out);
}

static void weigh(const SampleCall& c, int r, int first, int last) {
  const Weighing w = weighing_of(c, r);
  if (!(w.top > -INF)) return;
  Bucket own[BUCKETS] = {};
  const float* maxima = c.maxima + (size_t)r * num_slices(c);
  share(c.total[r], fill(c.logits + (size_t)r * c.vocab, c.vocab, maxima, first, last, w, 0, w.edge, w.whole, own));
  for (int b = 0; b < w.edge; ++b) {
    share(c.buckets[(size_t)r * BUCKETS + b].count, own[b].count);
    share(c.buckets[(size_t)r * BUCKETS + b].mass, own[b].mass);
  }
}

static void weigh_raw(const SampleCall& c, int r, int first, int last) {
  const float *row = c.logits + (size_t)r * c.vocab, *maxima = c.raw_maxima + (size_t)r * num_slices(c);
  const Weighing w{highest(maxima, num_slices(c)), 1.0f, 0, true, false};
  if (!(w.top > -INF)) return;
  share(c.raw_mass[r], fill(row, c.vocab, maxima, first, last, w, 0, 0, true, nullptr));
  if (!c.raw[r]) return;
  int from = first * SLICE, to = last * SLICE < c.vocab ? last * SLICE : c.vocab;
  memcpy(c.raw[r] + from, row + from, (size_t)(to - from) * sizeof(float));
}

static void scan(const SampleCall& c, int r, int first, int last, bool again) {
  for (int s = first; s < last; ++s) {
    size_t at = (size_t)r * num_slices(c) + s;
    c.maxima[at] = slice_max(c.logits + (size_t)r * c.vocab, c.vocab, s);
    if (!again) c.raw_maxima[at] = c.maxima[at];
  }
}

// Slices [first, last) of one row, in a phase that works by slices.
static void sample_slices(const SampleCall& c, int phase, int r, int first, int last) {
  const SampleRow& row = c.rows[r];
  switch (phase) {
    case SCAN: scan(c, r, first, last, false); break;
    case WEIGH_RAW: if (reports(row)) weigh_raw(c, r, first, last); break;
    case SCAN_AGAIN: if (changes(row)) scan(c, r, first, last, true); break;
    case WEIGH: if (draws(row)) weigh(c, r, first, last); break;
    default: break;
  }
}

static void sample(const SampleCall& c, int phase, int first, int last) {
  if (phase == CHANGE || phase == CHOOSE) {
    for (int r = first; r < last; ++r) {
      if (phase == CHOOSE) choose(c, r);
      else if (changes(c.rows[r])) change(c.logits + (size_t)r * c.vocab, c.vocab, c.rows[r]);
    }
    return;
  }
  int slices = num_slices(c);
  while (first < last) {
    int r = first / slices, end = (r + 1) * slices < last ? (r + 1) * slices : last;
    sample_slices(c, phase, r, first - r * slices, end - r * slices);
    first = end;
  }
}

}  // namespace PAGODA_NS
