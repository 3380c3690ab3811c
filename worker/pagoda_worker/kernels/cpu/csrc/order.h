// The order of a row's tokens, computed only as far as needed: maxima of slices, buckets by depth, and the few tokens of one
// bucket, sorted. See sampling.h.
#pragma once

#include <cstdlib>

#include "masses.h"

namespace PAGODA_NS {

// --- maxima -------------------------------------------------------------------------------------------------------------

static float slice_max(const float* row, int vocab, int slice) {
  f16 top = set1(-INF), wrong = zero(), lowest = set1(LOWEST);
  each_in_slice(row, vocab, slice, [&](int, f16 x) {
    top = max(x, top);                           // if a lane is NaN, `max` returns its second operand
    wrong = fma(max(lowest, x), zero(), wrong);  // 0, but a NaN for a NaN or an infinity other than -inf
  });
  return sum(wrong) == 0.0f ? max_lane(top) : __builtin_nanf("");
}

// The highest logit of a row; NaN if any slice's maximum is NaN.
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

// How a row's tokens are weighed, and which of its buckets are filled: [0, edge). `whole`: the total mass is needed.
// `counted`: token counts are needed.
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

// The end of the first buckets that hold at least `k` tokens, inferred from the maxima of `k` or more slices.
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

// Neighbouring lanes fill separate copies of the buckets: if all tokens fell into one bucket, each add would wait for the last.
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

// Counts tokens of slices [first, last) into buckets [from, to); returns the mass of all tokens if `all`.
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

// The tokens of a bucket, in order of id. Two arrays, because a selection copies what it keeps from one to the other.
struct Candidates {
  Candidate* items = nullptr;
  Candidate* other = nullptr;
  int count = 0, room = 0;

  ~Candidates() {
    free(items);
    free(other);
  }

  // Makes room for 16 more.
  void make_room() {
    if (count + 16 <= room) return;
    room = room ? 2 * room : 1024;
    items = (Candidate*)realloc(items, (size_t)room * sizeof(Candidate));
    other = (Candidate*)realloc(other, (size_t)room * sizeof(Candidate));
    if (!items || !other) abort();
  }

  // In order of key, then of id: the first token at which the number of tokens so far, or with `by_mass` their mass, reaches
  // `wanted`, which must not exceed the total. Sorts only the tokens near it.
  Found reach(uint64_t wanted, bool by_mass) {
    uint64_t mass = 0, seen = 0;  // of the tokens ordered before all remaining ones
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
  float x = 0.0f - logit;  // maps both zeros to one
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Queries about the order of one row. Buckets beyond `edge` are filled when a query gets that far.
struct Search {
  const float* row;
  int vocab, slices;
  const float* maxima;
  Weighing w;
  Bucket* buckets;
  Candidates& candidates;

  // Ensures that bucket b is filled; false for the last, whose tokens have no weight.
  bool known(int b) {
    if (b < w.edge) return true;
    if (b == LAST) return false;
    fill(row, vocab, maxima, 0, slices, w, w.edge, LAST, false, buckets);
    w.edge = LAST;
    return true;
  }

  // Collects the tokens with heights in (low, high].
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

  // The smaller of `mass` and the mass of all tokens at least this high.
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

  // The first token at which the mass reaches `wanted`, which must not exceed the total.
  Found reach(uint64_t wanted) {
    uint64_t mass = 0;
    int b = 0;
    for (; known(b) && mass + buckets[b].mass < wanted; ++b) mass += buckets[b].mass;
    fetch(b);
    Found found = candidates.reach(wanted - mass, true);
    return {found.id, mass + found.mass};
  }
};

}  // namespace PAGODA_NS
