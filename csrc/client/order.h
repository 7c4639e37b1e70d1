/* order.h: in what order a client's async operations begin.
 *
 * An operation is a request on a buffer, or a call of the library above, of which the engine only
 * knows the range. It begins when no earlier one that conflicts with it is left. Two conflict if
 * their ranges of one buffer overlap and one of them changes it. Operations that may begin wait in
 * their window's heap, the most urgent first, and equal ones in the order of the calls. An
 * operation is at least as urgent as each later one that waits for it.
 *
 * Everything here is guarded by the mutex of the client's struct smb_async.
 */
#ifndef SMB_ORDER_H
#define SMB_ORDER_H

#include "client/transfer.h"

enum { ORDERS = 64 }; /* lists of operations, by the buffer's number */

enum operation_state {
    OPERATION_WAITS, /* for its turn, or in its window's heap */
    OPERATION_BEGUN,
    OPERATION_ENDED, /* or handed to the library: its event is to be taken, or was */
};

struct smb_operation {
    struct smb_operation *earlier, *later; /* of its order's list */
    struct smb_operation *next_event;
    struct smb_operation *next_raised; /* while urgencies are raised */
    struct smb_window *window;
    struct heap *heap;         /* its window's */
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
    int what;                    /* enum smb_async_event_kind */
    const struct smb_link *link; /* one that it went over, or NULL */
    struct smb_outcome outcome, local_outcome;
};

/* Operations that may begin, the most urgent first. */
struct heap {
    struct smb_operation **operations;
    size_t count, room;
};

/* Operations that have not ended, in the order of the calls. */
struct order {
    struct smb_operation *first[ORDERS], *last[ORDERS];
    uint64_t count; /* ever */
};

bool order_goes_first(const struct smb_operation *a, const struct smb_operation *b);

/* Room for so many; false without memory. */
bool heap_make_room(struct heap *heap, size_t operations);
void heap_add(struct smb_operation *operation);
void heap_remove(struct smb_operation *operation);

/* At the end of the calls. Operations that this one waits for become as urgent as this one. If it
 * waits for none, it goes into its heap, which has room. */
void order_enter(struct order *order, struct smb_operation *operation);

/* Out of the order, and not in its heap. Those that waited for this one alone may begin. */
void order_leave(struct order *order, struct smb_operation *operation);

/* `asked` is in no order. True: an operation that is left of the first `count` is in its way. */
bool order_blocks(const struct order *order, const struct smb_operation *asked, uint64_t count);

/* `asked` is in no order. Operations that it would wait for become as urgent as `asked`. */
void order_raise(const struct order *order, struct smb_operation *asked);

/* The one of this tag that has not begun, or NULL. */
struct smb_operation *order_find_waiting(const struct order *order, uint64_t tag);

#endif
