#include "channel/bond.h"

#include <string.h>

#include "base/frame.h"
#include "base/namespaces.h"
#include "smb/types.h"

enum { LABEL_BYTES = 16 };
static const char label[LABEL_BYTES] = "smb channel 1";
/* The numbers of docs/protocol.md. 5 is the control plane's: smb/security/bond.py. */
enum kind { IN_THE_CLEAR = 1, INSIDE_TLS = 2, UNIX_SOCKET = 3, BY_RECORDS = 4 };

uint64_t bond_namespaces(void)
{
    uint64_t pid = namespace_inode("/proc/self/ns/pid");
    uint64_t user = namespace_inode("/proc/self/ns/user");
    return pid && user ? pid | user << 32 : 0;
}

bool bond_is_unix(const struct channel *channel)
{
    int domain = 0;
    socklen_t length = sizeof domain;
    return getsockopt(channel->fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
           domain == AF_UNIX;
}

static void add_word(struct sha256 *hash, uint64_t word)
{
    uint8_t bytes[8];
    smb_store64(bytes, word);
    sha256_add(hash, bytes, sizeof bytes);
}

static void begin(struct sha256 *hash, enum kind kind)
{
    sha256_begin(hash);
    sha256_add(hash, label, sizeof label);
    add_word(hash, kind);
}

static int add_tls(struct sha256 *hash, const struct channel *channel)
{
    struct tls_facts facts;
    if (!tls_facts(channel->tls, &facts))
        return SMB_SYSTEM;
    sha256_add(hash, &facts, sizeof facts);
    return SMB_OK;
}

static int add_processes(struct sha256 *hash, const struct channel *channel, bool serves)
{
    struct ucred peer, own = {.pid = getpid(), .uid = geteuid()};
    socklen_t length = sizeof peer;
    if (getsockopt(channel->fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return SMB_SYSTEM;
    const struct ucred *client = serves ? &peer : &own, *server = serves ? &own : &peer;
    add_word(hash, client->uid);
    add_word(hash, (uint64_t)client->pid);
    add_word(hash, server->uid);
    add_word(hash, (uint64_t)server->pid);
    return SMB_OK;
}

int bond_of(const struct channel *channel, bool by_reference, bool serves, uint64_t namespaces,
            bool ids, struct bond *bond)
{
    struct sha256 hash;
    bool local = !by_reference && !channel->tls && bond_is_unix(channel);
    int status = SMB_OK;
    begin(&hash, by_reference   ? BY_RECORDS
                 : channel->tls ? INSIDE_TLS
                 : local        ? UNIX_SOCKET
                                : IN_THE_CLEAR);
    if (local)
        add_word(&hash, namespaces);
    if (local && ids)
        status = add_processes(&hash, channel, serves);
    else if (!by_reference && channel->tls)
        status = add_tls(&hash, channel);
    sha256_end(&hash, bond->bytes);
    return status;
}
