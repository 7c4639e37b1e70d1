/* dial.h: opens a socket to a server, and exchanges one request and answer before the connection
 * carries calls. Called by any thread; blocks. */
#ifndef SMB_DIAL_H
#define SMB_DIAL_H

#include "base/clock.h"
#include "base/frame.h"
#include "channel/channel.h"
#include "client/client.h"

/* How long an attempt may take: until its deadline, or until the client is closed. */
struct until {
    const struct smb_client *client;
    uint64_t deadline_ns;
};

static inline struct until dial_until(const struct smb_client *client, uint32_t timeout_ms)
{
    return (struct until){client, smb_now_ns() + (uint64_t)timeout_ms * 1000000U};
}

/* The caller owns *fd, also on failure; -1: none. */
int dial_tcp(const char *address, uint16_t port, struct until until, int *fd);
/* SMB_UNTRUSTED: the listener's user is not trusted (smb_believes); nothing was sent. */
int dial_unix(const char *path, struct until until, int *fd);
/* The user of the process that listens, or listened, at the other end of a Unix socket.
 * SMB_SYSTEM. */
int peer_uid(int fd, uint32_t *uid);
/* Prepares a socket that somebody else opened. */
int dial_fd(int fd);
/* A server with too many strangers closes some of them, and this client may be one of them, so it
 * tries again. */
int dial_tls(const struct smb_tls_peer *peer, struct until until, struct channel *channel,
             char *why);
/* Sends one request and receives its answer, before the link carries calls. `body`: the payload of
 * AUTHORIZE, else NULL. by_record: send it as a record. *passed_fd becomes a descriptor that came
 * along, or -1. */
int dial_exchange(const struct channel *channel, const struct smb_frame *request,
                  const uint8_t *body, bool by_record, struct until until, struct smb_frame *reply,
                  int *passed_fd);

#endif
