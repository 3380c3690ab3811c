// What happens to one token at a time: norms, rotary embedding with the write into the cache, activations, embedding.
//
// Roundings to bf16 stand where the op-by-op path has them, so that both can be compared closely.
#pragma once

#include "linear.h"

namespace PAGODA_NS {

// y = x / rms(x) * w; with `plus_one` (Gemma) * (1 + w). dim is a multiple of 16.
PAGODA_INLINE void normalise(const uint16_t* x, const uint16_t* w, uint16_t* y, int dim, float eps, int plus_one) {
  f16 squares = zero();
  for (int d = 0; d < dim; d += 16) {
    f16 v = load_bf16(x + d);
    squares = fma(v, v, squares);
  }
  f16 inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps));
  for (int d = 0; d < dim; d += 16) {
    f16 v = load_bf16(x + d) * inverse;
    f16 weight = load_bf16(w + d);
    store_bf16(y + d, plus_one ? v * (weight + set1(1.0f)) : rounded(v) * weight);
  }
}

// residual (if any) += x first, and the norm is of the sum.
static void rms_norm_row(const uint16_t* x, uint16_t* residual, const uint16_t* w, uint16_t* y, int dim, float eps,
                         int plus_one) {
  if (residual) {
    for (int d = 0; d < dim; d += 16) store_bf16(residual + d, load_bf16(x + d) + load_bf16(residual + d));
    x = residual;
  }
  normalise(x, w, y, dim, eps, plus_one);
}

struct RopeArgs {
  const uint16_t* qkv;       // [tokens, (heads + 2 kv_heads) * dim]
  uint16_t* q;               // [tokens, heads, dim]
  uint32_t* k_cache;         // see attention.h
  uint32_t* v_cache;
  const float* cos;          // [positions, rotary / 2]
  const float* sin;
  const int64_t* positions;  // [tokens]
  const int64_t* kv_indices; // [tokens]
  const uint16_t* q_norm;    // [dim] or null
  const uint16_t* k_norm;
  int num_tokens, heads, kv_heads, dim, rotary, block_size, plus_one;
  float eps;
};

// x[i], x[i + half] -> rotated by the angle of pair i; the rest passes.
PAGODA_INLINE void rotate(const uint16_t* x, uint16_t* y, const float* cos, const float* sin, int rotary, int dim) {
  int half = rotary / 2;
  for (int i = 0; i < half; i += 16) {
    f16 c = load(cos + i), s = load(sin + i), a, b;
    int n = half - i < 16 ? half - i : 16;
    a = load_some(x + i, n);
    b = load_some(x + half + i, n);
    f16 left = a * c - b * s, right = b * c + a * s;
    store_some(y + i, left, n);
    store_some(y + half + i, right, n);
  }
  if (rotary < dim) memcpy(y + rotary, x + rotary, 2 * (size_t)(dim - rotary));
}

static void rope_token(const RopeArgs& a, int token) {
  const uint16_t* row = a.qkv + (size_t)token * (a.heads + 2 * a.kv_heads) * a.dim;
  const float* cos = a.cos + (size_t)a.positions[token] * (a.rotary / 2);
  const float* sin = a.sin + (size_t)a.positions[token] * (a.rotary / 2);
  uint16_t normed[256], turned[256];
  for (int h = 0; h < a.heads + a.kv_heads; ++h, row += a.dim) {
    const uint16_t* x = row;
    const uint16_t* weight = h < a.heads ? a.q_norm : a.k_norm;
    if (weight) {
      normalise(x, weight, normed, a.dim, a.eps, a.plus_one);
      x = normed;
    }
    if (h < a.heads) {
      rotate(x, a.q + ((size_t)token * a.heads + h) * a.dim, cos, sin, a.rotary, a.dim);
      continue;
    }
    rotate(x, turned, cos, sin, a.rotary, a.dim);
    size_t block = (size_t)a.kv_indices[token] / a.block_size, offset = (size_t)a.kv_indices[token] % a.block_size;
    uint32_t* k = a.k_cache + ((block * a.kv_heads + (h - a.heads)) * (a.block_size / 16) + offset / 16) * (a.dim / 2) * 16;
    for (int d = 0; d < a.dim / 2; ++d) memcpy(k + (size_t)d * 16 + offset % 16, turned + 2 * d, 4);
  }
  // Two tokens share a pair. If the second is not written in this step, its half is cleared: what an earlier user left
  // there must not meet a probability of 0 as NaN.
  bool alone = token + 1 == a.num_tokens || a.kv_indices[token + 1] != a.kv_indices[token] + 1;
  for (int h = 0; h < a.kv_heads; ++h, row += a.dim) {
    size_t block = (size_t)a.kv_indices[token] / a.block_size, offset = (size_t)a.kv_indices[token] % a.block_size;
    uint16_t* v = (uint16_t*)(a.v_cache + ((block * a.kv_heads + h) * (a.block_size / 2) + offset / 2) * a.dim);
    for (int d = 0; d < a.dim; ++d) {
      v[2 * d + offset % 2] = row[d];
      if (offset % 2 == 0 && alone) v[2 * d + 1] = 0;
    }
  }
}

// gu: [2 * width] gate then up -> y: [width]
static void act_mul_row(const uint16_t* gate, const uint16_t* up, uint16_t* y, int width, int activation) {
  for (int i = 0; i < width; i += 16) {
    int n = width - i < 16 ? width - i : 16;
    f16 g = load_some(gate + i, n);
    store_some(y + i, rounded(activation == 1 ? silu(g) : gelu_tanh(g)) * load_some(up + i, n), n);
  }
}

static void embed_row(const uint16_t* table, uint16_t* y, int dim, float scale) {
  if (scale == 1.0f) {
    memcpy(y, table, 2 * (size_t)dim);
    return;
  }
  for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(table + d) * set1(scale));
}

}  // namespace PAGODA_NS
