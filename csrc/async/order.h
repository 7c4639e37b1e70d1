/* order.h: in what order a client's async operations begin.
 *
 * An operation is a request on a buffer, or a call of the library above, of which the engine only
 * knows the range. It begins when no earlier operation is left that conflicts with it. Two
 * operations conflict if their ranges of one buffer overlap and one of them changes the buffer.
 * Operations that may begin wait in their window's heap, the most urgent first, and equal ones in
 * the order of submission. An operation is at least as urgent as each later one that waits for it.
 *
 * The mutex of the client's struct smb_async guards everything here. */
#ifndef SMB_ORDER_H
#define SMB_ORDER_H

#include "client/transfer.h"

enum { ORDERS = 64 }; /* number of lists of operations; the buffer's number chooses the list */

enum operation_state {
    OPERATION_WAITS, /* waits for its turn, or in its window's heap */
    OPERATION_BEGUN,
    OPERATION_ENDED, /* or handed to the library: its event will be taken, or was */
};

struct smb_operation {
    struct smb_operation *earlier, *later; /* in its order's list */
    struct smb_operation *next_event;
    struct smb_operation *next_raised; /* used while urgencies are raised */
    struct smb_window *window;
    struct heap *heap;         /* its window's heap */
    struct smb_buffer *buffer; /* NULL: a call of the library */
    struct smb_request request;
    uint64_t tag;    /* its submitter's number for it */
    uint64_t key;    /* its buffer's number */
    uint64_t number; /* position in the order of submission */
    uint64_t begun_ns;
    uint64_t sliced_bytes; /* bytes of the request that were cut into slices */
    int64_t urgency;
    uint32_t waits_for; /* number of earlier operations that conflict */
    uint32_t slices;    /* slices in flight */
    size_t heap_index;
    bool in_heap, changes, failed;
    bool local;                  /* some of its buffer's segments are mapped */
    int state;                   /* enum operation_state */
    int what;                    /* enum smb_async_event_kind */
    const struct smb_link *link; /* a link that it used, or NULL */
    struct smb_outcome outcome, local_outcome;
};

/* Operations that may begin, the most urgent first. */
struct heap {
    struct smb_operation **operations;
    size_t count, room;
};

/* Operations that have not ended, in the order of submission. */
struct order {
    struct smb_operation *first[ORDERS], *last[ORDERS];
    uint64_t count; /* number of operations so far */
};

bool order_goes_first(const struct smb_operation *a, const struct smb_operation *b);

/* Makes room for `operations`; false: out of memory. */
bool heap_make_room(struct heap *heap, size_t operations);
void heap_add(struct smb_operation *operation);
void heap_remove(struct smb_operation *operation);

/* Appends an operation. Operations that it waits for become as urgent as it is. If it waits for
 * none, it goes into its heap, which must have room. */
void order_enter(struct order *order, struct smb_operation *operation);

/* Removes an operation, which must not be in its heap. Operations that waited only for this one may
 * begin. */
void order_leave(struct order *order, struct smb_operation *operation);

/* True: one of the first `count` operations is left and conflicts with `asked`, which is in no
 * order. */
bool order_blocks(const struct order *order, const struct smb_operation *asked, uint64_t count);

/* Makes the operations that `asked` would wait for as urgent as `asked`, which is in no order. */
void order_raise(const struct order *order, struct smb_operation *asked);

/* The operation of this tag if it has not begun, else NULL. */
struct smb_operation *order_find_waiting(const struct order *order, uint64_t tag);

#endif
