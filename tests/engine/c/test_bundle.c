/* Segments that move together: steps that change several of them as one, with a second copy. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/chunk.h"
#include "memory/segment.h"
#include "pair.h"
#include "server/bundle.h"

enum {
    FIRST_MOMENT = ID + 1,
    SECOND_MOMENT = ID + 2,
    MEMBERS = 3,
    GRADIENT = 200,
    ELEMENTS = SEGMENT_BYTES / 4,
    CLIENTS = 4,
    ROUNDS = 60
};

/* Starts a pair, with a segment of one copy beside it and one of another bundle. */
static void start(struct pair *pair)
{
    pair_start(pair, SMB_FLOAT32, MEMBERS);
    CHECK_EQ(smb_server_create_segment(pair->servers[0], scratch_path("g"), GRADIENT, 1,
                                       SMB_FLOAT32, SEGMENT_BYTES, CHUNK),
             SMB_OK);
    struct smb_segment *gradient;
    CHECK_EQ(smb_server_hold_segment(pair->servers[0], GRADIENT, &gradient), SMB_OK);
    for (int i = 0; i < ELEMENTS; i++)
        ((float *)smb_segment_data(gradient))[i] = 1;
    smb_segment_release(gradient);
}

struct stepper {
    struct user user;
    struct smb_buffer *gradient, *first, *second;
};

static struct stepper stepper_of(struct pair *pair, uint64_t session)
{
    struct stepper made = {.user = use(pair, session)};
    made.gradient = buffer_over(&made.user, pair, GRADIENT);
    made.first = buffer_over(&made.user, pair, FIRST_MOMENT);
    made.second = buffer_over(&made.user, pair, SECOND_MOMENT);
    return made;
}

static void end(struct stepper *stepper)
{
    smb_buffer_destroy(stepper->gradient);
    smb_buffer_destroy(stepper->first);
    smb_buffer_destroy(stepper->second);
    leave(&stepper->user);
}

/* With a gradient of ones the momentum counts the steps, and the weights lose one, two, three and
 * so on. Every number below 2^24 is exact, in any order of the steps. */
static struct smb_request step_of(const struct stepper *stepper)
{
    return (struct smb_request){.opcode = SMB_APPLY,
                                .op = SMB_RULE_MOMENTUM,
                                .bytes = SEGMENT_BYTES,
                                .other = stepper->gradient,
                                .states = {stepper->first},
                                .hyper = {.scale = 1, .lr = 1, .mu = 1},
                                .timeout_ms = RIG_TIMEOUT_MS};
}

static struct smb_request adam_of(const struct stepper *stepper, uint64_t step)
{
    struct smb_request request = step_of(stepper);
    request.op = SMB_RULE_ADAM;
    request.states[1] = stepper->second;
    request.hyper = (struct smb_hyper){
        .scale = 1, .lr = 0.125, .step = step, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    return request;
}

static const float *data_of(struct pair *pair, int server, uint64_t id)
{
    struct smb_segment *segment;
    CHECK_EQ(smb_server_hold_segment(pair->servers[server], id, &segment), SMB_OK);
    const float *data = smb_segment_data(segment);
    smb_segment_release(segment); /* the server's reference keeps its memory */
    return data;
}

static void check_steps(struct pair *pair, int server, int64_t steps)
{
    const float *weights = data_of(pair, server, ID);
    const float *momentum = data_of(pair, server, FIRST_MOMENT);
    for (int i = 0; i < ELEMENTS; i++) {
        CHECK_EQ((int64_t)momentum[i], steps);
        CHECK_EQ((int64_t)weights[i], -steps * (steps + 1) / 2);
    }
}

struct worker {
    struct pair *pair;
    uint64_t session;
    _Atomic int done;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct stepper stepper = stepper_of(worker->pair, worker->session);
    for (int i = 0; i < ROUNDS; i++) {
        must(stepper.user.buffer, step_of(&stepper));
        atomic_fetch_add(&worker->done, 1);
    }
    end(&stepper);
    return NULL;
}

/* Steps of several clients reach all segments of the backup as one and once, over connections that
 * are replaced all the time. */
static void steps_are_forwarded(void)
{
    struct pair pair;
    struct worker workers[CLIENTS];
    pthread_t threads[CLIENTS];
    start(&pair);
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    for (int i = 0; i < CLIENTS; i++) {
        workers[i] = (struct worker){.pair = &pair, .session = 10 + (uint64_t)i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int at = 5; at < ROUNDS; at += 5) {
        WAIT_UNTIL(atomic_load(&workers[0].done) >= at);
        CHECK_EQ(feed(&pair, 1), SMB_OK);
    }
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    for (int server = 0; server < 2; server++)
        check_steps(&pair, server, CLIENTS * ROUNDS);
    struct stepper stepper = stepper_of(&pair, 9);
    for (uint64_t step = 1; step <= 20; step++)
        must(stepper.user.buffer, adam_of(&stepper, step));
    CHECK(data_of(&pair, 1, SECOND_MOMENT)[0] > 0);
    CHECK(copies_are_equal(&pair));
    CHECK_EQ(status_of(&pair, 0).unconfirmed, 0);
    end(&stepper);
    stop(&pair);
}

/* Sends one step of the first chunk by hand, without waiting for its answer. */
static void raw_step(struct raw *raw)
{
    struct smb_frame step = {.opcode = SMB_APPLY,
                             .op = SMB_RULE_MOMENTUM,
                             .dtype = SMB_FLOAT32,
                             .epoch = 1,
                             .session = raw->session,
                             .lane = SMB_LANE_OF_SEGMENTS + 1,
                             .segment = ID,
                             .sequence = 1,
                             .length = CHUNK,
                             .payload = SMB_APPLY_BYTES};
    struct smb_hyper hyper = {.scale = 1, .lr = 1, .mu = 1};
    uint8_t bytes[SMB_FRAME_BYTES + SMB_APPLY_BYTES] = {0};
    smb_frame_encode(&step, bytes);
    smb_store64(bytes + SMB_FRAME_BYTES, GRADIENT);
    smb_store64(bytes + SMB_FRAME_BYTES + 8, FIRST_MOMENT);
    smb_store_hyper(bytes + SMB_FRAME_BYTES + 8 * SMB_APPLY_SEGMENTS, &hyper);
    CHECK_EQ(write(raw->fd, bytes, sizeof bytes), sizeof bytes);
}

/* A step that the backup does not have is seen in no segment: neither in the weights nor in the
 * state. Sent again, it counts once. */
static void no_part_of_a_step_is_told_before_the_backup_has_it(void)
{
    struct pair pair;
    uint64_t ids[] = {ID, FIRST_MOMENT};
    start(&pair);
    struct raw stepper = raw_begin(&pair, 0, 20), readers[2];
    raw_step(&stepper);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    for (int i = 0; i < 2; i++) {
        readers[i] = raw_begin(&pair, 0, 21 + (uint64_t)i);
        raw_send(&readers[i], (struct smb_frame){.opcode = SMB_READ,
                                                 .dtype = SMB_FLOAT32,
                                                 .epoch = 1,
                                                 .segment = ids[i],
                                                 .length = 4});
    }
    struct smb_server_counters counters;
    do
        smb_server_counters(pair.servers[0], &counters);
    while (counters.deferred_now < 2);
    CHECK(!heard(&stepper) && !heard(&readers[0]) && !heard(&readers[1]));
    CHECK_EQ(feed(&pair, 1), SMB_OK);
    CHECK_EQ(raw_receive(&stepper).status, SMB_OK);
    for (int i = 0; i < 2; i++) {
        float back;
        CHECK_EQ(raw_receive(&readers[i]).status, SMB_OK);
        CHECK_EQ(read(readers[i].fd, &back, sizeof back), sizeof back);
        CHECK(back == (i == 0 ? -1 : 1));
        close(readers[i].fd);
    }
    CHECK(copies_are_equal(&pair));
    close(stepper.fd);
    stop(&pair);
}

/* Makes steps with its own gradient, which both servers get with the frame, until it is stopped. */
static void *move(void *argument)
{
    struct mover *mover = argument;
    struct follower follower = {.place = mover->place};
    struct stepper stepper = stepper_of(mover->place->pair, mover->session);
    follower.user = stepper.user;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, follow, &follower), 0);
    struct smb_request step = step_of(&stepper);
    step.other = NULL;
    step.source = mover->ones;
    while (!atomic_load(&mover->stop)) {
        must(stepper.user.buffer, step);
        atomic_fetch_add(&mover->done, 1);
    }
    atomic_store(&mover->place->over, true);
    pthread_join(thread, NULL);
    end(&stepper);
    return NULL;
}

/* In each round a server is lost, with all segments, and they are copied again while clients make
 * steps: each step is in all of them, once, and the copies are equal at rest. */
static void a_bundle_is_copied_under_load(void)
{
    struct pair pair;
    int server;
    static float ones[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    start(&pair);
    int64_t done = lose_in_turn(&pair, move, ones, &server);
    CHECK_EQ(status_of(&pair, server).unconfirmed, 0);
    check_steps(&pair, server, done);
    CHECK(copies_are_equal(&pair));
    stop(&pair);
}

/* Asks for a part of each copy but the first one's; returns how many are complete. */
static int copies_told(struct pair *pair)
{
    uint64_t copied, total;
    int whole = 0;
    for (uint64_t id = ID + 1; id < ID + (uint64_t)pair->members; id++)
        whole += smb_server_copy(pair->servers[0], id, 2, CHUNK, &copied, &total) == SMB_EXISTS;
    return whole;
}

/* A member that the coordinator's records lack: it got no role in the new epoch, and the backup has
 * no room for it. The other members are copied nevertheless. */
static void a_member_that_is_in_no_record(void)
{
    struct pair pair;
    uint64_t copied = 0, total = 0;
    start(&pair);
    lose(&pair, 1);
    CHECK_EQ(smb_server_delete_segment(pair.servers[1], ID), SMB_OK);
    for (uint64_t id = ID + 1; id < ID + (uint64_t)pair.members; id++) {
        CHECK_EQ(
            smb_server_set_replica(pair.servers[1], id, 2, SMB_REPLICA_BACKUP, true, false, "peer"),
            SMB_OK);
        CHECK_EQ(
            smb_server_set_replica(pair.servers[0], id, 2, SMB_REPLICA_PRIMARY, true, true, "peer"),
            SMB_OK);
    }
    int fd = raw_connect(pair.ports[1]);
    CHECK_EQ(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
    CHECK_EQ(smb_server_feed(pair.servers[0], ID + 1, 2, fd, 1001, pair.inside, ""), SMB_OK);
    WAIT_UNTIL(copies_told(&pair) == pair.members - 1);
    CHECK_EQ(smb_server_copy(pair.servers[0], ID, 2, CHUNK, &copied, &total), SMB_EXISTS);
    CHECK_EQ(copied, SEGMENT_BYTES);
    stop(&pair);
}

/* A member gets its role when parts of the copy were sent without it: the copy is given up, and never
 * counts as whole. */
static void a_member_that_gets_its_role_too_late(void)
{
    struct pair pair;
    uint64_t copied = 0, total = 0;
    start(&pair);
    lose(&pair, 1);
    for (uint64_t id = ID + 1; id <= ID + (uint64_t)pair.members; id++) {
        uint64_t member = id == ID + (uint64_t)pair.members ? ID : id; /* the first one last */
        if (member == ID)
            (void)copies_told(&pair);
        CHECK_EQ(smb_server_set_replica(pair.servers[1], member, 2, SMB_REPLICA_BACKUP, true, false,
                                        "peer"),
                 SMB_OK);
        CHECK_EQ(smb_server_set_replica(pair.servers[0], member, 2, SMB_REPLICA_PRIMARY, true, true,
                                        "peer"),
                 SMB_OK);
    }
    for (uint64_t id = ID; id < ID + (uint64_t)pair.members; id++)
        CHECK_EQ(smb_server_copy(pair.servers[0], id, 2, CHUNK, &copied, &total), SMB_STALE_EPOCH);
    CHECK_EQ(smb_server_abandon_copy(pair.servers[0], ID, 2), SMB_OK);
    stop(&pair);
}

struct deletion {
    struct pair *pair;
    uint64_t id;
    _Atomic bool done;
};

static void *delete_at_primary(void *argument)
{
    struct deletion *deletion = argument;
    CHECK_EQ(smb_server_delete_segment(deletion->pair->servers[0], deletion->id), SMB_OK);
    atomic_store(&deletion->done, true);
    return NULL;
}

/* Sends a step whose chunk is locked at the backup, so it is in flight until the chunk is
 * unlocked. */
static struct smb_segment *hold_step(struct pair *pair, struct raw *writer)
{
    struct smb_segment *held;
    CHECK_EQ(feed(pair, 1), SMB_OK);
    WAIT_UNTIL(status_of(pair, 0).broken_ms == 0);
    CHECK_EQ(smb_server_hold_segment(pair->servers[1], ID, &held), SMB_OK);
    CHECK_EQ(smb_segment_lock(held, 0, SMB_TRY), SMB_OK);
    raw_step(writer);
    WAIT_UNTIL(status_of(pair, 0).unconfirmed == 1);
    return held;
}

/* A state is deleted while a step with it is in flight: it is gone at the primary once the backup
 * has the step. The connection stays, also if it was made in the name of a segment that leaves. */
static void a_member_leaves(void)
{
    struct pair pair;
    pthread_t thread;
    start(&pair);
    struct stepper stepper = stepper_of(&pair, 9);
    struct raw writer = raw_begin(&pair, 0, 20);
    struct smb_segment *held = hold_step(&pair, &writer);
    struct deletion deletion = {.pair = &pair, .id = FIRST_MOMENT};
    CHECK_EQ(pthread_create(&thread, NULL, delete_at_primary, &deletion), 0);
    struct smb_replica_status left[MEMBERS];
    WAIT_UNTIL(smb_server_replicas(pair.servers[0], left, MEMBERS) == 2);
    CHECK(!atomic_load(&deletion.done));
    CHECK_EQ(reach_try(stepper.user.buffer, step_of(&stepper)), SMB_APART);
    smb_segment_unlock(held, 0);
    smb_segment_release(held);
    CHECK_EQ(raw_receive(&writer).status, SMB_OK);
    pthread_join(thread, NULL);
    CHECK_EQ(data_of(&pair, 1, FIRST_MOMENT)[0], 1);
    CHECK_EQ(smb_server_delete_segment(pair.servers[1], FIRST_MOMENT), SMB_OK);
    for (int i = 0; i < 2; i++) /* in the name of this segment, whose id is the bundle's number */
        CHECK_EQ(smb_server_delete_segment(pair.servers[i], ID), SMB_OK);
    for (int i = 0; i < 5; i++)
        must(stepper.second, (struct smb_request){.opcode = SMB_FILL, .bytes = SEGMENT_BYTES});
    CHECK_EQ(smb_server_replicas(pair.servers[0], left, MEMBERS), 1);
    CHECK_EQ(left[0].segment, SECOND_MOMENT);
    CHECK_EQ(left[0].group, ID);
    CHECK(left[0].dialled && left[0].broken_ms == 0);
    CHECK_EQ(left[0].refused, SMB_OK);
    close(writer.fd);
    end(&stepper);
    stop(&pair);
}

static uint64_t ns_of_leaving(bool reached)
{
    struct pair pair;
    start(&pair);
    struct raw writer = raw_begin(&pair, 0, 20);
    struct smb_segment *held = reached ? hold_step(&pair, &writer) : NULL;
    if (!reached)
        raw_step(&writer);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    uint64_t begun_ns = smb_now_ns();
    CHECK_EQ(smb_server_delete_segment(pair.servers[0], FIRST_MOMENT), SMB_OK);
    uint64_t took_ns = smb_now_ns() - begun_ns;
    if (held) {
        smb_segment_unlock(held, 0);
        smb_segment_release(held);
    }
    close(writer.fd);
    stop(&pair);
    return took_ns;
}

/* A deletion waits at most a second for a backup that does not answer... */
static void a_member_leaves_a_slow_backup(void)
{
    CHECK(ns_of_leaving(true) >= 900000000U);
}

/* ... and not at all for a backup without a connection. */
static void a_member_leaves_without_the_backup(void)
{
    CHECK(ns_of_leaving(false) < 900000000U);
}

static uint32_t format_of(const char *name)
{
    uint32_t format = 0;
    FILE *file = fopen(scratch_path(name), "rb");
    CHECK(file && fseek(file, 8, SEEK_SET) == 0 && fread(&format, sizeof format, 1, file) == 1);
    fclose(file);
    return format;
}

/* A role that one member is given is the role of all, also after a restart. */
static void a_role_is_the_bundles(void)
{
    struct pair pair;
    struct smb_replica_status found[MEMBERS];
    start(&pair);
    CHECK_EQ(smb_server_set_replica(pair.servers[1], SECOND_MOMENT, 2, SMB_REPLICA_PRIMARY, false,
                                    false, ""),
             SMB_OK);
    CHECK_EQ(smb_server_replicas(pair.servers[1], found, MEMBERS), MEMBERS);
    for (int i = 0; i < MEMBERS; i++) {
        CHECK_EQ(found[i].group, ID);
        CHECK_EQ(found[i].epoch, 2);
        CHECK_EQ(found[i].role, SMB_REPLICA_PRIMARY);
    }
    stop(&pair);

    struct smb_server *next;
    struct smb_segment_info info;
    CHECK_EQ(smb_server_create(1002, 1, (uint64_t)1 << 30, &next), SMB_OK);
    CHECK_EQ(format_of("a"), 4);
    CHECK_EQ(format_of("a2"), 5); /* a server that does not know bundles refuses this file */
    CHECK_EQ(smb_server_adopt_segment(next, scratch_path("a2"), &info), SMB_OK);
    CHECK_EQ(smb_server_adopt_segment(next, scratch_path("a"), &info), SMB_OK);
    CHECK_EQ(smb_server_set_replica(next, SECOND_MOMENT, 3, SMB_REPLICA_PRIMARY, false, false, ""),
             SMB_OK);
    CHECK_EQ(smb_server_replicas(next, found, MEMBERS), 2);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(found[i].group, ID);
        CHECK_EQ(found[i].role, SMB_REPLICA_PRIMARY);
    }
    smb_server_destroy(next);
}

static void check_held(struct smb_server *server, uint64_t id, uint32_t epoch, int role)
{
    struct smb_held held;
    CHECK_EQ(smb_server_holds(server, id, &held), SMB_OK);
    CHECK_EQ(held.epoch, epoch);
    CHECK_EQ(held.role, role);
}

static void lead(struct smb_server *server, uint64_t id, uint32_t epoch)
{
    CHECK_EQ(smb_server_set_replica(server, id, epoch, SMB_REPLICA_PRIMARY, false, false, ""),
             SMB_OK);
}

/* Records from a backup lacked one member, and its bundle got a later role without it. Another
 * backup has it, in an older epoch: once those that have the role are deleted it can get one, but
 * none that it had before. */
static void a_member_outlives_a_role_of_others(void)
{
    static const int LEFT[] = {SMB_REPLICA_PRIMARY, SMB_REPLICA_BACKUP};
    struct pair pair;
    start(&pair);
    for (int i = 0; i < 2; i++) {
        struct smb_server *server = pair.servers[i];
        CHECK_EQ(smb_server_set_replica(server, ID, 5, LEFT[i], false, false, ""), SMB_OK);
        check_held(server, ID, 5, LEFT[i]);
        check_held(server, FIRST_MOMENT, 1, SMB_REPLICA_NONE);
        CHECK_EQ(smb_server_delete_segment(server, SECOND_MOMENT), SMB_OK);
        lead(server, FIRST_MOMENT, 3);
        check_held(server, FIRST_MOMENT, 1, SMB_REPLICA_NONE);
        CHECK_EQ(smb_server_delete_segment(server, ID), SMB_OK);
        lead(server, FIRST_MOMENT, 1);
        check_held(server, FIRST_MOMENT, 1, SMB_REPLICA_NONE);
        lead(server, FIRST_MOMENT, 3);
        check_held(server, FIRST_MOMENT, 3, SMB_REPLICA_PRIMARY);
    }
    stop(&pair);
}

/* Its role was ended in a later epoch than the restored records have: they are obeyed by a server
 * that takes no roles from their predecessor any more. Roles that it had already are ignored. */
static void roles_that_ended_are_forgotten(void)
{
    struct pair pair;
    start(&pair);
    for (int i = 0; i < 2; i++) {
        struct smb_server *server = pair.servers[i];
        CHECK_EQ(smb_server_set_replica(server, ID, 2, SMB_REPLICA_PRIMARY, false, false, ""),
                 SMB_OK);
        CHECK_EQ(smb_server_set_replica(server, ID, 6, SMB_REPLICA_NONE, false, false, ""), SMB_OK);
        lead(server, ID, 3);
        check_held(server, ID, 2, SMB_REPLICA_NONE);
        CHECK_EQ(smb_server_forget_ends(server), SMB_OK);
        lead(server, ID, 1);
        check_held(server, ID, 2, SMB_REPLICA_NONE);
        lead(server, ID, 3);
        check_held(server, ID, 3, SMB_REPLICA_PRIMARY);
        CHECK_EQ(smb_server_forget_ends(server), SMB_OK);
        lead(server, ID, 2);
        check_held(server, ID, 3, SMB_REPLICA_PRIMARY);
    }
    stop(&pair);
}

/* A state that does not move with the weights is refused, because a backup would not make the step
 * in it. A member with another chunk size is refused, and one too many. */
static void what_is_refused(void)
{
    enum { ALONE = 300, ELSEWHERE };
    struct pair pair;
    start(&pair);
    struct stepper stepper = stepper_of(&pair, 9);
    CHECK_EQ(smb_server_create_replica(pair.servers[0], scratch_path("c"), ALONE, 0, 1, SMB_FLOAT32,
                                       SEGMENT_BYTES, CHUNK),
             SMB_OK);
    CHECK_EQ(
        smb_server_set_replica(pair.servers[0], ALONE, 1, SMB_REPLICA_PRIMARY, false, false, ""),
        SMB_OK);
    uint64_t others[] = {ALONE, GRADIENT};
    for (int i = 0; i < 2; i++) {
        struct smb_buffer *other = buffer_over(&stepper.user, &pair, others[i]);
        struct smb_buffer *weights = buffer_over(&stepper.user, &pair, others[i]);
        struct smb_request request = step_of(&stepper);
        request.states[0] = other;
        if (others[i] == GRADIENT)
            request.other = stepper.second;
        CHECK_EQ(reach_try(stepper.user.buffer, request), SMB_INVALID);
        request.states[0] = stepper.first;
        CHECK_EQ(reach_try(weights, request), SMB_INVALID);
        smb_buffer_destroy(other);
        smb_buffer_destroy(weights);
    }
    CHECK_EQ(data_of(&pair, 0, ID)[0], 0);
    CHECK_EQ(smb_server_create_replica(pair.servers[0], scratch_path("d"), ELSEWHERE, ID, 1,
                                       SMB_FLOAT32, SEGMENT_BYTES + CHUNK, CHUNK),
             SMB_INVALID);
    CHECK(access(scratch_path("d"), F_OK) != 0);
    for (int i = MEMBERS; i <= BUNDLE_MEMBERS_MAX; i++) {
        char name[] = {'m', (char)('a' + i), 0};
        CHECK_EQ(smb_server_create_replica(pair.servers[0], scratch_path(name),
                                           ELSEWHERE + (uint64_t)i, ID, 1, SMB_FLOAT32,
                                           SEGMENT_BYTES, CHUNK),
                 i < BUNDLE_MEMBERS_MAX ? SMB_OK : SMB_INVALID);
    }
    end(&stepper);
    stop(&pair);
}

/* A backup that lacks one of the segments greets its primary, and refuses each frame for that
 * segment. Each new connection used to count as working, so nobody was told and clients waited
 * forever. */
static void a_backup_that_refuses_counts_as_broken(void)
{
    struct pair pair;
    start(&pair);
    CHECK_EQ(smb_server_delete_segment(pair.servers[1], FIRST_MOMENT), SMB_OK);
    struct raw raw = raw_begin(&pair, 0, 20);
    struct smb_frame fill = {.opcode = SMB_FILL,
                             .dtype = SMB_FLOAT32,
                             .epoch = 1,
                             .segment = FIRST_MOMENT,
                             .sequence = 1,
                             .length = CHUNK};
    raw_send(&raw, fill);
    WAIT_UNTIL(status_of(&pair, 0).unconfirmed == 1);
    uint64_t refusals = 0;
    do {
        CHECK_EQ(feed(&pair, 1), SMB_OK);
        WAIT_UNTIL(!status_of(&pair, 0).dialled);
        refusals++;
    } while (status_of(&pair, 0).broken_ms < 200);
    CHECK(refusals > 1);
    CHECK_EQ(status_of(&pair, 0).unconfirmed, 1);
    set_role(&pair, 0, 2, SMB_REPLICA_PRIMARY, false); /* as the coordinator does in that case */
    CHECK_EQ(raw_receive(&raw).status, SMB_OK);
    close(raw.fd);
    stop(&pair);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(steps_are_forwarded),
        TEST(no_part_of_a_step_is_told_before_the_backup_has_it),
        TEST(a_bundle_is_copied_under_load),
        TEST(a_member_that_is_in_no_record),
        TEST(a_member_that_gets_its_role_too_late),
        TEST(a_member_leaves),
        TEST(a_member_leaves_a_slow_backup),
        TEST(a_member_leaves_without_the_backup),
        TEST(a_backup_that_refuses_counts_as_broken),
        TEST(a_role_is_the_bundles),
        TEST(a_member_outlives_a_role_of_others),
        TEST(roles_that_ended_are_forgotten),
        TEST(what_is_refused),
    };
    return RUN_TESTS(tests);
}
