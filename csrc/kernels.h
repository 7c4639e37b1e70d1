/* kernels.h: beside what smb.h declares, a copy for the engine itself. */
#ifndef SMB_KERNELS_H
#define SMB_KERNELS_H

#include "smb.h"

/* memcpy with stores that go around the cache: a line that is overwritten whole need not be read first, which saves a third
 * of the memory traffic. For data that does not fit the caches anyway. */
void kernel_copy_around_cache(void *to, const void *from, uint64_t bytes);

#endif
