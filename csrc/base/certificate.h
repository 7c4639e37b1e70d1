/* certificate.h: who may be at the other end, by the certificate that it shows: the one judge of
 * data connections (tls.c) and, by smb_tls_judge and smb_tls_meet, of the control plane. What an
 * authority has to put into certificates is in docs/own-authority.md.
 *
 * Names and roles are the subject alternative name's, byte for byte; the subject's common name says
 * nothing, and there are no patterns. A certificate has one role, and a memory server's one name.
 *
 * It and tls.c are the files that know OpenSSL. */
#ifndef SMB_CERTIFICATE_H
#define SMB_CERTIFICATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <openssl/ssl.h>

#include "smb/tls.h"

/* Of whom one is taken. */
struct wanted {
    uint32_t
        roles;   /* of enum smb_role, as bits; with SMB_ROLE_SERVER who calls us has a name, too */
    bool serves; /* we have called it: it is for `host`, else for whoever it says */
    char host[SMB_HOST_BYTES];
};

/* X509_V_OK, and *holder tells whom it is for; else another one of its numbers, and why[] is a
 * sentence's end. `chain` may be NULL; it need not have the order of the chain. */
int certificate_judge(X509_STORE *authorities, X509 *shown, STACK_OF(X509) * chain,
                      const struct wanted *wanted, struct smb_holder *holder,
                      char why[SMB_WHY_BYTES]);
/* How every context and every judgement is set up: keys and signatures of 112 bits, and what is in
 * ca.pem is trusted, though it may itself be of a higher authority. */
enum { CERTIFICATE_SECURITY_LEVEL = 2 };
/* A stranger's chain costs us time before he is known: at most so many authorities in it, and so
 * many certificates in all that he shows. */
enum { CERTIFICATE_DEPTH_MAX = 8, CERTIFICATES_MAX = CERTIFICATE_DEPTH_MAX + 2 };

#endif
