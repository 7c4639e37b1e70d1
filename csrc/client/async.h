/* async.h: a client's async operations: in what order they begin, how many bytes are in flight, and
 * the thread that carries them out.
 *
 * Operations. One is a request on a buffer, or a call of the library above, of which the engine
 * only knows the range. Each has a place in the order of the calls: it begins when no earlier one
 * that conflicts with it is left. Two conflict if their ranges of one buffer overlap and one of
 * them changes it. Operations that may begin wait in their window's heap, the most urgent first,
 * and equal ones in the order of the calls. An operation is at least as urgent as each later one
 * that waits for it.
 *
 * Windows. A request is cut into slices at the borders of chunks, each a transfer of its own, a
 * quarter of the window's credit at most. So an urgent operation waits for what is in flight, and
 * not for the rest of a large one. A window in which nothing is in flight takes any slice.
 * Credit that nobody chose is about twice the bandwidth, the highest measured, times the delay, the
 * lowest measured, of slices over links. Every MEASURED_NS the window runs empty once, so that the
 * delay is that of the path and not of what waits in front of it.
 *
 * Threads. The async thread begins slices, does local pieces itself, one slice at a time, and waits
 * for links by a bell (call.h): as the progress thread, or beside it. Any thread submits, cancels,
 * waits. One thread takes what is told.
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

enum {
    ORDERS = 64,           /* lists of operations, by the buffer's number */
    SLICES_MAX = 256,      /* in flight: each is looked at whenever one of them is done */
    SLICES_PER_CREDIT = 4, /* so that the path stays full while one is answered */
    /* Told together if they end one after the other: to wake the taker, and to hand it Python's
     * lock, takes as long as a small operation. */
    TOLD_AT_ONCE = 16,
    TAKER_LINGERS_NS = 50000,
    /* of one window, not ended: each is looked at by every later one on buffers of its list */
    OPERATIONS_MAX = 1 << 14,
};

/* Of a window whose credit is measured. */
enum {
    CREDIT_FIRST = 4 << 20, /* until something was measured */
    CREDIT_LEAST = 1 << 20, /* four chunks: less would leave a processor idle between them */
    CREDIT_MOST = 64
        << 20, /* 2.5 Gb/s over 100 ms, twice; and of the caller's memory what is held */
};
static const uint64_t MEASURED_NS = 10000000000;

enum operation_state {
    OPERATION_WAITS, /* for its turn, or in its window's heap */
    OPERATION_BEGUN,
    OPERATION_ENDED, /* or handed to the library: to be told, or told */
};

struct smb_operation {
    struct smb_operation *earlier, *later; /* of its order's list */
    struct smb_operation *next_told;
    struct smb_operation *next_raised; /* while urgencies are raised */
    struct smb_window *window;
    struct smb_buffer *buffer; /* NULL: a call of the library's */
    struct smb_request request;
    uint64_t tag;    /* its submitter's name for it */
    uint64_t key;    /* of its buffer */
    uint64_t number; /* in the order of the calls */
    uint64_t begun_ns;
    uint64_t sliced_bytes; /* of the request's */
    int64_t urgency;
    uint32_t waits_for; /* earlier ones that conflict */
    uint32_t slices;    /* in flight */
    size_t heap_index;
    bool in_heap, changes, failed;
    bool local;                  /* some of its buffer's segments are mapped */
    int state;                   /* enum operation_state */
    int what;                    /* enum smb_told_what */
    const struct smb_link *link; /* one that it went over, or NULL */
    struct smb_outcome outcome, local_outcome;
};

struct slice {
    struct slice *next;
    struct smb_operation *operation;
    struct smb_request request;
    uint64_t begun_ns, delivered_bytes; /* when it began, of the window */
    struct transfer transfer;
};

struct smb_window {
    struct smb_async *async;
    struct smb_window *next; /* of all */
    bool counts_calls;       /* credit and in_flight are operations */
    bool measured;           /* credit is */
    bool empties;            /* nothing begins until nothing is in flight */
    uint64_t credit, in_flight;
    uint64_t operations; /* known to their submitter */
    struct smb_operation **heap;
    size_t heap_count, heap_room;
    uint64_t delivered_bytes, measured_since_ns;
    uint64_t delay_ns;        /* the lowest since then, 0: none yet */
    double rate, rate_before; /* bytes a ns: the highest since then, and in the time before */
};

struct smb_async {
    struct smb_client *client;
    /* its owner's and one for each window: a garbage collector may free them in any order */
    _Atomic uint32_t references;
    pid_t pid; /* its thread is of no other process */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* for the async thread */
    pthread_cond_t told;    /* for who takes */
    pthread_cond_t ended;   /* for those who wait for their turn, if any do */
    pthread_t thread;
    bool has_thread;
    bool stopped;        /* nothing is submitted, and no operation begins, any more */
    bool sleeps;         /* the thread, on `changed` */
    bool busy;           /* it has slices, and looks for more when its bell rings */
    uint32_t waiting;    /* threads on `ended` */
    uint64_t operations; /* ever */
    struct smb_operation *first[ORDERS], *last[ORDERS];
    struct smb_window *windows;
    struct smb_operation *told_head, **told_end;
    uint32_t told_count, taker_wants; /* at least so many, while some are under way */
    /* the async thread's */
    struct call bell;
    /* over links, in the order in which they began; their local part is done, or `here` */
    struct slice *flying, **flying_end;
    uint32_t flying_count;
    struct slice *here; /* whose local part is being done, or NULL */
    struct slice *spare;
};

#endif
