// All kernels at one instruction set level; compiled once per level with -DPAGODA_LEVEL=N -DPAGODA_NS=name and its flags.
#include "program.h"

#include <type_traits>

#include "ceilings.h"
#include "experts.h"
#include "pointwise.h"
#include "quant.h"
#include "rounding.h"
#include "sampling.h"
#include "shares.h"
#include "stream.h"

namespace PAGODA_NS {

#ifdef __AMX_BF16__
constexpr int ROWS_AT_ONCE = TILE_BLOCK;
constexpr int ROWS_OF_GROUPS = 4 * TILE_BLOCK;  // for small groups: the sums of so many rows fit in the first-level cache
#else
constexpr int ROWS_AT_ONCE = MAX_ROWS;
constexpr int ROWS_OF_GROUPS = BLOCK;
#endif
// Where panels are widened once for a block, it should not be too small.
constexpr int LEAST_ROWS = (PAGODA_LEVEL == 1 ? 10 : 4) * ROWS_AT_ONCE;
// Rows of x, in the form that tiles read, that stay in half of a 1 MiB L2 cache while all panels pass.
static int block_rows(const LinearOp& op) {
  int row_bytes = op.k * (int)(op.form.bits != 16 && op.form.input_bits == 8 ? LEVEL_BYTES : sizeof(Bf16::Left));
  const int most = op.form.bits == 4 ? ROWS_OF_GROUPS : BLOCK;
  int rows = (512 << 10) / row_bytes < most ? (512 << 10) / row_bytes : most;
  return rows < LEAST_ROWS ? LEAST_ROWS : rows / ROWS_AT_ONCE * ROWS_AT_ONCE;
}
static int num_panels(const LinearOp& op) { return (op.n + PANEL - 1) / PANEL; }
static int num_blocks(const LinearOp& op, const Step& s) {
  int size = block_rows(op);
  return (s.num_tokens + size - 1) / size;
}

// A piece of a linear layer: rows [from, to), which are block number `block`, by a panel.
struct Piece {
  int block, from, to, panel;
};
PAGODA_INLINE Piece piece_of(const LinearOp& op, const Step& s, int item) {
  const int panels = num_panels(op), blocks = num_blocks(op, s), block = item / panels;
  return {block, (int)((long)s.num_tokens * block / blocks), (int)((long)s.num_tokens * (block + 1) / blocks), item % panels};
}

// The operations a linear layer is fused with.
struct Around {
  const RmsNormOp* norm;   // of its inputs, or null
  const RopeKvOp* rope;    // of its outputs, or null
};
static Around around(const Work& w) {
  const Op &first = w.ops[0], &last = w.ops[w.count - 1];
  return {first.kind == RMS_NORM ? &first.rms_norm : nullptr, last.kind == ROPE_KV ? &last.rope_kv : nullptr};
}
static const LinearOp& linear_of(const Work& w) { return w.ops[w.ops[0].kind == RMS_NORM].linear; }

static RopeArgs rope_args(const RopeKvOp& op, const Step& s) {
  return {op, s.positions, s.kv_indices + (size_t)op.kv.table * s.num_tokens, s.num_tokens};
}

// After a piece: rotates or writes the heads that the piece completed, for the rows of the block.
static void finish_heads(const RopeArgs& a, const LinearOp& op, const Piece& p, int32_t* done) {
  const int dim = a.kv.dim, begin = p.panel * PANEL, end = begin + PANEL < op.n ? begin + PANEL : op.n;
  for (int head = begin / dim; head * dim < end; ++head) {
    const int panels = ((head + 1) * dim - 1) / PANEL - head * dim / PANEL + 1;
    int32_t* parts = done + (size_t)p.block * all_heads(a) + head;
    if (__atomic_add_fetch(parts, 1, __ATOMIC_ACQ_REL) < panels) continue;
    *parts = 0;  // for the next operation
    rope_heads(a, p.from, p.to, head);
  }
}

// Rows [from, to), the first of which is at x, through a panel; `matrix` is the first panel.
PAGODA_INLINE void run_panel(Inputs& in, const LinearOp& op, const void* matrix, const uint16_t* x, const Piece& p, uint64_t use) {
  if (op.slots) fetch_expansion(op, p.from, p.to, p.panel * PANEL);
  if (op.form.bits == 16) {
    const uint8_t* panel = (const uint8_t*)matrix + p.panel * ((size_t)(op.k / 2) * PANEL_ROW);
    linear_take(in.left, x, p.from, p.to, op, use);
    linear_panel(op, in.left, p.from, p.to, (const uint32_t*)panel, p.panel * PANEL);
  } else {
    const uint8_t* panel = (const uint8_t*)matrix + p.panel * quant_panel_bytes(op.form, op.k);
    quant_take(in, x, p.from, p.to, op, use);
    quant_panel(op, in, p.from, p.to, panel, p.panel * PANEL);
  }
}

// The thread with the first panel of a block also stores the normed rows where later operations read them.
static void run_linear(const Step& s, const Work& work, int first, int last) {
  static thread_local Inputs in;
  const LinearOp& op = linear_of(work);
  const auto [norm, rope] = around(work);
  for (int item = first; item < last; ++item) {
    const Piece p = piece_of(op, s, item);
    const uint16_t* x = norm ? in.normed.take(*norm, p.from, p.to, work.use, p.panel == 0) : op.x + (size_t)p.from * op.k;
    run_panel(in, op, op.panels, x, p, work.use);
    if (rope) finish_heads(rope_args(*rope, s), op, p, work.done);
  }
}

static Cut linear_cut(const LinearOp& op, const RopeKvOp* rope, const Step& s) {
  const size_t blocks = (size_t)num_blocks(op, s);
  return {(int)blocks * num_panels(op), 0, 0, rope ? blocks * all_heads(*rope) : 0};
}

static LinearOp linear_of(const ExpertsOp& op) {
  LinearOp linear{};
  linear.x = op.x;
  linear.panels = op.panels;
  linear.y = op.y;
  linear.n = op.n;
  linear.k = op.k;
  linear.activation = op.activation;
  linear.form = op.form;
  linear.segments = 1;
  return linear;
}

// At least as many pieces as the experts with rows have panels: which experts these are is not yet known when work is cut.
static int expert_pieces(const ExpertsOp& op, const Step& s) {
  const long rows = (long)s.num_tokens * op.chosen;
  return (int)(rows < op.experts ? rows : op.experts) * num_panels(linear_of(op));
}

static void run_experts(const ExpertsOp& op, uint64_t use, int first, int last) {
  static thread_local Inputs in;
  LinearOp linear = linear_of(op);
  const Order order(op.order, op.experts);
  const int panels = num_panels(linear), size = block_rows(linear);
  const size_t bytes = (size_t)panels * (op.form.bits == 16 ? (size_t)(op.k / 2) * PANEL_ROW : quant_panel_bytes(op.form, op.k));
  for (int item = first; item < last && item / panels < order.busy; ++item) {
    const int expert = item / panels, start = order.starts[expert], rows = order.starts[expert + 1] - start;
    const uint8_t* matrix = (const uint8_t*)op.panels + order.experts[expert] * bytes;
    if (op.bias) linear.bias = op.bias + (size_t)order.experts[expert] * panels * PANEL;
    const int blocks = (rows + size - 1) / size;
    for (int b = 0; b < blocks; ++b) {
      const int from = start + (int)((long)rows * b / blocks), to = start + (int)((long)rows * (b + 1) / blocks);
      run_panel(in, linear, matrix, op.x + (size_t)from * op.k, {b, from, to, item % panels}, use);
    }
  }
}

// One head as a linear layer, whose pieces are the head's.
static LinearOp linear_of(const HeadsOp& op, int head, size_t panel_bytes) {
  LinearOp linear{};
  linear.x = op.x + head * op.k;
  linear.panels = (const uint8_t*)op.panels + head * panel_bytes;
  linear.y = op.y + head * op.n;
  linear.n = op.n;
  linear.k = op.k;
  linear.form = {16, 16, 0, 0};
  linear.segments = 1;
  linear.x_stride = op.heads * op.k;
  linear.y_stride = op.heads * op.n;
  return linear;
}
static size_t head_bytes(const HeadsOp& op) { return (size_t)((op.n + PANEL - 1) / PANEL) * (op.k / 2) * PANEL_ROW; }

static int head_pieces(const HeadsOp& op, const Step& s) {
  const LinearOp linear = linear_of(op, 0, 0);
  return num_blocks(linear, s) * num_panels(linear);
}

static void run_heads(const HeadsOp& op, const Step& s, uint64_t use, int first, int last) {
  static thread_local Inputs in;
  const int pieces = head_pieces(op, s);
  for (int item = first; item < last; ++item) {
    const int head = item / pieces;
    const LinearOp linear = linear_of(op, head, head_bytes(op));
    const Piece p = piece_of(linear, s, item % pieces);
    const uint64_t own = use + ((uint64_t)(head + 1) << 48);  // kept rows belong to one head
    run_panel(in, linear, linear.panels, linear.x + (size_t)p.from * linear.x_stride, p, own);
  }
}

static AttentionArgs attention_args(const Op& op, const Step& s) {
  const int32_t* tables = s.block_tables + (size_t)op.attention.kv.table * s.num_rows * s.max_blocks;
  return {op.attention, tables, s.query_starts, s.context_lens, s.max_blocks};
}
// Too large to allocate for every thread, so a thread allocates it when it first computes attention.
struct OwnScratch {
  AttentionScratch* scratch = (AttentionScratch*)aligned_alloc(64, sizeof(AttentionScratch));
  ~OwnScratch() { free(scratch); }
};
static void run_attention(const Op& op, const Step& s, const Work& work, int first, int last) {
  static thread_local OwnScratch own;
  attend_pieces(attention_args(op, s), work, first, last, *own.scratch);
}

static void run_rope(const Op& op, const Step& s, int first, int last) {
  const RopeArgs a = rope_args(op.rope_kv, s);
  for (int t = first; t < last; ++t) rope_token(a, t);
}

// Operations fused with a linear layer run as a linear layer.
static Kind kind_of(const Op* ops, int count) { return count > 1 ? LINEAR : (Kind)ops->kind; }

static Cut cut(const Op* ops, int count, const Step& s, int threads) {
  const Work work{ops, count, 0, {}, nullptr, nullptr};
  switch (kind_of(ops, count)) {
    case LINEAR: return linear_cut(linear_of(work), around(work).rope, s);
    case ATTENTION: return attention_cut(attention_args(*ops, s), s.num_rows, threads);
    case SORT: return {1, 0, 0, 0};
    case SHRINK: return {shrink_pieces(ops->shrink, s), 0, 0, 0};
    case EXPERTS: return {expert_pieces(ops->experts, s), 0, 0, 0};
    case HEADS: return {ops->heads.heads * head_pieces(ops->heads, s), 0, 0, 0};
    default: return {s.num_tokens, 0, 0, 0};
  }
}

static void run(const Step& s, const Work& work, int first, int last) {
  const Op& op = *work.ops;
  switch (kind_of(&op, work.count)) {
    case EMBED: for (int t = first; t < last; ++t) embed_row(op.embed, s.token_ids[t], t); break;
    case RMS_NORM: for (int t = first; t < last; ++t) rms_norm_row(op.rms_norm, t); break;
    case LINEAR: run_linear(s, work, first, last); break;
    case ROPE_KV: run_rope(op, s, first, last); break;
    case ATTENTION: run_attention(op, s, work, first, last); break;
    case LAYER_NORM: layer_norm_rows(op.layer_norm, first, last); break;
    case ADD: for (int t = first; t < last; ++t) add_row(op.add, t, op.add.by_position ? (size_t)s.positions[t] : t); break;
    case ROUTE: for (int t = first; t < last; ++t) route_row(op.route, t); break;
    case SORT: sort_tokens(op.sort, s.num_tokens); break;
    case GATHER: for (int t = first; t < last; ++t) gather_row(op.gather, t); break;
    case EXPERTS: run_experts(op.experts, work.use, first, last); break;
    case HEADS: run_heads(op.heads, s, work.use, first, last); break;
    case COMBINE: for (int t = first; t < last; ++t) combine_row(op.combine, t); break;
    case SHRINK: for (int i = first; i < last; ++i) shrink_piece(op.shrink, s, i); break;
    default: break;
  }
}

}  // namespace PAGODA_NS

#define PAGODA_TABLE_(name) pagoda_level_##name
#define PAGODA_TABLE(name) PAGODA_TABLE_(name)
extern const Level PAGODA_TABLE(PAGODA_NS) = {PAGODA_NS::cut, PAGODA_NS::run, PAGODA_NS::pack_panel,
                                              PAGODA_NS::quant_panel_bytes, PAGODA_NS::pack_quant_panel, PAGODA_NS::round_rows,
                                              PAGODA_NS::sample, PAGODA_NS::peak, PAGODA_NS::read_all};
