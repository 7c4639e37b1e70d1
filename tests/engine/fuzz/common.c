#include <string.h>
#include <unistd.h>

#include "fuzz.h"

static char directory[64];

static void remove_all(void)
{
    static const char *const names[] = {"witness", "scratch", "journal", "segment", "socket"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unlink(fuzz_path(names[i]));
    rmdir(directory);
}

const char *fuzz_path(const char *name)
{
    static char path[128];
    if (!directory[0]) {
        strcpy(directory, "/dev/shm/smb-fuzz-XXXXXX");
        MUST(mkdtemp(directory) != NULL);
        atexit(remove_all);
    }
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}
