/* pages.h: allocates and maps the memory of a segment's file. */
#ifndef SMB_PAGES_H
#define SMB_PAGES_H

#include <stdint.h>

/* Gives the empty file all its pages, zeroed, as large pages if this kernel makes them. A full file
 * system must fail here, not as SIGBUS at a later store. SMB_OUT_OF_MEMORY, SMB_SYSTEM (errno). */
int pages_allocate(int fd, uint64_t bytes);
/* Maps the whole file for reading and writing, populated, so that later accesses do not fault.
 * Large pages are mapped as such. MAP_FAILED (errno). */
void *pages_map(int fd, uint64_t bytes);

#endif
