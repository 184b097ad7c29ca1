// A cache of freed result buffers, which serves later results of the same size.
#pragma once

#include <stddef.h>

namespace clearhead {

// At least `bytes` of uninitialised memory, aligned to a huge page; null if there is none.
void* take_memory(size_t bytes);

// Frees what `take_memory` returned for the same number of bytes.
void give_memory(void* data, size_t bytes);

// Bytes that are cached now.
size_t kept_memory();

// The most bytes that are cached.
size_t memory_limit();

// Sets the limit and releases what exceeds it. Returns the previous limit.
size_t keep_at_most(size_t bytes);

}  // namespace clearhead
