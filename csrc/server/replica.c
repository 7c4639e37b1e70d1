#include "server/replica.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/assert.h"
#include "base/clock.h"
#include "memory/format.h"
#include "server/copy.h"
#include "server/registry.h"
#include "server/replica_state.h"
#include "server/server.h"
#include "sync/sync.h"

/* ---- memory ---------------------------------------------------------------------------------- */

/* Forwards a change of a lock's or version's words, in the order of all changes. Called under
 * sync.h's mutex. */
static void forward_words(void *argument, const uint8_t image[SYNC_IMAGE_BYTES])
{
    struct replica *replica = argument;
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    if (is_paired(bundle) && !bundle->words_lost && !replica->left) {
        struct forward *made = feed_make(&bundle->feed, SMB_FRAME_BYTES + SYNC_IMAGE_BYTES);
        if (made) {
            bundle_encode(replica, made,
                          (struct smb_frame){.opcode = SMB_COPY,
                                             .op = SMB_COPIED_WORDS,
                                             .session = replica->id,
                                             .lane = REPLICA_LANE,
                                             .sequence = 1});
            memcpy(made->frame + SMB_FRAME_BYTES, image, SYNC_IMAGE_BYTES);
            bundle_append(replica, made);
            feed_send(&bundle->feed);
        } else {
            /* The pair stays broken until the coordinator takes the backup away. */
            bundle->words_lost = true;
            bundle->copy.failed = true;
            feed_disconnect(&bundle->feed);
        }
    }
    bundle_unlock(bundle);
}

int replica_create(struct smb_server *server, struct smb_segment *segment)
{
    struct served *served = served_of(segment);
    struct smb_segment_info info;
    smb_segment_info(segment, &info);
    struct replica *made = calloc(1, sizeof *made);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    uint64_t chunks = format_chunk_count(info.data_bytes, info.chunk_bytes);
    made->chunk_orders = calloc(chunks, sizeof *made->chunk_orders);
    if (!made->chunk_orders) {
        free(made);
        return SMB_OUT_OF_MEMORY;
    }
    made->id = info.id;
    made->records = served->records;
    made->sync = served->sync;
    made->chunk_bytes = info.chunk_bytes;
    made->data_bytes = info.data_bytes;
    made->dtype = (uint32_t)smb_segment_dtype(segment);
    int status = bundle_join(server, smb_segment_bundle(segment), made);
    if (status != SMB_OK) {
        free(made->chunk_orders);
        free(made);
        return status;
    }
    /* An older role is ignored, also after a restart: the file has the last role's epoch. */
    uint32_t epoch;
    smb_segment_copy(segment, &epoch);
    bundle_begin_at(made->bundle, epoch);
    sync_on_change(made->sync, forward_words, made);
    atomic_store_explicit(&served->replica, made, memory_order_release);
    return SMB_OK;
}

void replica_entered(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    if (bundle->fed_by == replica->id && feed_is_dialled(&bundle->feed))
        bundle_watch_feed(bundle, replica->id, EPOLL_CTL_MOD);
    bundle_unlock(bundle);
}

void replica_close(struct replica *replica)
{
    bundle_leave(replica);
}

void replica_destroy(struct replica *replica)
{
    bundle_leave(replica);
    bundle_release(replica->bundle);
    free(replica->record_indices);
    free(replica->chunk_orders);
    free(replica);
}

bool replica_serves(const struct replica *replica, uint32_t epoch, bool fed)
{
    const struct segment_bundle *bundle = replica->bundle;
    /* The role is read last, because it is set after the epoch. */
    int role = atomic_load_explicit(&bundle->role, memory_order_acquire);
    return role == (fed ? SMB_REPLICA_BACKUP : SMB_REPLICA_PRIMARY) &&
           atomic_load_explicit(&bundle->epoch, memory_order_acquire) == epoch;
}

bool replica_is_behind(const struct replica *replica, uint32_t epoch)
{
    const struct segment_bundle *bundle = replica->bundle;
    uint32_t now = atomic_load_explicit(&bundle->epoch, memory_order_acquire);
    int role = atomic_load_explicit(&bundle->role, memory_order_acquire);
    return epoch > now || (epoch == now && role == SMB_REPLICA_NONE);
}

bool replica_is_primary(const struct replica *replica)
{
    return bundle_is_primary(replica->bundle);
}

int replica_role(const struct replica *replica, uint32_t epoch)
{
    const struct segment_bundle *bundle = replica->bundle;
    int role = atomic_load_explicit(&bundle->role, memory_order_acquire);
    bool present = atomic_load_explicit(&bundle->epoch, memory_order_acquire) == epoch;
    return present ? role : SMB_REPLICA_NONE;
}

bool replica_moves_with(const struct replica *replica, const struct replica *other)
{
    return other && replica->bundle == other->bundle;
}

bool replica_allows(const struct smb_frame *frame)
{
    switch (frame->opcode) {
    case SMB_READ:
    case SMB_WRITE:
    case SMB_ACCUMULATE:
    case SMB_FILL:
    case SMB_ACCUMULATE_FROM:
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP:
    case SMB_WATERMARK:
    case SMB_LOCK:
    case SMB_UNLOCK:
    case SMB_RENEW:
    case SMB_FENCE:
    case SMB_AWAIT_VERSION:
    case SMB_PUBLISH:
    case SMB_PIN:
    case SMB_UNPIN:
    case SMB_APPLY: return true;
    default: return false;
    }
}

/* ---- changes --------------------------------------------------------------------------------- */

/* Call with the lock held. */
static int may_begin(const struct segment_bundle *bundle)
{
    if (!bundle_is_primary(bundle))
        return SMB_STALE_EPOCH;
    return bundle->draining ||
                   (bundle->hands_over_until_ns != 0 &&
                    smb_now_ns() < bundle->hands_over_until_ns) ||
                   (is_paired(bundle) && bundle->feed.queued_bytes > REPLICA_QUEUED_BYTES_MAX)
               ? SMB_BUSY
               : SMB_OK;
}

int replica_prepare_sync(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    int status = may_begin(bundle);
    bundle->in_progress += status == SMB_OK;
    pthread_mutex_unlock(&bundle->lock);
    return status;
}

int replica_prepare(struct replica *replica, const struct smb_frame *frame, const uint8_t *words,
                    const uint8_t *payload, struct forward **forward)
{
    struct segment_bundle *bundle = replica->bundle;
    uint32_t body = smb_frame_body(frame);
    struct forward *made = NULL;
    pthread_mutex_lock(&bundle->lock);
    bool paired = is_paired(bundle);
    int status = may_begin(bundle);
    if (status == SMB_OK && paired && !(made = feed_make(&bundle->feed, SMB_FRAME_BYTES + body)))
        status = SMB_OUT_OF_MEMORY;
    bundle->in_progress += status == SMB_OK;
    pthread_mutex_unlock(&bundle->lock);
    *forward = made;
    if (!made)
        return status;
    bundle_encode(replica, made, *frame);
    uint32_t before = words ? SMB_APPLY_BYTES : 0;
    if (words)
        memcpy(made->frame + SMB_FRAME_BYTES, words, before);
    if (payload && body > before)
        memcpy(made->frame + SMB_FRAME_BYTES + before, payload, body - before);
    return SMB_OK;
}

void replica_done(struct replica *replica, struct forward *forward)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    if (forward)
        feed_free(&bundle->feed, forward);
    if (--bundle->in_progress == 0 && bundle->draining) {
        bundle->draining = false;
        pthread_cond_broadcast(&bundle->room);
    }
    feed_send(&bundle->feed);
    bundle_unlock(bundle);
}

int replica_enqueue(struct smb_segment *const *targets, int count, struct forward *forward,
                    uint64_t offset, const uint64_t *result, uint64_t *order)
{
    struct replica *replica = replica_at(targets[0]);
    struct segment_bundle *bundle = replica->bundle;
    int status = SMB_OK;
    *order = 0;
    pthread_mutex_lock(&bundle->lock);
    if (is_paired(bundle)) {
        if (bundle->copy.under_way) {
            copy_tell_evictions(replica);
            if (offset / replica->chunk_bytes >= bundle->copy.chunks_done)
                copy_make_note(replica, forward, result);
        }
        bundle_append(replica, forward);
        *order = forward->order;
        /* Release: pairs with replica_newest_of, called by readers that do not take the chunk's
         * lock. */
        for (int i = 0; i < count; i++)
            atomic_store_explicit(
                &replica_at(targets[i])->chunk_orders[offset / replica->chunk_bytes], *order,
                memory_order_release);
    } else {
        /* the segment lost its backup, or its role, in between */
        feed_free(&bundle->feed, forward);
        status = bundle_is_primary(bundle) ? SMB_OK : SMB_STALE_EPOCH;
    }
    pthread_mutex_unlock(&bundle->lock);
    return status;
}

int replica_prepare_refusal(struct replica *replica, const struct smb_frame *frame,
                            struct forward **forward)
{
    struct smb_frame note = {.opcode = SMB_REFUSED,
                             .session = frame->session,
                             .lane = frame->lane,
                             .sequence = frame->sequence};
    int status = replica_prepare(replica, &note, NULL, NULL, forward);
    /* a refusal cannot fail, so it is tried again */
    return status == SMB_OUT_OF_MEMORY ? SMB_BUSY : status;
}

void replica_enqueue_refusal(struct replica *replica, struct forward *forward)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    if (is_paired(bundle) && bundle->copy.under_way)
        copy_tell_evictions(replica);
    if (is_paired(bundle))
        bundle_append(replica, forward);
    else
        /* the segment lost its backup, or its role, in between */
        feed_free(&bundle->feed, forward);
    pthread_mutex_unlock(&bundle->lock);
}

/* ---- what may be told ------------------------------------------------------------------------ */

uint64_t replica_newest(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    uint64_t order = is_paired(bundle) ? atomic_load_explicit(&bundle->order, memory_order_relaxed)
                     : bundle_is_primary(bundle) ? 0
                                                 : UINT64_MAX;
    pthread_mutex_unlock(&bundle->lock);
    return order;
}

bool replica_has_confirmed(struct replica *replica, uint64_t order)
{
    const struct segment_bundle *bundle = replica->bundle;
    return atomic_load_explicit(&bundle->confirmed, memory_order_acquire) >= order;
}

/* Call with the lock held. Makes sure that a question to the backup, whether it is still the
 * backup, is sent after this call began. False: out of memory. */
static bool ask_backup(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    struct forward *question = feed_make(&bundle->feed, SMB_FRAME_BYTES);
    if (!question)
        return false;
    /* Asks in the name of a member that the backup has. */
    if (replica->left && bundle->members)
        replica = bundle->members;
    bundle_encode(replica, question, (struct smb_frame){.opcode = SMB_REPLICATE});
    question->asked_ns = smb_now_ns();
    bundle->question_pending = true;
    bundle_append(replica, question);
    feed_send(&bundle->feed);
    return true;
}

/* Acquire: pairs with smb_server_yield, and with smb_server_serve_until. The time is read first: a
 * lease is renewed only once it is noted which roles it is not for. */
static bool lease_runs(const struct segment_bundle *bundle)
{
    uint64_t until_ns = atomic_load_explicit(&bundle->server->serving_until_ns,
                                             memory_order_acquire);
    return !atomic_load_explicit(&bundle->yields, memory_order_acquire) &&
           !atomic_load_explicit(&bundle->unrecorded, memory_order_acquire) &&
           smb_boot_ns() < until_ns;
}

uint64_t replica_order_of_sync(struct replica *replica)
{
    struct segment_bundle *bundle = replica->bundle;
    uint64_t order = 0;
    pthread_mutex_lock(&bundle->lock);
    /* Without memory for the question the wait lasts until the segment has other roles. */
    if (!bundle_is_primary(bundle) || bundle->words_lost ||
        (is_paired(bundle) && !lease_runs(bundle) && !ask_backup(replica)))
        order = UINT64_MAX;
    else if (is_paired(bundle))
        order = atomic_load_explicit(&bundle->order, memory_order_relaxed);
    bundle_unlock(bundle);
    return order;
}

uint64_t replica_newest_of(const struct replica *replica, uint64_t offset)
{
    /* Acquire: pairs with the release in replica_enqueue. Whoever has read bytes of a change sees
     * its order. */
    return atomic_load_explicit(&replica->chunk_orders[offset / replica->chunk_bytes],
                                memory_order_acquire);
}

int replica_check_read(struct replica *replica, uint64_t order, uint64_t begun_ns)
{
    struct segment_bundle *bundle = replica->bundle;
    /* Both are read before the role; the reverse of set_role. */
    bool paired = is_paired(bundle), leased = lease_runs(bundle);
    if (!bundle_is_primary(bundle) || !replica_has_confirmed(replica, order))
        return SMB_BUSY; /* the next try will be refused at the gate if this is not the primary */
    if (!paired || leased)
        return SMB_OK;
    /* The backup may have been promoted. It must have said, after the read began, that it was
     * not. */
    pthread_mutex_lock(&bundle->lock);
    bool primary = bundle_is_primary(bundle); /* its role may have ended meanwhile */
    bool fresh = primary && (!is_paired(bundle) || bundle->asked_at_ns > begun_ns);
    if (primary && !fresh && !bundle->question_pending)
        ask_backup(replica);
    bundle_unlock(bundle);
    return fresh ? SMB_OK : SMB_BUSY;
}

/* ---- at the backup --------------------------------------------------------------------------- */

bool replica_has_copied(const struct replica *replica, uint64_t sequence)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    bool has = sequence <= bundle->copied;
    pthread_mutex_unlock(&bundle->lock);
    return has;
}

void replica_note_copied(struct replica *replica, uint32_t epoch, uint64_t sequence)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    /* A segment of the same id that was created anew meanwhile is not concerned. */
    if (!replica->left && atomic_load_explicit(&bundle->epoch, memory_order_relaxed) == epoch)
        bundle->copied = sequence;
    pthread_mutex_unlock(&bundle->lock);
}

bool replica_is_peer(struct replica *replica, uint32_t epoch, const char *name)
{
    struct segment_bundle *bundle = replica->bundle;
    pthread_mutex_lock(&bundle->lock);
    bool is = replica_serves(replica, epoch, true) && name[0] && strcmp(bundle->peer, name) == 0;
    pthread_mutex_unlock(&bundle->lock);
    return is;
}

struct segment_bundle *replica_feed_begins(struct replica *replica, const struct connection *feeder)
{
    struct segment_bundle *bundle = bundle_hold(replica->bundle);
    pthread_mutex_lock(&bundle->lock);
    bundle->feeder = feeder;
    bundle->feed.broken_ns = 0;
    bundle_unlock(bundle);
    return bundle;
}

bool replica_is_of(const struct replica *replica, const struct segment_bundle *bundle)
{
    return replica->bundle == bundle;
}

uint64_t replica_bundle_id(const struct replica *replica)
{
    return replica->bundle->id;
}

void replica_feed_ends(struct segment_bundle *bundle, const struct connection *feeder)
{
    pthread_mutex_lock(&bundle->lock);
    if (bundle->feeder == feeder) {
        bundle->feeder = NULL;
        bundle->feed.broken_ns = smb_now_ns();
    }
    bundle_unlock(bundle);
    bundle_release(bundle);
}
