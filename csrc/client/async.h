/* async.h: a client's async operations (order.h, async_credit.h), and the thread that carries them
 * out.
 *
 * Threads. The async thread begins slices, does local pieces itself, one slice at a time, and waits
 * for links by a bell (call.h): as the progress thread, or beside it. Any thread submits, cancels,
 * waits. One thread takes the events.
 *
 * Locks. `mutex` guards all of operations, windows and lists but `flying` and `here`, which are the
 * async thread's. It is taken before the client's mutex, and never held over I/O. Slices and their
 * outcomes are the progress thread's until their call is done.
 *
 * Memory. The submitter keeps buffer, window and memory until smb_async_take tells that the
 * operation is done, or until smb_async_end, or a cancellation that succeeded.
 */
#ifndef SMB_ASYNC_H
#define SMB_ASYNC_H

#include <pthread.h>
#include <sys/types.h>

#include "client/transfer.h"
#include "client/async_credit.h"

enum {
    SLICES_MAX = 256, /* in flight: each is looked at whenever one of them is done */
    /* Taken together if they end one after the other: to wake the taker, and to hand it Python's
     * lock, takes as long as a small operation. */
    EVENTS_AT_ONCE = 16,
    TAKER_LINGERS_NS = 50000,
    /* of one window, not ended: each is looked at by every later one on buffers of its list */
    OPERATIONS_MAX = 1 << 14,
};

struct slice {
    struct slice *next;
    struct smb_operation *operation;
    struct smb_request request;
    uint64_t begun_ns, delivered_bytes; /* when it began, of the window */
    struct transfer transfer;
};

struct smb_async {
    struct smb_client *client;
    /* its owner's and one for each window: a garbage collector may free them in any order */
    _Atomic uint32_t references;
    pid_t pid; /* its thread is of no other process */
    pthread_mutex_t mutex;
    pthread_cond_t changed;     /* for the async thread */
    pthread_cond_t event_there; /* for who takes */
    pthread_cond_t ended;       /* for those who wait for their turn, if any do */
    pthread_t thread;
    bool has_thread;
    bool stopped;     /* nothing is submitted, and no operation begins, any more */
    bool sleeps;      /* the thread, on `changed` */
    bool busy;        /* it has slices, and looks for more when its bell rings */
    uint32_t waiting; /* threads on `ended` */
    struct order order;
    struct smb_window *windows;
    struct smb_operation *events_head, **events_end;
    uint32_t event_count, taker_wants; /* at least so many, while some are under way */
    /* the async thread's */
    struct call bell;
    /* over links, in the order in which they began; their local part is done, or `here` */
    struct slice *flying, **flying_end;
    uint32_t flying_count;
    struct slice *here; /* whose local part is being done, or NULL */
    struct slice *spare;
};

#endif
