// Rotary position embedding (Su et al. 2021, section 3.2.2): pairs of channels rotated by the angle of their position.
#pragma once

#include "work.h"

namespace CH_NS {

template <class IO> class Rotating {
  typedef typename IO::type type;

 public:
  explicit Rotating(const ch_rotation& work) : w(work), half(work.columns / 2) {}

  // All heads of a row share its cos/sin.
  int run() const {
    const double elements = (double)w.batch * (double)w.heads * (double)w.rows * (double)w.columns;
    const int64_t units = (w.rows + UNIT_ROWS - 1) / UNIT_ROWS;
    parallel(threads_for(w, 2.0 * elements), w.batch * units, [&](int64_t unit) {
      const int64_t first = unit % units * UNIT_ROWS, last = minimum(first + UNIT_ROWS, w.rows);
      for (int64_t row = first; row < last; row++)
        for (int64_t head = 0; head < w.heads; head++) rotate_row(unit / units, head, row);
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  static constexpr int64_t UNIT_ROWS = 16;

  const ch_rotation& w;
  const int64_t half;

  CH_INLINE void rotate_row(int64_t b, int64_t h, int64_t row) const {
    const float *cosines = w.table + (w.first + row) * w.columns, *sines = cosines + half;
    const type* from = at<IO>(w.source, b, h, row);
    type* to = at<IO>(w.target, b, h, row);
    const vf direction = all(w.back ? -1.0f : 1.0f);
    int64_t c = 0;
    for (; c + VL <= half; c += VL)
      rotate_vector(from + c, from + c + half, to + c, to + c + half, cosines + c, sines + c, direction);
    if (c == half) return;
    // The remainder uses the same instructions: bits must not depend on a channel's index.
    const size_t count = (size_t)(half - c);
    type x[VL] = {}, y[VL] = {};
    float cosine[VL] = {}, sine[VL] = {};
    memcpy(x, from + c, count * sizeof(type)), memcpy(y, from + c + half, count * sizeof(type));
    memcpy(cosine, cosines + c, count * sizeof(float)), memcpy(sine, sines + c, count * sizeof(float));
    rotate_vector(x, y, x, y, cosine, sine, direction);
    memcpy(to + c, x, count * sizeof(type)), memcpy(to + c + half, y, count * sizeof(type));
  }

  // Loads both before it stores either: the target may be the source.
  static CH_INLINE void rotate_vector(const type* from_x, const type* from_y, type* to_x, type* to_y, const float* cosines,
                                      const float* sines, vf direction) {
    const vf x = get_vector<IO>(from_x), y = get_vector<IO>(from_y);
    const vf cosine = load(cosines), sine = load(sines) * direction;
    put_vector<IO>(to_x, fused(x, cosine, -(y * sine)));
    put_vector<IO>(to_y, fused(y, cosine, x * sine));
  }
};

}  // namespace CH_NS
