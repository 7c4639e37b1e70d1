/* namespaces.h: Linux namespaces of this process. */
#ifndef SMB_NAMESPACES_H
#define SMB_NAMESPACES_H

#include <stdint.h>

/* The inode number of a namespace; `path`: its file, such as /proc/self/ns/pid. 0: unknown. */
uint32_t namespace_inode(const char *path);

#endif
