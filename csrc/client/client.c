#include "client/client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "client/link.h"

static int (*_Atomic wanted_still)(void); /* set once; NULL: nobody looks */

void smb_set_look(int (*look)(void))
{
    atomic_store_explicit(&wanted_still, look, memory_order_relaxed);
}

bool client_look(void)
{
    int (*look)(void) = atomic_load_explicit(&wanted_still, memory_order_relaxed);
    return look && look();
}

bool client_has_look(void)
{
    return atomic_load_explicit(&wanted_still, memory_order_relaxed) != NULL;
}

int smb_client_create(uint64_t session, struct smb_client **client)
{
    struct smb_client *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->references = 1;
    made->session = session;
    made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->wake_fd < 0) {
        int saved = errno;
        free(made);
        errno = saved;
        return SMB_SYSTEM;
    }
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->link_wanted, NULL);
    *client = made;
    return SMB_OK;
}

void smb_client_use_checksums(struct smb_client *client)
{
    client->checksums = true;
}

void smb_client_want_proof(struct smb_client *client)
{
    client->wants_proof = true;
}

uint64_t smb_client_spoilt(struct smb_client *client)
{
    return atomic_load_explicit(&client->spoilt, memory_order_relaxed);
}

void smb_client_count(struct smb_client *client)
{
    atomic_store_explicit(&client->stats.wanted, true, memory_order_relaxed);
}

void smb_client_counters(struct smb_client *client, struct smb_client_counters *counters)
{
    const struct client_stats *stats = &client->stats;
    memset(counters, 0, sizeof *counters);
    tally_read(&stats->at_once, counters->operations[SMB_TRANSPORT_SHM],
               counters->bytes[SMB_TRANSPORT_SHM]);
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++) {
        tally_read(&stats->calls[t], counters->operations[t], counters->bytes[t]);
        for (int i = 0; i < SMB_OPCODE_COUNT; i++)
            latency_read(&stats->latency[t][i], &counters->latencies.of[t][i]);
    }
    for (int i = 0; i < SMB_STATUS_COUNT; i++)
        counters->failed[i] = stats_read(&stats->failed[i]);
    counters->repeated_total = stats_read(&stats->repeated);
    counters->spoilt_total = smb_client_spoilt(client);
}

void client_wake_progress(struct smb_client *client)
{
    uint64_t one = 1;
    if (write(client->wake_fd, &one, sizeof one) < 0)
        return; /* its counter is not 0: the progress thread wakes anyway */
}

void smb_client_close(struct smb_client *client)
{
    atomic_store(&client->closing, true); /* read by the progress thread in every round */
    pthread_mutex_lock(&client->mutex);
    pthread_cond_broadcast(&client->link_wanted);
    pthread_mutex_unlock(&client->mutex);
    client_wake_progress(client);
}

void smb_client_destroy(struct smb_client *client)
{
    while (client->active) { /* with frames that a caller left, or broken since the last call */
        struct smb_link *link = client->active;
        client->active = link->next;
        link_release(link);
    }
    client_release(client);
}

struct smb_client *client_retain(struct smb_client *client)
{
    SMB_ASSERT(atomic_load_explicit(&client->references, memory_order_relaxed) > 0);
    atomic_fetch_add_explicit(&client->references, 1, memory_order_relaxed);
    return client;
}

void client_release(struct smb_client *client)
{
    SMB_ASSERT(atomic_load_explicit(&client->references, memory_order_relaxed) > 0);
    if (atomic_fetch_sub_explicit(&client->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_cond_destroy(&client->link_wanted);
    pthread_mutex_destroy(&client->mutex);
    close(client->wake_fd);
    free(client);
}

int client_may_use(struct smb_link *link)
{
    pthread_mutex_lock(&link->client->mutex);
    bool may = link->trusted || !link->client->wants_proof;
    pthread_mutex_unlock(&link->client->mutex);
    return may ? SMB_OK : SMB_UNTRUSTED;
}

void client_want_link(struct smb_link *link, bool wanted)
{
    struct smb_client *client = link->client;
    pthread_mutex_lock(&client->mutex);
    if (wanted && !link->wanted)
        pthread_cond_broadcast(&client->link_wanted);
    link->wanted = wanted; /* who has it in hands may be connecting it still */
    pthread_mutex_unlock(&client->mutex);
}

static struct smb_link *find_wanted(const struct smb_client *client)
{
    struct smb_link *link = client->links;
    while (link && (!link->wanted || link->in_hands))
        link = link->next_of_all;
    return link;
}

int smb_client_wait_down(struct smb_client *client, uint32_t timeout_ms, uint64_t *link_id)
{
    uint64_t until_ns = smb_now_ns() + (uint64_t)timeout_ms * 1000000U;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                             .tv_nsec = (long)(until_ns % 1000000000U)};
    int failure = 0;
    pthread_mutex_lock(&client->mutex);
    struct smb_link *link = find_wanted(client);
    while (!link && failure == 0 && !atomic_load(&client->closing)) {
        failure = pthread_cond_clockwait(&client->link_wanted, &client->mutex, CLOCK_MONOTONIC,
                                         &until);
        link = find_wanted(client);
    }
    if (link) {
        link->in_hands = true;
        *link_id = link->id;
    }
    pthread_mutex_unlock(&client->mutex);
    return atomic_load(&client->closing) ? SMB_DISCONNECTED : link ? SMB_OK : SMB_TIMEOUT;
}
