// Chooses tokens as sampler.py defines it, but with thresholds instead of sorting.
//
// Weights are integers: exp((logit - top) / temperature) in units of 2^-44, computed in float and rounded once per token.
// Their sums are exact, so neither the order of additions and the division among threads nor how much of a row was examined
// matters: a token's probability is its weight over the survivors' total, to the last bit. Tokens below half a unit have no
// weight; a million of them would hold 3e-8 of the mass.
//
// The order of tokens is computed only as far as needed. A row's tokens are counted into buckets by depth, (top - logit) /
// temperature in eighths, each with a count and a mass. Only the bucket in which a threshold is crossed has its tokens
// collected, and these are subdivided again in the same way until few are left to sort. Most rows end within the first 8
// temperatures, so only those are counted at first.
#pragma once

#include "order.h"

namespace PAGODA_NS {

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

// Each filter keeps a prefix of the order, so the survivors' mass is the smallest of the filters' masses, and the token is
// the one at which the draw falls within it.
static int draw(const SampleRow& row, uint64_t mass, Search& search) {
  int k = tokens_kept(row, search.vocab);
  if (k < search.vocab) mass = search.mass_of_first((uint64_t)k);
  if (row.min_p > 0.0) mass = search.capped(mass, (float)log(row.min_p));
  if (row.top_p < 1.0) {  // a share of what the other filters left
    double share = __builtin_ceil(row.top_p * (double)mass);
    uint64_t wanted = share < (double)mass ? (uint64_t)share : mass;
    mass = search.reach(wanted).mass;
  }
  uint64_t u = random53(row.seed, row.choice, row.position);
  return search.reach((uint64_t)((unsigned __int128)u * mass >> 53) + 1).id;
}

// --- changes ------------------------------------------------------------------------------------------------------------

// The same arithmetic as penalties.py, operation by operation.
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

// The first `wanted` tokens in order, or all if there are fewer, by insertion.
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
