/* Two drivers: a large call's bytes are moved by two threads, and what ends it may come while the other one has a link. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "rig.h"
#include "segment.h"

/* Gives each of a client's links to server 0 that has lost its connection another one, until the client is closed. */
struct minder {
    struct rig *rig;
    struct reach *reach;
};

static void *mind(void *argument)
{
    struct minder *minder = argument;
    uint64_t id, instance;
    while (smb_client_wait_down(minder->reach->client, RIG_TIMEOUT_MS, &id) == SMB_OK) {
        struct smb_link *link = smb_link_id(minder->reach->links[0]) == id ? minder->reach->links[0] : minder->reach->odd_links[0];
        CHECK_EQ(smb_link_id(link), id);
        CHECK_EQ(smb_link_resume_tcp(link, "127.0.0.1", minder->rig->ports[0], 0, RIG_TIMEOUT_MS, &instance), SMB_OK);
    }
    return NULL;
}

static void *small_calls(void *argument)
{
    int64_t one = 1, old = 0;
    for (int i = 0; i < 300; i++) { /* by turns over the one link of the pair and the other */
        struct smb_request add = {.opcode = SMB_ACCUMULATE, .op = SMB_SUM, .scale = 1, .offset = (uint64_t)(i % 2) * 4096,
                                  .bytes = 8, .source = &one, .sink = &old};
        must(argument, add);
    }
    return NULL;
}

/* A large call is given up at its deadline while the second driver has its odd link, behind a chunk that somebody holds: its memory
 * is nobody's from then on. Others' calls over the same links go on and are made once each, and the next large call is whole. */
static void a_large_call_is_given_up_while_its_odd_link_is_lent(void)
{
    enum { LARGE = 4 << 20, CHUNK = 4096, ROUNDS = 8 };
    struct rig rig;
    struct reach reach;
    struct minder minder = {&rig, &reach};
    struct smb_segment *mapped;
    pthread_t minding, other;
    rig_start(&rig, (struct smb_layout){LARGE, LARGE, CHUNK, 1}, SMB_INT64);
    rig_add_buffer(&rig, 1);
    reach_make(&reach, &rig, BY_TCP, 21);
    struct smb_buffer *shared = reach_buffer(&reach, &rig, BY_TCP, 1);
    CHECK_EQ(smb_segment_open(rig_segment_path(0, 0), &mapped), SMB_OK);
    CHECK_EQ(pthread_create(&minding, NULL, mind, &minder), 0);
    for (int round = 0; round < ROUNDS; round++) {
        uint8_t *source = malloc(LARGE), *sink = malloc(LARGE);
        memset(source, round + 1, LARGE);
        uint64_t held = round % 4 < 3 ? (2 * (uint64_t)round + 1) * CHUNK : 0; /* mostly one of the odd link's */
        CHECK_EQ(smb_segment_lock(mapped, held, SMB_TRY), SMB_OK);
        smb_segment_change_begin(mapped, held); /* reads would not wait for the lock alone */
        CHECK_EQ(pthread_create(&other, NULL, small_calls, shared), 0);
        struct smb_request call = {.opcode = SMB_WRITE, .bytes = LARGE, .source = source, .timeout_ms = 60};
        if (round % 2)
            call = (struct smb_request){.opcode = SMB_READ, .bytes = LARGE, .sink = sink, .timeout_ms = 60};
        else
            memset(sink, 0xee, LARGE);
        CHECK_EQ(reach_try(reach.buffer, call), SMB_TIMEOUT);
        memset(source, 0xee, LARGE);
        memset(sink, 0xee, LARGE);
        smb_segment_change_end(mapped, held);
        smb_segment_unlock(mapped, held);
        pthread_join(other, NULL);
        for (int i = 0; i < LARGE; i++)
            CHECK(sink[i] == 0xee); /* no late answer came into it */
        memset(source, round + 101, LARGE);
        must(reach.buffer, (struct smb_request){.opcode = SMB_WRITE, .bytes = LARGE, .source = source});
        must(reach.buffer, (struct smb_request){.opcode = SMB_READ, .bytes = LARGE, .sink = sink});
        CHECK(memcmp(source, sink, LARGE) == 0);
        free(source);
        free(sink);
    }
    CHECK(reach.client->second.process != 0); /* it had a part in this */
    int64_t sums[2];
    for (int i = 0; i < 2; i++)
        must(shared, (struct smb_request){.opcode = SMB_READ, .offset = (uint64_t)i * 4096, .bytes = 8, .sink = &sums[i]});
    CHECK_EQ(sums[0], 150 * ROUNDS);
    CHECK_EQ(sums[1], 150 * ROUNDS);
    smb_client_close(reach.client);
    pthread_join(minding, NULL);
    smb_segment_release(mapped);
    smb_buffer_destroy(shared);
    reach_end(&reach);
    rig_stop(&rig);
}

int main(void)
{
    static const struct test tests[] = {
        TEST(a_large_call_is_given_up_while_its_odd_link_is_lent),
    };
    return RUN_TESTS(tests);
}
