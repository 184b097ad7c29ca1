// Memory of results that is kept when they are gone, and handed out again for others of the same size.
#pragma once

#include <stddef.h>

namespace clearhead {

// At least `bytes`, on a large page's border, what is in it unknown; null when there is none.
void* take_memory(size_t bytes);

// What `take_memory` gave for as many bytes is not needed any more.
void give_memory(void* data, size_t bytes);

// Bytes that are kept at present.
size_t kept_memory();

// The most bytes that are kept.
size_t memory_limit();

// At most so many bytes are kept from now on, what is above goes back at once. Returns the limit before.
size_t keep_at_most(size_t bytes);

}  // namespace clearhead
