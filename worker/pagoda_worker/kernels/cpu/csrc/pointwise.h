// Per-token operations: norms, rotary embedding fused with the write to the cache, embedding.
//
// Values are rounded to bf16 at the same points as on the op-by-op path, so that the two can be compared closely.
#pragma once

#include "linear.h"

namespace PAGODA_NS {

// 1 / rms(x); dim is a multiple of 16.
PAGODA_INLINE float inverse_rms(const uint16_t* x, int dim, float eps) {
  f16 squares = zero();
  for (int d = 0; d < dim; d += 16) {
    f16 v = load_bf16(x + d);
    squares = fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps);
}

// y = x * factor * w
PAGODA_INLINE void weighted(const uint16_t* x, float factor, const float* w, uint16_t* y, int dim) {
  f16 inverse = set1(factor);
  for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(x + d) * inverse * load(w + d));
}

PAGODA_INLINE void normalise(const uint16_t* x, const float* w, uint16_t* y, int dim, float eps) {
  weighted(x, inverse_rms(x, dim, eps), w, y, dim);
}

// Norms x, or x + residual, which is then also stored to `sum`.
PAGODA_INLINE void rms_norm_row(const RmsNormOp& op, int row, uint16_t* sum, uint16_t* y) {
  const size_t at = (size_t)row * op.dim;
  const uint16_t* x = op.x + at;
  if (op.residual) {
    const uint16_t* residual = op.residual + at;
    for (int d = 0; d < op.dim; d += 16) store_bf16(sum + d, load_bf16(x + d) + load_bf16(residual + d));
    x = sum;
  }
  normalise(x, op.weight, y, op.dim, op.eps);
}
static void rms_norm_row(const RmsNormOp& op, int row) {
  const size_t at = (size_t)row * op.dim;
  rms_norm_row(op, row, op.sum + at, op.y + at);
}

// Rows that a linear layer takes directly from its norm; each thread norms them for itself.
class NormedRows : public Kept {
 public:
  // Rows [first, last). `shared`: also stores them as the norm's results, which exactly one thread has to do.
  const uint16_t* take(const RmsNormOp& op, int first, int last, uint64_t use, bool shared) {
    if (holds(first, use) && (shared_ || !shared)) return rows_;
    shared_ = shared;
    const size_t dim = (size_t)op.dim;
    rows_ = (uint16_t*)reserve((size_t)(last - first + 1) * dim * sizeof *rows_);
    uint16_t *y = rows_, *spare = rows_ + (size_t)(last - first) * dim;
    for (int row = first; row < last; ++row, y += dim) {
      const size_t at = (size_t)row * dim;
      rms_norm_row(op, row, shared ? op.sum + at : spare, y);
      if (shared) memcpy(op.y + at, y, dim * sizeof *y);
    }
    hold(first, use);
    return rows_;
  }

 private:
  uint16_t* rows_ = nullptr;
  bool shared_ = false;
};

struct RopeArgs : RopeKvOp {
  const int64_t* positions;   // [tokens]
  const int64_t* kv_indices;  // [tokens]
  int num_tokens;
};

// Rotates dims i and i + dim / 2 by the angle of pair i.
PAGODA_INLINE void rotate(const uint16_t* x, uint16_t* y, const float* cos, const float* sin, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    int n = half - i < 16 ? half - i : 16;  // dim is a multiple of 16, half of it need not be
    f16 left = load_some(x + i, n), right = load_some(x + half + i, n);
    f16 c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(y + i, left * c - right * s, n);
    store_some(y + half + i, right * c + left * s, n);
  }
}

// x [dim] -> integers of magnitude at most 127 and their scale, as defined in kernels/kv_cache.py.
static float quantise(const uint16_t* x, int8_t* levels, int dim) {
  const float scale = largest_finite(x, dim) / 127.0f;
  float whole[MAX_DIM] = {};
  if (scale > 0.0f)
    for (int d = 0; d < dim; d += 16)
      store(whole + d, min(max(round(load_bf16(x + d) / set1(scale)), set1(-127.0f)), set1(127.0f)));
  for (int d = 0; d < dim; ++d) levels[d] = (int8_t)whole[d];
  return scale;
}

#if PAGODA_LEVEL >= 2
// 16 rows of 16 words, `stride` words apart -> [columns][16].
static void transpose(const uint32_t* x, size_t stride, int columns, uint32_t* to) {
  __m512i two[16], four[16];  // columns of two, then four rows, by lanes of 128 bits
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    const __m512i row = _mm512_loadu_si512(x + i * stride), next = _mm512_loadu_si512(x + (i + 1) * stride);
    two[i] = _mm512_unpacklo_epi32(row, next);
    two[i + 1] = _mm512_unpackhi_epi32(row, next);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int high = 0; high < 2; ++high) {
      four[i + 2 * high] = _mm512_unpacklo_epi64(two[i + high], two[i + high + 2]);
      four[i + 2 * high + 1] = _mm512_unpackhi_epi64(two[i + high], two[i + high + 2]);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even = _mm512_shuffle_i32x4(four[c], four[c + 4], 0x88), even_after = _mm512_shuffle_i32x4(four[c + 8], four[c + 12], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(four[c], four[c + 4], 0xdd), odd_after = _mm512_shuffle_i32x4(four[c + 8], four[c + 12], 0xdd);
    const __m512i column[] = {_mm512_shuffle_i32x4(even, even_after, 0x88), _mm512_shuffle_i32x4(odd, odd_after, 0x88),
                              _mm512_shuffle_i32x4(even, even_after, 0xdd), _mm512_shuffle_i32x4(odd, odd_after, 0xdd)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      if (c + 4 * i < columns) _mm512_storeu_si512(to + 16 * (c + 4 * i), column[i]);
  }
}
#endif

// This token's offset in a layer's cache, in tokens; those of a block and head are contiguous. Blocks are multiples of 16.
PAGODA_INLINE size_t place(const RopeArgs& a, int token, int head) {
  const size_t index = (size_t)a.kv_indices[token], size = (size_t)a.kv.block_size;
  return (index / size * a.kv.heads + head) * size + index % size;
}

static void write_key(const RopeArgs& a, int token, int head, const uint16_t* x) {
  const size_t at = place(a, token, head), lane = at % 16;
  if (a.kv.k_scales) {
    int8_t levels[MAX_DIM];
    a.kv.k_scales[at] = quantise(x, levels, a.kv.dim);
    uint32_t* k = (uint32_t*)a.kv.keys + (at - lane) * (a.kv.dim / 4) + lane;
    for (int d = 0; d < a.kv.dim / 4; ++d) memcpy(k + (size_t)d * 16, levels + 4 * d, 4);
    return;
  }
  uint32_t* k = (uint32_t*)a.kv.keys + (at - lane) * (a.kv.dim / 2) + lane;
  for (int d = 0; d < a.kv.dim / 2; ++d) memcpy(k + (size_t)d * 16, x + 2 * d, 4);
}

static void write_value(const RopeArgs& a, int token, int head, const uint16_t* x) {
  const size_t at = place(a, token, head);
  if (a.kv.v_scales) {
    int8_t levels[MAX_DIM];
    a.kv.v_scales[at] = quantise(x, levels, a.kv.dim);
    int8_t* v = (int8_t*)a.kv.values + at / 4 * 4 * a.kv.dim + at % 4;
    for (int d = 0; d < a.kv.dim; ++d) v[4 * (size_t)d] = levels[d];
    return;
  }
  // If the second token of a pair is not written in this step, its half is cleared: a NaN left there by an earlier row must
  // not be multiplied by a probability of 0.
  const size_t half = at % 2;
  const bool alone = token + 1 == a.num_tokens || a.kv_indices[token + 1] != a.kv_indices[token] + 1;
  uint16_t* v = (uint16_t*)a.kv.values + (at - half) * a.kv.dim;
  for (int d = 0; d < a.kv.dim; ++d) {
    v[2 * d + half] = x[d];
    if (half == 0 && alone) v[2 * d + 1] = 0;
  }
}

// The values of two tokens that are neighbours in the cache.
static void write_values(const RopeArgs& a, int token, int head, const uint16_t* x, const uint16_t* next) {
  uint32_t* v = (uint32_t*)a.kv.values + place(a, token, head) / 2 * a.kv.dim;
  for (int d = 0; d < a.kv.dim; ++d) v[d] = x[d] | (uint32_t)next[d] << 16;
}

PAGODA_INLINE int all_heads(const RopeKvOp& op) { return op.heads + (op.kv.values ? 2 : 1) * op.kv.heads; }

// The single key of a token, before rotation: see RopeKvOp.
PAGODA_INLINE const uint16_t* latent_key(const RopeArgs& a, int token, uint16_t* key) {
  const size_t turns = (size_t)a.turns / 2, still = (size_t)(a.kv.dim - a.turns) / 2;
  const uint16_t *turning = a.turning + token * 2 * turns, *latent = a.latent + token * 2 * still;
  for (int half = 0; half < 2; ++half, key += turns + still) {
    memcpy(key, turning + half * turns, 2 * turns);
    memcpy(key + turns, latent + half * still, 2 * still);
  }
  return key - a.kv.dim;
}

// One head of a token as it comes out of the linear layer.
PAGODA_INLINE const uint16_t* head_input(const RopeArgs& a, int token, int head) {
  return a.qkv + ((size_t)token * all_heads(a) + head) * (size_t)a.kv.dim;
}

// x, a query or key head of a token, normed and rotated -> y. `whole`: see rope_head.
static void turn_head(const RopeArgs& a, int token, int head, const uint16_t* x, uint16_t* y, const float* whole = nullptr) {
  const size_t dim = (size_t)a.kv.dim;
  uint16_t normed[MAX_DIM];
  if (a.norm) {
    const float inverse = whole ? whole[head >= a.heads] : inverse_rms(x, a.kv.dim, a.eps);
    weighted(x, inverse, a.norm + head * dim, normed, a.kv.dim);
    x = normed;
  }
  if (!a.cos) {
    memcpy(y, x, 2 * dim);
    return;
  }
  const size_t line = (size_t)a.positions[token] * (dim / 2);
  rotate(x, y, a.cos + line, a.sin + line, a.kv.dim);
}

#if PAGODA_LEVEL >= 2
// The keys of 16 tokens that are neighbours in the cache.
static void write_keys(const RopeArgs& a, int token, int head) {
  alignas(64) uint32_t turned[16][MAX_DIM / 2];
  const int words = a.kv.dim / 2;
  uint32_t* k = (uint32_t*)a.kv.keys + place(a, token, head - a.heads) * words;
  const uint32_t* x = turned[0];
  size_t stride = MAX_DIM / 2;
  if (a.norm || a.cos || !a.kv.values) {
    for (int i = 0; i < 16; ++i) turn_head(a, token + i, head, head_input(a, token + i, head), (uint16_t*)turned[i]);
  } else {  // a line may reach 8 words past the last key, into the values
    x = (const uint32_t*)head_input(a, token, head);
    stride = (size_t)all_heads(a) * words;
  }
  for (int d = 0; d < words; d += 16) transpose(x + d, stride, words - d, k + (size_t)d * 16);
}
#endif

// Processes one head of a token: query, key or value heads, in this order. `whole`: the inverse rms of all query heads and
// that of all key heads, if these are normed together.
static void rope_head(const RopeArgs& a, int token, int head, const float* whole = nullptr) {
  if (!a.q && head < a.heads) return;
  const size_t dim = (size_t)a.kv.dim;
  uint16_t made[MAX_DIM], turned[MAX_DIM];
  const uint16_t* x = !a.latent ? head_input(a, token, head)
                      : head < a.heads ? a.qkv + ((size_t)token * a.heads + head) * dim
                                       : latent_key(a, token, made);
  if (head >= a.heads + a.kv.heads) return write_value(a, token, head - a.heads - a.kv.heads, x);
  turn_head(a, token, head, x, head < a.heads ? a.q + ((size_t)token * a.heads + head) * dim : turned, whole);
  if (head >= a.heads) write_key(a, token, head - a.heads, turned);
}

// Whether tokens [token, token + count) are neighbours in the cache, the first of them at a multiple of `count`.
PAGODA_INLINE bool side_by_side(const RopeArgs& a, int token, int count) {
  const int64_t* index = a.kv_indices + token;
  if (index[0] % count) return false;
  for (int i = 1; i < count; ++i)
    if (index[i] != index[0] + i) return false;
  return true;
}

// Processes a head of tokens [from, to). Tokens that are neighbours in the cache share its words, so their keys or values
// are written together instead of word by word.
static void rope_heads(const RopeArgs& a, int from, int to, int head) {
  const int value = head - a.heads - a.kv.heads;
  const bool together = !a.latent && !a.kv.k_scales;
  for (int t = from; t < to;) {
    if (together && value >= 0 && t + 2 <= to && side_by_side(a, t, 2)) {
      write_values(a, t, value, head_input(a, t, head), head_input(a, t + 1, head));
      t += 2;
      continue;
    }
#if PAGODA_LEVEL >= 2
    if (together && value < 0 && head >= a.heads && t + 16 <= to && side_by_side(a, t, 16)) {
      write_keys(a, t, head);
      t += 16;
      continue;
    }
#endif
    rope_head(a, t++, head);
  }
}

static void rope_token(const RopeArgs& a, int token) {
  float whole[2];
  if (a.whole) {
    const uint16_t* queries = a.qkv + (size_t)token * all_heads(a) * a.kv.dim;
    whole[0] = inverse_rms(queries, a.heads * a.kv.dim, a.eps);
    whole[1] = inverse_rms(queries + (size_t)a.heads * a.kv.dim, a.kv.heads * a.kv.dim, a.eps);
  }
  for (int head = 0; head < all_heads(a); ++head) rope_head(a, token, head, a.whole ? whole : nullptr);
}

static void embed_row(const EmbedOp& op, int64_t token_id, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.table + token_id * dim;
  uint16_t* y = op.y + row * dim;
  if (op.scale == 1.0f) {
    memcpy(y, x, 2 * (size_t)dim);
    return;
  }
  for (int d = 0; d < dim; d += 16) store_bf16(y + d, load_bf16(x + d) * set1(op.scale));
}

}  // namespace PAGODA_NS
