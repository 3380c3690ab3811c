// What happens to one token at a time: norms, rotary embedding with the write into the cache, embedding.
//
// Roundings to bf16 stand where the op-by-op path has them, so that both can be compared closely.
#pragma once

#include "linear.h"

namespace PAGODA_NS {

// y = x / rms(x) * w; dim is a multiple of 16.
PAGODA_INLINE void normalise(const uint16_t* x, const float* w, uint16_t* y, int dim, float eps) {
  f16 squares = zero();
  for (int d = 0; d < dim; d += 16) {
    f16 v = load_bf16(x + d);
    squares = fma(v, v, squares);
  }
  f16 inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps));
  for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(x + d) * inverse * load(w + d));
}

// The norm is of x, or of x + residual, which then becomes the residual.
static void rms_norm_row(const RmsNormOp& op, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.x + row * dim;
  if (op.residual) {
    uint16_t* residual = op.residual + row * dim;
    for (int d = 0; d < dim; d += 16) store_bf16(residual + d, load_bf16(x + d) + load_bf16(residual + d));
    x = residual;
  }
  normalise(x, op.weight, op.y + row * dim, dim, op.eps);
}

// The mean is taken off before squares are summed, as a small variance beside a large mean needs. A sum is normed as it is
// and rounded only where it is kept.
static void layer_norm_row(const LayerNormOp& op, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.x + row * dim;
  uint16_t* residual = op.residual ? op.residual + row * dim : nullptr;
  auto value = [&](int d) PAGODA_INLINE_MEMBER { return residual ? load_bf16(x + d) + load_bf16(residual + d) : load_bf16(x + d); };
  f16 total = zero(), squares = zero();
  for (int d = 0; d < dim; d += 16) total = total + value(d);
  const f16 mean = set1(sum(total) / (float)dim);
  for (int d = 0; d < dim; d += 16) {
    const f16 v = value(d) - mean;
    squares = fma(v, v, squares);
  }
  const f16 inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)dim + op.eps));
  uint16_t* y = op.y + row * dim;
  for (int d = 0; d < dim; d += 16) {
    const f16 whole = value(d), v = (whole - mean) * inverse * load(op.weight + d);
    if (residual) store_bf16(residual + d, whole);
    store_bf16(y + d, op.bias ? v + load(op.bias + d) : v);
  }
}

struct RopeArgs : RopeKvOp {
  const int64_t* positions;   // [tokens]
  const int64_t* kv_indices;  // [tokens]
  int num_tokens;
};

// Dimension i turns with dimension i + dim / 2 by the angle of pair i.
PAGODA_INLINE void rotate(const uint16_t* x, uint16_t* y, const float* cos, const float* sin, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    int n = half - i < 16 ? half - i : 16;  // a half may be no multiple of 16; a whole is
    f16 left = load_some(x + i, n), right = load_some(x + half + i, n);
    f16 c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(y + i, left * c - right * s, n);
    store_some(y + half + i, right * c + left * s, n);
  }
}

// x [dim] -> whole numbers of at most 127 and their scale, by the definition in kernels/kv_cache.py.
static float quantise(const uint16_t* x, int8_t* levels, int dim) {
  f16 top = zero(), poison = zero();
  for (int d = 0; d < dim; d += 16) {
    f16 v = load_bf16(x + d);
    top = max(top, max(v, zero() - v));
    poison = poison + v * zero();  // NaN if x has anything that is not a number
  }
  const float scale = max_lane(top) / 127.0f + sum(poison);
  float whole[256] = {};
  if (scale > 0.0f)
    for (int d = 0; d < dim; d += 16)
      store(whole + d, min(max(round(load_bf16(x + d) / set1(scale)), set1(-127.0f)), set1(127.0f)));
  for (int d = 0; d < dim; ++d) levels[d] = (int8_t)whole[d];
  return scale;
}

// Tokens before this one in a layer's cache, where the tokens of a block and head lie together. Blocks are multiples of 16.
PAGODA_INLINE size_t place(const RopeArgs& a, int token, int head) {
  const size_t index = (size_t)a.kv_indices[token], size = (size_t)a.kv.block_size;
  return (index / size * a.kv.heads + head) * size + index % size;
}

static void write_key(const RopeArgs& a, int token, int head, const uint16_t* x) {
  const size_t at = place(a, token, head), lane = at % 16;
  const size_t group = (at - lane) * (a.kv.dim / 2);  // pairs before this group of 16 tokens
  if (a.kv.k_scales) {
    int8_t levels[256];
    a.kv.k_scales[at] = quantise(x, levels, a.kv.dim);
    int8_t* k = (int8_t*)a.kv.keys + 2 * group + lane;
    for (int d = 0; d < a.kv.dim; ++d) k[16 * (size_t)d] = levels[d];
    return;
  }
  uint32_t* k = (uint32_t*)a.kv.keys + group + lane;
  for (int d = 0; d < a.kv.dim / 2; ++d) memcpy(k + (size_t)d * 16, x + 2 * d, 4);
}

static void write_value(const RopeArgs& a, int token, int head, const uint16_t* x) {
  const size_t at = place(a, token, head), half = at % 2;
  const size_t pairs = (at - half) / 2 * a.kv.dim;  // before the pair of tokens this one is half of
  if (a.kv.v_scales) {
    int8_t levels[256];
    a.kv.v_scales[at] = quantise(x, levels, a.kv.dim);
    int8_t* v = (int8_t*)a.kv.values + 2 * pairs + 16 * half;
    for (int d = 0; d < a.kv.dim; d += 16) memcpy(v + 2 * (size_t)d, levels + d, 16);
    return;
  }
  // If the second of a pair is not written in this step, its half is cleared: what an earlier user left there must not
  // meet a probability of 0 as NaN.
  const bool alone = token + 1 == a.num_tokens || a.kv_indices[token + 1] != a.kv_indices[token] + 1;
  uint16_t* v = (uint16_t*)a.kv.values + 2 * pairs;
  for (int d = 0; d < a.kv.dim; ++d) {
    v[2 * d + half] = x[d];
    if (half == 0 && alone) v[2 * d + 1] = 0;
  }
}

static void rope_token(const RopeArgs& a, int token) {
  const uint16_t* row = a.qkv + (size_t)token * (a.heads + 2 * a.kv.heads) * a.kv.dim;
  uint16_t normed[256], turned[256];
  for (int h = 0; h < a.heads + a.kv.heads; ++h, row += a.kv.dim) {
    const uint16_t* x = row;
    if (a.norm) {
      normalise(x, a.norm + (size_t)h * a.kv.dim, normed, a.kv.dim, a.eps);
      x = normed;
    }
    uint16_t* y = h < a.heads ? a.q + ((size_t)token * a.heads + h) * a.kv.dim : turned;
    if (a.cos) {
      size_t line = (size_t)a.positions[token] * (a.kv.dim / 2);
      rotate(x, y, a.cos + line, a.sin + line, a.kv.dim);
    } else {
      memcpy(y, x, 2 * (size_t)a.kv.dim);
    }
    if (h >= a.heads) write_key(a, token, h - a.heads, turned);
  }
  for (int h = 0; h < a.kv.heads; ++h, row += a.kv.dim) write_value(a, token, h, row);
}

static void embed_row(const EmbedOp& op, int64_t token_id, const int64_t* positions, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.table + token_id * dim;
  uint16_t* y = op.y + row * dim;
  if (op.places) {
    const uint16_t* place = op.places + (size_t)positions[row] * dim;
    for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(x + d) * set1(op.scale) + load_bf16(place + d));
    return;
  }
  if (op.scale == 1.0f) {
    memcpy(y, x, 2 * (size_t)dim);
    return;
  }
  for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(x + d) * set1(op.scale));
}

}  // namespace PAGODA_NS
