#include "server/server.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/tls.h"
#include "memory/journal.h"
#include "server/counters.h"
#include "server/forwarder.h"
#include "server/inbox.h"
#include "server/loop.h"
#include "server/loop_thread.h"
#include "server/segments.h"
#include "server/waits.h"

void smb_server_use_tls(struct smb_server *server, struct smb_tls *tls)
{
    tls_retain(tls);
    pthread_mutex_lock(&server->tls_lock);
    struct smb_tls *before = server->tls;
    server->tls = tls;
    pthread_mutex_unlock(&server->tls_lock);
    if (before)
        smb_tls_release(before);
    for (int i = 0; i < server->loop_count; i++) {
        atomic_store_explicit(&server->loops[i].judge, true, memory_order_release);
        loop_wake(&server->loops[i]);
    }
}

int smb_server_create(uint64_t instance, int loops, uint64_t capacity_bytes,
                      struct smb_server **server)
{
    if (loops < 1 || loops > LOOPS_MAX)
        return SMB_INVALID;
    struct smb_server *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    made->instance = instance;
    made->capacity_bytes = capacity_bytes;
    made->loops = aligned_alloc(64, (size_t)loops * sizeof *made->loops);
    made->ended = calloc(ENDED_MAX, sizeof *made->ended);
    if (!made->loops || !made->ended) {
        free(made->loops);
        free(made->ended);
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    memset(made->loops, 0, (size_t)loops * sizeof *made->loops);
    made->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pthread_rwlock_init(&made->registry_lock, NULL);
    pthread_mutex_init(&made->lanes_lock, NULL);
    pthread_mutex_init(&made->keys.lock, NULL);
    pthread_mutex_init(&made->denials.lock, NULL);
    pthread_mutex_init(&made->tls_lock, NULL);
    uses_init(&made->uses);
    pthread_mutex_init(&made->ended_lock, NULL);
    pthread_mutex_init(&made->due_lock, NULL);
    pthread_mutex_init(&made->forward_lock, NULL);
    pthread_mutex_init(&made->roles_lock, NULL);
    pthread_cond_init(&made->due_changed, NULL);
    pthread_cond_init(&made->replica_changed, NULL);
    int status = waits_start(made);
    while (made->loop_count < loops && status == SMB_OK)
        status = loop_start(made, made->loop_count++);
    if (status != SMB_OK) {
        smb_server_destroy(made);
        return status;
    }
    *server = made;
    return SMB_OK;
}

void smb_server_destroy(struct smb_server *server)
{
    waits_stop(server);
    forwarder_stop(server);
    for (int i = 0; i < server->loop_count; i++)
        loop_stop(&server->loops[i]);
    for (int i = 0; i < server->loop_count; i++)
        loop_empty(&server->loops[i]);
    for (int i = 0; i < LISTENERS_MAX; i++) {
        if (server->listeners[i])
            close(server->listeners[i]->fd);
        free(server->listeners[i]);
    }
    if (server->spare_fd >= 0)
        close(server->spare_fd);
    segments_clear(server);
    if (server->journal)
        journal_close(server->journal);
    while (server->pasts) {
        struct past *past = server->pasts;
        server->pasts = past->next;
        free(past);
    }
    pthread_rwlock_destroy(&server->registry_lock);
    pthread_mutex_destroy(&server->lanes_lock);
    pthread_mutex_destroy(&server->denials.lock);
    pthread_mutex_destroy(&server->ended_lock);
    pthread_mutex_destroy(&server->due_lock);
    pthread_mutex_destroy(&server->forward_lock);
    pthread_mutex_destroy(&server->roles_lock);
    pthread_mutex_destroy(&server->tls_lock);
    uses_destroy(&server->uses);
    if (server->tls)
        smb_tls_release(server->tls);
    pthread_cond_destroy(&server->due_changed);
    pthread_cond_destroy(&server->replica_changed);
    free(server->ended);
    free(server->loops);
    free(server);
}
