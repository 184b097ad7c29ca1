// Whether every instruction set with fused multiply-add computes the same bits of float32: on this processor by
// comparison, and on all processors by a digest that the tests name.
#pragma once

#include "result.h"

namespace test {

class SetsAgree {
 public:
  using Bits = std::vector<std::vector<uint8_t>>;

  explicit SetsAgree(const char* what) : what(what) { ch_set_invariant(1); }
  SetsAgree(const SetsAgree&) = delete;
  ~SetsAgree() { ch_set_invariant(0); }

  // The results of a call on each set: `run(isa)` gives the bytes of float32 buffers.
  template <class Run> void add(const std::string& name, const Run& run) {
    Bits first;
    std::string set;
    for (int isa : usable_sets()) {
      if (std::strcmp(ch_isa_name(isa), "baseline") == 0) continue;
      const Bits bits = without_nan(run(isa));
      if (first.empty()) first = bits, set = ch_isa_name(isa), take(bits);
      check(bits == first, what + " " + name + ": bits on " + ch_isa_name(isa) + " differ from those on " + set);
    }
    ++calls;
  }

  // The digest of all calls, which changes with the order of any sum, and then is to be written here anew.
  int end(uint64_t expected) const {
    if (any) {
      char line[128];
      std::snprintf(line, sizeof(line), ": the digest of %d calls is 0x%016llx, not 0x%016llx", calls,
                    static_cast<unsigned long long>(digest), static_cast<unsigned long long>(expected));
      check(digest == expected, what + line);
    }
    return calls;
  }

 private:
  std::string what;
  uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  int calls = 0;
  bool any = false;

  // A NaN's sign and payload are the processor's.
  static Bits without_nan(Bits bits) {
    const uint32_t nan = 0x7fc00000;
    for (std::vector<uint8_t>& buffer : bits)
      for (size_t at = 0; at + 4 <= buffer.size(); at += 4) {
        float value;
        std::memcpy(&value, buffer.data() + at, 4);
        if (value != value) std::memcpy(buffer.data() + at, &nan, 4);
      }
    return bits;
  }

  void take(const Bits& bits) {
    any = true;
    for (const std::vector<uint8_t>& buffer : bits)
      for (uint8_t byte : buffer) digest = (digest ^ byte) * 0x100000001b3u;
  }
};

}  // namespace test
