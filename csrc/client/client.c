#include "client/client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"

static int (*_Atomic wanted_still)(void); /* set once; NULL: no function was set */

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
    made->pid = getpid();
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

bool client_is_ours(const struct smb_client *client)
{
    return client->pid == getpid();
}

void client_wake_progress(struct smb_client *client)
{
    uint64_t one = 1;
    if (write(client->wake_fd, &one, sizeof one) < 0)
        return; /* the eventfd's counter is not 0, so the progress thread wakes anyway */
}

void smb_client_close(struct smb_client *client)
{
    atomic_store(&client->closing, true); /* the progress thread reads this in every round */
    pthread_mutex_lock(&client->mutex);
    pthread_cond_broadcast(&client->link_wanted);
    pthread_mutex_unlock(&client->mutex);
    client_wake_progress(client);
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
