#include "client/views.h"

#include <pthread.h>
#include <stdlib.h>

#include "smb.h"

struct view {
    struct view *next;
    uintptr_t start;
    uint64_t bytes;
    uint64_t segment_id;
};

_Atomic uint32_t views_count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct view *views;

static void lock(void)
{
    pthread_mutex_lock(&mutex);
}

static void unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

/* A child must not find the lock held by a thread that it has not. */
static void follow_forks(void)
{
    pthread_atfork(lock, unlock, unlock);
}

int views_add(const void *address, uint64_t bytes, uint64_t segment_id)
{
    struct view *view = malloc(sizeof *view);
    if (!view)
        return SMB_OUT_OF_MEMORY;
    *view = (struct view){.start = (uintptr_t)address, .bytes = bytes, .segment_id = segment_id};
    pthread_once(&once, follow_forks);
    lock();
    view->next = views;
    views = view;
    atomic_fetch_add_explicit(&views_count, 1, memory_order_relaxed);
    unlock();
    return SMB_OK;
}

void views_remove(const void *address)
{
    lock();
    struct view **at = &views;
    while (*at && (*at)->start != (uintptr_t)address)
        at = &(*at)->next;
    struct view *found = *at;
    if (found) {
        *at = found->next;
        atomic_fetch_sub_explicit(&views_count, 1, memory_order_relaxed);
    }
    unlock();
    free(found);
}

bool views_overlap(const void *memory, uint64_t bytes, uint64_t segment_id)
{
    uintptr_t start = (uintptr_t)memory;
    bool found = false;
    lock();
    for (const struct view *view = views; view && !found; view = view->next)
        found = view->segment_id == segment_id && start < view->start + view->bytes && view->start < start + bytes;
    unlock();
    return found;
}
