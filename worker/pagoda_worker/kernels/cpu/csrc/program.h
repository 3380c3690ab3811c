// A model's step as a flat list of operations: recorded once, then run in one call per step with new inputs.
//
// Python mirrors these structs field by field (kernels/cpu/operations.py and library.py) and checks their sizes with
// `pagoda_sizes`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sample_call.h"

// How a quantised matrix is stored; see kernels/quantized.py.
struct QuantForm {
  int32_t bits;        // 8 or 4
  int32_t input_bits;  // 8: the input is rounded to 8 bits; 16: it stays bf16, only if `bits` is 4
  int32_t group;       // inputs that share scales, a multiple of 32
  int32_t levels;      // 0: the middle level is zero; 1: explicit zeros; 2: 4-bit floats, with exponents as scales; 3: minima,
                       // only with 4-bit levels and rounded input
};

// What one adapter adds to one linear layer [n, k]; rank 0: nothing.
struct LowSlot {
  const uint16_t* a;      // [rank, k] bf16
  const uint16_t* b;      // for each 16 outputs in turn: bf16 [ranks that they read, 16]
  const int32_t* groups;  // [outputs of the panels / 16, 3]: first rank that they read, number of ranks, offset in b / 16
  const float* scales;    // [rank]
  int64_t rank;
};
constexpr int LOW_HEAD = 16;
constexpr int MAX_DIM = 576;  // of a head

// What each operation reads and writes of a step's tokens. Pointers are never null unless noted.
struct EmbedOp {
  const uint16_t* table;  // [vocab, dim]
  uint16_t* y;            // [tokens, dim]
  int32_t dim;
  float scale;
};

struct RmsNormOp {
  const uint16_t* x;         // [tokens, dim]
  const uint16_t* residual;  // null, or added to x
  uint16_t* sum;             // x + residual, if there is a residual
  const float* weight;       // [dim]
  uint16_t* y;
  int32_t dim;
  float eps;
};

// In the order of `ops.ACTIVATIONS`; CLAMPED is for gated layers only.
enum Activation : int32_t { NO_ACTIVATION, SILU, GELU_TANH, GELU, RELU, CLAMPED };
constexpr float CLAMP = 7.0f, CLAMPED_GAIN = 1.702f;

struct LinearOp {
  const uint16_t* x;     // [tokens, k]
  const void* panels;    // see `pagoda_pack` and `pagoda_pack_quantized`
  void* y;               // [tokens, n], or [tokens, n / 2] for gate and up
  const uint16_t* bias;  // as long as the panels have columns, or null
  int32_t n, k;          // panels may have more columns than n
  int32_t activation;    // negative: of every output; positive: of gate, times up, columns 0..15 and 16..31 of a panel
  int32_t out_f32;       // whether y is float instead of bf16
  QuantForm form;        // 16 bits: weights are bf16
  float softcap;         // for float y: softcap * tanh(y / softcap); 0: none
  int32_t segments;      // of k, a power of two up to 8; each has an even number of inputs and whole groups: see segments.h
  const LowSlot* slots;  // what adapters add, or null; see low_rank.h
  const float* low;      // [tokens, LOW_HEAD + low_width], the output of ShrinkOp
  int32_t low_width;
  int32_t x_stride, y_stride;  // elements from one token to the next; 0: contiguous
  int32_t unused;
};

// A bf16 linear layer per head, each with its own part of x.
struct HeadsOp {
  const uint16_t* x;   // [tokens, heads, k]
  const void* panels;  // of all heads, as those of LinearOp
  uint16_t* y;         // [tokens, heads, n]
  int32_t heads, n, k, unused;
};

// The first low-rank product: inputs of a linear layer times `a` of their tokens' adapters. The layer adds the second.
struct ShrinkOp {
  const uint16_t* x;     // [tokens, k]
  const LowSlot* slots;
  float* low;            // [tokens, LOW_HEAD + width]: a token's slot as an int32 or -1, and from LOW_HEAD on its products
  int32_t k, width;      // width: a multiple of 16
};

// One layer's cache; see attention_cells.h.
struct LayerCache {
  void* keys;
  void* values;     // null: keys are also the values
  float* k_scales;  // null: the cache holds bf16
  float* v_scales;
  int32_t heads, dim, block_size;
  int32_t table;  // which of a step's block tables it uses
};

struct RopeKvOp {
  const uint16_t* qkv;  // [tokens, (heads + 2 kv.heads) * dim]; without values if keys are also the values
  uint16_t* q;          // [tokens, heads, dim]; may be null if heads are neither normed nor rotated: queries stay where they are
  LayerCache kv;
  const float* cos;     // [positions, dim / 2], or null: no rotation
  const float* sin;
  const float* norm;    // [heads + kv.heads, dim] or null
  int32_t heads;
  float eps;
  int32_t whole;        // the norm is over all query heads together, and over all key heads
  // If not null, qkv holds only queries, [tokens, heads * dim], and these make up the one key, which is also the value:
  // half of `turning`, half of `latent`, then the other halves.
  const uint16_t* latent;   // [tokens, dim - turns]
  const uint16_t* turning;  // [tokens, turns]
  int32_t turns, unused;
};

struct AttentionOp {
  const uint16_t* q;     // [tokens, heads, dim], a token every `q_stride` elements (0: contiguous)
  uint16_t* out;         // [tokens, heads * dim]
  LayerCache kv;
  const float* sinks;    // [heads] or null
  int32_t heads, window;  // window 0: none
  float scale, softcap;   // softcap 0: none
  const float* bias;      // [heads, stride], added to scores, indexed by key - query position + `zero`; or null. Read up to
                          // 64 entries beyond the last key. Needs as many kv heads as heads
  int32_t stride, zero;
  int32_t causal;  // 0: tokens also see later tokens, as far ahead as back
  int32_t q_stride;
};

struct LayerNormOp {
  const uint16_t* x;    // [tokens, dim]
  uint16_t* residual;   // null, or added to x and overwritten with the sum
  const float* weight;  // [dim]
  const float* bias;    // [dim] or null
  uint16_t* y;
  int32_t dim;
  float eps;
};

struct AddOp {
  const uint16_t* x;  // [tokens, dim], or a table with one line per position
  uint16_t* y;        // [tokens, dim], overwritten with the sum
  int32_t dim;
  int32_t by_position;
};

// Mixture of experts; see experts.h, also for what `order` holds.
struct RouteOp {
  const float* logits;  // [tokens, experts]
  int32_t* ids;         // [tokens, chosen]
  float* weights;       // [tokens, chosen]
  const float* favour;  // [experts], added to the scores, or null
  int32_t experts, chosen, renormalised, sigmoid;
  int32_t groups, chosen_groups, group_top;
  float scale;
};

struct SortOp {
  const int32_t* ids;
  int32_t* order;
  int32_t experts, chosen;
};

struct GatherOp {
  const uint16_t* x;  // [tokens, dim]
  const int32_t* order;
  uint16_t* y;        // [tokens * chosen, dim], grouped by expert
  int32_t dim, experts, chosen, unused;
};

struct ExpertsOp {
  const uint16_t* x;   // [tokens * chosen, k]
  const void* panels;  // of all experts, as those of LinearOp
  uint16_t* y;
  const int32_t* order;
  const uint16_t* bias;  // [experts, columns of the panels] or null
  int32_t n, k, activation, experts, chosen, unused;
  QuantForm form;
};

struct CombineOp {
  const uint16_t* products;  // [tokens * chosen, dim]
  const int32_t* order;
  const float* weights;
  const uint16_t* beside;  // [tokens, dim] or null
  const float* gate;       // [tokens], its sigmoid multiplies `beside`; or null
  uint16_t* y;             // [tokens, dim]
  int32_t dim, experts, chosen, unused;
};

enum Kind : int32_t { EMBED, RMS_NORM, LINEAR, ROPE_KV, ATTENTION, LAYER_NORM, ADD, ROUTE, SORT, GATHER, EXPERTS, COMBINE, SHRINK, HEADS };

// `joined`: this operation and the one before it may be fused, with no barrier in between. It then takes the earlier one's
// results as soon as they are there; apart from these, neither writes what the other reads or writes. A linear layer can be
// joined to the norm of its inputs, and the rotation of heads to the layer that computes them.
struct Op {
  int32_t kind, joined;
  union {
    EmbedOp embed;
    RmsNormOp rms_norm;
    LinearOp linear;
    RopeKvOp rope_kv;
    AttentionOp attention;
    LayerNormOp layer_norm;
    AddOp add;
    RouteOp route;
    SortOp sort;
    GatherOp gather;
    ExpertsOp experts;
    CombineOp combine;
    ShrinkOp shrink;
    HeadsOp heads;
  };
};

struct Step {
  int32_t num_tokens, num_rows, max_blocks, unused;
  const int64_t* token_ids;      // [num_tokens]
  const int64_t* positions;      // [num_tokens]
  const int64_t* kv_indices;     // [tables, num_tokens]
  const int32_t* block_tables;   // [tables, num_rows, max_blocks]
  const int32_t* query_starts;   // [num_rows + 1]
  const int32_t* context_lens;   // [num_rows]
  const int32_t* slots;          // [num_tokens] of adapters, -1: none; null if no token has one
};

// A matrix to be rounded to levels; see rounding.h.
struct Rounding {
  const void* weight;  // [n, k]
  int32_t dtype;       // of the weight: 0 bf16, 1 float16, 2 float32
  int32_t n, k, group, bits;
  uint8_t* levels;  // [n, k]
  float* scales;    // [n, k / group]
};

// A matrix [n, k] in levels, before it is packed.
struct QuantSource {
  QuantForm form;
  int32_t n, k;
  const uint8_t* levels;  // [n, k]
  const void* scales;     // [n, k / group] float32 (8 bits), float16 (4 bits) or exponents (floats, a byte)
  const uint8_t* zeros;   // [n, k / group], or null
  const uint16_t* minima;  // [n, k / group] float16, or null
};

// The number of independent pieces of a fused operation in a step, and the memory that its pieces share. For attention also
// the most splits of an item's keys per piece (0: items are not cut).
struct Cut {
  int pieces, splits;
  size_t floats, counters;
};

// Operations that are fused in one call of a program. `use` is a unique id: it tells a thread whether the data it kept from
// one piece is valid for the next.
struct Work {
  const Op* ops;
  int count;
  uint64_t use;
  Cut cut;
  float* floats;  // [cut.floats]
  int32_t* done;  // [cut.counters], zero before and after
};

// One instruction set level. `run` executes pieces [first, last) and may be called from any thread; `sample` executes pieces
// of one phase of sampling.
struct Level {
  Cut (*cut)(const Op* ops, int count, const Step&, int threads);
  void (*run)(const Step&, const Work&, int first, int last);
  void (*pack_panel)(const uint16_t* w, int n, int k, int panel, uint32_t* out);
  size_t (*quant_panel_bytes)(const QuantForm&, int k);
  void (*pack_quant_panel)(const QuantSource&, int panel, uint8_t* out);
  void (*round_rows)(const Rounding&, int first, int last);
  void (*sample)(const SampleCall&, int phase, int first, int last);
  double (*peak)(int kind, long rounds);  // see ceilings.h
  uint64_t (*read_all)(const char* data, size_t bytes);
};

extern const Level pagoda_level_base, pagoda_level_avx2, pagoda_level_avxvnni, pagoda_level_avx512, pagoda_level_avx512vnni,
    pagoda_level_avx512bf16, pagoda_level_amx;
