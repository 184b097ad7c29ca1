// The kernels for one instruction set: compiled once for each, with CH_NS as its namespace.
//
// Nothing from the C++ library is used here: a template of it, compiled for a wide instruction set, could be the
// copy that the linker keeps for everybody.
#include "backward.h"
#include "forward.h"

namespace CH_NS {
namespace {

template <class IO> int forward_of(const ch_attention& w) {
#if defined(CH_BF16DOT)
  if constexpr (__is_same(IO, BFloat16)) return Forward<Pairs, IO>(w).run();
#endif
  return Forward<Single, IO>(w).run();
}

int forward(const ch_attention* w) {
  switch (w->dtype) {
    case CH_FLOAT32: return forward_of<Float32>(*w);
    case CH_BFLOAT16: return forward_of<BFloat16>(*w);
    default: return forward_of<Float16>(*w);
  }
}

template <class IO> int backward_of(const ch_attention& w) {
#if defined(CH_BF16DOT)
  if constexpr (__is_same(IO, BFloat16)) return Backward<Pairs, IO>(w).run();
#endif
  return Backward<Single, IO>(w).run();
}

int backward(const ch_attention* w) {
  switch (w->dtype) {
    case CH_FLOAT32: return backward_of<Float32>(*w);
    case CH_BFLOAT16: return backward_of<BFloat16>(*w);
    default: return backward_of<Float16>(*w);
  }
}

}  // namespace

extern const clearhead::Kernels kernels = {forward, backward};

}  // namespace CH_NS
