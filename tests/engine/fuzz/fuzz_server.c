/* A real server, spoken to over its socket by several connections: frames that are right, nearly
 * right, and bytes that are none; tokens, good and bad; sessions that repeat themselves, take over
 * their own lane, and end; sessions whose requests are records, with payloads in slots, in somebody
 * else's, or in none, that change after they were sent. Whatever comes, it goes on serving, and the
 * segment that no frame changes and the slots that are nobody's keep their bytes. */
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "channel/access.h"
#include "base/frame.h"
#include "fuzz.h"
#include "memory/segment.h"
#include "server/feed.h"
#include "smb/kernels.h"
#include "smb/server.h"

enum {
    WITNESS = 0x1111,
    SCRATCH = 0x2222,
    FLOATS = 0x3333,
    STEPS = 0x4444 /* three of them */,
    PRIMARY = 0x6666, /* of two copies; it goes on alone */
    BACKUP = 0x7773,  /* its primary is a peer, whose session has this number */
    EPOCH = 5,
    BYTES = 65536,
    CHUNK = 16384,
    PEERS = 3,
    SLOTS = 2,
    FRAME_MAX = 64 + 8 + 2 * CHUNK + 4
};

struct peer {
    int fd; /* -1: none now */
    uint64_t session;
    uint64_t sequence;
    uint64_t nonce;
    struct bond bond;
    struct smb_slots *slots; /* by reference; of this connection */
};

static const uint8_t key[SMB_KEY_BYTES] = {1, 2, 3};

/* The second asks for no tokens, and is fed a copy: a guarded one is fed inside TLS alone. */
static struct smb_server *server, *fed;
static struct smb_segment *witness;
static struct smb_slots *bystander; /* slots as a client's are, between theirs */
static char socket_path[128], fed_path[128];
static uint64_t sessions;
static uint64_t good_answers[2][SMB_OPCODE_COUNT]; /* the second: by reference */
/* what it last answered: tokens, rounds, versions, to be said back to it */
static uint64_t reply[SMB_OPCODE_COUNT];

/* Input that reaches nothing proves nothing. */
static void tell_reached(void)
{
    static const char *const titles[] = {"  answered OK, by opcode: ", "  and by reference: "};
    for (int how = 0; how < 2; how++) {
        for (int opcode = SMB_READ; opcode < SMB_OPCODE_COUNT; opcode++)
            printf("%s%llu", opcode == SMB_READ ? titles[how] : " ",
                   (unsigned long long)good_answers[how][opcode]);
        printf("\n");
    }
}

static uint8_t pattern(uint64_t i)
{
    return (uint8_t)(i % 251 + 1);
}

static void start(void)
{
    struct smb_recovery recovery;
    strcpy(socket_path, fuzz_path("socket"));
    MUST(smb_server_create(1, 1, 1 << 26, &server) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("witness"), WITNESS, EPOCH, SMB_INT64, BYTES,
                                   CHUNK) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("scratch"), SCRATCH, EPOCH, SMB_INT64, BYTES,
                                   CHUNK) == SMB_OK);
    MUST(smb_server_create_segment(server, fuzz_path("floats"), FLOATS, EPOCH, SMB_FLOAT32, BYTES,
                                   CHUNK) == SMB_OK);
    for (uint64_t i = 0; i < SMB_APPLY_SEGMENTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "step-%d", (int)i);
        MUST(smb_server_create_segment(server, fuzz_path(name), STEPS + i, EPOCH, SMB_FLOAT32,
                                       BYTES, CHUNK) == SMB_OK);
    }
    MUST(smb_server_create_replica(server, fuzz_path("primary"), PRIMARY, 0, 1, SMB_INT64, BYTES,
                                   CHUNK) == SMB_OK);
    MUST(smb_server_set_replica(server, PRIMARY, EPOCH, SMB_REPLICA_PRIMARY, false, false,
                                "peer") == SMB_OK);
    strcpy(fed_path, fuzz_path("fed"));
    MUST(smb_server_create(2, 1, 1 << 26, &fed) == SMB_OK);
    MUST(smb_server_create_replica(fed, fuzz_path("backup"), BACKUP, 0, 1, SMB_INT64, BYTES,
                                   CHUNK) == SMB_OK);
    MUST(smb_server_set_replica(fed, BACKUP, EPOCH, SMB_REPLICA_BACKUP, true, false, "peer") ==
         SMB_OK);
    MUST(smb_server_listen_unix(fed, fed_path) == SMB_OK);
    MUST(smb_server_open_journal(server, fuzz_path("journal"), &recovery) == SMB_OK);
    smb_server_guard(server);
    struct smb_key set = {.generation = 1};
    memcpy(set.bytes, key, sizeof set.bytes);
    MUST(smb_server_set_keys(server, 1, &set, 1000) == SMB_OK);
    MUST(smb_server_listen_unix(server, socket_path) == SMB_OK);
    MUST(smb_segment_open(fuzz_path("witness"), &witness) == SMB_OK);
    uint8_t *bytes = smb_segment_data(witness);
    for (uint64_t i = 0; i < BYTES; i++)
        bytes[i] = pattern(i);
    MUST(smb_server_take_slots(server, SLOTS, &bystander) == SMB_OK);
    for (uint32_t i = 0; i < SLOTS; i++)
        memset(smb_slots_payload(bystander, i), 77, SMB_CHUNK_BYTES_MAX);
    atexit(tell_reached);
}

static void check_witness(void)
{
    const uint8_t *bytes = smb_segment_data(witness);
    for (uint64_t i = 0; i < BYTES; i++)
        MUST(bytes[i] == pattern(i));
    for (uint32_t i = 0; i < SLOTS; i++) {
        const uint8_t *payload = smb_slots_payload(bystander, i);
        MUST(payload[0] == 77 && memcmp(payload, payload + 1, SMB_CHUNK_BYTES_MAX - 1) == 0);
    }
}

static void count_answer(const struct peer *peer, const uint8_t *bytes)
{
    struct smb_frame frame;
    if (smb_frame_parse(bytes, &frame) != SMB_OK || !(frame.flags & SMB_FLAG_REPLY) ||
        frame.status != SMB_OK)
        return;
    good_answers[peer->slots != NULL][frame.opcode]++;
    reply[frame.opcode] = frame.argument;
}

static bool by_reference(const struct peer *peer)
{
    return peer->session % 8 == 2 || peer->session % 8 >= 6;
}

static uint16_t lane_of(const struct peer *peer)
{
    return peer->session == BACKUP ? REPLICA_LANE : 3;
}

/* Every fourth session has checksums. */
static uint16_t flags_of(const struct peer *peer)
{
    return peer->session % 4 == 0 ? SMB_FLAG_CHECKSUM : 0;
}

/* Of a token with these rights, as the coordinator makes it and a client proves it. */
static void store_token(const struct peer *peer, uint64_t segment, uint32_t rights,
                        uint8_t *payload)
{
    struct smb_token token = {.segment = segment,
                              .epoch = EPOCH,
                              .rights = rights,
                              .generation = 1,
                              .expires_ms = UINT64_MAX / 4 / 1000000};
    struct access_connection connection = {.nonce = peer->nonce,
                                           .instance = 1,
                                           .session = peer->session,
                                           .lane = lane_of(peer),
                                           .bond = peer->bond};
    uint8_t text[56] = "smb token 1";
    smb_store64(text + 16, peer->session);
    smb_store64(text + 24, segment);
    smb_store64(text + 32, EPOCH | (uint64_t)rights << 32);
    smb_store64(text + 40, 1);
    smb_store64(text + 48, token.expires_ms);
    smb_hmac_sha256(key, sizeof key, text, sizeof text, token.secret);
    access_store(&token, &connection, payload);
}

/* All at once. The witness may be read alone. */
static void show_tokens(struct peer *peer)
{
    static const uint64_t granted[] = {SCRATCH,   FLOATS,  STEPS,  STEPS + 1,
                                       STEPS + 2, PRIMARY, WITNESS};
    enum { COUNT = sizeof granted / sizeof *granted };
    uint8_t bytes[COUNT * SMB_RECORD_BYTES] = {0};
    uint8_t *at = bytes;
    struct smb_frame frame = {.opcode = SMB_AUTHORIZE,
                              .flags = flags_of(peer),
                              .session = peer->session,
                              .lane = lane_of(peer),
                              .epoch = EPOCH};
    frame.payload = SMB_AUTHORIZE_BYTES + smb_frame_checksum_bytes(&frame);
    for (int i = 0; i < COUNT; i++) {
        frame.segment = granted[i];
        smb_frame_encode(&frame, at);
        store_token(peer, granted[i],
                    SMB_RIGHT_READ | (granted[i] == WITNESS ? 0 : SMB_RIGHT_WRITE),
                    at + SMB_FRAME_BYTES);
        if (frame.flags & SMB_FLAG_CHECKSUM)
            smb_store_checksum(at + SMB_FRAME_BYTES + SMB_AUTHORIZE_BYTES,
                               smb_crc32c(0, at, SMB_FRAME_BYTES + SMB_AUTHORIZE_BYTES));
        at += peer->slots ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + frame.payload;
    }
    ssize_t whole = at - bytes,
            answer = SMB_FRAME_BYTES + (ssize_t)smb_frame_checksum_bytes(&frame);
    MUST(write(peer->fd, bytes, (size_t)whole) == whole);
    MUST(recv(peer->fd, bytes, (size_t)(COUNT * answer), MSG_WAITALL) == COUNT * answer);
    for (int i = 0; i < COUNT; i++)
        MUST(smb_frame_parse(bytes + i * answer, &frame) == SMB_OK && frame.status == SMB_OK);
}

static void reach_server(struct peer *peer)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int ends[2];
    if (by_reference(peer)) {
        MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        MUST(smb_server_take_slots(server, SLOTS, &peer->slots) == SMB_OK);
        MUST(smb_server_adopt_reference(server, ends[0], peer->slots) == SMB_OK);
        peer->fd = ends[1];
        return;
    }
    strcpy(name.sun_path, peer->session == BACKUP ? fed_path : socket_path);
    peer->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(peer->fd >= 0 && connect(peer->fd, (struct sockaddr *)&name, sizeof name) == 0);
}

/* A connection of the same session is of the same lane: it fences the one before. */
static void peer_connect(struct peer *peer)
{
    reach_server(peer);
    struct smb_frame hello = {.opcode = SMB_HELLO,
                              .flags = flags_of(peer),
                              .session = peer->session,
                              .lane = lane_of(peer),
                              .argument = by_reference(peer) ? 0 : bond_namespaces()};
    uint64_t namespaces = hello.argument;
    hello.payload = smb_frame_checksum_bytes(&hello);
    uint8_t bytes[SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES];
    ssize_t count = SMB_FRAME_BYTES + hello.payload;
    smb_frame_encode(&hello, bytes);
    smb_store_checksum(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES));
    MUST(write(peer->fd, bytes, (size_t)count) == count);
    MUST(recv(peer->fd, bytes, (size_t)count, MSG_WAITALL) == count &&
         smb_frame_parse(bytes, &hello) == SMB_OK);
    peer->nonce = hello.offset;
    struct channel channel = {.fd = peer->fd};
    MUST(bond_of(&channel, by_reference(peer), false, namespaces, hello.length & SMB_BOND_HAS_IDS,
                 &peer->bond) == SMB_OK);
    if (peer->session % 16 == 7 || peer->session % 16 == 9 || peer->session == BACKUP)
        return; /* these have nothing to show */
    show_tokens(peer);
}

/* Until it has closed the connection, or (not `to_the_end`) has nothing more to say now. */
static void peer_listen(struct peer *peer, bool to_the_end)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    ssize_t count;
    while ((count = recv(peer->fd, bytes, sizeof bytes, to_the_end ? 0 : MSG_DONTWAIT)) > 0)
        if (count == (ssize_t)sizeof bytes)
            /* data in between is taken for what it is not, and not counted */
            count_answer(peer, bytes);
}

static void peer_leave(struct peer *peer)
{
    if (peer->fd < 0)
        return;
    shutdown(peer->fd, SHUT_WR);
    peer_listen(peer, true);
    close(peer->fd);
    peer->fd = -1;
    if (peer->slots)
        smb_slots_release(peer->slots);
    peer->slots = NULL;
}

static uint32_t payload_of(const struct smb_frame *frame)
{
    uint32_t token = smb_frame_fence_bytes(frame) + smb_frame_checksum_bytes(frame);
    int wire = smb_frame_wire(frame);
    uint32_t element = smb_dtype_bytes(frame->dtype);
    switch (frame->opcode) {
    case SMB_WRITE:
    case SMB_ACCUMULATE:
        if (wire == SMB_WIRE_SPARSE && element > 0)
            return token + (1 + frame->length / element / 3) * (SMB_WIRE_INDEX_BYTES + element);
        return token + (wire == SMB_WIRE_EXACT ? frame->length
                                               : (uint32_t)smb_wire_bytes(wire, frame->length / 4));
    case SMB_ACCUMULATE_FROM: return token + SMB_FROM_BYTES;
    case SMB_COMPARE_SWAP: return token + 8;
    case SMB_APPLY: return token + SMB_APPLY_BYTES;
    case SMB_AUTHORIZE: return smb_frame_checksum_bytes(frame) + SMB_AUTHORIZE_BYTES;
    default:
        return smb_opcode_waits(frame->opcode) ? SMB_SYNC_BYTES + smb_frame_checksum_bytes(frame)
                                               : token;
    }
}

/* A frame that the server has nothing against; what a lock, a version or a round is now it may know
 * better. */
static struct smb_frame good_frame(struct input *input, struct peer *peer)
{
    static const uint32_t lengths[] = {8, 16, 24, 4096, 4104, 8192, 12288, CHUNK};
    struct smb_frame frame = {
        .opcode = (uint8_t)(SMB_READ + take(input, 1) % (SMB_OPCODE_COUNT - SMB_READ)),
        .lane = lane_of(peer),
        .epoch = EPOCH,
        .session = peer->session,
        .sequence = ++peer->sequence,
        .segment = SCRATCH,
        .flags = flags_of(peer)};
    uint64_t copies = take(input, 1);
    if (peer->session == BACKUP || copies >= 224)
        frame.segment = peer->session == BACKUP || copies % 2 ? BACKUP : PRIMARY;
    if (peer->session == BACKUP && copies < 64)
        frame.opcode = SMB_REPLICATE; /* nothing goes before the first */
    if (peer->session == BACKUP && copies >= 64 && copies < 128)
        frame.opcode = SMB_COPY;
    if (frame.opcode == SMB_COPY) {
        frame.op = (uint8_t)(copies % 4);
        frame.dtype = SMB_INT64;
        frame.length = frame.op == SMB_COPIED_CHUNK ? CHUNK : 0;
        frame.offset = frame.op == SMB_COPIED_CHUNK ? copies % 16 / 4 * CHUNK : copies % 2;
        frame.argument = copies;
        frame.payload = frame.op == SMB_COPIED_CHUNK    ? CHUNK
                        : frame.op == SMB_COPIED_RECORD ? SMB_COPIED_RECORD_BYTES
                                                        : 0;
        frame.payload += smb_frame_checksum_bytes(&frame);
        return frame;
    }
    if (frame.opcode == SMB_WATERMARK || frame.opcode == SMB_AUTHORIZE ||
        frame.opcode == SMB_REPLICATE || frame.opcode == SMB_REFUSED) {
        frame.payload = payload_of(&frame);
        return frame;
    }
    if (smb_opcode_waits(frame.opcode)) {
        frame.argument = frame.opcode <= SMB_FENCE ? take(input, 1) % 2 : 0;
        frame.payload = payload_of(&frame);
        return frame;
    }
    bool word = frame.opcode == SMB_FETCH_ADD || frame.opcode == SMB_COMPARE_SWAP;
    uint64_t where = take(input, 2);
    frame.dtype = SMB_INT64;
    frame.length = word ? 8 : lengths[take(input, 1) % 8];
    frame.offset = where % 4 * CHUNK + where / 4 * 8 % (CHUNK - frame.length + 8);
    frame.op = (uint8_t)(SMB_SUM + where % 5);
    bool scaled = frame.opcode == SMB_ACCUMULATE || frame.opcode == SMB_ACCUMULATE_FROM;
    frame.argument = scaled ? smb_bits_of((double)(where % 3)) : where;
    if (frame.opcode == SMB_ACCUMULATE && where & 64)
        frame.flags |= SMB_FLAG_FETCH;
    if (where & 128 && smb_opcode_changes(frame.opcode))
        frame.flags |= where & 4096 ? SMB_FLAG_FENCED | SMB_FLAG_WARDEN : SMB_FLAG_FENCED;
    if (frame.opcode == SMB_APPLY) {
        frame.segment = FLOATS;
        frame.dtype = SMB_FLOAT32;
        frame.op = (uint8_t)(SMB_RULE_SGD + where % 6);
    }
    if (where & 256 && frame.opcode <= SMB_ACCUMULATE) {
        uint64_t wire = where >> 9 & 7;
        frame.segment = FLOATS;
        frame.dtype = SMB_FLOAT32;
        if (wire <= SMB_WIRE_INT8 || wire == SMB_WIRE_INT4 ||
            (wire == SMB_WIRE_SPARSE && frame.opcode == SMB_ACCUMULATE))
            frame.flags |= (uint16_t)(wire << SMB_FLAG_WIRE_SHIFT);
        if (wire == SMB_WIRE_SPARSE)
            frame.flags &= (uint16_t)~SMB_FLAG_FETCH;
    }
    frame.payload = payload_of(&frame);
    if (frame.opcode == SMB_APPLY && where & 2048)
        frame.payload += frame.length; /* it brings its gradient */
    return frame;
}

/* One field is not what it was. */
static void spoil(struct input *input, struct smb_frame *frame)
{
    uint64_t what = take(input, 1), value = take(input, 1);
    switch (what % 12) {
    case 0: frame->sequence = value % (frame->sequence + 1); break; /* said again, or never said */
    case 1: frame->sequence += value << (value % 57); break;
    case 2: frame->flags ^= SMB_FLAG_RETRY; break;
    case 3: frame->flags ^= value % 2 ? SMB_FLAG_FENCED : SMB_FLAG_WARDEN; break;
    case 4: frame->flags ^= SMB_FLAG_FETCH; break;
    case 5: frame->offset = value << (value % 57); break;
    case 6: frame->length = (uint32_t)value << (value % 16); break;
    case 7: frame->segment = value % 2 ? WITNESS + 0x10000 : 0; break;
    case 8: frame->epoch ^= (uint32_t)value; break;
    case 9: frame->dtype = (uint8_t)(value % 9); break;
    case 10: frame->argument = value % 2 ? smb_bits_of(1.0 / 0.0) : UINT64_MAX - value; break;
    default: frame->op = (uint8_t)value; break;
    }
    frame->payload = payload_of(frame);
    if (frame->payload > FRAME_MAX - SMB_FRAME_BYTES)
        frame->payload = 0;
    if (frame->opcode == SMB_READ || !smb_opcode_changes(frame->opcode) || what < 128)
        return;
    frame->payload = (uint32_t)value; /* and its length is a lie */
}

/* The words with which it would be granted. */
static void fit_words(const struct smb_frame *frame, uint8_t *payload)
{
    switch (frame->opcode) {
    case SMB_LOCK:
        smb_store64(payload, 1000);
        smb_store64(payload + 8, smb_load64(payload + 8) % 3);
        break;
    case SMB_RENEW: smb_store64(payload + 8, 1000); /* fallthrough */
    case SMB_UNLOCK:
    case SMB_FENCE: smb_store64(payload, reply[SMB_LOCK]); break;
    case SMB_ARRIVE: smb_store64(payload, 1 + reply[SMB_PIN] % PEERS); break;
    case SMB_AWAIT_BARRIER:
        smb_store64(payload, reply[SMB_ARRIVE]);
        smb_store64(payload + 8, smb_load64(payload + 8) % 3);
        break;
    case SMB_AWAIT_VERSION:
        smb_store64(payload, reply[SMB_AWAIT_VERSION] + smb_load64(payload) % 2);
        break;
    case SMB_PUBLISH:
        smb_store64(payload, reply[SMB_LOCK]);
        smb_store64(payload + 8, reply[SMB_AWAIT_VERSION] + 1);
        break;
    case SMB_ACCUMULATE_FROM:
        smb_store64(payload, smb_load64(payload) % 2 ? WITNESS : SCRATCH);
        break;
    case SMB_UNPIN: smb_store64(payload, reply[SMB_PIN]); break;
    default:
        if (frame->flags & SMB_FLAG_FENCED)
            smb_store64(payload, reply[SMB_LOCK]);
        if (smb_frame_fence_bytes(frame) > SMB_TOKEN_BYTES &&
            frame->payload >= SMB_TOKEN_BYTES + SMB_WARDEN_BYTES)
            smb_store64(payload + SMB_TOKEN_BYTES, reply[SMB_LOCK] % 3 ? SCRATCH : FLOATS);
    }
}

/* A step that can be; sometimes of segments that stand in for each other. */
static void fit_step(struct input *input, const struct smb_frame *frame, uint8_t *payload)
{
    uint8_t *words = payload + smb_frame_fence_bytes(frame);
    uint64_t how = take(input, 1);
    struct smb_hyper hyper = {.lr = 0.5,
                              .scale = (double)(how % 3),
                              .weight_decay = how % 5 ? 0 : 0.25,
                              .mu = 0.5,
                              .beta1 = 0.5,
                              .beta2 = 0.75,
                              .eps = 0.125,
                              .step = (double)(how % 16),
                              .alpha = 0.5};
    for (int i = 0; i < SMB_APPLY_SEGMENTS; i++)
        smb_store64(words + 8 * i, i <= smb_rule_states(frame->op) ? STEPS + (uint64_t)i : 0);
    if (how >= 192)
        smb_store64(words + 8 * (how % SMB_APPLY_SEGMENTS), STEPS - 1 + how / 3 % 5);
    if (how >= 240)
        smb_store64(words + 8 * (how % SMB_APPLY_SEGMENTS), how % 2 ? FLOATS : WITNESS);
    if (smb_frame_brings(frame))
        smb_store64(words, 0);
    smb_store_hyper(words + 8 * SMB_APPLY_SEGMENTS, &hyper);
}

/* Tokens, times, rounds, versions; another segment's name and a place in it. */
static void fill_payload(struct input *input, const struct peer *peer,
                         const struct smb_frame *frame, uint8_t *payload)
{
    static const uint64_t words[] = {
        0, 1, 2, 3, 4, 5, 1000, SCRATCH, WITNESS, CHUNK, BYTES - 8, UINT64_MAX, UINT64_MAX / 2};
    uint64_t fitting = take(input, 1) % 4;
    memset(payload, 0, frame->payload);
    uint32_t words_end = frame->opcode == SMB_APPLY ? SMB_TOKEN_BYTES + SMB_APPLY_BYTES
                                                    : SMB_SYNC_BYTES;
    for (uint32_t i = 0; i + 8 <= frame->payload && i < words_end; i += 8)
        smb_store64(payload + i, words[take(input, 1) % (sizeof words / sizeof *words)]);
    bool has_words = frame->payload >= SMB_FROM_BYTES && frame->opcode != SMB_WRITE &&
                     frame->opcode != SMB_ACCUMULATE && frame->opcode != SMB_APPLY;
    if (smb_frame_wire(frame) == SMB_WIRE_SPARSE) {
        /* ascending, or nearly; a quarter is left as it is */
        uint32_t entry = SMB_WIRE_INDEX_BYTES + smb_dtype_bytes(frame->dtype), next = 0;
        for (uint32_t at = smb_frame_fence_bytes(frame); fitting && at + entry <= frame->payload;
             at += entry, next += 1 + (uint32_t)fitting % 2)
            memcpy(payload + at, &next, sizeof next);
    }
    if (fitting && frame->opcode == SMB_APPLY && smb_frame_body(frame) >= SMB_APPLY_BYTES)
        fit_step(input, frame, payload);
    if (fitting && frame->opcode == SMB_AUTHORIZE && smb_frame_body(frame) == SMB_AUTHORIZE_BYTES)
        store_token(peer, frame->segment, (uint32_t)fitting, payload);
    else if (fitting &&
             (has_words || (frame->flags & SMB_FLAG_FENCED && frame->payload >= SMB_TOKEN_BYTES)))
        fit_words(frame, payload);
}

static size_t make_frame(struct input *input, struct peer *peer, uint8_t *bytes)
{
    uint64_t how = take(input, 1);
    struct smb_frame frame = good_frame(input, peer);
    if (how % 4 == 0)
        spoil(input, &frame);
    smb_frame_encode(&frame, bytes);
    fill_payload(input, peer, &frame, bytes + SMB_FRAME_BYTES);
    size_t count = SMB_FRAME_BYTES + frame.payload;
    if (frame.flags & SMB_FLAG_CHECKSUM && frame.payload >= SMB_CHECKSUM_BYTES)
        smb_store_checksum(bytes + count - SMB_CHECKSUM_BYTES,
                           smb_crc32c(0, bytes, count - SMB_CHECKSUM_BYTES));
    if (how % 32 == 1)
        bytes[take(input, 1) % SMB_FRAME_BYTES] ^= (uint8_t)take(input, 1);
    if (how % 32 == 2)
        count = take(input, 2) % (count + 1); /* what follows is read as its rest */
    if (smb_load64(bytes + 32) == WITNESS)    /* the header's segment: its bytes are to stay */
        smb_store64(bytes + 32, SCRATCH);
    return count;
}

/* A whole frame as a record: elements in a slot, which is one of its own or is not; the rest in its
 * small part. */
static uint8_t *make_record(struct input *input, const struct peer *peer, uint8_t *bytes,
                            size_t count)
{
    static const uint64_t wrong[] = {SLOTS,           63,         1U << 31, (uint64_t)1 << 32,
                                     SMB_NO_SLOT - 1, SMB_NO_SLOT};
    uint64_t which = take(input, 1),
             slot = which < 224 ? which % SLOTS : wrong[which % (sizeof wrong / sizeof *wrong)];
    uint8_t *payload = smb_slots_payload(peer->slots, slot < SLOTS ? (uint32_t)slot : 0);
    uint8_t opcode = bytes[3], *small = bytes + SMB_RECORD_SMALL_AT;
    size_t body = count > SMB_FRAME_BYTES ? count - SMB_FRAME_BYTES : 0, token = 0;
    if (opcode == SMB_WRITE || opcode == SMB_ACCUMULATE) {
        token = bytes[6] & SMB_FLAG_FENCED ? SMB_TOKEN_BYTES : 0;
        if (token && bytes[7] & SMB_FLAG_WARDEN >> 8)
            token += SMB_WARDEN_BYTES;
        token = body >= token ? token : 0;
        memcpy(payload, small + token, body - token);
        body = token;
    }
    if (body < SMB_RECORD_SMALL_BYTES)
        memset(small + body, 0, SMB_RECORD_SMALL_BYTES - body);
    memset(bytes + SMB_RECORD_ENDS_AT, 0, SMB_RECORD_ENDS_BYTES);
    smb_store64(bytes + SMB_RECORD_ENDS_AT, slot);
    return payload;
}

static void speak_by_reference(struct peer *peer, struct input *input)
{
    static uint8_t bytes[FRAME_MAX];
    uint64_t how = take(input, 1);
    uint8_t *payload = make_record(input, peer, bytes, make_frame(input, peer, bytes));
    /* what follows is read as its rest */
    size_t count = how % 32 == 2 ? take(input, 1) % SMB_RECORD_BYTES : SMB_RECORD_BYTES;
    bool sent = send(peer->fd, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)count;
    if (how >= 128) /* nobody keeps a network card from that */
        memset(payload, (int)take(input, 1), SMB_CHUNK_BYTES_MAX / 64);
    if (sent)
        peer_listen(peer, false);
    else
        peer_leave(peer);
}

static void speak(struct peer *peer, struct input *input)
{
    static uint8_t bytes[FRAME_MAX];
    if (peer->slots) {
        speak_by_reference(peer, input);
        return;
    }
    size_t count = make_frame(input, peer, bytes);
    if (send(peer->fd, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)count)
        peer_leave(peer); /* closed by the server, or full: what waits there has been told */
    else
        peer_listen(peer, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint64_t runs;
    if (!server)
        start();
    struct input input = {data, data + size};
    struct peer peers[PEERS];
    for (int i = 0; i < PEERS; i++)
        peers[i] = (struct peer){.fd = -1, .session = ++sessions % 16 == 3 ? BACKUP : sessions};
    while (input.at < input.end) {
        uint64_t step = take(&input, 1);
        struct peer *peer = &peers[step % PEERS];
        struct peer older = *peer;
        if (peer->fd >= 0 && step >= 250) {
            peer_leave(peer);
        } else if (peer->fd >= 0 && step >= 244) {
            peer_connect(peer); /* the lane is this one's now */
            peer_leave(&older);
        }
        if (peer->fd < 0)
            peer_connect(peer);
        else
            speak(peer, &input);
    }
    for (int i = 0; i < PEERS; i++) {
        peer_leave(&peers[i]);
        if (peers[i].session != BACKUP)
            smb_server_end_session(server, peers[i].session); /* what it still holds is given up */
    }
    if (++runs % 16 == 0)
        check_witness();
    return 0;
}
