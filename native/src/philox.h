// Dropout masks: 16 random bits per element, a function of its position alone, so that forward and backward, every tile
// and any number of threads see the same mask.
//
// The bits are those of Philox4x32-7 (Salmon et al. 2011, section 3.3) with the seed as key. Columns [64 g, 64 g + 64)
// of a row use the counters 8 g to 8 g + 7: column 64 g + 32 p + 4 j + h has bits [16 h, 16 h + 16) of the 64-bit
// integer whose lower word is word 2 p + 1 of counter 8 g + j and whose upper word is word 2 p. That integer is the
// 64-bit product of the last round, and neighbours are lanes of a vector, whatever its width. The other words of a
// counter identify the row: for attention weights the query's position, the head and the batch entry; for activations
// the row, 0 and ACTIVATIONS_WORD.
#pragma once

#include "vector.h"

namespace CH_NS {

constexpr int GROUP_COLUMNS = 128;  // columns per draw
constexpr int GROUP_COUNTERS = 16;  // their counters
constexpr uint32_t ACTIVATIONS_WORD = 0xffffffffu;  // attention weights have the batch entry here
// Seven rounds pass all known statistical tests (Salmon et al. 2011); ten, the default, add margin.
constexpr int ROUNDS = 7;

typedef uint64_t vw __attribute__((vector_size(VL * 4)));  // 64-bit lanes

// The 64-bit product of the lower words of each lane.
CH_INLINE vw multiply_wide(vw a, uint32_t b) {
#if defined(CH_AVX512)
  return (vw)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32((int)b));
#elif defined(CH_AVX2)
  return (vw)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32((int)b));
#elif defined(CH_NEON)
  return (vw)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
#else
  return (a & 0xffffffffu) * ((uint64_t)b + (vw){});
#endif
}

// Two integers per counter. Only the first counter word differs between lanes, so the first two rounds need one vector
// multiplication and one scalar one each. Only the lower word of a lane is an input; the upper half of a product
// reaches no other product.
CH_INLINE void philox(vw c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed, vw integers[2]) {
  constexpr uint32_t FIRST = 0xD2511F53u, SECOND = 0xCD9E8D57u, FIRST_STEP = 0x9E3779B9u, SECOND_STEP = 0xBB67AE85u;
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  auto next_key = [&]() CH_INLINED {
    key0 += FIRST_STEP;
    key1 += SECOND_STEP;
  };
  const uint64_t product = (uint64_t)c2 * SECOND;
  vw first = multiply_wide(c0, FIRST);
  const vw varied = first >> 32 ^ (c3 ^ key1);
  const uint64_t next_product = (uint64_t)((uint32_t)(product >> 32) ^ c1 ^ key0) * FIRST;
  next_key();
  vw second = multiply_wide(varied, SECOND);
  vw w0 = second >> 32 ^ ((uint32_t)product ^ key0), w1 = second;
  vw w2 = first ^ ((uint32_t)(next_product >> 32) ^ key1), w3 = (uint32_t)next_product + (vw){};
#pragma GCC unroll 8
  for (int round = 2; round < ROUNDS - 1; round++) {
    next_key();
    first = multiply_wide(w0, FIRST);
    second = multiply_wide(w2, SECOND);
    w0 = second >> 32 ^ w1 ^ key0;
    w1 = second;
    w2 = first >> 32 ^ w3 ^ key1;
    w3 = first;
  }
  next_key();
  integers[0] = multiply_wide(w2, SECOND) ^ w1 << 32 ^ (uint64_t)key0 << 32;
  integers[1] = multiply_wide(w0, FIRST) ^ w3 << 32 ^ (uint64_t)key1 << 32;
}

// Which 16-bit quarters of the integers, in order, are at least `dropped`: two vectors of lanes.
CH_INLINE void keep_lanes(vw integers, int32_t dropped, Lanes& keep, Lanes& next) {
#if defined(CH_AVX512)
  const __mmask32 both = _mm512_cmpge_epu16_mask((__m512i)integers, _mm512_set1_epi16((short)dropped));
  keep = (Lanes)both, next = (Lanes)(both >> 16);
#elif defined(CH_AVX2)
  const __m256i quarters = (__m256i)integers, threshold = _mm256_set1_epi16((short)dropped);
  const __m256i both = _mm256_cmpeq_epi16(_mm256_max_epu16(quarters, threshold), quarters);
  keep = (vi)_mm256_cvtepi16_epi32(_mm256_castsi256_si128(both));
  next = (vi)_mm256_cvtepi16_epi32(_mm256_extracti128_si256(both, 1));
#elif defined(CH_NEON)
  const int16x8_t both = (int16x8_t)vcgeq_u16((uint16x8_t)integers, vdupq_n_u16((uint16_t)dropped));
  keep = (vi)vmovl_s16(vget_low_s16(both));
  next = (vi)vmovl_high_s16(both);
#else
  uint16_t quarters[2 * VL];
  memcpy(quarters, &integers, sizeof(quarters));
  for (int i = 0; i < VL; i++) {
    keep[i] = -(int32_t)(quarters[i] >= dropped);
    next[i] = -(int32_t)(quarters[VL + i] >= dropped);
  }
#endif
}

// These lanes of v, and 0 in the others.
CH_INLINE vf select_lanes(Lanes lanes, vf v) {
#if defined(CH_AVX512)
  return (vf)_mm512_mask_mov_ps((__m512)(vf){}, lanes, (__m512)v);
#else
  return (vf)((vi)v & lanes);
#endif
}

// The same, by the lowest bits of an integer.
CH_INLINE vf select_bits(uint32_t bits, vf v) {
#if defined(CH_AVX512)
  return select_lanes((Lanes)bits, v);
#else
  vi lane;
  for (int i = 0; i < VL; i++) lane[i] = 1 << i;
  return select_lanes((((int32_t)bits + (vi){}) & lane) == lane, v);
#endif
}

// The Philox inputs of a row: the seed and its counter words after the first.
struct PhiloxRow {
  uint64_t seed;
  int32_t dropped;  // of CH_LEVELS
  uint32_t row, head, batch;
};

// Calls `take(column within the group, lanes, next lanes)` with the keep masks of a group's first columns, two vectors
// at a time. Narrow rows draw for few more columns than they have; the last vectors may exceed them.
template <class Take> CH_INLINE void draw_keep_masks(const PhiloxRow& d, uint32_t group, int64_t columns, const Take& take) {
  constexpr int COUNTERS = VL / 2;  // counters
  vw lanes;
  for (int i = 0; i < COUNTERS; i++) lanes[i] = (uint64_t)i;
#pragma GCC unroll 8
  for (int part = 0; part < GROUP_COUNTERS; part += COUNTERS) {
    if (part / 8 * 64 + part % 8 * 4 >= columns) continue;
    vw integers[2];
    philox(lanes + (uint64_t)(group * GROUP_COUNTERS + (uint32_t)part), d.row, d.head, d.batch, d.seed, integers);
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
      Lanes keep, next;
      keep_lanes(integers[p], d.dropped, keep, next);
      take(part / 8 * 64 + 32 * p + part % 8 * 4, keep, next);
    }
  }
}

// One bit per lane of two vectors.
#if defined(CH_AVX512)
typedef uint32_t Both;
#elif defined(CH_AVX2)
typedef uint16_t Both;
#else
typedef uint8_t Both;
#endif

// One bit per column of a group, or of its first columns.
struct KeepMask {
  Both bits[GROUP_COLUMNS / (2 * VL)];

  CH_INLINE void draw(const PhiloxRow& d, uint32_t group, int64_t columns = GROUP_COLUMNS) {
    draw_keep_masks(d, group, columns, [&](int place, Lanes keep, Lanes next) CH_INLINED {
      // volatile: compilers would first gather the words in a vector, element by element.
      *(volatile Both*)(bits + place / (2 * VL)) = (Both)(bits_of(keep) | bits_of(next) << VL);
    });
  }

  // The bits of one vector.
  CH_INLINE uint32_t from(int place) const { return (uint32_t)bits[place / (2 * VL)] >> place % (2 * VL); }
};

// The same for a few rows over an interval of columns that may start anywhere in a group.
struct KeepMaskRows {
  KeepMask* bits;  // [rows][groups]
  int64_t groups, skipped;

  // Groups that cover any `columns`, with padding for reads past the end.
  static constexpr int64_t groups_of(int64_t columns) { return columns / GROUP_COLUMNS + 3; }

  // Draws columns [from, to) of a row, where column 0 is position `first` of the whole row.
  void draw(int row, PhiloxRow d, int64_t first, int64_t from, int64_t to) {
    const int64_t group = (first + from) / GROUP_COLUMNS;
    skipped = first - group * GROUP_COLUMNS;
    for (int64_t g = group; g * GROUP_COLUMNS < first + to; g++) bits[row * groups + g - group].draw(d, (uint32_t)g);
  }

  // Bits of VL columns from `column` on; arbitrary ones before the whole row's first position, which may be read too.
  CH_INLINE uint32_t from(int row, int64_t column) const {
    const int64_t place = skipped + column;
    uint32_t word;
    memcpy(&word, (const char*)(bits + row * groups) + (place >> 3), sizeof(word));
    return word >> (place & 7);
  }
};

}  // namespace CH_NS
