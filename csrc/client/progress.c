#include "client/progress.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "client/link.h"
#include "client/send.h"
#include "client/unknown.h"

enum { POLLED_MAX = 1 + SMB_SEGMENTS_PER_BUFFER_MAX };

static bool is_finished(const struct call *call)
{
    return call->streams_left == 0 &&
           (!call->is_bell || atomic_load_explicit(&call->rung, memory_order_acquire));
}

static void activate(struct smb_client *client, struct smb_link *link)
{
    if (link->active)
        return;
    link->active = true;
    link_retain(link);
    link->next = client->active;
    client->active = link;
}

static void take_arrivals(struct smb_client *client)
{
    pthread_mutex_lock(&client->mutex);
    struct call *call = client->arrivals;
    client->arrivals = NULL;
    pthread_mutex_unlock(&client->mutex);
    while (call) {
        struct call *next = call->next;
        call->next = client->calls;
        client->calls = call;
        if (call->resolves) {
            if (call->resolves->pending > 0)
                call->resolves->resolver = call;
            else
                call->streams_left = 0;
        }
        for (uint32_t i = 0; i < call->stream_count; i++) {
            struct stream *stream = &call->streams[i];
            link_enqueue(stream->link, stream);
            activate(client, stream->link);
        }
        call = next;
    }
}

/* Ends a call. Returns whether it has rung a bell. */
static bool finish(struct smb_client *client, struct call *call)
{
    pthread_mutex_lock(&client->mutex);
    struct call *bell = call->bell;
    if (bell) /* before `call` belongs to its thread again, which also owns the bell */
        atomic_store_explicit(&bell->rung, true, memory_order_release);
    call->done = true;
    if (call->waits)
        pthread_cond_signal(&call->wake);
    pthread_mutex_unlock(&client->mutex);
    return bell;
}

static void take_out_finished(struct smb_client *client)
{
    bool rang;
    do {
        rang = false;
        for (struct call **at = &client->calls; *at;) {
            struct call *call = *at;
            if (is_finished(call)) {
                *at = call->next;
                rang |= finish(client, call); /* the call's memory may be gone from here on */
            } else {
                at = &call->next;
            }
        }
    } while (rang); /* for bells that stand in the list before the calls that rang them */
}

/* A call without a connection fails with another status than a call without an answer. */
static int why_late(const struct stream *stream)
{
    int state = atomic_load_explicit(&stream->link->state, memory_order_relaxed);
    bool sent = call_was_sent(stream);
    return state == LINK_UP || state == LINK_RESUMING ? SMB_TIMEOUT
           : sent                                     ? SMB_LINK_LOST
                                                      : SMB_DISCONNECTED;
}

static void abandon(struct call *call)
{
    for (uint32_t i = 0; i < call->stream_count && !is_finished(call); i++) {
        struct stream *stream = &call->streams[i];
        if (stream->in_flight > 0 || stream->queued) {
            call_failed(stream, why_late(stream));
            link_abandon(stream->link, stream);
        }
    }
    if (call->resolves) {
        call->outcome->status = SMB_TIMEOUT;
        if (call->resolves->resolver == call)
            call->resolves->resolver = NULL;
        call->resolves = NULL;
        call->streams_left = 0;
    }
}

/* Gives up calls whose time is over. Returns the next deadline. */
static uint64_t abandon_late(struct smb_client *client, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (struct call *call = client->calls; call; call = call->next) {
        uint64_t deadline_ns = atomic_load_explicit(&call->deadline_ns, memory_order_relaxed);
        if (call->resolves && call->resolves->pending == 0) { /* resolved already */
            call->resolves = NULL;
            call->streams_left = 0;
        }
        if (now_ns >= deadline_ns)
            abandon(call);
        else if (deadline_ns < next)
            next = deadline_ns;
    }
    return next;
}

static bool progress(struct smb_client *client)
{
    bool moved = false, closing = atomic_load_explicit(&client->closing, memory_order_relaxed);
    if (closing) /* before more is sent than is needed */
        for (struct smb_link *link = client->active; link; link = link->next)
            link_shut(link, SMB_LINK_LOST);
    for (struct smb_link **at = &client->active; *at;) {
        struct smb_link *link = *at;
        if (link_busy(link))
            moved |= link_progress(link);
        if (link_busy(link)) {
            at = &link->next;
        } else {
            *at = link->next;
            link->active = false;
            link_want(link, false);
            link_release(link);
        }
    }
    return moved;
}

/* Sleeps until a link can move, a call arrives, or the next deadline. */
static void progress_sleep(struct smb_client *client, uint64_t now_ns, uint64_t deadline_ns)
{
    struct pollfd pollers[POLLED_MAX];
    nfds_t count = 0;
    pollers[count++] = (struct pollfd){.fd = client->wake_fd, .events = POLLIN};
    for (struct smb_link *link = client->active; link && count < POLLED_MAX; link = link->next)
        pollers[count++] = (struct pollfd){
            .fd = link_fd(link), /* poll ignores a descriptor of -1 */
            .events = (short)(POLLIN | (link_wants_output(link) ? POLLOUT : 0))};
    uint64_t ms = deadline_ns <= now_ns ? 0 : (deadline_ns - now_ns) / 1000000U + 1;
    if (client->active && count == POLLED_MAX && ms > 1)
        ms = 1; /* more links than poll watches */
    pthread_mutex_lock(&client->mutex);
    bool arrived = client->arrivals != NULL || client->rung;
    client->rung = false;
    client->sleeping = !arrived;
    pthread_mutex_unlock(&client->mutex);
    if (arrived)
        return;
    poll(pollers, count, ms > 60000 ? 60000 : (int)ms);
    pthread_mutex_lock(&client->mutex);
    client->sleeping = false;
    pthread_mutex_unlock(&client->mutex);
    uint64_t ignored;
    if (pollers[0].revents && read(client->wake_fd, &ignored, sizeof ignored) < 0)
        return;
}

static bool much_is_under_way(const struct smb_client *client)
{
    for (const struct smb_link *link = client->active; link; link = link->next)
        if (link_sleeps_at_once(link))
            return true;
    return false;
}

bool progress_run(struct smb_client *client, struct call *own, uint64_t until_ns,
                  bool (*work)(void *), void *work_argument)
{
    SMB_ASSERT(client->has_progress_thread);
    uint64_t last_move_ns = smb_now_ns();
    do { /* even if a bell has rung already, the links are served once */
        take_arrivals(client);
        bool moved = progress(client);
        uint64_t now_ns = smb_now_ns();
        uint64_t deadline_ns = abandon_late(client, now_ns);
        if (now_ns >= until_ns)
            break;
        if (until_ns < deadline_ns)
            deadline_ns = until_ns;
        take_out_finished(client); /* this may free other calls, but not `own`, and may ring it */
        bool own_done = is_finished(own);
        if (work) {
            if (!work(work_argument))
                work = NULL;
            last_move_ns = now_ns;
        } else if (moved) {
            last_move_ns = now_ns;
        } else if (!own_done && (now_ns - last_move_ns > SPIN_NS || much_is_under_way(client))) {
            progress_sleep(client, now_ns, deadline_ns);
            last_move_ns = smb_now_ns();
        } else {
            sched_yield(); /* the peer may have to run on this core */
        }
    } while (!is_finished(own) || work);
    take_out_finished(client);
    return !work;
}

void smb_client_destroy(struct smb_client *client)
{
    /* links with frames that a caller left, or that broke since the last call */
    while (client->active) {
        struct smb_link *link = client->active;
        client->active = link->next;
        link_release(link);
    }
    client_release(client);
}
