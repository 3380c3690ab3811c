// All kernels at one instruction set level; compiled once per level with -DPAGODA_LEVEL=N -DPAGODA_NS=name and its flags.
#include "program.h"

#include <type_traits>

#include "attention.h"
#include "ceilings.h"
#include "pointwise.h"
#include "quant.h"
#include "sampling.h"

namespace PAGODA_NS {

// --- linear: p = x, panels, y, bias; i = n, k, activation, out_f32, weight bits (16: bf16, else a QuantForm), form ------

static QuantForm form_of(const Op& op) { return {op.i[4], op.i[5], op.i[6], op.i[7]}; }

// Rows of x, as the tiles read them, that stay in half of a 1 MiB L2 while all panels pass.
static int block_rows(const Op& op) {
  int row_bytes = op.i[1] * (int)(op.i[4] != 16 && op.i[5] == 8 ? LEVEL_BYTES : sizeof(Bf16::Left));
  int rows = (512 << 10) / row_bytes < BLOCK ? (512 << 10) / row_bytes : BLOCK;
  return rows < 4 * MAX_ROWS ? 4 * MAX_ROWS : rows / MAX_ROWS * MAX_ROWS;
}
static int num_panels(const Op& op) { return (op.i[0] + PANEL - 1) / PANEL; }
static int num_blocks(const Op& op, const Step& s) {
  int size = block_rows(op);
  return (s.num_tokens + size - 1) / size;
}

// Calls f(first row, last row, panel) for each piece.
template <typename F>
static void each_linear_item(const Op& op, const Step& s, int first, int last, F&& f) {
  int panels = num_panels(op), rows = s.num_tokens, blocks = num_blocks(op, s);
  for (int item = first; item < last; ++item) {
    int block = item / panels;
    f((int)((long)rows * block / blocks), (int)((long)rows * (block + 1) / blocks), item % panels);
  }
}

static void run_linear(const Op& op, const Step& s, uint64_t use, int first, int last) {
  static thread_local Inputs in;
  const uint16_t* x = (const uint16_t*)op.p[0];
  const Epilogue e{(const uint16_t*)op.p[3], op.i[2], op.i[3]};
  const int n = op.i[0], k = op.i[1];
  if (op.i[4] == 16) {
    const size_t words = (size_t)(k / 2) * PANEL;
    const LinearArgs a{in.left, op.p[2], k, n, e};
    each_linear_item(op, s, first, last, [&](int from, int to, int panel) {
      in.left.take(x, from, to, k, use);
      linear_panel(a, from, to, (const uint32_t*)op.p[1] + panel * words, panel * PANEL);
    });
    return;
  }
  const QuantArgs a{op.p[2], k, n, form_of(op), e};
  const size_t bytes = quant_panel_bytes(a.form, k);
  each_linear_item(op, s, first, last, [&](int from, int to, int panel) {
    quant_take(in, x, from, to, a, use);
    quant_panel(a, in, from, to, (const uint8_t*)op.p[1] + panel * bytes, panel * PANEL);
  });
}

// --- attention: p = q, k_cache, v_cache, out, sinks, k_scales, v_scales; i = heads, kv_heads, dim, block_size, window;
// f = scale, softcap ---------------------------------------------------------------------------------------------------

static AttentionArgs attention_args(const Op& op, const Step& s) {
  return {(const uint16_t*)op.p[0], op.p[1], op.p[2], (const float*)op.p[5], (const float*)op.p[6], (uint16_t*)op.p[3],
          s.block_tables, s.query_starts, s.context_lens, (const float*)op.p[4],
          s.max_blocks, op.i[3], op.i[0], op.i[1], op.i[2], op.i[4], op.f[0], op.f[1]};
}
static int row_items(const AttentionArgs& a, int row) {
  return items_per_head(a, row) * a.kv_heads;
}
// Too much for what every thread would have to have, so a thread takes it when it first attends.
struct OwnScratch {
  AttentionScratch* scratch = (AttentionScratch*)aligned_alloc(64, sizeof(AttentionScratch));
  ~OwnScratch() { free(scratch); }
};
static void run_attention(const Op& op, const Step& s, int first, int last) {
  static thread_local OwnScratch own;
  const AttentionArgs a = attention_args(op, s);
  int row = 0, before = 0;
  for (int item = first; item < last; ++item) {
    while (item >= before + row_items(a, row)) before += row_items(a, row++);
    attention_item(a, row, item - before, *own.scratch);
  }
}

// --- rope and cache write: p = qkv, q, k_cache, v_cache, cos, sin, norm, k_scales, v_scales; i = heads, kv_heads, dim,
// block_size; f = eps --------------------------------------------------------------------------------------------------

static void run_rope(const Op& op, const Step& s, int first, int last) {
  const RopeArgs a{(const uint16_t*)op.p[0], (uint16_t*)op.p[1], op.p[2], op.p[3], (float*)op.p[7], (float*)op.p[8],
                   (const float*)op.p[4], (const float*)op.p[5], (const float*)op.p[6], s.positions, s.kv_indices,
                   s.num_tokens, op.i[0], op.i[1], op.i[2], op.i[3], op.f[0]};
  for (int t = first; t < last; ++t) rope_token(a, t);
}

// --- the rest, one row at a time --------------------------------------------------------------------------------------

static void run_row(const Op& op, const Step& s, int r) {
  size_t row = (size_t)r;
  switch (op.kind) {
    case EMBED:  // p = table, y; i = dim; f = scale
      embed_row((const uint16_t*)op.p[0] + (size_t)s.token_ids[row] * op.i[0], (uint16_t*)op.p[1] + row * op.i[0],
                op.i[0], op.f[0]);
      break;
    case RMS_NORM: {  // p = x, residual, weight (float), y; i = dim; f = eps
      size_t at = row * op.i[0];
      uint16_t* residual = op.p[1] ? (uint16_t*)op.p[1] + at : nullptr;
      rms_norm_row((const uint16_t*)op.p[0] + at, residual, (const float*)op.p[2], (uint16_t*)op.p[3] + at, op.i[0],
                   op.f[0]);
      break;
    }
    default:
      break;
  }
}

static int items(const Op& op, const Step& s) {
  if (op.kind == LINEAR) return num_blocks(op, s) * num_panels(op);
  if (op.kind == ATTENTION) {
    const AttentionArgs a = attention_args(op, s);
    int total = 0;
    for (int row = 0; row < s.num_rows; ++row) total += row_items(a, row);
    return total;
  }
  return s.num_tokens;
}

static void run(const Op& op, const Step& s, uint64_t use, int first, int last) {
  switch (op.kind) {
    case LINEAR: run_linear(op, s, use, first, last); break;
    case ATTENTION: run_attention(op, s, first, last); break;
    case ROPE_KV: run_rope(op, s, first, last); break;
    default:
      for (int r = first; r < last; ++r) run_row(op, s, r);
  }
}

}  // namespace PAGODA_NS

#define PAGODA_TABLE_(name) pagoda_level_##name
#define PAGODA_TABLE(name) PAGODA_TABLE_(name)
extern const Level PAGODA_TABLE(PAGODA_NS) = {PAGODA_NS::items, PAGODA_NS::run, PAGODA_NS::pack_panel,
                                              PAGODA_NS::quant_panel_bytes, PAGODA_NS::pack_quant_panel,
                                              PAGODA_NS::sample, PAGODA_NS::peak, PAGODA_NS::read_all};
