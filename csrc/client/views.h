/* views.h: which memory of this process belongs to a buffer: the contiguous mappings of
 * smb_buffer_map. They lie at other addresses than the segments' own mappings, so an address alone
 * does not show that a call reads what it writes.
 *
 * Any thread. The only lock is a leaf. A child of fork has its own copy. */
#ifndef SMB_VIEWS_H
#define SMB_VIEWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

extern _Atomic uint32_t views_count;

/* Whether there is any view; every call asks this. A view that a caller passes to a call was added
 * before, and the caller sees that store. */
static inline bool views_any(void)
{
    return atomic_load_explicit(&views_count, memory_order_relaxed) > 0;
}

/* Adds a view of the buffer whose first segment has this id. SMB_OUT_OF_MEMORY. */
int views_add(const void *address, uint64_t bytes, uint64_t segment_id);
void views_remove(const void *address);
/* Whether any of these bytes are in a view of that buffer. */
bool views_overlap(const void *memory, uint64_t bytes, uint64_t segment_id);

#endif
