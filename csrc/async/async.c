#include "async/async.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "client/unknown.h"
#include "client/wait.h"
#include "memory/change.h"

static void add_event(struct smb_async *async, struct smb_operation *operation, int what)
{
    operation->state = OPERATION_ENDED;
    operation->what = what;
    operation->next_event = NULL;
    *async->events_end = operation;
    async->events_end = &operation->next_event;
    async->event_count++;
}

static void leave_order(struct smb_async *async, struct smb_operation *operation)
{
    order_leave(&async->order, operation);
    if (async->waiting > 0)
        pthread_cond_broadcast(&async->ended);
}

/* Wakes the async thread, which looks for operations that may begin. */
static void wake_thread(struct smb_async *async)
{
    if (async->sleeps)
        pthread_cond_signal(&async->changed);
    else if (async->busy)
        call_ring(async->client, &async->bell);
}

/* ---- windows --------------------------------------------------------------------------------- */

static bool may_begin(const struct smb_async *async, const struct smb_operation *operation)
{
    return window_has_room(operation->window, operation) &&
           !(operation->buffer &&
             ((operation->local && async->here) || async->flying_count >= SLICES_MAX));
}

static struct smb_operation *most_urgent(const struct smb_async *async)
{
    struct smb_operation *found = NULL;
    for (const struct smb_window *window = async->windows; window; window = window->next) {
        struct smb_operation *head = window->heap.count > 0 ? window->heap.operations[0] : NULL;
        if (head && may_begin(async, head) && (!found || order_goes_first(head, found)))
            found = head;
    }
    return found;
}

static struct smb_async *async_retain(struct smb_async *async)
{
    SMB_ASSERT(atomic_load_explicit(&async->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&async->references, 1, memory_order_relaxed);
    return async;
}

/* The last reference is dropped after the thread has ended and when no operation is left. */
static void async_release(struct smb_async *async)
{
    if (atomic_fetch_sub_explicit(&async->references, 1, memory_order_acq_rel) != 1)
        return;
    SMB_ASSERT(async->event_count == 0);
    pthread_cond_destroy(&async->changed);
    pthread_cond_destroy(&async->event_there);
    pthread_cond_destroy(&async->ended);
    pthread_mutex_destroy(&async->mutex);
    client_release(async->client);
    free(async);
}

int smb_window_create(struct smb_async *async, uint64_t credit, bool counts_calls,
                      struct smb_window **window)
{
    struct smb_window *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->async = async_retain(async);
    made->counts_calls = counts_calls;
    made->measured = credit == 0;
    made->credit = credit > 0 ? credit : CREDIT_FIRST;
    made->measured_since_ns = smb_now_ns();
    pthread_mutex_lock(&async->mutex);
    made->next = async->windows;
    async->windows = made;
    pthread_mutex_unlock(&async->mutex);
    *window = made;
    return SMB_OK;
}

uint64_t smb_window_credit(struct smb_window *window)
{
    pthread_mutex_lock(&window->async->mutex);
    uint64_t credit = window->credit;
    pthread_mutex_unlock(&window->async->mutex);
    return credit;
}

void smb_window_destroy(struct smb_window *window)
{
    struct smb_async *async = window->async;
    if (async->pid != getpid())
        return; /* a child of fork: a thread that does not exist here may hold the mutex */
    pthread_mutex_lock(&async->mutex);
    SMB_ASSERT(window->heap.count == 0 && window->in_flight == 0);
    struct smb_window **at = &async->windows;
    while (*at != window)
        at = &(*at)->next;
    *at = window->next;
    pthread_mutex_unlock(&async->mutex);
    free(window->heap.operations);
    free(window);
    async_release(async);
}

/* ---- the async thread ------------------------------------------------------------------------ */

/* Notes the part of a failed change that was not begun as not applied. */
static void note_rest(struct smb_operation *operation)
{
    struct smb_outcome rest = {0};
    struct call account = {.outcome = &rest};
    while (operation->changes && operation->sliced_bytes < operation->request.bytes) {
        uint64_t left = operation->request.bytes - operation->sliced_bytes;
        uint32_t bytes = left < SMB_CHUNK_BYTES_MAX ? (uint32_t)left
                                                    : (uint32_t)SMB_CHUNK_BYTES_MAX;
        call_note_unknown(&account, operation->request.offset + operation->sliced_bytes, bytes,
                          SMB_OUTCOME_NOT_APPLIED);
        operation->sliced_bytes += bytes;
    }
    transfer_add_outcome(&operation->outcome, &rest);
}

/* Call with the mutex held. Ends an operation of which nothing is in flight, nor will be. */
static void operation_over(struct smb_async *async, struct smb_operation *operation)
{
    transfer_add_outcome(&operation->outcome, &operation->local_outcome);
    operation->local_outcome = (struct smb_outcome){0};
    if (operation->failed)
        note_rest(operation);
    transfer_count(operation->buffer, &operation->request, &operation->outcome, operation->link,
                   operation->begun_ns);
    if (operation->failed) { /* the caller may continue it, so its turn lasts until smb_async_end */
        add_event(async, operation, SMB_ASYNC_FAILED);
        return;
    }
    leave_order(async, operation);
    add_event(async, operation, SMB_ASYNC_DONE);
}

static void end_slice(struct smb_async *async, struct slice *slice, uint64_t now_ns)
{
    struct smb_operation *operation = slice->operation;
    struct smb_window *window = operation->window;
    operation->failed |= slice->transfer.call.failed ||
                         slice->transfer.local_outcome.status != SMB_OK;
    transfer_add_outcome(&operation->local_outcome, &slice->transfer.local_outcome);
    transfer_end(&slice->transfer);
    operation->slices--;
    window->in_flight -= slice->request.bytes;
    window->delivered_bytes += slice->request.bytes;
    if (slice->transfer.call.stream_count > 0 && !slice->transfer.call.failed)
        window_measure(window, slice->begun_ns, slice->delivered_bytes, now_ns);
    if (operation->failed && operation->in_heap)
        heap_remove(operation);
    if (operation->slices == 0 && !operation->in_heap)
        operation_over(async, operation);
    slice->next = async->spare;
    async->spare = slice;
}

/* Ends slices over links whose calls are done. */
static void reap(struct smb_async *async)
{
    struct slice *done = NULL, **end = &done;
    pthread_mutex_lock(&async->client->mutex);
    struct slice **at = &async->flying;
    while (*at) {
        struct slice *slice = *at;
        if (slice->transfer.call.done && slice != async->here) {
            *at = slice->next;
            *end = slice;
            end = &slice->next;
            async->flying_count--;
        } else {
            at = &slice->next;
        }
    }
    async->flying_end = at;
    *end = NULL;
    pthread_mutex_unlock(&async->client->mutex);
    uint64_t now_ns = done ? smb_now_ns() : 0;
    while (done) {
        struct slice *next = done->next;
        end_slice(async, done, now_ns);
        done = next;
    }
}

static struct slice *take_spare(struct smb_async *async)
{
    struct slice *slice = async->spare;
    if (slice)
        async->spare = slice->next;
    else
        slice = malloc(sizeof *slice);
    return slice;
}

/* Begins the operation's next slice. */
static void begin_slice(struct smb_async *async, struct smb_operation *operation)
{
    struct smb_window *window = operation->window;
    uint64_t now_ns = smb_now_ns(), within = operation->sliced_bytes;
    struct slice *slice = take_spare(async);
    if (operation->state == OPERATION_WAITS)
        operation->begun_ns = now_ns;
    operation->state = OPERATION_BEGUN;
    struct smb_outcome refused = {0};
    int status = SMB_OUT_OF_MEMORY;
    if (slice) {
        slice->operation = operation;
        slice->begun_ns = now_ns;
        slice->delivered_bytes = window->delivered_bytes;
        slice->request = operation->request;
        slice->request.offset += within;
        slice->request.bytes = window_slice_bytes(operation);
        if (slice->request.source)
            slice->request.source = (const uint8_t *)slice->request.source + within;
        if (slice->request.sink)
            slice->request.sink = (uint8_t *)slice->request.sink + within;
        status = transfer_begin(&slice->transfer, operation->buffer, &slice->request, &refused);
    }
    if (status != SMB_OK) {
        operation->failed = true;
        if (operation->local_outcome.status == SMB_OK) {
            operation->local_outcome.status = status;
            operation->local_outcome.segment = refused.segment;
        }
        heap_remove(operation);
        if (operation->slices == 0)
            operation_over(async, operation);
        free(slice);
        return;
    }
    struct call *call = &slice->transfer.call;
    /* one account for all slices; the progress thread writes it */
    call->outcome = &operation->outcome;
    call->bell = &async->bell;
    slice->transfer.work.whole_bytes = operation->request.bytes;
    operation->sliced_bytes += slice->request.bytes;
    operation->slices++;
    window->in_flight += slice->request.bytes;
    if (operation->sliced_bytes == operation->request.bytes)
        heap_remove(operation);
    slice->next = NULL;
    if (slice->transfer.has_local_work)
        async->here = slice;
    if (call->stream_count == 0)
        return;
    operation->link = call->streams[0].link;
    *async->flying_end = slice;
    async->flying_end = &slice->next;
    async->flying_count++;
    call_submit(async->client, call);
}

static void begin_what_may(struct smb_async *async)
{
    struct smb_operation *operation;
    while ((operation = most_urgent(async)) != NULL) {
        if (operation->buffer) {
            begin_slice(async, operation);
            continue;
        }
        heap_remove(operation);
        operation->window->in_flight += window_slice_bytes(operation);
        add_event(async, operation, SMB_ASYNC_BEGIN);
    }
}

/* Does one piece of the slice whose local part is under way. */
static bool step_here(void *argument)
{
    struct smb_async *async = argument;
    if (local_step(&async->here->transfer.work))
        return true;
    /* the async thread, which is this one, must look for more */
    call_ring(async->client, &async->bell);
    return false;
}

static void finish_here(struct smb_async *async)
{
    struct slice *slice = async->here;
    async->here = NULL;
    if (slice->transfer.call.stream_count == 0)
        end_slice(async, slice, smb_now_ns());
}

/* For stopped operations: those in a heap may have begun. */
static bool some_begun(const struct smb_async *async)
{
    for (const struct smb_window *window = async->windows; window; window = window->next)
        if (window->heap.count > 0)
            return true;
    return false;
}

static void *run(void *argument)
{
    struct smb_async *async = argument;
    pthread_mutex_lock(&async->mutex);
    for (;;) {
        call_rearm(&async->bell);
        reap(async);
        begin_what_may(async);
        bool idle = !async->flying && !async->here;
        if (async->event_count >= async->taker_wants || (idle && async->event_count > 0))
            pthread_cond_signal(&async->event_there);
        if (idle && async->stopped && !some_begun(async))
            break;
        async->sleeps = idle;
        async->busy = !idle;
        if (idle) {
            pthread_cond_wait(&async->changed, &async->mutex);
            async->sleeps = false;
            continue;
        }
        pthread_mutex_unlock(&async->mutex);
        bool local = async->here != NULL;
        if (async->flying) {
            call_submit(async->client, &async->bell);
            call_wait(async->client, &async->bell, UINT64_MAX, local ? step_here : NULL, async);
        } else {
            while (local_step(&async->here->transfer.work))
                continue;
        }
        pthread_mutex_lock(&async->mutex);
        async->busy = false;
        if (local)
            finish_here(async);
    }
    pthread_mutex_unlock(&async->mutex);
    return NULL;
}

/* Call with the mutex held. Signals are blocked, because Python's main thread handles them. */
static int start_thread(struct smb_async *async)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&async->thread, NULL, run, async);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        errno = error;
        return SMB_SYSTEM;
    }
    async->has_thread = true;
    return SMB_OK;
}

/* ---- the library's side ---------------------------------------------------------------------- */

static void make_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

int smb_async_create(struct smb_client *client, struct smb_async **async)
{
    struct smb_async *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->client = client_retain(client);
    made->references = 1;
    made->pid = getpid();
    made->events_end = &made->events_head;
    made->flying_end = &made->flying;
    made->taker_wants = 1;
    made->bell = (struct call){.is_bell = true, .deadline_ns = UINT64_MAX};
    pthread_mutex_init(&made->mutex, NULL);
    make_condition(&made->changed);
    make_condition(&made->event_there);
    make_condition(&made->ended);
    *async = made;
    return SMB_OK;
}

static bool touches_mapped(const struct smb_buffer *buffer)
{
    for (uint32_t i = 0; i < buffer->layout.segment_count; i++)
        if (buffer->paths[i].segment)
            return true;
    return false;
}

static int submit(struct smb_async *async, struct smb_operation *operation)
{
    pthread_mutex_lock(&async->mutex);
    struct smb_window *window = operation->window;
    int status = async->stopped ? SMB_DISCONNECTED : SMB_OK;
    if (status == SMB_OK && window->operations >= OPERATIONS_MAX)
        status = SMB_BUSY;
    if (status == SMB_OK && !heap_make_room(&window->heap, window->operations + 1))
        status = SMB_OUT_OF_MEMORY;
    if (status == SMB_OK && !async->has_thread)
        status = start_thread(async);
    if (status == SMB_OK) {
        order_enter(&async->order, operation);
        window->operations++;
        if (operation->in_heap && window_has_room(window, operation))
            wake_thread(async);
    }
    pthread_mutex_unlock(&async->mutex);
    return status;
}

int smb_async_submit(struct smb_async *async, struct smb_window *window, struct smb_buffer *buffer,
                     const struct smb_request *request, uint64_t key, int priority, uint64_t tag)
{
    int opcode = request->opcode;
    SMB_ASSERT(window->async == async && request->bytes <= UINT64_MAX - request->offset);
    if (buffer && ((opcode != SMB_READ && opcode != SMB_WRITE && opcode != SMB_ACCUMULATE) ||
                   request->wire == SMB_WIRE_SPARSE || !transfer_is_sound(buffer, request) ||
                   transfer_uses_itself(buffer, request)))
        return SMB_INVALID;
    struct smb_operation *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->window = window;
    made->heap = &window->heap;
    made->buffer = buffer;
    made->request = *request;
    made->tag = tag;
    made->key = key;
    made->urgency = priority;
    made->changes = smb_opcode_changes(opcode);
    made->local = buffer && touches_mapped(buffer);
    int status = submit(async, made);
    if (status != SMB_OK)
        free(made);
    return status;
}

/* Call with the mutex held. */
static void forget(struct smb_operation *operation)
{
    operation->window->operations--;
    free(operation);
}

int smb_async_cancel(struct smb_async *async, uint64_t tag)
{
    if (async->pid != getpid())
        return 0; /* the operation is the parent's, and was begun there */
    pthread_mutex_lock(&async->mutex);
    struct smb_operation *found = order_find_waiting(&async->order, tag);
    if (found) {
        if (found->in_heap)
            heap_remove(found);
        leave_order(async, found);
        forget(found);
        wake_thread(async);
    }
    pthread_mutex_unlock(&async->mutex);
    return found != NULL;
}

void smb_async_end(struct smb_async *async, struct smb_operation *operation)
{
    pthread_mutex_lock(&async->mutex);
    SMB_ASSERT(operation->state == OPERATION_ENDED && operation->what != SMB_ASYNC_DONE);
    if (operation->what == SMB_ASYNC_BEGIN)
        operation->window->in_flight -= window_slice_bytes(operation);
    leave_order(async, operation);
    forget(operation);
    wake_thread(async);
    pthread_mutex_unlock(&async->mutex);
}

static bool wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    return pthread_cond_timedwait(condition, mutex, &until) != ETIMEDOUT;
}

int smb_async_await_event(struct smb_async *async, uint32_t timeout_ms)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    pthread_mutex_lock(&async->mutex);
    async->taker_wants = 1;
    while (async->event_count == 0 && wait_until(&async->event_there, &async->mutex, until_ns))
        continue;
    async->taker_wants = EVENTS_AT_ONCE;
    until_ns = smb_now_ns() + TAKER_LINGERS_NS;
    while (async->event_count > 0 && async->event_count < EVENTS_AT_ONCE && async->busy &&
           wait_until(&async->event_there, &async->mutex, until_ns))
        continue;
    bool some = async->event_count > 0;
    pthread_mutex_unlock(&async->mutex);
    return some;
}

uint32_t smb_async_take(struct smb_async *async, struct smb_async_event *events, uint32_t most)
{
    uint32_t count = 0;
    pthread_mutex_lock(&async->mutex);
    while (async->events_head && count < most) {
        struct smb_operation *operation = async->events_head;
        async->events_head = operation->next_event;
        if (!async->events_head)
            async->events_end = &async->events_head;
        async->event_count--;
        events[count++] = (struct smb_async_event){.operation = operation,
                                                   .tag = operation->tag,
                                                   .what = operation->what,
                                                   .outcome = operation->outcome};
        operation->outcome.unknown = NULL;
        if (operation->what == SMB_ASYNC_DONE)
            forget(operation);
    }
    pthread_mutex_unlock(&async->mutex);
    return count;
}

int smb_async_wait(struct smb_async *async, uint64_t key, uint64_t offset, uint64_t bytes,
                   bool changes, uint32_t timeout_ms, uint64_t *last)
{
    struct smb_operation asked = {.request = {.offset = offset, .bytes = bytes},
                                  .key = key,
                                  .changes = changes,
                                  .urgency = 0}; /* like a request without a priority */
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    pthread_mutex_lock(&async->mutex);
    if (*last == 0) {
        *last = async->order.count;
        order_raise(&async->order, &asked);
    }
    bool waits = true, in_time = true;
    async->waiting++;
    while (in_time && (waits = order_blocks(&async->order, &asked, *last)))
        in_time = wait_until(&async->ended, &async->mutex, until_ns);
    async->waiting--;
    pthread_mutex_unlock(&async->mutex);
    return waits ? SMB_TIMEOUT : SMB_OK;
}

void smb_async_stop(struct smb_async *async)
{
    pthread_mutex_lock(&async->mutex);
    async->stopped = true;
    for (int list = 0; list < ORDERS; list++) {
        for (struct smb_operation *operation = async->order.first[list], *later; operation;
             operation = later) {
            later = operation->later;
            if (operation->state != OPERATION_WAITS)
                continue;
            if (operation->in_heap)
                heap_remove(operation);
            add_event(async, operation, SMB_ASYNC_CANCELLED);
        }
    }
    pthread_cond_signal(&async->event_there);
    wake_thread(async);
    pthread_mutex_unlock(&async->mutex);
}

void smb_async_destroy(struct smb_async *async)
{
    if (async->pid != getpid())
        return; /* a child of fork: the thread is the parent's, and may hold the mutex */
    smb_async_stop(async);
    if (async->has_thread)
        pthread_join(async->thread, NULL);
    while (async->spare) {
        struct slice *slice = async->spare;
        async->spare = slice->next;
        free(slice);
    }
    async_release(async);
}
