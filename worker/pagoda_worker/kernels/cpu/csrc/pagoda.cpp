// The C interface: takes plain pointers and owns nothing but the thread pool. Python calls it through ctypes, which releases
// the GIL for the duration of a call.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pool.h"
#include "program.h"

namespace {

// Features of processor and operating system that a level may need.
enum Feature : unsigned { AVX2 = 1, FMA = 2, F16C = 4, AVX_VNNI = 8, AVX512 = 16, AVX512_VNNI = 32, AVX512_BF16 = 64, AMX = 128 };

struct Entry {
  const Level* level;  // null: the compiler could not build it
  unsigned needs;
};
// PAGODA_LEVELS is a bit mask of the levels this library was built with.
#define PAGODA_BUILT(bit, name) ((PAGODA_LEVELS >> bit & 1) ? &pagoda_level_##name : nullptr)
constexpr unsigned ANY_AVX2 = AVX2 | FMA | F16C;
const Entry LEVELS[] = {
    {&pagoda_level_base, 0},
    {PAGODA_BUILT(1, avx2), ANY_AVX2},
    {PAGODA_BUILT(2, avxvnni), ANY_AVX2 | AVX_VNNI},
    {PAGODA_BUILT(3, avx512), AVX512},
    {PAGODA_BUILT(4, avx512vnni), AVX512 | AVX512_VNNI},
    {PAGODA_BUILT(5, avx512bf16), AVX512 | AVX512_VNNI | AVX512_BF16},
    {PAGODA_BUILT(6, amx), AVX512 | AVX512_VNNI | AVX512_BF16 | AMX},
};
constexpr int NUM_LEVELS = sizeof LEVELS / sizeof LEVELS[0];

#if defined(__x86_64__)
// Whether there are tiles for bf16 and bytes and the kernel permits them: a process must request the larger context state.
bool amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, INT8 = 1u << 25;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (BF16 | TILES | INT8)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

unsigned features() {
  unsigned found = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();  // its tests include the operating system's part (XGETBV)
  if (__builtin_cpu_supports("avx2")) found |= AVX2;
  if (__builtin_cpu_supports("fma")) found |= FMA;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found |= AVX512;
  if (__builtin_cpu_supports("avx512vnni")) found |= AVX512_VNNI;
  if (__builtin_cpu_supports("avx512bf16")) found |= AVX512_BF16;
  unsigned a, b, c, d;  // not every compiler's __builtin_cpu_supports knows these
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C)) found |= F16C;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4)) found |= AVX_VNNI;
  if (amx()) found |= AMX;
#endif
  return found;
}

// Pieces of an operation are ordered so that neighbours access neighbouring memory, and so do the same parts of consecutive
// operations. So each thread has its own part, and takes pieces from others only when that is done.
class Parts {
 public:
  Parts(size_t operations, int threads) : threads_(threads), begun_(new Counter[operations * (size_t)threads]) {}

  // Works on an operation's `total` pieces until none is left; every thread calls this.
  template <typename F>
  void take(size_t operation, int thread, int total, F work) {
    for (int turn = 0; turn < threads_; ++turn) {
      const int whose = (thread + turn) % threads_, first = border(total, whose), last = border(total, whose + 1);
      std::atomic<int>& count = begun_[operation * (size_t)threads_ + (size_t)whose].count;
      int begun = count.load(std::memory_order_relaxed);
      for (int left; (left = last - first - begun) > 0;) {
        const int run = left < 2 ? left : left / 2;
        if (!count.compare_exchange_weak(begun, begun + run, std::memory_order_relaxed)) continue;
        work(first + begun, first + begun + run);
        begun = count.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  struct Counter {
    alignas(64) std::atomic<int> count{0};
  };
  int border(int total, int thread) const { return (int)((long)total * thread / threads_); }

  const int threads_;
  std::unique_ptr<Counter[]> begun_;  // pieces begun, by operation and thread
};

// A pool, and the memory that its threads share within an operation, which only grows.
struct Crew : Pool {
  explicit Crew(const std::vector<int>& cpus) : Pool(cpus) {}
  std::vector<float> floats;
  std::vector<int32_t> done;
};

// Up to this many rows, it is faster for every thread to norm all rows than to wait at a barrier.
constexpr int ROWS_NORMED_BY_ALL = 8;

bool done_as_one(const Op& op, const Step& step) {
  return op.joined && (op.kind != LINEAR || step.num_tokens <= ROWS_NORMED_BY_ALL);
}

// The operations of this step, fused where possible.
std::vector<Work> works_of(Crew& crew, const Level& level, const Op* ops, int num_ops, const Step& step) {
  static std::atomic<uint64_t> uses{1};
  const uint64_t use = uses.fetch_add((uint64_t)num_ops, std::memory_order_relaxed);
  std::vector<Work> works;
  size_t floats = crew.floats.size(), counters = crew.done.size();
  for (int o = 0, count; o < num_ops; o += count) {
    for (count = 1; o + count < num_ops && done_as_one(ops[o + count], step);) ++count;
    const Cut cut = level.cut(ops + o, count, step, crew.size());
    works.push_back({ops + o, count, use + (uint64_t)o, cut, nullptr, nullptr});
    floats = std::max(floats, cut.floats);
    counters = std::max(counters, cut.counters);
  }
  crew.floats.resize(floats);
  crew.done.resize(counters);
  for (Work& work : works) work.floats = crew.floats.data(), work.done = crew.done.data();
  return works;
}

// The end of the works from `begin` on that need no barrier in between: the thread that takes the first of consecutive
// single-piece works does all of them.
size_t end_of_turn(const std::vector<Work>& works, size_t begin) {
  size_t end = begin + 1;
  if (works[begin].cut.pieces == 1)
    while (end < works.size() && works[end].cut.pieces == 1) ++end;
  return end;
}

void run_program(Crew& crew, const Level& level, const Op* ops, int num_ops, const Step& step) {
  const std::vector<Work> works = works_of(crew, level, ops, num_ops, step);
  Parts parts(works.size(), crew.size());
  auto body = [&](int thread) {
    for (size_t w = 0, end; w < works.size(); w = end) {
      if (w > 0) crew.barrier();
      end = end_of_turn(works, w);
      parts.take(w, thread, works[w].cut.pieces, [&](int first, int last) {
        for (size_t turn = w; turn < end; ++turn) level.run(step, works[turn], first, last);
      });
    }
  };
  crew.run(body);
}

// Up to this many logits, sampling is faster than waking another thread.
constexpr size_t FEW_LOGITS = 1 << 18;

void run_sampling(Pool& pool, const Level& level, const SampleCall& call) {
  Parts parts(SAMPLE_PHASES, pool.size());
  auto body = [&](int thread) {
    for (int phase = 0; phase < SAMPLE_PHASES; ++phase) {
      int pieces = sample_items(call, phase);
      if (pieces == 0) continue;
      parts.take((size_t)phase, thread, pieces, [&](int first, int last) { level.sample(call, phase, first, last); });
      if (phase != CHOOSE) pool.barrier();
    }
  };
  pool.run(body);
}

}  // namespace

extern "C" {

// See ABI in library.py for when to raise both.
int pagoda_abi() { return 19; }

void pagoda_sizes(int* sizes) {
  for (size_t size : {sizeof(EmbedOp), sizeof(RmsNormOp), sizeof(LinearOp), sizeof(RopeKvOp), sizeof(AttentionOp),
                      sizeof(LayerNormOp), sizeof(AddOp), sizeof(RouteOp), sizeof(SortOp), sizeof(GatherOp), sizeof(ExpertsOp),
                      sizeof(CombineOp), sizeof(ShrinkOp), sizeof(HeadsOp), sizeof(Op), sizeof(Step), sizeof(Rounding), sizeof(QuantSource), sizeof(SampleRow), sizeof(SampleResult)})
    *sizes++ = (int)size;
}

// Whether a processor with these features can run the level; see Feature.
int pagoda_runs_with(int level, unsigned features) {
  return level >= 0 && level < NUM_LEVELS && (LEVELS[level].needs & ~features) == 0;
}

// Whether this library has the level and this processor and operating system can run it. Levels in order: base, AVX2,
// AVX2 with VNNI, AVX-512, AVX-512 with VNNI, AVX-512 with VNNI and BF16, the same with AMX.
int pagoda_supports(int level) { return pagoda_runs_with(level, features()) && LEVELS[level].level != nullptr; }

// One thread per entry of cpus, pinned to that CPU unless it is -1; entry 0 is for the calling thread while it computes.
void* pagoda_pool_new(const int* cpus, int count) { return new Crew(std::vector<int>(cpus, cpus + count)); }

void pagoda_pool_free(void* pool) { delete (Crew*)pool; }

// Number of completed barriers, if the pool has several threads.
unsigned pagoda_pool_meetings(void* pool) { return ((Crew*)pool)->meetings(); }

// w: [n, k] bf16 row major, k even -> ceil(n/32) panels of [k/2][32] pairs.
void pagoda_pack(void* pool_, int level, const uint16_t* w, int n, int k, uint32_t* out) {
  Pool& pool = *(Crew*)pool_;
  int panels = (n + 31) / 32;
  auto body = [&](int thread) {
    for (int p = thread; p < panels; p += pool.size()) LEVELS[level].level->pack_panel(w, n, k, p, out + (size_t)p * (k / 2) * 32);
  };
  pool.run(body);
}

// Threads take rows dynamically, because at startup other processes may occupy their cores.
void pagoda_quantize(void* pool_, int level, const Rounding* call) {
  constexpr int ROWS = 16;
  Pool& pool = *(Crew*)pool_;
  std::atomic<int> next{0};
  auto body = [&](int) {
    for (int first; (first = next.fetch_add(ROWS, std::memory_order_relaxed)) < call->n;)
      LEVELS[level].level->round_rows(*call, first, first + ROWS < call->n ? first + ROWS : call->n);
  };
  pool.run(body);
}

size_t pagoda_quant_panel_bytes(const QuantForm* form, int k) { return pagoda_level_base.quant_panel_bytes(*form, k); }

// -> ceil(n/32) panels of pagoda_quant_panel_bytes each.
void pagoda_pack_quantized(void* pool_, int level, const QuantSource* w, uint8_t* out) {
  Pool& pool = *(Crew*)pool_;
  int panels = (w->n + 31) / 32;
  size_t bytes = pagoda_quant_panel_bytes(&w->form, w->k);
  auto body = [&](int thread) {
    for (int p = thread; p < panels; p += pool.size()) LEVELS[level].level->pack_quant_panel(*w, p, out + (size_t)p * bytes);
  };
  pool.run(body);
}

void pagoda_run(void* pool, int level, const Op* ops, int num_ops, const Step* step) {
  run_program(*(Crew*)pool, *LEVELS[level].level, ops, num_ops, *step);
}

// Chooses the next token of each row of logits [num_rows, vocab], vocab < 2^20. The logits are overwritten.
void pagoda_sample(void* pool, int level, float* logits, int num_rows, int vocab, const SampleRow* rows,
                   SampleResult* results) {
  SampleCall call{logits, num_rows, vocab, rows, results, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  size_t count = (size_t)num_rows, slices = (size_t)num_slices(call);
  std::vector<float> maxima(2 * count * slices);
  std::vector<uint64_t> masses(2 * count);
  std::vector<Bucket> buckets(count * BUCKETS);
  std::vector<std::unique_ptr<float[]>> copies(count);
  std::vector<float*> raw(count, nullptr);
  for (size_t r = 0; r < count; ++r)
    if (keeps_raw(rows[r])) {
      copies[r].reset(new float[(size_t)vocab]);
      raw[r] = copies[r].get();
    }
  call.raw_maxima = maxima.data();
  call.maxima = maxima.data() + count * slices;
  call.raw_mass = masses.data();
  call.total = masses.data() + count;
  call.buckets = buckets.data();
  call.raw = raw.data();
  static Pool alone({-1});
  run_sampling(count * (size_t)vocab <= FEW_LOGITS ? alone : *(Crew*)pool, *LEVELS[level].level, call);
}

// Runs `rounds` of a level's multiplication (kind 0: bf16, 1: int8); returns the operations per thread. See ceilings.h.
double pagoda_peak(void* pool_, int level, int kind, long rounds) {
  Pool& pool = *(Crew*)pool_;
  std::atomic<double> done{0.0};
  auto body = [&](int) { done.store(LEVELS[level].level->peak(kind, rounds), std::memory_order_relaxed); };
  pool.run(body);
  return done.load();
}

// Reads a buffer once with all threads, which take pieces dynamically. `bytes` is a multiple of 512.
uint64_t pagoda_read(void* pool_, int level, const char* data, size_t bytes) {
  constexpr size_t PIECE = 1 << 20;
  Pool& pool = *(Crew*)pool_;
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> seen{0};
  auto body = [&](int) {
    for (;;) {
      size_t at = next.fetch_add(PIECE, std::memory_order_relaxed);
      if (at >= bytes) break;
      seen ^= LEVELS[level].level->read_all(data + at, bytes - at < PIECE ? bytes - at : PIECE);
    }
  };
  pool.run(body);
  return seen.load();
}

// In each tensor t, [blocks][block_bytes[t]], copies block pairs[2 i] to block pairs[2 i + 1]; destinations are distinct. Every
// source is read before any destination is written: sources that another pair overwrites are saved first.
void pagoda_copy_blocks(void* pool_, char* const* tensors, const int64_t* block_bytes, int num_tensors, const int64_t* pairs,
                        int count) {
  Pool& pool = *(Crew*)pool_;
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
