/* certificate.h: judges a peer by the certificate that it shows, for data connections (tls.c) and,
 * by smb_tls_judge and smb_tls_meet, for the control plane. docs/own-authority.md says what an
 * authority has to put into certificates.
 *
 * Names and roles are those of the subject alternative name, compared byte for byte. The subject's
 * common name is ignored, and there are no patterns. A certificate has one role; a memory server's
 * also has one name. Only certificate.c and tls.c know OpenSSL. */
#ifndef SMB_CERTIFICATE_H
#define SMB_CERTIFICATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <openssl/ssl.h>

#include "smb/tls.h"

/* Which peers are accepted. */
struct wanted {
    /* bits of enum smb_role; a peer with SMB_ROLE_SERVER that calls us must also have a name */
    uint32_t roles;
    /* true: we have called the peer, whose certificate must be for `host`; false: it has called us,
     * and may have any name */
    bool serves;
    char host[SMB_HOST_BYTES];
};

/* Who is refused although the certificate is good: smb_tls_deny. Immutable. */
struct denied {
    STACK_OF(X509_CRL) * lists; /* NULL: none */
    char *lines;                /* begins with a newline; NULL: none */
};

/* X509_V_OK: *holder says whose certificate it is. Otherwise another number of OpenSSL's, and why[]
 * is the end of a sentence about the peer. `chain` may be NULL, and its certificates may be in any
 * order. */
int certificate_judge(X509_STORE *authorities, const struct denied *denied, X509 *shown,
                      STACK_OF(X509) * chain, const struct wanted *wanted,
                      struct smb_holder *holder, char why[SMB_WHY_BYTES]);
/* Settings of every context and every judgement: keys and signatures of at least 112 bits; the
 * certificates in ca.pem are trusted, also if a higher authority has issued them. */
enum { CERTIFICATE_SECURITY_LEVEL = 2 };
/* Limits of a chain, because a stranger's chain costs time before the stranger is known: the number
 * of authorities in it, and of all certificates that the stranger shows. */
enum { CERTIFICATE_DEPTH_MAX = 8, CERTIFICATES_MAX = CERTIFICATE_DEPTH_MAX + 2 };

#endif
