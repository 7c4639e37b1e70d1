#include "memory/owned.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smb.h"

int owned_check(int fd, uid_t owner)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return SMB_SYSTEM;
    /* No name: it was deleted meanwhile. A second one may lie where others write. */
    bool so = S_ISREG(file.st_mode) && file.st_uid == owner && file.st_nlink <= 1 &&
              (file.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    return so ? SMB_OK : SMB_UNTRUSTED;
}

int owned_open(const char *path, int *fd)
{
    /* O_NONBLOCK: a pipe there must not keep us. */
    int opened = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (opened < 0)
        return errno == ENOENT ? SMB_NOT_FOUND
               : errno == ELOOP || errno == EACCES || errno == EISDIR || errno == ENXIO ||
                       errno == EPERM
                   ? SMB_UNTRUSTED
                   : SMB_SYSTEM;
    int status = owned_check(opened, geteuid());
    if (status == SMB_OK) {
        *fd = opened;
        return SMB_OK;
    }
    int saved = errno;
    close(opened);
    errno = saved;
    return status;
}

/* Whether nobody but root and that user can have made what lies at the path: every directory on
 * the way to it is one of theirs, and nobody else writes in there. */
static bool only_theirs(const char *path, uid_t uid)
{
    char whole[PATH_MAX];
    const char *last = strrchr(path, '/');
    char directory[PATH_MAX];
    if (!last || (size_t)(last - path) + 2 > sizeof directory)
        return false;
    memcpy(directory, path, (size_t)(last - path) + 1);
    directory[last - path + 1] = 0;
    if (!realpath(directory, whole))
        return false;
    for (;;) {
        struct stat found;
        if (lstat(whole, &found) != 0 || !S_ISDIR(found.st_mode) ||
            (found.st_uid != 0 && found.st_uid != uid) ||
            (found.st_mode & (S_IWGRP | S_IWOTH)) != 0)
            return false;
        char *slash = strrchr(whole, '/');
        if (!slash[1])
            return true; /* "/" */
        slash[slash == whole] = 0;
    }
}

bool smb_believes(const char *path, uint32_t uid)
{
    uid_t own = geteuid();
    return uid == own || uid == 0 || (own == 0 && only_theirs(path, uid));
}
