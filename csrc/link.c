/* One connection to a server: a ring of frames in flight, sent in order, answered in any. */
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

enum { SEND_PARTS = 32 };

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
static int exchange(struct smb_link *link, const struct smb_frame *request, uint64_t deadline_ns, struct smb_frame *reply,
                    int *passed_fd)
{
    uint8_t bytes[SMB_FRAME_BYTES];
    smb_frame_encode(request, bytes);
    for (size_t done = 0; done < sizeof bytes;) {
        ssize_t n = send(link->fd, bytes + done, sizeof bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        int status = n < 0 && errno != EAGAIN && errno != EINTR ? SMB_LINK_LOST
                     : n < 0 ? wait_ready(link->fd, POLLOUT, deadline_ns) : SMB_OK;
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
    }
    for (size_t done = 0; done < sizeof bytes;) {
        struct iovec part = {bytes + done, sizeof bytes - done};
        union {
            struct cmsghdr header;
            uint8_t bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                                 .msg_controllen = sizeof control.bytes};
        ssize_t n = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        int status = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) ? SMB_LINK_LOST
                     : n < 0 ? wait_ready(link->fd, POLLIN, deadline_ns) : SMB_OK;
        if (status != SMB_OK)
            return status;
        if (n < 0)
            continue;
        done += (size_t)n;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)) && *passed_fd < 0)
            memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
    }
    int status = smb_frame_parse(bytes, reply);
    if (status != SMB_OK)
        return status;
    if (!(reply->flags & SMB_FLAG_REPLY) || reply->opcode != request->opcode)
        return SMB_PROTOCOL;
    return reply->status;
}

/* Takes fd over. */
static int greet(struct smb_client *client, int fd, uint16_t lane, uint64_t deadline_ns, struct smb_link **link,
                 uint64_t *instance)
{
    struct smb_link *made = calloc(1, sizeof *made);
    if (!made) {
        close(fd);
        return SMB_OUT_OF_MEMORY;
    }
    made->client = client;
    made->references = 1;
    made->fd = fd;
    made->lane = lane;
    struct smb_frame hello = {.opcode = SMB_HELLO, .lane = lane, .session = client->session};
    struct smb_frame reply;
    int passed = -1;
    int status = exchange(made, &hello, deadline_ns, &reply, &passed);
    if (passed >= 0)
        close(passed);
    if (status != SMB_OK) {
        link_release(made);
        return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
    }
    *link = made;
    *instance = reply.segment;
    return SMB_OK;
}

int smb_client_connect_tcp(struct smb_client *client, const char *address, uint16_t port, uint16_t lane, uint32_t timeout_ms,
                           struct smb_link **link, uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct address peer;
    if (!address_parse(address, port, &peer))
        return SMB_INVALID;
    int fd = socket(peer.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int status = connect_to(fd, &peer.name.any, peer.length, deadline_ns);
    if (status != SMB_OK) {
        close(fd);
        return status;
    }
    return greet(client, fd, lane, deadline_ns, link, instance);
}

int smb_client_connect_unix(struct smb_client *client, const char *path, uint16_t lane, uint32_t timeout_ms,
                            struct smb_link **link, uint64_t *instance)
{
    uint64_t deadline_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof name.sun_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SMB_SYSTEM;
    int status = connect_to(fd, (struct sockaddr *)&name, sizeof name, deadline_ns);
    if (status != SMB_OK) {
        close(fd);
        return status;
    }
    return greet(client, fd, lane, deadline_ns, link, instance);
}

int smb_link_attach(struct smb_link *link, uint64_t segment_id, uint32_t epoch, uint32_t timeout_ms,
                    struct smb_segment **segment)
{
    struct smb_frame request = {.opcode = SMB_ATTACH, .lane = link->lane, .session = link->client->session,
                                .sequence = link->made++, .segment = segment_id, .epoch = epoch};
    link->sent = link->acked = link->made;
    struct smb_frame reply;
    int fd = -1;
    int status = exchange(link, &request, smb_now_ns() + (uint64_t)timeout_ms * 1000000U, &reply, &fd);
    if (status == SMB_OK && fd < 0)
        status = SMB_PROTOCOL;
    if (status == SMB_OK)
        status = smb_segment_open_fd(fd, segment);
    if (fd >= 0)
        close(fd);
    if (status == SMB_LINK_LOST || status == SMB_PROTOCOL || status == SMB_TIMEOUT)
        atomic_store(&link->broken, true);
    return status;
}

struct smb_link *link_retain(struct smb_link *link)
{
    atomic_fetch_add_explicit(&link->references, 1, memory_order_relaxed);
    return link;
}

void link_release(struct smb_link *link)
{
    if (atomic_fetch_sub_explicit(&link->references, 1, memory_order_acq_rel) != 1)
        return;
    close(link->fd);
    free(link);
}

int smb_link_alive(struct smb_link *link)
{
    return !atomic_load(&link->broken);
}

void smb_link_close(struct smb_link *link)
{
    /* The driver, if it uses the link now, sees the end of the stream and fails what was in flight. */
    atomic_store(&link->broken, true);
    shutdown(link->fd, SHUT_RDWR);
    link_release(link);
}

/* ---- carrying calls ----------------------------------------------------------------------------------------------- */

bool link_busy(const struct smb_link *link)
{
    return link->queue_head || link->acked != link->made;
}

bool link_wants_output(const struct smb_link *link)
{
    return link->sent != link->made;
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

void link_forget(struct smb_link *link, struct stream *stream)
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

static void make_frame(struct smb_link *link, struct stream *stream)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint64_t within = piece->buffer_offset - request->offset; /* in the caller's memory */
    struct smb_frame frame = {
        .opcode = (uint8_t)request->opcode,
        .dtype = stream->dtype,
        .lane = link->lane,
        .epoch = stream->epoch,
        .session = link->client->session,
        .sequence = link->made,
        .segment = stream->segment_id,
        .offset = piece->segment_offset,
        .length = (uint32_t)piece->bytes,
        .argument = request->argument,
    };
    struct flight *flight = &link->ring[link->made % RING_FRAMES];
    *flight = (struct flight){.stream = stream, .length = frame.length};
    switch (request->opcode) {
    case SMB_ACCUMULATE:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        if (request->sink)
            frame.flags = SMB_FLAG_FETCH;
        /* fall through */
    case SMB_WRITE:
        flight->payload = (const uint8_t *)request->source + within;
        flight->payload_bytes = frame.length;
        break;
    case SMB_ACCUMULATE_FROM:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        smb_store64(flight->small, stream->source_id);
        smb_store64(flight->small + 8, piece->segment_offset);
        flight->payload = flight->small;
        flight->payload_bytes = SMB_FROM_BYTES;
        break;
    case SMB_COMPARE_SWAP:
        smb_store64(flight->small, request->expected);
        flight->payload = flight->small;
        flight->payload_bytes = 8;
        break;
    }
    if (request->sink)
        flight->sink = (uint8_t *)request->sink + within;
    frame.payload = flight->payload_bytes;
    smb_frame_encode(&frame, flight->header);
    link->made++;
    stream->in_flight++;
    stream->have_piece = smb_cursor_next(&stream->cursor, &stream->piece);
}

/* Streams take turns, so that a small call is not held up behind a large one. */
static void fill_ring(struct smb_link *link)
{
    while (link->queue_head && link->made - link->acked < RING_FRAMES) {
        struct stream *stream = link->queue_head;
        for (int i = 0; i < STREAM_BURST && stream->have_piece && link->made - link->acked < RING_FRAMES; i++)
            make_frame(link, stream);
        if (!stream->have_piece || stream->next) {
            dequeue(link);
            if (stream->have_piece)
                link_enqueue(link, stream);
        }
    }
}

/* Frames [sent, made) from the callers' memory straight to the socket. */
static int send_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[SEND_PARTS];
    int count = 0;
    uint64_t skip = link->sent_bytes;
    for (uint64_t s = link->sent; s != link->made && count + 2 <= SEND_PARTS; s++) {
        struct flight *flight = &link->ring[s % RING_FRAMES];
        if (skip < SMB_FRAME_BYTES)
            parts[count++] = (struct iovec){flight->header + skip, SMB_FRAME_BYTES - skip};
        uint64_t payload_skip = skip > SMB_FRAME_BYTES ? skip - SMB_FRAME_BYTES : 0;
        if (flight->payload_bytes > payload_skip)
            parts[count++] = (struct iovec){(uint8_t *)(uintptr_t)flight->payload + payload_skip,
                                            flight->payload_bytes - payload_skip};
        skip = 0;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t done = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0)
        return errno == EAGAIN || errno == EINTR ? SMB_OK : SMB_LINK_LOST;
    *moved = true;
    link->sent_bytes += (uint64_t)done;
    while (link->sent != link->made && link->sent_bytes > 0) {
        link->ring[link->sent % RING_FRAMES].stream->call->outcome->sent = 1; /* at least its first byte */
        uint64_t whole = SMB_FRAME_BYTES + (uint64_t)link->ring[link->sent % RING_FRAMES].payload_bytes;
        if (link->sent_bytes < whole)
            break;
        link->sent_bytes -= whole;
        link->sent++;
    }
    return SMB_OK;
}

static void flight_landed(struct smb_link *link, struct flight *flight)
{
    struct stream *stream = flight->stream;
    flight->answered = true;
    flight->stream = NULL;
    while (link->acked != link->sent && link->ring[link->acked % RING_FRAMES].answered)
        link->acked++;
    stream->in_flight--;
    if (stream->in_flight == 0 && !stream->have_piece)
        call_stream_finished(stream);
}

/* The header of an answer. */
static int take_reply(struct smb_link *link, const uint8_t *bytes)
{
    struct smb_frame reply;
    int status = smb_frame_parse(bytes, &reply);
    if (status != SMB_OK)
        return status;
    if (!(reply.flags & SMB_FLAG_REPLY) || reply.sequence < link->acked || reply.sequence >= link->sent)
        return SMB_PROTOCOL;
    struct flight *flight = &link->ring[reply.sequence % RING_FRAMES];
    if (!flight->stream || flight->answered || reply.opcode != flight->stream->request->opcode ||
        (reply.payload > 0 && (reply.payload != flight->length || !flight->sink)))
        return SMB_PROTOCOL;
    if (reply.status != SMB_OK) {
        call_failed(flight->stream, reply.status);
        flight_landed(link, flight);
        return SMB_OK;
    }
    struct smb_outcome *outcome = flight->stream->call->outcome;
    outcome->bytes_applied += flight->length;
    outcome->result = reply.argument;
    if (reply.payload > 0) {
        link->reading = flight;
        link->reading_have = 0;
    } else if (flight->sink) {
        return SMB_PROTOCOL; /* data was asked for, and success without data can't be */
    } else {
        flight_landed(link, flight);
    }
    return SMB_OK;
}

static int receive_some(struct smb_link *link, bool *moved)
{
    struct iovec parts[2];
    int count = 0;
    uint32_t missing = 0;
    if (link->reading) { /* straight to the caller's memory, and the headers behind it in the same call */
        missing = link->reading->length - link->reading_have;
        parts[count++] = (struct iovec){(uint8_t *)link->reading->sink + link->reading_have, missing};
    }
    parts[count++] = (struct iovec){link->in + link->in_end, LINK_IN_BYTES - link->in_end};
    ssize_t done = readv(link->fd, parts, count);
    if (done < 0)
        return errno == EAGAIN || errno == EINTR ? SMB_OK : SMB_LINK_LOST;
    if (done == 0)
        return SMB_LINK_LOST;
    *moved = true;
    uint32_t ours = (uint64_t)done < missing ? (uint32_t)done : missing;
    link->reading_have += ours;
    link->in_end += (uint32_t)done - ours;
    return SMB_OK;
}

/* What was received, into answers. */
static int digest(struct smb_link *link)
{
    for (;;) {
        uint32_t here = link->in_end - link->in_start;
        if (link->reading) {
            uint32_t missing = link->reading->length - link->reading_have;
            uint32_t take = here < missing ? here : missing;
            memcpy((uint8_t *)link->reading->sink + link->reading_have, link->in + link->in_start, take);
            link->reading_have += take;
            link->in_start += take;
            if (link->reading_have < link->reading->length)
                break;
            struct flight *flight = link->reading;
            link->reading = NULL;
            flight_landed(link, flight);
        } else if (here >= SMB_FRAME_BYTES) {
            link->in_start += SMB_FRAME_BYTES;
            int status = take_reply(link, link->in + link->in_start - SMB_FRAME_BYTES);
            if (status != SMB_OK)
                return status;
        } else {
            break;
        }
    }
    uint32_t left = link->in_end - link->in_start;
    memmove(link->in, link->in + link->in_start, left);
    link->in_start = 0;
    link->in_end = left;
    return SMB_OK;
}

/* An idle link says nothing; if it can be read now, its server is gone, and to know that before the first byte is sent is
 * the difference between "not applied" and "unknown". */
static bool peer_is_gone(const struct smb_link *link)
{
    uint8_t byte;
    ssize_t n = recv(link->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n >= 0 || (errno != EAGAIN && errno != EINTR);
}

bool link_progress(struct smb_link *link)
{
    bool moved = false;
    int status = atomic_load_explicit(&link->broken, memory_order_relaxed) ? SMB_LINK_LOST : SMB_OK;
    if (status == SMB_OK && link->acked == link->made && peer_is_gone(link))
        status = SMB_LINK_LOST;
    if (status == SMB_OK) {
        fill_ring(link);
        if (link_wants_output(link))
            status = send_some(link, &moved);
    }
    if (status == SMB_OK && link->acked != link->sent)
        status = receive_some(link, &moved);
    if (status == SMB_OK)
        status = digest(link);
    if (status != SMB_OK) {
        link_break(link, status);
        return true;
    }
    return moved;
}

void link_break(struct smb_link *link, int status)
{
    atomic_store(&link->broken, true);
    shutdown(link->fd, SHUT_RDWR);
    link->reading = NULL;
    for (uint64_t s = link->acked; s != link->made; s++) {
        struct flight *flight = &link->ring[s % RING_FRAMES];
        if (!flight->stream)
            continue;
        struct stream *stream = flight->stream;
        bool untouched = s > link->sent || (s == link->sent && link->sent_bytes == 0);
        flight->stream = NULL;
        call_failed(stream, untouched && !stream->call->outcome->sent ? SMB_DISCONNECTED : status);
        if (--stream->in_flight == 0 && !stream->queued) {
            stream->have_piece = false;
            call_stream_finished(stream);
        }
    }
    link->acked = link->sent = link->made;
    while (link->queue_head) {
        struct stream *stream = link->queue_head;
        dequeue(link);
        call_failed(stream, stream->call->outcome->sent ? status : SMB_DISCONNECTED);
        stream->have_piece = false;
        call_stream_finished(stream);
    }
}
