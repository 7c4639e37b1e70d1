/* lab.h: certificates for tests of TLS. For one thread. */
#ifndef SMB_LAB_H
#define SMB_LAB_H

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "check.h"
#include "smb/tls.h"

enum { PEM_BYTES = 4096 };

struct holder {
    X509 *certificate;
    EVP_PKEY *key;
    char certificate_pem[PEM_BYTES], key_pem[PEM_BYTES];
};

static void extend(X509 *certificate, X509 *issuer, int what, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, certificate, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, what, value);
    CHECK(extension && X509_add_ext(certificate, extension, -1) == 1);
    X509_EXTENSION_free(extension);
}

static void to_text(BIO *pem, char *text)
{
    int bytes = BIO_read(pem, text, PEM_BYTES - 1);
    CHECK(bytes > 0);
    text[bytes] = 0;
    BIO_free(pem);
}

/* `names`: NULL for an authority, which signs its own certificate. */
static void issue(struct holder *holder, const struct holder *authority, const char *names,
                  const char *purposes)
{
    static long serial = 1;
    holder->key = EVP_EC_gen("P-256");
    X509 *made = holder->certificate = X509_new();
    X509_set_version(made, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(made), -300);
    X509_gmtime_adj(X509_getm_notAfter(made), 3600);
    X509_set_pubkey(made, holder->key);
    X509_NAME *name = X509_NAME_new();
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                               (const unsigned char *)(names ? "somebody" : "authority"), -1, -1,
                               0);
    X509_set_subject_name(made, name);
    X509_set_issuer_name(made, authority ? X509_get_subject_name(authority->certificate) : name);
    X509_NAME_free(name);
    extend(made, authority ? authority->certificate : made, NID_basic_constraints,
           names ? "critical,CA:FALSE" : "critical,CA:TRUE");
    if (names) {
        extend(made, authority->certificate, NID_subject_alt_name, names);
        extend(made, authority->certificate, NID_ext_key_usage, purposes);
    }
    CHECK(X509_sign(made, authority ? authority->key : holder->key, EVP_sha256()) > 0);
    BIO *pem = BIO_new(BIO_s_mem());
    CHECK(PEM_write_bio_X509(pem, made) == 1);
    to_text(pem, holder->certificate_pem);
    pem = BIO_new(BIO_s_mem());
    CHECK(PEM_write_bio_PrivateKey(pem, holder->key, NULL, NULL, 0, NULL, NULL) == 1);
    to_text(pem, holder->key_pem);
}

static void forget(struct holder *holder)
{
    X509_free(holder->certificate);
    EVP_PKEY_free(holder->key);
}

#define BOTH "serverAuth,clientAuth"
static struct holder authority, server_0, client;

static struct smb_tls *context_of(const struct holder *trusted, const struct holder *own)
{
    struct smb_tls *tls;
    char why[SMB_WHY_BYTES];
    CHECK_EQ(
        smb_tls_create(trusted->certificate_pem, own->certificate_pem, own->key_pem, &tls, why),
        SMB_OK);
    return tls;
}

static void open_lab(void)
{
    issue(&authority, NULL, NULL, NULL);
    issue(&server_0, &authority,
          "URI:smb:role/server,URI:smb:name/server-0,DNS:server-0.server.smb", BOTH);
    issue(&client, &authority, "URI:smb:role/client,URI:smb:name/c", "clientAuth");
}

static void close_lab(void)
{
    forget(&authority);
    forget(&server_0);
    forget(&client);
}

#endif
