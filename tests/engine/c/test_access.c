/* Tokens between a client's links and a guarded server: shown while calls run, renewed, shown again
 * on each new connection. */
#include <pthread.h>
#include <string.h>

#include "channel/access.h"
#include "base/frame.h"
#include "base/sha256.h"
#include "client/client.h"
#include "client/link.h"
#include "memory/segment.h"
#include "pair.h"
#include "pump.h"
#include "server/grants.h"
#include "server/registry.h"
#include "server/server.h"

enum { ELEMENTS = 3 * 1024, SESSION = 77, CALLS = 300 };
static const struct smb_layout LAYOUT = {ELEMENTS * 8, 8192, 4096, 1};
static const uint8_t key[SMB_KEY_BYTES] = "shared with the coordinator";

static struct smb_token token_in(uint32_t epoch, uint64_t segment, uint32_t rights,
                                 uint64_t expires_ms)
{
    struct smb_token token = {.segment = segment,
                              .epoch = epoch,
                              .rights = rights,
                              .generation = 4,
                              .expires_ms = expires_ms};
    uint8_t text[56] = "smb token 1";
    smb_store64(text + 16, SESSION);
    smb_store64(text + 24, segment);
    smb_store64(text + 32, epoch | (uint64_t)rights << 32);
    smb_store64(text + 40, token.generation);
    smb_store64(text + 48, expires_ms);
    smb_hmac_sha256(key, sizeof key, text, sizeof text, token.secret);
    return token;
}

static struct smb_token token_of(uint64_t segment, uint32_t rights, uint64_t expires_ms)
{
    return token_in(RIG_EPOCH, segment, rights, expires_ms);
}

static int set_key(struct smb_server *server, uint32_t generation, uint64_t now_ms)
{
    struct smb_key set = {.generation = generation};
    memcpy(set.bytes, key, sizeof set.bytes);
    return smb_server_set_keys(server, 1, &set, now_ms);
}

static int show(struct smb_link *link, const struct smb_token *token)
{
    uint64_t why;
    return smb_link_authorize(link, token, RIG_TIMEOUT_MS, &why);
}

static uint64_t why_not(struct smb_link *link, const struct smb_token *token)
{
    uint64_t why;
    CHECK_EQ(smb_link_authorize(link, token, RIG_TIMEOUT_MS, &why), SMB_DENIED);
    return why;
}

struct rigged {
    struct rig rig;
    struct smb_client *client;
    struct smb_link *link;
    struct smb_buffer *buffer;
};

static struct smb_link *connect_to(struct smb_client *client, const struct rig *rig, int server,
                                   uint16_t lane)
{
    struct smb_link *link;
    uint64_t instance;
    CHECK_EQ(smb_client_connect_tcp(client, "127.0.0.1", rig->ports[server], lane, RIG_TIMEOUT_MS,
                                    &link, &instance),
             SMB_OK);
    return link;
}

static int resume_at(struct smb_link *link, const struct rig *rig, int server,
                     uint64_t accept_instance)
{
    uint64_t instance;
    int status = smb_link_resume_tcp(link, "127.0.0.1", rig->ports[server], accept_instance,
                                     RIG_TIMEOUT_MS, &instance);
    CHECK(instance == 1000 + (uint64_t)server || (status != SMB_OK && status != SMB_UNTRUSTED));
    return status;
}

static void set_up(struct rigged *rigged)
{
    rig_start(&rigged->rig, LAYOUT, SMB_INT64);
    smb_server_guard(rigged->rig.servers[0]); /* before the first connection */
    CHECK_EQ(set_key(rigged->rig.servers[0], 4, 1000000), SMB_OK);
    CHECK_EQ(smb_client_create(SESSION, &rigged->client), SMB_OK);
    rigged->link = connect_to(rigged->client, &rigged->rig, 0, 0);
    CHECK_EQ(smb_buffer_create(rigged->client, &LAYOUT, SMB_INT64, &rigged->buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(rigged->buffer, 0, rig_segment_id(0, 0), RIG_EPOCH, rigged->link),
             SMB_OK);
}

static void take_down(struct rigged *rigged)
{
    smb_buffer_destroy(rigged->buffer);
    smb_link_close(rigged->link);
    smb_client_close(rigged->client);
    smb_client_destroy(rigged->client);
    rig_stop(&rigged->rig);
}

static int64_t words[ELEMENTS];

static struct smb_request add(void)
{
    for (int i = 0; i < ELEMENTS; i++)
        words[i] = 1;
    return (struct smb_request){.opcode = SMB_ACCUMULATE,
                                .op = SMB_SUM,
                                .scale = 1,
                                .bytes = sizeof words,
                                .source = words};
}

/* How many completion records the session has at a server's segment. */
static int records_of(struct smb_server *server, uint64_t id, uint64_t session)
{
    struct smb_segment *segment = server_find(server, id);
    struct record_table table = smb_segment_records(segment);
    int found = 0;
    for (uint32_t i = 0; i < table.count; i++)
        found += atomic_load(&table.records[i].session) == session;
    smb_segment_release(segment);
    return found;
}

/* Without a token nothing is done. A token to read allows reads, and a token to write allows
 * writes. A token of another key, or one that has expired, allows nothing. */
static void rights_on_a_link(void)
{
    struct rigged rigged;
    static int64_t found[ELEMENTS];
    struct smb_request read = {.opcode = SMB_READ, .bytes = sizeof found, .sink = found};
    set_up(&rigged);
    uint64_t segment = rig_segment_id(0, 0);
    CHECK_EQ(reach_try(rigged.buffer, read), SMB_DENIED);
    struct smb_token reader = token_of(segment, SMB_RIGHT_READ, 2000000),
                     writer = token_of(segment, 3, 2000000);
    struct smb_token late = token_of(segment, 3, 1000000), forged = writer;
    forged.secret[31] ^= 1;
    CHECK_EQ(why_not(rigged.link, &late), SMB_DENIED_EXPIRED);
    CHECK_EQ(why_not(rigged.link, &forged), SMB_DENIED_PROOF);
    CHECK_EQ(reach_try(rigged.buffer, read), SMB_DENIED);
    CHECK_EQ(show(rigged.link, &reader), SMB_OK);
    CHECK_EQ(reach_try(rigged.buffer, read), SMB_OK);
    CHECK_EQ(reach_try(rigged.buffer, add()), SMB_DENIED);
    /* It would push out a record of those who may write. */
    CHECK_EQ(records_of(rigged.rig.servers[0], segment, SESSION), 0);
    CHECK_EQ(show(rigged.link, &writer), SMB_OK);
    must(rigged.buffer, add());
    CHECK_EQ(records_of(rigged.rig.servers[0], segment, SESSION), 1);
    must(rigged.buffer, read);
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(found[i], 1);
    take_down(&rigged);
}

/* None of the three ways to use a link sends anything. */
static void nothing_goes_to(struct smb_link *link)
{
    struct smb_buffer *buffer;
    struct smb_segment *segment;
    struct smb_pending *pending;
    uint64_t id = rig_segment_id(0, 0);
    struct smb_ask ask = {.opcode = SMB_LOCK, .segment = id, .epoch = RIG_EPOCH};
    CHECK_EQ(smb_buffer_create(link->client, &LAYOUT, SMB_INT64, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, id, RIG_EPOCH, link), SMB_UNTRUSTED);
    smb_buffer_destroy(buffer);
    CHECK_EQ(smb_ask_start(link, &ask, &pending), SMB_UNTRUSTED);
    CHECK_EQ(smb_link_attach(link, id, RIG_EPOCH, RIG_TIMEOUT_MS, &segment), SMB_UNTRUSTED);
}

/* A client that requires proof accepts only a server that knows the token's key, on the first
 * connection and on later ones. A server that refuses all tokens without a proof is left, and its
 * word does not make the client forget the tokens. */
static void servers_prove_tokens(void)
{
    struct rigged rigged;
    struct smb_client *client;
    struct smb_link *link, *stray;
    struct smb_buffer *buffer;
    static int64_t found[ELEMENTS];
    uint64_t segment = rig_segment_id(0, 0);
    enum { RIGHT, OTHER /* accepts every token */ };
    set_up(&rigged);
    struct smb_token token = token_of(segment, 3, 2000000);
    CHECK_EQ(smb_client_create(SESSION, &client), SMB_OK);
    smb_client_want_proof(client);
    link = connect_to(client, &rigged.rig, RIGHT, 1);
    CHECK_EQ(show(link, &token), SMB_OK);
    CHECK_EQ(smb_buffer_create(client, &LAYOUT, SMB_INT64, &buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(buffer, 0, segment, RIG_EPOCH, link), SMB_OK);
    must(buffer, add());
    CHECK_EQ(resume_at(link, &rigged.rig, RIGHT, 0), SMB_OK);
    must(buffer, add());

    stray = connect_to(client, &rigged.rig, OTHER, 2);
    nothing_goes_to(stray);
    CHECK_EQ(show(stray, &token), SMB_UNTRUSTED);
    CHECK_EQ(smb_link_alive(stray), 0);
    smb_link_close(stray);
    CHECK_EQ(resume_at(link, &rigged.rig, OTHER, 1001), SMB_UNTRUSTED);

    CHECK_EQ(set_key(rigged.rig.servers[RIGHT], 5, 1000000), SMB_OK);
    stray = connect_to(client, &rigged.rig, RIGHT, 3);
    CHECK_EQ(why_not(stray, &token), SMB_DENIED_GENERATION);
    nothing_goes_to(stray);
    CHECK_EQ(smb_link_alive(stray), 0);
    smb_link_close(stray);
    CHECK_EQ(resume_at(link, &rigged.rig, RIGHT, 0), SMB_UNTRUSTED);
    CHECK_EQ(set_key(rigged.rig.servers[RIGHT], 4, 1000000), SMB_OK);
    CHECK_EQ(resume_at(link, &rigged.rig, RIGHT, 0), SMB_OK);
    must(buffer, add());
    must(buffer, (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(found[i], 3);
    smb_buffer_destroy(buffer);
    smb_link_close(link);
    smb_client_close(client);
    smb_client_destroy(client);
    take_down(&rigged);
}

/* Reconnects the link whenever it has no connection. */
static void *tend(void *argument)
{
    struct rigged *rigged = argument;
    uint64_t id;
    while (smb_client_wait_down(rigged->client, RIG_TIMEOUT_MS, &id) == SMB_OK)
        CHECK_EQ(resume_at(rigged->link, &rigged->rig, 0, 0), SMB_OK);
    return NULL;
}

/* Renews the token repeatedly, and breaks the connection now and then. */
static void *renew(void *argument)
{
    struct rigged *rigged = argument;
    for (int i = 0; i < CALLS; i++) {
        struct smb_token token = token_of(rig_segment_id(0, 0), 3, 2000000 + (uint64_t)i);
        int status = show(rigged->link, &token);
        CHECK(status == SMB_OK);
    }
    return NULL;
}

static void *call(void *argument)
{
    struct rigged *rigged = argument;
    static int64_t ones[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    for (int i = 0; i < CALLS; i++)
        must(rigged->buffer, (struct smb_request){.opcode = SMB_ACCUMULATE,
                                                  .op = SMB_SUM,
                                                  .scale = 1,
                                                  .bytes = sizeof ones,
                                                  .source = ones,
                                                  .timeout_ms = RIG_TIMEOUT_MS});
    return NULL;
}

/* Each new connection is shown the link's tokens before the waiting calls go on there: no call is
 * refused, and each counts once. */
static void tokens_follow_the_link(void)
{
    static struct rigged rigged;
    pthread_t tender, renewer, caller;
    set_up(&rigged);
    struct smb_token token = token_of(rig_segment_id(0, 0), 3, 2000000);
    CHECK_EQ(show(rigged.link, &token), SMB_OK);
    pthread_create(&tender, NULL, tend, &rigged);
    pthread_create(&renewer, NULL, renew, &rigged);
    pthread_create(&caller, NULL, call, &rigged);
    /* A newer connection of the lane that proves itself ends the older one, so each of these breaks
     * the link's connection. */
    for (int i = 0; i < 10; i++) {
        struct smb_client *other;
        usleep(3000);
        CHECK_EQ(smb_client_create(SESSION, &other), SMB_OK);
        struct smb_link *link = connect_to(other, &rigged.rig, 0, 0);
        CHECK_EQ(show(link, &token), SMB_OK);
        smb_link_close(link);
        smb_client_close(other);
        smb_client_destroy(other);
    }
    pthread_join(caller, NULL);
    pthread_join(renewer, NULL);
    static int64_t found[ELEMENTS];
    must(rigged.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(found[i], CALLS);
    smb_client_close(rigged.client);
    pthread_join(tender, NULL);
    take_down(&rigged);
}

/* ---- by record ------------------------------------------------------------------------------- */

enum { BREAKS = 6 };

struct by_record {
    struct rigged rigged;
    struct pump pumps[2 * BREAKS];
    int made;
};

/* Reconnects the link whenever it has no connection; the first connections break, too. */
static void *tend_by_record(void *argument)
{
    struct by_record *self = argument;
    uint64_t id, instance;
    while (smb_client_wait_down(self->rigged.client, RIG_TIMEOUT_MS, &id) == SMB_OK) {
        struct pump *pump = &self->pumps[self->made++];
        /* HELLO and three tokens are four of these answers */
        pump->break_after = self->made < BREAKS ? 9 : 0;
        pump_start(pump, self->rigged.rig.servers[0]);
        CHECK_EQ(smb_link_resume_reference(self->rigged.link, pump->client_end, 0, RIG_TIMEOUT_MS,
                                           &instance),
                 SMB_OK);
    }
    return NULL;
}

/* Tokens are sent by record on an existing connection, and again on each later one: no call is
 * refused. */
static void tokens_travel_by_record(void)
{
    static struct by_record self;
    static int64_t found[ELEMENTS];
    struct rigged *rigged = &self.rigged;
    struct smb_recovery recovery;
    uint64_t instance;
    pthread_t tender;
    rig_start(&rigged->rig, LAYOUT, SMB_INT64);
    struct smb_server *server = rigged->rig.servers[0];
    CHECK_EQ(smb_server_open_journal(server, scratch_path("journal"), &recovery), SMB_OK);
    smb_server_guard(server);
    CHECK_EQ(set_key(server, 4, 1000000), SMB_OK);
    CHECK_EQ(smb_client_create(SESSION, &rigged->client), SMB_OK);
    pump_start(&self.pumps[self.made++], server);
    self.pumps[0].break_after = 20;
    CHECK_EQ(smb_client_connect_reference(rigged->client, self.pumps[0].client_end, 5,
                                          RIG_TIMEOUT_MS, &rigged->link, &instance),
             SMB_OK);
    CHECK_EQ(smb_buffer_create(rigged->client, &LAYOUT, SMB_INT64, &rigged->buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(rigged->buffer, 0, rig_segment_id(0, 0), RIG_EPOCH, rigged->link),
             SMB_OK);
    for (uint64_t i = 0; i < 3; i++) { /* more than one, so that records follow each other */
        struct smb_token token = token_of(rig_segment_id(0, 0) + i, 3, 2000000);
        CHECK_EQ(show(rigged->link, &token), SMB_OK);
    }
    CHECK_EQ(pthread_create(&tender, NULL, tend_by_record, &self), 0);
    for (int i = 0; i < CALLS / 10; i++)
        must(rigged->buffer, add());
    must(rigged->buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    for (int i = 0; i < ELEMENTS; i++)
        CHECK_EQ(found[i], CALLS / 10);
    CHECK(self.made >= BREAKS);
    smb_buffer_destroy(rigged->buffer);
    smb_client_close(rigged->client);
    pthread_join(tender, NULL);
    smb_link_close(rigged->link);
    smb_client_destroy(rigged->client);
    for (int i = 0; i < self.made; i++)
        pump_join(&self.pumps[i]);
    rig_stop(&rigged->rig);
}

/* Without a token a record is refused, too. */
static void records_without_a_token(void)
{
    struct rigged rigged;
    static struct pump pump;
    uint64_t instance;
    rig_start(&rigged.rig, LAYOUT, SMB_INT64);
    smb_server_guard(rigged.rig.servers[0]);
    CHECK_EQ(set_key(rigged.rig.servers[0], 4, 1000000), SMB_OK);
    CHECK_EQ(smb_client_create(SESSION, &rigged.client), SMB_OK);
    pump_start(&pump, rigged.rig.servers[0]);
    CHECK_EQ(smb_client_connect_reference(rigged.client, pump.client_end, 5, RIG_TIMEOUT_MS,
                                          &rigged.link, &instance),
             SMB_OK);
    CHECK_EQ(smb_buffer_create(rigged.client, &LAYOUT, SMB_INT64, &rigged.buffer), SMB_OK);
    CHECK_EQ(smb_buffer_set_link(rigged.buffer, 0, rig_segment_id(0, 0), RIG_EPOCH, rigged.link),
             SMB_OK);
    CHECK_EQ(reach_try(rigged.buffer, add()), SMB_DENIED);
    struct smb_token reader = token_of(rig_segment_id(0, 0), SMB_RIGHT_READ, 2000000);
    CHECK_EQ(show(rigged.link, &reader), SMB_OK);
    CHECK_EQ(reach_try(rigged.buffer, add()), SMB_DENIED);
    static int64_t found[ELEMENTS];
    must(rigged.buffer,
         (struct smb_request){.opcode = SMB_READ, .bytes = sizeof found, .sink = found});
    take_down(&rigged);
    pump_join(&pump);
}

/* A set of keys replaces all earlier ones, whatever their numbers, because the coordinator's clock
 * may have been put back. */
static void keys_are_a_set(void)
{
    struct rigged rigged;
    set_up(&rigged);
    struct smb_server *server = rigged.rig.servers[0];
    struct smb_token token = token_of(rig_segment_id(0, 0), 3, 2000000);
    struct smb_key set[SMB_KEYS_MAX + 1] = {
        {.generation = 1000}, {.generation = 1001}, {.generation = 1002}};
    /* from a clock that is days ahead */
    CHECK_EQ(smb_server_set_keys(server, 3, set, 1000000), SMB_OK);
    CHECK_EQ(why_not(rigged.link, &token), SMB_DENIED_GENERATION);
    for (uint32_t i = 0; i < 3; i++)
        set[i].generation = 3 + i;
    memcpy(set[1].bytes, key, sizeof set[1].bytes);
    CHECK_EQ(smb_server_set_keys(server, 3, set, 1000000), SMB_OK); /* the clock is right again */
    CHECK_EQ(show(rigged.link, &token), SMB_OK);
    CHECK_EQ(smb_server_set_keys(server, 0, set, 1000000), SMB_INVALID);
    CHECK_EQ(smb_server_set_keys(server, SMB_KEYS_MAX + 1, set, 1000000), SMB_INVALID);
    CHECK_EQ(show(rigged.link, &token), SMB_OK);
    take_down(&rigged);
}

/* A proof of an older client, which anybody on the way could use, is refused, with another reason
 * than a wrong proof. */
static void proofs_without_a_bond(void)
{
    struct rig rig;
    rig_start(&rig, LAYOUT, SMB_INT64);
    struct smb_server *server = rig.servers[0];
    CHECK_EQ(set_key(server, 4, 1000000), SMB_OK);
    struct smb_token token = token_of(5, SMB_RIGHT_READ, 2000000);
    struct access_connection here = {
        .nonce = 7, .client_nonce = 8, .instance = 9, .session = SESSION, .lane = 2};
    struct smb_frame frame = {.segment = 5, .epoch = RIG_EPOCH, .session = SESSION};
    uint8_t payload[SMB_AUTHORIZE_BYTES];
    struct grant grant;
    struct access_answer answer;
    uint64_t why = 0;
    access_store(&token, &here, payload);
    CHECK_EQ(access_check(&server->keys, &here, &frame, payload, &grant, &answer, &why), SMB_OK);
    struct access_answer right = access_answer(&token, &here);
    CHECK(access_same_answer(&right, &answer));
    here.bond.bytes[31] ^= 1; /* a different connection */
    CHECK_EQ(access_check(&server->keys, &here, &frame, payload, &grant, &answer, &why),
             SMB_DENIED);
    CHECK_EQ(why, SMB_DENIED_PROOF);
    right = access_answer(&token, &here);
    CHECK(!access_same_answer(&right, &answer));
    access_unbound_proof(token.secret, &here, payload + 16);
    CHECK_EQ(access_check(&server->keys, &here, &frame, payload, &grant, &answer, &why),
             SMB_VERSION);
    CHECK_EQ(why, SMB_DENIED_UNBOUND);
    rig_stop(&rig);
}

/* On the control plane a proof is valid only for its session, segment, rights and time, and a proof
 * made for a data connection is not valid there. */
static void proofs_for_the_control_plane(void)
{
    struct rig rig;
    uint64_t left_ns = 0;
    rig_start(&rig, LAYOUT, SMB_INT64);
    struct smb_server *server = rig.servers[0];
    struct smb_token token = token_of(5, SMB_RIGHT_READ, 2000000), shown = token;
    uint8_t payload[SMB_AUTHORIZE_BYTES];
    struct access_connection here = {.session = SESSION, .lane = ACCESS_CONTROL_LANE};
    static const uint8_t bond[32] = "of the caller's certificate", other[32] = "of who hands it on";
    memcpy(here.bond.bytes, bond, sizeof bond);
    access_store(&token, &here, payload);
    memcpy(shown.secret, payload + 16, SMB_KEY_BYTES);
    CHECK_EQ(smb_server_check_proof(server, SESSION, &shown, bond, &left_ns), SMB_BUSY);
    CHECK_EQ(set_key(server, 4, 1000000), SMB_OK);
    CHECK_EQ(smb_server_check_proof(server, SESSION, &shown, bond, &left_ns), SMB_OK);
    CHECK(left_ns > 900000000000 && left_ns <= 1000000000000);
    CHECK_EQ(smb_server_check_proof(server, SESSION, &shown, other, &left_ns), SMB_DENIED);
    CHECK_EQ(smb_server_check_proof(server, SESSION + 1, &shown, bond, &left_ns), SMB_DENIED);
    struct smb_token wrong[5] = {shown, shown, shown, shown, shown};
    wrong[0].segment++, wrong[1].rights |= SMB_RIGHT_WRITE, wrong[2].expires_ms++, wrong[3].epoch++,
        wrong[4].secret[0] ^= 1;
    for (int i = 0; i < 5; i++)
        CHECK_EQ(smb_server_check_proof(server, SESSION, &wrong[i], bond, &left_ns), SMB_DENIED);
    here.lane = 5;
    access_store(&token, &here, payload);
    memcpy(wrong[4].secret, payload + 16, SMB_KEY_BYTES);
    CHECK_EQ(smb_server_check_proof(server, SESSION, &wrong[4], bond, &left_ns), SMB_DENIED);
    CHECK_EQ(set_key(server, 4, 2000000), SMB_OK); /* the token has expired */
    CHECK_EQ(smb_server_check_proof(server, SESSION, &shown, bond, &left_ns), SMB_DENIED);
    rig_stop(&rig);
}

/* Hundreds of grants on one connection: each is found, and expired ones make room. */
static void grants_of_many_segments(void)
{
    struct grants grants = {0};
    CHECK(!grants_find(&grants, 1));
    for (uint64_t i = 1; i <= 1000; i++)
        CHECK_EQ(grants_put(&grants, &(struct grant){.segment = i * 8,
                                                     .expires_ns = i % 2 ? UINT64_MAX : 1,
                                                     .rights = 1}),
                 SMB_OK);
    CHECK(grants.count < 1000);
    for (uint64_t i = 1; i <= 1000; i += 2)
        CHECK(grants_find(&grants, i * 8) && grants_find(&grants, i * 8)->rights == 1);
    CHECK(!grants_find(&grants, 5) && !grants_find(&grants, 0));
    CHECK_EQ(
        grants_put(&grants, &(struct grant){.segment = 8, .expires_ns = UINT64_MAX, .rights = 3}),
        SMB_OK);
    CHECK_EQ(grants_find(&grants, 8)->rights, 3);
    grants_clear(&grants);
}

/* The examples of FIPS 180-4; tests/security compares HMAC with another implementation. */
static void sha256_of_known_texts(void)
{
    static const struct {
        const char *text;
        uint8_t begins[4];
    } known[] = {
        {"", {0xe3, 0xb0, 0xc4, 0x42}},
        {"abc", {0xba, 0x78, 0x16, 0xbf}},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", {0x24, 0x8d, 0x6a, 0x61}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        struct sha256 hash;
        uint8_t digest[SHA256_BYTES], other[SHA256_BYTES];
        sha256_begin(&hash);
        sha256_add(&hash, known[i].text, strlen(known[i].text));
        sha256_end(&hash, digest);
        CHECK(memcmp(digest, known[i].begins, 4) == 0);
        memcpy(other, digest, sizeof other);
        CHECK(sha256_same(digest, other));
        for (int at = 0; at < SHA256_BYTES; at++) {
            other[at] ^= 0x10;
            CHECK(!sha256_same(digest, other));
            other[at] ^= 0x10;
        }
    }
}

/* A change whose token expires before its answer is not refused: it was, and its client made it
 * again, although the backup had it. */
static void a_change_outlives_its_token(void)
{
    struct pair pair;
    uint64_t now_ms = 1000000;
    int status;
    pair_start(&pair, SMB_INT64, 1);
    smb_server_guard(pair.servers[0]);
    CHECK_EQ(set_key(pair.servers[0], 4, now_ms), SMB_OK);
    struct user user = use(&pair, SESSION);
    int64_t one = 1, back;
    struct smb_request fetch = {.opcode = SMB_ACCUMULATE,
                                .bytes = 8,
                                .source = &one,
                                .sink = &back,
                                .op = SMB_SUM,
                                .scale = 1.0,
                                .timeout_ms = 2000};
    /* repeated until the change was made before the token expired, which takes long on a busy
     * machine */
    do {
        struct smb_token token = token_in(1, ID, 3, now_ms + 1000);
        CHECK_EQ(set_key(pair.servers[0], 4, now_ms), SMB_OK);
        CHECK_EQ(show(user.link, &token), SMB_OK);
        status = reach_try(user.buffer, fetch);
        now_ms += 1000000;
    } while (status_of(&pair, 0).unconfirmed == 0);
    CHECK(status == SMB_LINK_LOST || status == SMB_TIMEOUT); /* unknown outcome */
    leave(&user);
    stop(&pair);
}

int main(void)
{
    static const struct test tests[] = {TEST(rights_on_a_link),
                                        TEST(servers_prove_tokens),
                                        TEST(tokens_follow_the_link),
                                        TEST(grants_of_many_segments),
                                        TEST(tokens_travel_by_record),
                                        TEST(records_without_a_token),
                                        TEST(a_change_outlives_its_token),
                                        TEST(proofs_without_a_bond),
                                        TEST(proofs_for_the_control_plane),
                                        TEST(keys_are_a_set),
                                        TEST(sha256_of_known_texts)};
    return RUN_TESTS(tests);
}
