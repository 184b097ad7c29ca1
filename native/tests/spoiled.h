// Invalid descriptions, each wrong in one place: every one must return its code and write nothing.
#pragma once

#include <functional>

#include "result.h"

namespace test {

template <class Work> struct Bad {
  std::string what;
  int code;
  std::function<void(Work&)> spoil;
};

// A list of them, plus the mistakes that any description can have.
template <class Work> std::vector<Bad<Work>> spoiled(std::vector<Bad<Work>> all) {
  all.push_back({"size", CH_BAD_SIZE, [](Work& w) { w.size += 8; }});
  all.push_back({"abi", CH_BAD_SIZE, [](Work& w) { w.abi -= 1; }});
  all.push_back({"isa past the last", CH_BAD_ISA, [](Work& w) { w.isa = 99; }});
  all.push_back({"isa below -1", CH_BAD_ISA, [](Work& w) { w.isa = -2; }});
  all.push_back({"no threads", CH_BAD_OPTION, [](Work& w) { w.threads = 0; }});
  all.push_back({"negative threads", CH_BAD_OPTION, [](Work& w) { w.threads = -1; }});
  return all;
}

template <class T> void make_odd(T*& pointer) {
  pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

// `enter` takes a description, `untouched` says whether nothing was written; returns how many were tried.
template <class Work, class Enter, class Untouched>
int expect_refused(const Work& right, const std::vector<Bad<Work>>& all, const std::string& name, Enter enter,
                   Untouched untouched) {
  for (const Bad<Work>& bad : all) {
    Work work = right;
    bad.spoil(work);
    const std::string line = name + " with an invalid description (" + bad.what + ")";
    expect(enter(&work), bad.code, line);
    check(untouched(), line + ": something was written");
  }
  return static_cast<int>(all.size());
}

}  // namespace test
