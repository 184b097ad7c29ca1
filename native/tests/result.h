// Test results: a value and its error bound, and the report of failures.
#pragma once

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "guarded.h"

namespace test {

using Values = std::vector<double>;

struct Result {
  Values number, bound;
  void size(int64_t n) {
    number.assign(static_cast<size_t>(n), 0.0);
    bound.assign(static_cast<size_t>(n), 0.0);
  }
};

inline int failures = 0;
inline double largest_ratio = 0;  // largest fraction of a bound that any result used

inline void fail(const std::string& line) {
  // Twenty lines are enough.
  if (++failures <= 20) std::fprintf(stderr, "FAILED %s\n", line.c_str());
}

inline void check(bool holds, const std::string& line) {
  if (!holds) fail(line);
}

inline void expect(int actual, int wanted, const std::string& name) {
  if (actual != wanted) fail(name + " gave \"" + ch_message(actual) + "\", not \"" + ch_message(wanted) + "\"");
}

inline void compare(const Guarded& got, const Result& right, const std::string& name) {
  size_t at = 0;
  for (int64_t b = 0; b < got.count[0]; ++b)
    for (int64_t h = 0; h < got.count[1]; ++h)
      for (int64_t i = 0; i < got.count[2]; ++i)
        for (int64_t x = 0; x < got.last; ++x, ++at) {
          const double actual = got.get(b, h, i, x), number = right.number[at], bound = right.bound[at];
          const double error = actual == number ? 0.0 : std::fabs(actual - number);
          if (error <= bound) {
            if (bound > 0 && bound > 1e-25) largest_ratio = std::fmax(largest_ratio, error / bound);
            continue;
          }
          char line[256];
          std::snprintf(line, sizeof(line), "%s [%lld, %lld, %lld, %lld] is %.9g, not %.9g (off by %.2g of %.2g)",
                        name.c_str(), static_cast<long long>(b), static_cast<long long>(h),
                        static_cast<long long>(i), static_cast<long long>(x), actual, number, error, bound);
          fail(line);
          return;
        }
}

// Runs on a new thread, without the workspaces that threads cache between calls and without their contents. New memory
// is NaN (nan_malloc.cpp), so that reading it before writing shows.
template <class Body> void on_new_thread(const Body& body) { std::thread(body).join(); }

template <class Run> void expect_done_first(const Run& run, const std::string& name) {
  on_new_thread([&] { expect(run(), CH_OK, name); });
}

// Instruction sets of this processor, by index.
inline std::vector<int> usable_sets() {
  std::vector<int> sets;
  for (int index = 0; ch_isa_name(index) != nullptr; ++index) {
    if (ch_isa_usable(index)) sets.push_back(index);
  }
  return sets;
}

}  // namespace test
