// The instructions of AVX-512 and AMX that the kernels use, in plain C++: with this folder first in the include path, the kernels
// of those sets compile for any processor and can be tested there. Correct, not fast.
//
// Each does what its manual says, lane by lane (Intel 64 and IA-32 Architectures Software Developer's Manual, volume
// 2). Only those that are used: another one is a compile error here, and takes a few lines.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CH_EMULATED static inline __attribute__((always_inline))

typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

enum {
  _CMP_UNORD_Q = 0x03,
  _CMP_NLT_UQ = 0x15,
  _CMP_NLE_UQ = 0x16,
  _CMP_GE_OQ = 0x1d,
  _CMP_GT_OQ = 0x1e,
  _MM_FROUND_TO_NEAREST_INT = 0
};

namespace emulated {

typedef uint64_t Quads __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));
typedef uint16_t HalfOfHalves __attribute__((vector_size(32)));

template <class V> CH_EMULATED V read(const void* from) {
  V v;
  memcpy(&v, from, sizeof(v));
  return v;
}

CH_EMULATED uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
CH_EMULATED float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// bf16 instructions flush subnormals to 0, as inputs and as results.
CH_EMULATED float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

CH_EMULATED uint16_t bfloat_of(float x) {
  const uint32_t bits = bits_of(flushed(x));
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CH_EMULATED float of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, digits = half & 0x3ff;
  const float sign = half >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return digits ? float_of(0x7fc00000 | (uint32_t)digits << 13) : sign * __builtin_inff();
  return sign * (exponent ? ldexpf((float)(digits + 1024), exponent - 25) : ldexpf((float)digits, -24));
}

// To the nearest, ties to even: the step between halves near x is 2**(exponent - 10), and at least 2**-24.
CH_EMULATED uint16_t half_of(float x) {
  const uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
  if (x != x) return (uint16_t)(sign | 0x7e00 | (bits_of(x) >> 13 & 0x1ff));
  const float size = fabsf(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = -14;
  if (size >= 0x1p-14f) exponent = ilogbf(size);
  const int steps = (int)rintf(ldexpf(size, 10 - exponent));
  return (uint16_t)(sign | (steps + (exponent + 14) * 1024));
}

}  // namespace emulated

// ---- load, store, set ---------------------------------------------------------------------------------------

CH_EMULATED __m256i _mm256_loadu_si256(const __m256i* from) { return emulated::read<__m256i>(from); }
CH_EMULATED __m512i _mm512_loadu_si512(const void* from) { return emulated::read<__m512i>(from); }
CH_EMULATED __m512 _mm512_loadu_ps(const void* from) { return emulated::read<__m512>(from); }
CH_EMULATED void _mm_storeu_ps(float* to, __m128 v) { memcpy(to, &v, sizeof(v)); }
CH_EMULATED void _mm256_storeu_si256(__m256i* to, __m256i v) { memcpy(to, &v, sizeof(v)); }
CH_EMULATED void _mm512_storeu_si512(void* to, __m512i v) { memcpy(to, &v, sizeof(v)); }
CH_EMULATED void _mm512_storeu_ps(void* to, __m512 v) { memcpy(to, &v, sizeof(v)); }

// Masked elements are not accessed.
CH_EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  emulated::Halves v = {};
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) v[i] = emulated::read<uint16_t>((const char*)from + 2 * i);
  return (__m512i)v;
}

CH_EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  __m512 v = {};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) v[i] = emulated::read<float>((const char*)from + 4 * i);
  return v;
}

CH_EMULATED __m512 _mm512_set1_ps(float x) { return x - (__m512){}; }
CH_EMULATED __m512i _mm512_set1_epi32(int x) { return (__m512i)((uint32_t)x + (emulated::Words){}); }
CH_EMULATED __m512i _mm512_set1_epi16(short x) { return (__m512i)((uint16_t)x + (emulated::Halves){}); }

// ---- lanes and permutations ---------------------------------------------------------------------------------

CH_EMULATED __m128 _mm256_castps256_ps128(__m256 v) { return emulated::read<__m128>(&v); }
CH_EMULATED __m128 _mm256_extractf128_ps(__m256 v, int half) {
  return emulated::read<__m128>((const char*)&v + 16 * half);
}
CH_EMULATED __m256 _mm512_castps512_ps256(__m512 v) { return emulated::read<__m256>(&v); }
CH_EMULATED __m128i _mm_loadu_si128(const void* from) { return emulated::read<__m128i>(from); }
CH_EMULATED __m512i _mm512_castsi128_si512(__m128i v) {
  __m512i wide = {};
  memcpy(&wide, &v, sizeof(v));
  return wide;
}
CH_EMULATED __m512i _mm512_inserti32x4(__m512i v, __m128i part, int lane) {
  memcpy((char*)&v + 16 * lane, &part, sizeof(part));
  return v;
}
CH_EMULATED __m256i _mm512_castsi512_si256(__m512i v) { return emulated::read<__m256i>(&v); }
CH_EMULATED __m256 _mm512_extractf32x8_ps(__m512 v, int half) {
  return emulated::read<__m256>((const char*)&v + 32 * half);
}
CH_EMULATED __m256i _mm512_extracti64x4_epi64(__m512i v, int half) {
  return emulated::read<__m256i>((const char*)&v + 32 * half);
}

CH_EMULATED __m512 _mm512_permutexvar_ps(__m512i order, __m512 v) {
  const emulated::Words from = (emulated::Words)order;
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = v[from[i] & 15];
  return r;
}
CH_EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i order, __m512 b) {
  const emulated::Words from = (emulated::Words)order;
  __m512 r;
  for (int i = 0; i < 16; i++) {
    const int at = (int)(from[i] & 15);
    r[i] = (from[i] & 16) != 0 ? b[at] : a[at];
  }
  return r;
}
CH_EMULATED __m512i _mm512_permutexvar_epi32(__m512i order, __m512i v) {
  return (__m512i)_mm512_permutexvar_ps(order, (__m512)v);
}
CH_EMULATED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i v) {
  const emulated::Halves from = (emulated::Halves)order, of = (emulated::Halves)v;
  emulated::Halves r;
  for (int i = 0; i < 32; i++) r[i] = of[from[i] & 31];
  return (__m512i)r;
}

// Within each lane of 128 bits: two of its four words, or one of its two pairs, from a and b alternately.
CH_EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  const emulated::Words x = (emulated::Words)a, y = (emulated::Words)b;
  emulated::Words r;
  for (int i = 0; i < 16; i++) r[i] = i % 2 ? y[i / 4 * 4 + i % 4 / 2] : x[i / 4 * 4 + i % 4 / 2];
  return (__m512i)r;
}
CH_EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  const emulated::Words x = (emulated::Words)a, y = (emulated::Words)b;
  emulated::Words r;
  for (int i = 0; i < 16; i++) r[i] = i % 2 ? y[i / 4 * 4 + 2 + i % 4 / 2] : x[i / 4 * 4 + 2 + i % 4 / 2];
  return (__m512i)r;
}
CH_EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  __m512i r;
  for (int i = 0; i < 8; i++) r[i] = i % 2 ? b[i / 2 * 2] : a[i / 2 * 2];
  return r;
}
CH_EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  __m512i r;
  for (int i = 0; i < 8; i++) r[i] = i % 2 ? b[i / 2 * 2 + 1] : a[i / 2 * 2 + 1];
  return r;
}
// Transposes four rows of four.
CH_EMULATED void _MM_TRANSPOSE4_PS(__m128& a, __m128& b, __m128& c, __m128& d) {
  const __m128 rows[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) a[i] = rows[i][0], b[i] = rows[i][1], c[i] = rows[i][2], d[i] = rows[i][3];
}
// Two lanes of a, then two of b, each selected by two bits.
CH_EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int lanes) {
  __m512i r;
  for (int i = 0; i < 8; i++) {
    const int from = (lanes >> i / 2 * 2 & 3) * 2 + i % 2;
    r[i] = i < 4 ? a[from] : b[from];
  }
  return r;
}

// Consecutive elements of v where the mask is set; those of `rest` elsewhere.
CH_EMULATED __m512 _mm512_mask_expand_ps(__m512 rest, __mmask16 mask, __m512 v) {
  int next = 0;
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) rest[i] = v[next++];
  return rest;
}
CH_EMULATED __m512i _mm512_mask_expand_epi32(__m512i rest, __mmask16 mask, __m512i v) {
  return (__m512i)_mm512_mask_expand_ps((__m512)rest, mask, (__m512)v);
}
CH_EMULATED __m512 _mm512_mask_mov_ps(__m512 rest, __mmask16 mask, __m512 v) {
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) rest[i] = v[i];
  return rest;
}

// ---- integers -----------------------------------------------------------------------------------------------

CH_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
CH_EMULATED __m512i _mm512_mask_or_epi32(__m512i rest, __mmask16 mask, __m512i a, __m512i b) {
  return (__m512i)_mm512_mask_mov_ps((__m512)rest, mask, (__m512)(a | b));
}
CH_EMULATED __m512i _mm512_slli_epi32(__m512i v, int by) { return (__m512i)((emulated::Words)v << by); }
// The lower words of each pair.
CH_EMULATED __m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((emulated::Quads)a & 0xffffffff) * ((emulated::Quads)b & 0xffffffff));
}
CH_EMULATED __mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b) {
  const emulated::Halves x = (emulated::Halves)a, y = (emulated::Halves)b;
  __mmask32 mask = 0;
  for (int i = 0; i < 32; i++) mask |= (__mmask32)(x[i] >= y[i]) << i;
  return mask;
}
CH_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  const emulated::HalfOfHalves from = (emulated::HalfOfHalves)v;
  return (__m512i)__builtin_convertvector(from, emulated::Words);
}

// ---- floats -------------------------------------------------------------------------------------------------

CH_EMULATED __m128 _mm_add_ps(__m128 a, __m128 b) { return a + b; }
CH_EMULATED __m256 _mm256_add_ps(__m256 a, __m256 b) { return a + b; }
CH_EMULATED __m128 _mm_add_ss(__m128 a, __m128 b) { return __m128{a[0] + b[0], a[1], a[2], a[3]}; }
// The upper half of b, then that of a.
CH_EMULATED __m128 _mm_movehl_ps(__m128 a, __m128 b) { return __m128{b[2], b[3], a[2], a[3]}; }
CH_EMULATED __m128 _mm_movehdup_ps(__m128 v) { return __m128{v[1], v[1], v[3], v[3]}; }
CH_EMULATED float _mm_cvtss_f32(__m128 v) { return v[0]; }
// The second operand if one is NaN.
CH_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
CH_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
CH_EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }

// Halves first, then their halves, as compilers do it: no single instruction.
CH_EMULATED float _mm512_reduce_max_ps(__m512 v) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

// If one is NaN, ordered comparisons are false and the others, of "not", are true.
CH_EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; i++) {
    const bool holds = how == _CMP_GT_OQ ? a[i] > b[i] : how == _CMP_GE_OQ ? a[i] >= b[i]
                       : how == _CMP_UNORD_Q ? a[i] != a[i] || b[i] != b[i]
                       : how == _CMP_NLT_UQ ? !(a[i] < b[i]) : !(a[i] <= b[i]);
    mask |= (__mmask16)(holds << i);
  }
  return mask;
}

// Rounds to integers only (bits 4 to 7 are 0), to the nearest or down (bits 0 and 1).
CH_EMULATED __m512 _mm512_roundscale_ps(__m512 v, int how) {
  for (int i = 0; i < 16; i++) v[i] = how & 1 ? floorf(v[i]) : rintf(v[i]);
  return v;
}
// What rounding removes; 0 for infinity.
CH_EMULATED __m512 _mm512_reduce_ps(__m512 v, int how) {
  const __m512 whole = _mm512_roundscale_ps(v, how);
  for (int i = 0; i < 16; i++) v[i] = fabsf(v[i]) == __builtin_inff() ? 0.0f : v[i] - whole[i];
  return v;
}
// v * 2**floor(power).
CH_EMULATED __m512 _mm512_scalef_ps(__m512 v, __m512 power) {
  for (int i = 0; i < 16; i++) {
    const float p = power[i];
    if (p != p) v[i] = p;
    else if (fabsf(p) == __builtin_inff()) v[i] *= p > 0 ? p : 0.0f;
    else v[i] = ldexpf(v[i], (int)fmaxf(-1000.0f, fminf(1000.0f, floorf(p))));
  }
  return v;
}

// 0 where the mask is not set.
CH_EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 v, __m512 power) {
  const __m512 scaled = _mm512_scalef_ps(v, power);
  for (int i = 0; i < 16; i++) v[i] = mask >> i & 1 ? scaled[i] : 0.0f;
  return v;
}

// ---- 16-bit elements ----------------------------------------------------------------------------------------

CH_EMULATED __m512 _mm512_cvtph_ps(__m256i v) {
  const emulated::HalfOfHalves from = (emulated::HalfOfHalves)v;
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = emulated::of_half(from[i]);
  return r;
}
CH_EMULATED __m256i _mm512_cvtps_ph(__m512 v, int) {
  emulated::HalfOfHalves r;
  for (int i = 0; i < 16; i++) r[i] = emulated::half_of(v[i]);
  return (__m256i)r;
}
CH_EMULATED __m256bh _mm512_cvtneps_pbh(__m512 v) {
  emulated::HalfOfHalves r;
  for (int i = 0; i < 16; i++) r[i] = emulated::bfloat_of(v[i]);
  return (__m256bh)r;
}
// Those of b below those of a.
CH_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  emulated::Halves r;
  for (int i = 0; i < 16; i++) r[i] = emulated::bfloat_of(b[i]);
  for (int i = 0; i < 16; i++) r[i + 16] = emulated::bfloat_of(a[i]);
  return (__m512bh)r;
}
// The upper product of each pair first; a product of two bfloat16 is exact in float32, so there are two roundings.
CH_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const emulated::Words x = (emulated::Words)a, y = (emulated::Words)b;
  for (int i = 0; i < 16; i++) {
    float one = emulated::flushed(sum[i]);
    for (int upper = 1; upper >= 0; upper--) {
      const float of_x = emulated::float_of(upper ? x[i] & 0xffff0000 : x[i] << 16);
      const float of_y = emulated::float_of(upper ? y[i] & 0xffff0000 : y[i] << 16);
      one = emulated::flushed(one + emulated::flushed(of_x) * emulated::flushed(of_y));
    }
    sum[i] = one;
  }
  return sum;
}

// Tiles: the sums of the even and of the odd steps of a row start at 0, are added to each other, and then to the tile's.
namespace emulated {

struct Tiles {
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t data[8][16][64];
};
inline __thread Tiles tiles;

}  // namespace emulated

CH_EMULATED void _tile_release() { memset(&emulated::tiles, 0, sizeof(emulated::tiles)); }
CH_EMULATED void _tile_loadconfig(const void* shapes) {
  _tile_release();
  memcpy(emulated::tiles.row_bytes, (const char*)shapes + 16, sizeof(emulated::tiles.row_bytes));
  memcpy(emulated::tiles.rows, (const char*)shapes + 48, sizeof(emulated::tiles.rows));
}
CH_EMULATED void _tile_zero(int tile) { memset(emulated::tiles.data[tile], 0, sizeof(emulated::tiles.data[tile])); }
CH_EMULATED void _tile_loadd(int tile, const void* from, long stride) {
  _tile_zero(tile);
  for (int row = 0; row < emulated::tiles.rows[tile]; row++)
    memcpy(emulated::tiles.data[tile][row], (const char*)from + row * stride, emulated::tiles.row_bytes[tile]);
}
CH_EMULATED void _tile_stored(int tile, void* to, long stride) {
  for (int row = 0; row < emulated::tiles.rows[tile]; row++)
    memcpy((char*)to + row * stride, emulated::tiles.data[tile][row], emulated::tiles.row_bytes[tile]);
}
static inline void _tile_dpbf16ps(int sums, int left, int right) {
  const auto half = [](int tile, int row, int place) {
    uint16_t bits;
    memcpy(&bits, emulated::tiles.data[tile][row] + 2 * place, sizeof(bits));
    return emulated::flushed(emulated::float_of((uint32_t)bits << 16));
  };
  for (int row = 0; row < emulated::tiles.rows[sums]; row++)
    for (int column = 0; column < emulated::tiles.row_bytes[sums] / 4; column++) {
      float even_and_odd[2] = {};
      for (int step = 0; step < emulated::tiles.row_bytes[left] / 2; step++) {
        float& sum = even_and_odd[step % 2];
        sum = emulated::flushed(__builtin_fmaf(half(left, row, step), half(right, step / 2, 2 * column + step % 2), sum));
      }
      float sum;
      uint8_t* at = emulated::tiles.data[sums][row] + 4 * column;
      memcpy(&sum, at, sizeof(sum));
      sum = emulated::flushed(emulated::flushed(sum) + emulated::flushed(even_and_odd[0] + even_and_odd[1]));
      memcpy(at, &sum, sizeof(sum));
    }
}

// ---- integers -----------------------------------------------------------------------------------------------

CH_EMULATED __m512i _mm512_setzero_si512() { return (__m512i){}; }
CH_EMULATED __m512i _mm512_set1_epi8(char x) {
  __m512i r;
  memset(&r, x, sizeof(r));
  return r;
}
CH_EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
CH_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((emulated::Words)a + (emulated::Words)b); }

namespace emulated {

// Each of the elements of type From as one of type To.
template <class From, class To, class V> CH_EMULATED __m512i converted(const V& v) {
  To r[64 / sizeof(To)];
  for (size_t i = 0; i < 64 / sizeof(To); i++) r[i] = (To)read<From>((const char*)&v + i * sizeof(From));
  return read<__m512i>(r);
}

}  // namespace emulated

CH_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i v) { return emulated::converted<uint8_t, int32_t>(v); }
CH_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i v) { return emulated::converted<int8_t, int32_t>(v); }
CH_EMULATED __m512i _mm512_cvtepi8_epi16(__m256i v) { return emulated::converted<int8_t, int16_t>(v); }
CH_EMULATED __m512 _mm512_cvtepi32_ps(__m512i v) { return (__m512)emulated::converted<int32_t, float>(v); }

// Sums of two products of signed halves, and of four of unsigned by signed bytes; they wrap around.
CH_EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  emulated::Words r = {};
  for (int i = 0; i < 32; i++)
    r[i / 2] += (uint32_t)((int32_t)emulated::read<int16_t>((const char*)&a + 2 * i) *
                           (int32_t)emulated::read<int16_t>((const char*)&b + 2 * i));
  return (__m512i)r;
}
CH_EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  emulated::Words r = (emulated::Words)sum;
  for (int i = 0; i < 64; i++)
    r[i / 4] += (uint32_t)((int32_t)emulated::read<uint8_t>((const char*)&a + i) *
                           (int32_t)emulated::read<int8_t>((const char*)&b + i));
  return (__m512i)r;
}
