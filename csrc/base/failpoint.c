#include "base/failpoint.h"

#ifdef SMB_FAILPOINTS
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char armed[64];
static _Atomic long left;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
    const char *text = getenv("SMB_ENGINE_FAILPOINT");
    const char *colon = text ? strchr(text, ':') : NULL;
    if (text)
        snprintf(armed, sizeof armed, "%.*s", colon ? (int)(colon - text) : (int)strlen(text),
                 text);
    atomic_store(&left, colon ? atol(colon + 1) : 1);
}

void failpoint_arm(const char *name, long count)
{
    pthread_once(&once, read_environment);
    snprintf(armed, sizeof armed, "%s", name ? name : "");
    atomic_store(&left, count);
}

void failpoint_reach(const char *name)
{
    pthread_once(&once, read_environment);
    if (armed[0] && strcmp(armed, name) == 0 && atomic_fetch_sub(&left, 1) == 1)
        raise(SIGKILL);
}
#else
typedef int failpoints_are_compiled_out; /* ISO C forbids an empty translation unit */
#endif
