#include "channel/certificate.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

enum { RSA_BITS_MIN = 2048, RSA_BITS_MAX = 8192, GROUP_BYTES = 32 };

static const char scheme[] = "smb:", role_uri[] = "smb:role/", name_uri[] = "smb:name/",
                  namespace_uri[] = "smb:namespace/";
static const char host_of_server[] = ".server.smb"; /* follows the server's name */
static const struct {
    const char *text;
    enum smb_role role;
} roles[] = {{"client", SMB_ROLE_CLIENT},
             {"reader", SMB_ROLE_READER},
             {"operator", SMB_ROLE_OPERATOR},
             {"server", SMB_ROLE_SERVER},
             {"coordinator", SMB_ROLE_COORDINATOR}};

/* The names in a certificate. */
struct shown {
    int roles; /* number of roles, including those that are too long or not printable */
    int names; /* number of names, counted likewise */
    bool is_for_host;
    bool is_unknown; /* a name of our scheme is of an unknown kind, or empty */
    bool is_denied;  /* one of its names is */
    struct smb_holder holder;
};

static bool take_text(const char *bytes, size_t count, char *text, size_t room)
{
    if (count >= room)
        return false;
    for (size_t i = 0; i < count; i++)
        if (bytes[i] < ' ' || bytes[i] > '~')
            return false;
    memcpy(text, bytes, count);
    text[count] = 0;
    return true;
}

/* Whether the URI begins with the prefix. A rest that does not fit, or cannot be printed, becomes
 * "?". */
static bool take_after(const char *prefix, const ASN1_IA5STRING *uri, char *text, size_t room)
{
    size_t length = strlen(prefix), bytes = (size_t)ASN1_STRING_length(uri);
    const char *data = (const char *)ASN1_STRING_get0_data(uri);
    if (bytes < length || memcmp(data, prefix, length) != 0)
        return false;
    if (!take_text(data + length, bytes - length, text, room))
        strcpy(text, "?");
    return true;
}

static bool begins(const ASN1_IA5STRING *uri, const char *prefix)
{
    size_t length = strlen(prefix);
    return (size_t)ASN1_STRING_length(uri) > length &&
           memcmp(ASN1_STRING_get0_data(uri), prefix, length) == 0;
}

/* A name of our scheme, in lower or upper case, of an unknown kind. A mistyped namespace must not
 * be read as "no namespace", because a client without a namespace reaches all of them. */
static bool is_unknown(const ASN1_IA5STRING *uri)
{
    size_t length = strlen(scheme);
    return (size_t)ASN1_STRING_length(uri) >= length &&
           strncasecmp((const char *)ASN1_STRING_get0_data(uri), scheme, length) == 0 &&
           !begins(uri, role_uri) && !begins(uri, name_uri) && !begins(uri, namespace_uri);
}

static bool is_text(const ASN1_IA5STRING *text, const char *expected)
{
    size_t length = strlen(expected);
    return length > 0 && (size_t)ASN1_STRING_length(text) == length &&
           memcmp(ASN1_STRING_get0_data(text), expected, length) == 0;
}

static bool is_listed(const struct denied *denied, const char *kind, const char *value)
{
    char line[SMB_HOST_BYTES + 16];
    int bytes = snprintf(line, sizeof line, "\n%s=%s\n", kind, value);
    return denied->lines && bytes > 0 && (size_t)bytes < sizeof line &&
           strstr(denied->lines, line) != NULL;
}

static void read_names(X509 *certificate, const struct denied *denied, const char *host,
                       struct shown *shown)
{
    struct smb_holder *holder = &shown->holder;
    *shown = (struct shown){0};
    GENERAL_NAMES *names = X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
        if (name->type == GEN_URI) {
            const ASN1_IA5STRING *uri = name->d.uniformResourceIdentifier;
            shown->roles += take_after(role_uri, uri, holder->role, sizeof holder->role);
            if (take_after(name_uri, uri, holder->name, sizeof holder->name)) {
                shown->names++;
                shown->is_denied |= is_listed(denied, "name", holder->name);
            }
            shown->is_unknown |= is_unknown(uri);
        } else if (name->type == GEN_DNS) {
            shown->is_for_host |= is_text(name->d.dNSName, host);
        }
    }
    GENERAL_NAMES_free(names);
}

static uint32_t role_of(const struct shown *shown)
{
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (shown->roles == 1 && strcmp(shown->holder.role, roles[i].text) == 0)
            return roles[i].role;
    return 0;
}

static bool has_one_name(const struct shown *shown)
{
    const char *name = shown->holder.name;
    return shown->names == 1 && name[0] && strcmp(name, "?") != 0 &&
           strlen(name) < SMB_SERVER_NAME_BYTES;
}

/* Whether `host` is this memory server's own name with the suffix. A memory server calls and
 * answers under a name that no other server has. */
static bool is_named_so(const struct shown *shown, const char *host)
{
    size_t length = strlen(shown->holder.name);
    return has_one_name(shown) && strncmp(host, shown->holder.name, length) == 0 &&
           strcmp(host + length, host_of_server) == 0;
}

static bool is_whom_we_want(const struct shown *shown, const struct wanted *wanted)
{
    uint32_t role = role_of(shown);
    if (!(role & wanted->roles))
        return false;
    if (wanted->serves)
        return shown->is_for_host && (role != SMB_ROLE_SERVER || is_named_so(shown, wanted->host));
    return role != SMB_ROLE_SERVER || has_one_name(shown);
}

/* Whether the libraries of both planes support this kind of key. */
static bool is_known_key(X509 *certificate)
{
    EVP_PKEY *key = X509_get0_pubkey(certificate);
    char group[GROUP_BYTES];
    int explicit = 0;
    switch (key ? EVP_PKEY_get_base_id(key) : EVP_PKEY_NONE) {
    case EVP_PKEY_RSA:
        return EVP_PKEY_get_bits(key) >= RSA_BITS_MIN && EVP_PKEY_get_bits(key) <= RSA_BITS_MAX;
    case EVP_PKEY_EC:
        EVP_PKEY_get_int_param(key, OSSL_PKEY_PARAM_EC_DECODED_FROM_EXPLICIT_PARAMS, &explicit);
        return !explicit && EVP_PKEY_get_group_name(key, group, sizeof group, NULL) == 1 &&
               (strcmp(group, SN_X9_62_prime256v1) == 0 || strcmp(group, SN_secp384r1) == 0);
    default: return false;
    }
}

/* Checks what the library does not. NULL: no fault. */
static const char *fault_of(STACK_OF(X509) * chain)
{
    for (int i = 0; i < sk_X509_num(chain); i++) {
        X509 *one = sk_X509_value(chain, i);
        if (!is_known_key(one))
            return "a key in its chain is neither RSA of 2048 to 8192 bits nor ECDSA on P-256 or "
                   "P-384";
        if (i > 0 && X509_check_ca(one) != 1)
            return "an issuer in its chain is not an authority (basicConstraints)";
    }
    return X509_get_key_usage(sk_X509_value(chain, 0)) & KU_DIGITAL_SIGNATURE
               ? NULL
               : "its key must not sign (keyUsage has no digitalSignature)";
}

/* ---- who is denied --------------------------------------------------------------------------- */

static bool is_serial_listed(const struct denied *denied, X509 *certificate)
{
    BIGNUM *number = ASN1_INTEGER_to_BN(X509_get0_serialNumber(certificate), NULL);
    char *text = number ? BN_bn2hex(number) : NULL;
    bool found = !text || is_listed(denied, "serial", text + strspn(text, "0"));
    OPENSSL_free(text);
    BN_free(number);
    return found;
}

/* Not by the library's own check: that refuses all certificates of an authority whose list is out
 * of date, and who cannot renew a list must still be able to work. */
static bool is_revoked(const struct denied *denied, X509 *certificate, X509 *issuer)
{
    for (int i = 0; i < sk_X509_CRL_num(denied->lists); i++) {
        X509_CRL *list = sk_X509_CRL_value(denied->lists, i);
        X509_REVOKED *entry;
        if (X509_CRL_get0_by_cert(list, &entry, certificate) == 1 &&
            X509_CRL_verify(list, X509_get0_pubkey(issuer)) == 1)
            return true;
    }
    return false;
}

/* NULL: nobody in the chain is denied. */
static const char *denial_of(const struct denied *denied, STACK_OF(X509) * chain,
                             const struct shown *shown)
{
    if (shown->is_denied)
        return "deny.txt has its name";
    for (int i = 0; i < sk_X509_num(chain); i++) {
        X509 *one = sk_X509_value(chain, i);
        if (denied->lines && is_serial_listed(denied, one))
            return i == 0 ? "deny.txt has its serial number"
                          : "deny.txt has the serial number of an issuer in its chain";
        if (i + 1 < sk_X509_num(chain) && is_revoked(denied, one, sk_X509_value(chain, i + 1)))
            return i == 0 ? "a list in crl.pem revokes it"
                          : "a list in crl.pem revokes an issuer in its chain";
    }
    return NULL;
}

static int64_t end_of(STACK_OF(X509) * chain)
{
    int64_t first = INT64_MAX;
    for (int i = 0; i < sk_X509_num(chain); i++) {
        struct tm moment;
        if (ASN1_TIME_to_tm(X509_get0_notAfter(sk_X509_value(chain, i)), &moment) != 1)
            continue;
        int64_t end = timegm(&moment);
        first = end < first ? end : first;
    }
    return first;
}

static const char *hint_of(int error, bool serves)
{
    switch (error) {
    case X509_V_ERR_INVALID_PURPOSE:
        return serves ? " (extendedKeyUsage has no serverAuth, or an issuer is not an authority)"
                      : " (extendedKeyUsage has no clientAuth, or an issuer is not an authority)";
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        return " (no authority in our ca.pem issued it, or an intermediate certificate is missing)";
    default: return "";
    }
}

static void say_who(const struct shown *shown, const struct wanted *wanted, char *why)
{
    int done = snprintf(why, SMB_WHY_BYTES,
                        "it shows the certificate of role \"%s\"%s, name \"%.64s\"%s",
                        shown->holder.role, shown->roles > 1 ? " and others" : "",
                        shown->holder.name, shown->names > 1 ? " and others" : "");
    if (wanted->serves && done > 0 && done < SMB_WHY_BYTES)
        snprintf(why + done, SMB_WHY_BYTES - (size_t)done, "; expected the certificate of %s%s",
                 wanted->host,
                 shown->is_for_host ? ": this has that host name, but another role or name" : "");
    size_t length = strlen(why);
    if (shown->roles > 1)
        snprintf(why + length, SMB_WHY_BYTES - length,
                 "; a certificate has one role: issue one for each role");
}

/* Returns an error number of X509_verify_cert; if the library is content, one of ours or
 * X509_V_OK. */
static int judge_chain(X509_STORE_CTX *chain, const struct wanted *wanted,
                       const struct shown *shown, char *why)
{
    const char *fault = NULL;
    int error = X509_V_ERR_CERT_CHAIN_TOO_LONG;
    if (sk_X509_num(X509_STORE_CTX_get0_untrusted(chain)) <= CERTIFICATES_MAX)
        error = X509_verify_cert(chain) == 1 ? X509_V_OK : X509_STORE_CTX_get_error(chain);
    if (error == X509_V_OK && (fault = fault_of(X509_STORE_CTX_get0_chain(chain))))
        error = X509_V_ERR_APPLICATION_VERIFICATION;
    if (error != X509_V_OK)
        snprintf(why, SMB_WHY_BYTES,
                 "its certificate (role \"%s\", name \"%.64s\") is not good: %.140s%s",
                 shown->holder.role, shown->holder.name,
                 fault ? fault : X509_verify_cert_error_string(error),
                 fault ? "" : hint_of(error, wanted->serves));
    return error;
}

int certificate_judge(X509_STORE *authorities, const struct denied *denied, X509 *certificate,
                      STACK_OF(X509) * chain, const struct wanted *wanted,
                      struct smb_holder *holder, char why[SMB_WHY_BYTES])
{
    struct shown shown;
    X509_STORE_CTX *context = X509_STORE_CTX_new();
    int error = X509_V_ERR_OUT_OF_MEM;
    read_names(certificate, denied, wanted->serves ? wanted->host : "", &shown);
    snprintf(why, SMB_WHY_BYTES, "out of memory while checking its certificate");
    if (context && X509_STORE_CTX_init(context, authorities, certificate, chain) == 1) {
        X509_VERIFY_PARAM *rules = X509_STORE_CTX_get0_param(context);
        X509_STORE_CTX_set_default(context, wanted->serves ? "ssl_server" : "ssl_client");
        X509_VERIFY_PARAM_set_flags(rules, X509_V_FLAG_PARTIAL_CHAIN);
        X509_VERIFY_PARAM_set_auth_level(rules, CERTIFICATE_SECURITY_LEVEL);
        X509_VERIFY_PARAM_set_depth(rules, CERTIFICATE_DEPTH_MAX);
        error = judge_chain(context, wanted, &shown, why);
        if (error == X509_V_OK && shown.is_unknown) {
            snprintf(
                why, SMB_WHY_BYTES,
                "its certificate (role \"%s\", name \"%.64s\") has a URI of the scheme \"smb\" "
                "that is neither smb:role/ROLE, smb:name/NAME nor smb:namespace/NAMESPACE",
                shown.holder.role, shown.holder.name);
            error = X509_V_ERR_APPLICATION_VERIFICATION;
        }
        STACK_OF(X509) *verified = X509_STORE_CTX_get0_chain(context);
        const char *denial = error == X509_V_OK ? denial_of(denied, verified, &shown) : NULL;
        if (denial) {
            snprintf(why, SMB_WHY_BYTES,
                     "its certificate (role \"%s\", name \"%.64s\") is denied: %s",
                     shown.holder.role, shown.holder.name, denial);
            error = X509_V_ERR_CERT_REVOKED;
        }
        shown.holder.ends_s = error == X509_V_OK ? end_of(verified) : 0;
        if (error == X509_V_OK && !is_whom_we_want(&shown, wanted)) {
            say_who(&shown, wanted, why);
            error = X509_V_ERR_APPLICATION_VERIFICATION;
        }
    }
    X509_STORE_CTX_free(context);
    ERR_clear_error();
    if (error == X509_V_OK) {
        *holder = shown.holder;
        why[0] = 0;
    }
    return error;
}
