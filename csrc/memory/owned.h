/* owned.h: checks who owns the file at a path. In a directory that others can write to, a name
 * proves nothing, so an opened file is checked before its contents are used. */
#ifndef SMB_OWNED_H
#define SMB_OWNED_H

#include <stdbool.h>
#include <sys/types.h>

/* Checks that only `owner` can change an open file: it is a regular file of that user, with at most
 * one link. SMB_UNTRUSTED if not; SMB_SYSTEM. */
int owned_check(int fd, uid_t owner);
/* Opens a file of this process's user for reading and writing, without following symbolic links.
 * The caller owns *fd if SMB_OK. SMB_NOT_FOUND. SMB_UNTRUSTED: something else lies there.
 * SMB_SYSTEM. */
int owned_open(const char *path, int *fd);

#endif
