/* The segments that a daemon serves, by id, and the books of its capacity. Control threads change
 * it, loops look up in it. */
#include "server/registry.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/counters.h"
#include "server/loop.h"
#include "server/replica.h"
#include "server/server.h"
#include "server/waits.h"

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

/* Capacity is taken before the memory, under the lock, so that two creations can't both fit into
 * the last gap. */
static int reserve(struct smb_server *server, uint64_t id, uint64_t bytes)
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

static void unreserve(struct smb_server *server, uint64_t bytes)
{
    pthread_rwlock_wrlock(&server->registry_lock);
    server->used_bytes -= bytes;
    pthread_rwlock_unlock(&server->registry_lock);
}

/* Takes the reference over. The bytes are reserved already. `left`: the segment is of an earlier
 * run. */
static int publish(struct smb_server *server, struct smb_segment *segment, const char *path,
                   bool left)
{
    struct entry *entry = calloc(1, sizeof *entry);
    char *own_path = strdup(path);
    int status = entry && own_path ? waits_serve(server, segment, left) : SMB_OUT_OF_MEMORY;
    if (status != SMB_OK) {
        free(entry);
        free(own_path);
        return status;
    }
    entry->segment = segment;
    entry->path = own_path;
    pthread_rwlock_wrlock(&server->registry_lock);
    struct entry **bucket = bucket_of(server, smb_segment_id(segment));
    bool taken = find_entry(server, smb_segment_id(segment)) != NULL;
    if (!taken) {
        entry->next = *bucket;
        *bucket = entry;
        server->segments++;
    }
    pthread_rwlock_unlock(&server->registry_lock);
    if (taken) {
        waits_close(segment, SMB_NOT_FOUND);
        free(own_path);
        free(entry);
        return SMB_EXISTS;
    }
    return SMB_OK;
}

static int create(struct smb_server *server, const char *path, uint64_t id, uint32_t epoch,
                  int dtype, uint64_t data_bytes, uint32_t chunk_bytes, const uint64_t *group)
{
    uint64_t file_bytes = smb_segment_file_bytes(data_bytes, chunk_bytes);
    if (file_bytes == 0)
        return SMB_INVALID;
    int status = reserve(server, id, file_bytes);
    if (status != SMB_OK)
        return status;
    struct smb_segment *segment;
    status = smb_segment_create(path, id, epoch, dtype, data_bytes, chunk_bytes, &segment);
    if (status == SMB_OK && group)
        smb_segment_mark_replicated(segment, *group); /* before anybody can find it */
    if (status == SMB_OK) {
        status = publish(server, segment, path, false);
        if (status != SMB_OK) {
            unlink(path);
            smb_segment_release(segment);
        }
    }
    if (status != SMB_OK)
        unreserve(server, file_bytes);
    return status;
}

int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id,
                              uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes)
{
    return create(server, path, id, epoch, dtype, data_bytes, chunk_bytes, NULL);
}

int smb_server_create_replica(struct smb_server *server, const char *path, uint64_t id,
                              uint64_t group, uint32_t epoch, int dtype, uint64_t data_bytes,
                              uint32_t chunk_bytes)
{
    return create(server, path, id, epoch, dtype, data_bytes, chunk_bytes, &group);
}

int smb_server_adopt_segment(struct smb_server *server, const char *path,
                             struct smb_segment_info *info)
{
    struct smb_segment *segment;
    int status = smb_segment_take_over(path, &segment);
    if (status != SMB_OK)
        return status;
    struct smb_segment_info found;
    smb_segment_info(segment, &found);
    status = found.deleted ? SMB_NOT_FOUND : reserve(server, found.id, found.file_bytes);
    if (status == SMB_OK) {
        status = publish(server, segment, path, true);
        if (status != SMB_OK)
            unreserve(server, found.file_bytes);
    }
    if (status == SMB_OK)
        *info = found;
    else
        smb_segment_release(segment);
    return status;
}

static struct smb_held held_of(const struct smb_segment *segment)
{
    struct smb_segment_info info;
    smb_segment_info(segment, &info);
    const struct replica *replica = replica_at(segment);
    struct smb_held held = {
        .id = info.id,
        .file_bytes = info.file_bytes,
        .role = replica ? replica_role(replica) : SMB_REPLICA_NONE,
    };
    held.copy = smb_segment_copy(segment, &held.epoch);
    return held;
}

uint64_t smb_server_held(struct smb_server *server, struct smb_held *held, uint64_t most)
{
    uint64_t found = 0;
    pthread_rwlock_rdlock(&server->registry_lock);
    for (int b = 0; b < BUCKETS; b++)
        for (struct entry *entry = server->buckets[b]; entry; entry = entry->next)
            if (found++ < most)
                held[found - 1] = held_of(entry->segment);
    pthread_rwlock_unlock(&server->registry_lock);
    return found;
}

int smb_server_holds(struct smb_server *server, uint64_t id, struct smb_held *held)
{
    struct smb_segment *segment = server_find(server, id);
    if (!segment)
        return SMB_NOT_FOUND;
    *held = held_of(segment);
    smb_segment_release(segment);
    return SMB_OK;
}

int smb_server_delete_segment(struct smb_server *server, uint64_t id)
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
    if (!entry)
        return SMB_NOT_FOUND;
    smb_segment_mark_deleted(entry->segment);
    waits_close(entry->segment, SMB_NOT_FOUND);
    if (replica_at(entry->segment))
        replica_see_off(replica_at(entry->segment));
    unlink(entry->path);
    smb_segment_release(entry->segment);
    free(entry->path);
    free(entry);
    return SMB_OK;
}

/* The journal is opened before the server listens, so nobody adds or takes away meanwhile; sessions
 * end at any time. */
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

static struct smb_segment *find_for_recovery(void *argument, uint64_t segment_id)
{
    return server_find(argument, segment_id);
}

static void clear_marks(void *argument, struct smb_segment *segment)
{
    struct smb_recovery *recovery = argument;
    recovery->torn_chunks += smb_segment_clear_marks(segment);
}

int smb_server_open_journal(struct smb_server *server, const char *path,
                            struct smb_recovery *recovery)
{
    *recovery = (struct smb_recovery){0};
    if (server->journal)
        return SMB_EXISTS;
    int status = journal_open(path, find_for_recovery, server, recovery, &server->journal);
    if (status == SMB_OK)
        status = server_each_segment(server, clear_marks, recovery);
    return status;
}

void registry_clear(struct smb_server *server)
{
    for (int b = 0; b < BUCKETS; b++) {
        while (server->buckets[b]) {
            struct entry *entry = server->buckets[b];
            server->buckets[b] = entry->next;
            waits_close(entry->segment, SMB_DISCONNECTED);
            smb_segment_release(entry->segment);
            free(entry->path);
            free(entry);
        }
    }
}
