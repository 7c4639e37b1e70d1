/* Calls of many threads over shared links; see client.h for who does the I/O. */
#include "client/client.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    POLLED_MAX = 1 + SMB_SEGMENTS_PER_BUFFER_MAX
};

static int (*_Atomic wanted_still)(void); /* set once; NULL: nobody looks */

void smb_set_look(int (*look)(void))
{
    atomic_store_explicit(&wanted_still, look, memory_order_relaxed);
}

bool client_look(void)
{
    int (*look)(void) = atomic_load_explicit(&wanted_still, memory_order_relaxed);
    return look && look();
}

int smb_client_create(uint64_t session, struct smb_client **client)
{
    struct smb_client *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->references = 1;
    made->session = session;
    made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->wake_fd < 0) {
        int saved = errno;
        free(made);
        errno = saved;
        return SMB_SYSTEM;
    }
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->link_wanted, NULL);
    *client = made;
    return SMB_OK;
}

void smb_client_use_checksums(struct smb_client *client)
{
    client->checksums = true;
}

void smb_client_want_proof(struct smb_client *client)
{
    client->wants_proof = true;
}

uint64_t smb_client_spoilt(struct smb_client *client)
{
    return atomic_load_explicit(&client->spoilt, memory_order_relaxed);
}

void smb_client_count(struct smb_client *client)
{
    atomic_store_explicit(&client->stats.wanted, true, memory_order_relaxed);
}

void smb_client_counters(struct smb_client *client, struct smb_client_counters *counters)
{
    const struct client_stats *stats = &client->stats;
    memset(counters, 0, sizeof *counters);
    tally_read(&stats->at_once, counters->operations[SMB_TRANSPORT_SHM], counters->bytes[SMB_TRANSPORT_SHM]);
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++) {
        tally_read(&stats->calls[t], counters->operations[t], counters->bytes[t]);
        for (int i = 0; i < SMB_OPCODE_COUNT; i++)
            latency_read(&stats->latency[t][i], &counters->latencies.of[t][i]);
    }
    for (int i = 0; i < SMB_STATUS_COUNT; i++)
        counters->failed[i] = stats_read(&stats->failed[i]);
    counters->repeated_total = stats_read(&stats->repeated);
    counters->spoilt_total = smb_client_spoilt(client);
}

void client_wake_driver(struct smb_client *client)
{
    uint64_t one = 1;
    if (write(client->wake_fd, &one, sizeof one) < 0)
        return; /* its counter is not 0: the driver wakes anyway */
}

void smb_client_close(struct smb_client *client)
{
    atomic_store(&client->closing, true); /* read by the driver in every round */
    pthread_mutex_lock(&client->mutex);
    pthread_cond_broadcast(&client->link_wanted);
    pthread_mutex_unlock(&client->mutex);
    client_wake_driver(client);
}

void smb_client_destroy(struct smb_client *client)
{
    while (client->active) { /* with frames that a caller left, or broken since the last call */
        struct smb_link *link = client->active;
        client->active = link->next;
        link_release(link);
    }
    client_release(client);
}

struct smb_client *client_retain(struct smb_client *client)
{
    atomic_fetch_add_explicit(&client->references, 1, memory_order_relaxed);
    return client;
}

void client_release(struct smb_client *client)
{
    if (atomic_fetch_sub_explicit(&client->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_cond_destroy(&client->link_wanted);
    pthread_mutex_destroy(&client->mutex);
    close(client->wake_fd);
    free(client);
}

void call_failed(struct stream *stream, int status)
{
    struct smb_outcome *outcome = stream->call->outcome;
    if (stream->told) {
        if (stream->told->status == SMB_OK)
            stream->told->status = status;
        return;
    }
    if (outcome->status == SMB_OK) {
        outcome->status = status;
        outcome->segment = stream->segment_index;
    }
}

void call_applied(struct stream *stream, uint32_t bytes, uint64_t result)
{
    stream->call->outcome->bytes_applied += bytes;
    stream->call->outcome->result = result;
}

void call_note_sent(struct call *call)
{
    call->outcome->sent = 1;
}

bool call_was_sent(const struct stream *stream)
{
    return stream->told ? stream->told->sent : stream->call->outcome->sent;
}

static bool is_finished(const struct call *call)
{
    return call->streams_left == 0;
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
        if (call->settles) {
            if (call->settles->pending > 0)
                call->settles->settler = call;
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
        if (is_finished(call)) {
            *at = call->next;
            finish(client, call); /* its memory may be gone from here on */
        } else {
            at = &call->next;
        }
    }
}

/* Whoever waits for a connection would have to be told something else than whoever waits for an answer. */
static int why_late(const struct stream *stream)
{
    int state = atomic_load_explicit(&stream->link->state, memory_order_relaxed);
    bool sent = call_was_sent(stream);
    return state == LINK_UP || state == LINK_RESUMING ? SMB_TIMEOUT : sent ? SMB_LINK_LOST : SMB_DISCONNECTED;
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
    if (call->settles) {
        call->outcome->status = SMB_TIMEOUT;
        if (call->settles->settler == call)
            call->settles->settler = NULL;
        call->settles = NULL;
        call->streams_left = 0;
    }
}

/* Returns the next deadline. */
static uint64_t abandon_late(struct smb_client *client, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (struct call *call = client->calls; call; call = call->next) {
        uint64_t deadline_ns = atomic_load_explicit(&call->deadline_ns, memory_order_relaxed);
        if (call->settles && call->settles->pending == 0) { /* another one was told */
            call->settles = NULL;
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
    if (closing) /* before anything is sent that need not be */
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
            client_want_link(link, false);
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
        pollers[count++] = (struct pollfd){.fd = link_fd(link), /* one of -1 is passed over */
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

static bool much_is_under_way(const struct smb_client *client)
{
    for (const struct smb_link *link = client->active; link; link = link->next)
        if (link_sleeps_at_once(link))
            return true;
    return false;
}

/* Returns whether the work is done. */
static bool drive(struct smb_client *client, struct call *own, uint64_t until_ns, bool (*work)(void *), void *work_argument)
{
    uint64_t last_move_ns = smb_now_ns();
    while (!is_finished(own) || work) {
        take_arrivals(client);
        bool moved = progress(client);
        uint64_t now_ns = smb_now_ns();
        uint64_t deadline_ns = abandon_late(client, now_ns);
        if (now_ns >= until_ns)
            break;
        if (until_ns < deadline_ns)
            deadline_ns = until_ns;
        bool own_done = is_finished(own); /* before take_out_finished, which may free others but not own */
        take_out_finished(client);
        if (work) {
            if (!work(work_argument))
                work = NULL;
            last_move_ns = now_ns;
        } else if (moved) {
            last_move_ns = now_ns;
        } else if (!own_done && (now_ns - last_move_ns > SPIN_NS || much_is_under_way(client))) {
            sleep_driver(client, now_ns, deadline_ns);
            last_move_ns = smb_now_ns();
        } else {
            sched_yield(); /* the peer may have been put on this very core */
        }
    }
    take_out_finished(client);
    return !work;
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

void client_submit(struct smb_client *client, struct call *call)
{
    pthread_mutex_lock(&client->mutex);
    call->next = client->arrivals;
    client->arrivals = call;
    if (client->sleeping)
        client_wake_driver(client);
    pthread_mutex_unlock(&client->mutex);
}

/* With the mutex held. */
static void sleep_caller(struct smb_client *client, struct call *call, uint64_t until_ns)
{
    make_wake(call);
    call->waits = true;
    if (until_ns == UINT64_MAX) {
        pthread_cond_wait(&call->wake, &client->mutex);
    } else {
        struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U), .tv_nsec = (long)(until_ns % 1000000000U)};
        pthread_cond_clockwait(&call->wake, &client->mutex, CLOCK_MONOTONIC, &until);
    }
    call->waits = false;
}

bool client_wait(struct smb_client *client, struct call *call, uint64_t until_ns, bool (*work)(void *), void *work_argument)
{
    pthread_mutex_lock(&client->mutex);
    while ((!call->done || work) && smb_now_ns() < until_ns) {
        if (work && (client->driving || call->done)) {
            /* Another thread may have carried the call's frames to their end before this one came to its own part. */
            pthread_mutex_unlock(&client->mutex);
            bool more = true;
            while (more && smb_now_ns() < until_ns)
                more = work(work_argument);
            work = more ? work : NULL;
            pthread_mutex_lock(&client->mutex);
        } else if (!client->driving) {
            client->driving = true;
            pthread_mutex_unlock(&client->mutex);
            if (drive(client, call, until_ns, work, work_argument))
                work = NULL;
            pthread_mutex_lock(&client->mutex);
            hand_over(client);
        } else {
            sleep_caller(client, call, until_ns);
        }
    }
    bool done = call->done && !work;
    if (!call->done && !client->driving)
        hand_over(client); /* the one that was to drive next may have been us */
    pthread_mutex_unlock(&client->mutex);
    if (done && call->has_wake) {
        pthread_cond_destroy(&call->wake);
        call->has_wake = false;
    }
    return done;
}

void client_run(struct smb_client *client, struct call *call, bool (*work)(void *), void *work_argument)
{
    client_submit(client, call);
    while (!client_wait(client, call, atomic_load_explicit(&wanted_still, memory_order_relaxed) ? smb_now_ns() + LOOK_MS * 1000000U
                                                                                                : UINT64_MAX,
                        work, work_argument)) {
        if (call->stopped || !client_look())
            continue;
        /* As one that is late: what was sent is in doubt, what was not is not sent any more. */
        call->stopped = true;
        atomic_store(&call->deadline_ns, 0);
        client_wake_driver(client);
    }
}

/* ---- connections -------------------------------------------------------------------------------------------------- */

void client_want_link(struct smb_link *link, bool wanted)
{
    struct smb_client *client = link->client;
    pthread_mutex_lock(&client->mutex);
    if (wanted && !link->wanted)
        pthread_cond_broadcast(&client->link_wanted);
    link->wanted = wanted;
    if (!wanted)
        link->in_hands = false;
    pthread_mutex_unlock(&client->mutex);
}

static struct smb_link *find_wanted(const struct smb_client *client)
{
    struct smb_link *link = client->links;
    while (link && (!link->wanted || link->in_hands))
        link = link->next_of_all;
    return link;
}

int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U), .tv_nsec = (long)(until_ns % 1000000000U)};
    int failure = 0;
    pthread_mutex_lock(&client->mutex);
    struct smb_link *link = find_wanted(client);
    while (!link && failure == 0 && !atomic_load(&client->closing)) {
        failure = pthread_cond_clockwait(&client->link_wanted, &client->mutex, CLOCK_MONOTONIC, &until);
        link = find_wanted(client);
    }
    if (link) {
        link->in_hands = true;
        *link_id = link->id;
    }
    pthread_mutex_unlock(&client->mutex);
    return atomic_load(&client->closing) ? SMB_DISCONNECTED : link ? SMB_OK : SMB_TIMEOUT;
}

/* ---- what became of it -------------------------------------------------------------------------------------------- */

uint32_t call_doubt(struct call *call, uint64_t buffer_offset, uint32_t bytes, int state)
{
    struct smb_doubt *doubt = call->outcome->doubt;
    if (!doubt) {
        doubt = calloc(1, sizeof *doubt);
        if (!doubt)
            return UINT32_MAX;
        doubt->references = 1;
        call->outcome->doubt = doubt;
    }
    if (doubt->count == doubt->room) {
        uint32_t room = doubt->room ? 2 * doubt->room : 16;
        struct doubt_piece *pieces = realloc(doubt->pieces, room * sizeof *pieces);
        if (!pieces)
            return UINT32_MAX;
        doubt->pieces = pieces;
        doubt->room = room;
    }
    doubt->pieces[doubt->count] = (struct doubt_piece){.buffer_offset = buffer_offset, .bytes = bytes, .state = state};
    doubt->pending += state == SMB_DOUBT_PENDING;
    return doubt->count++;
}

void doubt_settled(struct smb_doubt *doubt, uint32_t index, int state)
{
    if (doubt->pieces[index].state != SMB_DOUBT_PENDING)
        return;
    doubt->pieces[index].state = state;
    if (--doubt->pending > 0 || !doubt->settler)
        return;
    doubt->settler->settles = NULL;
    doubt->settler->streams_left = 0;
    doubt->settler = NULL;
}

int smb_doubt_settle(struct smb_client *client, struct smb_doubt *doubt, uint32_t timeout_ms)
{
    struct smb_outcome outcome = {0};
    struct call call = {.outcome = &outcome, .deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U,
                        .streams_left = 1, .settles = doubt};
    client_run(client, &call, NULL, NULL);
    return outcome.status;
}

bool smb_doubt_part(const struct smb_doubt *doubt, uint32_t index, uint64_t *offset, uint32_t *bytes, int *state)
{
    if (index >= doubt->count)
        return false;
    *offset = doubt->pieces[index].buffer_offset;
    *bytes = doubt->pieces[index].bytes;
    *state = doubt->pieces[index].state;
    return true;
}

void smb_doubt_release(struct smb_doubt *doubt)
{
    if (atomic_fetch_sub_explicit(&doubt->references, 1, memory_order_acq_rel) != 1)
        return;
    free(doubt->pieces);
    free(doubt);
}

/* ---- what waits --------------------------------------------------------------------------------------------------- */

struct smb_asking {
    struct smb_ask ask;
    struct smb_told told;
    struct call call;
    struct stream stream;
};

int smb_ask_start(struct smb_link *link, const struct smb_ask *ask, struct smb_asking **asking)
{
    struct smb_asking *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->ask = *ask;
    made->call.deadline_ns = UINT64_MAX;
    made->call.streams = &made->stream;
    made->call.stream_count = 1;
    made->call.streams_left = 1;
    made->stream = (struct stream){.call = &made->call, .link = link_retain(link), .ask = &made->ask, .told = &made->told,
                                   .have_piece = true, .segment_id = ask->segment, .epoch = ask->epoch};
    client_submit(link->client, &made->call);
    *asking = made;
    return SMB_OK;
}

int smb_ask_wait(struct smb_asking *asking, uint32_t timeout_ms, struct smb_told *told)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct smb_client *client = asking->stream.link->client;
    if (!client_wait(client, &asking->call, until_ns, NULL, NULL))
        return SMB_BUSY;
    *told = asking->told;
    return told->status;
}

void smb_ask_end(struct smb_asking *asking)
{
    struct smb_client *client = asking->stream.link->client;
    /* If it is not done, the driver gives it up in its next round. */
    atomic_store(&asking->call.deadline_ns, 0);
    client_wake_driver(client);
    client_wait(client, &asking->call, UINT64_MAX, NULL, NULL);
    link_release(asking->stream.link);
    free(asking);
}
