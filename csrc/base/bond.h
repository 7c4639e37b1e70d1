/* bond.h: facts that both ends of a connection know alike, and that differ from those of any other
 * connection. The proof of a token covers them (base/access.h), so a proof that is handed on to
 * another connection is refused there. docs/protocol.md, "Access".
 *
 * TLS: the session's exporter, and both certificates. Unix socket: the process at each end, as the
 * kernel reports it to the other end. The ids of these processes mean the same to both ends only if
 * both are in one PID namespace and one user namespace. Otherwise the bond only says that the
 * connection is a Unix socket from another namespace. TCP in the clear and RDMA: only which of the
 * two it is. */
#ifndef SMB_BOND_H
#define SMB_BOND_H

#include "base/channel.h"
#include "base/sha256.h"

struct bond {
    uint8_t bytes[SHA256_BYTES];
};

/* The number of this process's namespace at that path; 0: unknown. */
uint32_t bond_namespace(const char *path);
/* The namespaces in which this process's ids are valid, as the client's HELLO says; 0: unknown. */
uint64_t bond_namespaces(void);
bool bond_is_unix(const struct channel *channel);

/* Computes the bond of a connection, after its TLS handshake if there is one. `namespaces` is the
 * value in HELLO. `ids` is the answer's: whether the server found its own namespaces there.
 * SMB_SYSTEM. */
int bond_of(const struct channel *channel, bool by_reference, bool serves, uint64_t namespaces,
            bool ids, struct bond *bond);

#endif
