#include "server/sessions.h"

#include "server/server.h"

bool session_has_ended(struct smb_server *server, uint64_t session)
{
    bool found = false;
    pthread_mutex_lock(&server->ended_lock);
    uint64_t count = server->ended_count < ENDED_MAX ? server->ended_count : ENDED_MAX;
    for (uint64_t i = 0; i < count && !found; i++)
        found = server->ended[i] == session;
    pthread_mutex_unlock(&server->ended_lock);
    return found;
}

void session_note_ended(struct smb_server *server, uint64_t session)
{
    pthread_mutex_lock(&server->ended_lock);
    /* the oldest one is forgotten, and would be accepted again */
    if (server->ended_count >= ENDED_MAX)
        atomic_store_explicit(&server->ended_are_known, false, memory_order_release);
    server->ended[server->ended_count++ % ENDED_MAX] = session;
    pthread_mutex_unlock(&server->ended_lock);
}

void smb_server_know_ended(struct smb_server *server, bool all)
{
    pthread_mutex_lock(&server->ended_lock);
    /* Release: pairs with the acquire in records.c. A thread that reads true sees the sessions
     * ended. */
    atomic_store_explicit(&server->ended_are_known, all && server->ended_count <= ENDED_MAX,
                          memory_order_release);
    pthread_mutex_unlock(&server->ended_lock);
}
