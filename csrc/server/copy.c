#include "server/copy.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "memory/chunk.h"
#include "memory/format.h"
#include "server/registry.h"
#include "server/replica_state.h"
#include "smb/server.h"
#include "sync/sync.h"

enum { COPY_WAIT_MS = 50 };

/* Call with the lock held. Appends a part of the copy to the feed. */
static void append_part(struct replica *replica, struct forward *part)
{
    struct copy *copy = &replica->bundle->copy;
    smb_store64(part->frame + SMB_AT_SEQUENCE, ++copy->sequence);
    bundle_append(replica, part);
    copy->order = part->order;
}

/* Makes a part to be appended; NULL: out of memory. Call with the lock held. */
static struct forward *make_part(struct replica *replica, struct smb_frame frame)
{
    uint32_t payload = frame.op == SMB_COPIED_RECORD ? RECORD_BYTES : frame.length;
    struct forward *made = feed_make(&replica->bundle->feed, SMB_FRAME_BYTES + payload);
    frame.opcode = SMB_COPY;
    frame.session = replica->id;
    frame.lane = REPLICA_LANE;
    if (made)
        bundle_encode(replica, made, frame);
    return made;
}

void copy_tell_evictions(struct replica *replica)
{
    uint64_t evictions, ended;
    records_evicted(replica->records, &evictions, &ended);
    if (evictions == replica->evictions && ended == replica->ended_evictions)
        return;
    replica->evictions = evictions;
    replica->ended_evictions = ended;
    struct forward *part = make_part(
        replica,
        (struct smb_frame){.op = SMB_COPIED_COUNTERS, .argument = evictions, .offset = ended});
    if (part)
        append_part(replica, part);
    else
        replica->bundle->copy.failed = true; /* the copy would not learn this number */
}

void copy_make_note(struct replica *replica, struct forward *forward, const uint64_t *result)
{
    struct smb_frame change;
    int status = smb_frame_parse(forward->frame, &change);
    SMB_ASSERT(status == SMB_OK); /* we encoded this frame */
    struct smb_frame note = {.opcode = SMB_COPY,
                             .op = SMB_COPIED_NOTE,
                             .session = change.session,
                             .lane = change.lane,
                             .sequence = change.sequence,
                             .segment = replica->id,
                             .offset = result != NULL,
                             .argument = result ? *result : 0};
    feed_replace(&replica->bundle->feed, forward, &note);
}

/* Call with the lock held. Whether the copy of that epoch is under way. */
static bool copies(const struct segment_bundle *bundle, uint32_t epoch)
{
    return bundle_is_primary(bundle) && bundle->copy.under_way && !bundle->copy.failed &&
           atomic_load_explicit(&bundle->epoch, memory_order_relaxed) == epoch;
}

struct image {
    struct replica *replica;
    struct forward *part;
    uint32_t epoch;
};

/* Called under the records' mutex: whatever the lane does from here on is queued behind this
 * image. */
static void append_image(void *argument, const uint8_t bytes[RECORD_BYTES])
{
    struct image *image = argument;
    struct segment_bundle *bundle = image->replica->bundle;
    memcpy(image->part->frame + SMB_FRAME_BYTES, bytes, RECORD_BYTES);
    pthread_mutex_lock(&bundle->lock);
    if (copies(bundle, image->epoch) && !image->replica->left) {
        append_part(image->replica, image->part);
        image->part = NULL;
    }
    pthread_mutex_unlock(&bundle->lock);
}
_Static_assert((int)SMB_COPIED_RECORD_BYTES == (int)RECORD_BYTES, "one travels as it is");

/* This function and the next two are called with the lock held, and release it. */
static int copy_record(struct replica *replica, uint32_t epoch)
{
    struct segment_bundle *bundle = replica->bundle;
    uint32_t index = replica->record_indices[replica->records_done];
    struct image image = {.replica = replica,
                          .epoch = epoch,
                          .part = make_part(replica, (struct smb_frame){.op = SMB_COPIED_RECORD})};
    pthread_mutex_unlock(&bundle->lock);
    if (!image.part)
        return SMB_OUT_OF_MEMORY;
    int status = records_image(replica->records, index, append_image, &image);
    pthread_mutex_lock(&bundle->lock);
    if (image.part)
        feed_free(&bundle->feed, image.part);
    if (status != SMB_BUSY && copies(bundle, epoch))
        replica->records_done++;
    pthread_mutex_unlock(&bundle->lock);
    return status == SMB_NOT_FOUND ? SMB_OK : status;
}

/* Call with the lock held. True: a member left while the lock was released, so the backup will have
 * one segment less, and the members must be listed again. */
static bool has_left(struct smb_segment *const *members, int count)
{
    bool left = false;
    for (int i = 0; i < count; i++)
        left = left || replica_at(members[i])->left;
    return left;
}

/* Copies the chunk of all members at once: a change of several members is then in all of the copied
 * chunks or in none. */
static int copy_chunk(struct segment_bundle *bundle, struct smb_segment *const *members, int count,
                      uint32_t epoch)
{
    struct forward *parts[BUNDLE_MEMBERS_MAX] = {0};
    const struct replica *first = replica_at(members[0]);
    uint64_t offset = bundle->copy.chunks_done * first->chunk_bytes;
    uint64_t left = first->data_bytes - offset;
    uint32_t length = (uint32_t)(left < first->chunk_bytes ? left : first->chunk_bytes);
    int status = SMB_OK;
    for (int i = 0; i < count && status == SMB_OK; i++) {
        struct replica *replica = replica_at(members[i]);
        parts[i] = make_part(replica, (struct smb_frame){.op = SMB_COPIED_CHUNK,
                                                         .dtype = (uint8_t)replica->dtype,
                                                         .offset = offset,
                                                         .length = length});
        if (!parts[i])
            status = SMB_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&bundle->lock);
    if (status == SMB_OK)
        status = smb_segment_lock_each(members, count, offset, SMB_TRY);
    bool locked = status == SMB_OK;
    for (int i = 0; i < count && locked; i++)
        memcpy(parts[i]->frame + SMB_FRAME_BYTES,
               (const uint8_t *)smb_segment_data(members[i]) + offset, length);
    pthread_mutex_lock(&bundle->lock);
    if (locked && !copies(bundle, epoch))
        status = SMB_STALE_EPOCH;
    else if (locked && has_left(members, count))
        status = SMB_BUSY;
    for (int i = 0; i < count; i++) {
        if (status == SMB_OK)
            append_part(replica_at(members[i]), parts[i]);
        else if (parts[i])
            feed_free(&bundle->feed, parts[i]);
    }
    if (status == SMB_OK)
        bundle->copy.chunks_done++;
    feed_send(&bundle->feed);
    bundle_unlock(bundle);
    for (int i = 0; i < count && locked; i++)
        smb_segment_unlock(members[i], offset);
    FAILPOINT("replica.copied");
    return status;
}

static int begin_copy(struct replica *replica, uint32_t records, uint32_t epoch)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_unlock(&bundle->lock);
    uint32_t *indices = malloc((records + 1) * sizeof *indices);
    if (!indices)
        return SMB_OUT_OF_MEMORY;
    uint32_t count = records_indices(replica->records, indices);
    pthread_mutex_lock(&bundle->lock);
    if (copies(bundle, epoch) && !replica->record_indices) {
        replica->record_indices = indices;
        replica->record_count = count;
        copy_tell_evictions(replica);
        indices = NULL;
    }
    pthread_mutex_unlock(&bundle->lock);
    free(indices);
    /* The backup has received changes of these words since the copy began; this sends their present
     * state. */
    sync_show(replica->sync, smb_boot_ns());
    return SMB_OK;
}

/* Copies one more part. The first member stands for the bundle. */
static int copy_part(struct segment_bundle *bundle, struct smb_segment *const *members, int count,
                     uint32_t epoch)
{
    pthread_mutex_lock(&bundle->lock);
    struct copy *copy = &bundle->copy;
    const struct replica *first = replica_at(members[0]);
    uint64_t chunks = format_chunk_count(first->data_bytes, (uint32_t)first->chunk_bytes);
    bool sent = copy->counted;
    bool confirmed = atomic_load_explicit(&bundle->confirmed, memory_order_relaxed) >= copy->order;
    if (copies(bundle, epoch) && !copy->whole &&
        (bundle->draining || bundle->feed.queued_bytes > COPY_QUEUED_BYTES_MAX ||
         (sent && !confirmed))) {
        uint64_t until_ns = smb_now_ns() + (uint64_t)COPY_WAIT_MS * 1000000U;
        struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                                 .tv_nsec = (long)(until_ns % 1000000000U)};
        pthread_cond_clockwait(&bundle->room, &bundle->lock, CLOCK_MONOTONIC, &until);
        pthread_mutex_unlock(&bundle->lock);
        return SMB_BUSY;
    }
    if (!copies(bundle, epoch)) {
        pthread_mutex_unlock(&bundle->lock);
        return SMB_STALE_EPOCH;
    }
    if (has_left(members, count)) {
        pthread_mutex_unlock(&bundle->lock);
        return SMB_BUSY;
    }
    for (int i = 0; i < count; i++) {
        struct replica *replica = replica_at(members[i]);
        if (!replica->record_indices)
            return begin_copy(replica, smb_segment_records(members[i]).count, epoch);
        if (replica->records_done < replica->record_count)
            return copy_record(replica, epoch);
    }
    if (copy->chunks_done < chunks)
        return copy_chunk(bundle, members, count, epoch);
    if (!copy->counted) {
        for (int i = 0; i < count; i++)
            copy_tell_evictions(replica_at(members[i]));
        copy->counted = true;
        feed_send(&bundle->feed);
        bundle_unlock(bundle);
        return SMB_OK;
    }
    copy->whole = true;
    pthread_mutex_unlock(&bundle->lock);
    return SMB_EXISTS;
}

/* Keeps the members whose roles were given in this epoch. The coordinator's records lack the
 * others: the backup has no room for them, and nobody needs their copies. */
static int keep_with_role(struct smb_segment **members, int count, uint32_t epoch)
{
    int kept = 0;
    for (int i = 0; i < count; i++) {
        uint32_t of_role;
        smb_segment_copy(members[i], &of_role);
        if (of_role == epoch)
            members[kept++] = members[i];
        else
            smb_segment_release(members[i]);
    }
    return kept;
}

/* The members of a copy are those that have their roles when it begins. If another one gets its
 * role later, the parts that were sent lack it: the copy is given up, and made anew in the next
 * epoch. */
static int join_copy(struct segment_bundle *bundle, struct smb_segment *const *members, int count,
                     uint32_t epoch)
{
    int status = SMB_OK;
    pthread_mutex_lock(&bundle->lock);
    if (copies(bundle, epoch) && !bundle->copy.whole && count > 0) {
        for (int i = 0; i < count; i++) {
            struct replica *replica = replica_at(members[i]);
            if (bundle->copy.begun && replica->copy_epoch != epoch)
                status = SMB_STALE_EPOCH;
            else
                replica->copy_epoch = epoch;
        }
        bundle->copy.begun = true;
        if (status != SMB_OK) {
            bundle_stop_forwarding(bundle, SMB_OK);
            bundle->copy.given_up = true;
        }
    }
    bundle_unlock(bundle);
    return status;
}

/* Another member stands for the bundle, and does the copying. */
static int look_at_copy(struct segment_bundle *bundle, uint32_t epoch)
{
    pthread_mutex_lock(&bundle->lock);
    int status = !copies(bundle, epoch) ? SMB_STALE_EPOCH
                 : bundle->copy.whole   ? SMB_EXISTS
                                        : SMB_BUSY;
    pthread_mutex_unlock(&bundle->lock);
    return status;
}

int smb_server_copy(struct smb_server *server, uint64_t id, uint32_t epoch, uint64_t bytes,
                    uint64_t *copied, uint64_t *total)
{
    struct smb_segment *segment, *members[BUNDLE_MEMBERS_MAX];
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    struct segment_bundle *bundle = replica->bundle;
    int count = keep_with_role(members, bundle_hold_members(bundle, members), epoch);
    int status = join_copy(bundle, members, count, epoch);
    uint64_t before = 0, now = 0;
    for (bool first = true; status == SMB_OK; first = false) {
        pthread_mutex_lock(&bundle->lock);
        now = bundle->copy.chunks_done * replica->chunk_bytes;
        pthread_mutex_unlock(&bundle->lock);
        if (first)
            before = now;
        if (now >= before + bytes)
            break;
        status = count > 0 && members[0] == segment ? copy_part(bundle, members, count, epoch)
                                                    : look_at_copy(bundle, epoch);
    }
    *total = replica->data_bytes;
    *copied = now < *total ? now : *total;
    bundle_release_members(members, count);
    smb_segment_release(segment);
    return status;
}

int smb_server_abandon_copy(struct smb_server *server, uint64_t id, uint32_t epoch)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    struct copy *copy = &bundle->copy;
    bool ours = bundle_is_primary(bundle) &&
                atomic_load_explicit(&bundle->epoch, memory_order_relaxed) == epoch;
    int status = ours && (copy->given_up || (copy->under_way && !copy->whole)) ? SMB_OK
                                                                               : SMB_STALE_EPOCH;
    if (status == SMB_OK) {
        bundle_stop_forwarding(bundle, SMB_OK); /* a partial copy is never promoted */
        copy->given_up = true;                  /* calls for other members then succeed */
    }
    bundle_unlock(bundle);
    smb_segment_release(segment);
    return status;
}
