// Measures this machine's ceilings: multiplying with nothing to load, and reading with nothing to compute. A kernel's speed
// is stated as a share of these.
//
// A probe of multiplication is meaningful only if its accumulators stay in registers: one that stores them measures the store
// port. Hence enough chains to cover the instruction's latency, unrolled by the compiler, and no memory operands.
#pragma once

#include "amx.h"
#include "simd.h"

namespace PAGODA_NS {

// Hides a value from the compiler, so that it cannot precompute what follows.
template <typename T>
PAGODA_INLINE T unknown(T x) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#endif
  return x;
}

#if PAGODA_LEVEL >= 2
typedef __m512 Floats;
typedef __m512i Ints;
constexpr int CHAINS = 16;
PAGODA_INLINE Floats floats(float x) { return _mm512_set1_ps(x); }
PAGODA_INLINE Ints lanes(int x) { return _mm512_set1_epi32(x); }
PAGODA_INLINE Floats multiply_add(Floats acc, Floats a, Floats b) { return _mm512_fmadd_ps(acc, a, b); }
#elif PAGODA_LEVEL == 1
typedef __m256 Floats;
typedef __m256i Ints;
constexpr int CHAINS = 12;
PAGODA_INLINE Floats floats(float x) { return _mm256_set1_ps(x); }
PAGODA_INLINE Ints lanes(int x) { return _mm256_set1_epi32(x); }
PAGODA_INLINE Floats multiply_add(Floats acc, Floats a, Floats b) { return _mm256_fmadd_ps(acc, a, b); }
#else
typedef float Floats __attribute__((vector_size(16)));
constexpr int CHAINS = 12;
PAGODA_INLINE Floats floats(float x) { return Floats{x, x, x, x}; }
PAGODA_INLINE Floats multiply_add(Floats acc, Floats a, Floats b) { return acc * a + b; }
#endif

// Every probe runs `rounds` of its instruction on each chain and returns the number of operations, counting a multiplication
// and an addition as two.

[[maybe_unused]] static double peak_floats(long rounds) {
  Floats acc[CHAINS], a = unknown(floats(0.999f)), b = unknown(floats(0.001f));
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) acc[c] = unknown(b);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) acc[c] = multiply_add(acc[c], a, b);
  }
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) unknown(acc[c]);
  return 2.0 * (sizeof(Floats) / 4) * CHAINS * (double)rounds;
}

// Without a bf16 instruction, kernels widen to float and multiply floats, so the peak of floats is the ceiling.
[[maybe_unused]] static double peak_bf16(long rounds) {
#if PAGODA_LEVEL >= 3
  __m512 acc[CHAINS];
  __m512i a = unknown(lanes(0x3f803f80)), b = unknown(lanes(0x3a003a00));
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) acc[c] = unknown(floats(0.0f));
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], (__m512bh)a, (__m512bh)b);
  }
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) unknown(acc[c]);
  return 2.0 * 32 * CHAINS * (double)rounds;
#else
  return peak_floats(rounds);
#endif
}

#ifdef __AVX512VNNI__
PAGODA_INLINE Ints dot4(Ints acc, Ints a, Ints b) { return _mm512_dpbusd_epi32(acc, a, b); }
#elif defined(__AVXVNNI__)
PAGODA_INLINE Ints dot4(Ints acc, Ints a, Ints b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
#elif PAGODA_LEVEL == 2
PAGODA_INLINE Ints dot4(Ints acc, Ints a, Ints b) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(unknown(a), b), _mm512_set1_epi16(1)));
}
#elif PAGODA_LEVEL == 1
PAGODA_INLINE Ints dot4(Ints acc, Ints a, Ints b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(unknown(a), b), _mm256_set1_epi16(1)));
}
#endif

// Products of bytes, summed in fours: one instruction with VNNI, three without. The base level multiplies floats.
[[maybe_unused]] static double peak_int8(long rounds) {
#if PAGODA_LEVEL >= 1
  Ints acc[CHAINS], a = unknown(lanes(0x01020304)), b = unknown(lanes(0x01010101));
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) acc[c] = unknown(lanes(0));
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) acc[c] = dot4(acc[c], a, b);
  }
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) unknown(acc[c]);
  return 2.0 * sizeof(Ints) * CHAINS * (double)rounds;
#else
  return peak_floats(rounds);
#endif
}

#ifdef __AMX_BF16__
// Six tiles of sums and two of operands; each product is of 16 x 16 x 16 words. The operands hold realistic numbers, as bf16
// of either sign between 1/2 and 2: with zeros the unit needs less power, and the processor clocks higher.
template <TileProduct KIND>
static double peak_tiles(long rounds) {
  constexpr bool BYTES = KIND != TileProduct::PAIRS;
  const Tiles tiles(TILE_BLOCK);
  alignas(64) uint32_t words[2][TILE_ROWS * TILE_WORDS];
  uint32_t state = 1;
  for (auto& tile : words)
    for (uint32_t& word : tile) {
      state = state * 1664525 + 1013904223;
      word = BYTES ? state : (state & 0x80ff80ff) | 0x3f003f00;
    }
  asm volatile("" : : "r"(words) : "memory");
  _tile_loadd(6, words[0], 4 * TILE_WORDS);
  _tile_loadd(7, words[1], 4 * TILE_WORDS);
  for (long round = 0; round < rounds; ++round) {
    PAGODA_TILE_PRODUCT(KIND, 0, 6, 7);
    PAGODA_TILE_PRODUCT(KIND, 1, 6, 7);
    PAGODA_TILE_PRODUCT(KIND, 2, 6, 7);
    PAGODA_TILE_PRODUCT(KIND, 3, 6, 7);
    PAGODA_TILE_PRODUCT(KIND, 4, 6, 7);
    PAGODA_TILE_PRODUCT(KIND, 5, 6, 7);
  }
  return 2.0 * 6 * TILE_ROWS * TILE_ROWS * TILE_WORDS * (BYTES ? 4 : 2) * (double)rounds;
}

static double peak(int kind, long rounds) {
  return kind == 0 ? peak_tiles<TileProduct::PAIRS>(rounds) : peak_tiles<TileProduct::BYTES>(rounds);
}
#else
static double peak(int kind, long rounds) { return kind == 0 ? peak_bf16(rounds) : peak_int8(rounds); }
#endif

// Returns the exclusive or of what it reads, so that every byte is needed.
static uint64_t read_all(const char* data, size_t bytes) {
  typedef uint64_t Word __attribute__((vector_size(sizeof(Floats))));
  constexpr size_t SIZE = sizeof(Word);
  Word sums[8] = {};
  for (size_t at = 0; at + 8 * SIZE <= bytes; at += 8 * SIZE) {
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) {
      Word word;
      memcpy(&word, data + at + SIZE * i, SIZE);
      sums[i] ^= word;
    }
  }
  uint64_t all = 0;
#pragma GCC unroll 8
  for (const Word& sum : sums)
    for (size_t i = 0; i < SIZE / 8; ++i) all ^= sum[i];
  return all;
}

}  // namespace PAGODA_NS
