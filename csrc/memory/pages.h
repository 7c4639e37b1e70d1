/* pages.h: the memory of a segment's file. */
#ifndef SMB_PAGES_H
#define SMB_PAGES_H

#include <stdint.h>

/* Gives the empty file all its pages, zeroed, in large ones as far as this kernel makes them: a file system that is full must fail
 * here, not as SIGBUS at some later store. SMB_OUT_OF_MEMORY, SMB_SYSTEM (errno). */
int pages_allocate(int fd, uint64_t bytes);
/* Maps all of it, to be read and written, with no faults left to come; large pages as such. MAP_FAILED (errno). */
void *pages_map(int fd, uint64_t bytes);

#endif
