// Rows that are read or written soon, prefetched a few at a time during other work: packing and stores would wait for
// memory otherwise.
#pragma once

#include "work.h"

namespace CH_NS {

struct Prefetch {
  struct Range {
    const char* next;
    int64_t stride, left, bytes;
    bool written;
  };
  // Bytes of one range: all of them fit in L2 beside the working set.
  static constexpr int64_t MAX_BYTES = int64_t(1) << 17;

  Range ranges[7];
  int count, at;
  int64_t total, rows_per_step;

  void clear() { count = at = 0, total = rows_per_step = 0; }

  template <class IO>
  void add(const ch_tensor& t, int64_t b, int64_t h, int64_t rows, int64_t dim, bool written = false) {
    const int64_t size = (int64_t)sizeof(typename IO::type), bytes = dim * size;
    rows = minimum(rows, MAX_BYTES / bytes);
    ranges[count++] = Range{(const char*)CH_NS::at<IO>(t, b, h, 0), t.row * size, rows, bytes, written};
    total += rows;
  }
  // Distributes the rows over this many steps.
  void spread_over(int64_t steps) { rows_per_step = total / maximum(steps, (int64_t)1) + 1; }

  CH_INLINE void step() {
    for (int64_t n = rows_per_step; n > 0 && at < count;) {
      Range& range = ranges[at];
      if (range.left <= 0) {
        at++;
        continue;
      }
      if (range.written) {
        for (int64_t c = 0; c < range.bytes; c += LINE_BYTES) prefetch_line<2, true>(range.next + c);
      } else {
        for (int64_t c = 0; c < range.bytes; c += LINE_BYTES) prefetch_line(range.next + c);
      }
      range.next += range.stride;
      range.left--;
      n--;
    }
  }
};

}  // namespace CH_NS
