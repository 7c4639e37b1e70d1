/* bond.h: the bond of a connection: a hash of facts that both of its ends know, and that differ
 * from connection to connection. The proof of a token covers the bond (access.h), so a proof that
 * is handed on to another connection is refused there. docs/protocol.md, "The channel".
 *
 * TLS: the session's exporter, and both certificates. Unix socket: the process at each end, as the
 * kernel reports it to the other end. The ids of these processes mean the same to both ends only if
 * both are in one PID namespace and one user namespace. Otherwise the bond only has the client's
 * namespaces, and that the connection is a Unix socket. TCP in the clear and RDMA: only which of
 * the two it is. */
#ifndef SMB_BOND_H
#define SMB_BOND_H

#include "base/sha256.h"
#include "channel/channel.h"

struct bond {
    uint8_t bytes[SHA256_BYTES];
};

/* This process's PID namespace, in the low 32 bits, and user namespace, as a client sends them in
 * HELLO. 0: one of them is unknown. */
uint64_t bond_namespaces(void);
bool bond_is_unix(const struct channel *channel);

/* Computes the bond of a connection, after its TLS handshake if there is one. `serves`: this is the
 * server's end. `namespaces`: the client's, from its HELLO. `ids`: whether they are the server's,
 * too; the client takes this from the answer (SMB_BOND_HAS_IDS). SMB_SYSTEM: a system call or TLS
 * failed. */
int bond_of(const struct channel *channel, bool by_reference, bool serves, uint64_t namespaces,
            bool ids, struct bond *bond);

#endif
