/* One peer of the daemon: a state machine that never blocks. Its loop calls connection_turn when the socket has something,
 * has room again, or when a parked request is to be tried once more. One request is in hand at a time; the peer may send many
 * more meanwhile: they wait in the socket. Answers leave in the order of the requests. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "server/server.h"

enum step { STEP_ON, STEP_WAIT, STEP_CLOSE };

struct connection *connection_create(struct loop *loop, int fd, int transport)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection)
        return NULL;
    if (transport == SMB_TRANSPORT_TCP) {
        int on = 1; /* an answer must not wait for the next one; failure costs time, not correctness */
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    connection->loop = loop;
    connection->channel.fd = fd;
    connection->transport = transport;
    connection->opened_ns = smb_now_ns();
    connection->pass_fd = -1;
    pthread_mutex_init(&connection->turn, NULL);
    server_count(&loop->server->opened[transport], 1);
    server_count(&loop->server->now[transport], 1);
    return connection;
}

void connection_destroy(struct connection *connection)
{
    strangers_leave(connection);
    lanes_leave(connection);
    waits_forget(connection);
    grants_clear(&connection->grants);
    pthread_mutex_destroy(&connection->turn);
    gate_done(&connection->request);
    if (connection->pass_segment)
        smb_segment_release(connection->pass_segment);
    atomic_fetch_sub_explicit(&connection->loop->server->now[connection->transport], 1, memory_order_relaxed);
    channel_close(&connection->channel);
    if (connection->secures)
        smb_tls_release(connection->secures);
    if (connection->slot.payload)
        journal_give_slot(connection->loop->server->journal, &connection->slot);
    if (connection->slots)
        smb_slots_release(connection->slots);
    free(connection->own_staging);
    free(connection->tail);
    free(connection);
}

void connection_be_stranger(struct connection *connection, struct smb_tls *tls)
{
    connection->secures = tls;
    strangers_enter(connection);
}

bool connection_is_empty(const struct connection *connection)
{
    return connection->wait == WAIT_INPUT && !connection->have_request && !connection->waits && !connection->answered;
}

bool connection_is_silent(const struct connection *connection, uint64_t now_ns)
{
    return !connection->proven && now_ns > connection->opened_ns + (uint64_t)HELLO_DEADLINE_MS * 1000000U;
}

static enum step refuse(struct connection *connection, int why)
{
    server_count(&connection->loop->server->errors[why], 1);
    return STEP_CLOSE;
}

/* ---- sending ------------------------------------------------------------------------------------------------------ */

static bool all_sent(const struct connection *connection)
{
    return connection->out_start == connection->out_end && connection->tail_start == connection->tail_end &&
           !channel_has_unsent(&connection->channel);
}

/* Sends the replies in `out`, then the parts, as far as the socket takes them; parts[0] is left free for the replies. *sent says
 * how much of the other parts went. */
static enum step send_with(struct connection *connection, struct iovec *parts, size_t count, uint64_t *sent)
{
    uint32_t replies = connection->out_end - connection->out_start;
    parts[0] = (struct iovec){connection->out + connection->out_start, replies};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    if (connection->pass_fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &connection->pass_fd, sizeof(int));
    }
    *sent = 0;
    ssize_t done = connection->pass_fd < 0 ? channel_write(&connection->channel, parts, (int)count)
                                           : sendmsg(connection->channel.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0)
        return channel_failed(done) ? STEP_CLOSE : STEP_ON; /* the peer is gone: no error of ours */
    if (connection->pass_fd >= 0) {
        smb_segment_release(connection->pass_segment);
        connection->pass_segment = NULL;
        connection->pass_fd = -1;
    }
    if ((uint64_t)done >= replies) {
        *sent = (uint64_t)done - replies;
        connection->out_start = connection->out_end = 0;
        connection->replies_held = 0;
    } else {
        connection->out_start += (uint32_t)done;
    }
    return STEP_ON;
}

static enum step flush(struct connection *connection)
{
    if (all_sent(connection))
        return STEP_ON;
    uint64_t sent;
    uint32_t bytes = connection->tail_end - connection->tail_start;
    struct iovec parts[2];
    if (bytes)
        parts[1] = (struct iovec){connection->tail + connection->tail_start, bytes};
    enum step step = send_with(connection, parts, bytes ? 2 : 1, &sent);
    connection->tail_start += (uint32_t)sent;
    if (connection->tail_start == connection->tail_end)
        connection->tail_start = connection->tail_end = 0;
    return step;
}

/* Before it waits for anything a connection sends what it has; if the socket is full it waits for room instead: a peer that
 * does not read is not served further. */
static enum step wait_for(struct connection *connection, enum connection_wait wait)
{
    if (flush(connection) == STEP_CLOSE)
        return STEP_CLOSE;
    connection->wait = all_sent(connection) ? wait : WAIT_OUTPUT;
    return STEP_WAIT;
}

static void put_reply(struct connection *connection, struct smb_frame *reply)
{
    uint8_t *header = connection->out + connection->out_end;
    reply->payload = smb_frame_checksum_bytes(reply);
    smb_frame_encode(reply, header);
    connection->out_end += SMB_FRAME_BYTES;
    if (reply->payload > 0) {
        smb_store_checksum(header + SMB_FRAME_BYTES, smb_crc32c(0, header, SMB_FRAME_BYTES));
        connection->out_end += SMB_CHECKSUM_BYTES;
    }
}

/* With so many bytes of data, which are in `tail`. */
static void put_reply_with_tail(struct connection *connection, struct smb_frame *reply, uint32_t bytes)
{
    uint8_t *header = connection->out + connection->out_end;
    reply->payload = bytes + smb_frame_checksum_bytes(reply);
    smb_frame_encode(reply, header);
    connection->out_end += SMB_FRAME_BYTES;
    if (reply->payload > bytes)
        smb_store_checksum(connection->tail + bytes,
                       smb_crc32c(smb_crc32c(0, header, SMB_FRAME_BYTES), connection->tail, bytes));
    connection->tail_start = 0;
    connection->tail_end = reply->payload;
}

/* By reference: so many bytes of data are in the slot that the request named. */
static void put_reply_by_reference(struct connection *connection, struct smb_frame *reply, uint32_t bytes)
{
    reply->payload = bytes;
    smb_frame_encode(reply, connection->out + connection->out_end);
    connection->out_end += SMB_FRAME_BYTES;
}

static void count_done(struct connection *connection, const struct gate_request *request)
{
    struct loop *loop = connection->loop;
    loop->clock_ns = smb_now_ns();
    count_request(connection, request->segment, request->frame.opcode, request->frame.length, loop->clock_ns - connection->begun_ns);
}

/* The request in hand is answered. `done`: it was carried out, not refused, and is to be counted. */
static void finish_request(struct connection *connection, bool done)
{
    const struct smb_frame *frame = &connection->request.frame;
    if (done)
        count_done(connection, &connection->request);
    connection->replies_held += frame->length >= BULK_BYTES;
    connection->loop->bulk |= frame->length >= SPIN_BYTES_MAX;
    gate_done(&connection->request);
    connection->have_request = false;
}

static uint8_t *chunk_memory(uint8_t **memory)
{
    if (!*memory)
        *memory = aligned_alloc(4096, SMB_CHUNK_BYTES_MAX + 4096);
    return *memory;
}

/* Where a payload goes, and what a change is made from: the connection's journal slot, with room for so many bytes. */
static int make_staging(struct connection *connection, uint32_t bytes)
{
    struct journal *journal = connection->loop->server->journal;
    if (!journal) {
        if (!connection->own_staging)
            connection->own_staging = aligned_alloc(4096, 4096 + SMB_CHUNK_BYTES_MAX);
        connection->staging = connection->own_staging ? connection->own_staging + 4096 : NULL;
        return connection->staging ? SMB_OK : SMB_OUT_OF_MEMORY;
    }
    int status = connection->slot.payload ? SMB_OK : journal_take_slot(journal, &connection->slot);
    if (status == SMB_OK)
        status = journal_reserve(journal, &connection->slot, bytes);
    connection->staging = connection->slot.payload;
    return status;
}

static uint32_t token_bytes(const struct smb_frame *frame)
{
    return frame->flags & SMB_FLAG_FENCED ? SMB_TOKEN_BYTES : 0;
}

/* ---- receiving ---------------------------------------------------------------------------------------------------- */

/* *have: bytes read. STEP_WAIT: nothing there now. */
static enum step receive(struct connection *connection, struct iovec *parts, int count, size_t *have)
{
    if (connection->drained) { /* epoll will say: one system call less before the answers go out */
        connection->drained = false;
        return wait_for(connection, WAIT_INPUT);
    }
    ssize_t done = channel_read(&connection->channel, parts, count);
    if (done > 0) {
        size_t room = 0;
        for (int i = 0; i < count; i++)
            room += parts[i].iov_len;
        *have = (size_t)done;
        connection->drained = *have < room;
        return STEP_ON;
    }
    if (done < 0 && !channel_failed(done))
        return wait_for(connection, WAIT_INPUT);
    return STEP_CLOSE;
}

/* Nothing is made for a peer that has said nothing. */
static enum step secure(struct connection *connection)
{
    struct channel *channel = &connection->channel;
    if (!channel->tls && !(channel->tls = tls_begin(connection->secures, channel->fd, NULL)))
        return refuse(connection, SMB_OUT_OF_MEMORY);
    int status = tls_handshake(channel->tls);
    if (status == SMB_BUSY) {
        connection->wait = channel_has_unsent(channel) ? WAIT_OUTPUT : WAIT_INPUT;
        return STEP_WAIT;
    }
    if (status != SMB_OK)
        return status == SMB_UNTRUSTED ? refuse(connection, SMB_UNTRUSTED) : STEP_CLOSE;
    smb_tls_release(connection->secures);
    connection->secures = NULL;
    return STEP_ON;
}

static void speak_for_lane(struct connection *connection)
{
    connection->proven = true;
    strangers_leave(connection);
    connection->loop->not_greeted--;
    lanes_enter(connection);
}

/* The peer learns why before it is closed. */
static enum step refuse_hello(struct connection *connection, const struct smb_frame *frame, int status)
{
    if (connection->out_end + SMALL_REPLY_BYTES <= OUT_BYTES) {
        struct smb_frame reply = smb_frame_reply(frame, status);
        put_reply(connection, &reply);
        flush(connection);
    }
    return refuse(connection, status);
}

static enum step greet(struct connection *connection, const struct smb_frame *frame)
{
    if (frame->opcode != SMB_HELLO || connection->greeted)
        return refuse(connection, SMB_PROTOCOL);
    struct smb_server *server = connection->loop->server;
    if (server->guarded && !access_ready(&server->keys)) /* it has not heard of the coordinator yet; the peer tries again */
        return refuse(connection, SMB_DENIED);
    if (server->guarded && getrandom(&connection->nonce, sizeof connection->nonce, 0) != sizeof connection->nonce)
        return refuse(connection, SMB_SYSTEM);
    connection->greeted = true;
    connection->checksums = frame->flags & SMB_FLAG_CHECKSUM;
    connection->session = frame->session;
    connection->lane = frame->lane;
    connection->client_nonce = frame->offset;
    connection->request.grants = &connection->grants;
    /* Where tokens are asked for, a session's name alone must shut nobody out. */
    if (!server->guarded)
        speak_for_lane(connection);
    /* After it is among the lanes: a session that ends meanwhile is either seen here, or fences this connection. */
    if (session_has_ended(server, frame->session))
        return refuse_hello(connection, frame, SMB_SESSION_ENDED);
    struct smb_frame reply = smb_frame_reply(frame, SMB_OK);
    reply.offset = connection->nonce;
    reply.segment = server->instance;
    reply.argument = server->journal ? journal_identity(server->journal) : server->instance;
    put_reply(connection, &reply);
    count_request(connection, NULL, SMB_HELLO, 0, smb_now_ns() - connection->opened_ns);
    return STEP_ON;
}

/* A token. The first that is good also shows that the peer is whom its HELLO said. */
static enum step authorize(struct connection *connection, const struct smb_frame *frame, const uint8_t *payload)
{
    struct smb_server *server = connection->loop->server;
    struct access_connection self = {.nonce = connection->nonce, .client_nonce = connection->client_nonce, .instance = server->instance, .session = connection->session,
                                     .lane = connection->lane};
    struct grant grant;
    struct access_answer answer = {0};
    uint64_t why = 0;
    int status = server->guarded ? access_check(&server->keys, &self, frame, payload, &grant, &answer, &why) : SMB_OK;
    if (status == SMB_OK && !connection->proven) {
        speak_for_lane(connection);
        if (session_has_ended(server, frame->session))
            return refuse_hello(connection, frame, SMB_SESSION_ENDED);
    }
    if (status == SMB_OK && server->guarded)
        status = grants_put(&connection->grants, &grant);
    if (status == SMB_OK)
        count_request(connection, NULL, SMB_AUTHORIZE, 0, 0);
    else
        server_count(&server->errors[status], 1);
    struct smb_frame reply = smb_frame_reply(frame, status);
    reply.argument = status == SMB_OK ? answer.words[0] : why;
    reply.offset = status == SMB_OK ? answer.words[1] : 0;
    put_reply(connection, &reply);
    return STEP_ON;
}

/* What a peer of another version sent is not understood, so nothing of it is repeated. */
static enum step refuse_version(struct connection *connection)
{
    return refuse_hello(connection, &(struct smb_frame){.opcode = SMB_HELLO}, SMB_VERSION);
}

static bool is_from_segments(int opcode)
{
    return opcode == SMB_ACCUMULATE_FROM || opcode == SMB_APPLY;
}

/* Every change is made from the journal slot, also one without a payload. */
static bool needs_staging(const struct smb_frame *frame)
{
    return frame->payload > smb_frame_checksum_bytes(frame) || smb_opcode_changes(frame->opcode);
}

/* What is changed from another segment has that one's bytes there, after its payload. */
static uint32_t staging_bytes(const struct smb_frame *frame)
{
    uint32_t body = smb_frame_body(frame);
    return is_from_segments(frame->opcode) && frame->length > body ? frame->length : body;
}

/* Of a record that is admitted: the payload is put together in `staging`. Elements are in the slot that it names and stay there, so that
 * they are not copied; but indices are, as they must not change between being checked and being used. SMB_PROTOCOL: it names
 * none where it must. */
static int take_record(struct connection *connection, const uint8_t *record)
{
    const struct smb_frame *frame = &connection->request.frame;
    const uint8_t *small = record + SMB_RECORD_SMALL_AT;
    bool carries = frame->opcode == SMB_WRITE || frame->opcode == SMB_ACCUMULATE;
    uint32_t token = token_bytes(frame), body = smb_frame_body(frame);
    connection->named = slots_at(connection->slots, smb_load64(record + SMB_RECORD_ENDS_AT));
    if ((carries || frame->opcode == SMB_READ) && !connection->named)
        return SMB_PROTOCOL;
    bool in_place = carries && smb_frame_wire(frame) != SMB_WIRE_SPARSE;
    if (!in_place && needs_staging(frame)) {
        int status = make_staging(connection, staging_bytes(frame));
        if (status != SMB_OK)
            return status;
    }
    if (in_place)
        connection->staging = connection->named->payload;
    else if (carries)
        memcpy(connection->staging, connection->named->payload, body);
    else if (body > 0)
        memcpy(connection->staging, small + token, body);
    if (token > 0)
        memcpy(connection->staging - token, small, token);
    return SMB_OK;
}

/* The slot that a change is made from. */
static const struct slot *change_slot(const struct connection *connection)
{
    if (!connection->loop->server->journal)
        return NULL;
    return connection->named && connection->staging == connection->named->payload ? connection->named : &connection->slot;
}

static enum step receive_more(struct connection *connection)
{
    uint32_t left = connection->in_end - connection->in_start;
    memmove(connection->in, connection->in + connection->in_start, left);
    connection->in_start = 0;
    connection->in_end = left;
    struct iovec part = {connection->in + left, IN_BYTES - left};
    size_t have = 0;
    enum step step = receive(connection, &part, 1, &have);
    if (step == STEP_ON)
        connection->in_end += (uint32_t)have;
    return step;
}

static enum step next_request(struct connection *connection)
{
    uint32_t here = connection->in_end - connection->in_start;
    bool is_record = connection->slots && connection->greeted;
    uint32_t header_bytes = is_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES;
    if (here < header_bytes)
        return receive_more(connection);
    struct smb_frame frame;
    const uint8_t *header = connection->in + connection->in_start;
    int status = smb_frame_parse(header, &frame);
    if (status == SMB_VERSION)
        return refuse_version(connection);
    if (status != SMB_OK || frame.flags & SMB_FLAG_REPLY)
        return refuse(connection, SMB_PROTOCOL);
    bool checksum = frame.flags & SMB_FLAG_CHECKSUM;
    if (connection->greeted &&
        (frame.session != connection->session || frame.lane != connection->lane || checksum != connection->checksums))
        return refuse(connection, SMB_PROTOCOL);
    connection->crc = checksum ? smb_crc32c(0, header, SMB_FRAME_BYTES) : 0;
    if (!connection->greeted || frame.opcode == SMB_HELLO) {
        if (frame.opcode == SMB_HELLO && here < SMB_FRAME_BYTES + frame.payload)
            return receive_more(connection); /* no more than a checksum */
        connection->in_start += SMB_FRAME_BYTES + (frame.opcode == SMB_HELLO ? frame.payload : 0);
        if (frame.opcode == SMB_HELLO && checksum && !smb_checksum_is(header + SMB_FRAME_BYTES, connection->crc))
            return refuse(connection, SMB_CHECKSUM);
        return greet(connection, &frame);
    }
    if (frame.opcode == SMB_AUTHORIZE) {
        uint32_t bytes = frame.payload - smb_frame_checksum_bytes(&frame);
        const uint8_t *payload = header + SMB_FRAME_BYTES;
        if (here < SMB_FRAME_BYTES + frame.payload)
            return receive_more(connection);
        connection->in_start += is_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + frame.payload; /* of a record the small part */
        if (checksum && !smb_checksum_is(payload + bytes, smb_crc32c(connection->crc, payload, bytes)))
            return refuse(connection, SMB_CHECKSUM);
        return authorize(connection, &frame, payload);
    }
    connection->in_start += header_bytes;

    connection->admitted = gate_admit(connection->loop->server, &frame, &connection->request);
    if (connection->admitted == SMB_OK && is_record)
        connection->admitted = take_record(connection, header);
    else if (connection->admitted == SMB_OK && needs_staging(&frame))
        connection->admitted = make_staging(connection, staging_bytes(&frame));
    /* Not held while the payload is on its way: a peer that stops half-way must not keep a deleted segment's memory. */
    gate_done(&connection->request);
    connection->have_request = true;
    connection->begun_ns = connection->loop->clock_ns;
    if (frame.flags & SMB_FLAG_RETRY)
        stats_add(&connection->loop->stats.repeated, 1);
    connection->retried = connection->from_kept = false;
    connection->payload_have = is_record ? frame.payload : 0;
    return connection->admitted == SMB_PROTOCOL ? refuse(connection, SMB_PROTOCOL) : STEP_ON;
}

static bool has_arrived(const struct connection *connection)
{
    uint32_t here = connection->in_end - connection->in_start;
    int queued = 0;
    return !connection->channel.tls && ioctl(connection->channel.fd, FIONREAD, &queued) == 0 && (uint64_t)here + (uint64_t)queued >= connection->request.frame.length;
}

/* A chunk to be written that has arrived whole goes from the socket straight to its place, under the chunk's lock: the copy
 * can't stall, since every byte is here. One that is still on its way is staged, so that no lock waits for a network. */
static enum step receive_in_place(struct connection *connection, bool *done)
{
    struct gate_request *request = &connection->request;
    uint32_t length = request->frame.length, here = connection->in_end - connection->in_start;
    *done = false;
    uint8_t *place;
    if (gate_admit(connection->loop->server, &request->frame, request) != SMB_OK)
        return STEP_ON;
    if (gate_open(request, true, &place) != SMB_OK) {
        gate_done(request);
        return STEP_ON;
    }
    uint32_t have = here < length ? here : length;
    memcpy(place, connection->in + connection->in_start, have);
    connection->in_start += have;
    enum step step = STEP_ON;
    while (have < length && step == STEP_ON) {
        struct iovec parts[2] = {{place + have, length - have}, {connection->in, IN_BYTES}};
        ssize_t got = channel_read(&connection->channel, parts, 2);
        if (got <= 0) {
            step = STEP_CLOSE; /* the bytes were there: the connection is broken */
            break;
        }
        connection->drained = (size_t)got < length - have + IN_BYTES;
        uint32_t ours = got < (ssize_t)(length - have) ? (uint32_t)got : length - have;
        have += ours;
        connection->in_start = 0;
        connection->in_end = (uint32_t)got - ours;
    }
    gate_close(request, true, step == STEP_ON);
    if (step == STEP_ON) {
        *done = true;
        connection->payload_have = length;
        struct smb_frame reply = smb_frame_reply(&request->frame, SMB_OK);
        put_reply(connection, &reply);
        finish_request(connection, true);
    }
    return step;
}

/* So many bytes more of the payload have arrived. Of what is spoilt nothing is done, refused or answered: the header may be, too. */
static enum step take_payload(struct connection *connection, const uint8_t *bytes, uint32_t count)
{
    const struct smb_frame *frame = &connection->request.frame;
    uint32_t checksum = smb_frame_checksum_bytes(frame);
    if (checksum > 0 && connection->payload_have < frame->payload - checksum)
        connection->crc = smb_crc32c(connection->crc, bytes, count);
    connection->payload_have += count;
    if (checksum > 0 && connection->payload_have == frame->payload && !smb_checksum_is(connection->checksum, connection->crc))
        return refuse(connection, SMB_CHECKSUM);
    return STEP_ON;
}

static enum step receive_payload(struct connection *connection)
{
    const struct smb_frame *frame = &connection->request.frame;
    if (frame->opcode == SMB_WRITE && connection->admitted == SMB_OK && connection->payload_have == 0 &&
        frame->length >= BULK_BYTES && frame->payload == frame->length) { /* as it is, and nothing beside it */
        bool done = false;
        enum step step = has_arrived(connection) ? receive_in_place(connection, &done) : STEP_ON;
        if (done || step != STEP_ON)
            return step;
    }
    /* Inside TLS the next record is never far: the peer takes as long to make one as we to open it. */
    connection->loop->bulk |= frame->payload - connection->payload_have >= SPIN_BYTES_MAX && !connection->channel.tls;
    uint32_t elements = frame->payload - smb_frame_checksum_bytes(frame);
    bool in_checksum = connection->payload_have >= elements;
    uint32_t missing = (in_checksum ? frame->payload : elements) - connection->payload_have;
    /* Of a request that is refused the payload is read all the same, to nowhere in particular. */
    uint8_t nowhere[IN_BYTES];
    bool wanted = connection->admitted == SMB_OK;
    if (!wanted && missing > sizeof nowhere)
        missing = sizeof nowhere;
    uint8_t *to = in_checksum ? connection->checksum + (connection->payload_have - elements)
                  : wanted    ? connection->staging - token_bytes(frame) + connection->payload_have
                              : nowhere;
    uint32_t here = connection->in_end - connection->in_start;
    if (here > 0) {
        uint32_t take = here < missing ? here : missing;
        memcpy(to, connection->in + connection->in_start, take);
        connection->in_start += take;
        return take_payload(connection, to, take);
    }
    /* The rest of the payload to its place, and the headers behind it in the same call. */
    struct iovec parts[2] = {{to, missing}, {connection->in, IN_BYTES}};
    size_t have = 0;
    enum step step = receive(connection, parts, 2, &have);
    if (step != STEP_ON)
        return step;
    uint32_t ours = have < missing ? (uint32_t)have : missing;
    connection->in_start = 0;
    connection->in_end = (uint32_t)have - ours;
    return take_payload(connection, to, ours);
}

/* ---- executing ---------------------------------------------------------------------------------------------------- */

static enum step park(struct connection *connection)
{
    connection->retried = true;
    gate_done(&connection->request);
    return wait_for(connection, WAIT_PARKED);
}

static enum step answer_failure(struct connection *connection, int status)
{
    if (smb_opcode_changes(connection->request.frame.opcode))
        gate_refused(connection->loop->server, &connection->request);
    server_count(&connection->loop->server->errors[status], 1);
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, status);
    put_reply(connection, &reply);
    finish_request(connection, false);
    return STEP_ON;
}

/* The read that is in hand, and those right behind it that have arrived and whose chunks' locks are free: one large call
 * into the kernel is up to 1.5 times as fast as several of a chunk each. Several locks are held then, but none was waited for, so
 * there is no order among them to keep. Segments are found before the first lock is taken and given back
 * after the last: what else that may do is done outside of them. */
struct batch {
    uint32_t admitted, count; /* found; locked */
    struct gate_request requests[READS_PER_SEND];
    uint8_t headers[READS_PER_SEND][SMB_FRAME_BYTES];
    struct iovec parts[1 + 2 * READS_PER_SEND]; /* earlier replies; then header and data of each */
};

static bool is_plain_read(const struct connection *connection, const uint8_t *bytes, struct smb_frame *frame)
{
    return smb_frame_parse(bytes, frame) == SMB_OK && !(frame->flags & SMB_FLAG_REPLY) && frame->opcode == SMB_READ &&
           !(frame->flags & (SMB_FLAG_WIRE | SMB_FLAG_CHECKSUM)) && frame->session == connection->session &&
           frame->lane == connection->lane && frame->length >= BULK_BYTES;
}

/* Those behind the one in hand stay in `in` until they are answered. */
static void batch_admit(struct connection *connection, struct batch *batch)
{
    batch->requests[0] = connection->request;
    batch->admitted = 1;
    if (connection->request.frame.length < BULK_BYTES)
        return;
    for (uint32_t at = connection->in_start; batch->admitted < READS_PER_SEND && connection->in_end - at >= SMB_FRAME_BYTES;
         at += SMB_FRAME_BYTES) {
        struct gate_request *request = &batch->requests[batch->admitted];
        struct smb_frame frame;
        request->record_hint = 0;
        request->grants = &connection->grants;
        if (!is_plain_read(connection, connection->in + at, &frame) ||
            gate_admit(connection->loop->server, &frame, request) != SMB_OK)
            return;
        batch->admitted++;
    }
}

/* SMB_OK: at least the first is locked. */
static int batch_open(struct batch *batch)
{
    for (uint32_t i = batch->count = 0; i < batch->admitted; i++) {
        const struct smb_frame *frame = &batch->requests[i].frame;
        uint8_t *place;
        int status = gate_open(&batch->requests[i], false, &place);
        if (status != SMB_OK)
            return i == 0 ? status : SMB_OK;
        struct smb_frame reply = smb_frame_reply(frame, SMB_OK);
        reply.length = reply.payload = frame->length;
        smb_frame_encode(&reply, batch->headers[i]);
        batch->parts[1 + 2 * i] = (struct iovec){batch->headers[i], SMB_FRAME_BYTES};
        batch->parts[2 + 2 * i] = (struct iovec){place, frame->length};
        batch->count++;
    }
    return SMB_OK;
}

/* The first is the connection's. */
static void batch_done(struct batch *batch)
{
    for (uint32_t i = 1; i < batch->admitted; i++)
        gate_done(&batch->requests[i]);
}

/* The range of the read in hand, as it is or encoded. If another reader has the chunk's lock, without it. */
static int copy_range(struct connection *connection, uint8_t *to)
{
    struct gate_request *request = &connection->request;
    uint32_t length = request->frame.length;
    int wire = smb_frame_wire(&request->frame);
    uint8_t *from;
    int status = gate_open(request, false, &from);
    if (status == SMB_OK) {
        if (wire == SMB_WIRE_EXACT)
            memcpy(to, from, length);
        else
            smb_kernel_encode(wire, from, length / 4, to);
        gate_close(request, false, true);
    }
    if (status != SMB_BUSY)
        return status;
    if (wire == SMB_WIRE_EXACT)
        return gate_copy(request, to);
    status = make_staging(connection, length);
    if (status == SMB_OK)
        status = gate_copy(request, connection->staging);
    if (status == SMB_OK)
        smb_kernel_encode(wire, connection->staging, length / 4, to);
    return status;
}

/* What is not sent as it lies there: encoded, with a checksum, by reference, or while somebody has the chunk's lock. Of a copy that
 * nobody changes. */
static enum step answer_read_by_copy(struct connection *connection)
{
    struct gate_request *request = &connection->request;
    uint32_t length = request->frame.length;
    int wire = smb_frame_wire(&request->frame);
    int status = copy_range(connection, connection->named ? connection->named->payload : connection->tail);
    if (status == SMB_BUSY)
        return park(connection);
    if (status != SMB_OK)
        return answer_failure(connection, status);
    struct smb_frame reply = smb_frame_reply(&request->frame, SMB_OK);
    reply.length = length;
    uint32_t bytes = wire == SMB_WIRE_EXACT ? length : (uint32_t)smb_wire_bytes(wire, length / 4);
    if (connection->named)
        put_reply_by_reference(connection, &reply, bytes);
    else
        put_reply_with_tail(connection, &reply, bytes);
    finish_request(connection, true);
    return STEP_ON;
}

/* Reads are sent straight from the segment, under the chunks' locks: the socket copies them once, at one instant. Of the one that
 * it does not take whole the rest is set aside before its lock is released, so that a slow peer never holds it. */
static enum step answer_read(struct connection *connection)
{
    struct batch batch;
    if (connection->slots)
        return answer_read_by_copy(connection);
    if (!chunk_memory(&connection->tail))
        return refuse(connection, SMB_OUT_OF_MEMORY);
    if (connection->checksums || smb_frame_wire(&connection->request.frame) != SMB_WIRE_EXACT)
        return answer_read_by_copy(connection);
    batch_admit(connection, &batch);
    int status = batch_open(&batch);
    if (status != SMB_OK) {
        batch_done(&batch);
        return status == SMB_BUSY ? answer_read_by_copy(connection) : answer_failure(connection, status);
    }
    uint64_t sent = 0;
    enum step step = send_with(connection, batch.parts, 1 + 2 * batch.count, &sent);
    uint32_t begun = 0;
    for (uint32_t i = 0; i < batch.count; i++) {
        struct gate_request *request = &batch.requests[i];
        uint32_t length = request->frame.length;
        bool answered = i == 0 || sent > 0; /* the first is in hand: it is answered in any case */
        if (answered && sent < SMB_FRAME_BYTES + (uint64_t)length) {
            uint32_t of_header = sent < SMB_FRAME_BYTES ? (uint32_t)sent : SMB_FRAME_BYTES;
            uint32_t of_data = (uint32_t)sent - of_header;
            memcpy(connection->out + connection->out_end, batch.headers[i] + of_header, SMB_FRAME_BYTES - of_header);
            connection->out_end += SMB_FRAME_BYTES - of_header;
            memcpy(connection->tail, (const uint8_t *)batch.parts[2 + 2 * i].iov_base + of_data, length - of_data);
            connection->tail_start = 0;
            connection->tail_end = length - of_data;
            sent = 0;
        } else if (answered) {
            sent -= SMB_FRAME_BYTES + (uint64_t)length;
        }
        gate_close(request, false, true);
        if (answered) {
            count_done(connection, request);
            begun++;
        }
    }
    batch_done(&batch);
    connection->in_start += (begun - 1) * SMB_FRAME_BYTES;
    finish_request(connection, false);
    return step;
}

static enum step answer_attach(struct connection *connection)
{
    if (connection->transport != SMB_TRANSPORT_UNIX)
        return answer_failure(connection, SMB_DENIED);
    if (smb_segment_deleted(connection->request.segment))
        return answer_failure(connection, SMB_NOT_FOUND);
    /* A descriptor arrives with the first byte of what is sent along with it: earlier answers must be gone. */
    if (flush(connection) == STEP_CLOSE)
        return STEP_CLOSE;
    if (!all_sent(connection)) {
        connection->wait = WAIT_OUTPUT;
        return STEP_WAIT;
    }
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    put_reply(connection, &reply);
    connection->pass_segment = smb_segment_retain(connection->request.segment);
    connection->pass_fd = smb_segment_fd(connection->pass_segment);
    finish_request(connection, true);
    return flush(connection);
}

static enum step answer_change(struct connection *connection)
{
    struct gate_request *request = &connection->request;
    const struct smb_frame *frame = &request->frame;
    bool fetch = frame->flags & SMB_FLAG_FETCH;
    if (fetch && !chunk_memory(&connection->tail))
        return refuse(connection, SMB_OUT_OF_MEMORY);
    uint64_t result = 0;
    const uint8_t *payload = connection->staging;
    if (is_from_segments(frame->opcode)) {
        if (!connection->from_kept)
            memcpy(connection->from, connection->staging - SMB_TOKEN_BYTES, SMB_TOKEN_BYTES + smb_frame_body(frame));
        connection->from_kept = true;
        payload = connection->from + SMB_TOKEN_BYTES;
    }
    int status = gate_execute(connection->loop->server, request, change_slot(connection), payload,
                              connection->staging, fetch ? connection->tail : NULL, &result);
    if (status == SMB_BUSY)
        return park(connection);
    if (status != SMB_OK)
        return answer_failure(connection, status);
    FAILPOINT("connection.changed");
    struct smb_frame reply = smb_frame_reply(frame, SMB_OK);
    reply.argument = result;
    if (fetch && connection->named) { /* the payload is not needed any more */
        reply.length = frame->length;
        memcpy(connection->named->payload, connection->tail, frame->length);
        put_reply_by_reference(connection, &reply, frame->length);
    } else if (fetch) {
        reply.length = frame->length;
        put_reply_with_tail(connection, &reply, frame->length);
    } else {
        put_reply(connection, &reply);
    }
    finish_request(connection, true);
    return STEP_ON;
}

static enum step answer_watermark(struct connection *connection)
{
    uint64_t watermark, refused;
    int status = gate_watermark(&connection->request, &watermark, &refused);
    if (status != SMB_OK)
        return answer_failure(connection, status);
    struct smb_frame reply = smb_frame_reply(&connection->request.frame, SMB_OK);
    reply.argument = watermark;
    reply.offset = refused;
    put_reply(connection, &reply);
    finish_request(connection, true);
    return STEP_ON;
}

static void put_answer(struct connection *connection, const struct smb_frame *request, struct smb_segment *segment,
                       uint64_t begun_ns, struct sync_answer answer)
{
    if (answer.status == SMB_OK)
        count_request(connection, segment, request->opcode, 0, smb_now_ns() - begun_ns);
    else
        server_count(&connection->loop->server->errors[answer.status], 1);
    struct smb_frame reply = smb_frame_reply(request, answer.status);
    reply.argument = answer.a;
    reply.offset = answer.b;
    put_reply(connection, &reply);
}

/* It is answered, or leaves the connection and is answered later; either way the next request is looked at. */
static enum step answer_sync(struct connection *connection)
{
    struct sync_answer answer = {0};
    int status = waits_ask(connection, &connection->request, connection->staging, &answer);
    if (status != SMB_PARKED) {
        answer.status = status;
        put_answer(connection, &connection->request.frame, connection->request.segment, connection->begun_ns, answer);
    }
    gate_done(&connection->request);
    connection->have_request = false;
    return STEP_ON;
}

static void put_late_answers(struct connection *connection)
{
    /* Not between a header and its data, nor before an answer that brings a descriptor. */
    if (connection->tail_end > 0 || connection->pass_fd >= 0)
        return;
    while (connection->answered && connection->out_end <= OUT_BYTES - SMALL_REPLY_BYTES) {
        struct wait *wait = connection->answered;
        connection->answered = wait->next;
        put_answer(connection, &wait->frame, wait->segment, wait->begun_ns, wait->answer);
        wait_free(wait);
    }
}

static enum step execute(struct connection *connection)
{
    if (connection->admitted == SMB_OK && !connection->request.segment)
        connection->admitted = gate_admit(connection->loop->server, &connection->request.frame, &connection->request);
    connection->request.retried = connection->retried;
    if (connection->admitted != SMB_OK)
        return answer_failure(connection, connection->admitted);
    switch (connection->request.frame.opcode) {
    case SMB_READ: return answer_read(connection);
    case SMB_ATTACH: return answer_attach(connection);
    case SMB_WATERMARK: return answer_watermark(connection);
    default: return smb_opcode_changes(connection->request.frame.opcode) ? answer_change(connection) : answer_sync(connection);
    }
}

bool connection_turn(struct connection *connection)
{
    enum step step = connection->secures ? secure(connection) : STEP_ON;
    for (int frames = 0; step == STEP_ON;) {
        /* Data of an answer goes out, and there is room for one more answer, before the next request is touched. */
        put_late_answers(connection);
        bool must_flush = connection->tail_end > 0 || connection->pass_fd >= 0 || connection->out_start > 0 || channel_has_unsent(&connection->channel) ||
                          connection->replies_held >= REPLIES_HELD_MAX || connection->out_end > OUT_BYTES - SMALL_REPLY_BYTES;
        if (must_flush) {
            step = flush(connection);
            if (step == STEP_ON && !all_sent(connection)) {
                connection->wait = WAIT_OUTPUT;
                step = STEP_WAIT;
            }
        } else if (!connection->have_request) {
            if (frames++ == FRAMES_PER_TURN)
                step = wait_for(connection, WAIT_TURN);
            else
                step = next_request(connection);
        } else {
            pthread_mutex_lock(&connection->turn);
            if (atomic_load_explicit(&connection->fenced, memory_order_relaxed))
                step = STEP_CLOSE;
            else if (connection->payload_have < connection->request.frame.payload)
                step = receive_payload(connection);
            else
                step = execute(connection);
            pthread_mutex_unlock(&connection->turn);
        }
    }
    return step == STEP_WAIT;
}
