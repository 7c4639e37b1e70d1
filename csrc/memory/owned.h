/* owned.h: who made what lies at a path. In a directory in which others may write a name says
 * nothing, so what was opened is looked at before a byte of it is believed. */
#ifndef SMB_OWNED_H
#define SMB_OWNED_H

#include <stdbool.h>
#include <sys/types.h>

/* An open file that nobody but its owner, who is `owner`, can change: a regular one, with one name
 * at most. SMB_UNTRUSTED if it is another one; SMB_SYSTEM. */
int owned_check(int fd, uid_t owner);
/* Opens a file of this process's user for reading and writing. Follows no symbolic link. *fd is
 * the caller's if SMB_OK. SMB_NOT_FOUND; SMB_UNTRUSTED: something else lies there; SMB_SYSTEM. */
int owned_open(const char *path, int *fd);

#endif
