/* Files in tmpfs. A folder carries its process's number, so that those of fuzzers that were killed
 * are found and removed. */
#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

#define PREFIX "/dev/shm/smb-fuzz-"

static char directory[64];

static bool remove_folder(const char *folder)
{
    DIR *entries = opendir(folder);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(entries), entry->d_name, 0);
    }
    if (entries)
        closedir(entries);
    return rmdir(folder) == 0;
}

static void remove_own(void)
{
    MUST(remove_folder(directory));
}

static void remove_stale(void)
{
    glob_t found;
    if (glob(PREFIX "*", 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        pid_t owner = atoi(found.gl_pathv[i] + strlen(PREFIX));
        if (owner > 0 && (owner == getpid() || (kill(owner, 0) < 0 && errno == ESRCH)))
            remove_folder(found.gl_pathv[i]);
    }
    globfree(&found);
}

const char *fuzz_path(const char *name)
{
    static char path[128];
    if (!directory[0]) {
        remove_stale();
        snprintf(directory, sizeof directory, PREFIX "%d", getpid());
        MUST(mkdir(directory, 0700) == 0);
        atexit(remove_own);
    }
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}
