// The GEMM micro-kernel of all kernels: a few rows of A times a panel of B, accumulated in registers.
//
// C[MR x NV*VL] = (or +=) sum over steps of A[row][step] * B[step][column]. A is read one operand at a time and
// broadcast, so its strides are free: a transposed A costs nothing. B is a panel, with `ldb` operands from step to
// step. 6 rows of 4 vectors are 24 sums in flight, which covers two FMA units of latency four and leaves registers for
// a step of B. An operand is a float, or with CH_BF16DOT a pair of bfloat16 along the steps for the bf16 dot-product
// instructions. With CH_AMX the same operands are multiplied in tiles (amx_tile.h).
#pragma once

#include "amx_tile.h"

namespace CH_NS {

#if defined(CH_AVX512) || defined(CH_NEON)
constexpr int NV = 4;  // vectors of a panel, for sets with 32 registers
#else
constexpr int NV = 2;
#endif
constexpr int MR = 6;  // rows at a time
constexpr int PW = NV * VL;  // columns of a panel

// Multiply-add of float32 operands: lane by lane, or with one operand broadcast. PACK is the number of elements per
// operand, LOAD_VECTORS the number of vectors of B per load, HEIGHT the number of rows at a time, BLOCK the number of
// operands that a sum adds together: its steps start at a multiple of it and are zero-padded to one.
struct Fp32Fma {
  typedef float operand;
  typedef float right;
  static constexpr int PACK = 1, LOAD_VECTORS = 1, HEIGHT = MR, BLOCK = 1;
  static CH_INLINE Broadcast broadcast(const float* a) { return broadcast_float(a); }
  static CH_INLINE vf get(const float* b) { return load(b); }
  static CH_INLINE vf row(const float* a) { return load(a); }
  static CH_INLINE vf madd(vf sum, vf a, vf b) { return fused(a, b, sum); }
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) { return madd_float(sum, a, b); }
};

#if defined(CH_BF16DOT)
// The same with bf16 dot-product instructions; an operand is two neighbouring bfloat16.
struct Bf16Dot {
  typedef uint32_t operand;
  typedef uint32_t right;
  static constexpr int PACK = 2, LOAD_VECTORS = 1, HEIGHT = MR, BLOCK = 1;
  static CH_INLINE Broadcast broadcast(const uint32_t* a) { return broadcast_pair(a); }
  static CH_INLINE vf get(const uint32_t* b) { return (vf)*(const vu_any*)b; }
  static CH_INLINE vf row(const uint32_t* a) { return get(a); }
  static CH_INLINE vf madd(vf sum, vf a, vf b) { return bf16_dot(sum, a, b); }
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) { return bf16_dot_broadcast(sum, a, b); }
};
#endif

#if defined(CH_AMX)
// The same operands in tiles.
struct AmxTile : Bf16Dot {
  static constexpr int HEIGHT = TILE_ROWS, BLOCK = TILE_OPERANDS;
};
constexpr int MAX_HEIGHT = TILE_ROWS;
#else
constexpr int MAX_HEIGHT = MR;
#endif

// How the set multiplies bfloat16: in tiles, by bf16 dot-product instructions, or in float32.
#if defined(CH_AMX)
typedef AmxTile Bf16Gemm;
#elif defined(CH_BF16DOT)
typedef Bf16Dot Bf16Gemm;
#else
typedef Fp32Fma Bf16Gemm;
#endif

// Whether M multiplies in tiles. The steps of A are then contiguous.
template <class M> constexpr bool in_tiles() { return M::BLOCK > 1; }

// How the sums are combined with C. CONTINUE starts from C, so that a sum in several calls has the bits of one in a
// single call; C then has the vectors in the order in which M loads them, until `put_in_order`. MERGE adds a tile of an
// online softmax.
enum Update { SET, ADD, CONTINUE, MERGE };

// Of each row, for MERGE: of what C has, and of the sums; whole vectors. One pointer to both: with two of them the loop
// would need more registers for addresses than there are.
struct Factors {
  static constexpr int ROWS = (MR + VL - 1) / VL * VL;
  float before[ROWS], sums[ROWS];
};

// What a micro-kernel prefetches into L2 at each of its steps: nothing, or the next bytes of what is read later.
struct NoPrefetch {
  CH_INLINE void step() {}
};
struct StepPrefetch {
  const char* next;
  int64_t bytes;
  CH_INLINE void step() { prefetch_line(next), next += bytes; }
};

// ROWS x VECS sums, each passed to `emit(row, vector, sum)`. They start from C where they continue it.
template <class M, int ROWS, int VECS, bool CONTINUES = false, class Emit, class Prefetching = NoPrefetch>
CH_INLINE void micro_kernel(int64_t steps, const typename M::operand* __restrict a, int64_t a_row, int64_t a_step,
                            const typename M::right* __restrict b, int64_t ldb, const Emit& emit,
                            const float* c = nullptr, int64_t ldc = 0, Prefetching prefetching = {}) {
  vf sum[ROWS][VECS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sum[r][v] = CONTINUES ? load(c + r * ldc + v * VL) : (vf){};
  for (int64_t s = 0; s < steps; s++) {
    prefetching.step();
    vf bv[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) {
      if constexpr (M::LOAD_VECTORS == 2)
        if (v / 2 * 2 + 1 < VECS) {
          if (v % 2 == 0) M::get_two(b + v * VL, bv[v], bv[v + 1]);
          continue;
        }
      bv[v] = M::get(b + v * VL);
      if (ROWS == 2 || ROWS == 3) hold(bv[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const Broadcast av = M::broadcast(a + r * a_row);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sum[r][v] = M::madd_broadcast(sum[r][v], av, bv[v]);
    }
    a += a_step;
    b += ldb;
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    if constexpr (M::LOAD_VECTORS == 2 && !CONTINUES)
#pragma GCC unroll 2
      for (int v = 0; v + 1 < VECS; v += 2) M::put_in_order(sum[r][v], sum[r][v + 1]);
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) emit(r, v, sum[r][v]);
  }
}

template <class M, int ROWS, int VECS, Update UPDATE, class Prefetching>
CH_INLINE void gemm_block(int64_t steps, const typename M::operand* __restrict a, int64_t a_row, int64_t a_step,
                          const typename M::right* __restrict b, int64_t ldb, float* __restrict c, int64_t ldc,
                          const Factors* factors, Prefetching prefetching) {
  const auto emit = [&](int r, int v, vf sum) CH_INLINED {
    // C is added at the end: added at the start it would lengthen the chain of roundings.
    float* at = c + r * ldc + v * VL;
    if constexpr (UPDATE == ADD) sum += load(at);
    if constexpr (UPDATE == MERGE) sum = merged(load(at), all(factors->before[r]), sum, all(factors->sums[r]));
    store(at, sum);
  };
  micro_kernel<M, ROWS, VECS, UPDATE == CONTINUE>(steps, a, a_row, a_step, b, ldb, emit, c, ldc, prefetching);
}

template <class M, int VECS, Update UPDATE, class Prefetching>
__attribute__((noinline)) void gemm_rows(int rows, int64_t steps, const typename M::operand* a, int64_t a_row,
                                         int64_t a_step, const typename M::right* b, int64_t ldb, float* c,
                                         int64_t ldc, const Factors* factors, Prefetching prefetching) {
  switch (rows) {
    case 6: return gemm_block<M, 6, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    case 5: return gemm_block<M, 5, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    case 4: return gemm_block<M, 4, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    case 3: return gemm_block<M, 3, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    case 2: return gemm_block<M, 2, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    default: return gemm_block<M, 1, VECS, UPDATE>(steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
  }
}

#if defined(CH_AMX)
// The same in tiles: A and B are readable and zero-padded up to a whole block of steps.
template <Update UPDATE>
CH_INLINE void gemm_in_tiles(int rows, int vecs, int64_t steps, const uint32_t* a, int64_t a_row, const uint32_t* b,
                             int64_t ldb, float* c, int64_t ldc, const Factors* factors) {
  const int64_t blocks = (steps + TILE_OPERANDS - 1) / TILE_OPERANDS;
  set_tile_rows(rows);
  if constexpr (UPDATE == SET || UPDATE == CONTINUE)
    return multiply_tiles<UPDATE == CONTINUE>(vecs, blocks, a, a_row, b, ldb, c, ldc);
  alignas(64) float sums[TILE_ROWS * PW];
  multiply_tiles<false>(vecs, blocks, a, a_row, b, ldb, sums, PW);
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vecs; v++) {
      float* at = c + r * ldc + v * VL;
      const vf sum = load(sums + r * PW + v * VL);
      if constexpr (UPDATE == ADD) store(at, sum + load(at));
      else store(at, merged(load(at), all(factors->before[r]), sum, all(factors->sums[r])));
    }
}
#endif

// At most M::HEIGHT rows and NV vectors of columns.
template <class M, Update UPDATE, class Prefetching = NoPrefetch>
CH_INLINE void gemm(int rows, int vecs, int64_t steps, const typename M::operand* a, int64_t a_row, int64_t a_step,
                    const typename M::right* b, int64_t ldb, float* c, int64_t ldc,
                    const Factors* factors = nullptr, Prefetching prefetching = {}) {
#if defined(CH_AMX)
  if constexpr (in_tiles<M>()) return gemm_in_tiles<UPDATE>(rows, vecs, steps, a, a_row, b, ldb, c, ldc, factors);
#endif
  if constexpr (NV == 4) {
    if (vecs == 4) return gemm_rows<M, 4, UPDATE>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
    if (vecs == 3) return gemm_rows<M, 3, UPDATE>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
  }
  if (vecs == 2) return gemm_rows<M, 2, UPDATE>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
  return gemm_rows<M, 1, UPDATE>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factors, prefetching);
}

}  // namespace CH_NS
