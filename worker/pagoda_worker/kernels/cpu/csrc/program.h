// A model's step as a flat list of operations: recorded once, then run in one call with new inputs.
//
// Python mirrors these structs field by field (kernels/cpu/operations.py and library.py); `pagoda_sizes` lets it check that
// it does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sample_call.h"

// How a matrix of small whole numbers is stored; see kernels/quantized.py.
struct QuantForm {
  int32_t bits;        // 8 or 4
  int32_t input_bits;  // 8: the input is rounded to so many; 16: it is taken as bf16, with 4 bits only
  int32_t group;       // inputs that share scales, a multiple of 32
  int32_t levels;      // 0: the middle level is zero; 1: zeros of their own; 2: of 4 bits, floats, and scales are exponents
};

// What one adapter adds to one linear layer [n, k]; rank 0: nothing.
struct LowSlot {
  const uint16_t* a;      // [rank, k] bf16
  const uint16_t* b;      // of 16 outputs after the other: bf16 [ranks that they read, 16]
  const int32_t* groups;  // [outputs of the panels / 16, 3]: first of the ranks that they read, how many, where in b / 16
  const float* scales;    // [rank]
  int64_t rank;
};
constexpr int LOW_HEAD = 16;
constexpr int MAX_DIM = 576;  // of a head

// What each operation reads and writes of a step's tokens. Pointers are never null unless that is said.
struct EmbedOp {
  const uint16_t* table;  // [vocab, dim]
  uint16_t* y;            // [tokens, dim]
  int32_t dim;
  float scale;
};

struct RmsNormOp {
  const uint16_t* x;         // [tokens, dim]
  const uint16_t* residual;  // null, or added to x
  uint16_t* sum;             // what that comes to, if there is a residual
  const float* weight;       // [dim]
  uint16_t* y;
  int32_t dim;
  float eps;
};

// What is made of outputs: in the order of `ops.ACTIVATIONS`; CLAMPED is of gates alone.
enum Activation : int32_t { NO_ACTIVATION, SILU, GELU_TANH, GELU, RELU, CLAMPED };
constexpr float CLAMP = 7.0f, CLAMPED_GAIN = 1.702f;

struct LinearOp {
  const uint16_t* x;     // [tokens, k]
  const void* panels;    // see `pagoda_pack` and `pagoda_pack_quantized`
  void* y;               // [tokens, n], or [tokens, n / 2] of gate and up
  const uint16_t* bias;  // as long as the panels have columns, or null
  int32_t n, k;          // panels may have more columns than n
  int32_t activation;    // of every output, if negative; positive: of gate, times up, columns 0..15 and 16..31 of a panel
  int32_t out_f32;       // y is float, else bf16
  QuantForm form;        // 16 bits: weights are bf16
  float softcap;         // of float y: softcap * tanh(y / softcap), or 0
  int32_t segments;      // of k, a power of two up to 8; each has an even number of inputs and whole groups. See segments.h
  const LowSlot* slots;  // what adapters add, or null; see low_rank.h
  const float* low;      // [tokens, LOW_HEAD + low_width], as ShrinkOp makes it
  int32_t low_width;
  int32_t x_stride, y_stride;  // numbers from one token's to the next's; 0: they lie together
  int32_t unused;
};

// A linear layer for each head: bf16, each with its own part of x.
struct HeadsOp {
  const uint16_t* x;   // [tokens, heads, k]
  const void* panels;  // of all heads, as those of LinearOp
  uint16_t* y;         // [tokens, heads, n]
  int32_t heads, n, k, unused;
};

// What the adapters of the step's tokens make of the inputs of a linear layer, which then adds the rest.
struct ShrinkOp {
  const uint16_t* x;     // [tokens, k]
  const LowSlot* slots;
  float* low;            // [tokens, LOW_HEAD + width]: the slot of a token as an int32 or -1, and from LOW_HEAD on its numbers
  int32_t k, width;      // width: a multiple of 16
};

// One layer's cache; see attention_cells.h.
struct LayerCache {
  void* keys;
  void* values;     // null: keys are values, too
  float* k_scales;  // null: the cache holds bf16
  float* v_scales;
  int32_t heads, dim, block_size;
  int32_t table;  // by which of a step's block tables it goes
};

struct RopeKvOp {
  const uint16_t* qkv;  // [tokens, (heads + 2 kv.heads) * dim], or without values where keys are these
  uint16_t* q;          // [tokens, heads, dim]
  LayerCache kv;
  const float* cos;     // [positions, dim / 2], or null: no rotation
  const float* sin;
  const float* norm;    // [heads + kv.heads, dim] or null
  int32_t heads;
  float eps;
  int32_t whole;        // the norm is over all query heads together, and over all key heads
  // Or null: then qkv holds queries alone, [tokens, heads * dim], and the one key is made of these, which is its value, too:
  // half of `turning`, half of `latent`, and the other halves.
  const uint16_t* latent;   // [tokens, dim - turns]
  const uint16_t* turning;  // [tokens, turns]
  int32_t turns, unused;
};

struct AttentionOp {
  const uint16_t* q;     // [tokens, heads, dim]
  uint16_t* out;         // [tokens, heads * dim]
  LayerCache kv;
  const float* sinks;    // [heads] or null
  int32_t heads, window;  // window 0: none
  float scale, softcap;   // softcap 0: none
  const float* bias;      // [heads, stride], added to a score by how far its key is from the query (entry `zero`: not at
                          // all), or null; read up to 64 places behind the last key. As many kv heads as heads then
  int32_t stride, zero;
  int32_t causal, unused;  // 0: tokens see what comes after them, too, as far as what comes before
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
  const uint16_t* x;  // [tokens, dim], or of positions a line each
  uint16_t* y;        // [tokens, dim], overwritten with the sum
  int32_t dim;
  int32_t by_position;
};

// Mixture of experts; see experts.h, also for what `order` holds.
struct RouteOp {
  const float* logits;  // [tokens, experts]
  int32_t* ids;         // [tokens, chosen]
  float* weights;       // [tokens, chosen]
  const float* favour;  // [experts], of sigmoids, or null
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
  uint16_t* y;        // [tokens * chosen, dim], those of an expert together
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
  const float* gate;       // [tokens], beside is times its sigmoid, or null
  uint16_t* y;             // [tokens, dim]
  int32_t dim, experts, chosen, unused;
};

enum Kind : int32_t { EMBED, RMS_NORM, LINEAR, ROPE_KV, ATTENTION, LAYER_NORM, ADD, ROUTE, SORT, GATHER, EXPERTS, COMBINE, SHRINK, HEADS };

// `joined`: this operation and the one before it may be done as one, by threads that do not wait for each other in between.
// What it takes from that one it then takes as soon as it is there; otherwise neither writes what the other reads or writes.
// A linear layer can be joined to the norm of its inputs, and the rotation of heads to the layer that makes them.
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
  const int32_t* slots;          // [num_tokens] of adapters, -1 for none; null where no token has one
};

// A matrix [n, k] in levels, before it is packed.
struct QuantSource {
  QuantForm form;
  int32_t n, k;
  const uint8_t* levels;  // [n, k]
  const void* scales;     // [n, k / group] float32 (8 bits), float16 (4 bits) or exponents (floats, a byte)
  const uint8_t* zeros;   // [n, k / group], or null
};

// Into how many independent pieces operations fall for a step, and what memory the pieces need in common. Of attention
// also: how many splits of an item's keys a piece has at most (0: items are not cut).
struct Cut {
  int pieces, splits;
  size_t floats, counters;
};

// Operations that are done as one in one call of a program. `use` stands for them and is never used again: what a thread
// keeps from one of its pieces for the next goes by it.
struct Work {
  const Op* ops;
  int count;
  uint64_t use;
  Cut cut;
  float* floats;  // [cut.floats]
  int32_t* done;  // [cut.counters] zeros, before and after
};

// One instruction set level. `run` does pieces [first, last) and may be called from any thread. `sample` does pieces of one
// phase of sampling.
struct Level {
  Cut (*cut)(const Op* ops, int count, const Step&, int threads);
  void (*run)(const Step&, const Work&, int first, int last);
  void (*pack_panel)(const uint16_t* w, int n, int k, int panel, uint32_t* out);
  size_t (*quant_panel_bytes)(const QuantForm&, int k);
  void (*pack_quant_panel)(const QuantSource&, int panel, uint8_t* out);
  void (*sample)(const SampleCall&, int phase, int first, int last);
  double (*peak)(int kind, long rounds);  // see ceilings.h
  uint64_t (*read_all)(const char* data, size_t bytes);
};

extern const Level pagoda_level_base, pagoda_level_avx2, pagoda_level_avxvnni, pagoda_level_avx512, pagoda_level_avx512vnni,
    pagoda_level_avx512bf16, pagoda_level_amx;
