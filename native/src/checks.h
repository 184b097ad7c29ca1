// Checks of a description's counts, strides and pointers, before any pointer is dereferenced.
#pragma once

#include <initializer_list>

#include "isa.h"

// Returns from the function with the first code that is not CH_OK.
#define CH_TRY(expression)                 \
  do {                                     \
    const int code_ = (expression);        \
    if (code_ != CH_OK) return code_;      \
  } while (false)

namespace clearhead {

// Positions are bounded so that the sum or difference of two of them fits in int64.
inline constexpr int64_t max_position = int64_t{1} << 48;
inline constexpr int64_t max_count = INT32_MAX;
inline constexpr int max_threads = 4096;
// No process can address more memory.
inline constexpr int64_t max_bytes = int64_t{1} << 56;

struct Axis {
  int64_t count, stride;
};

struct Layout {
  Axis axes[3];
  int64_t last;  // elements of the contiguous last axis, or the reach of a strided one
};

enum class Access { read, write };

// Elements from the first to one past the last that is accessed; -1 if a stride is negative or the sum overflows.
inline int64_t reach(const Layout& layout) {
  int64_t sum = layout.last;
  bool empty = layout.last == 0;
  for (const Axis& axis : layout.axes) {
    if (axis.stride < 0) return -1;
    if (axis.count == 0) empty = true;
    int64_t step = 0;
    if (axis.count > 1 && (__builtin_mul_overflow(axis.count - 1, axis.stride, &step) ||
                           __builtin_add_overflow(sum, step, &sum)))
      return -1;
  }
  return empty ? 0 : sum;
}

// Whether no two indices share an address: each axis steps over everything that the axes of smaller stride cover.
inline bool non_overlapping(const Layout& layout) {
  int64_t covered = layout.last;
  bool done[3] = {false, false, false};
  for (int round = 0; round < 3; ++round) {
    int next = -1;
    for (int i = 0; i < 3; ++i) {
      if (!done[i] && (next < 0 || layout.axes[i].stride < layout.axes[next].stride)) next = i;
    }
    done[next] = true;
    const Axis& axis = layout.axes[next];
    if (axis.count <= 1) continue;
    if (axis.stride < covered) return false;
    covered += (axis.count - 1) * axis.stride;
  }
  return true;
}

inline int check_memory(const void* data, const Layout& layout, int64_t size, Access access = Access::read) {
  const int64_t elements = reach(layout);
  int64_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(elements, size, &bytes) || bytes > max_bytes) return CH_BAD_STRIDE;
  if (bytes == 0) return CH_OK;
  const uintptr_t first = reinterpret_cast<uintptr_t>(data);
  uintptr_t end = 0;
  if (data == nullptr || first % static_cast<uintptr_t>(size) != 0) return CH_BAD_POINTER;
  if (__builtin_add_overflow(first, static_cast<uintptr_t>(bytes), &end)) return CH_BAD_STRIDE;
  return access == Access::write && !non_overlapping(layout) ? CH_BAD_STRIDE : CH_OK;
}

inline bool is_count(int64_t count) { return count >= 0 && count <= max_count; }

// Whether dropout can draw from this place on.
inline bool is_place(int64_t place) { return place >= 0 && place <= max_position; }

// Whether `dropped` of CH_LEVELS is a valid dropout probability.
inline bool is_dropout_level(int32_t dropped) { return dropped >= 0 && dropped < CH_LEVELS; }

// Whether batch * heads * rows * last * 1 MiB fits in int64, which covers every padding and packing.
inline bool countable(int64_t batch, int64_t heads, int64_t rows, int64_t last) {
  int64_t product = int64_t{1} << 20;
  for (int64_t factor : {batch, heads, rows, last}) {
    if (factor > 0 && __builtin_mul_overflow(product, factor, &product)) return false;
  }
  return true;
}

// Checks size, version and instruction set of a description; returns the set's kernels in `kernels`.
template <class Description> int check_library(const Description* work, const Kernels** kernels) {
  if (work == nullptr) return CH_BAD_POINTER;
  if (work->size != sizeof(Description) || work->abi != CH_ABI) return CH_BAD_SIZE;
  *kernels = kernels_of(work->isa);
  return *kernels == nullptr ? CH_BAD_ISA : CH_OK;
}

}  // namespace clearhead
