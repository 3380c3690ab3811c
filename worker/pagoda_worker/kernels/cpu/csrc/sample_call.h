// One call of the sampler: the parameters of each row, and the results.
//
// Python mirrors SampleRow and SampleResult field by field (kernels/cpu/library.py) and checks with `pagoda_sizes`.
#pragma once

#include <cstdint>

constexpr int MAX_TOP = 20;    // alternatives a row may ask for
constexpr int SLICE = 1024;    // tokens of a slice; slices begin at multiples of it
constexpr int BUCKETS = 256;   // of an eighth of a temperature each; the last is never counted, its tokens have no weight

struct SampleRow {
  // Changes to the logits, in this order: mask everything except `allowed`; mask `masked`; add `bias`; apply the penalties
  // to the tokens `seen`, each of which occurs `times` times in the output.
  const int64_t *allowed, *masked, *bias_ids, *seen, *times;
  const float* bias;
  int32_t num_allowed, num_masked, num_bias, num_seen;
  float repetition, frequency, presence;
  uint32_t choice, position;  // together with `seed`, the key of the random number
  int32_t top_k;    // 0: all
  int32_t num_top;  // log-probabilities to report besides the token's own; -1: not even that
  int32_t given;    // report on this token instead of choosing one; -1: choose
  uint64_t seed;
  double temperature, top_p, min_p;  // temperature 0: the highest logit
};

enum SampleStatus : int32_t { CHOSEN = 0, NOT_A_NUMBER = 1, NOTHING_ALLOWED = 2 };

struct SampleResult {
  int32_t token, status, rank;
  float logprob;
  int32_t top_ids[MAX_TOP];
  float top_logprobs[MAX_TOP];
};

// Tokens between two thresholds: their number, and the sum of their weights in units of 2^-44.
struct Bucket {
  uint64_t count, mass;
};

struct SampleCall {
  float* logits;  // [num_rows, vocab], overwritten
  int32_t num_rows, vocab;
  const SampleRow* rows;
  SampleResult* results;
  // Scratch of the call. The maximum of a slice with a NaN or an infinity (other than -inf) is NaN.
  float* raw_maxima;   // [num_rows, slices] of the original logits
  float* maxima;       // [num_rows, slices] of the logits after changes
  uint64_t* raw_mass;  // [num_rows] of the raw logits at temperature 1
  uint64_t* total;     // [num_rows] of the changed logits at the row's temperature
  Bucket* buckets;     // [num_rows, BUCKETS]
  float** raw;         // [num_rows] a copy of the raw logits, for rows that need one later; else null
};

// The phases of a call, in order; all threads finish one before any begins the next.
enum SamplePhase { SCAN, WEIGH_RAW, CHANGE, SCAN_AGAIN, WEIGH, CHOOSE, SAMPLE_PHASES };

static inline int num_slices(const SampleCall& call) { return (call.vocab + SLICE - 1) / SLICE; }
static inline bool changes(const SampleRow& row) { return row.num_allowed || row.num_masked || row.num_bias || row.num_seen; }
static inline bool reports(const SampleRow& row) { return row.num_top >= 0; }
static inline bool draws(const SampleRow& row) { return row.temperature > 0.0 && row.given < 0; }
// Ranks are by the raw logits and can be computed only after the token is chosen.
static inline bool keeps_raw(const SampleRow& row) { return changes(row) && reports(row); }

// The number of independent pieces of a phase: rows, or slices of rows; 0 if no row needs it.
static inline int sample_items(const SampleCall& call, int phase) {
  if (phase == SCAN) return call.num_rows * num_slices(call);
  if (phase == CHOOSE) return call.num_rows;
  for (int r = 0; r < call.num_rows; ++r) {
    const SampleRow& row = call.rows[r];
    bool wanted = phase == WEIGH_RAW ? reports(row) : phase == WEIGH ? draws(row) : changes(row);
    if (wanted) return phase == CHANGE ? call.num_rows : call.num_rows * num_slices(call);
  }
  return 0;
}
