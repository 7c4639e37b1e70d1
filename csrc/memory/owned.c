#include "memory/owned.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smb/segment.h"

int owned_check(int fd, uid_t owner)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return SMB_SYSTEM;
    /* Zero links: it was deleted meanwhile. A second link may lie in a directory where others can
     * write. */
    bool so = S_ISREG(file.st_mode) && file.st_uid == owner && file.st_nlink <= 1 &&
              (file.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    return so ? SMB_OK : SMB_UNTRUSTED;
}

int owned_open(const char *path, int *fd)
{
    /* O_NONBLOCK, so that opening a pipe there does not block. */
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

bool smb_believes(uint32_t uid)
{
    return uid == geteuid() || uid == 0;
}
