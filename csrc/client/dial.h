/* dial.h: a socket to a server, and one request with its answer before the connection carries
 * calls. Any thread; the caller blocks. */
#ifndef SMB_DIAL_H
#define SMB_DIAL_H

#include "base/channel.h"
#include "base/clock.h"
#include "base/frame.h"
#include "client/client.h"

/* For how long a connection may take: to its deadline, or until the client is closed. */
struct until {
    const struct smb_client *client;
    uint64_t deadline_ns;
};

static inline struct until dial_until(const struct smb_client *client, uint32_t timeout_ms)
{
    return (struct until){client, smb_now_ns() + (uint64_t)timeout_ms * 1000000U};
}

/* *fd is the caller's, also on failure; -1: none. */
int dial_tcp(const char *address, uint16_t port, struct until until, int *fd);
/* SMB_UNTRUSTED: who listens there is not to be believed (smb_believes); nothing was sent. */
int dial_unix(const char *path, struct until until, int *fd);
/* Of the process that listens, or listened, at the other end of a Unix socket. SMB_SYSTEM. */
int peer_uid(int fd, uint32_t *uid);
/* One that somebody else opened. */
int dial_fd(int fd);
/* A server that has more strangers than it bears closes some, and we may be one: it is tried
 * again. */
int dial_tls(const struct smb_tls_peer *peer, struct until until, struct channel *channel,
             char *why);
/* One request and its answer, before the link carries calls. `body`: of AUTHORIZE, else NULL. It
 * travels by record where that is said. *passed_fd gets a descriptor that came along, or -1. */
int dial_exchange(const struct channel *channel, const struct smb_frame *request,
                  const uint8_t *body, bool by_record, struct until until, struct smb_frame *reply,
                  int *passed_fd);

#endif
