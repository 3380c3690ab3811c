// A model's step as a flat list of operations: recorded once, then run in one call with new inputs.
//
// Python mirrors these structs field by field (kernels/cpu/library.py); `pagoda_sizes` lets it check that it does.
#pragma once

#include <cstddef>
#include <cstdint>

enum Kind : int32_t { EMBED = 0, RMS_NORM = 1, LINEAR = 2, ROPE_KV = 3, ATTENTION = 4, ACT_MUL = 5 };

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

// One instruction set level. `items` says into how many independent pieces an operation falls for this step; `run` does
// pieces [first, last) and may be called from any thread.
struct Level {
  int (*items)(const Op&, const Step&);
  void (*run)(const Op&, const Step&, int first, int last);
  void (*pack_panel)(const uint16_t* w, int n, int k, int panel, uint32_t* out);
  double (*peak)(int kind, long rounds);  // see ceilings.h
  uint64_t (*read_all)(const char* data, size_t bytes);
};

extern const Level pagoda_level_base, pagoda_level_avx2, pagoda_level_avx512, pagoda_level_avx512bf16;
