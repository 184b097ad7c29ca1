// Linear layers on 8-bit integers: rows of x are rounded to integers of their own scale, and multiplied by the integers
// of the weight. output = (sum over steps of (x_int - zero) * weight_int) * x_scale * scale + bias.
//
// The scales of rows and the rounding are those of torchao (`Rounding`) and of torch.ao (one scale for all rows), step by
// step in the dtype of x, so that the integers are the same. A row with NaN or infinity has NaN as its scale.
//
// Few rows are dot products with the weight where it lies; many are multiplied by panels of it, which are filled in the call
// or were packed before. The sums are the same.
#pragma once

#include "integer_dot.h"
#include "quantized.h"

namespace CH_NS {

// A float of the dtype, as torch's operators round each result.
template <class IO> CH_INLINE float rounded_to(float x) {
  typename IO::type rounded;
  put_one<IO>(&rounded, x);
  return get_one<IO>(&rounded);
}

// Integers of the size of an element.
int32_t signed_bits(float);
int16_t signed_bits(uint16_t);

// Smallest and largest element, with 0 among them; NaN if there is a NaN or infinity.
struct Extent {
  float low = 0.0f, high = 0.0f;
};

template <class IO> Extent extent_of(const typename IO::type* row, int64_t count) {
  constexpr int AT_ONCE = 4;  // chains of dependent operations
  vf low[AT_ONCE] = {}, high[AT_ONCE] = {}, zero[AT_ONCE] = {};
  const auto add = [&](int i, vf x) CH_INLINED {
    low[i] = vmin(low[i], x), high[i] = vmax(high[i], x);
    zero[i] += x * (vf){};
  };
  int64_t c = 0;
  for (; c + AT_ONCE * VL <= count; c += AT_ONCE * VL)
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++) add(i, get_vector<IO>(row + c + i * VL));
  for (; c < count; c += VL) {
    float rest[VL];
    get_row<IO>(row + c, (int)minimum((int64_t)VL, count - c), rest, VL);
    add(0, load(rest));
  }
#pragma GCC unroll 4
  for (int i = 1; i < AT_ONCE; i++)
    low[0] = vmin(low[0], low[i]), high[0] = vmax(high[0], high[i]), zero[0] += zero[i];
  const float nan = sum_of(zero[0]);
  return {-max_of(-low[0]) + nan, max_of(high[0]) + nan};
}

// The largest magnitude; NaN if there is a NaN or infinity. Bits of floats without their sign are in the order of the floats.
template <class IO> float largest_of(const typename IO::type* row, int64_t count) {
  typedef decltype(signed_bits(typename IO::type{})) bits;
  typedef bits Vector __attribute__((vector_size(VL * 4)));
  constexpr int LANES_OF_BITS = VL * 4 / sizeof(bits);
  const Vector without_sign = ((bits)((uint64_t)1 << (8 * sizeof(bits) - 1)) ^ (bits)-1) + Vector{};
  Vector most[2] = {};
  const auto add = [&](int i, const void* from) CH_INLINED {
    Vector magnitude;
    memcpy(&magnitude, from, sizeof(magnitude));
    magnitude &= without_sign;
    most[i] = magnitude > most[i] ? magnitude : most[i];
  };
  int64_t c = 0;
  for (; c + 2 * LANES_OF_BITS <= count; c += 2 * LANES_OF_BITS) add(0, row + c), add(1, row + c + LANES_OF_BITS);
  for (; c < count; c += LANES_OF_BITS) {
    typename IO::type rest[LANES_OF_BITS] = {};
    memcpy(rest, row + c, (size_t)minimum((int64_t)LANES_OF_BITS, count - c) * sizeof(*row));
    add(0, rest);
  }
  bits largest = 0;
  for (int i = 0; i < LANES_OF_BITS; i++) largest = maximum(largest, maximum(most[0][i], most[1][i]));
  typename IO::type as_float;
  memcpy(&as_float, &largest, sizeof(largest));
  const float value = get_one<IO>(&as_float);
  return value + value * 0.0f;
}

// Rounds to nearest, ties to even: below 2**22 the addition drops the fraction; larger ones are out of every range.
CH_INLINE vf nearest(vf x) {
  const vf most = all(4194304.0f), shift = all(12582912.0f);
  x = x < most ? x : most;
  x = x > -most ? x : -most;
  return (x + shift) - shift;
}
CH_INLINE float nearest(float x) { return nearest(all(x))[0]; }

// The scale of a row, and the integer that stands for 0.
struct RowScale {
  float scale;
  int32_t zero;
};

CH_INLINE float clamped(float x, float low, float high) { return x > low ? (x < high ? x : high) : low; }

template <class IO> RowScale symmetric_scale(float largest, int low, int high) {
  const float scale = rounded_to<IO>(largest / ((float)(high - low) / 2.0f));
  return {scale < __FLT_EPSILON__ ? __FLT_EPSILON__ : scale, (low + high + 1) / 2};
}

template <class IO> RowScale asymmetric_scale(const Extent& extent, int low, int high) {
  const float range = rounded_to<IO>(extent.high - extent.low);
  float scale = rounded_to<IO>(range / (float)(high - low));
  if (scale < __FLT_EPSILON__) scale = __FLT_EPSILON__;
  const float zero = (float)low - nearest(rounded_to<IO>(extent.low / scale));
  return {scale, (int32_t)clamped(rounded_to<IO>(zero), (float)low, (float)high)};
}

// torch.ao's (FBGEMM's ChooseQuantizationParams): in double, and the integer of 0 from the end that has the smaller error.
inline RowScale tensor_scale(const Extent& extent, int low, int high) {
  constexpr float SMALLEST = 6.1e-5f;
  double least = extent.low, most = extent.high, scale = (most - least) / (high - low);
  if ((float)scale == 0.0f || 1.0f / (float)scale == INF) scale = 0.1;
  if (scale < SMALLEST) least *= SMALLEST / scale, most *= SMALLEST / scale, scale = SMALLEST;
  const double from_least = low - least / scale, from_most = high - most / scale;
  const double least_error = __builtin_fabs((double)low) + __builtin_fabs(least / scale);
  const double most_error = __builtin_fabs((double)high) + __builtin_fabs(most / scale);
  const double zero = least_error < most_error ? from_least : from_most;
  const int32_t place = zero < low ? low : zero > high ? high : zero == zero ? (int32_t)nearest((float)zero) : low;
  return {(float)scale, place};
}

// Rows of x as integers. The row after the last one is all ones: its products are the sums of the weight's rows.
template <class IO> class RoundedRows {
  typedef typename IO::type type;
  typedef IntegerDot Dot;
  typedef Dot::Left Codes __attribute__((vector_size(sizeof(Dot::Left) * VL)));

  static constexpr int64_t ROWS_AT_ONCE = 8;  // that a thread rounds

  const ch_quantized& w;
  Extent all_rows;

 public:
  const int64_t padded;  // steps of a row
  int64_t count;
  typename Dot::Left* left;
  RowScale* scales;
  int32_t* sums;

  explicit RoundedRows(const ch_quantized& work)
      : w(work), padded(round_up(work.steps, Dot::STEPS)), count(0), left(nullptr), scales(nullptr), sums(nullptr) {}

  // Rounds so many of the call's rows from `first` on; false without memory.
  bool read(int threads, int64_t first, int64_t rows) {
    if (!allocate(rows)) return false;
    if (w.rounding == CH_ROUND_TENSOR && first == 0) all_rows = extent_of_all();
    parallel(threads, (rows + ROWS_AT_ONCE) / ROWS_AT_ONCE, [&](int64_t unit) {
      for (int64_t r = unit * ROWS_AT_ONCE; r < minimum(rows + 1, (unit + 1) * ROWS_AT_ONCE); r++) round_row(first, r);
    });
    return true;
  }

 private:
  bool allocate(int64_t rows) {
    count = rows;
    BumpAllocator parts = {nullptr};
    for (int pass = 0; pass < 2; pass++) {
      left = parts.take<typename Dot::Left>((rows + 1) * padded);
      scales = parts.take<RowScale>(rows + 1);
      sums = parts.take<int32_t>(rows + 1);
      if (pass == 0) parts.next = (char*)scratch(clearhead::SLOT_SHARED, (size_t)(parts.next - (char*)nullptr));
      if (parts.next == nullptr) return false;
    }
    return true;
  }

  Extent extent_of_all() const {
    Extent all;
    for (int64_t r = 0; r < w.rows; r++) {
      const Extent extent = extent_of<IO>((const type*)w.x + r * w.x_row, w.steps);
      const float nan = (extent.low + all.low) * 0.0f;
      all.low = minimum(all.low, extent.low) + nan, all.high = maximum(all.high, extent.high) + nan;
    }
    return all;
  }

  RowScale scale_of(const type* row) const {
    switch (w.rounding) {
      case CH_ROUND_SYMMETRIC: return symmetric_scale<IO>(largest_of<IO>(row, w.steps), w.low, w.high);
      case CH_ROUND_ASYMMETRIC: return asymmetric_scale<IO>(extent_of<IO>(row, w.steps), w.low, w.high);
      default: return tensor_scale(all_rows, w.low, w.high);
    }
  }

  // Row r of the call's rows from `first` on.
  void round_row(int64_t first, int64_t r) {
    typename Dot::Left* to = left + r * padded;
    for (int64_t c = w.steps; c < padded; c++) to[c] = 0;
    sums[r] = (int32_t)w.steps;
    if (r == count) {
      for (int64_t c = 0; c < w.steps; c++) to[c] = 1;
      return;
    }
    const type* row = (const type*)w.x + (first + r) * w.x_row;
    scales[r] = scale_of(row);
    const float zero = (float)scales[r].zero;
    const vf inverse = all(1.0f / scales[r].scale), low = all((float)w.low - zero), high = all((float)w.high - zero);
    int32_t sum = 0;
    vi added = {};
    // Adding 1.5 * 2^23 leaves the nearest integer in the lower bits.
    const vf shift = all(12582912.0f);
    const vi of_shift = (vi)shift - scales[r].zero;
    const auto codes_of = [&](vf x) CH_INLINED { return (vi)(vmin(vmax(x * inverse, low), high) + shift) - of_shift; };
    int64_t c = 0;
    for (; c + VL <= w.steps; c += VL) {
      const vi codes = codes_of(get_vector<IO>(row + c));
      const Codes narrow = __builtin_convertvector(codes, Codes);
      memcpy(to + c, &narrow, sizeof(narrow));
      added += codes;
    }
    if (c < w.steps) {
      float rest[VL];
      get_row<IO>(row + c, (int)(w.steps - c), rest, VL);
      const vi codes = codes_of(load(rest));
      for (int i = 0; c < w.steps; c++, i++) to[c] = (typename Dot::Left)codes[i], sum += codes[i];
    }
    for (int i = 0; i < VL; i++) sum += added[i];
    sums[r] = sum;
  }
};

// A linear layer's products with rounded rows.
template <class IO> class RoundedLayer {
  typedef typename IO::type type;
  typedef IntegerDot Dot;
  typedef IntegerGemm M;

  // Columns of a unit of work, and most operands of a stretch of a panel.
  static constexpr int64_t WIDTH = 64, DEPTH = 1024;
  // Rows by which the weight is multiplied where it lies; measured on AVX2: beyond, panels are faster.
  static constexpr int64_t FEW_ROWS = 4;
  static_assert(WIDTH % PW == 0);

  const ch_quantized& w;
  const RoundedRows<IO>& x;
  const ch_quantized* const next;  // the layer that reads the rows after this one, or null
  const int64_t operands;  // of a rounded row
  const int64_t stretches, depth;  // of a panel, and operands of one
  const int threads;

 public:
  RoundedLayer(const ch_quantized& work, const RoundedRows<IO>& rows, const ch_quantized* after = nullptr)
      : w(work), x(rows), next(after), operands(x.padded / M::PACK),
        stretches(maximum((int64_t)1, (operands + DEPTH - 1) / DEPTH)), depth(round_up((operands + stretches - 1) / stretches, VL)),
        threads(threads_for(w, 2.0 * (double)w.rows * (double)w.columns * (double)w.steps)) {}

  // The rows that were rounded, which are those of the call from `first` on, by the weight.
  void multiply_rows(int64_t first, Fault& fault) const {
    parallel(threads, (w.columns + WIDTH - 1) / WIDTH, [&](int64_t unit) {
      int32_t* sums = (int32_t*)scratch(clearhead::SLOT_WORK, (size_t)((rows_of_sums() + 1) * WIDTH) * sizeof(int32_t));
      uint32_t* panel = (uint32_t*)scratch(clearhead::SLOT_KEYS, (size_t)(depth * PW) * sizeof(uint32_t));
      if (sums == nullptr || panel == nullptr) return fault.set(CH_NO_MEMORY);
      multiply(first, unit * WIDTH, panel, sums);
    });
  }

  static int64_t panel_bytes(int64_t steps, int64_t columns) {
    return (columns + PW - 1) / PW * PW * (round_up(steps, Dot::STEPS) / M::PACK) * (int64_t)sizeof(uint32_t);
  }

  // Writes the panels to the output. Vectors beyond the last column stay as they are.
  int pack() const {
    const int64_t panels = (w.columns + PW - 1) / PW;
    parallel(threads_for(w, 8.0 * (double)w.columns * (double)w.steps), panels, [&](int64_t p) {
      const int count = (int)minimum((int64_t)PW, w.columns - p * PW);
      fill_panel(p * PW, count, 0, x.padded, (uint32_t*)w.output + p * operands * PW);
    });
    return CH_OK;
  }

 private:
  bool few() const { return x.count <= FEW_ROWS && w.panels == nullptr; }

  // For which sums are held at a time, beside those of ones: of a panel in one stretch, a tile.
  int64_t rows_of_sums() const { return few() || stretches > 1 ? x.count : minimum(x.count, (int64_t)MR); }

  // All rows by WIDTH rows of the weight.
  void multiply(int64_t first, int64_t column, uint32_t* panel, int32_t* sums) const {
    const int64_t columns = minimum(WIDTH, w.columns - column);
    if (!few()) return multiply_many(first, column, columns, panel, sums);
    multiply_few(x.count + (needs_weight_sums() ? 1 : 0), column, columns, sums);
    const int32_t* of_ones = needs_weight_sums() ? sums + x.count * WIDTH : nullptr;
    finish(first, 0, x.count, columns_of(column, (int)columns, of_ones), sums, WIDTH);
  }

  // Symmetric rows need no sums of the weight.
  bool needs_weight_sums() const { return w.rounding != CH_ROUND_SYMMETRIC || w.low + w.high != -1; }

  // A panel at a time: a tile of sums leaves while the next one is multiplied. What this thread is likely to multiply by next
  // is prefetched meanwhile, or it would wait for memory.
  void multiply_many(int64_t first, int64_t column, int64_t columns, uint32_t* filled, int32_t* sums) const {
    const uint32_t* words = (const uint32_t*)x.left;
    int32_t* of_ones = needs_weight_sums() ? sums + rows_of_sums() * PW : nullptr;
    const int64_t tiles = (columns + PW - 1) / PW * stretches * ((x.count + MR - 1) / MR);
    Upcoming upcoming = upcoming_after(column, tiles * depth);
    for (int64_t c = 0; c < columns; c += PW) {
      const int count = (int)minimum((int64_t)PW, columns - c), vecs = (count + VL - 1) / VL;
      for (int64_t s = 0, stretch = 0; stretch < stretches; stretch++, s += depth) {
        const int64_t steps = minimum(depth, operands - s);
        const uint32_t* panel = w.panels != nullptr ? panels_from(column + c) + s * PW : filled;
        if (w.panels == nullptr) fill_panel(column + c, count, s * M::PACK, steps * M::PACK, filled);
        const auto add = [&](int height, int64_t r, int32_t* to, const StepPrefetch& lines) CH_INLINED {
          const uint32_t* a = words + r * operands + s;
          if (s == 0) gemm<M, SET>(height, vecs, steps, a, operands, 1, panel, PW, (float*)to, PW, nullptr, lines);
          else gemm<M, CONTINUE>(height, vecs, steps, a, operands, 1, panel, PW, (float*)to, PW, nullptr, lines);
        };
        if (of_ones != nullptr) add(1, x.count, of_ones, {upcoming.next, 0});
        const bool last = stretch == stretches - 1;
        const Columns these = last ? columns_of(column + c, count, of_ones) : Columns{};
        for (int64_t r = 0; r < x.count; r += MR) {
          const int height = (int)minimum((int64_t)MR, x.count - r);
          int32_t* to = stretches == 1 ? sums : sums + r * PW;
          if (last) prefetch_output(first + r, height, column + c);
          add(height, r, to, upcoming.take(steps));
          if (last) finish(first, r, height, these, to, PW);
        }
      }
    }
  }

  // What is prefetched, spread over the steps of a unit of work.
  struct Upcoming {
    const char* next;
    int64_t bytes;  // for each step
    StepPrefetch take(int64_t steps) {
      const StepPrefetch lines = {next, bytes};
      next += steps * bytes;
      return lines;
    }
  };

  // The columns that a thread takes after those from `column` on, the first ones of the next layer after the last ones.
  Upcoming upcoming_after(int64_t column, int64_t steps) const {
    const int64_t first = column + threads * WIDTH;
    if (first < w.columns) return columns_from(first, steps);
    const int64_t beyond = first - round_up(w.columns, WIDTH);
    if (next == nullptr || beyond >= next->columns) return {(const char*)x.left, 0};
    return RoundedLayer(*next, x).columns_from(beyond, steps);
  }

  // Their panels, or their rows of the weight.
  Upcoming columns_from(int64_t first, int64_t steps) const {
    const int64_t count = minimum(WIDTH, w.columns - first);
    const char* from = w.panels != nullptr ? (const char*)panels_from(first) : (const char*)w.weight + first * w.weight_row;
    const int64_t bytes = w.panels != nullptr ? panel_bytes(w.steps, count) : count * w.weight_row;
    return {from, bytes / maximum(steps, (int64_t)1) + 1};
  }

  // The panels that were packed, of the columns from a multiple of PW on.
  const uint32_t* panels_from(int64_t column) const { return (const uint32_t*)w.panels + column * operands; }

  void prefetch_output(int64_t row, int height, int64_t column) const {
    for (int r = 0; r < height; r++) {
      const char* place = (const char*)((const type*)w.output + (row + r) * w.output_row + column);
      for (int64_t byte = 0; byte < PW * (int64_t)sizeof(type); byte += LINE_BYTES) prefetch_line<3, true>(place + byte);
    }
  }

  // The panel of `columns` rows of the weight and `steps` steps, a multiple of STEPS. Columns are whole vectors, the last
  // one repeated.
  void fill_panel(int64_t column, int columns, int64_t first, int64_t steps, uint32_t* panel) const {
    const int8_t* weight = (const int8_t*)w.weight + column * w.weight_row;
    for (int c = 0; c < columns; c += VL)
      for (int64_t s = first; s < first + steps; s += Dot::STEPS) {
        const int64_t rest = minimum((int64_t)Dot::STEPS, w.steps - s);
        Words words[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++) {
          const int8_t* from = weight + minimum(c + r, columns - 1) * w.weight_row + s;
          int8_t last[Dot::STEPS] = {};
          if (rest < Dot::STEPS) from = (const int8_t*)memcpy(last, from, (size_t)rest);
          words[r] = (Words)Dot::load_weight(from);
        }
        transpose_words(words);
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) store_words(panel + ((s - first) / M::PACK + i) * PW + c, words[i]);
      }
  }

  // Four rows of the weight at a time, each in a stream of memory of its own.
  void multiply_few(int64_t rows, int64_t column, int64_t columns, int32_t* sums) const {
    const int8_t* weight = (const int8_t*)w.weight + column * w.weight_row;
    const int64_t quarter = (columns + Dot::COLUMNS - 1) / Dot::COLUMNS;
    for (int64_t c = 0; c < quarter; c++) {
      // Rows of the weight beyond the last one are read as the last one.
      const int8_t* rows_of[Dot::COLUMNS];
      for (int64_t k = 0; k < Dot::COLUMNS; k++) rows_of[k] = weight + minimum(c + k * quarter, columns - 1) * w.weight_row;
      for (int64_t r = 0; r < rows; r += Dot::ROWS)
        multiply_some<Dot::ROWS>((int)minimum((int64_t)Dot::ROWS, rows - r), x.left + r * x.padded, rows_of,
                                 sums + r * WIDTH + c, quarter);
    }
  }

  // Rows of x by rows of the weight, whose sums are `stride` apart.
  template <int ROWS>
  void multiply_some(int rows, const typename Dot::Left* left, const int8_t* const* weight, int32_t* sums,
                     int64_t stride) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return multiply_some<ROWS - 1>(rows, left, weight, sums, stride);
    typename Dot::Vector sum[ROWS][Dot::COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int c = 0; c < Dot::COLUMNS; c++) sum[r][c] = Dot::zero();
    const auto add = [&](const typename Dot::Left* from, const auto& read) CH_INLINED {
#pragma GCC unroll 4
      for (int c = 0; c < Dot::COLUMNS; c++) {
        const auto codes = Dot::load_weight(read(c));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum[r][c] = Dot::madd(sum[r][c], codes, from + r * x.padded);
      }
    };
    int64_t s = 0;
    for (; s + Dot::STEPS <= w.steps; s += Dot::STEPS) {
      prefetch_streams<Dot::STEPS>(weight, s);
      add(left + s, [&](int c) CH_INLINED { return weight[c] + s; });
    }
    if (s < w.steps) {
      int8_t rest[Dot::COLUMNS][Dot::STEPS] = {};
      for (int c = 0; c < Dot::COLUMNS; c++) memcpy(rest[c], weight[c] + s, (size_t)(w.steps - s));
      add(left + s, [&](int c) CH_INLINED { return rest[c]; });
    }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < Dot::COLUMNS; c++) sums[r * WIDTH + c * stride] = Dot::total(sum[r][c]);
  }

  // What WIDTH columns of sums have in common.
  struct Columns {
    int64_t first;
    int count;
    bool shifted;  // whether the integer of 0 is not 0
    float scale[WIDTH], bias[WIDTH];
    uint32_t weight_sums[WIDTH];
  };

  // `of_ones`: the sums of a row of ones, or null.
  Columns columns_of(int64_t column, int count, const int32_t* of_ones) const {
    Columns columns = {column, count, of_ones != nullptr, {}, {}, {}};
    for (int c = 0; c < count; c++) columns.scale[c] = w.scale[column + c];
    for (int c = 0; c < count && of_ones != nullptr; c += VL)
      *(vu_any*)(columns.weight_sums + c) = *(const vu_any*)(of_ones + c) - (uint32_t)Dot::SHIFT * (uint32_t)w.steps;
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, count, columns.bias, WIDTH);
    return columns;
  }

  // Scales the sums of rows [row, row + count) of those from `first` on, in their place, and stores them through the epilogue.
  void finish(int64_t first, int64_t row, int64_t count, const Columns& columns, int32_t* sums, int64_t stride) const {
    const bool shifted = columns.shifted;
    for (int64_t r = row; r < row + count; r++) {
      const vu shift = (uint32_t)Dot::SHIFT * (uint32_t)x.sums[r] + (vu){}, zero = (uint32_t)x.scales[r].zero + (vu){};
      const vf scale = all(x.scales[r].scale);
      int32_t* line = sums + (r - row) * stride;
      for (int c = 0; c < columns.count; c += VL) {
        vu sum = *(const vu_any*)(line + c) - shift;
        if (shifted) sum -= zero * *(const vu_any*)(columns.weight_sums + c);
        const vf scaled = __builtin_convertvector((vi)sum, vf) * scale;
        store((float*)line + c, fused(scaled, load(columns.scale + c), load(columns.bias + c)));
      }
    }
    put_sums<IO>(w, Sums{first + row, count, columns.first, columns.count, (float*)sums, stride});
  }
};

// Layers that read the same rows and round them alike.
template <class IO> int multiply_rounded(const ch_quantized* layers, int count) {
  constexpr int64_t MAX_ROWS = 192 * MR;  // for which a panel is filled once
  const ch_quantized& first = layers[0];
  RoundedRows<IO> x(first);
  Fault fault;
  for (int64_t row = 0; row < first.rows; row += MAX_ROWS) {
    const double operations = 2.0 * (double)first.rows * (double)first.columns * (double)first.steps;
    if (!x.read(threads_for(first, operations), row, minimum(MAX_ROWS, first.rows - row))) return CH_NO_MEMORY;
    for (int layer = 0; layer < count; layer++)
      RoundedLayer<IO>(layers[layer], x, layer + 1 < count ? &layers[layer + 1] : nullptr).multiply_rows(row, fault);
  }
  clearhead::trim_scratch();
  return fault.get();
}

}  // namespace CH_NS
