/* Memory order: what one thread stores another finds, where they share no lock. For
 * ThreadSanitizer, because a processor may order more strictly than the code demands. */
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "base/failpoint.h"
#include "memory/journal.h"
#include "memory/segment.h"
#include "rig.h"
#include "smb/server.h"

enum {
    ID = 1,
    CHUNK = 16384,
    ELEMENTS = CHUNK / 8,
    LOCAL_CLIENTS = 2,
    ADDITIONS = 20,
    PAYLOAD_SCALE = 3
};

static int64_t ones[ELEMENTS], payload[ELEMENTS];

/* ---- recovery and local clients -------------------------------------------------------------- */

/* used by recovery and local clients: one mapping, so that ThreadSanitizer sees the same memory */
static struct smb_segment *mapped;

static struct smb_segment *find_mapped(void *argument, uint64_t segment_id)
{
    (void)argument;
    return segment_id == ID ? smb_segment_retain(mapped) : NULL;
}

/* Simulates a daemon that is killed at `point` of a journalled addition to the chunk. */
static void die_at(const char *point)
{
    int status;
    pid_t child = check_fork();
    if (child == 0) {
        struct smb_segment *segment;
        struct smb_recovery recovery = {0};
        struct journal *journal;
        struct slot slot;
        struct smb_change change = {
            .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = PAYLOAD_SCALE, .bytes = CHUNK};
        struct change_name name = {.session = 50, .sequence = 1, .lane = 1};
        CHECK_EQ(smb_segment_open(scratch_path("segment"), &segment), SMB_OK);
        CHECK_EQ(journal_open(scratch_path("journal"), find_mapped, NULL, &recovery, &journal),
                 SMB_OK);
        CHECK_EQ(journal_take_slot(journal, &slot), SMB_OK);
        CHECK_EQ(journal_reserve(journal, &slot, CHUNK), SMB_OK);
        memcpy(slot.payload, payload, CHUNK);
        change.source = slot.payload;
        failpoint_arm(point, 1);
        slot_describe(journal, &slot, segment, &change, &name);
        CHECK_EQ(smb_segment_lock(segment, 0, SMB_TRY), SMB_OK);
        slot_begin(journal, &slot, segment, &change);
        slot_run(journal, &slot, segment, &change);
        slot_end(journal, &slot, segment, &change);
        _exit(1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Tries without a pause, so that it comes right after the mark is removed. */
static void *local_client(void *argument)
{
    _Atomic int *refused = argument;
    struct smb_change add = {
        .opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1.0, .bytes = CHUNK, .source = ones};
    for (int added = 0; added < ADDITIONS;) {
        int status = smb_segment_apply(mapped, &add, SMB_TRY_ONCE);
        CHECK(status == SMB_OK || status == SMB_BUSY);
        if (status == SMB_OK)
            added++;
        else
            atomic_fetch_add_explicit(refused, 1, memory_order_relaxed);
    }
    return NULL;
}

/* `finished`, `torn`: what the recovery must report. */
static void recover_beside_clients(const char *point, bool lose_journal, uint64_t finished,
                                   uint64_t torn)
{
    pthread_t clients[LOCAL_CLIENTS];
    _Atomic int refused = 0;
    struct smb_recovery recovery = {0};
    struct journal *journal;
    CHECK_EQ(smb_segment_create(scratch_path("segment"), ID, RIG_EPOCH, SMB_INT64, CHUNK, CHUNK,
                                &mapped),
             SMB_OK);
    die_at(point);
    if (lose_journal)
        CHECK_EQ(unlink(scratch_path("journal")), 0);
    for (int i = 0; i < LOCAL_CLIENTS; i++)
        CHECK_EQ(pthread_create(&clients[i], NULL, local_client, &refused), 0);
    WAIT_UNTIL(atomic_load_explicit(&refused, memory_order_relaxed) > 0);
    CHECK_EQ(journal_open(scratch_path("journal"), find_mapped, NULL, &recovery, &journal), SMB_OK);
    CHECK_EQ(smb_segment_clear_marks(mapped), torn);
    CHECK_EQ(recovery.finished, finished);
    for (int i = 0; i < LOCAL_CLIENTS; i++)
        pthread_join(clients[i], NULL);
    const int64_t *found = smb_segment_data(mapped);
    for (int i = 0; i < ELEMENTS; i++) {
        int64_t theirs = LOCAL_CLIENTS * ADDITIONS, whole = theirs + PAYLOAD_SCALE * payload[i];
        CHECK(found[i] == (finished ? whole : theirs) || (torn && found[i] == whole));
    }
    CHECK(!smb_segment_changing(mapped, 0));
    journal_close(journal);
    smb_segment_release(mapped);
    CHECK_EQ(unlink(scratch_path("segment")), 0);
    CHECK_EQ(unlink(scratch_path("journal")), 0);
}

/* A local client that finds the mark gone finds all stores of recovery, however recovery released
 * the chunk. */
static void local_clients_beside_recovery(void)
{
    for (int i = 0; i < ELEMENTS; i++) {
        ones[i] = 1;
        payload[i] = i % 251 + 1;
    }
    recover_beside_clients("journal.block_half", false, 1, 0);
    recover_beside_clients("journal.block_done", false, 1, 0);
    recover_beside_clients("journal.odd", false, 1, 0);
    recover_beside_clients("journal.block_half", true, 0, 1);
}

/* ---- why a link was closed ------------------------------------------------------------------- */

enum { SESSION = 77, STRIPE = 65536 };

struct caller {
    pthread_t thread;
    struct smb_buffer *buffer;
    uint64_t offset;
    _Atomic bool stop;
    int status;
    uint8_t sink[64];
};

static int call_once(struct caller *caller)
{
    return reach_try(caller->buffer, (struct smb_request){.opcode = SMB_READ,
                                                          .offset = caller->offset,
                                                          .bytes = sizeof caller->sink,
                                                          .sink = caller->sink});
}

static void *call_until_stopped(void *argument)
{
    struct caller *caller = argument;
    while (!atomic_load_explicit(&caller->stop, memory_order_relaxed))
        CHECK_EQ(call_once(caller), SMB_OK);
    return NULL;
}

static void *call_and_wait(void *argument)
{
    struct caller *caller = argument;
    caller->status = call_once(caller);
    return NULL;
}

/* The progress thread, awake for other calls, finds that the thread which connects the link again
 * wants it closed, and finds the reason. */
static void reason_comes_with_closing(void)
{
    struct rig rig;
    rig_start(&rig, (struct smb_layout){2 * STRIPE, STRIPE, CHUNK, 2}, SMB_INT64);
    for (uint64_t round = 0; round < 10; round++) {
        struct smb_client *client;
        struct smb_link *links[RIG_SERVERS];
        struct smb_buffer *buffer;
        uint64_t instance, down;
        CHECK_EQ(smb_client_create(SESSION + round, &client), SMB_OK);
        CHECK_EQ(smb_buffer_create(client, &rig.layout, rig.dtype, &buffer), SMB_OK);
        for (uint32_t i = 0; i < RIG_SERVERS; i++) {
            CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", rig.ports[i], 1, RIG_TIMEOUT_MS,
                                            &links[i], &instance),
                     SMB_OK);
            CHECK_EQ(smb_buffer_set_link(buffer, i, rig_segment_id(0, i), RIG_EPOCH, links[i]),
                     SMB_OK);
        }
        struct caller waits = {.buffer = buffer}, goes_on = {.buffer = buffer, .offset = STRIPE};
        smb_server_end_session(rig.servers[0], SESSION + round);
        CHECK_EQ(pthread_create(&goes_on.thread, NULL, call_until_stopped, &goes_on), 0);
        CHECK_EQ(pthread_create(&waits.thread, NULL, call_and_wait, &waits), 0);
        CHECK_EQ(smb_client_wait_down(client, RIG_TIMEOUT_MS, &down), SMB_OK);
        CHECK_EQ(down, smb_link_id(links[0]));
        CHECK_EQ(
            smb_link_resume_tcp(links[0], "127.0.0.1", rig.ports[0], 0, RIG_TIMEOUT_MS, &instance),
            SMB_SESSION_ENDED);
        pthread_join(waits.thread, NULL);
        CHECK_EQ(waits.status, SMB_SESSION_ENDED);
        atomic_store_explicit(&goes_on.stop, true, memory_order_relaxed);
        pthread_join(goes_on.thread, NULL);
        smb_buffer_destroy(buffer);
        for (int i = 0; i < RIG_SERVERS; i++)
            smb_link_close(links[i]);
        smb_client_destroy(client);
    }
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {TEST(local_clients_beside_recovery),
                                        TEST(reason_comes_with_closing)};
    return RUN_TESTS(tests);
}
