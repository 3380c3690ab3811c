// Per-token operations on the residual stream beyond those of Llama: LayerNorm, sums, learned positions.
//
// Values are rounded to bf16 at the same points as on the op-by-op path.
#pragma once

#include "program.h"
#include "simd.h"

namespace PAGODA_NS {

// y = (x - mean) / deviation * weight + bias; with a residual, x + residual takes the place of x and is stored as the new
// residual. The mean is subtracted before squares are summed, so that a large mean costs no precision.
// Of N rows at once, because the chains of one alone leave the arithmetic idle.
template <int N>
static void layer_norm_rows(const LayerNormOp& op, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.x + row * dim;
  if (op.residual) {
    uint16_t* residual = op.residual + row * dim;
    for (int d = 0; d < N * dim; d += 16) store_bf16(residual + d, load_bf16(x + d) + load_bf16(residual + d));
    x = residual;
  }
  f16 total[N], mean[N], squares[N], inverse[N];
  for (int n = 0; n < N; ++n) total[n] = squares[n] = zero();
  for (int d = 0; d < dim; d += 16)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) total[n] = total[n] + load_bf16(x + n * dim + d);
  for (int n = 0; n < N; ++n) mean[n] = set1(sum(total[n]) / (float)dim);
  for (int d = 0; d < dim; d += 16)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const f16 v = load_bf16(x + n * dim + d) - mean[n];
      squares[n] = fma(v, v, squares[n]);
    }
  for (int n = 0; n < N; ++n) inverse[n] = set1(1.0f / __builtin_sqrtf(sum(squares[n]) / (float)dim + op.eps));
  uint16_t* y = op.y + row * dim;
  for (int d = 0; d < dim; d += 16)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const f16 normed = (load_bf16(x + n * dim + d) - mean[n]) * inverse[n] * load(op.weight + d);
      store_bf16(y + n * dim + d, op.bias ? normed + load(op.bias + d) : normed);
    }
}

static void layer_norm_rows(const LayerNormOp& op, int first, int last) {
  for (; first + 4 <= last; first += 4) layer_norm_rows<4>(op, (size_t)first);
  for (; first < last; ++first) layer_norm_rows<1>(op, (size_t)first);
}

// y += line `line` of the table.
static void add_row(const AddOp& op, size_t row, size_t line) {
  const uint16_t* x = op.x + line * op.dim;
  uint16_t* y = op.y + row * op.dim;
  for (int d = 0; d < op.dim; d += 16) store_bf16(y + d, load_bf16(x + d) + load_bf16(y + d));
}

}  // namespace PAGODA_NS
