#include "server/grants.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sha256.h"
#include "server/server.h"

/* Estimates the coordinator's clock from its last message. The hosts' own clocks need not agree. */
static uint64_t coordinator_ms(const struct access_keys *keys, uint64_t now_ns)
{
    return keys->known_ms + (now_ns - keys->known_at_ns) / 1000000U;
}

bool access_ready(struct access_keys *keys)
{
    pthread_mutex_lock(&keys->lock);
    bool ready = keys->known_at_ns != 0;
    pthread_mutex_unlock(&keys->lock);
    return ready;
}

int access_check(struct access_keys *keys, const struct access_connection *connection,
                 const struct smb_frame *frame, const uint8_t *payload, struct grant *grant,
                 struct access_answer *answer, uint64_t *why)
{
    uint64_t first = smb_load64(payload), now_ns = smb_now_ns(), now_ms;
    struct smb_token token = {.segment = frame->segment,
                              .epoch = frame->epoch,
                              .rights = (uint32_t)first,
                              .generation = (uint32_t)(first >> 32),
                              .expires_ms = smb_load64(payload + 8)};
    uint8_t key[SMB_KEY_BYTES] = {0}, proof[SMB_KEY_BYTES];
    bool known = false;
    pthread_mutex_lock(&keys->lock);
    for (int i = 0; i < ACCESS_KEYS; i++) {
        if (keys->keys[i].there && keys->keys[i].generation == token.generation) {
            memcpy(key, keys->keys[i].bytes, sizeof key);
            known = true;
        }
    }
    now_ms = coordinator_ms(keys, now_ns);
    pthread_mutex_unlock(&keys->lock);
    access_secret(key, connection->session, &token, token.secret);
    access_proof(token.secret, connection, proof);
    bool right = sha256_same(proof, payload + 16);
    if (known && !right) {
        access_unbound_proof(token.secret, connection, proof);
        if (sha256_same(proof, payload + 16)) {
            *why = SMB_DENIED_UNBOUND;
            return SMB_VERSION;
        }
    }
    if (!known || !right || now_ms >= token.expires_ms || token.segment == 0 ||
        frame->session != connection->session) {
        *why = !known                       ? SMB_DENIED_GENERATION
               : !right                     ? SMB_DENIED_PROOF
               : now_ms >= token.expires_ms ? SMB_DENIED_EXPIRED
                                            : SMB_DENIED_PROOF;
        return SMB_DENIED;
    }
    *grant = (struct grant){.segment = token.segment,
                            .epoch = token.epoch,
                            .rights = token.rights,
                            .expires_ns = now_ns + (token.expires_ms - now_ms) * 1000000U};
    *answer = access_answer(&token, connection);
    return SMB_OK;
}

/* ---- what a connection has shown ------------------------------------------------------------- */

/* The entry of the segment's grant, or the free entry where it would be. Ids are random, so their
 * low bits serve as the hash. */
static struct grant *find_entry(const struct grants *grants, uint64_t segment)
{
    uint32_t at = (uint32_t)segment & (grants->room - 1);
    while (grants->entries[at].segment != 0 && grants->entries[at].segment != segment)
        at = (at + 1) & (grants->room - 1);
    return &grants->entries[at];
}

const struct grant *grants_find(const struct grants *grants, uint64_t segment)
{
    if (grants->room == 0 || segment == 0)
        return NULL;
    const struct grant *found = find_entry(grants, segment);
    return found->segment ? found : NULL;
}

/* Makes a larger table without the expired grants. */
static int grow(struct grants *grants)
{
    uint64_t now_ns = smb_now_ns();
    uint32_t live = 0;
    for (uint32_t i = 0; i < grants->room; i++)
        live += grants->entries[i].segment != 0 && grants->entries[i].expires_ns > now_ns;
    struct grants larger = {.room = 8};
    while (larger.room <= 3 * live) /* leaves room, so that the table is not full again soon */
        larger.room *= 2;
    if (larger.room > GRANTS_MAX || !(larger.entries = calloc(larger.room, sizeof *larger.entries)))
        return SMB_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < grants->room; i++) {
        if (grants->entries[i].segment != 0 && grants->entries[i].expires_ns > now_ns) {
            *find_entry(&larger, grants->entries[i].segment) = grants->entries[i];
            larger.count++;
        }
    }
    free(grants->entries);
    *grants = larger;
    return SMB_OK;
}

int grants_put(struct grants *grants, const struct grant *grant)
{
    if (2 * grants->count >= grants->room) {
        int status = grow(grants);
        if (status != SMB_OK)
            return status;
    }
    struct grant *entry = find_entry(grants, grant->segment);
    grants->count += entry->segment == 0;
    *entry = *grant;
    return SMB_OK;
}

void grants_clear(struct grants *grants)
{
    free(grants->entries);
    *grants = (struct grants){0};
}

/* ---- the server's side ----------------------------------------------------------------------- */

void smb_server_guard(struct smb_server *server)
{
    server->guarded = true;
}

int smb_server_check_proof(struct smb_server *server, uint64_t session,
                           const struct smb_token *shown, const uint8_t bond[32], uint64_t *left_ns)
{
    struct access_connection control = {.session = session, .lane = ACCESS_CONTROL_LANE};
    struct smb_frame frame = {.segment = shown->segment, .epoch = shown->epoch, .session = session};
    uint8_t payload[SMB_AUTHORIZE_BYTES];
    struct grant grant;
    struct access_answer answer;
    uint64_t why;
    if (!access_ready(&server->keys))
        return SMB_BUSY;
    memcpy(control.bond.bytes, bond, sizeof control.bond.bytes);
    smb_store64(payload, shown->rights | (uint64_t)shown->generation << 32);
    smb_store64(payload + 8, shown->expires_ms);
    memcpy(payload + 16, shown->secret, SMB_KEY_BYTES);
    int status = access_check(&server->keys, &control, &frame, payload, &grant, &answer, &why);
    uint64_t now_ns = smb_now_ns();
    if (status == SMB_OK)
        *left_ns = grant.expires_ns > now_ns ? grant.expires_ns - now_ns : 0;
    return status;
}

int smb_server_set_keys(struct smb_server *server, uint32_t count, const struct smb_key *set,
                        uint64_t now_ms)
{
    struct access_keys *keys = &server->keys;
    if (count == 0 || count > ACCESS_KEYS)
        return SMB_INVALID;
    pthread_mutex_lock(&keys->lock);
    for (uint32_t i = 0; i < ACCESS_KEYS; i++) {
        keys->keys[i].there = i < count;
        if (i < count) {
            keys->keys[i].generation = set[i].generation;
            memcpy(keys->keys[i].bytes, set[i].bytes, SMB_KEY_BYTES);
        }
    }
    keys->known_ms = now_ms;
    keys->known_at_ns = smb_now_ns();
    pthread_mutex_unlock(&keys->lock);
    return SMB_OK;
}
