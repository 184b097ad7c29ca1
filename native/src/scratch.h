// Thread-local workspaces that persist between calls, so that large calls do not pay for page faults every time.
#pragma once

#include <stddef.h>

namespace clearhead {

// The purpose of a buffer; a thread has one of each.
enum Slot { SLOT_WORK, SLOT_KEYS, SLOT_SHARED, SLOT_PARTIAL, SLOT_COLUMNS, SLOT_SEGMENTS, SLOTS };

// At least `bytes` (also for 0), aligned to 64, valid until the thread requests the same slot again; null if there is
// no memory. Growing discards the contents.
void* scratch(Slot slot, size_t bytes);

// Advises huge pages for the range; no effect if the system has none.
void advise_huge_pages(void* data, size_t bytes);

// Frees the calling thread's buffers that are too large to cache.
void trim_scratch();

}  // namespace clearhead
