// Mixture of experts apart from the products, as defined in kernels/routing.py.
//
// Tokens are gathered by expert (a counting sort), so that the rows of an expert are contiguous and pass its panels like the
// rows of any layer. Whichever thread computes what, a token's bits depend only on its row and its ranks.
//
// `order` passes the result of the sort between operations: [0] number of experts with rows; from 1 on their ids; from
// 1 + experts on the first row of each, and an end; from 2 + 2 * experts on the row of each token and rank, [tokens, chosen].
#pragma once

#include "linear.h"

namespace PAGODA_NS {

constexpr int MOST_EXPERTS = 1024, MOST_CHOSEN = 64;

struct Order {
  const int32_t *experts, *starts, *places;
  int busy;
  Order(const int32_t* order, int count) : experts(order + 1), starts(experts + count), places(starts + count + 1), busy(*order) {}
};

// The index of the best of `count` scores that is not taken, ties to the first. A NaN is chosen only if it comes first.
PAGODA_INLINE int best_of(const float* scores, const bool* taken, int count) {
  int best = -1;
  for (int i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
  return best;
}

// A group's score: the sum of its `top` highest scores.
static float group_score(const float* scores, int size, int top) {
  bool taken[MOST_EXPERTS] = {};
  float total = 0.0f;
  for (int i = 0; i < top; ++i) {
    const int best = best_of(scores, taken, size);
    taken[best] = true;
    total = i == 0 ? scores[best] : total + scores[best];
  }
  return total;
}

// Marks the experts of all groups but the best as taken.
static void take_others(const RouteOp& op, const float* scores, bool* taken) {
  const int size = op.experts / op.groups;
  float totals[MOST_EXPERTS];
  bool kept[MOST_EXPERTS] = {};
  for (int g = 0; g < op.groups; ++g) totals[g] = group_score(scores + g * size, size, op.group_top);
  for (int i = 0; i < op.chosen_groups; ++i) kept[best_of(totals, kept, op.groups)] = true;
  for (int e = 0; e < op.experts; ++e) taken[e] = !kept[e / size];
}

// Scores of all experts; `own` is without `favour`.
static void score_experts(const RouteOp& op, const float* logits, float* own, float* scores) {
  for (int e = 0; e < op.experts; e += 16) {
    f16 x = load_some(logits + e, op.experts - e);
    if (op.sigmoid) x = set1(1.0f) / (set1(1.0f) + exp(zero() - x));
    store(own + e, x);
    store(scores + e, op.favour ? x + load_some(op.favour + e, op.experts - e) : x);
  }
}

// Logits of the chosen experts -> their weights, by a softmax over these or over all experts.
static void softmax_weights(const RouteOp& op, const float* logits, float* own, float* weights) {
  const f16 top = set1(own[0]);
  for (int r = op.chosen; r < MOST_CHOSEN; ++r) own[r] = own[0];
  for (int r = 0; r < op.chosen; r += 16) store(own + r, exp(load(own + r) - top));
  float total = 0.0f;
  if (op.renormalised) {
    for (int r = 0; r < op.chosen; ++r) total += own[r];
  } else {
    f16 all = zero();
    for (int e = 0; e < op.experts; e += 16)
      all = all + keep_below(exp(load_some(logits + e, op.experts - e) - top), e, op.experts, zero());
    total = sum(all);
  }
  for (int r = 0; r < op.chosen; ++r) weights[r] = own[r] / total;
}

static void sigmoid_weights(const RouteOp& op, const float* own, float* weights) {
  float total = own[0];
  for (int r = 1; r < op.chosen; ++r) total += own[r];
  for (int r = 0; r < op.chosen; ++r) weights[r] = op.renormalised ? own[r] / (total + 1e-20f) : own[r];
}

// Chooses a token's experts and their weights.
static void route_row(const RouteOp& op, size_t row) {
  const float* logits = op.logits + row * op.experts;
  int32_t* ids = op.ids + row * op.chosen;
  float* weights = op.weights + row * op.chosen;
  bool taken[MOST_EXPERTS] = {};
  float own[MOST_EXPERTS], scores[MOST_EXPERTS], chosen[MOST_CHOSEN];
  score_experts(op, logits, own, scores);
  if (op.chosen_groups < op.groups) take_others(op, scores, taken);
  for (int r = 0; r < op.chosen; ++r) {
    taken[ids[r] = best_of(scores, taken, op.experts)] = true;
    chosen[r] = own[ids[r]];
  }
  if (op.sigmoid) sigmoid_weights(op, chosen, weights);
  else softmax_weights(op, logits, chosen, weights);
  if (op.scale != 1.0f)
    for (int r = 0; r < op.chosen; ++r) weights[r] *= op.scale;
}

static void sort_tokens(const SortOp& op, int tokens) {
  int32_t next[MOST_EXPERTS] = {};
  int32_t *busy = op.order, *experts = busy + 1, *starts = experts + op.experts, *places = starts + op.experts + 1;
  const int rows = tokens * op.chosen;
  for (int i = 0; i < rows; ++i) ++next[op.ids[i]];
  int32_t at = 0;
  *busy = 0;
  for (int e = 0; e < op.experts; ++e) {
    const int32_t count = next[e];
    next[e] = at;
    if (count == 0) continue;
    experts[*busy] = e;
    starts[(*busy)++] = at;
    at += count;
  }
  starts[*busy] = at;
  for (int i = 0; i < rows; ++i) places[i] = next[op.ids[i]]++;
}

static void gather_row(const GatherOp& op, size_t row) {
  const Order order(op.order, op.experts);
  for (int r = 0; r < op.chosen; ++r)
    memcpy(op.y + (size_t)order.places[row * op.chosen + r] * op.dim, op.x + row * op.dim, 2 * (size_t)op.dim);
}

// The products of a token, weighted and added in order of rank.
static void combine_row(const CombineOp& op, size_t row) {
  const Order order(op.order, op.experts);
  const int32_t* places = order.places + row * op.chosen;
  const float* weights = op.weights + row * op.chosen;
  const float share = op.gate ? 1.0f / (1.0f + max_lane(exp(set1(-op.gate[row])))) : 1.0f;
  for (int d = 0; d < op.dim; d += 16) {
    f16 total = zero();
    for (int r = 0; r < op.chosen; ++r)
      total = total + load_bf16(op.products + (size_t)places[r] * op.dim + d) * set1(weights[r]);
    if (op.beside) total = total + load_bf16(op.beside + row * op.dim + d) * set1(share);
    store_bf16(op.y + row * op.dim + d, total);
  }
}

}  // namespace PAGODA_NS
