// A cache of freed result buffers, which serves later results of the same size.
#pragma once

#include <stddef.h>

namespace clearhead {

// At least `bytes` of uninitialised memory, aligned to a huge page; null if there is none.
void* pool_allocate(size_t bytes);

// Frees what `pool_allocate` returned for the same number of bytes.
void pool_free(void* data, size_t bytes);

// Bytes that are cached now.
size_t pool_bytes();

// The most bytes that are cached.
size_t pool_limit();

// Sets the limit and releases what exceeds it. Returns the previous limit.
size_t set_pool_limit(size_t bytes);

}  // namespace clearhead
