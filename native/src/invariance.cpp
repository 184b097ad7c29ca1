#include "invariance.h"

#include "../include/clearhead_native.h"

namespace {

int32_t invariant = 0;

}  // namespace

bool clearhead::is_invariant() { return __atomic_load_n(&invariant, __ATOMIC_RELAXED) != 0; }

void ch_set_invariant(int32_t now) { __atomic_store_n(&invariant, now, __ATOMIC_RELAXED); }
