/* Two copies of a segment: what is forwarded, what waits for the backup, and which server takes
 * over. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "lab.h"
#include "pair.h"
#include "base/clock.h"
#include "memory/change.h"
#include "memory/segment.h"
#include "sync/sync.h"
#include "server/feed.h"
#include "server/replica.h"

enum { BESIDE = 78, ELEMENTS = SEGMENT_BYTES / 8, CLIENTS = 4, ROUNDS = 150 };

static void start(struct pair *pair)
{
    pair_start(pair, SMB_INT64, 1);
}

static struct smb_request addition(const int64_t *ones)
{
    return (struct smb_request){.opcode = SMB_ACCUMULATE,
                                .bytes = ELEMENTS * 8,
                                .source = ones,
                                .op = SMB_SUM,
                                .scale = 1.0};
}

static const int64_t *ones(void)
{
    static int64_t made[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        made[i] = 1;
    return made;
}

struct worker {
    struct pair *pair;
    const int64_t *ones;
    uint64_t session;
    _Atomic int done;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct user user = use(worker->pair, worker->session);
    for (int i = 0; i < ROUNDS; i++) {
        must(user.buffer, addition(worker->ones));
        must(user.buffer, (struct smb_request){.opcode = SMB_FETCH_ADD, .bytes = 8, .argument = 1});
        atomic_fetch_add(&worker->done, 1);
    }
    leave(&user);
    return NULL;
}

static void forward_changes(bool inside_tls)
{
    struct pair pair;
    struct worker workers[CLIENTS];
    pthread_t threads[CLIENTS];
    const int64_t *one = ones(); /* before the threads that read it */
    start(&pair);
    if (inside_tls) {
        open_lab();
        pair.inside = context_of(&authority, &server_0);
        smb_server_use_tls(pair.servers[1], pair.inside);
    }
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    for (int i = 0; i < CLIENTS; i++) {
        workers[i] = (struct worker){.pair = &pair, .ones = one, .session = 10 + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int at = 10; at < ROUNDS; at += 10) {
        WAIT_UNTIL(atomic_load(&workers[0].done) >= at);
        CHECK_EQ(feed(&pair, 1), SMB_OK);
    }
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    struct user user = use(&pair, 9);
    static int64_t back[ELEMENTS];
    must(user.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = sizeof back, .sink = back});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(back[i], CLIENTS * ROUNDS * (i == 0 ? 2 : 1));
    CHECK(copies_are_equal(&pair));
    CHECK_EQ(status_of(&pair, 0).unconfirmed, 0);
    leave(&user);
    if (inside_tls) {
        /* other servers are refused, and their names are reported */
        int fd = raw_connect(pair.ports[1]);
        CHECK_EQ(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
        CHECK_EQ(
            smb_server_feed(pair.servers[0], ID, 1, fd, 1001, pair.inside, "server-1.server.smb"),
            SMB_OK);
        WAIT_UNTIL(status_of(&pair, 0).refused == SMB_UNTRUSTED);
        smb_tls_release(pair.inside);
        close_lab();
    }
    stop(&pair);
}

static uint64_t deferred(struct pair *pair, int server)
{
    struct smb_server_counters counters;
    smb_server_counters(pair->servers[server], &counters);
    return counters.deferred_now;
}

/* Changes of several clients reach the backup, once and in order, over connections that are
 * replaced all the time. */
static void changes_are_forwarded(void)
{
    forward_changes(false);
}

/* The same inside TLS; another server than the named one is refused. */
static void changes_are_forwarded_inside_tls(void)
{
    forward_changes(true);
}

/* While a chunk is changed all the time, there is hardly a moment without an unconfirmed change. */
static void a_busy_chunk_can_be_read(void)
{
    struct pair pair;
    struct worker workers[CLIENTS];
    pthread_t threads[CLIENTS];
    const int64_t *one = ones();
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    for (int i = 0; i < CLIENTS; i++) {
        workers[i] = (struct worker){.pair = &pair, .ones = one, .session = 10 + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    struct user user = use(&pair, 9);
    int64_t back = 0, before = 0;
    for (int i = 0; i < 100; i++) {
        must(user.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = 8, .sink = &back});
        CHECK(back >= before);
        before = back;
    }
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    leave(&user);
    stop(&pair);
}

/* Adds, counts and writes to its own elements, until it is stopped. */
static void *move(void *argument)
{
    struct mover *mover = argument;
    struct follower follower = {.place = mover->place};
    follower.user = use(mover->place->pair, mover->session);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, follow, &follower), 0);
    int64_t last = -1;
    while (!atomic_load(&mover->stop)) {
        struct smb_request add = addition(mover->ones);
        add.timeout_ms = RIG_TIMEOUT_MS;
        must(follower.user.buffer, add);
        struct smb_outcome told = must(
            follower.user.buffer,
            (struct smb_request){
                .opcode = SMB_FETCH_ADD, .bytes = 8, .argument = 1, .timeout_ms = RIG_TIMEOUT_MS});
        CHECK((int64_t)told.result > last); /* every ticket is given once */
        last = (int64_t)told.result;
        atomic_fetch_add(&mover->done, 1);
    }
    atomic_store(&mover->place->over, true);
    pthread_join(thread, NULL);
    leave(&follower.user);
    return NULL;
}

static void check_turns(struct pair *pair, int64_t done, int server)
{
    CHECK_EQ(status_of(pair, server).unconfirmed, 0);
    struct smb_segment *segment;
    CHECK_EQ(smb_server_hold_segment(pair->servers[server], ID, &segment), SMB_OK);
    const int64_t *data = smb_segment_data(segment);
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(data[i], done * (i == 0 ? 2 : 1));
    smb_segment_release(segment);
    CHECK(copies_are_equal(pair));
}

/* In each round a server is lost, the other goes on, and the lost copies are made again while
 * clients work. Every call counts once, and the copies are equal at rest. */
static void a_copy_is_made_under_load(void)
{
    struct pair pair;
    int server;
    start(&pair);
    int64_t done = lose_in_turn(&pair, move, ones(), &server);
    check_turns(&pair, done, server);
    stop(&pair);
}

/* In each round the two copies switch their roles while clients work, and nothing is copied. */
static void copies_switch_their_roles(void)
{
    struct pair pair;
    int server;
    start(&pair);
    int64_t done = switch_in_turn(&pair, move, ones(), &server);
    check_turns(&pair, done, server);
    stop(&pair);
}

static void raw_count(struct raw *raw)
{
    raw_send(raw, (struct smb_frame){.opcode = SMB_FETCH_ADD,
                                     .dtype = SMB_INT64,
                                     .epoch = 1,
                                     .segment = ID,
                                     .sequence = ++raw->sequence,
                                     .length = 8,
                                     .argument = 1});
}

/* A copy that was made becomes the primary, and feeds the server that it was copied from. */
static void a_new_copy_takes_over(void)
{
    struct pair pair;
    start(&pair);
    lose(&pair, 1);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    make_copy(&pair, 0, 3);
    WAIT_UNTIL(status_of(&pair, 0).broken_ms == 0);
    switch_roles(&pair, 1, 5);
    WAIT_UNTIL(status_of(&pair, 1).broken_ms == 0);
    WAIT_UNTIL(status_of(&pair, 0).broken_ms == 0);
    stop(&pair);
}

/* A primary that hands over begins no change, and goes on if nothing comes of it. */
static void changes_wait_while_roles_switch(void)
{
    struct pair pair;
    start(&pair);
    struct raw raw = raw_begin(&pair, 0, 20);
    CHECK_EQ(smb_server_hand_over(pair.servers[0], ID, 2), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_hand_over(pair.servers[1], ID, 1), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_hand_over(pair.servers[0], BESIDE, 1), SMB_NOT_FOUND);
    raw_count(&raw);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    CHECK_EQ(smb_server_hand_over(pair.servers[0], ID, 1), SMB_BUSY);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    WAIT_UNTIL(smb_server_hand_over(pair.servers[0], ID, 1) == SMB_OK);
    raw_count(&raw);
    WAIT_UNTIL(deferred(&pair, 0) == 1);
    CHECK(!heard(&raw));
    CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    close(raw.fd);
    stop(&pair);
}

/* The roles switch although the backup has not answered a reader's question. A change that it has
 * not confirmed still counts. */
static void readers_do_not_hold_up_a_switch(void)
{
    struct pair pair;
    start(&pair);
    struct raw reader = raw_begin(&pair, 0, 20), writer = raw_begin(&pair, 0, 21);
    CHECK_EQ(smb_server_hand_over(pair.servers[0], ID, 1), SMB_OK);
    raw_send(&reader,
             (struct smb_frame){
                 .opcode = SMB_READ, .dtype = SMB_INT64, .epoch = 1, .segment = ID, .length = 8});
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    CHECK_EQ(smb_server_hand_over(pair.servers[0], ID, 1), SMB_OK);
    set_role(&pair, 0, 2, SMB_REPLICA_BACKUP, true);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, true);
    CHECK_EQ(raw_receive(&reader).status, SMB_STALE_EPOCH);
    /* back again: the question that was never answered holds up nobody */
    set_role(&pair, 1, 3, SMB_REPLICA_BACKUP, true);
    set_role(&pair, 0, 3, SMB_REPLICA_PRIMARY, true);
    CHECK_EQ(status_of(&pair, 0).unconfirmed, 0);
    raw_send(&writer, (struct smb_frame){.opcode = SMB_FETCH_ADD,
                                         .dtype = SMB_INT64,
                                         .epoch = 3,
                                         .segment = ID,
                                         .sequence = 1,
                                         .length = 8,
                                         .argument = 1});
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    raw_send(&reader, (struct smb_frame){.opcode = SMB_READ,
                                         .dtype = SMB_INT64,
                                         .epoch = 3,
                                         .segment = ID,
                                         .offset = CHUNK,
                                         .length = 8});
    CHECK_EQ(smb_server_hand_over(pair.servers[0], ID, 3), SMB_BUSY);
    CHECK_EQ(feed(&pair, 3), SMB_OK);
    CHECK_EQ(raw_receive(&writer).status, SMB_OK);
    WAIT_UNTIL(smb_server_hand_over(pair.servers[0], ID, 3) == SMB_OK);
    close(reader.fd);
    close(writer.fd);
    stop(&pair);
}

/* The former primary has a change that the new one lacks: it does not become the backup until it
 * is copied to. */
static void a_primary_with_more_stays_apart(void)
{
    struct pair pair;
    start(&pair);
    struct raw raw = raw_begin(&pair, 0, 20);
    raw_count(&raw);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    CHECK(!copies_are_equal(&pair));
    /* the other server takes over from the epoch after its own only, and only from this server */
    CHECK_EQ(give_role(&pair, 1, 3, SMB_REPLICA_PRIMARY, true, false), SMB_INVALID);
    CHECK_EQ(smb_server_set_replica(pair.servers[1], ID, 2, SMB_REPLICA_PRIMARY, true, false, "x"),
             SMB_INVALID);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, true);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(give_role(&pair, 0, 2, SMB_REPLICA_BACKUP, true, false), SMB_INVALID);
    CHECK_EQ(status_of(&pair, 0).role, SMB_REPLICA_NONE);
    CHECK_EQ(raw_receive(&raw).status, SMB_STALE_EPOCH);
    /* the new primary goes on alone, and the other server is copied to */
    set_role(&pair, 1, 3, SMB_REPLICA_PRIMARY, false);
    lose(&pair, 0);
    make_copy(&pair, 1, 4);
    WAIT_UNTIL(status_of(&pair, 1).unconfirmed == 0);
    CHECK(copies_are_equal(&pair));
    close(raw.fd);
    stop(&pair);
}

/* A backup refuses, and closes before it has read all that was sent, so that its socket is reset.
 * The next change found that out first, and the reason was lost. */
static void a_refusal_is_read_from_a_connection_that_was_reset(void)
{
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof here;
    int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&here, size) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&here, &size) == 0);
    CHECK(connect(fd, (struct sockaddr *)&here, size) == 0);
    int backup = accept(listener, NULL, NULL);
    struct feed feed;
    feed_create(&feed);
    feed_connect(&feed, (struct channel){.fd = fd}, 1, ID, 1, 1);
    feed_send(&feed);
    struct smb_frame refusal = {
        .opcode = SMB_HELLO, .flags = SMB_FLAG_REPLY, .status = SMB_STALE_EPOCH};
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(&refusal, bytes);
    CHECK_EQ(send(backup, bytes, sizeof bytes, 0), (ssize_t)sizeof bytes);
    close(backup);
    close(listener);
    struct pollfd reset = {.fd = fd};
    CHECK(poll(&reset, 1, 10000) == 1 && reset.revents & POLLERR);
    struct smb_frame change = {.opcode = SMB_FETCH_ADD, .session = 5, .segment = ID, .epoch = 1};
    struct forward *forward = feed_make(&feed, SMB_FRAME_BYTES);
    smb_frame_encode(&change, forward->frame);
    feed_append(&feed, forward, 1, 1);
    feed_send(&feed);
    CHECK(feed_receive(&feed) == NULL);
    CHECK_EQ(feed.refused, SMB_STALE_EPOCH);
    CHECK(!feed_is_dialled(&feed));
    feed_destroy(&feed);
}

/* Why the backup refuses the segment stands until a connection works again. */
static void a_refusal_stands_until_a_connection_works(void)
{
    struct pair pair;
    start(&pair);
    /* the backup is told of an epoch that its primary does not know yet */
    CHECK_EQ(give_role(&pair, 1, 2, SMB_REPLICA_BACKUP, true, false), SMB_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(feed(&pair, 1), SMB_OK);
        CHECK(i == 0 || status_of(&pair, 0).refused == SMB_STALE_EPOCH);
        WAIT_UNTIL(status_of(&pair, 0).refused == SMB_STALE_EPOCH && !status_of(&pair, 0).dialled);
        CHECK(status_of(&pair, 0).broken_ms > 0);
    }
    set_role(&pair, 0, 3, SMB_REPLICA_PRIMARY, false);
    CHECK_EQ(status_of(&pair, 0).refused, SMB_OK);
    lose(&pair, 1);
    make_copy(&pair, 0, 4);
    WAIT_UNTIL(status_of(&pair, 0).broken_ms == 0);
    CHECK_EQ(status_of(&pair, 0).refused, SMB_OK);
    stop(&pair);
}

/* Records are copied: the new backup knows what a lane did before the copy began, also results and
 * refusals. A copy that is abandoned leaves the primary alone, and the primary answers. */
static void a_copy_has_the_records(void)
{
    struct pair pair;
    start(&pair);
    lose(&pair, 1);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    struct raw raw = raw_begin(&pair, 0, 20);
    struct smb_frame count = {.opcode = SMB_FETCH_ADD,
                              .dtype = SMB_INT64,
                              .epoch = 2,
                              .segment = ID,
                              .sequence = 1,
                              .length = 8,
                              .argument = 3};
    raw_send(&raw, count);
    CHECK_EQ(raw_receive(&raw).argument, 0);
    struct smb_frame bad = count;
    bad.sequence = 2;
    bad.offset = ELEMENTS * 8; /* past the end */
    raw_send(&raw, bad);
    CHECK_EQ(raw_receive(&raw).status, SMB_INVALID);
    count.sequence = 3;
    raw_send(&raw, count);
    CHECK_EQ(raw_receive(&raw).argument, 3);

    CHECK_EQ(
        smb_server_set_replica(pair.servers[0], ID, 3, SMB_REPLICA_PRIMARY, true, true, "peer"),
        SMB_OK);
    CHECK_EQ(smb_server_abandon_copy(pair.servers[0], ID, 2), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_abandon_copy(pair.servers[0], ID, 3), SMB_OK);
    uint64_t copied, total;
    CHECK_EQ(smb_server_copy(pair.servers[0], ID, 3, CHUNK, &copied, &total), SMB_STALE_EPOCH);
    count.epoch = 3;
    count.sequence = 4;
    raw_send(&raw, count);
    CHECK_EQ(raw_receive(&raw).argument, 6);
    make_copy(&pair, 0, 4);
    close(raw.fd);

    set_role(&pair, 1, 6, SMB_REPLICA_PRIMARY, false);
    raw = raw_begin(&pair, 1, 20);
    count.epoch = 6;
    count.flags = SMB_FLAG_RETRY;
    raw_send(&raw, count); /* sent again: answered with its first result */
    CHECK_EQ(raw_receive(&raw).argument, 6);
    raw_send(&raw, (struct smb_frame){.opcode = SMB_WATERMARK, .epoch = 6, .segment = ID});
    struct smb_frame watermark = raw_receive(&raw);
    CHECK_EQ(watermark.argument, 4);
    CHECK_EQ(watermark.offset, 2);
    count.sequence = 5;
    count.flags = 0;
    raw_send(&raw, count);
    CHECK_EQ(raw_receive(&raw).argument, 9);
    close(raw.fd);
    stop(&pair);
}

/* Without the backup's confirmation nothing is answered, and no read shows the change. */
static void nothing_is_told_before_the_backup_has_it(void)
{
    struct pair pair;
    start(&pair);
    struct user user = use(&pair, 9), other = use(&pair, 10);
    int64_t value = 5, back = 0;
    struct smb_request write = {
        .opcode = SMB_WRITE, .bytes = 8, .source = &value, .timeout_ms = 100};
    struct smb_request read = {.opcode = SMB_READ, .bytes = 8, .sink = &back, .timeout_ms = 100};
    must(other.buffer, read);
    CHECK_EQ(reach_try(user.buffer, write), SMB_TIMEOUT);
    CHECK_EQ(reach_try(other.buffer, read), SMB_TIMEOUT);
    CHECK_EQ(back, 0);
    read.offset = CHUNK; /* no change waits there */
    struct user third = use(&pair, 11);
    must(third.buffer, read);
    CHECK_EQ(status_of(&pair, 0).unconfirmed, 1);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 0);
    read.offset = 0;
    must(third.buffer, read);
    CHECK_EQ(back, value);
    leave(&user);
    leave(&other);
    leave(&third);
    stop(&pair);
}

/* Creates another segment on the primary's server, with one copy. */
static void make_beside(struct pair *pair)
{
    CHECK_EQ(smb_server_create_segment(pair->servers[0], scratch_path("beside"), BESIDE, 1,
                                       SMB_INT64, ELEMENTS * 8, CHUNK),
             SMB_OK);
}

static struct smb_request addition_from(struct smb_buffer *source)
{
    return (struct smb_request){.opcode = SMB_ACCUMULATE_FROM,
                                .bytes = ELEMENTS * 8,
                                .other = source,
                                .op = SMB_SUM,
                                .scale = 2.0,
                                .timeout_ms = RIG_TIMEOUT_MS};
}

/* The same for one chunk, by hand. */
static void raw_add_from(struct raw *raw, uint64_t target, uint64_t source, uint64_t offset)
{
    struct smb_frame frame = {.opcode = SMB_ACCUMULATE_FROM,
                              .dtype = SMB_INT64,
                              .op = SMB_SUM,
                              .epoch = 1,
                              .segment = target,
                              .offset = offset,
                              .length = CHUNK,
                              .payload = SMB_FROM_BYTES,
                              .argument = smb_bits_of(2.0)};
    raw_send_words(raw, frame, source, offset);
}

/* The backup gets the source's bytes with the change, because it does not have that segment, and
 * because the source changes before the queued change gets there. Sent again, each counts once. */
static void operands_are_forwarded(void)
{
    struct pair pair;
    start(&pair);
    make_beside(&pair);
    struct user user = use(&pair, 9), source = use_of(&pair, 10, BESIDE);
    struct smb_buffer *beside = buffer_over(&user, &pair, BESIDE);
    struct raw raw = raw_begin(&pair, 0, 20);
    must(source.buffer, addition(ones()));
    for (uint64_t chunk = 0; chunk < CHUNKS; chunk++)
        raw_add_from(&raw, ID, BESIDE, chunk * CHUNK);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == CHUNKS);
    must(source.buffer, addition(ones()));
    CHECK(!heard(&raw));
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    for (int i = 0; i < 10; i++) {
        must(user.buffer, addition_from(beside));
        CHECK_EQ(feed(&pair, 1), SMB_OK);
    }
    static int64_t back[ELEMENTS];
    must(user.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = sizeof back, .sink = back});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(back[i], 2 + 10 * 4);
    CHECK(copies_are_equal(&pair));
    smb_buffer_destroy(beside);
    close(raw.fd);
    leave(&user);
    leave(&source);
    stop(&pair);
}

/* What the backup does not have is not added to another segment either, because it would stay there
 * after a fail-over. The bytes that were read are used once the backup has them. If a source is not
 * on this server, or is not a primary here, the answer is APART and the link stays. */
static void a_source_is_told_as_a_read_is(void)
{
    struct pair pair;
    start(&pair);
    make_beside(&pair);
    struct user user = use(&pair, 9), other = use_of(&pair, 10, BESIDE);
    struct smb_buffer *copies = buffer_over(&other, &pair, ID),
                      *gone = buffer_over(&user, &pair, BESIDE + 1);
    struct raw writer = raw_begin(&pair, 0, 20), adder = raw_begin(&pair, 0, 21);
    struct smb_frame fill = {.opcode = SMB_FILL,
                             .dtype = SMB_INT64,
                             .epoch = 1,
                             .segment = ID,
                             .sequence = 1,
                             .length = CHUNK,
                             .argument = 5};
    raw_send(&writer, fill);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    raw_add_from(&adder, BESIDE, ID, 0);
    WAIT_UNTIL(deferred(&pair, 0) == 1);
    int64_t back = -1;
    struct smb_request read = {.opcode = SMB_READ, .bytes = 8, .sink = &back};
    must(other.buffer, read);
    CHECK_EQ(back, 0);
    /* later bytes, of a source that changes all the time, might never be confirmed */
    fill.sequence = 2;
    fill.argument = 7;
    raw_send(&writer, fill);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 2);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(raw_receive(&adder).status, SMB_OK);
    must(other.buffer, read);
    CHECK_EQ(back, 10);
    must(user.buffer, addition_from(user.buffer)); /* a segment may be its own source */
    must(user.buffer, read);
    CHECK_EQ(back, 21);
    CHECK(copies_are_equal(&pair));

    CHECK_EQ(reach_try(user.buffer, addition_from(gone)), SMB_APART);
    must(user.buffer, read);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 0);
    set_role(&pair, 0, 2, SMB_REPLICA_BACKUP, true);
    CHECK_EQ(reach_try(other.buffer, addition_from(copies)), SMB_APART);
    must(other.buffer, read);
    CHECK_EQ(back, 10);
    smb_buffer_destroy(copies);
    smb_buffer_destroy(gone);
    close(writer.fd);
    close(adder.fd);
    leave(&user);
    leave(&other);
    stop(&pair);
}

/* Once the coordinator says that the primary is alone, it answers waiting requests. */
static void a_primary_goes_on_alone(void)
{
    struct pair pair;
    start(&pair);
    struct worker worker = {.pair = &pair, .ones = ones(), .session = 9};
    struct user user = use(&pair, 10);
    pthread_t thread;
    smb_link_set_epoch(user.link, 1);
    CHECK_EQ(pthread_create(&thread, NULL, work, &worker), 0);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed > 0);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    pthread_join(thread, NULL);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    CHECK_EQ(feed(&pair, 2), SMB_STALE_EPOCH);
    CHECK_EQ(status_of(&pair, 0).paired, false);
    set_role(&pair, 0, 1, SMB_REPLICA_PRIMARY, true); /* too late: an older epoch is ignored */
    CHECK_EQ(status_of(&pair, 0).paired, false);
    leave(&user);
    stop(&pair);
}

/* On a lane of several segments, a change that comes before a role does not refuse changes of the
 * others. */
static void a_lower_lane_goes_on(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(smb_server_create_segment(pair.servers[0], scratch_path("c"), BESIDE, 1, SMB_INT64,
                                       ELEMENTS * 8, CHUNK),
             SMB_OK);
    struct raw raw = {.fd = raw_connect(pair.ports[0])};
    struct smb_frame frames[] = {
        {.opcode = SMB_HELLO},
        {.opcode = SMB_FILL, .epoch = 2, .segment = ID},
        {.opcode = SMB_FILL, .epoch = 1, .segment = BESIDE},
    };
    int expected[] = {SMB_OK, SMB_STALE_EPOCH, SMB_OK};
    for (int i = 0; i < 3; i++) {
        uint8_t bytes[SMB_FRAME_BYTES];
        frames[i].session = 20;
        if (i > 0) {
            frames[i].dtype = SMB_INT64;
            frames[i].sequence = (uint64_t)i;
            frames[i].length = CHUNK;
        }
        smb_frame_encode(&frames[i], bytes);
        CHECK_EQ(write(raw.fd, bytes, sizeof bytes), sizeof bytes);
        CHECK_EQ(raw_receive(&raw).status, expected[i]);
    }
    close(raw.fd);
    stop(&pair);
}

/* A client learns a role before the server does: its first change is sent away, and the server gets
 * the role before it looks at the next change. If that one were made, the watermark would cover the
 * first one, too. Over another connection everything goes on. */
static void a_role_comes_between_two_changes(void)
{
    struct pair pair;
    start(&pair);
    struct raw early = raw_begin(&pair, 0, 20);
    struct smb_frame fill = {.opcode = SMB_FILL,
                             .dtype = SMB_INT64,
                             .epoch = 2,
                             .segment = ID,
                             .length = CHUNK,
                             .argument = 5};
    for (fill.sequence = 1; fill.sequence <= 3; fill.sequence++) {
        raw_send(&early, fill);
        CHECK_EQ(raw_receive(&early).status, SMB_STALE_EPOCH);
        if (fill.sequence == 1)
            set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    }
    close(early.fd);
    struct raw again = raw_begin(&pair, 0, 20);
    raw_send(&again,
             (struct smb_frame){
                 .opcode = SMB_WATERMARK, .epoch = 2, .segment = ID, .sequence = UINT32_MAX});
    struct smb_frame told = raw_receive(&again);
    CHECK_EQ(told.status, SMB_OK);
    CHECK_EQ(told.argument, 0);
    for (fill.sequence = 1; fill.sequence <= 3; fill.sequence++) {
        raw_send(&again, fill);
        CHECK_EQ(raw_receive(&again).status, SMB_OK);
    }
    close(again.fd);
    stop(&pair);
}

/* The backup is promoted while a client works: the link goes there, and each call counts once. The
 * old primary, which has not heard of it, gets no confirmations. */
static void the_backup_takes_over(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    struct user user = use(&pair, 9), late = use(&pair, 10);
    const int64_t *one = ones();
    for (int i = 0; i < 20; i++)
        must(user.buffer, addition(one));
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    /* a change at the deposed primary is neither forwarded nor answered */
    struct smb_request request = addition(one);
    request.timeout_ms = 200;
    CHECK_EQ(reach_try(late.buffer, request), SMB_TIMEOUT);
    CHECK_EQ(status_of(&pair, 0).paired, true);
    WAIT_UNTIL(status_of(&pair, 0).broken_ms > 0);
    smb_link_set_epoch(user.link, 2);
    uint64_t instance;
    CHECK_EQ(
        smb_link_resume_tcp(user.link, "127.0.0.1", pair.ports[1], 1001, RIG_TIMEOUT_MS, &instance),
        SMB_OK);
    for (int i = 0; i < 20; i++)
        must(user.buffer, addition(one));
    static int64_t back[ELEMENTS];
    must(user.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = sizeof back, .sink = back});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(back[i], 40);
    leave(&user);
    leave(&late);
    stop(&pair);
}

static uint64_t errors_of(struct pair *pair, int server, int status)
{
    struct smb_server_counters counters;
    smb_server_counters(pair->servers[server], &counters);
    return counters.errors[status];
}

/* A primary whose greeting is refused has sent changes after it. They are of clients' sessions, and
 * count as stale. If they counted as malformed, the primary would be taken for a stranger. */
static void a_feed_that_is_refused_is_no_stranger(void)
{
    struct pair pair;
    start(&pair);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    struct user user = use(&pair, 9);
    const int64_t *one = ones();
    struct smb_request request = addition(one);
    request.timeout_ms = 200;
    CHECK_EQ(reach_try(user.buffer, request), SMB_TIMEOUT);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    WAIT_UNTIL(errors_of(&pair, 1, SMB_STALE_EPOCH) + errors_of(&pair, 1, SMB_PROTOCOL) >= 2);
    CHECK_EQ(errors_of(&pair, 1, SMB_PROTOCOL), 0);
    leave(&user);
    stop(&pair);
}

/* Once its lease has run out a primary asks the backup before it answers a read; a promoted backup
 * says no. */
static void reads_without_a_lease(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    struct user user = use(&pair, 9);
    smb_server_serve_until(pair.servers[0], 0);
    int64_t back = 1;
    struct smb_request read = {.opcode = SMB_READ, .bytes = 8, .sink = &back};
    for (int i = 0; i < 20; i++)
        must(user.buffer, read);
    CHECK_EQ(back, 0);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    read.timeout_ms = 200;
    CHECK_EQ(reach_try(user.buffer, read), SMB_TIMEOUT);
    leave(&user);
    stop(&pair);
}

/* A primary that yields asks the backup before it answers a read, although its lease runs. Its next
 * role ends that. */
static void a_primary_that_yields(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    struct user user = use(&pair, 9);
    int64_t back = 1;
    struct smb_request read = {.opcode = SMB_READ, .bytes = 8, .sink = &back};
    CHECK_EQ(smb_server_yield(pair.servers[0], ID, 2), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_yield(pair.servers[1], ID, 1), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_yield(pair.servers[0], ID, 1), SMB_OK);
    for (int i = 0; i < 20; i++)
        must(user.buffer, read);
    CHECK_EQ(back, 0);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    read.timeout_ms = 200;
    CHECK_EQ(reach_try(user.buffer, read), SMB_TIMEOUT);
    set_role(&pair, 0, 3, SMB_REPLICA_PRIMARY, false);
    /* a server without that role */
    CHECK_EQ(smb_server_yield(pair.servers[0], ID, 3), SMB_STALE_EPOCH);
    leave(&user);
    stop(&pair);
}

/* As long as no record has its segment, a primary asks the backup, too; also the next role ends
 * that. */
static void a_primary_that_no_record_has(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(smb_server_note_unrecorded(pair.servers[0], ID + 1, true), SMB_NOT_FOUND);
    for (int step = 0; step < 4; step++) {
        if (step == 1)
            set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
        CHECK_EQ(smb_server_note_unrecorded(pair.servers[0], ID, step != 2), SMB_OK);
        if (step == 3) {
            CHECK_EQ(give_role(&pair, 0, 1, SMB_REPLICA_NONE, false, false), SMB_OK);
            set_role(&pair, 0, 1, SMB_REPLICA_PRIMARY, true);
        }
        struct user user = use(&pair, 9 + step);
        int64_t back = 1;
        struct smb_request read = {
            .opcode = SMB_READ, .bytes = 8, .sink = &back, .timeout_ms = step == 1 ? 200 : 0};
        CHECK_EQ(reach_try(user.buffer, read), step == 1 ? SMB_TIMEOUT : SMB_OK);
        leave(&user);
    }
    stop(&pair);
}

/* The coordinator has made another server the primary, and tells a server whose lease runs. The
 * role ends in its epoch, and can be given again in that epoch. */
static void a_role_ends(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    struct user user = use(&pair, 9);
    int64_t back = 1;
    struct smb_request read = {.opcode = SMB_READ, .bytes = 8, .sink = &back};
    must(user.buffer, read);
    /* it is not a primary */
    CHECK_EQ(give_role(&pair, 1, 1, SMB_REPLICA_NONE, false, false), SMB_OK);
    CHECK_EQ(status_of(&pair, 1).role, SMB_REPLICA_BACKUP);
    CHECK_EQ(give_role(&pair, 0, 1, SMB_REPLICA_NONE, false, false), SMB_OK);
    CHECK_EQ(status_of(&pair, 0).role, SMB_REPLICA_NONE);
    CHECK_EQ(status_of(&pair, 0).epoch, 1);
    CHECK_EQ(reach_try(user.buffer, read), SMB_LINK_LOST); /* the client asks the coordinator */
    leave(&user);
    set_role(&pair, 0, 1, SMB_REPLICA_PRIMARY, true);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    user = use(&pair, 10);
    must(user.buffer, read);
    leave(&user);
    /* the backup lacks a change that is here: the role ends, and is not given back with that backup */
    lose(&pair, 1);
    struct raw raw = raw_begin(&pair, 0, 20);
    raw_count(&raw);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    CHECK_EQ(give_role(&pair, 0, 1, SMB_REPLICA_NONE, false, false), SMB_OK);
    CHECK_EQ(raw_receive(&raw).status, SMB_STALE_EPOCH);
    CHECK_EQ(give_role(&pair, 0, 1, SMB_REPLICA_PRIMARY, true, false), SMB_INVALID);
    CHECK_EQ(give_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, true, false), SMB_INVALID);
    set_role(&pair, 0, 3, SMB_REPLICA_PRIMARY, false);
    make_copy(&pair, 0, 4);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 0);
    CHECK(copies_are_equal(&pair));
    close(raw.fd);
    stop(&pair);
}

/* A segment with two copies cannot be mapped, and its file says so. */
static void what_is_refused(void)
{
    struct pair pair;
    start(&pair);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    struct user user = use(&pair, 9);
    struct smb_segment *segment;
    CHECK_EQ(smb_link_attach(user.link, ID, 2, RIG_TIMEOUT_MS, &segment), SMB_INVALID);
    leave(&user);
    stop(&pair);
    struct smb_server *next;
    struct smb_segment_info info;
    struct smb_replica_status found;
    CHECK_EQ(smb_server_create(1002, 1, (uint64_t)1 << 30, &next), SMB_OK);
    CHECK_EQ(smb_server_adopt_segment(next, scratch_path("a"), &info), SMB_OK);
    CHECK_EQ(smb_server_replicas(next, &found, 1), 1);
    CHECK_EQ(found.role, SMB_REPLICA_NONE);
    smb_server_destroy(next);
}

static void raw_write(struct raw *raw, uint64_t offset)
{
    raw_send(raw, (struct smb_frame){.opcode = SMB_WRITE,
                                     .dtype = SMB_INT64,
                                     .epoch = 1,
                                     .segment = ID,
                                     .sequence = ++raw->sequence,
                                     .offset = offset,
                                     .length = CHUNK,
                                     .payload = CHUNK});
}

/* While the backup cannot be reached only a limited amount is queued for it, refusals included.
 * Each refusal waits for its note, so that no watermark of the backup covers it later. */
static void refusals_have_a_bound(void)
{
    struct pair pair;
    start(&pair);
    struct raw many = raw_begin(&pair, 0, 20), bad = raw_begin(&pair, 0, 21);
    int sent = 0;
    while (status_of(&pair, 0).queued_bytes <= REPLICA_QUEUED_BYTES_MAX) {
        raw_write(&many, 0);
        sent++;
        WAIT_UNTIL(status_of(&pair, 0).unconfirmed == (uint64_t)sent);
    }
    uint64_t full = status_of(&pair, 0).queued_bytes;
    raw_write(&bad, CHUNK / 2); /* over two chunks */
    raw_write(&bad, 0);
    WAIT_UNTIL(deferred(&pair, 0) == 1);
    CHECK_EQ(status_of(&pair, 0).queued_bytes, full);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(raw_receive(&bad).status, SMB_INVALID);
    CHECK_EQ(raw_receive(&bad).status, SMB_OK);
    for (int i = 0; i < sent; i++)
        CHECK_EQ(raw_receive(&many).status, SMB_OK);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 0 && status_of(&pair, 0).queued_bytes == 0);
    close(many.fd);
    close(bad.fd);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    struct raw later = raw_begin(&pair, 1, 21);
    raw_send(&later, (struct smb_frame){.opcode = SMB_WATERMARK, .epoch = 2, .segment = ID});
    struct smb_frame watermark = raw_receive(&later);
    CHECK_EQ(watermark.argument, 2); /* the change was made */
    CHECK_EQ(watermark.offset, 1);   /* the change was refused */
    close(later.fd);
    stop(&pair);
}

/* Sends a request for a lock or a version, by hand. */
static void raw_ask(struct raw *raw, uint32_t epoch, int opcode, uint64_t argument, uint64_t a,
                    uint64_t b)
{
    struct smb_frame frame = {.opcode = (uint8_t)opcode,
                              .segment = ID,
                              .epoch = epoch,
                              .payload = SMB_SYNC_BYTES,
                              .argument = argument};
    raw_send_words(raw, frame, a, b);
}

/* No lock or version is reported before the backup has it. The backup goes on from there: the
 * holder keeps its lock, tokens grow, and a change under an older token is refused. */
static void locks_and_versions(void)
{
    struct pair pair;
    start(&pair);
    struct raw holder = raw_begin(&pair, 0, 20), waiter = raw_begin(&pair, 0, 21);
    raw_ask(&holder, 1, SMB_LOCK, SYNC_USER, 60000, 0);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    CHECK(!heard(&holder));
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    struct smb_frame granted = raw_receive(&holder);
    CHECK_EQ(granted.status, SMB_OK);
    raw_ask(&waiter, 1, SMB_LOCK, SYNC_USER, 60000, UINT64_MAX);
    raw_ask(&holder, 1, SMB_LOCK, SYNC_PUBLISHER, 60000, 0);
    struct smb_frame turn = raw_receive(&holder);
    raw_ask(&holder, 1, SMB_PUBLISH, 0, turn.argument, 1);
    CHECK_EQ(raw_receive(&holder).status, SMB_OK);

    /* without a lease each answer asks the backup, which says no once it is promoted */
    smb_server_serve_until(pair.servers[0], 0);
    raw_ask(&holder, 1, SMB_AWAIT_VERSION, 0, 0, 0);
    CHECK_EQ(raw_receive(&holder).argument, 1);
    set_role(&pair, 1, 2, SMB_REPLICA_PRIMARY, false);
    raw_ask(&holder, 1, SMB_AWAIT_VERSION, 0, 0, 0);
    raw_ask(&holder, 1, SMB_UNLOCK, SYNC_USER, granted.argument, 0);
    WAIT_UNTIL(status_of(&pair, 0).broken_ms > 0 && status_of(&pair, 0).unconfirmed > 0);
    CHECK(!heard(&holder) && !heard(&waiter));
    /* as often as a daemon does: an answer may begin to wait right after one */
    WAIT_UNTIL(smb_server_suspend(pair.servers[0], ID) == SMB_OK && heard(&holder) &&
               heard(&waiter));
    CHECK_EQ(raw_receive(&waiter).status, SMB_STALE_EPOCH);
    CHECK_EQ(raw_receive(&holder).status, SMB_STALE_EPOCH);
    close(holder.fd);
    close(waiter.fd);

    holder = raw_begin(&pair, 1, 20);
    waiter = raw_begin(&pair, 1, 21);
    raw_ask(&holder, 2, SMB_AWAIT_VERSION, 0, 0, 0);
    CHECK_EQ(raw_receive(&holder).argument, 1);
    raw_ask(&holder, 2, SMB_PUBLISH, 0, turn.argument, 1); /* repeated */
    CHECK_EQ(raw_receive(&holder).status, SMB_OK);
    raw_ask(&holder, 2, SMB_RENEW, SYNC_USER, granted.argument, 60000);
    CHECK_EQ(raw_receive(&holder).status, SMB_OK);
    raw_ask(&waiter, 2, SMB_LOCK, SYNC_USER, 60000, UINT64_MAX);
    raw_ask(&holder, 2, SMB_UNLOCK, SYNC_USER, granted.argument, 0);
    CHECK_EQ(raw_receive(&holder).status, SMB_OK);
    struct smb_frame next = raw_receive(&waiter);
    CHECK(next.status == SMB_OK && next.argument > granted.argument);
    uint64_t tokens[] = {granted.argument, next.argument};
    for (int i = 0; i < 2; i++) {
        uint8_t bytes[SMB_FRAME_BYTES + SMB_TOKEN_BYTES + 8] = {0};
        struct raw *raw = i ? &waiter : &holder;
        struct smb_frame change = {.opcode = SMB_WRITE,
                                   .dtype = SMB_INT64,
                                   .flags = SMB_FLAG_FENCED,
                                   .session = raw->session,
                                   .lane = SMB_LANE_OF_SEGMENTS + 1,
                                   .sequence = ++raw->sequence,
                                   .segment = ID,
                                   .epoch = 2,
                                   .length = 8,
                                   .payload = SMB_TOKEN_BYTES + 8};
        smb_frame_encode(&change, bytes);
        smb_store64(bytes + SMB_FRAME_BYTES, tokens[i]);
        CHECK_EQ(write(raw->fd, bytes, sizeof bytes), sizeof bytes);
        CHECK_EQ(raw_receive(raw).status, i ? SMB_OK : SMB_LOCK_LOST);
    }
    close(holder.fd);
    close(waiter.fd);
    stop(&pair);
}

/* ---- a segment with one copy, which moves ---------------------------------------------------- */

static void start_with_one_copy(struct pair *pair)
{
    *pair = (struct pair){.dtype = SMB_INT64, .members = 1};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(smb_server_create(1000 + (uint64_t)i, 2, (uint64_t)1 << 30, &pair->servers[i]),
                 SMB_OK);
        CHECK_EQ(smb_server_listen_tcp(pair->servers[i], "127.0.0.1", 0, &pair->ports[i]), SMB_OK);
        smb_server_serve_until(pair->servers[i], UINT64_MAX);
    }
    CHECK_EQ(smb_server_create_segment(pair->servers[0], scratch_path("a"), ID, 1, SMB_INT64,
                                       ELEMENTS * 8, CHUNK),
             SMB_OK);
}

enum user_kind { WRITES_MAPPED, READS_MAPPED, WRITES_OVER_TCP };

struct one_copy_user {
    struct pair *pair;
    struct smb_segment *mapped;
    enum user_kind kind;
    uint64_t session;
    _Atomic int done; /* calls that succeeded */
    int status;       /* status of the first call that failed */
};

static int call_mapped(struct smb_segment *segment, enum user_kind kind, int64_t *bytes)
{
    struct smb_change change = {.opcode = kind == READS_MAPPED ? SMB_READ : SMB_ACCUMULATE,
                                .op = SMB_SUM,
                                .scale = 1.0,
                                .offset = CHUNK,
                                .bytes = CHUNK,
                                .source = bytes,
                                .sink = kind == READS_MAPPED ? bytes : NULL};
    return smb_segment_apply(segment, &change, smb_now_ns() + 1000000000U);
}

/* Until it is sent away. */
static void *use_one_copy(void *argument)
{
    struct one_copy_user *user = argument;
    int64_t bytes[CHUNK / 8];
    struct smb_client *client = NULL;
    struct smb_link *link = NULL;
    struct smb_buffer *buffer = NULL;
    for (int i = 0; i < CHUNK / 8; i++)
        bytes[i] = 1;
    if (user->kind == WRITES_OVER_TCP) {
        uint64_t instance;
        struct smb_layout layout = {ELEMENTS * 8, CHUNKS * CHUNK, CHUNK, 1};
        CHECK_EQ(smb_client_create(user->session, &client), SMB_OK);
        CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", user->pair->ports[0], 1,
                                        RIG_TIMEOUT_MS, &link, &instance),
                 SMB_OK);
        CHECK_EQ(smb_buffer_create(client, &layout, SMB_INT64, &buffer), SMB_OK);
        CHECK_EQ(smb_buffer_set_link(buffer, 0, ID, 1, link), SMB_OK);
    }
    while (user->status == SMB_OK) {
        user->status = buffer ? reach_try(buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                                       .offset = CHUNK,
                                                                       .bytes = CHUNK,
                                                                       .source = bytes,
                                                                       .op = SMB_SUM,
                                                                       .scale = 1.0})
                              : call_mapped(user->mapped, user->kind, bytes);
        atomic_fetch_add(&user->done, user->status == SMB_OK);
    }
    if (buffer) {
        smb_buffer_destroy(buffer);
        smb_link_close(link);
        smb_client_destroy(client);
    }
    return NULL;
}

/* How far lane 1 of that session has come there, asked over another connection. */
static struct smb_frame ask_for_the_past(struct pair *pair, int server, uint64_t session)
{
    struct raw raw = {.fd = raw_connect(pair->ports[server])};
    uint8_t bytes[SMB_FRAME_BYTES];
    struct smb_frame frames[] = {{.opcode = SMB_HELLO, .session = session, .lane = 1},
                                 {.opcode = SMB_WATERMARK,
                                  .session = session,
                                  .lane = 1,
                                  .epoch = 1,
                                  .segment = ID,
                                  .sequence = UINT32_MAX}};
    struct smb_frame reply = {0};
    for (int i = 0; i < 2; i++) {
        smb_frame_encode(&frames[i], bytes);
        CHECK_EQ(write(raw.fd, bytes, sizeof bytes), sizeof bytes);
        reply = raw_receive(&raw);
    }
    close(raw.fd);
    return reply;
}

/* Clients that have mapped the segment, and clients over TCP, use it until it is gated: each call
 * that succeeded counts once, also in the copy that is made meanwhile. The new server knows how far
 * their lanes have come. */
static void a_segment_with_one_copy_moves(void)
{
    enum { USERS = 6 };
    struct pair pair;
    struct one_copy_user users[USERS];
    pthread_t threads[USERS];
    struct smb_segment *mapped;
    start_with_one_copy(&pair);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &mapped), SMB_OK);
    for (int i = 0; i < USERS; i++) {
        users[i] = (struct one_copy_user){.pair = &pair,
                                          .mapped = mapped,
                                          .kind = (enum user_kind)(i % 3),
                                          .session = 30 + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, use_one_copy, &users[i]), 0);
    }
    for (int i = 0; i < USERS; i++)
        WAIT_UNTIL(atomic_load(&users[i].done) >= 50);
    CHECK_EQ(smb_server_create_replica(pair.servers[1], scratch_path("b"), ID, 0, 3, SMB_INT64,
                                       ELEMENTS * 8, CHUNK),
             SMB_OK);
    CHECK_EQ(smb_server_let_move(pair.servers[0], ID), SMB_OK);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    make_copy(&pair, 0, 3);
    int64_t done = 0;
    for (int i = 0; i < USERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(users[i].status, SMB_STALE_EPOCH);
        done += users[i].kind == READS_MAPPED ? 0 : atomic_load(&users[i].done);
    }
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 0);
    CHECK(copies_are_equal(&pair));
    struct smb_segment *segment;
    CHECK_EQ(smb_server_hold_segment(pair.servers[1], ID, &segment), SMB_OK);
    CHECK_EQ(((const int64_t *)smb_segment_data(segment))[CHUNK / 8], done);
    smb_segment_release(segment);

    /* the end of the move: this copy is deleted */
    struct smb_frame here = ask_for_the_past(&pair, 0, users[WRITES_OVER_TCP].session);
    CHECK_EQ(here.status, SMB_OK);
    CHECK(here.argument > 0);
    CHECK_EQ(smb_server_yield(pair.servers[0], ID, 4), SMB_OK);
    set_role(&pair, 1, 5, SMB_REPLICA_PRIMARY, false);
    CHECK_EQ(smb_server_delete_segment(pair.servers[0], ID), SMB_OK);
    int64_t bytes[CHUNK / 8] = {0};
    CHECK_EQ(call_mapped(mapped, WRITES_MAPPED, bytes), SMB_NOT_FOUND);
    CHECK_EQ(call_mapped(mapped, READS_MAPPED, bytes), SMB_NOT_FOUND);
    smb_segment_release(mapped);
    struct smb_frame there = ask_for_the_past(&pair, 1, users[WRITES_OVER_TCP].session);
    CHECK_EQ(there.status, SMB_OK);
    CHECK_EQ(there.argument, here.argument);
    CHECK_EQ(there.offset, here.offset);
    stop(&pair);
}

#if !defined(__SANITIZE_THREAD__)
struct late_user {
    struct smb_segment *mapped;
    int status;
};

static void *come_late(void *argument)
{
    struct late_user *user = argument;
    int64_t bytes[CHUNK / 8] = {1};
    user->status = call_mapped(user->mapped, WRITES_MAPPED, bytes);
    return NULL;
}

/* A change that waits for its chunk's lock while its segment is gated is refused: the chunk may
 * have been copied by the time the change gets the lock. */
static void who_waits_for_a_lock_is_sent_away(void)
{
    struct pair pair;
    struct late_user user = {0};
    pthread_t thread;
    uint64_t bytes;
    uint32_t sequence_at;
    start_with_one_copy(&pair);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &user.mapped), SMB_OK);
    CHECK_EQ(smb_segment_lock(user.mapped, CHUNK, SMB_TRY), SMB_OK);
    CHECK_EQ(pthread_create(&thread, NULL, come_late, &user), 0);
    /* the chunk's state begins with the lock, whose first word says that a thread sleeps */
    const uint8_t *states = smb_segment_states(user.mapped, &bytes, &sequence_at);
    const _Atomic uint32_t *word = (const _Atomic uint32_t *)(states + bytes / CHUNKS);
    WAIT_UNTIL(atomic_load(word) & FUTEX_WAITERS);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    smb_segment_unlock(user.mapped, CHUNK);
    pthread_join(thread, NULL);
    CHECK_EQ(user.status, SMB_STALE_EPOCH);
    CHECK_EQ(((const int64_t *)smb_segment_data(user.mapped))[CHUNK / 8], 0);
    smb_segment_release(user.mapped);
    stop(&pair);
}

#endif

/* Changes on an earlier lane are sent again after the segment is gated: one that was made is
 * answered as the first time, and one that was not made is not made now. New changes are
 * refused. */
static void what_was_made_before_is_told(void)
{
    struct pair pair;
    start_with_one_copy(&pair);
    struct raw raw = {.fd = raw_connect(pair.ports[0])};
    struct smb_frame frame = {.opcode = SMB_HELLO, .session = 20, .lane = 1};
    uint8_t bytes[SMB_FRAME_BYTES];
    static const struct {
        uint64_t sequence;
        bool again;
        int status;
    } steps[] = {{1, false, SMB_OK},         {2, false, SMB_OK},          {2, true, SMB_OK},
                 {3, true, SMB_STALE_EPOCH}, {4, false, SMB_STALE_EPOCH}, {2, true, SMB_OK}};
    smb_frame_encode(&frame, bytes);
    CHECK_EQ(write(raw.fd, bytes, sizeof bytes), sizeof bytes);
    CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (i == 2)
            set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
        frame = (struct smb_frame){.opcode = SMB_FETCH_ADD,
                                   .flags = steps[i].again ? SMB_FLAG_RETRY : 0,
                                   .dtype = SMB_INT64,
                                   .session = 20,
                                   .lane = 1,
                                   .epoch = 1,
                                   .segment = ID,
                                   .sequence = steps[i].sequence,
                                   .length = 8,
                                   .argument = 5};
        smb_frame_encode(&frame, bytes);
        CHECK_EQ(write(raw.fd, bytes, sizeof bytes), sizeof bytes);
        struct smb_frame reply = raw_receive(&raw);
        CHECK_EQ(reply.status, steps[i].status);
        if (reply.status == SMB_OK)
            CHECK_EQ(reply.argument, 5 * (steps[i].sequence - 1));
    }
    close(raw.fd);
    struct smb_segment *segment;
    CHECK_EQ(smb_server_hold_segment(pair.servers[0], ID, &segment), SMB_OK);
    CHECK_EQ(*(const int64_t *)smb_segment_data(segment), 10);
    smb_segment_release(segment);
    stop(&pair);
}

static uint32_t waiting(struct pair *pair)
{
    struct smb_wait found = {0};
    return smb_server_waits(pair->servers[0], &found, 1) ? found.waiting : 0;
}

/* Requests that wait for a lock are sent away when their segment is gated. Nobody gets a view of a
 * segment that may move, or moves one with a view. A restart changes none of that. */
static void what_is_gated_and_what_stays(void)
{
    struct pair pair;
    struct smb_segment *mapped;
    start_with_one_copy(&pair);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &mapped), SMB_OK);
    CHECK_EQ(smb_segment_is_shared(mapped), 1);
    struct raw holder = raw_begin(&pair, 0, 20), waiter = raw_begin(&pair, 0, 21);
    raw_ask(&holder, 1, SMB_LOCK, SYNC_USER, 60000, 0);
    struct smb_frame granted = raw_receive(&holder);
    CHECK_EQ(granted.status, SMB_OK);
    raw_ask(&waiter, 1, SMB_LOCK, SYNC_USER, 60000, UINT64_MAX);
    WAIT_UNTIL(waiting(&pair) == 1);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false);
    CHECK_EQ(raw_receive(&waiter).status, SMB_STALE_EPOCH);
    raw_ask(&holder, 1, SMB_RENEW, SYNC_USER, granted.argument, 60000);
    CHECK_EQ(raw_receive(&holder).status, SMB_STALE_EPOCH);
    raw_ask(&holder, 2, SMB_RENEW, SYNC_USER, granted.argument, 60000);
    CHECK_EQ(raw_receive(&holder).status, SMB_OK);
    close(holder.fd);
    close(waiter.fd);

    CHECK_EQ(smb_segment_is_shared(mapped), 0);
    CHECK_EQ(smb_segment_bind(mapped), SMB_BUSY);
    smb_segment_release(mapped);
    CHECK_EQ(smb_segment_open(scratch_path("a"), &mapped), SMB_VERSION);
    CHECK_EQ(smb_server_bind(pair.servers[0], ID), SMB_BUSY);

    CHECK_EQ(smb_server_create_segment(pair.servers[0], scratch_path("c"), BESIDE, 1, SMB_INT64,
                                       ELEMENTS * 8, CHUNK),
             SMB_OK);
    CHECK_EQ(smb_segment_open(scratch_path("c"), &mapped), SMB_OK);
    CHECK_EQ(smb_segment_bind(mapped), SMB_OK);
    CHECK_EQ(smb_segment_bind(mapped), SMB_OK);
    CHECK_EQ(smb_server_let_move(pair.servers[0], BESIDE), SMB_BUSY);
    CHECK_EQ(
        smb_server_set_replica(pair.servers[0], BESIDE, 2, SMB_REPLICA_PRIMARY, false, false, ""),
        SMB_INVALID);
    CHECK_EQ(smb_segment_is_shared(mapped), 1);
    smb_segment_release(mapped);
    stop(&pair);

    struct smb_server *next;
    struct smb_segment_info info;
    struct smb_replica_status found;
    CHECK_EQ(smb_server_create(1002, 1, (uint64_t)1 << 30, &next), SMB_OK);
    CHECK_EQ(smb_server_adopt_segment(next, scratch_path("a"), &info), SMB_OK);
    CHECK_EQ(smb_server_adopt_segment(next, scratch_path("c"), &info), SMB_OK);
    CHECK_EQ(smb_server_replicas(next, &found, 1), 1);
    CHECK_EQ(found.segment, ID);
    CHECK_EQ(found.role, SMB_REPLICA_NONE);
    CHECK_EQ(smb_server_let_move(next, BESIDE), SMB_BUSY);
    smb_server_destroy(next);
}

static int open_files(void)
{
    int count = 0;
    DIR *files = opendir("/proc/self/fd");
    CHECK(files);
    while (readdir(files))
        count++;
    closedir(files);
    return count;
}

/* A server connects to its backups again and again: each attempt used to leak descriptors. */
static void a_forwarder_that_cannot_start_leaves_nothing(void)
{
    struct pair pair;
    pair_start(&pair, SMB_INT64, 1);
    struct rlimit before;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (int left = 0; left < 2; left++) {
        int files = open_files(), fd = socket(AF_INET, SOCK_STREAM, 0), next = dup(fd);
        close(next);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE,
                           &(struct rlimit){(rlim_t)next + (rlim_t)left, before.rlim_max}),
                 0);
        int status = smb_server_feed(pair.servers[0], ID, 1, fd, 1001, NULL, NULL);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
        CHECK_EQ(status, SMB_SYSTEM);
        CHECK_EQ(errno, EMFILE);
        CHECK_EQ(open_files(), files);
    }
    stop(&pair);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(changes_are_forwarded),
        TEST(changes_are_forwarded_inside_tls),
        TEST(a_busy_chunk_can_be_read),
        TEST(nothing_is_told_before_the_backup_has_it),
        TEST(a_primary_goes_on_alone),
        TEST(the_backup_takes_over),
        TEST(a_feed_that_is_refused_is_no_stranger),
        TEST(a_role_comes_between_two_changes),
        TEST(a_lower_lane_goes_on),
        TEST(reads_without_a_lease),
        TEST(a_primary_that_yields),
        TEST(a_primary_that_no_record_has),
        TEST(a_role_ends),
        TEST(what_is_refused),
        TEST(refusals_have_a_bound),
        TEST(locks_and_versions),
        TEST(a_copy_is_made_under_load),
        TEST(copies_switch_their_roles),
        TEST(a_new_copy_takes_over),
        TEST(changes_wait_while_roles_switch),
        TEST(readers_do_not_hold_up_a_switch),
        TEST(a_primary_with_more_stays_apart),
        TEST(a_refusal_is_read_from_a_connection_that_was_reset),
        TEST(a_refusal_stands_until_a_connection_works),
        TEST(a_copy_has_the_records),
        TEST(operands_are_forwarded),
        TEST(a_source_is_told_as_a_read_is),
        TEST(a_segment_with_one_copy_moves),
/* ThreadSanitizer waits for locks in another way, which the lock's word does not show. */
#if !defined(__SANITIZE_THREAD__)
        TEST(who_waits_for_a_lock_is_sent_away),
#endif
        TEST(what_was_made_before_is_told),
        TEST(what_is_gated_and_what_stays),
        TEST(a_forwarder_that_cannot_start_leaves_nothing),
    };
    return RUN_TESTS(tests);
}
