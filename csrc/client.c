/* Calls of many threads over shared links; see client.h for who does the I/O. */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    POLLED_MAX = 1 + SMB_SEGMENTS_PER_BUFFER_MAX,
    /* How long the driver looks again before it sleeps. A wake-up costs more than this, on both sides; bounded, so that peers
     * which share a core don't wait for each other's spinning. */
    SPIN_NS = 50000
};

int smb_client_create(uint64_t session, struct smb_client **client)
{
    struct smb_client *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->session = session;
    made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->wake_fd < 0) {
        free(made);
        return SMB_SYSTEM;
    }
    pthread_mutex_init(&made->mutex, NULL);
    *client = made;
    return SMB_OK;
}

static void wake_driver(struct smb_client *client)
{
    uint64_t one = 1;
    if (write(client->wake_fd, &one, sizeof one) < 0)
        return; /* its counter is not 0: the driver wakes anyway */
}

void smb_client_close(struct smb_client *client)
{
    atomic_store(&client->closing, true); /* read by the driver in every round */
    wake_driver(client);
}

void smb_client_destroy(struct smb_client *client)
{
    while (client->active) { /* broken when the last call gave up, and not looked at since */
        struct smb_link *link = client->active;
        client->active = link->next;
        link_release(link);
    }
    pthread_mutex_destroy(&client->mutex);
    close(client->wake_fd);
    free(client);
}

void call_failed(struct stream *stream, int status)
{
    struct smb_outcome *outcome = stream->call->outcome;
    if (outcome->status == SMB_OK) {
        outcome->status = status;
        outcome->segment = stream->segment_index;
    }
}

void call_stream_finished(struct stream *stream)
{
    stream->call->streams_left--;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */

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
        for (uint32_t i = 0; i < call->stream_count; i++) {
            link_enqueue(call->streams[i].link, &call->streams[i]);
            activate(client, call->streams[i].link);
        }
        call = next;
    }
}

static void finish(struct smb_client *client, struct call *call)
{
    pthread_mutex_lock(&client->mutex);
    call->done = true;
    if (call->waits)
        pthread_cond_signal(&call->wake);
    pthread_mutex_unlock(&client->mutex);
}

static void take_out_finished(struct smb_client *client)
{
    for (struct call **at = &client->calls; *at;) {
        struct call *call = *at;
        if (call->streams_left == 0) {
            *at = call->next;
            finish(client, call); /* its memory may be gone from here on */
        } else {
            at = &call->next;
        }
    }
}

/* What is queued is forgotten; what is in flight takes its link along. */
static void abandon(struct call *call, int status)
{
    for (uint32_t i = 0; i < call->stream_count && call->streams_left > 0; i++) {
        struct stream *stream = &call->streams[i];
        if (stream->in_flight > 0) {
            call_failed(stream, status);
            link_break(stream->link, SMB_LINK_LOST);
        } else if (stream->queued) {
            call_failed(stream, status);
            link_forget(stream->link, stream);
            stream->have_piece = false;
            call_stream_finished(stream);
        }
    }
}

/* Returns the next deadline. */
static uint64_t abandon_late(struct smb_client *client, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    if (atomic_load_explicit(&client->closing, memory_order_relaxed))
        for (struct smb_link *link = client->active; link; link = link->next)
            link_break(link, SMB_LINK_LOST);
    for (struct call *call = client->calls; call; call = call->next) {
        if (now_ns >= call->deadline_ns)
            abandon(call, SMB_TIMEOUT);
        else if (call->deadline_ns < next)
            next = call->deadline_ns;
    }
    return next;
}

static bool progress(struct smb_client *client)
{
    bool moved = false;
    for (struct smb_link **at = &client->active; *at;) {
        struct smb_link *link = *at;
        if (link_busy(link))
            moved |= link_progress(link);
        if (link_busy(link)) {
            at = &link->next;
        } else {
            *at = link->next;
            link->active = false;
            link_release(link);
        }
    }
    return moved;
}

/* Until a link can move, a call arrives, or the next deadline. */
static void sleep_driver(struct smb_client *client, uint64_t now_ns, uint64_t deadline_ns)
{
    struct pollfd pollers[POLLED_MAX];
    nfds_t count = 0;
    pollers[count++] = (struct pollfd){.fd = client->wake_fd, .events = POLLIN};
    for (struct smb_link *link = client->active; link && count < POLLED_MAX; link = link->next)
        pollers[count++] = (struct pollfd){.fd = link->fd,
                                           .events = (short)(POLLIN | (link_wants_output(link) ? POLLOUT : 0))};
    uint64_t ms = deadline_ns <= now_ns ? 0 : (deadline_ns - now_ns) / 1000000U + 1;
    if (client->active && count == POLLED_MAX && ms > 1)
        ms = 1; /* more links than are looked at */
    pthread_mutex_lock(&client->mutex);
    bool arrived = client->arrivals != NULL;
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

static void drive(struct smb_client *client, struct call *own, bool (*work)(void *), void *work_argument)
{
    uint64_t last_move_ns = smb_now_ns();
    while (own->streams_left > 0 || work) {
        take_arrivals(client);
        bool moved = progress(client);
        uint64_t now_ns = smb_now_ns();
        uint64_t deadline_ns = abandon_late(client, now_ns);
        bool own_done = own->streams_left == 0; /* before take_out_finished, which may free others but not own */
        take_out_finished(client);
        if (work) {
            if (!work(work_argument))
                work = NULL;
            last_move_ns = now_ns;
        } else if (moved) {
            last_move_ns = now_ns;
        } else if (!own_done && now_ns - last_move_ns > SPIN_NS) {
            sleep_driver(client, now_ns, deadline_ns);
            last_move_ns = smb_now_ns();
        } else {
            sched_yield(); /* the peer may have been put on this very core */
        }
    }
    take_out_finished(client);
}

/* ---- the caller --------------------------------------------------------------------------------------------------- */

/* With the mutex held: somebody else's call needs a driver. */
static void hand_over(struct smb_client *client)
{
    client->driving = false;
    struct call *const lists[] = {client->calls, client->arrivals};
    for (int i = 0; i < 2; i++) {
        for (struct call *heir = lists[i]; heir; heir = heir->next) {
            if (heir->waits) {
                pthread_cond_signal(&heir->wake);
                return;
            }
        }
    } /* those that do not wait are on their way to look whether somebody drives */
}

static void make_wake(struct call *call)
{
    if (!call->has_wake)
        pthread_cond_init(&call->wake, NULL);
    call->has_wake = true;
}

void client_run(struct smb_client *client, struct call *call, bool (*work)(void *), void *work_argument)
{
    pthread_mutex_lock(&client->mutex);
    call->next = client->arrivals;
    client->arrivals = call;
    while (!call->done) {
        if (!client->driving) {
            client->driving = true;
            pthread_mutex_unlock(&client->mutex);
            drive(client, call, work, work_argument);
            work = NULL;
            pthread_mutex_lock(&client->mutex);
            hand_over(client);
        } else {
            if (client->sleeping)
                wake_driver(client);
            if (work) {
                pthread_mutex_unlock(&client->mutex);
                while (work(work_argument)) {
                }
                work = NULL;
                pthread_mutex_lock(&client->mutex);
                continue;
            }
            make_wake(call);
            call->waits = true;
            pthread_cond_wait(&call->wake, &client->mutex);
            call->waits = false;
        }
    }
    pthread_mutex_unlock(&client->mutex);
    if (call->has_wake)
        pthread_cond_destroy(&call->wake);
}
