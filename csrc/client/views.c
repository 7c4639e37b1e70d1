#include "client/views.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/layout.h"
#include "client/buffer.h"
#include "memory/segment.h"

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

/* A child of fork must not find the lock held by a thread that it does not have. */
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
        found = view->segment_id == segment_id && start < view->start + view->bytes &&
                view->start < start + bytes;
    unlock();
    return found;
}

/* ---- a contiguous view ----------------------------------------------------------------------- */

static int map_stripe(struct smb_segment *segment, uint8_t *at, const struct smb_piece *piece)
{
    off_t offset = (off_t)(smb_segment_data_offset(segment) + piece->segment_offset);
    void *mapped = mmap(at, piece->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        smb_segment_fd(segment), offset);
    return mapped == MAP_FAILED ? SMB_SYSTEM : SMB_OK;
}

int smb_buffer_map(struct smb_buffer *buffer, void **address, uint64_t *bytes)
{
    const struct smb_layout *layout = &buffer->layout;
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (!buffer->paths[i].segment)
            return SMB_INVALID;
    /* A mapping cannot follow a move. Segments are bound at the end, so that a view that failed
     * does not bind them. */
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (smb_segment_moves(buffer->paths[i].segment))
            return SMB_BUSY;
    uint64_t whole = (layout->bytes + SMB_CHUNK_BYTES_MIN - 1) / SMB_CHUNK_BYTES_MIN *
                     SMB_CHUNK_BYTES_MIN;
    /* Reserves the address range in one piece, then maps the stripes over it. */
    uint8_t *base = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                         0);
    if (base == MAP_FAILED)
        return SMB_SYSTEM;
    int status = SMB_OK;
    for (uint64_t at = 0; at < layout->bytes && status == SMB_OK;) {
        struct smb_piece piece;
        status = smb_layout_piece(layout, at, layout->bytes, &piece);
        if (status == SMB_OK)
            status = map_stripe(buffer->paths[piece.segment].segment, base + at, &piece);
        at += piece.bytes;
    }
    for (uint32_t i = 0; i < layout->segment_count && status == SMB_OK; i++)
        status = smb_segment_bind(buffer->paths[i].segment);
    if (status == SMB_OK)
        status = views_add(base, whole, buffer->paths[0].segment_id);
    if (status != SMB_OK) {
        int saved = errno;
        munmap(base, whole);
        errno = saved;
        return status;
    }
    *address = base;
    *bytes = whole;
    return SMB_OK;
}

void smb_buffer_unmap(void *address, uint64_t bytes)
{
    views_remove(address); /* before its addresses can be used for something else */
    munmap(address, bytes);
}
