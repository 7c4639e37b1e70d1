/* async.h: a client's asynchronous operations (csrc/async). Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_ASYNC_H
#define SMB_PUBLIC_ASYNC_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/client.h"

/* cffi: begin */

/* Two operations, of any windows, conflict if they overlap and one of them changes the buffer.
 * Conflicting operations take effect in the order of their submission. */
struct smb_async;
/* Limits how many bytes of its operations may be in flight (its credit). */
struct smb_window;
struct smb_operation;

/* Does not start the async thread yet. SMB_OUT_OF_MEMORY. Free with smb_async_destroy. */
int smb_async_create(struct smb_client *client, struct smb_async **async);
/* Waits for the async thread and frees everything; no window or operation may be left. Does nothing
 * in a child of fork. */
void smb_async_destroy(struct smb_async *async);
/* credit: in bytes, or a number of operations if counts_calls; 0: the engine measures a good
 * value. */
int smb_window_create(struct smb_async *async, uint64_t credit, bool counts_calls,
                      struct smb_window **window);
/* The present credit, measured or as given. */
uint64_t smb_window_credit(struct smb_window *window);
/* The window must have no operation left. */
void smb_window_destroy(struct smb_window *window);
/* Submits a READ, WRITE or ACCUMULATE as smb_transfer takes it; does not block. The request's
 * timeout counts for each part from when the part begins. `key` is the buffer's number, the same
 * for all its handles. Operations of a larger priority go first. The caller keeps the memory until
 * the operation's event. If `buffer` is NULL, the operation is a call that the caller makes when it
 * gets SMB_ASYNC_BEGIN; the request then gives its range, and by its opcode whether it changes the
 * range. SMB_INVALID: the request is unsound, or its memory is a view of the buffer; smb_transfer
 * does or refuses it. SMB_DISCONNECTED: stopped. SMB_BUSY: too many operations. */
int smb_async_submit(struct smb_async *async, struct smb_window *window, struct smb_buffer *buffer,
                     const struct smb_request *request, uint64_t key, int priority, uint64_t tag);
enum smb_async_event_kind {
    SMB_ASYNC_DONE = 0,   /* the operation is finished and freed */
    SMB_ASYNC_FAILED = 1, /* the caller may continue it by other means; then smb_async_end */
    SMB_ASYNC_BEGIN = 2,  /* the caller may make its own call now; then smb_async_end */
    /* smb_async_stop cancelled it before it began; then smb_async_end */
    SMB_ASYNC_CANCELLED = 3
};
struct smb_async_event {
    struct smb_operation *operation;
    uint64_t tag;               /* as submitted */
    int what;                   /* enum smb_async_event_kind */
    struct smb_outcome outcome; /* as after smb_transfer; the caller owns outcome.unknown */
};
/* Blocks until an event can be taken (1), or timeout_ms has passed (0). */
int smb_async_await_event(struct smb_async *async, uint32_t timeout_ms);
/* Takes at most `most` events, the oldest first; returns how many. Does not block. */
uint32_t smb_async_take(struct smb_async *async, struct smb_async_event *events, uint32_t most);
/* Ends an operation whose event was taken and is not DONE: later operations may have their turn. */
void smb_async_end(struct smb_async *async, struct smb_operation *operation);
/* Returns 1 if the operation of that tag had not begun and is cancelled now; 0 if it has begun or
 * does not exist. */
int smb_async_cancel(struct smb_async *async, uint64_t tag);
/* Blocks until no earlier operation conflicts with a call on that range, at most timeout_ms
 * (SMB_TIMEOUT). Pass *last as 0 at first. It becomes the last of the earlier operations, so that a
 * repeated call waits for the same ones. */
int smb_async_wait(struct smb_async *async, uint64_t key, uint64_t offset, uint64_t bytes,
                   bool changes, uint32_t timeout_ms, uint64_t *last);
/* Cancels all operations that have not begun; later submissions are refused. */
void smb_async_stop(struct smb_async *async);

/* cffi: end */

#endif
