/* The daemon's counters. Each loop has its own (base/stats.h); a reader adds them up. A scrape
 * takes the registry's lock for reading and the lanes' lock, each only while it copies, so no
 * request waits longer than that. */
#include "server/counters.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "server/connection.h"
#include "server/loop.h"
#include "server/server.h"
#include "server/sessions.h"

/* ---- counting -------------------------------------------------------------------------------- */

/* NULL: out of memory; the request is still counted in its loop's totals. */
static struct share *share_of(struct smb_segment *segment, const struct loop *loop)
{
    struct share *_Atomic *entry = &served_of(segment)->shares[loop->index];
    /* only this thread writes it */
    struct share *share = atomic_load_explicit(entry, memory_order_relaxed);
    if (!share) {
        share = calloc(1, sizeof *share);
        atomic_store_explicit(entry, share, memory_order_release);
    }
    return share;
}

void count_request(struct connection *connection, struct smb_segment *segment, int opcode,
                   uint64_t bytes, uint64_t ns)
{
    SMB_ASSERT(opcode >= 0 && opcode < SMB_OPCODE_COUNT);
    struct loop *loop = connection->loop;
    struct share *share = segment ? share_of(segment, loop) : NULL;
    tally_add(&loop->stats.done[connection->transport], opcode, bytes);
    latency_add(&loop->stats.latency[connection->transport][opcode], ns);
    tally_add(&connection->done, opcode, bytes);
    if (share)
        tally_add(&share->done[connection->transport], opcode, bytes);
}

static struct past **past_of(struct smb_server *server, uint64_t session)
{
    struct past **at = &server->pasts;
    while (*at && (*at)->share.id != session)
        at = &(*at)->next;
    return at;
}

void count_past(struct smb_server *server, const struct connection *connection)
{
    struct past *past = *past_of(server, connection->session);
    if (!past) {
        if (server->past_count == PASTS_MAX || session_has_ended(server, connection->session))
            return;
        past = calloc(1, sizeof *past);
        if (!past)
            return;
        past->share.id = connection->session;
        past->next = server->pasts;
        server->pasts = past;
        server->past_count++;
    }
    int transport = connection->transport;
    tally_read(&connection->done, past->share.operations[transport], past->share.bytes[transport]);
}

void forget_past(struct smb_server *server, uint64_t session)
{
    pthread_mutex_lock(&server->lanes_lock);
    struct past **at = past_of(server, session), *past = *at;
    if (past) {
        *at = past->next;
        server->past_count--;
    }
    pthread_mutex_unlock(&server->lanes_lock);
    free(past);
}

void note_denied(const struct connection *connection, const struct smb_frame *frame)
{
    struct denials *denials = &connection->loop->server->denials;
    struct smb_denial new = {.session = connection->session,
                             .segment = frame->segment,
                             .count = 1,
                             .opcode = frame->opcode,
                             .proven = connection->proven};
    pthread_mutex_lock(&denials->lock);
    uint32_t i = 0;
    while (i < denials->count &&
           (denials->of[i].session != new.session || denials->of[i].segment != new.segment ||
            denials->of[i].opcode != new.opcode || denials->of[i].proven != new.proven))
        i++;
    if (i == DENIALS_MAX)
        denials->left_out++;
    else if (i < denials->count)
        denials->of[i].count++;
    else
        denials->of[denials->count++] = new;
    pthread_mutex_unlock(&denials->lock);
}

uint64_t smb_server_take_denials(struct smb_server *server, struct smb_denial *denials,
                                 uint64_t most, uint64_t *left_out)
{
    struct denials *kept = &server->denials;
    pthread_mutex_lock(&kept->lock);
    uint64_t count = kept->count < most ? kept->count : most;
    memcpy(denials, kept->of, count * sizeof *denials);
    *left_out = kept->left_out;
    for (uint64_t i = count; i < kept->count; i++)
        *left_out += kept->of[i].count;
    kept->count = 0;
    kept->left_out = 0;
    pthread_mutex_unlock(&kept->lock);
    return count;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void read_segment(struct smb_segment *segment, int loops, struct smb_share *sum)
{
    const struct served *served = served_of(segment);
    sum->id = smb_segment_id(segment);
    smb_segment_counters(segment, sum->operations[SMB_TRANSPORT_SHM],
                         sum->bytes[SMB_TRANSPORT_SHM]);
    for (int i = 0; i < loops; i++) {
        const struct share *share = atomic_load_explicit(&served->shares[i], memory_order_acquire);
        for (int t = 0; share && t < SMB_TRANSPORT_COUNT; t++)
            tally_read(&share->done[t], sum->operations[t], sum->bytes[t]);
    }
}

uint64_t smb_server_segment_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most)
{
    uint64_t count = 0;
    pthread_rwlock_rdlock(&server->registry_lock);
    for (int b = 0; b < BUCKETS; b++) {
        for (struct entry *entry = server->buckets[b]; entry && count < most;
             entry = entry->next, count++) {
            shares[count] = (struct smb_share){0};
            read_segment(entry->segment, server->loop_count, &shares[count]);
        }
    }
    pthread_rwlock_unlock(&server->registry_lock);
    return count;
}

/* Finds the session's entry among those written, or adds one. NULL: no room. */
static struct smb_share *entry_of(struct smb_share *shares, uint64_t *count, uint64_t most,
                                  uint64_t session)
{
    uint64_t i = 0;
    while (i < *count && shares[i].id != session)
        i++;
    if (i == most)
        return NULL;
    if (i == *count)
        shares[(*count)++] = (struct smb_share){.id = session};
    return &shares[i];
}

uint64_t smb_server_session_shares(struct smb_server *server, struct smb_share *shares,
                                   uint64_t most)
{
    uint64_t count = 0;
    pthread_mutex_lock(&server->lanes_lock);
    for (const struct past *past = server->pasts; past && count < most; past = past->next)
        shares[count++] = past->share;
    for (const struct connection *connection = server->lanes; connection;
         connection = connection->lane_next) {
        struct smb_share *share = entry_of(shares, &count, most, connection->session);
        if (!share)
            continue;
        share->connections++;
        tally_read(&connection->done, share->operations[connection->transport],
                   share->bytes[connection->transport]);
    }
    pthread_mutex_unlock(&server->lanes_lock);
    return count;
}

void smb_server_latencies(struct smb_server *server, struct smb_latencies *latencies)
{
    memset(latencies, 0, sizeof *latencies);
    for (int l = 0; l < server->loop_count; l++)
        for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
            for (int i = 0; i < SMB_OPCODE_COUNT; i++)
                latency_read(&server->loops[l].stats.latency[t][i], &latencies->of[t][i]);
}

static void read_loops(const struct smb_server *server, struct smb_server_counters *counters)
{
    for (int l = 0; l < server->loop_count; l++) {
        const struct loop_stats *stats = &server->loops[l].stats;
        for (int t = 0; t < SMB_TRANSPORT_COUNT; t++)
            tally_read(&stats->done[t], counters->operations[t], counters->bytes[t]);
        counters->repeated_total += stats_read(&stats->repeated);
        counters->backlog_bytes += stats_read(&stats->backlog_bytes);
        counters->backlog_total += stats_read(&stats->backlog_total);
    }
}

static void read_segments(struct smb_server *server, struct smb_server_counters *counters)
{
    pthread_rwlock_rdlock(&server->registry_lock);
    counters->segments = server->segments;
    counters->segment_bytes = server->used_bytes;
    counters->recovered_locks = server->retired_recovered_locks;
    memcpy(counters->operations[SMB_TRANSPORT_SHM], server->retired_operations,
           sizeof server->retired_operations);
    memcpy(counters->bytes[SMB_TRANSPORT_SHM], server->retired_bytes, sizeof server->retired_bytes);
    for (int b = 0; b < BUCKETS; b++) {
        for (struct entry *entry = server->buckets[b]; entry; entry = entry->next) {
            struct smb_segment_info info;
            smb_segment_info(entry->segment, &info);
            counters->recovered_locks += info.recovered_locks;
            smb_segment_counters(entry->segment, counters->operations[SMB_TRANSPORT_SHM],
                                 counters->bytes[SMB_TRANSPORT_SHM]);
        }
    }
    pthread_rwlock_unlock(&server->registry_lock);
}

void smb_server_counters(struct smb_server *server, struct smb_server_counters *counters)
{
    memset(counters, 0, sizeof *counters);
    read_segments(server, counters); /* SHM, which the loops do not count */
    read_loops(server, counters);
    for (int t = 0; t < SMB_TRANSPORT_COUNT; t++) {
        counters->connections_opened[t] = stats_read(&server->opened[t]);
        counters->connections_now[t] = stats_read(&server->now[t]);
    }
    for (int i = 0; i < SMB_STATUS_COUNT; i++)
        counters->errors[i] = stats_read(&server->errors[i]);
    counters->turned_away_total = stats_read(&server->turned_away);
    counters->strangers_now = stats_read(&server->strangers.now);
    counters->strangers_evicted_total = stats_read(&server->strangers_evicted);
    counters->deferred_now = stats_read(&server->deferred_now);
    counters->deferred_total = stats_read(&server->deferred_total);
    counters->waits_now = stats_read(&server->waits_now);
    counters->replayed_total = stats_read(&server->replayed_total);
    counters->locks_granted = stats_read(&server->waited.granted);
    counters->locks_waited = stats_read(&server->waited.waited);
    counters->locks_timed_out = stats_read(&server->waited.timed_out);
    counters->locks_expired = stats_read(&server->waited.expired);
    counters->locks_revoked = stats_read(&server->waited.revoked);
    counters->barriers_broken = stats_read(&server->waited.broken);
    if (server->journal)
        journal_slots(server->journal, &counters->journal_slots, &counters->journal_slots_most);
}
