#include "base/namespaces.h"

#include <sys/stat.h>

uint32_t namespace_inode(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 ? (uint32_t)found.st_ino : 0;
}
