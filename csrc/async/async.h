/* async.h: a client's async operations (order.h, credit.h), and the thread that executes them. This
 * folder is a room: it stands on csrc/client, and no other folder of the engine knows it.
 *
 * Threads. The async thread begins slices, does local pieces itself, one slice at a time, and waits
 * for links by a bell (call.h): as the progress thread, or beside it. Any thread submits, cancels,
 * waits. One thread takes the events.
 *
 * Locks. `mutex` guards all operations, windows and lists except `flying` and `here`, which only
 * the async thread uses. It is taken before the client's mutex, and never held during I/O. Slices
 * and their outcomes belong to the progress thread until their call is done.
 *
 * Memory. The submitter keeps buffer, window and memory until smb_async_take reports the operation
 * as done, or until smb_async_end, or until a cancellation succeeds. */
#ifndef SMB_ASYNC_H
#define SMB_ASYNC_H

#include <pthread.h>
#include <sys/types.h>

#include "async/credit.h"
#include "client/transfer.h"
#include "smb/async.h"

enum {
    SLICES_MAX = 256, /* in flight: all are examined whenever one of them is done */
    /* Events that end one after the other are taken together, because waking the taker and handing
     * it Python's lock takes as long as a small operation. */
    EVENTS_AT_ONCE = 16,
    TAKER_LINGERS_NS = 50000,
    /* operations of one window that have not ended: each later one on the buffers of its list
     * examines all of them */
    OPERATIONS_MAX = 1 << 14,
};

struct slice {
    struct slice *next;
    struct smb_operation *operation;
    struct smb_request request;
    /* when the slice began, and how many bytes its window had delivered by then */
    uint64_t begun_ns, delivered_bytes;
    struct transfer transfer;
};

struct smb_async {
    struct smb_client *client;
    /* the owner's and one for each window: a garbage collector may free them in any order */
    _Atomic uint32_t references;
    pid_t pid; /* the process that has the thread; a child of fork has none */
    pthread_mutex_t mutex;
    pthread_cond_t changed;     /* wakes the async thread */
    pthread_cond_t event_there; /* wakes the thread that takes events */
    pthread_cond_t ended;       /* wakes threads that wait for their turn */
    pthread_t thread;
    bool has_thread;
    bool stopped;     /* nothing can be submitted, and no operation begins */
    bool sleeps;      /* the async thread sleeps on `changed` */
    bool busy;        /* the async thread has slices, and looks for more when its bell rings */
    uint32_t waiting; /* threads on `ended` */
    struct order order;
    struct smb_window *windows;
    struct smb_operation *events_head, **events_end;
    /* the taker wants at least so many events while operations are under way */
    uint32_t event_count, taker_wants;
    /* used only by the async thread */
    struct call bell;
    /* slices over links, in the order in which they began; their local part is done, or is
     * `here` */
    struct slice *flying, **flying_end;
    uint32_t flying_count;
    struct slice *here; /* the slice whose local part is under way, or NULL */
    struct slice *spare;
};

#endif
