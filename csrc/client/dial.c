#include "client/dial.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/address.h"
#include "base/clock.h"
#include "client/client.h"
#include "smb/kernels.h"
#include "smb/segment.h"

/* All within a quarter of a second. */
enum { HANDSHAKES_TRIED = 7 };
/* SILENT_MS is the default time that a call waits, and less than the minutes for which address
 * translators remember an idle connection. */
enum { SILENT_MS = 10000, IDLE_S = 60, PROBED_S = 15 };

/* SMB_OK: the descriptor is ready for `events`. SMB_DISCONNECTED: the client was closed. */
static int wait_ready(int fd, short events, struct until until)
{
    for (;;) {
        uint64_t now = smb_now_ns();
        if (now >= until.deadline_ns)
            return SMB_TIMEOUT;
        struct pollfd poller = {.fd = fd, .events = events};
        uint64_t ms = (until.deadline_ns - now) / 1000000U + 1;
        int count = poll(&poller, 1, ms < LOOK_MS ? (int)ms : LOOK_MS);
        if (count > 0)
            return SMB_OK;
        if (count < 0 && errno != EINTR)
            return SMB_SYSTEM;
        if (client_look())
            return SMB_TIMEOUT;
        if (until.client && atomic_load_explicit(&until.client->closing, memory_order_relaxed))
            return SMB_DISCONNECTED;
    }
}

static int connect_to(int fd, const struct sockaddr *name, socklen_t length, struct until until)
{
    if (connect(fd, name, length) == 0)
        return SMB_OK;
    if (errno != EINPROGRESS) /* EAGAIN: a Unix listener whose queue is full */
        return SMB_DISCONNECTED;
    int status = wait_ready(fd, POLLOUT, until);
    int failure = 0;
    socklen_t failure_length = sizeof failure;
    if (status == SMB_OK && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &failure_length) != 0)
        return SMB_SYSTEM;
    errno = failure;
    return status != SMB_OK ? status : failure != 0 ? SMB_DISCONNECTED : SMB_OK;
}

/* SMB_OK: `done` more bytes were moved, maybe none. SMB_LINK_LOST: the connection has ended. */
static int after_move(const struct channel *channel, ssize_t done, bool receiving,
                      struct until until)
{
    if ((done == 0 && receiving) || channel_failed(done))
        return SMB_LINK_LOST;
    if (done > 0 && (receiving || !channel_unsent_bytes(channel)))
        return SMB_OK;
    return wait_ready(channel->fd, receiving ? POLLIN : POLLOUT, until);
}

static int send_all(const struct channel *channel, const uint8_t *bytes, size_t count,
                    struct until until)
{
    for (size_t done = 0; done < count || channel_unsent_bytes(channel);) {
        struct iovec part = {(uint8_t *)(uintptr_t)bytes + done, count - done};
        ssize_t n = channel_write(channel, &part, done < count ? 1 : 0);
        int status = n == 0 && done == count && !channel_unsent_bytes(channel)
                         ? SMB_OK
                         : after_move(channel, n, false, until);
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
    }
    return SMB_OK;
}

/* Like recv; a descriptor that comes along goes to *passed_fd. */
static ssize_t receive_some(const struct channel *channel, uint8_t *bytes, size_t room,
                            int *passed_fd)
{
    struct iovec part = {bytes, room};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    if (channel->tls)
        return channel_read(channel, &part, 1);
    ssize_t done = recvmsg(channel->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = done > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)) &&
        *passed_fd < 0)
        memcpy(passed_fd, CMSG_DATA(header), sizeof(int));
    return done;
}

int dial_exchange(const struct channel *channel, const struct smb_frame *request,
                  const uint8_t *body, bool by_record, struct until until, struct smb_frame *reply,
                  int *passed_fd)
{
    uint8_t bytes[SMB_RECORD_BYTES] = {0};
    struct smb_frame asked = *request;
    uint32_t checked = SMB_FRAME_BYTES + (body ? SMB_AUTHORIZE_BYTES : 0);
    asked.payload = checked - SMB_FRAME_BYTES + smb_frame_checksum_bytes(request);
    smb_frame_encode(&asked, bytes);
    if (body)
        memcpy(bytes + SMB_FRAME_BYTES, body, SMB_AUTHORIZE_BYTES);
    smb_store_checksum(bytes + checked, smb_crc32c(0, bytes, checked));
    size_t whole = by_record ? SMB_RECORD_BYTES : SMB_FRAME_BYTES + asked.payload;
    if (by_record)
        smb_store64(bytes + SMB_RECORD_ENDS_AT, SMB_NO_SLOT);
    int status = send_all(channel, bytes, whole, until);
    if (status != SMB_OK)
        return status;
    whole = SMB_FRAME_BYTES; /* until the header says how much more */
    for (size_t done = 0; done < whole;) {
        ssize_t n = receive_some(channel, bytes + done, whole - done, passed_fd);
        status = after_move(channel, n, true, until);
        if (status != SMB_OK)
            return status;
        done += n > 0 ? (size_t)n : 0;
        if (done != SMB_FRAME_BYTES || n < 0)
            continue;
        status = smb_frame_parse(bytes, reply);
        if (status != SMB_OK || reply->payload > smb_frame_checksum_bytes(reply))
            return status != SMB_OK ? status : SMB_PROTOCOL;
        whole += reply->payload;
    }
    if (reply->flags & SMB_FLAG_CHECKSUM &&
        !smb_checksum_is(bytes + SMB_FRAME_BYTES, smb_crc32c(0, bytes, SMB_FRAME_BYTES)))
        return SMB_LINK_LOST;
    if ((request->flags & SMB_FLAG_CHECKSUM) != (reply->flags & SMB_FLAG_CHECKSUM))
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    if (!(reply->flags & SMB_FLAG_REPLY) || reply->opcode != request->opcode ||
        reply->session != request->session)
        return reply->status == SMB_VERSION ? SMB_VERSION : SMB_PROTOCOL;
    return reply->status;
}

/* A request must not wait for the next one. If a device on the way forgets the connection, the
 * connection breaks after SILENT_MS, not after TCP's quarter of an hour, and a new one is made.
 * Probes keep an idle connection from being forgotten. A failure here costs time, not
 * correctness. */
static void keep_connected(int fd)
{
    const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},          {IPPROTO_TCP, TCP_USER_TIMEOUT, SILENT_MS},
        {SOL_SOCKET, SO_KEEPALIVE, 1},          {IPPROTO_TCP, TCP_KEEPIDLE, IDLE_S},
        {IPPROTO_TCP, TCP_KEEPINTVL, PROBED_S},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

int dial_tcp(const char *address, uint16_t port, struct until until, int *fd)
{
    struct address peer;
    if (!address_parse(address, port, &peer))
        return SMB_INVALID;
    *fd = socket(peer.name.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return SMB_SYSTEM;
    keep_connected(*fd);
    return connect_to(*fd, &peer.name.any, peer.length, until);
}

int peer_uid(int fd, uint32_t *uid)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return SMB_SYSTEM;
    *uid = peer.uid;
    return SMB_OK;
}

int dial_unix(const char *path, struct until until, int *fd)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    *fd = -1;
    if (strlen(path) >= sizeof name.sun_path)
        return SMB_INVALID;
    strcpy(name.sun_path, path);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int status = *fd < 0 ? SMB_SYSTEM
                         : connect_to(*fd, (struct sockaddr *)&name, sizeof name, until);
    uint32_t uid = 0;
    if (status == SMB_OK)
        status = peer_uid(*fd, &uid);
    return status == SMB_OK && !smb_believes(uid) ? SMB_UNTRUSTED : status;
}

int dial_fd(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 ? SMB_OK : SMB_SYSTEM;
}

/* Does the handshake of channel->tls; NULL there: out of memory. */
static int secure_once(struct channel *channel, struct until until)
{
    int status = channel->tls ? SMB_BUSY : SMB_OUT_OF_MEMORY;
    while (status == SMB_BUSY) {
        status = tls_handshake(channel->tls);
        if (status == SMB_BUSY) {
            int ready = wait_ready(channel->fd, channel_unsent_bytes(channel) ? POLLOUT : POLLIN,
                                   until);
            status = ready == SMB_OK ? SMB_BUSY : ready;
        }
    }
    return status;
}

int dial_tls(const struct smb_tls_peer *peer, struct until until, struct channel *channel,
             char *why)
{
    int status = SMB_LINK_LOST;
    for (int i = 0; i < HANDSHAKES_TRIED && status == SMB_LINK_LOST; i++) {
        struct timespec pause = {.tv_nsec = i ? 2000000L << i : 0};
        if (i > 0 && (smb_now_ns() + (uint64_t)pause.tv_nsec > until.deadline_ns || client_look()))
            break;
        if (i > 0)
            nanosleep(&pause, NULL);
        channel_close(channel);
        status = dial_tcp(peer->address, peer->port, until, &channel->fd);
        if (status == SMB_OK) {
            channel->tls = tls_begin(peer->tls, channel->fd, peer->expected);
            status = secure_once(channel, until);
        }
    }
    if (status == SMB_UNTRUSTED)
        snprintf(why, SMB_WHY_BYTES, "%s", tls_why(channel->tls));
    return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
}

/* The server gives its verdict on our certificate after the handshake: with its first bytes, which
 * gRPC sends unasked, or with an alert instead, or by closing the connection. */
static bool is_taken(const struct channel *channel, struct until until)
{
    uint8_t byte;
    struct iovec part = {&byte, 1};
    ssize_t done;
    do {
        done = channel_read(channel, &part, 1);
    } while (done < 0 && errno == EAGAIN && wait_ready(channel->fd, POLLIN, until) == SMB_OK);
    return done > 0 || (done < 0 && errno == EAGAIN);
}

int smb_tls_meet(struct smb_tls *tls, const char *address, uint16_t port, uint32_t role,
                 const char *host, uint32_t timeout_ms, char certificate[SMB_CERTIFICATE_BYTES],
                 char why[SMB_WHY_BYTES])
{
    struct until until = dial_until(NULL, timeout_ms);
    struct channel channel = {.fd = -1};
    why[0] = 0;
    int status = dial_tcp(address, port, until, &channel.fd);
    if (status == SMB_OK) {
        channel.tls = tls_begin_control(tls, channel.fd, role, host);
        status = secure_once(&channel, until);
    }
    if (status == SMB_OK)
        status = tls_certificate(channel.tls, certificate, SMB_CERTIFICATE_BYTES);
    bool taken = status != SMB_OK || is_taken(&channel, until);
    if (channel.tls)
        snprintf(
            why, SMB_WHY_BYTES, "%s",
            taken || tls_why(channel.tls)[0]
                ? tls_why(channel.tls)
                : "it does not accept us as a member of its cluster (it closes the connection)");
    channel_close(&channel);
    return status == SMB_LINK_LOST ? SMB_DISCONNECTED : status;
}
