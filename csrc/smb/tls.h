/* tls.h: certificates for TLS: those of an authority and of this process, and the rules by which a
 * peer's certificate is judged. Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_TLS_H
#define SMB_PUBLIC_TLS_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

/* cffi: begin */

/* An authority's certificates, this process's certificate with its chain, and its key. Immutable,
 * so any thread may use it. Reference counted. */
struct smb_tls;
enum { SMB_WHY_BYTES = 400 };
/* Loads the three texts, which are in PEM form. SMB_INVALID: a text is damaged or too long, or the
 * certificate and the key do not match; why[] says which (empty: too long). SMB_OUT_OF_MEMORY.
 * Release with smb_tls_release. */
int smb_tls_create(const char *ca, const char *certificate, const char *key, struct smb_tls **tls,
                   char why[400]);
void smb_tls_release(struct smb_tls *tls);
/* Refuses peers whose certificate would be good otherwise. `lists`: revocation lists (CRL) in PEM,
 * which may be old; each counts for certificates of the authority that has signed it. `denied`:
 * lines "name=NAME" and "serial=HEX" (upper case, without leading zeros), each ended by a newline.
 * A serial number counts for each certificate of a chain. Both may be empty. Call it once, before
 * anybody else uses tls. SMB_INVALID: a text is damaged or too long; why[] as above.
 * SMB_OUT_OF_MEMORY. */
int smb_tls_deny(struct smb_tls *tls, const char *lists, const char *denied, char why[400]);

enum { SMB_HOST_BYTES = 256, SMB_CERTIFICATE_BYTES = 32768 };
enum { SMB_SERVER_NAME_BYTES = 65 /* a memory server's name with its terminating zero */ };
/* The role that a certificate gives its holder. smb/security/roles.py says what each role may
 * do. */
enum smb_role {
    SMB_ROLE_CLIENT = 1,
    SMB_ROLE_READER = 2,
    SMB_ROLE_OPERATOR = 4,
    SMB_ROLE_SERVER = 8,
    SMB_ROLE_COORDINATOR = 16
};
enum { SMB_ROLES_OF_DATA = 15 }; /* all roles but the coordinator, which uses no data */
/* The role and name in a certificate. Only a memory server's name is never empty. */
struct smb_holder {
    char role[32];
    char name[256];
    int64_t ends_s; /* when the first certificate of its chain ends, in seconds since 1970 */
};
/* Judges a certificate that gRPC was shown, by the rules of the engine's own connections
 * (channel/certificate.h). `chain` is PEM, with the peer's own certificate first. If this process
 * called the peer, `host` is the name that it called, and the peer must have one of `roles`; if the
 * peer called this process, `host` is empty. Does not block. SMB_UNTRUSTED: why[] says what is
 * wrong with the certificate. SMB_INVALID: the chain is too long. */
int smb_tls_judge(struct smb_tls *tls, const char *chain, uint32_t roles, const char *host,
                  struct smb_holder *holder, char why[400]);

/* cffi: end */

#endif
