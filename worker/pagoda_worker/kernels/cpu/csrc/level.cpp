// All kernels at one instruction set level; compiled once per level with -DPAGODA_LEVEL=N -DPAGODA_NS=name and its flags.
#include "program.h"

#include <type_traits>

#include "ceilings.h"
#include "pointwise.h"
#include "quant.h"
#include "sampling.h"
#include "shares.h"

namespace PAGODA_NS {

#ifdef __AMX_BF16__
constexpr int ROWS_AT_ONCE = TILE_BLOCK;
#else
constexpr int ROWS_AT_ONCE = MAX_ROWS;
#endif
// Rows of x, as the tiles read them, that stay in half of a 1 MiB L2 while all panels pass.
static int block_rows(const LinearOp& op) {
  int row_bytes = op.k * (int)(op.form.bits != 16 && op.form.input_bits == 8 ? LEVEL_BYTES : sizeof(Bf16::Left));
  int rows = (512 << 10) / row_bytes < BLOCK ? (512 << 10) / row_bytes : BLOCK;
  return rows < 4 * ROWS_AT_ONCE ? 4 * ROWS_AT_ONCE : rows / ROWS_AT_ONCE * ROWS_AT_ONCE;
}
static int num_panels(const LinearOp& op) { return (op.n + PANEL - 1) / PANEL; }
static int num_blocks(const LinearOp& op, const Step& s) {
  int size = block_rows(op);
  return (s.num_tokens + size - 1) / size;
}

// Calls f(first row, last row, panel) for each piece.
template <typename F>
static void each_linear_item(const LinearOp& op, const Step& s, int first, int last, F&& f) {
  int panels = num_panels(op), rows = s.num_tokens, blocks = num_blocks(op, s);
  for (int item = first; item < last; ++item) {
    int block = item / panels;
    f((int)((long)rows * block / blocks), (int)((long)rows * (block + 1) / blocks), item % panels);
  }
}

static void run_linear(const LinearOp& op, const Step& s, uint64_t use, int first, int last) {
  static thread_local Inputs in;
  const bool plain = op.form.bits == 16;
  const size_t bytes = plain ? (size_t)(op.k / 2) * PANEL_ROW : quant_panel_bytes(op.form, op.k);
  each_linear_item(op, s, first, last, [&](int from, int to, int index) {
    const uint8_t* panel = (const uint8_t*)op.panels + index * bytes;
    if (plain) {
      in.left.take(op.x, from, to, op.k, use);
      linear_panel(op, in.left, from, to, (const uint32_t*)panel, index * PANEL);
    } else {
      quant_take(in, from, to, op, use);
      quant_panel(op, in, from, to, panel, index * PANEL);
    }
  });
}

static AttentionArgs attention_args(const Op& op, const Step& s) {
  return {op.attention, s.block_tables, s.query_starts, s.context_lens, s.max_blocks};
}
// Too much for what every thread would have to have, so a thread takes it when it first attends.
struct OwnScratch {
  AttentionScratch* scratch = (AttentionScratch*)aligned_alloc(64, sizeof(AttentionScratch));
  ~OwnScratch() { free(scratch); }
};
static void run_attention(const Op& op, const Step& s, const Work& work, int first, int last) {
  static thread_local OwnScratch own;
  attend_pieces(attention_args(op, s), work, first, last, *own.scratch);
}

static void run_rope(const Op& op, const Step& s, int first, int last) {
  const RopeArgs a{op.rope_kv, s.positions, s.kv_indices, s.num_tokens};
  for (int t = first; t < last; ++t) rope_token(a, t);
}

static Cut cut(const Op& op, const Step& s, int threads) {
  if (op.kind == LINEAR) return {num_blocks(op.linear, s) * num_panels(op.linear), 0, 0};
  if (op.kind == ATTENTION) return attention_cut(attention_args(op, s), s.num_rows, threads);
  return {s.num_tokens, 0, 0};
}

static void run(const Op& op, const Step& s, const Work& work, int first, int last) {
  switch (op.kind) {
    case EMBED: for (int t = first; t < last; ++t) embed_row(op.embed, s.token_ids[t], s.positions, t); break;
    case RMS_NORM: for (int t = first; t < last; ++t) rms_norm_row(op.rms_norm, t); break;
    case LAYER_NORM: for (int t = first; t < last; ++t) layer_norm_row(op.layer_norm, t); break;
    case LINEAR: run_linear(op.linear, s, work.use, first, last); break;
    case ROPE_KV: run_rope(op, s, first, last); break;
    case ATTENTION: run_attention(op, s, work, first, last); break;
    default: break;
  }
}

}  // namespace PAGODA_NS

#define PAGODA_TABLE_(name) pagoda_level_##name
#define PAGODA_TABLE(name) PAGODA_TABLE_(name)
extern const Level PAGODA_TABLE(PAGODA_NS) = {PAGODA_NS::cut, PAGODA_NS::run, PAGODA_NS::pack_panel,
                                              PAGODA_NS::quant_panel_bytes, PAGODA_NS::pack_quant_panel,
                                              PAGODA_NS::sample, PAGODA_NS::peak, PAGODA_NS::read_all};
