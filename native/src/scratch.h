// Memory that a thread keeps between calls, so that large calls do not pay for fresh pages every time.
#pragma once

#include <stddef.h>

namespace clearhead {

// What a buffer is for; a thread has one of each.
enum Slot { SLOT_WORK, SLOT_KEYS, SLOT_SHARED, SLOT_PARTIAL, SLOT_COLUMNS, SLOT_SEGMENTS, SLOTS };

// At least `bytes`, also for 0, aligned to 64, the thread's own until it asks for the same slot again; null when there
// is none.
// What was in it is lost when it grows.
void* scratch(Slot slot, size_t bytes);

// Advises large pages for the whole ones of a range; nothing where the system has none.
void expect_writes(void* data, size_t bytes);

// Gives back what is too large to keep, of the thread that asks.
void trim_scratch();

}  // namespace clearhead
