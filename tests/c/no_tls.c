/* Stands in for csrc/base/tls.c where the tests are built for a processor that this machine has no libssl for: no TLS is ever begun. */
#include "base/tls.h"

#include <errno.h>
#include <stddef.h>

int smb_tls_create(const char *ca, const char *certificate, const char *key, struct smb_tls **tls, char why[SMB_WHY_BYTES])
{
    (void)ca, (void)certificate, (void)key, (void)tls;
    why[0] = 0;
    return SMB_INVALID;
}

void smb_tls_release(struct smb_tls *tls)
{
    (void)tls;
}

struct smb_tls *tls_retain(struct smb_tls *tls)
{
    return tls;
}

struct tls *tls_begin(struct smb_tls *with, int fd, const char *expected)
{
    (void)with, (void)fd, (void)expected;
    return NULL;
}

void tls_end(struct tls *tls)
{
    (void)tls;
}

int tls_handshake(struct tls *tls)
{
    (void)tls;
    return SMB_LINK_LOST;
}

ssize_t tls_read(struct tls *tls, const struct iovec *parts, int count)
{
    (void)tls, (void)parts, (void)count;
    errno = ENOTCONN;
    return -1;
}

ssize_t tls_write(struct tls *tls, const struct iovec *parts, int count)
{
    return tls_read(tls, parts, count);
}

bool tls_has_unsent(const struct tls *tls)
{
    (void)tls;
    return false;
}

const char *tls_why(const struct tls *tls)
{
    (void)tls;
    return "";
}
