/* bond.h: what the two ends of a connection know of it alike, and the ends of another connection do
 * not. A proof of a token covers it (base/access.h), so one that is handed on to another connection
 * is not good there. docs/protocol.md, "Access".
 *
 * TLS: the exporter of the session, and both certificates. A Unix socket: the process at each end,
 * as the kernel tells the other one. That takes ids that mean the same to both, so both have to be
 * in one PID namespace and one user namespace; of others it is only certain that they are not, and
 * that the connection is a Unix socket. TCP in the clear and RDMA: nothing but which of these. */
#ifndef SMB_BOND_H
#define SMB_BOND_H

#include "base/channel.h"
#include "base/sha256.h"

struct bond {
    uint8_t bytes[SHA256_BYTES];
};

/* The number of a namespace of this process, which lies at that path; 0: not known. */
uint32_t bond_namespace(const char *path);
/* Where this process's ids hold, as the client's HELLO says it; 0: not known. */
uint64_t bond_namespaces(void);
bool bond_is_unix(const struct channel *channel);

/* The bond of a connection whose TLS handshake, if there is one, is done. `namespaces` is what
 * HELLO said, and `ids` what its answer did: whether the server found its own there. SMB_SYSTEM. */
int bond_of(const struct channel *channel, bool by_reference, bool serves, uint64_t namespaces,
            bool ids, struct bond *bond);

#endif
