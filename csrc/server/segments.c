/* Creates, adopts and deletes the segments that a daemon serves. Called by control threads. */
#include "server/segments.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memory/journal.h"
#include "server/registry.h"
#include "server/replica.h"
#include "server/server.h"
#include "server/waits.h"

/* Takes over the reference. The bytes are reserved already. `left`: the segment is of an earlier
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
    if (!registry_enter(server, entry)) {
        waits_close(segment, SMB_NOT_FOUND);
        free(own_path);
        free(entry);
        return SMB_EXISTS;
    }
    if (replica_at(segment))
        replica_entered(replica_at(segment));
    return SMB_OK;
}

static int create(struct smb_server *server, const char *path, uint64_t id, uint32_t epoch,
                  int dtype, uint64_t data_bytes, uint32_t chunk_bytes, const uint64_t *bundle)
{
    uint64_t file_bytes = smb_segment_file_bytes(data_bytes, chunk_bytes);
    if (file_bytes == 0)
        return SMB_INVALID;
    int status = registry_reserve(server, id, file_bytes);
    if (status != SMB_OK)
        return status;
    struct smb_segment *segment;
    status = smb_segment_create(path, id, epoch, dtype, data_bytes, chunk_bytes, &segment);
    if (status == SMB_OK && bundle)
        smb_segment_mark_replicated(segment, *bundle); /* before any request can find the segment */
    if (status == SMB_OK) {
        status = publish(server, segment, path, false);
        if (status != SMB_OK) {
            unlink(path);
            smb_segment_release(segment);
        }
    }
    if (status != SMB_OK)
        registry_give_back(server, file_bytes);
    return status;
}

int smb_server_create_segment(struct smb_server *server, const char *path, uint64_t id,
                              uint32_t epoch, int dtype, uint64_t data_bytes, uint32_t chunk_bytes)
{
    return create(server, path, id, epoch, dtype, data_bytes, chunk_bytes, NULL);
}

int smb_server_create_replica(struct smb_server *server, const char *path, uint64_t id,
                              uint64_t bundle, uint32_t epoch, int dtype, uint64_t data_bytes,
                              uint32_t chunk_bytes)
{
    return create(server, path, id, epoch, dtype, data_bytes, chunk_bytes, &bundle);
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
    status = found.deleted ? SMB_NOT_FOUND : registry_reserve(server, found.id, found.file_bytes);
    if (status == SMB_OK) {
        status = publish(server, segment, path, true);
        if (status != SMB_OK)
            registry_give_back(server, found.file_bytes);
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
        .untouched = smb_segment_untouched(segment),
    };
    held.copy = smb_segment_copy(segment, &held.epoch);
    held.role = replica ? replica_role(replica, held.epoch) : SMB_REPLICA_NONE;
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
    struct entry *entry = registry_take_out(server, id);
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

void segments_clear(struct smb_server *server)
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
