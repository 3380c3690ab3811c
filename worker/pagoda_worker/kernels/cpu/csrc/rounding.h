// Weights rounded to levels: `quantize` of kernels/quantized.py, bit for bit. Maxima are exact in any order, and a weight takes
// one division and one rounding, so that all levels and threads give the same bits.
#pragma once

#include <cmath>
#include <type_traits>

#include "ints.h"
#include "program.h"

namespace PAGODA_NS {

constexpr float FAINTEST_SCALE = 0x1p-14f;  // the least normal float16

template <int DTYPE>  // see Rounding
using Stored = std::conditional_t<DTYPE == 2, float, uint16_t>;
template <int DTYPE>
PAGODA_INLINE f16 load_weights(const Stored<DTYPE>* p) {
  if constexpr (DTYPE == 0) return load_bf16(p);
  else if constexpr (DTYPE == 1) return load_half(p);
  else return load(p);
}

// To float16 and back, to nearest, ties to even. Smaller results than FAINTEST_SCALE become 0, as the caller replaces them.
static float through_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return x;  // NaN
  uint32_t half = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu;
  if (magnitude < 0x38800000) half = magnitude < 0x387fe000 ? 0 : 0x38800000;  // subnormal: all but the last become 0
  if (half >= 0x47800000) half = 0x7f800000;
  return as_float(sign | half);
}

// The scale of a group whose largest and least weight are given; the first weight of largest magnitude decides its sign.
template <int DTYPE>
static float scale_of(const Stored<DTYPE>* group, const Rounding& call, float most, float least) {
  const float largest = most > -least ? most : -least;
  if (call.bits == 8) return largest / 127.0f;
  if (most != -least) return through_half((most > -least ? most : least) / -8.0f);
  for (int i = 0; i < call.group; i += 16) {
    float some[16];
    store(some, load_weights<DTYPE>(group + i));
    for (float one : some)
      if (std::fabs(one) == largest) return through_half(one / -8.0f);
  }
  return most;  // unreachable
}

template <int DTYPE>
static void round_group(const Stored<DTYPE>* group, const Rounding& call, uint8_t* levels, float* scale) {
  f16 most = load_weights<DTYPE>(group), least = most;
  for (int i = 16; i < call.group; i += 16) {
    const f16 some = load_weights<DTYPE>(group + i);
    most = max(most, some), least = min(least, some);
  }
  const float found = scale_of<DTYPE>(group, call, max_lane(most), -max_lane(zero() - least));
  *scale = std::fabs(found) < FAINTEST_SCALE ? FAINTEST_SCALE : found;
  const f16 by = set1(*scale), middle = set1((float)(1 << (call.bits - 1))), low = zero() - middle, high = middle - set1(1.0f);
  for (int i = 0; i < call.group; i += 16)
    store_bytes(levels + i, min(max(round(load_weights<DTYPE>(group + i) / by), low), high) + middle);
}

template <int DTYPE>
static void round_rows_of(const Rounding& call, int first, int last) {
  const size_t groups = (size_t)(call.k / call.group), size = (size_t)call.group, end = (size_t)last * groups;
  for (size_t g = (size_t)first * groups; g < end; ++g)
    round_group<DTYPE>((const Stored<DTYPE>*)call.weight + g * size, call, call.levels + g * size, call.scales + g);
}

// Rows [first, last).
static void round_rows(const Rounding& call, int first, int last) {
  if (call.dtype == 0) round_rows_of<0>(call, first, last);
  else if (call.dtype == 1) round_rows_of<1>(call, first, last);
  else round_rows_of<2>(call, first, last);
}

}  // namespace PAGODA_NS
