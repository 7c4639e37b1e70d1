#include "server/uses.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "channel/tls.h"
#include "smb/types.h"

void uses_init(struct uses *uses)
{
    pthread_mutex_init(&uses->lock, NULL);
}

void uses_destroy(struct uses *uses)
{
    for (int i = 0; i < USE_BUCKETS; i++) {
        while (uses->buckets[i]) {
            struct use *use = uses->buckets[i];
            uses->buckets[i] = use->next;
            free(use);
        }
    }
    pthread_mutex_destroy(&uses->lock);
}

/* Call with the lock held: where the certificate's use is linked, or would be. */
static struct use **find_place(struct uses *uses, const uint8_t *certificate)
{
    struct use **at = &uses->buckets[certificate[0] % USE_BUCKETS];
    while (*at && memcmp((*at)->certificate, certificate, SHA256_BYTES) != 0)
        at = &(*at)->next;
    return at;
}

/* Call with the lock held. */
static void free_unused(struct uses *uses, struct use *use)
{
    if (use->connections || use->waits)
        return;
    *find_place(uses, use->certificate) = use->next;
    free(use);
}

int uses_enter(struct uses *uses, const struct tls *tls, struct use **use)
{
    uint8_t certificate[SHA256_BYTES];
    *use = NULL;
    if (!tls || !tls_client_certificate(tls, certificate))
        return SMB_OK;
    pthread_mutex_lock(&uses->lock);
    struct use **at = find_place(uses, certificate);
    if (!*at && (*at = calloc(1, sizeof **at)))
        memcpy((*at)->certificate, certificate, sizeof certificate);
    bool fits = *at && (*at)->connections < CONNECTIONS_PER_CERTIFICATE;
    if (fits) {
        (*at)->connections++;
        *use = *at;
    }
    pthread_mutex_unlock(&uses->lock);
    return fits ? SMB_OK : SMB_OUT_OF_MEMORY;
}

void uses_leave(struct uses *uses, struct use *use)
{
    if (!use)
        return;
    pthread_mutex_lock(&uses->lock);
    SMB_ASSERT(use->connections > 0);
    use->connections--;
    free_unused(uses, use);
    pthread_mutex_unlock(&uses->lock);
}

bool uses_take_wait(struct uses *uses, struct use *use)
{
    if (!use)
        return true;
    pthread_mutex_lock(&uses->lock);
    bool fits = use->waits < WAITS_PER_CERTIFICATE;
    use->waits += fits;
    pthread_mutex_unlock(&uses->lock);
    return fits;
}

void uses_give_wait(struct uses *uses, struct use *use)
{
    if (!use)
        return;
    pthread_mutex_lock(&uses->lock);
    SMB_ASSERT(use->waits > 0);
    use->waits--;
    free_unused(uses, use);
    pthread_mutex_unlock(&uses->lock);
}
