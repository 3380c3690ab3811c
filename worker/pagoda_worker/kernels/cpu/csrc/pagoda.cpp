// The C interface: plain pointers in, nothing owned but the thread pool. Python reaches it by ctypes, which releases the
// GIL for the length of a call.
#include <algorithm>
#include <cstring>
#include <memory>

#include "pool.h"
#include "program.h"

namespace {

// PAGODA_LEVELS is a bit mask of the levels this library was built with; the compiler or the machine may lack some.
#if PAGODA_LEVELS & 2
#define PAGODA_AVX2 &pagoda_level_avx2
#else
#define PAGODA_AVX2 nullptr
#endif
#if PAGODA_LEVELS & 4
#define PAGODA_AVX512 &pagoda_level_avx512
#else
#define PAGODA_AVX512 nullptr
#endif
#if PAGODA_LEVELS & 8
#define PAGODA_AVX512BF16 &pagoda_level_avx512bf16
#else
#define PAGODA_AVX512BF16 nullptr
#endif
const Level* const LEVELS[] = {&pagoda_level_base, PAGODA_AVX2, PAGODA_AVX512, PAGODA_AVX512BF16};

bool supported(int level) {
  if (LEVELS[level] == nullptr) return false;
#if defined(__x86_64__)
  __builtin_cpu_init();  // its tests include the operating system's part (XGETBV)
  switch (level) {
    case 0: return true;
    case 1: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case 2: return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case 3: return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    default: return false;
  }
#else
  return level == 0;
#endif
}

// Threads take pieces of an operation in runs, so that each streams through neighbouring memory and none waits long.
struct Counter {
  alignas(64) std::atomic<int> next{0};
};

void run_program(Pool& pool, const Level& level, const Op* ops, int num_ops, const Step& step, Counter* counters) {
  auto body = [&](int) {
    for (int o = 0; o < num_ops; ++o) {
      const Op& op = ops[o];
      int total = level.items(op, step);
      int run = total / (pool.size() * 8);
      run = run < 1 ? 1 : run;
      for (;;) {
        int first = counters[o].next.fetch_add(run, std::memory_order_relaxed);
        if (first >= total) break;
        level.run(op, step, first, first + run < total ? first + run : total);
      }
      if (o + 1 < num_ops) pool.barrier();
    }
  };
  pool.run(body);
}

}  // namespace

extern "C" {

int pagoda_abi() { return 2; }

void pagoda_sizes(int* op, int* step) {
  *op = (int)sizeof(Op);
  *step = (int)sizeof(Step);
}

// Whether this library has the level and this processor and operating system can run it:
// 0 base, 1 AVX2, 2 AVX-512, 3 AVX-512 BF16.
int pagoda_supports(int level) { return level >= 0 && level < 4 && supported(level); }

// One thread per entry of cpus, pinned to it unless it is -1; entry 0 is for the calling thread, while it computes.
void* pagoda_pool_new(const int* cpus, int count) { return new Pool(std::vector<int>(cpus, cpus + count)); }

void pagoda_pool_free(void* pool) { delete (Pool*)pool; }

// w: [n, k] bf16 row major, k even -> ceil(n/32) panels of [k/2][32] pairs.
void pagoda_pack(void* pool_, int level, const uint16_t* w, int n, int k, uint32_t* out) {
  Pool& pool = *(Pool*)pool_;
  int panels = (n + 31) / 32;
  auto body = [&](int thread) {
    for (int p = thread; p < panels; p += pool.size()) LEVELS[level]->pack_panel(w, n, k, p, out + (size_t)p * (k / 2) * 32);
  };
  pool.run(body);
}

void pagoda_run(void* pool, int level, const Op* ops, int num_ops, const Step* step) {
  std::unique_ptr<Counter[]> counters(new Counter[num_ops]);
  run_program(*(Pool*)pool, *LEVELS[level], ops, num_ops, *step, counters.get());
}

// Tensor t, [blocks][block_bytes[t]], gets block pairs[2 i] also as block pairs[2 i + 1], which differ. Every source is read
// before any destination is written: what another pair overwrites is put aside first.
void pagoda_copy_blocks(void* pool_, char* const* tensors, const int64_t* block_bytes, int num_tensors, const int64_t* pairs,
                        int count) {
  Pool& pool = *(Pool*)pool_;
  std::vector<int64_t> written;
  for (int i = 0; i < count; ++i) written.push_back(pairs[2 * i + 1]);
  std::sort(written.begin(), written.end());
  std::vector<int> direct, aside;
  for (int i = 0; i < count; ++i)
    (std::binary_search(written.begin(), written.end(), pairs[2 * i]) ? aside : direct).push_back(i);
  auto body = [&](int thread) {
    std::vector<char> kept;
    for (int t = thread; t < num_tensors; t += pool.size()) {
      const size_t bytes = (size_t)block_bytes[t];
      kept.resize(bytes * aside.size());
      for (size_t j = 0; j < aside.size(); ++j) memcpy(&kept[j * bytes], tensors[t] + pairs[2 * aside[j]] * bytes, bytes);
      for (int i : direct) memcpy(tensors[t] + pairs[2 * i + 1] * bytes, tensors[t] + pairs[2 * i] * bytes, bytes);
      for (size_t j = 0; j < aside.size(); ++j) memcpy(tensors[t] + pairs[2 * aside[j] + 1] * bytes, &kept[j * bytes], bytes);
    }
  };
  pool.run(body);
}

}  // extern "C"
