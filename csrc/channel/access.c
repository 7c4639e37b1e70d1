#include "channel/access.h"

#include <string.h>

#include "base/sha256.h"

enum {
    LABEL_BYTES = 16,
    SECRET_TEXT_BYTES = LABEL_BYTES + 40,
    UNBOUND_TEXT_BYTES = LABEL_BYTES + 32,
    PROOF_TEXT_BYTES = UNBOUND_TEXT_BYTES + SHA256_BYTES,
    ANSWER_WORDS_BYTES = LABEL_BYTES + 40,
    ANSWER_TEXT_BYTES = ANSWER_WORDS_BYTES + SHA256_BYTES
};
static const char secret_label[LABEL_BYTES] = "smb token 1",
                  unbound_label[LABEL_BYTES] = "smb proof 1",
                  proof_label[LABEL_BYTES] = "smb proof 2",
                  answer_label[LABEL_BYTES] = "smb answer 2";

/* The words from which the secret is computed. smb/coordinator/token_issuer.py computes the
 * same. */
void access_secret(const uint8_t key[SMB_KEY_BYTES], uint64_t session,
                   const struct smb_token *token, uint8_t secret[SMB_KEY_BYTES])
{
    uint8_t text[SECRET_TEXT_BYTES];
    memcpy(text, secret_label, LABEL_BYTES);
    smb_store64(text + LABEL_BYTES, session);
    smb_store64(text + LABEL_BYTES + 8, token->segment);
    smb_store64(text + LABEL_BYTES + 16, token->epoch | (uint64_t)token->rights << 32);
    smb_store64(text + LABEL_BYTES + 24, token->generation);
    smb_store64(text + LABEL_BYTES + 32, token->expires_ms);
    smb_hmac_sha256(key, SMB_KEY_BYTES, text, sizeof text, secret);
}

static void write_proof_text(const char *label, const struct access_connection *connection,
                             uint8_t text[UNBOUND_TEXT_BYTES])
{
    memcpy(text, label, LABEL_BYTES);
    smb_store64(text + LABEL_BYTES, connection->nonce);
    smb_store64(text + LABEL_BYTES + 8, connection->instance);
    smb_store64(text + LABEL_BYTES + 16, connection->session);
    smb_store64(text + LABEL_BYTES + 24, connection->lane);
}

void access_proof(const uint8_t secret[SMB_KEY_BYTES], const struct access_connection *connection,
                  uint8_t proof[SMB_KEY_BYTES])
{
    uint8_t text[PROOF_TEXT_BYTES];
    write_proof_text(proof_label, connection, text);
    memcpy(text + UNBOUND_TEXT_BYTES, connection->bond.bytes, SHA256_BYTES);
    smb_hmac_sha256(secret, SMB_KEY_BYTES, text, sizeof text, proof);
}

void access_unbound_proof(const uint8_t secret[SMB_KEY_BYTES],
                          const struct access_connection *connection, uint8_t proof[SMB_KEY_BYTES])
{
    uint8_t text[UNBOUND_TEXT_BYTES];
    write_proof_text(unbound_label, connection, text);
    smb_hmac_sha256(secret, SMB_KEY_BYTES, text, sizeof text, proof);
}

struct access_answer access_answer(const struct smb_token *token,
                                   const struct access_connection *connection)
{
    uint8_t text[ANSWER_TEXT_BYTES], mac[SHA256_BYTES];
    memcpy(text, answer_label, LABEL_BYTES);
    smb_store64(text + LABEL_BYTES, connection->client_nonce);
    smb_store64(text + LABEL_BYTES + 8, connection->nonce);
    smb_store64(text + LABEL_BYTES + 16, connection->instance);
    smb_store64(text + LABEL_BYTES + 24, connection->session);
    smb_store64(text + LABEL_BYTES + 32, connection->lane);
    memcpy(text + ANSWER_WORDS_BYTES, connection->bond.bytes, SHA256_BYTES);
    smb_hmac_sha256(token->secret, SMB_KEY_BYTES, text, sizeof text, mac);
    /* the first half of the MAC: RFC 2104, section 5 */
    return (struct access_answer){{smb_load64(mac), smb_load64(mac + 8)}};
}

bool access_same_answer(const struct access_answer *one, const struct access_answer *other)
{
    /* constant time, wherever the words differ */
    return ((one->words[0] ^ other->words[0]) | (one->words[1] ^ other->words[1])) == 0;
}

void access_store(const struct smb_token *token, const struct access_connection *connection,
                  uint8_t payload[SMB_AUTHORIZE_BYTES])
{
    smb_store64(payload, token->rights | (uint64_t)token->generation << 32);
    smb_store64(payload + 8, token->expires_ms);
    access_proof(token->secret, connection, payload + 16);
}
