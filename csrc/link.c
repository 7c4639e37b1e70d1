/* One lane to a server: frames in flight, sent in order, answered in any, over as many connections as it takes. */
#include "client.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "address.h"

enum {
    SEND_PARTS = 32,
    FRAME_PARTS = 4,
    QUIET_NS = 1000000 /* a link that has said nothing for so long is asked whether its peer is there, before it is used */
};

/* ---- making one --------------------------------------------------------------------------------------------------- */

/* SMB_OK: the descriptor is ready for `events`. */
static int wait_ready(int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        uint64_t now = smb_now_ns();
        if (now >= deadline_ns)
            return SMB_TIMEOUT;
        struct pollfd poller = {.fd = fd, .events = events};
        int count = poll(&poller, 1, (int)((deadline_ns - now) / 1000000U + 1));
        if (count > 0)
            return SMB_OK;
        if (count < 0 && errno != EINTR)
            return SMB_SYSTEM;
    }
}

static int connect_to(int fd, const struct sockaddr *name, socklen_t length, uint64_t deadline_ns)
{
    if (connect(fd, name, length) == 0)
        return SMB_OK;
    if (errno == EAGAIN) /* a Unix listener whose queue is full */
        return SMB_DISCONNECTED;
    if (errno != EINPROGRESS)
        return SMB_DISCONNECTED;
    int status = wait_ready(fd, POLLOUT, deadline_ns);
    int failure = 0;
    socklen_t failure_length = sizeof failure;
    if (status == SMB_OK && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &failure_length) != 0)
        return SMB_SYSTEM;
    errno = failure;
    return status != SMB_OK ? status : failure != 0 ? SMB_DISCONNECTED : SMB_OK;
}

/* One request and its answer, before the link carries calls. *passed_fd gets a descriptor that came along, or -1. */
static int exchange(int fd, const struct smb_frame *request, uint64_t deadline_ns, struct smb_frame *reply,
                    int *passed_fd)
{
    uint8_t bytes[SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES];
    struct smb_frame asked = *request;
    asked.payload = smb_frame_checksum_bytes(request);
    smb_frame_encode(&asked, bytes);
    smb_store_checksum(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES));
    size_t whole = SMB_FRAME_BYTES + asked.payload;
    for (size_t done = 0; done < whole;) {
        ssize_t n = send(fd, bytes + done, whole - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        int status = n < 0 && errno != EAGAIN && errno != EINTR ? SMB_LINK_LOST
                     : n < 0 ? wait_ready(fd, POLLOUT, deadline_ns) : SMB_OK;
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
    }
    whole = SMB_FRAME_BYTES; /* until the header says more */
    for (size_t done = 0; done < whole;) {
        struct iovec part = {bytes + done, whole - done};
        union {
            struct cmsghdr header;
            uint8_t bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                                 .msg_controllen = sizeof control.bytes};
        ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        int status = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) ? SMB_LINK_LOST
                     : n < 0 ? wait_ready(fd, POLLIN, deadline_ns) : SMB_OK;
        if (status != SMB_OK)
            return status;
        if (n < 0)
            continue;
        done += (size_t)n;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)) && *passed_fd < 0)
            memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
        if (done != SMB_FRAME_BYTES)
            continue;
        status = smb_frame_parse(bytes, reply);
        if (status != SMB_OK || reply->payload > smb_frame_checksum_bytes(reply))
            return status != SMB_OK ? status : SMB_PROTOCOL;
        whole += reply->payload;
    }
    if (reply->flags & SMB_FLAG_CHECKSUM && !smb_checksum_is(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES)))
        return SMB_LINK_LOST;
    if ((request->flags & SMB_FLAG_CHECKSUM) != (reply->flags & SMB_FLAG_CHECKSUM))
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    if (!(reply->flags & SMB_FLAG_REPLY) || reply->opcode != request->opcode || reply->session != request->session)
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    return reply->status;
}

static int open_tcp(const char *address, uint16_t port, uint64_t deadline_ns, int *fd)
{
    struct address peer;
    if (!address_parse(address, port, &peer))
        return SMB_INVALID;
    *fd = socket(peer.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return SMB_SYSTEM;
    int on = 1;
    setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int status = connect_to(*fd, &peer.name.any, peer.length, deadline_ns);
    if (status == SMB_OK)
        address_bound_send_buffer(*fd);
    return status;
}

static int open_unix(const char *path, uint64_t deadline_ns, int *fd)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    *fd = -1;
    if (strlen(path) >= sizeof name.sun_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return *fd < 0 ? SMB_SYSTEM : connect_to(*fd, (struct sockaddr *)&name, sizeof name, deadline_ns);
}

static uint16_t flags_of(const struct smb_client *client)
{
    return client->checksums ? SMB_FLAG_CHECKSUM : 0;
}

static int shake_hands(int fd, const struct smb_client *client, uint16_t lane, uint64_t deadline_ns, uint64_t *instance,
                       uint64_t *identity)
{
    struct smb_frame hello = {.opcode = SMB_HELLO, .flags = flags_of(client), .lane = lane, .session = client->session};
    struct smb_frame reply;
    int passed = -1;
    int status = exchange(fd, &hello, deadline_ns, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK)
        return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
    *instance = reply.segment;
    *identity = reply.argument;
    return SMB_OK;
}

/* Closes fd unless SMB_OK. */
static int greet(struct smb_client *client, int fd, int status, uint16_t lane, uint64_t deadline_ns, struct smb_link **link,
                 uint64_t *instance)
{
    uint64_t identity = 0;
    struct smb_link *made = NULL;
    if (status == SMB_OK)
        status = shake_hands(fd, client, lane, deadline_ns, instance, &identity);
    if (status == SMB_OK && !(made = calloc(1, sizeof *made)))
        status = SMB_OUT_OF_MEMORY;
    if (status != SMB_OK) {
        int saved = errno;
        if (fd >= 0)
            close(fd);
        errno = saved;
        return status;
    }
    made->client = client_retain(client);
    made->id = atomic_fetch_add(&client->links_made, 1) + 1;
    made->identity = identity;
    made->references = 1;
    made->fd = fd;
    made->fresh_fd = -1;
    made->lane = lane;
    made->window = WINDOW_FRAMES;
    /* A later link of the same lane continues above all that earlier ones used: its changes are never taken for theirs. */
    made->made = made->id << 32 | 1U;
    made->unsent_end = &made->unsent;
    made->sent_end = &made->sent;
    pthread_mutex_lock(&client->mutex);
    made->next_of_all = client->links;
    client->links = made;
    pthread_mutex_unlock(&client->mutex);
    *link = made;
    return SMB_OK;
}

int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port, uint16_t lane, uint32_t timeout_ms,
                           struct smb_link **link, uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    int fd = -1;
    int status = open_tcp(address, port, deadline_ns, &fd);
    return greet(client, fd, status, lane, deadline_ns, link, instance);
}

int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane, uint32_t timeout_ms,
                            struct smb_link **link, uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    int fd = -1;
    int status = open_unix(path, deadline_ns, &fd);
    status = greet(client, fd, status, lane, deadline_ns, link, instance);
    if (status == SMB_OK)
        (*link)->local = true;
    return status;
}

/* Takes fd over, whatever `status` it was opened with. */
static int hand_over_connection(struct smb_link *link, int fd, int status, uint64_t accept_instance, uint64_t deadline_ns,
                                uint64_t *instance)
{
    uint64_t identity = 0;
    if (status == SMB_OK)
        status = shake_hands(fd, link->client, link->lane, deadline_ns, instance, &identity);
    if (status == SMB_OK && identity != link->identity && *instance != accept_instance)
        status = SMB_NOT_FOUND;
    if (status != SMB_OK) {
        int saved = errno;
        if (fd >= 0)
            close(fd);
        errno = saved;
        if (status == SMB_SESSION_ENDED) {
            link->closed_why = status;
            atomic_store(&link->closing, true);
            client_wake_driver(link->client);
        }
        return status;
    }
    link->identity = identity;
    int older = atomic_exchange(&link->fresh_fd, fd);
    if (older >= 0)
        close(older);
    client_want_link(link, false);
    client_wake_driver(link->client);
    return SMB_OK;
}

int smb_link_resume_tcp(struct smb_link *link, const char *address, uint16_t port, uint64_t accept_instance,
                        uint32_t timeout_ms, uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    int fd = -1;
    *instance = 0;
    int status = open_tcp(address, port, deadline_ns, &fd);
    return hand_over_connection(link, fd, status, accept_instance, deadline_ns, instance);
}

int smb_link_resume_unix(struct smb_link *link, const char *path, uint64_t accept_instance, uint32_t timeout_ms,
                         uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    int fd = -1;
    *instance = 0;
    int status = open_unix(path, deadline_ns, &fd);
    return hand_over_connection(link, fd, status, accept_instance, deadline_ns, instance);
}

int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment)
{
    struct smb_frame request = {.opcode = SMB_ATTACH, .flags = flags_of(link->client), .lane = link->lane, .session = link->client->session,
                                .sequence = link->made++, .segment = segment_id, .epoch = epoch};
    struct smb_frame reply;
    int fd = -1;
    int status = exchange(link->fd, &request, smb_now_ns() + (uint64_t)timeout_ms * 1000000U, &reply, &fd);
    if (status == SMB_OK && fd < 0)
        status = SMB_PROTOCOL;
    if (status == SMB_OK)
        status = smb_segment_open_fd(fd, segment);
    if (fd >= 0)
        close(fd);
    if (status == SMB_LINK_LOST || status == SMB_PROTOCOL || status == SMB_TIMEOUT)
        atomic_store(&link->state, LINK_CLOSED);
    return status;
}

struct smb_link *link_retain(struct smb_link *link)
{
    atomic_fetch_add_explicit(&link->references, 1, memory_order_relaxed);
    return link;
}

static void free_flights(struct flight *flight)
{
    while (flight) {
        struct flight *next = flight->next;
        if (flight->doubt)
            smb_doubt_release(flight->doubt);
        free(flight->encoded);
        free(flight);
        flight = next;
    }
}

void link_release(struct smb_link *link)
{
    if (atomic_fetch_sub_explicit(&link->references, 1, memory_order_acq_rel) != 1)
        return;
    struct smb_client *client = link->client;
    pthread_mutex_lock(&client->mutex);
    struct smb_link **at = &client->links;
    while (*at != link)
        at = &(*at)->next_of_all;
    *at = link->next_of_all;
    pthread_mutex_unlock(&client->mutex);
    int fresh = atomic_load(&link->fresh_fd);
    if (fresh >= 0)
        close(fresh);
    if (link->fd >= 0)
        close(link->fd);
    free_flights(link->unsent);
    free_flights(link->sent);
    free_flights(link->spare);
    free(link->watermarks);
    free(link);
    client_release(client);
}

int smb_link_alive(struct smb_link *link)
{
    return atomic_load(&link->state) != LINK_CLOSED && !atomic_load(&link->closing);
}

int smb_link_connected(struct smb_link *link)
{
    return atomic_load(&link->state) == LINK_UP && !atomic_load(&link->closing);
}

uint64_t smb_link_id(struct smb_link *link)
{
    return link->id;
}

void smb_link_close(struct smb_link *link)
{
    atomic_store(&link->closing, true);
    client_want_link(link, false);
    client_wake_driver(link->client);
    link_release(link);
}

int smb_link_let_go(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    link->in_hands = false;
    bool wanted = link->wanted;
    pthread_mutex_unlock(&link->client->mutex);
    return wanted;
}

int smb_link_wanted(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    bool wanted = link->wanted;
    pthread_mutex_unlock(&link->client->mutex);
    return wanted;
}

/* ---- carrying calls ----------------------------------------------------------------------------------------------- */

static int state_of(const struct smb_link *link)
{
    return atomic_load_explicit(&link->state, memory_order_relaxed);
}

static void enter(struct smb_link *link, enum link_state state)
{
    atomic_store_explicit(&link->state, state, memory_order_release);
}

bool link_busy(const struct smb_link *link)
{
    return link->queue_head || link->unsent || link->sent || link->watermark_count > 0;
}

static uint32_t watermark_frame_bytes(const struct smb_link *link)
{
    return SMB_FRAME_BYTES + (link->client->checksums ? SMB_CHECKSUM_BYTES : 0);
}

bool link_wants_output(const struct smb_link *link)
{
    return link->watermark_count > 0 ? link->watermark_bytes_sent < link->watermark_count * (uint64_t)watermark_frame_bytes(link)
                                     : link->unsent != NULL;
}

int link_fd(const struct smb_link *link)
{
    return state_of(link) == LINK_UP || state_of(link) == LINK_RESUMING ? link->fd : -1;
}

void link_enqueue(struct smb_link *link, struct stream *stream)
{
    stream->next = NULL;
    stream->queued = true;
    if (link->queue_tail)
        link->queue_tail->next = stream;
    else
        link->queue_head = stream;
    link->queue_tail = stream;
}

static void dequeue(struct smb_link *link)
{
    struct stream *stream = link->queue_head;
    link->queue_head = stream->next;
    if (!link->queue_head)
        link->queue_tail = NULL;
    stream->queued = false;
}

static void take_out_of_queue(struct smb_link *link, struct stream *stream)
{
    struct stream *before = NULL;
    for (struct stream *s = link->queue_head; s != stream; s = s->next)
        before = s;
    if (before)
        before->next = stream->next;
    else
        link->queue_head = stream->next;
    if (link->queue_tail == stream)
        link->queue_tail = before;
    stream->queued = false;
}

static bool is_atomic(int opcode)
{
    return opcode == SMB_FETCH_ADD || opcode == SMB_COMPARE_SWAP;
}

/* ---- flights */

static struct flight *take_flight(struct smb_link *link)
{
    struct flight *flight = link->spare;
    if (flight)
        link->spare = flight->next;
    else
        flight = malloc(sizeof *flight);
    return flight;
}

static void append(struct flight ***end, struct flight *flight)
{
    flight->next = NULL;
    **end = flight;
    *end = &flight->next;
}

/* Takes *at out of its list. */
static struct flight *take_from(struct flight **at, struct flight ***end)
{
    struct flight *flight = *at;
    *at = flight->next;
    if (*end == &flight->next)
        *end = at;
    return flight;
}

static void put_back(struct smb_link *link, struct flight *flight)
{
    link->flying--;
    link->atomics_flying -= is_atomic(flight->opcode);
    if (flight->doubt)
        smb_doubt_release(flight->doubt);
    flight->doubt = NULL;
    free(flight->encoded);
    flight->encoded = NULL;
    flight->next = link->spare;
    link->spare = flight;
}

/* Out of its list, and over. */
static void landed(struct smb_link *link, struct flight *flight)
{
    struct stream *stream = flight->stream;
    put_back(link, flight);
    if (stream && --stream->in_flight == 0 && !stream->have_piece && !stream->queued)
        call_stream_finished(stream);
}

static void seal(struct flight *flight)
{
    if (flight->checksum_bytes == 0)
        return;
    uint32_t crc = smb_crc32c(0, flight->header, SMB_FRAME_BYTES);
    crc = smb_crc32c(crc, flight->small, flight->small_bytes);
    smb_store_checksum(flight->checksum, smb_crc32c(crc, flight->payload, flight->payload_bytes));
}

static void encode(struct smb_link *link, struct flight *flight, struct smb_frame *frame)
{
    frame->flags |= flags_of(link->client);
    flight->checksum_bytes = smb_frame_checksum_bytes(frame);
    frame->lane = link->lane;
    frame->epoch = flight->epoch;
    frame->session = link->client->session;
    frame->sequence = flight->sequence;
    frame->segment = flight->segment_id;
    frame->length = flight->length;
    frame->payload = flight->small_bytes + flight->payload_bytes + flight->checksum_bytes;
    smb_frame_encode(frame, flight->header);
    seal(flight);
}

static void put_small(struct flight *flight, uint64_t word)
{
    smb_store64(flight->small + flight->small_bytes, word);
    flight->small_bytes += 8;
}

static void make_ask(struct smb_link *link, struct stream *stream, struct flight *flight)
{
    const struct smb_ask *ask = stream->ask;
    struct smb_frame frame = {.opcode = (uint8_t)ask->opcode, .argument = ask->argument};
    flight->opcode = frame.opcode;
    for (int i = 0; i < SMB_SYNC_WORDS; i++)
        put_small(flight, ask->words[i]);
    encode(link, flight, &frame);
    stream->have_piece = false;
}

/* Elements that travel encoded: made once, so that what is sent again is the same. Only where this fails is nothing done. */
static bool make_encoded(const struct stream *stream, struct flight *flight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint32_t element = smb_dtype_bytes(stream->dtype);
    uint64_t bytes = request->wire == SMB_WIRE_SPARSE ? stream->entries * (SMB_WIRE_INDEX_BYTES + element)
                                                      : smb_wire_bytes(request->wire, piece->bytes / 4);
    flight->encoded = malloc(bytes);
    if (!flight->encoded)
        return false;
    flight->wire = (uint8_t)request->wire;
    if (request->opcode == SMB_READ) {
        flight->answer_bytes = (uint32_t)bytes;
        return true;
    }
    if (request->wire == SMB_WIRE_SPARSE)
        sparse_encode(request, element, piece, stream->first_entry, stream->entries, flight->encoded);
    else
        smb_kernel_encode(request->wire, (const uint8_t *)request->source + (piece->buffer_offset - request->offset),
                          piece->bytes / 4, flight->encoded);
    flight->payload = flight->encoded;
    flight->payload_bytes = (uint32_t)bytes;
    return true;
}

void stream_advance(struct stream *stream)
{
    if (stream->request->wire != SMB_WIRE_SPARSE) {
        stream->have_piece = smb_cursor_next(&stream->cursor, &stream->piece);
        return;
    }
    uint32_t element = smb_dtype_bytes(stream->dtype);
    do {
        if (stream->rest.bytes == 0 && !smb_cursor_next(&stream->cursor, &stream->rest)) {
            stream->have_piece = false;
            return;
        }
        stream->have_piece = sparse_cut(stream->request, element, SMB_CHUNK_BYTES_MAX / (SMB_WIRE_INDEX_BYTES + element),
                                        &stream->rest, &stream->piece, &stream->first_entry, &stream->entries);
    } while (!stream->have_piece);
}

static bool make_piece(struct smb_link *link, struct stream *stream, struct flight *flight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint64_t within = piece->buffer_offset - request->offset; /* in the caller's memory */
    struct smb_frame frame = {.opcode = (uint8_t)request->opcode, .dtype = stream->dtype, .offset = piece->segment_offset,
                              .argument = request->argument};
    flight->opcode = frame.opcode;
    flight->length = flight->answer_bytes = (uint32_t)piece->bytes;
    flight->buffer_offset = piece->buffer_offset;
    if (request->wire != SMB_WIRE_EXACT && !make_encoded(stream, flight))
        return false;
    frame.flags |= (uint16_t)(request->wire << SMB_FLAG_WIRE_SHIFT);
    if (request->fenced) {
        frame.flags |= SMB_FLAG_FENCED;
        put_small(flight, request->token);
    }
    switch (request->opcode) {
    case SMB_ACCUMULATE:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        if (request->sink)
            frame.flags |= SMB_FLAG_FETCH;
        /* fall through */
    case SMB_WRITE:
        if (flight->encoded)
            break;
        flight->payload = (const uint8_t *)request->source + within;
        flight->payload_bytes = flight->length;
        if (link->client->checksums) { /* a caller's array may change meanwhile: what is sent is what the checksum is of */
            flight->encoded = malloc(flight->length);
            if (!flight->encoded)
                return false;
            memcpy(flight->encoded, flight->payload, flight->length);
            flight->payload = flight->encoded;
        }
        break;
    case SMB_ACCUMULATE_FROM:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        put_small(flight, stream->source_ids[0]);
        put_small(flight, piece->segment_offset);
        break;
    case SMB_APPLY:
        frame.op = (uint8_t)request->op;
        for (int i = 0; i < SMB_APPLY_SEGMENTS; i++)
            put_small(flight, stream->source_ids[i]);
        smb_store_hyper(flight->small + flight->small_bytes, &request->hyper);
        flight->small_bytes += 8 * SMB_HYPER_WORDS;
        break;
    case SMB_COMPARE_SWAP: put_small(flight, request->expected); break;
    }
    if (request->sink)
        flight->sink = (uint8_t *)request->sink + within;
    encode(link, flight, &frame);
    stream_advance(stream);
    return true;
}

static bool make_frame(struct smb_link *link, struct stream *stream)
{
    struct flight *flight = take_flight(link);
    if (!flight)
        return false;
    *flight = (struct flight){.stream = stream, .sequence = link->made++, .segment_id = stream->segment_id,
                              .epoch = stream->epoch, .made_ns = smb_now_ns(), .fate = SMB_DOUBT_NOT_APPLIED};
    if (stream->ask) {
        make_ask(link, stream, flight);
    } else if (!make_piece(link, stream, flight)) {
        flight->next = link->spare;
        link->spare = flight;
        return false;
    }
    append(&link->unsent_end, flight);
    link->flying++;
    link->atomics_flying += is_atomic(flight->opcode);
    stream->in_flight++;
    return true;
}

static bool may_make(const struct smb_link *link, const struct stream *stream)
{
    /* Waits are answered when their time comes: they leave no room for each other to take. */
    return stream->ask || (link->flying < link->window &&
                           (!is_atomic(stream->request->opcode) || link->atomics_flying < ATOMICS_FLYING_MAX));
}

/* Streams take turns, so that a small call is not held up behind a large one. */
static void fill_window(struct smb_link *link)
{
    while (link->queue_head && may_make(link, link->queue_head)) {
        struct stream *stream = link->queue_head;
        for (int i = 0; i < STREAM_BURST && stream->have_piece && may_make(link, stream); i++)
            if (!make_frame(link, stream))
                return;
        if (!stream->have_piece || stream->next) {
            dequeue(link);
            if (stream->have_piece)
                link_enqueue(link, stream);
        }
    }
}

/* ---- sending */

/* What is left of the frame to be sent, `skip` bytes of it having gone; returns how many parts. */
static int frame_parts(struct flight *flight, uint64_t skip, struct iovec *parts)
{
    const struct iovec whole[FRAME_PARTS] = {{flight->header, SMB_FRAME_BYTES},
                                             {flight->small, flight->small_bytes},
                                             {(void *)(uintptr_t)flight->payload, flight->payload_bytes},
                                             {flight->checksum, flight->checksum_bytes}};
    int count = 0;
    for (int i = 0; i < FRAME_PARTS; i++) {
        if (whole[i].iov_len > skip)
            parts[count++] = (struct iovec){(uint8_t *)whole[i].iov_base + skip, whole[i].iov_len - skip};
        skip -= skip < whole[i].iov_len ? skip : whole[i].iov_len;
    }
    return count;
}

static uint64_t frame_bytes(const struct flight *flight)
{
    return SMB_FRAME_BYTES + (uint64_t)flight->small_bytes + flight->payload_bytes + flight->checksum_bytes;
}

static void note_sent(struct flight *flight)
{
    flight->was_sent = true;
    if (flight->fate == SMB_DOUBT_NOT_APPLIED)
        flight->fate = SMB_DOUBT_PENDING;
    if (!flight->stream)
        return;
    if (flight->stream->told)
        flight->stream->told->sent = 1;
    else
        flight->stream->call->outcome->sent = 1;
}

/* Unsent frames from the callers' memory straight to the socket. */
static int send_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[SEND_PARTS];
    int count = 0;
    uint64_t skip = link->sent_bytes;
    for (struct flight *flight = link->unsent; flight && count + FRAME_PARTS <= SEND_PARTS; flight = flight->next) {
        count += frame_parts(flight, skip, parts + count);
        skip = 0;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t done = count == 1 ? send(link->fd, parts->iov_base, parts->iov_len, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0)
        return errno == EAGAIN || errno == EINTR ? SMB_OK : SMB_LINK_LOST;
    *moved = true;
    link->sent_bytes += (uint64_t)done;
    while (link->unsent && link->sent_bytes > 0) {
        note_sent(link->unsent); /* at least its first byte */
        uint64_t whole = frame_bytes(link->unsent);
        if (link->sent_bytes < whole)
            break;
        link->sent_bytes -= whole;
        append(&link->sent_end, take_from(&link->unsent, &link->unsent_end));
    }
    return SMB_OK;
}

/* ---- receiving */

/* Answers come mostly in the order of the requests, so that the first look finds it. */
static struct flight **find_sent(struct smb_link *link, uint64_t sequence)
{
    struct flight **at = &link->sent;
    while (*at && (*at)->sequence != sequence)
        at = &(*at)->next;
    return at;
}

static void settle(struct flight *flight, int state)
{
    if (flight->doubt)
        doubt_settled(flight->doubt, flight->doubt_index, state);
}

static int state_after(int status)
{
    return status == SMB_OK ? SMB_DOUBT_APPLIED : status == SMB_EVICTED ? SMB_DOUBT_UNKNOWN : SMB_DOUBT_NOT_APPLIED;
}

static void take_failure(struct smb_link *link, struct flight *flight, int status)
{
    struct stream *stream = flight->stream;
    /* What is known to have been applied was, also if the answer can't be had any more. */
    int state = flight->fate == SMB_DOUBT_APPLIED ? SMB_DOUBT_APPLIED : state_after(status);
    settle(flight, state);
    if (stream) {
        if (smb_opcode_changes(flight->opcode))
            call_doubt(stream->call, flight->buffer_offset, flight->length, state);
        call_failed(stream, status);
    }
    landed(link, flight);
}

/* A lock was granted to a caller that has left: it goes back at once. If the connection breaks first, its ttl ends it. */
static void give_back(struct smb_link *link, const struct flight *lock, uint64_t token)
{
    struct flight *flight = take_flight(link);
    if (!flight)
        return;
    *flight = (struct flight){.sequence = link->made++, .segment_id = lock->segment_id, .epoch = lock->epoch,
                              .opcode = SMB_UNLOCK, .fate = SMB_DOUBT_NOT_APPLIED};
    struct smb_frame frame = {.opcode = SMB_UNLOCK, .argument = smb_load64(lock->header + SMB_FRAME_BYTES - 8)};
    put_small(flight, token);
    for (int i = 1; i < SMB_SYNC_WORDS; i++)
        put_small(flight, 0);
    encode(link, flight, &frame);
    append(&link->unsent_end, flight);
    link->flying++;
}

static void take_success(struct smb_link *link, struct flight *flight, uint64_t a, uint64_t b)
{
    struct stream *stream = flight->stream;
    if (!stream && flight->opcode == SMB_LOCK)
        give_back(link, flight, a);
    settle(flight, SMB_DOUBT_APPLIED);
    if (stream && stream->told) {
        stream->told->a = a;
        stream->told->b = b;
    } else if (stream) {
        stream->call->outcome->bytes_applied += flight->length;
        stream->call->outcome->result = a;
    }
    landed(link, flight);
}

static bool wants_data(const struct flight *flight, const struct smb_frame *reply)
{
    return flight->stream ? flight->sink != NULL : reply->payload > smb_frame_checksum_bytes(reply);
}

/* The header of an answer. */
static int take_reply(struct smb_link *link, const struct smb_frame *reply)
{
    struct flight **at = find_sent(link, reply->sequence);
    struct flight *flight = *at;
    uint32_t elements = reply->payload - smb_frame_checksum_bytes(reply);
    if (!flight || reply->opcode != flight->opcode ||
        smb_frame_wire(reply) != flight->wire ||
        (elements > 0 && (elements != flight->answer_bytes || (flight->stream && !flight->sink))))
        return SMB_PROTOCOL;
    bool data = reply->status == SMB_OK && wants_data(flight, reply);
    if (data && elements == 0)
        return SMB_PROTOCOL; /* data was asked for, and success without data can't be */
    if (data) {
        link->reading = flight; /* still in the list: if the connection breaks now it is asked for again */
        link->reading_have = 0;
        return SMB_OK;
    }
    take_from(at, &link->sent_end);
    if (reply->status == SMB_OK)
        take_success(link, flight, reply->argument, reply->offset);
    else
        take_failure(link, flight, reply->status);
    return SMB_OK;
}

static int take_watermark(struct smb_link *link, const struct smb_frame *reply)
{
    for (uint32_t i = 0; i < link->watermark_count; i++) {
        struct watermark *watermark = &link->watermarks[i];
        if (watermark->sequence == reply->sequence && !watermark->answered && reply->opcode == SMB_WATERMARK) {
            watermark->answered = true;
            watermark->status = reply->status;
            watermark->value = reply->argument;
            watermark->refused = reply->offset;
            link->watermarks_answered++;
            return SMB_OK;
        }
    }
    return SMB_PROTOCOL;
}

static int spoilt(struct smb_link *link)
{
    atomic_fetch_add_explicit(&link->client->spoilt, 1, memory_order_relaxed);
    return SMB_LINK_LOST;
}

/* Of `here` bytes takes those of a header, and its checksum where no data is between them: *taken, 0 where that is not all here.
 * A header is believed once its checksum is right; data that follows it is, before anybody is told. */
static int take_header(struct smb_link *link, const uint8_t *bytes, uint32_t here, uint32_t *taken)
{
    struct smb_frame reply;
    int status = smb_frame_parse(bytes, &reply);
    *taken = 0;
    if (status != SMB_OK)
        return status;
    if (!(reply.flags & SMB_FLAG_REPLY) || (reply.flags & SMB_FLAG_CHECKSUM) != flags_of(link->client))
        return SMB_PROTOCOL;
    uint32_t checksum = smb_frame_checksum_bytes(&reply);
    uint32_t whole = SMB_FRAME_BYTES + (reply.payload == checksum ? checksum : 0);
    if (here < whole)
        return SMB_OK;
    link->crc = checksum > 0 ? smb_crc32c(0, bytes, SMB_FRAME_BYTES) : 0;
    if (whole > SMB_FRAME_BYTES && !smb_checksum_is(bytes + SMB_FRAME_BYTES, link->crc))
        return spoilt(link);
    *taken = whole;
    return link->watermark_count > 0 ? take_watermark(link, &reply) : take_reply(link, &reply);
}

/* Where the answer's payload is received. */
static uint8_t *landing(const struct flight *flight)
{
    return flight->opcode == SMB_READ && flight->encoded ? flight->encoded : flight->sink;
}

static uint32_t take_data(struct smb_link *link, const uint8_t *bytes, uint32_t count)
{
    struct flight *flight = link->reading;
    uint32_t missing = flight->answer_bytes - link->reading_have;
    uint32_t take = count < missing ? count : missing;
    if (flight->stream && bytes)
        memcpy(landing(flight) + link->reading_have, bytes, take);
    if (link->client->checksums)
        link->crc = smb_crc32c(link->crc, bytes ? bytes : landing(flight) + link->reading_have, take);
    link->reading_have += take;
    return take;
}

static int receive_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[2];
    int count = 0;
    uint32_t missing = 0;
    if (link->reading && link->reading->stream) { /* straight to the caller's memory, and the headers behind it */
        missing = link->reading->answer_bytes - link->reading_have;
        parts[count++] = (struct iovec){landing(link->reading) + link->reading_have, missing};
    }
    parts[count++] = (struct iovec){link->in + link->in_end, LINK_IN_BYTES - link->in_end};
    ssize_t done = count == 1 ? read(link->fd, parts->iov_base, parts->iov_len) : readv(link->fd, parts, count);
    if (done < 0)
        return errno == EAGAIN || errno == EINTR ? SMB_OK : SMB_LINK_LOST;
    if (done == 0)
        return SMB_LINK_LOST;
    *moved = true;
    link->heard_ns = smb_now_ns();
    uint32_t ours = (uint64_t)done < missing ? (uint32_t)done : missing;
    if (ours > 0)
        take_data(link, NULL, ours);
    link->in_end += (uint32_t)done - ours;
    return SMB_OK;
}

static void finish_reading(struct smb_link *link)
{
    struct flight *flight = link->reading;
    link->reading = NULL;
    take_from(find_sent(link, flight->sequence), &link->sent_end);
    if (flight->stream && flight->opcode == SMB_READ && flight->encoded)
        smb_kernel_apply_encoded(flight->wire, SMB_REPLACE, flight->sink, flight->encoded, 0, flight->length / 4, 1.0);
    take_success(link, flight, 0, 0);
}

/* What was received, into answers. */
static int digest(struct smb_link *link)
{
    int status = SMB_OK;
    while (status == SMB_OK) {
        uint32_t here = link->in_end - link->in_start;
        if (link->reading) {
            link->in_start += take_data(link, link->in + link->in_start, here);
            if (link->reading_have < link->reading->answer_bytes)
                break;
            if (link->client->checksums) {
                if (link->in_end - link->in_start < SMB_CHECKSUM_BYTES)
                    break;
                link->in_start += SMB_CHECKSUM_BYTES;
                if (!smb_checksum_is(link->in + link->in_start - SMB_CHECKSUM_BYTES, link->crc))
                    return spoilt(link);
            }
            finish_reading(link);
        } else if (here >= SMB_FRAME_BYTES) {
            uint32_t taken;
            status = take_header(link, link->in + link->in_start, here, &taken);
            link->in_start += taken;
            if (taken == 0)
                break;
        } else {
            break;
        }
    }
    uint32_t left = link->in_end - link->in_start;
    memmove(link->in, link->in + link->in_start, left);
    link->in_start = 0;
    link->in_end = left;
    return status;
}

/* ---- breaking and resuming */

/* What was sent goes back to what is to be sent, in order: (sent, unsent). Reads and waits that nobody waits for are dropped. */
static void gather(struct smb_link *link)
{
    *link->sent_end = link->unsent;
    if (!link->unsent)
        link->unsent_end = link->sent_end;
    if (link->sent)
        link->unsent = link->sent;
    if (!link->unsent)
        link->unsent_end = &link->unsent;
    link->sent = NULL;
    link->sent_end = &link->sent;
    for (struct flight **at = &link->unsent; *at;) {
        if (!(*at)->stream && !(*at)->doubt)
            put_back(link, take_from(at, &link->unsent_end));
        else
            at = &(*at)->next;
    }
}

static void break_connection(struct smb_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    link->reading = NULL;
    link->in_start = link->in_end = 0;
    link->sent_bytes = 0;
    link->watermark_count = 0;
    gather(link);
    enter(link, LINK_DOWN);
}

static struct watermark *watermark_of(struct smb_link *link, const struct flight *flight)
{
    for (uint32_t i = 0; i < link->watermark_count; i++)
        if (link->watermarks[i].segment_id == flight->segment_id && link->watermarks[i].epoch == flight->epoch)
            return &link->watermarks[i];
    return NULL;
}

static bool in_doubt(const struct flight *flight)
{
    return flight->fate != SMB_DOUBT_NOT_APPLIED && smb_opcode_changes(flight->opcode);
}

/* Begins to ask for the watermark of every segment that has changes in doubt. */
static int ask_watermarks(struct smb_link *link)
{
    link->watermark_count = link->watermarks_answered = 0;
    link->watermark_bytes_sent = 0;
    for (struct flight *flight = link->unsent; flight; flight = flight->next) {
        if (!in_doubt(flight) || watermark_of(link, flight))
            continue;
        if (!link->watermarks)
            link->watermarks = calloc(WINDOW_FRAMES, sizeof *link->watermarks);
        if (!link->watermarks || link->watermark_count == WINDOW_FRAMES)
            return SMB_OUT_OF_MEMORY;
        link->watermarks[link->watermark_count++] =
            (struct watermark){.segment_id = flight->segment_id, .epoch = flight->epoch, .sequence = link->made++};
    }
    return SMB_OK;
}

static int send_watermarks(struct smb_link *link, bool *moved)
{
    uint8_t bytes[SMB_FRAME_BYTES + SMB_CHECKSUM_BYTES];
    uint32_t each = watermark_frame_bytes(link);
    while (link_wants_output(link)) {
        const struct watermark *watermark = &link->watermarks[link->watermark_bytes_sent / each];
        uint64_t skip = link->watermark_bytes_sent % each;
        struct smb_frame frame = {.opcode = SMB_WATERMARK, .flags = flags_of(link->client),
                                  .payload = each - SMB_FRAME_BYTES, .lane = link->lane, .epoch = watermark->epoch,
                                  .session = link->client->session, .sequence = watermark->sequence,
                                  .segment = watermark->segment_id};
        smb_frame_encode(&frame, bytes);
        smb_store_checksum(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES));
        ssize_t done = send(link->fd, bytes + skip, each - skip, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (done < 0)
            return errno == EAGAIN || errno == EINTR ? SMB_OK : SMB_LINK_LOST;
        *moved = true;
        link->watermark_bytes_sent += (uint64_t)done;
    }
    return SMB_OK;
}

static void mark_repeated(const struct smb_link *link, struct flight *flight)
{
    struct smb_frame frame;
    /* Our own header: it parses. */
    if (!flight->was_sent || smb_frame_parse(flight->header, &frame) != SMB_OK)
        return;
    atomic_fetch_add_explicit(&link->client->stats.repeated, 1, memory_order_relaxed);
    frame.flags |= SMB_FLAG_RETRY;
    smb_frame_encode(&frame, flight->header);
    if (flight->opcode == SMB_LOCK) /* it keeps its place in the queue */
        smb_store64(flight->small + 16, smb_load64(flight->small + 16) + (smb_now_ns() - flight->made_ns) / 1000000U);
    flight->made_ns = smb_now_ns();
    seal(flight);
}

/* true: its fate is all that anybody wants of it. */
static bool decided(struct smb_link *link, struct flight *flight)
{
    if (!in_doubt(flight))
        return false;
    const struct watermark *watermark = watermark_of(link, flight);
    if (watermark->status != SMB_OK || flight->fate == SMB_DOUBT_UNKNOWN)
        flight->fate = SMB_DOUBT_UNKNOWN; /* once forgotten, whatever the lane has done since */
    else if (flight->sequence > watermark->value)
        flight->fate = SMB_DOUBT_NOT_APPLIED;
    else
        flight->fate = flight->sequence > watermark->refused ? SMB_DOUBT_APPLIED : SMB_DOUBT_UNKNOWN; /* its repetition tells */
    return !flight->stream || (flight->fate == SMB_DOUBT_APPLIED && !flight->sink && !is_atomic(flight->opcode));
}

/* Every watermark is here: what was applied is answered, the rest is sent again. */
static void resume(struct smb_link *link)
{
    for (struct flight **at = &link->unsent; *at;) {
        if (decided(link, *at)) {
            struct flight *flight = take_from(at, &link->unsent_end);
            if (flight->stream) {
                take_success(link, flight, 0, 0);
            } else {
                settle(flight, flight->fate);
                landed(link, flight);
            }
        } else {
            mark_repeated(link, *at);
            at = &(*at)->next;
        }
    }
    link->watermark_count = 0;
    enter(link, LINK_UP);
}

/* A new connection was handed over. */
static int adopt_connection(struct smb_link *link, int fd)
{
    if (state_of(link) != LINK_DOWN)
        break_connection(link);
    link->fd = fd;
    int status = ask_watermarks(link);
    if (status == SMB_OK && link->watermark_count == 0)
        resume(link);
    else
        enter(link, LINK_RESUMING);
    return status;
}

/* An idle link says nothing; if it can be read now, its server is gone, and to know that before the first byte is sent is
 * the difference between "not applied" and "unknown". */
static bool peer_is_gone(const struct smb_link *link)
{
    uint8_t byte;
    ssize_t n = recv(link->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n >= 0 || (errno != EAGAIN && errno != EINTR);
}

static int move(struct smb_link *link, bool *moved)
{
    int status = SMB_OK;
    if (state_of(link) == LINK_RESUMING) {
        status = send_watermarks(link, moved);
    } else {
        if (link->flying == 0 && smb_now_ns() - link->heard_ns > QUIET_NS && peer_is_gone(link))
            return SMB_LINK_LOST;
        fill_window(link);
        if (link->unsent)
            status = send_some(link, moved);
    }
    if (status == SMB_OK && (link->sent || link->watermark_count > 0))
        status = receive_some(link, moved);
    if (status == SMB_OK)
        status = digest(link);
    if (status == SMB_OK && state_of(link) == LINK_RESUMING && link->watermarks_answered == link->watermark_count)
        resume(link);
    return status;
}

bool link_progress(struct smb_link *link)
{
    bool moved = false;
    if (atomic_load_explicit(&link->closing, memory_order_relaxed)) {
        link_shut(link, link->closed_why ? link->closed_why : SMB_LINK_LOST);
        return true;
    }
    if (state_of(link) == LINK_CLOSED) {
        link_shut(link, link->closed_why);
        return true;
    }
    int fresh = atomic_exchange(&link->fresh_fd, -1);
    int status = fresh >= 0 ? adopt_connection(link, fresh) : SMB_OK;
    if (status == SMB_OK && state_of(link) != LINK_DOWN)
        status = move(link, &moved);
    /* It will not do better the next time; unless its bytes were spoilt on the way. */
    if ((status == SMB_PROTOCOL || status == SMB_VERSION) && !link->client->checksums) {
        link_shut(link, status);
        return true;
    }
    if (status != SMB_OK) {
        if (status == SMB_PROTOCOL || status == SMB_VERSION)
            spoilt(link);
        break_connection(link);
        moved = true;
    }
    if (state_of(link) == LINK_DOWN)
        client_want_link(link, link_busy(link));
    return moved;
}

/* What of the stream was never made into frames. */
static void note_unmade(struct stream *stream)
{
    while (stream->have_piece && !stream->ask) {
        if (smb_opcode_changes(stream->request->opcode))
            call_doubt(stream->call, stream->piece.buffer_offset, (uint32_t)stream->piece.bytes, SMB_DOUBT_NOT_APPLIED);
        stream_advance(stream);
    }
    stream->have_piece = false;
}

static void fail_flights(struct smb_link *link, int status)
{
    while (link->unsent) {
        struct flight *flight = take_from(&link->unsent, &link->unsent_end);
        struct stream *stream = flight->stream;
        int fate = flight->fate == SMB_DOUBT_PENDING ? SMB_DOUBT_UNKNOWN : flight->fate;
        settle(flight, fate);
        if (stream) {
            if (smb_opcode_changes(flight->opcode))
                call_doubt(stream->call, flight->buffer_offset, flight->length, fate);
            bool nothing_sent = stream->told ? !stream->told->sent : !stream->call->outcome->sent;
            call_failed(stream, status == SMB_LINK_LOST && nothing_sent ? SMB_DISCONNECTED : status);
            note_unmade(stream);
        }
        landed(link, flight);
    }
}

void link_shut(struct smb_link *link, int status)
{
    if (state_of(link) != LINK_CLOSED)
        break_connection(link);
    link->closed_why = status;
    enter(link, LINK_CLOSED);
    client_want_link(link, false);
    fail_flights(link, status);
    while (link->queue_head) {
        struct stream *stream = link->queue_head;
        dequeue(link);
        bool nothing_sent = stream->told ? !stream->told->sent : !stream->call->outcome->sent;
        call_failed(stream, status == SMB_LINK_LOST && nothing_sent ? SMB_DISCONNECTED : status);
        note_unmade(stream);
        if (stream->in_flight == 0)
            call_stream_finished(stream);
    }
}

/* ---- callers that leave */

static void leave(struct flight *flight)
{
    struct stream *stream = flight->stream;
    flight->stream = NULL;
    flight->sink = NULL;
    stream->in_flight--;
    if (!smb_opcode_changes(flight->opcode))
        return;
    flight->doubt_index = call_doubt(stream->call, flight->buffer_offset, flight->length, flight->fate);
    if (flight->fate != SMB_DOUBT_PENDING || flight->doubt_index == UINT32_MAX)
        return;
    flight->doubt = stream->call->outcome->doubt;
    atomic_fetch_add_explicit(&flight->doubt->references, 1, memory_order_relaxed);
}

/* One that is half sent takes its connection along: its caller's memory can't be used any more. So does one of a data lane that
 * was sent: it may be parked at the server, and all that comes after it with it; on the next connection it is not there. */
void link_abandon(struct smb_link *link, struct stream *stream)
{
    if (stream->queued)
        take_out_of_queue(link, stream);
    note_unmade(stream);
    bool half_sent = link->unsent && link->unsent->stream == stream && link->sent_bytes > 0;
    bool parked = false;
    for (struct flight *flight = link->sent; flight; flight = flight->next) {
        if (flight->stream == stream) {
            leave(flight);
            parked |= !stream->ask;
        }
    }
    for (struct flight **at = &link->unsent; *at;) {
        struct flight *flight = *at;
        if (flight->stream == stream) {
            leave(flight);
            if (!flight->doubt && !(half_sent && at == &link->unsent)) {
                put_back(link, take_from(at, &link->unsent_end));
                continue;
            }
        }
        at = &flight->next;
    }
    if (half_sent || (parked && state_of(link) == LINK_UP))
        break_connection(link);
    call_stream_finished(stream);
}
