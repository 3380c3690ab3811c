// A model's step as a flat list of operations: recorded once, then run in one call with new inputs.
//
// Python mirrors these structs field by field (kernels/cpu/library.py); `pagoda_sizes` lets it check that it does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sample_call.h"

enum Kind : int32_t { EMBED = 0, RMS_NORM = 1, LINEAR = 2, ROPE_KV = 3, ATTENTION = 4 };

// What each operation reads from the generic fields is said in level.cpp, next to the code that does.
struct Op {
  int32_t kind;
  int32_t unused;  // keeps the pointers aligned
  void* p[10];
  int32_t i[10];
  float f[4];
};

struct Step {
  int32_t num_tokens, num_rows, max_blocks, unused;
  const int64_t* token_ids;      // [num_tokens]
  const int64_t* positions;      // [num_tokens]
  const int64_t* kv_indices;     // [num_tokens]
  const int32_t* block_tables;   // [num_rows, max_blocks]
  const int32_t* query_starts;   // [num_rows + 1]
  const int32_t* context_lens;   // [num_rows]
};

// How a matrix of small whole numbers is stored; see kernels/quantized.py.
struct QuantForm {
  int32_t bits;        // 8 or 4
  int32_t input_bits;  // 8: the input is rounded to so many; 16: it is taken as bf16, with 4 bits only
  int32_t group;       // inputs that share scales, a multiple of 32
  int32_t has_zeros;   // else the middle level is zero
};

// A matrix [n, k] in levels, before it is packed.
struct QuantSource {
  QuantForm form;
  int32_t n, k;
  const uint8_t* levels;  // [n, k]
  const void* scales;     // [n, k / group] float32 (8 bits) or float16 (4 bits)
  const uint8_t* zeros;   // [n, k / group], or null
};

// One instruction set level. `items` says into how many independent pieces an operation falls for this step; `run` does
// pieces [first, last) and may be called from any thread. `use` stands for this operation in this call and is never used
// again: what a thread keeps from one of its pieces for the next goes by it. `sample` does pieces of one phase of sampling.
struct Level {
  int (*items)(const Op&, const Step&);
  void (*run)(const Op&, const Step&, uint64_t use, int first, int last);
  void (*pack_panel)(const uint16_t* w, int n, int k, int panel, uint32_t* out);
  size_t (*quant_panel_bytes)(const QuantForm&, int k);
  void (*pack_quant_panel)(const QuantSource&, int panel, uint8_t* out);
  void (*sample)(const SampleCall&, int phase, int first, int last);
  double (*peak)(int kind, long rounds);  // see ceilings.h
  uint64_t (*read_all)(const char* data, size_t bytes);
};

extern const Level pagoda_level_base, pagoda_level_avx2, pagoda_level_avxvnni, pagoda_level_avx512, pagoda_level_avx512vnni,
    pagoda_level_avx512bf16;
