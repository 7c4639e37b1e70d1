#include "check.h"
#include "smb/kernels.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { TEST_SECONDS_MAX = 240, HANGING_SECONDS_MAX = 15, PATHS = 64 };
static char directory[] = "/dev/shm/smb-c-test-XXXXXX";

void check_failed(const char *file, int line, const char *what, long long found, long long expected)
{
    fprintf(stderr, "%s:%d: check failed: %s (found %lld, expected %lld)\n", file, line, what,
            found, expected);
    _exit(1);
}

pid_t check_fork(void)
{
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
        CHECK_EQ(getppid(), parent);
    }
    return child;
}

uint64_t check_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

const char *scratch_path(const char *name)
{
    static char paths[PATHS][128];
    static int next;
    char *path = paths[next++ % PATHS];
    CHECK((size_t)snprintf(path, sizeof paths[0], "%s/%s", directory, name) < sizeof paths[0]);
    return path;
}

static int each_scratch_file(int (*use)(const char *path))
{
    int count = 0;
    DIR *opened = opendir(directory);
    for (struct dirent *found; opened && (found = readdir(opened)) != NULL;) {
        if (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0)
            continue;
        count++;
        if (use)
            use(scratch_path(found->d_name));
    }
    if (opened)
        closedir(opened);
    return count;
}

int scratch_files(void)
{
    return each_scratch_file(NULL);
}

/* TEST_SECONDS_MAX ends tests that hang; 500 kills under thread checks (SMB_LONG=1) take 20 s
 * alone, and over 60 s beside other work. It is multiplied by SMB_TEST_SLOWNESS on an emulated
 * machine. SMB_TEST_HANGING: names of tests that are known to hang. */
static unsigned seconds_max(const char *name)
{
    const char *slowness = getenv("SMB_TEST_SLOWNESS"), *hanging = getenv("SMB_TEST_HANGING");
    int times = slowness ? atoi(slowness) : 1;
    if (hanging && strstr(hanging, name))
        return HANGING_SECONDS_MAX;
    return TEST_SECONDS_MAX * (unsigned)(times > 1 ? times : 1);
}

int check_thinned(void)
{
#if defined(__SANITIZE_THREAD__)
    const char *whole = getenv("SMB_LONG");
    return whole && *whole ? 1 : 4;
#else
    return 1;
#endif
}

static bool passes(const struct test *test)
{
    strcpy(directory + sizeof directory - 7, "XXXXXX");
    if (!mkdtemp(directory))
        return false;
    pid_t child = check_fork();
    if (child == 0) {
        alarm(seconds_max(test->name));
        test->run();
        exit(0); /* not _exit: the leak checker runs at exit */
    }
    int status = -1;
    bool ended = waitpid(child, &status, 0) == child;
    each_scratch_file(unlink);
    rmdir(directory);
    if (ended && status == 0)
        return true;
    printf("FAILED %s (wait status %#x)\n", test->name, (unsigned)status);
    return false;
}

int run_tests(const char *suite, const struct test *tests, size_t count)
{
    /* with an unknown name another instruction set would be tested */
    const char *isa = getenv("SMB_ISA");
    CHECK(!isa || !*isa || strcmp(isa, smb_isa_name(smb_isa_current())) == 0);
    size_t passed = 0;
    for (size_t i = 0; i < count; i++) {
        fflush(NULL);
        passed += passes(&tests[i]);
    }
    printf("%s: %zu passed, %zu failed\n", suite, passed, count - passed);
    return passed != count;
}
