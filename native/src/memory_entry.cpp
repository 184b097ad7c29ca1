// The C functions of the cache of freed results.
#include <stdint.h>

#include "clearhead_native.h"
#include "memory.h"

extern "C" {

int64_t ch_kept_memory(void) { return static_cast<int64_t>(clearhead::pool_bytes()); }

int64_t ch_keep_memory(int64_t bytes) {
  return static_cast<int64_t>(bytes < 0 ? clearhead::pool_limit() : clearhead::set_pool_limit(static_cast<size_t>(bytes)));
}

}  // extern "C"
