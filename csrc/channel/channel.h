/* channel.h: the bytes of a connection, plain or inside TLS. Frames reach sockets only through this
 * interface. This folder is a room: who is at the other end, and what it may do. It includes
 * csrc/base alone. */
#ifndef SMB_CHANNEL_H
#define SMB_CHANNEL_H

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "channel/tls.h"

struct channel {
    int fd;          /* -1: no socket */
    struct tls *tls; /* NULL: without TLS */
};

/* Like readv on a non-blocking socket. */
static inline ssize_t channel_read(const struct channel *channel, const struct iovec *parts,
                                   int count)
{
    SMB_ASSERT(channel->fd >= 0 && count > 0);
    if (channel->tls)
        return tls_read(channel->tls, parts, count);
    return count == 1 ? read(channel->fd, parts->iov_base, parts->iov_len)
                      : readv(channel->fd, parts, count);
}

/* Like writev, without SIGPIPE. TLS may keep bytes that the socket did not take:
 * channel_unsent_bytes. */
static inline ssize_t channel_write(const struct channel *channel, const struct iovec *parts,
                                    int count)
{
    SMB_ASSERT(channel->fd >= 0);
    if (channel->tls)
        return tls_write(channel->tls, parts, count);
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts,
                             .msg_iovlen = (size_t)count};
    return count == 1
               ? send(channel->fd, parts->iov_base, parts->iov_len, MSG_NOSIGNAL | MSG_DONTWAIT)
               : sendmsg(channel->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static inline size_t channel_unsent_bytes(const struct channel *channel)
{
    return channel->tls ? tls_unsent_bytes(channel->tls) : 0;
}

static inline bool channel_failed(ssize_t done)
{
    return done < 0 && errno != EAGAIN && errno != EINTR;
}

/* Closes the socket and frees the TLS state. Preserves errno. */
static inline void channel_close(struct channel *channel)
{
    int saved = errno;
    if (channel->tls)
        tls_end(channel->tls);
    if (channel->fd >= 0)
        close(channel->fd);
    *channel = (struct channel){.fd = -1};
    errno = saved;
}

#endif
