// Tiles of AMX: eight registers of 16 rows of 64 bytes, and TDPBF16PS, which multiplies 16 x 32 bfloat16 of A by the
// VNNI layout (pairs of steps) of 32 x 16 of B. The shapes of the registers are a state of the thread.
//
// A sum runs over blocks of 32 steps: within a block the even and the odd steps have a sum each, which are added to
// each other and then to C. So its bits depend on where blocks start, and on nothing else: fewer rows in a tile, zeros as
// padding, A and B exchanged, or a sum in several calls give the same bits.
#pragma once

#include "bf16_dot.h"

namespace CH_NS {

#if defined(CH_AMX)

constexpr int TILE_ROWS = 16;
constexpr int TILE_OPERANDS = 16;  // pairs of steps of a block

// Rows of A and C that this thread's tile registers have; 0 if their shapes are not ours.
inline __thread int tile_rows = 0;

// The shapes of all tile registers: 0 to 3 have sums and 4 and 5 rows of A, with `rows` rows; 6 and 7 have B.
CH_INLINE void set_tile_rows(int rows) {
  if (tile_rows == rows) return;
  struct alignas(64) {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes = {};
  shapes.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    shapes.row_bytes[tile] = 4 * TILE_OPERANDS;
    shapes.rows[tile] = (uint8_t)(tile < 6 ? rows : TILE_OPERANDS);
  }
  _tile_loadconfig(&shapes);
  tile_rows = rows;
}

// Part of a thread's work: other libraries set shapes of their own before and after it, so it leaves none.
class TileScope {
 public:
  TileScope() { tile_rows = 0; }
  ~TileScope() {
    if (tile_rows == 0) return;
    _tile_release();
    tile_rows = 0;
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// C[rows x 16 * VECS] = (or +=) `blocks` blocks of A times B. Strides are in bytes. The registers' numbers are literals
// of the intrinsics.
template <int VECS, bool CONTINUES>
__attribute__((noinline)) void multiply_tiles(int64_t blocks, const char* a, int64_t a_row, const char* b, int64_t b_row,
                                              char* c, int64_t c_row) {
  // The intrinsics do not tell the compiler that they read memory.
  asm volatile("" : : : "memory");
  if constexpr (CONTINUES) {
    _tile_loadd(0, c, c_row);
    if constexpr (VECS > 1) _tile_loadd(1, c + 64, c_row);
    if constexpr (VECS > 2) _tile_loadd(2, c + 128, c_row);
    if constexpr (VECS > 3) _tile_loadd(3, c + 192, c_row);
  } else {
    _tile_zero(0);
    if constexpr (VECS > 1) _tile_zero(1);
    if constexpr (VECS > 2) _tile_zero(2);
    if constexpr (VECS > 3) _tile_zero(3);
  }
  for (int64_t block = 0; block < blocks; block++, a += 64, b += TILE_OPERANDS * b_row) {
    _tile_loadd(4, a, a_row);
    _tile_loadd(6, b, b_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (VECS > 1) {
      _tile_loadd(7, b + 64, b_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (VECS > 2) {
      _tile_loadd(6, b + 128, b_row);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (VECS > 3) {
      _tile_loadd(7, b + 192, b_row);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, c_row);
  if constexpr (VECS > 1) _tile_stored(1, c + 64, c_row);
  if constexpr (VECS > 2) _tile_stored(2, c + 128, c_row);
  if constexpr (VECS > 3) _tile_stored(3, c + 192, c_row);
}

template <bool CONTINUES>
CH_INLINE void multiply_tiles(int vecs, int64_t blocks, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                              float* c, int64_t c_row) {
  const auto multiply = vecs == 4   ? multiply_tiles<4, CONTINUES>
                        : vecs == 3 ? multiply_tiles<3, CONTINUES>
                        : vecs == 2 ? multiply_tiles<2, CONTINUES>
                                    : multiply_tiles<1, CONTINUES>;
  multiply(blocks, (const char*)a, 4 * a_row, (const char*)b, 4 * b_row, (char*)c, 4 * c_row);
}

// Sums of `rows` rows of A in place, at most 32, with a B of 16 columns, which is contiguous: C[rows][16]. `upcoming`
// prefetches what is read after these rows.
template <bool BOTH, class Upcoming>
CH_INLINE void multiply_rows(int64_t blocks, const char* a, int64_t a_row, const uint32_t* b, Upcoming& upcoming, float* c) {
  asm volatile("" : : : "memory");
  _tile_zero(0);
  if constexpr (BOTH) _tile_zero(1);
  for (int64_t block = 0; block < blocks; block++, a += 64, b += TILE_OPERANDS * TILE_OPERANDS) {
    _tile_loadd(6, b, 64);
#pragma GCC unroll 2
    for (int half = 0; half < (BOTH ? 2 : 1); half++) {
      const char* next = upcoming.next(a);
#pragma GCC unroll 16
      for (int line = 0; line < TILE_ROWS; line++) prefetch_line(next + line * LINE_BYTES);
    }
    _tile_loadd(4, a, a_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (BOTH) {
      _tile_loadd(5, a + TILE_ROWS * a_row, a_row);
      _tile_dpbf16ps(1, 5, 6);
    }
  }
  _tile_stored(0, c, 64);
  if constexpr (BOTH) _tile_stored(1, c + TILE_ROWS * TILE_OPERANDS, 64);
}

template <class Upcoming>
__attribute__((noinline)) void multiply_rows_in_place(int rows, int64_t blocks, const char* a, int64_t a_row,
                                                      const uint32_t* b, Upcoming& upcoming, float* c) {
  if (rows >= 2 * TILE_ROWS) {
    set_tile_rows(TILE_ROWS);
    return multiply_rows<true>(blocks, a, a_row, b, upcoming, c);
  }
  for (int r = 0; r < rows; r += TILE_ROWS) {
    set_tile_rows(minimum(TILE_ROWS, rows - r));
    multiply_rows<false>(blocks, a + r * a_row, a_row, b, upcoming, c + r * TILE_OPERANDS);
  }
}

#else

class TileScope {
 public:
  TileScope() {}
};

#endif

}  // namespace CH_NS
