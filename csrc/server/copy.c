#include "server/copy.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "memory/chunk.h"
#include "memory/format.h"
#include "memory/sync.h"
#include "server/replica_state.h"

enum {
    SEQUENCE_AT = 24, /* in a header: frame.c */
    COPY_WAIT_MS = 50
};

/* With the lock: as the next part of the copy. */
static void append_part(struct replica *replica, struct forward *part)
{
    smb_store64(part->frame + SEQUENCE_AT, ++replica->copy.sequence);
    replica_append(replica, part);
    replica->copy.order = part->order;
}

/* A part to be appended; NULL: no memory. With the lock. */
static struct forward *make_part(struct replica *replica, struct smb_frame frame)
{
    uint32_t payload = frame.op == SMB_COPIED_RECORD ? RECORD_BYTES : frame.length;
    struct forward *made = feed_make(&replica->feed, SMB_FRAME_BYTES + payload);
    frame.opcode = SMB_COPY;
    frame.session = replica->id;
    frame.lane = REPLICA_LANE;
    if (made)
        replica_encode(replica, made, frame);
    return made;
}

void copy_tell_evictions(struct replica *replica)
{
    struct copy *copy = &replica->copy;
    uint64_t evictions, ended;
    records_evicted(replica->records, &evictions, &ended);
    if (evictions == copy->evictions && ended == copy->ended_evictions)
        return;
    copy->evictions = evictions;
    copy->ended_evictions = ended;
    struct forward *part = make_part(
        replica,
        (struct smb_frame){.op = SMB_COPIED_COUNTERS, .argument = evictions, .offset = ended});
    if (part)
        append_part(replica, part);
    else
        copy->failed = true; /* the copy would not know */
}

void copy_make_note(struct replica *replica, struct forward *forward, const uint64_t *result)
{
    struct smb_frame change;
    int status = smb_frame_parse(forward->frame, &change);
    SMB_ASSERT(status == SMB_OK); /* our own */
    struct smb_frame note = {.opcode = SMB_COPY,
                             .op = SMB_COPIED_NOTE,
                             .session = change.session,
                             .lane = change.lane,
                             .sequence = change.sequence,
                             .segment = replica->id,
                             .offset = result != NULL,
                             .argument = result ? *result : 0};
    feed_replace(&replica->feed, forward, &note);
}

/* With the lock. Whether that copy is under way. */
static bool copies(const struct replica *replica, uint32_t epoch)
{
    return replica_is_primary(replica) && replica->copy.under_way && !replica->copy.failed &&
           atomic_load_explicit(&replica->epoch, memory_order_relaxed) == epoch;
}

struct image {
    struct replica *replica;
    struct forward *part;
    uint32_t epoch;
};

/* Under the records' mutex: whatever the lane does from here on goes behind it. */
static void append_image(void *argument, const uint8_t bytes[RECORD_BYTES])
{
    struct image *image = argument;
    memcpy(image->part->frame + SMB_FRAME_BYTES, bytes, RECORD_BYTES);
    pthread_mutex_lock(&image->replica->lock);
    if (copies(image->replica, image->epoch)) {
        append_part(image->replica, image->part);
        image->part = NULL;
    }
    pthread_mutex_unlock(&image->replica->lock);
}
_Static_assert((int)SMB_COPIED_RECORD_BYTES == (int)RECORD_BYTES, "one travels as it is");

/* This and the next two: the lock is held, and given back. */
static int copy_record(struct replica *replica, uint32_t epoch)
{
    uint32_t place = replica->copy.places[replica->copy.places_done];
    struct image image = {.replica = replica,
                          .epoch = epoch,
                          .part = make_part(replica, (struct smb_frame){.op = SMB_COPIED_RECORD})};
    pthread_mutex_unlock(&replica->lock);
    if (!image.part)
        return SMB_OUT_OF_MEMORY;
    int status = records_image(replica->records, place, append_image, &image);
    pthread_mutex_lock(&replica->lock);
    if (image.part)
        feed_free(&replica->feed, image.part);
    if (status != SMB_BUSY && copies(replica, epoch))
        replica->copy.places_done++;
    pthread_mutex_unlock(&replica->lock);
    return status == SMB_NOT_FOUND ? SMB_OK : status;
}

static int copy_chunk(struct replica *replica, struct smb_segment *segment, uint32_t epoch)
{
    uint64_t offset = replica->copy.chunks_done * replica->chunk_bytes;
    uint64_t left = replica->data_bytes - offset;
    uint32_t length = (uint32_t)(left < replica->chunk_bytes ? left : replica->chunk_bytes);
    struct forward *part = make_part(replica, (struct smb_frame){.op = SMB_COPIED_CHUNK,
                                                                 .dtype = (uint8_t)replica->dtype,
                                                                 .offset = offset,
                                                                 .length = length});
    pthread_mutex_unlock(&replica->lock);
    if (!part)
        return SMB_OUT_OF_MEMORY;
    int status = smb_segment_lock(segment, offset, SMB_TRY);
    bool locked = status == SMB_OK;
    if (locked)
        memcpy(part->frame + SMB_FRAME_BYTES, (const uint8_t *)smb_segment_data(segment) + offset,
               length);
    pthread_mutex_lock(&replica->lock);
    if (locked && !copies(replica, epoch))
        status = SMB_STALE_EPOCH;
    if (status == SMB_OK) {
        append_part(replica, part);
        replica->copy.chunks_done++;
    } else {
        feed_free(&replica->feed, part);
    }
    feed_send(&replica->feed);
    replica_unlock(replica);
    if (locked)
        smb_segment_unlock(segment, offset);
    FAILPOINT("replica.copied");
    return status;
}

static int begin_copy(struct replica *replica, uint32_t records, uint32_t epoch)
{
    pthread_mutex_unlock(&replica->lock);
    uint32_t *places = malloc((records + 1) * sizeof *places);
    if (!places)
        return SMB_OUT_OF_MEMORY;
    uint32_t count = records_places(replica->records, places);
    pthread_mutex_lock(&replica->lock);
    if (copies(replica, epoch) && !replica->copy.places) {
        replica->copy.places = places;
        replica->copy.place_count = count;
        copy_tell_evictions(replica);
        places = NULL;
    }
    pthread_mutex_unlock(&replica->lock);
    free(places);
    /* Changes of these words go there since the copy is under way; here is what they were. */
    sync_show(replica->sync, smb_boot_ns());
    return SMB_OK;
}

/* One part more. */
static int copy_part(struct replica *replica, struct smb_segment *segment, uint32_t epoch)
{
    pthread_mutex_lock(&replica->lock);
    struct copy *copy = &replica->copy;
    uint64_t chunks = format_chunk_count(replica->data_bytes, (uint32_t)replica->chunk_bytes);
    bool sent = copy->counted;
    bool confirmed = atomic_load_explicit(&replica->confirmed, memory_order_relaxed) >= copy->order;
    if (copies(replica, epoch) && !copy->whole &&
        (copy->settling || replica->feed.queued_bytes > COPY_QUEUED_BYTES_MAX ||
         (sent && !confirmed))) {
        uint64_t until_ns = smb_now_ns() + (uint64_t)COPY_WAIT_MS * 1000000U;
        struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000U),
                                 .tv_nsec = (long)(until_ns % 1000000000U)};
        pthread_cond_clockwait(&replica->room, &replica->lock, CLOCK_MONOTONIC, &until);
        pthread_mutex_unlock(&replica->lock);
        return SMB_BUSY;
    }
    if (!copies(replica, epoch)) {
        pthread_mutex_unlock(&replica->lock);
        return SMB_STALE_EPOCH;
    }
    if (!copy->places)
        return begin_copy(replica, smb_segment_records(segment).count, epoch);
    if (copy->places_done < copy->place_count)
        return copy_record(replica, epoch);
    if (copy->chunks_done < chunks)
        return copy_chunk(replica, segment, epoch);
    if (!copy->counted) {
        copy_tell_evictions(replica);
        copy->counted = true;
        feed_send(&replica->feed);
        replica_unlock(replica);
        return SMB_OK;
    }
    copy->whole = true;
    pthread_mutex_unlock(&replica->lock);
    return SMB_EXISTS;
}

int smb_server_copy(struct smb_server *server, uint64_t id, uint32_t epoch, uint64_t bytes,
                    uint64_t *copied, uint64_t *total)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    int status = SMB_OK;
    uint64_t before = 0, now = 0;
    for (bool first = true; status == SMB_OK; first = false) {
        pthread_mutex_lock(&replica->lock);
        now = replica->copy.chunks_done * replica->chunk_bytes;
        pthread_mutex_unlock(&replica->lock);
        if (first)
            before = now;
        if (now >= before + bytes)
            break;
        status = copy_part(replica, segment, epoch);
    }
    *total = replica->data_bytes;
    *copied = now < *total ? now : *total;
    smb_segment_release(segment);
    return status;
}

int smb_server_abandon_copy(struct smb_server *server, uint64_t id, uint32_t epoch)
{
    struct smb_segment *segment;
    struct replica *replica = replica_of(server, id, &segment);
    if (!replica)
        return SMB_NOT_FOUND;
    pthread_mutex_lock(&replica->lock);
    int status = replica_is_primary(replica) && replica->copy.under_way && !replica->copy.whole &&
                         atomic_load_explicit(&replica->epoch, memory_order_relaxed) == epoch
                     ? SMB_OK
                     : SMB_STALE_EPOCH;
    if (status == SMB_OK)
        replica_stop_forwarding(replica,
                                SMB_OK); /* nobody is made the primary from a part of a copy */
    replica_unlock(replica);
    smb_segment_release(segment);
    return status;
}
