// Per-token operations on the residual stream beyond those of Llama: LayerNorm, sums, learned positions.
//
// Values are rounded to bf16 at the same points as on the op-by-op path.
#pragma once

#include "program.h"
#include "simd.h"

namespace PAGODA_NS {

// y = (x - mean) / deviation * weight + bias; with a residual, x + residual takes the place of x and is stored as the new
// residual. The mean is subtracted before squares are summed, so that a large mean costs no precision.
static void layer_norm_row(const LayerNormOp& op, size_t row) {
  const int dim = op.dim;
  const uint16_t* x = op.x + row * dim;
  if (op.residual) {
    uint16_t* residual = op.residual + row * dim;
    for (int d = 0; d < dim; d += 16) store_bf16(residual + d, load_bf16(x + d) + load_bf16(residual + d));
    x = residual;
  }
  f16 total = zero();
  for (int d = 0; d < dim; d += 16) total = total + load_bf16(x + d);
  const f16 mean = set1(sum(total) / (float)dim);
  f16 squares = zero();
  for (int d = 0; d < dim; d += 16) {
    const f16 v = load_bf16(x + d) - mean;
    squares = fma(v, v, squares);
  }
  const f16 inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)dim + op.eps));
  uint16_t* y = op.y + row * dim;
  for (int d = 0; d < dim; d += 16) {
    const f16 normed = (load_bf16(x + d) - mean) * inverse * load(op.weight + d);
    store_bf16(y + d, op.bias ? normed + load(op.bias + d) : normed);
  }
}

// y += line `line` of the table.
static void add_row(const AddOp& op, size_t row, size_t line) {
  const uint16_t* x = op.x + line * op.dim;
  uint16_t* y = op.y + row * op.dim;
  for (int d = 0; d < op.dim; d += 16) store_bf16(y + d, load_bf16(x + d) + load_bf16(y + d));
}

}  // namespace PAGODA_NS
