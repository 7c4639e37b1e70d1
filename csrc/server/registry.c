/* The segments that a daemon serves, by id, and how much of its capacity is used. Control threads
 * change the registry; loops look up segments in it. */
#include "server/registry.h"

#include <stdlib.h>

#include "server/server.h"

static struct entry **bucket_of(struct smb_server *server, uint64_t id)
{
    return &server->buckets[(id * 0x9E3779B97F4A7C15U) >> 52];
}
_Static_assert(BUCKETS == 1 << 12, "bucket_of takes 12 bits");

static struct entry *find_entry(struct smb_server *server, uint64_t id)
{
    struct entry *entry = *bucket_of(server, id);
    while (entry && smb_segment_id(entry->segment) != id)
        entry = entry->next;
    return entry;
}

struct smb_segment *server_find(struct smb_server *server, uint64_t id)
{
    pthread_rwlock_rdlock(&server->registry_lock);
    struct entry *entry = find_entry(server, id);
    struct smb_segment *segment = entry ? smb_segment_retain(entry->segment) : NULL;
    pthread_rwlock_unlock(&server->registry_lock);
    return segment;
}

int registry_reserve(struct smb_server *server, uint64_t id, uint64_t bytes)
{
    int status = SMB_OK;
    pthread_rwlock_wrlock(&server->registry_lock);
    if (find_entry(server, id))
        status = SMB_EXISTS;
    else if (bytes > server->capacity_bytes - server->used_bytes)
        status = SMB_OUT_OF_MEMORY;
    else
        server->used_bytes += bytes;
    pthread_rwlock_unlock(&server->registry_lock);
    return status;
}

uint64_t smb_server_used_bytes(struct smb_server *server)
{
    pthread_rwlock_rdlock(&server->registry_lock);
    uint64_t bytes = server->used_bytes;
    pthread_rwlock_unlock(&server->registry_lock);
    return bytes;
}

void registry_give_back(struct smb_server *server, uint64_t bytes)
{
    pthread_rwlock_wrlock(&server->registry_lock);
    server->used_bytes -= bytes;
    pthread_rwlock_unlock(&server->registry_lock);
}

bool registry_enter(struct smb_server *server, struct entry *entry)
{
    uint64_t id = smb_segment_id(entry->segment);
    pthread_rwlock_wrlock(&server->registry_lock);
    struct entry **bucket = bucket_of(server, id);
    bool taken = find_entry(server, id) != NULL;
    if (!taken) {
        entry->next = *bucket;
        *bucket = entry;
        server->segments++;
    }
    pthread_rwlock_unlock(&server->registry_lock);
    return !taken;
}

struct entry *registry_take_out(struct smb_server *server, uint64_t id)
{
    pthread_rwlock_wrlock(&server->registry_lock);
    struct entry **at = bucket_of(server, id);
    while (*at && smb_segment_id((*at)->segment) != id)
        at = &(*at)->next;
    struct entry *entry = *at;
    if (entry) {
        *at = entry->next;
        struct smb_segment_info info;
        smb_segment_info(entry->segment, &info);
        smb_segment_counters(entry->segment, server->retired_operations, server->retired_bytes);
        server->retired_recovered_locks += info.recovered_locks;
        server->segments--;
        server->used_bytes -= info.file_bytes;
    }
    pthread_rwlock_unlock(&server->registry_lock);
    return entry;
}

/* The journal is opened before the server listens, so nobody adds or removes segments meanwhile.
 * Sessions may end at any time. */
int server_each_segment(struct smb_server *server,
                        void (*visit)(void *argument, struct smb_segment *segment), void *argument)
{
    pthread_rwlock_rdlock(&server->registry_lock);
    uint64_t count = 0;
    struct smb_segment **segments = calloc(server->segments + 1, sizeof *segments);
    for (int b = 0; b < BUCKETS && segments; b++)
        for (struct entry *entry = server->buckets[b]; entry; entry = entry->next)
            segments[count++] = smb_segment_retain(entry->segment);
    pthread_rwlock_unlock(&server->registry_lock);
    for (uint64_t i = 0; i < count; i++) {
        visit(argument, segments[i]);
        smb_segment_release(segments[i]);
    }
    free(segments);
    return segments ? SMB_OK : SMB_OUT_OF_MEMORY;
}
