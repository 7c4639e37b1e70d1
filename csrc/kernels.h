/* kernels.h: beside what smb.h declares, a copy for the engine itself. */
#ifndef SMB_KERNELS_H
#define SMB_KERNELS_H

#include "smb.h"

/* memcpy of ranges that do not overlap. around_cache: with stores that go around the cache, for data that does not fit there
 * anyway; a line that is overwritten whole need not be read first, which saves a third of the memory traffic. */
void kernel_copy(void *to, const void *from, uint64_t bytes, bool around_cache);

#endif
