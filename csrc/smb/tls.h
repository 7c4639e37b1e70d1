/* tls.h: certificates: an authority's and one's own for TLS, and what a peer's
 * certificate must say. Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_TLS_H
#define SMB_PUBLIC_TLS_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

/* cffi: begin */

/* An authority's certificates, an own one with its chain, and its key. Counted references; it never
 * changes. */
struct smb_tls;
enum { SMB_WHY_BYTES = 400 };
/* Of texts in PEM form. SMB_INVALID: what they hold does not belong together; why[] says it. */
int smb_tls_create(const char *ca, const char *certificate, const char *key, struct smb_tls **tls,
                   char why[400]);
void smb_tls_release(struct smb_tls *tls);

enum { SMB_HOST_BYTES = 256, SMB_CERTIFICATE_BYTES = 32768 };
enum { SMB_SERVER_NAME_BYTES = 65 /* a memory server's name, and its end */ };
/* What a certificate is for. smb/security/roles.py says what each may. */
enum smb_role {
    SMB_ROLE_CLIENT = 1,
    SMB_ROLE_READER = 2,
    SMB_ROLE_OPERATOR = 4,
    SMB_ROLE_SERVER = 8,
    SMB_ROLE_COORDINATOR = 16
};
enum { SMB_ROLES_OF_DATA = 15 }; /* all but the coordinator: it has nothing to do with data */
/* As its certificate says. The name may be empty but of a memory server. */
struct smb_holder {
    char role[32];
    char name[256];
};
/* Judges a certificate that gRPC was shown, by the rules of the engine's own connections
 * (base/certificate.h). `chain`: PEM, the peer's own first. `host`: the name of whom we called, in
 * one of these roles; empty: it has called us. SMB_UNTRUSTED: why[] says what is wrong with it.
 * SMB_INVALID: too long. */
int smb_tls_judge(struct smb_tls *tls, const char *chain, uint32_t roles, const char *host,
                  struct smb_holder *holder, char why[400]);

/* cffi: end */

#endif
