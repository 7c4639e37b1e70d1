/* One call on a buffer: checked once and cut into pieces. This thread does local pieces, and the
 * other pieces are given to their links. */
#include "client/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/unknown.h"
#include "client/inflight.h"
#include "client/sparse.h"
#include "client/views.h"
#include "client/wait.h"
#include "memory/change.h"

static bool same_layout(const struct smb_layout *a, const struct smb_layout *b)
{
    return a->bytes == b->bytes && a->stripe_bytes == b->stripe_bytes &&
           a->chunk_bytes == b->chunk_bytes && a->segment_count == b->segment_count;
}

/* Lists the other buffers that a request names (ACCUMULATE_FROM, APPLY); returns how many. */
static int others_of(const struct smb_request *request,
                     const struct smb_buffer *others[SMB_SOURCES_MAX])
{
    int states = request->opcode == SMB_APPLY ? smb_rule_states(request->op) : 0, count = 0;
    if (request->opcode != SMB_APPLY && request->opcode != SMB_ACCUMULATE_FROM)
        return 0;
    if (request->opcode == SMB_ACCUMULATE_FROM && request->source_count > 0) {
        for (; count < (int)request->source_count; count++)
            others[count] = request->sources[count];
        return count;
    }
    if (!request_brings(request))
        others[count++] = request->other;
    for (int i = 0; i < states; i++)
        others[count++] = request->states[i];
    return count;
}

static bool others_are_sound(const struct smb_buffer *buffer, const struct smb_request *request)
{
    const struct smb_buffer *others[SMB_SOURCES_MAX];
    int count = others_of(request, others);
    for (int i = 0; i < count; i++) {
        if (!others[i] || others[i]->dtype != buffer->dtype ||
            !same_layout(&others[i]->layout, &buffer->layout))
            return false;
        for (int j = 0; j < i && request->opcode == SMB_APPLY; j++)
            if (others[j] == others[i])
                return false;
        if (others[i] == buffer && request->opcode == SMB_APPLY)
            return false;
    }
    return true;
}

/* For ACCUMULATE_FROM. */
static bool sources_are_sound(const struct smb_buffer *buffer, const struct smb_request *request)
{
    if (request->source_count == 0)
        return smb_op_accepts(buffer->dtype, request->op, request->scale);
    if (request->source_count < 2 || request->source_count > SMB_SOURCES_MAX ||
        request->op != SMB_REPLACE || request->scale != 1.0 || request->wire != SMB_WIRE_EXACT)
        return false;
    for (uint32_t i = 0; i < request->source_count; i++)
        if (!smb_op_accepts(buffer->dtype, i == 0 ? SMB_REPLACE : SMB_SUM, request->scales[i]) ||
            (request->wires[i] != SMB_WIRE_EXACT &&
             (!smb_wire_is_dense(request->wires[i]) || buffer->dtype != SMB_FLOAT32)))
            return false;
    return true;
}

bool transfer_is_sound(const struct smb_buffer *buffer, const struct smb_request *request)
{
    uint32_t element = buffer->element_bytes;
    if (request->bytes == 0 || request->bytes > buffer->layout.bytes ||
        request->offset > buffer->layout.bytes - request->bytes ||
        ((request->offset | request->bytes) & (element - 1)) != 0)
        return false;
    if (request->wire == SMB_WIRE_SPARSE)
        return sparse_is_sound(request, element) &&
               (request->opcode == SMB_READ ||
                (request->opcode == SMB_ACCUMULATE &&
                 smb_op_accepts(buffer->dtype, request->op, request->scale)));
    if (request->wire != SMB_WIRE_EXACT &&
        (!smb_wire_is_dense(request->wire) || buffer->dtype != SMB_FLOAT32 ||
         (request->opcode != SMB_READ && request->opcode != SMB_WRITE &&
          request->opcode != SMB_ACCUMULATE && request->opcode != SMB_ACCUMULATE_FROM)))
        return false;
    switch (request->opcode) {
    case SMB_READ: return request->sink != NULL;
    case SMB_WRITE: return request->source != NULL && request->sink == NULL;
    case SMB_ACCUMULATE:
        return request->source != NULL &&
               smb_op_accepts(buffer->dtype, request->op, request->scale);
    case SMB_FILL: return request->sink == NULL;
    case SMB_ACCUMULATE_FROM:
        return request->sink == NULL && sources_are_sound(buffer, request) &&
               others_are_sound(buffer, request);
    case SMB_APPLY:
        return request->sink == NULL && buffer->dtype == SMB_FLOAT32 &&
               smb_rule_accepts(request->op, &request->hyper) && others_are_sound(buffer, request);
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP:
        return request->bytes == element && smb_dtype_is_atomic(buffer->dtype) &&
               request->sink == NULL;
    default: return false;
    }
}

/* Makes the stream for the part of the range that goes over one link. */
static struct stream make_stream(const struct smb_buffer *buffer, const struct smb_request *request,
                                 struct call *call, uint32_t index, struct smb_link *link)
{
    const struct path *path = &buffer->paths[index];
    struct stream stream = {.call = call,
                            .link = link,
                            .request = request,
                            .segment_index = index,
                            .segment_id = path->segment_id,
                            .epoch = path->epoch,
                            .dtype = (uint8_t)buffer->dtype};
    const struct smb_buffer *others[SMB_SOURCES_MAX];
    int sources = others_of(request, others), first = request_brings(request);
    for (int s = 0; s < sources; s++)
        stream.source_ids[first + s] = others[s]->paths[index].segment_id;
    if (request->warden)
        stream.warden_id = request->warden->paths[index].segment_id;
    return stream;
}

/* Makes the streams of all lanes to a segment, at most one for each piece. Returns how many. */
static uint32_t make_lanes(const struct smb_buffer *buffer, const struct smb_request *request,
                           struct call *call, uint32_t index, struct smb_cursor cursor,
                           struct stream *streams)
{
    const struct path *path = &buffer->paths[index];
    streams[0] = make_stream(buffer, request, call, index, path->link);
    streams[0].cursor = cursor;
    stream_advance(&streams[0]);
    if (!streams[0].have_piece)
        return 0; /* no part of the range lies there */
    if (path->further_count == 0)
        return 1;
    uint32_t count = 1;
    struct smb_piece piece;
    struct smb_cursor ahead = streams[0].cursor;
    while (count <= path->further_count && smb_cursor_next(&ahead, &piece)) {
        streams[count] = make_stream(buffer, request, call, index, path_link(path, count));
        count++;
    }
    for (uint32_t lane = 0; lane < count; lane++) {
        streams[lane].path = path;
        streams[lane].shared = &streams[0].cursor;
    }
    return count;
}

/* Writes the streams to every linked segment that has a part of the range; returns how many.
 * *local: a segment of the range is mapped. */
static uint32_t make_streams(struct smb_buffer *buffer, const struct smb_request *request,
                             struct call *call, struct stream *streams, bool *local)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < buffer->layout.segment_count; i++) {
        struct smb_cursor cursor = smb_cursor_make(&buffer->layout, i, request->offset,
                                                   request->bytes);
        if (cursor.position >= cursor.end)
            continue;
        if (buffer->paths[i].segment) {
            *local = true;
            continue;
        }
        count += make_lanes(buffer, request, call, i, cursor, &streams[count]);
    }
    return count;
}

/* Whether every segment of the range is reachable, over the same kind of path in all buffers. A
 * request that must pass the gate needs a link. */
static bool paths_are_set(const struct smb_buffer *buffer, const struct smb_request *request,
                          uint32_t *missing)
{
    const struct smb_buffer *others[SMB_SOURCES_MAX];
    int count = others_of(request, others);
    for (uint32_t i = 0; i < buffer->layout.segment_count; i++) {
        const struct path *path = &buffer->paths[i];
        bool beside_the_gate = (request->token || request->opcode == SMB_APPLY) && path->segment;
        bool alike = true;
        for (int o = 0; o < count; o++)
            alike = alike && path_is_set(&others[o]->paths[i]) &&
                    !others[o]->paths[i].segment == !path->segment;
        const struct smb_buffer *warden = request->warden;
        bool kept = !warden || (request->token && i < warden->layout.segment_count &&
                                path_is_set(&warden->paths[i]) && !warden->paths[i].segment);
        if (!path_is_set(path) || !alike || beside_the_gate || !kept) {
            *missing = i;
            return false;
        }
    }
    return true;
}

/* Whether every server of the range has the feature that the request needs. An older server would
 * close the connection each time. */
static bool request_is_known(const struct smb_buffer *buffer, const struct smb_request *request,
                             uint32_t *without)
{
    bool sources = request->opcode == SMB_ACCUMULATE_FROM &&
                   (request->wire != SMB_WIRE_EXACT || request->source_count > 0);
    bool other_atomic = opcode_is_atomic(request->opcode) && buffer->dtype != SMB_INT64;
    bool combines = request->opcode == SMB_ACCUMULATE || request->opcode == SMB_ACCUMULATE_FROM;
    uint32_t feature = sources                          ? SMB_FEATURE_SOURCES
                       : request->wire == SMB_WIRE_INT4 ? SMB_FEATURE_INT4
                       : request_brings(request)        ? SMB_FEATURE_BRINGS
                       : other_atomic                   ? SMB_FEATURE_ATOMICS
                                                        : 0;
    if (combines && request->op >= SMB_BAND)
        feature |= SMB_FEATURE_BITS;
    if (request->warden)
        feature |= SMB_FEATURE_WARDENS;
    if (!feature)
        return true;
    for (uint32_t i = 0; i < buffer->layout.segment_count; i++) {
        struct smb_cursor cursor = smb_cursor_make(&buffer->layout, i, request->offset,
                                                   request->bytes);
        const struct smb_link *link = buffer->paths[i].link;
        if (cursor.position < cursor.end && !buffer->paths[i].segment && link &&
            (atomic_load_explicit(&link->features, memory_order_relaxed) & feature) != feature) {
            *without = i;
            return false;
        }
    }
    return true;
}

void transfer_add_outcome(struct smb_outcome *sum, const struct smb_outcome *part)
{
    struct smb_unknown **end = &sum->unknown;
    while (part->unknown && *end)
        end = &(*end)->also;
    if (part->unknown)
        *end = part->unknown;
    if (sum->status == SMB_OK && part->status != SMB_OK) {
        sum->status = part->status;
        sum->segment = part->segment;
    }
    if (part->bytes_applied > 0)
        sum->result = part->result;
    sum->bytes_applied += part->bytes_applied;
    sum->sent |= part->sent;
}

/* Size of the memory at `source` or `sink`. */
static uint64_t memory_bytes(const struct smb_buffer *buffer, const struct smb_request *request)
{
    return request->wire == SMB_WIRE_SPARSE ? request->count * buffer->element_bytes
                                            : request->bytes;
}

/* Whether the caller's memory is a view of the buffer itself. If it were copied while it is read,
 * element after element, changed elements would be read again further on. */
static inline bool uses_itself(const struct smb_buffer *buffer, const struct smb_request *request)
{
    if (!views_any())
        return false;
    uint64_t id = buffer->paths[0].segment_id;
    return (request->source && views_overlap(request->source, memory_bytes(buffer, request), id)) ||
           (request->indices &&
            views_overlap(request->indices, request->count * sizeof *request->indices, id)) ||
           (request->sink && views_overlap(request->sink, memory_bytes(buffer, request), id));
}

bool transfer_uses_itself(const struct smb_buffer *buffer, const struct smb_request *request)
{
    return uses_itself(buffer, request);
}

static void *copy_of(const void *memory, uint64_t bytes)
{
    void *copy = memory ? malloc(bytes) : NULL;
    if (copy)
        memcpy(copy, memory, bytes);
    return copy;
}

static int transfer_apart(struct smb_buffer *buffer, const struct smb_request *request,
                          struct smb_outcome *outcome, const struct smb_link **link);

/* Works as if the source had been copied before the call, and the sink were filled after it. */
static int transfer_through_copies(struct smb_buffer *buffer, const struct smb_request *request,
                                   struct smb_outcome *outcome, const struct smb_link **link)
{
    struct smb_request apart = *request;
    void *source = copy_of(request->source, memory_bytes(buffer, request));
    void *indices = copy_of(request->indices, request->count * sizeof *request->indices);
    apart.source = source;
    apart.indices = indices;
    apart.sink = request->sink ? malloc(memory_bytes(buffer, request)) : NULL;
    if (!apart.source != !request->source || !apart.indices != !request->indices ||
        !apart.sink != !request->sink)
        outcome->status = SMB_OUT_OF_MEMORY;
    else
        outcome->status = transfer_apart(buffer, &apart, outcome, link);
    if (outcome->status == SMB_OK && apart.sink)
        memcpy(request->sink, apart.sink, memory_bytes(buffer, request));
    free(source);
    free(indices);
    free(apart.sink);
    return outcome->status;
}

/* Does a call within one chunk that this process has mapped and whose lock is free: no account is
 * kept, and no clock is read. False: nothing was done. `tally`, or NULL, counts it for this client:
 * before the segment's counters, whose bus locks it would have to wait for. Inlined, because a
 * function call is 3 % of a small read. */
static inline __attribute__((always_inline)) bool done_at_once(struct smb_buffer *buffer,
                                                               const struct smb_request *request,
                                                               struct smb_outcome *outcome,
                                                               uint64_t patience,
                                                               struct smb_tally *tally)
{
    uint64_t first = request->offset / buffer->layout.chunk_bytes;
    if (first != (request->offset + request->bytes - 1) / buffer->layout.chunk_bytes ||
        request->opcode == SMB_ACCUMULATE_FROM || request->opcode == SMB_APPLY || request->token ||
        request->wire != SMB_WIRE_EXACT)
        return false;
    struct smb_piece piece;
    smb_layout_piece(&buffer->layout, request->offset, request->bytes, &piece);
    struct smb_segment *segment = buffer->paths[piece.segment].segment;
    if (!segment)
        return false;
    struct smb_change change = {.opcode = request->opcode,
                                .op = request->op,
                                .scale = request->scale,
                                .offset = piece.segment_offset,
                                .bytes = piece.bytes,
                                .source = request->source,
                                .sink = request->sink,
                                .argument = request->argument,
                                .expected = request->expected};
    if (smb_segment_apply(segment, &change, patience) != SMB_OK)
        return false;
    if (tally)
        tally_add(tally, request->opcode, piece.bytes);
    smb_segment_count(segment, request->opcode, piece.bytes);
    outcome->sent = request->opcode != SMB_READ;
    outcome->bytes_applied = piece.bytes;
    outcome->result = change.result;
    return true;
}

__attribute__((noinline)) static int timed_at_once(struct smb_buffer *buffer,
                                                   const struct smb_request *request,
                                                   struct smb_outcome *outcome)
{
    struct client_stats *stats = &buffer->client->stats;
    uint64_t begun_ns = smb_now_ns();
    if (!done_at_once(buffer, request, outcome, SMB_TRY_ONCE, &stats->at_once))
        return 0;
    latency_share(&stats->latency[SMB_TRANSPORT_SHM][request->opcode], smb_now_ns() - begun_ns,
                  CALLS_PER_TIMED);
    return 1;
}

int smb_transfer_at_once(struct smb_buffer *buffer, const struct smb_request *request,
                         struct smb_outcome *outcome)
{
    struct client_stats *stats = &buffer->client->stats;
    *outcome = (struct smb_outcome){0};
    if (!transfer_is_sound(buffer, request) || uses_itself(buffer, request))
        return 0;
    struct smb_tally *tally = atomic_load_explicit(&stats->wanted, memory_order_relaxed)
                                  ? &stats->at_once
                                  : NULL;
    if (tally && stats_read(&stats->at_once.of[request->opcode].operations) % CALLS_PER_TIMED == 0)
        return timed_at_once(buffer, request, outcome);
    return done_at_once(buffer, request, outcome, SMB_TRY_ONCE, tally);
}

void transfer_count(struct smb_buffer *buffer, const struct smb_request *request,
                    const struct smb_outcome *outcome, const struct smb_link *link,
                    uint64_t begun_ns)
{
    struct client_stats *stats = &buffer->client->stats;
    if (!atomic_load_explicit(&stats->wanted, memory_order_relaxed))
        return;
    int transport = !link         ? SMB_TRANSPORT_SHM
                    : link->local ? SMB_TRANSPORT_UNIX
                                  : SMB_TRANSPORT_TCP;
    if (outcome->status != SMB_OK) {
        atomic_fetch_add_explicit(&stats->failed[outcome->status], 1, memory_order_relaxed);
        return;
    }
    atomic_fetch_add_explicit(&stats->calls[transport].of[request->opcode].operations, 1,
                              memory_order_relaxed);
    atomic_fetch_add_explicit(&stats->calls[transport].of[request->opcode].bytes,
                              memory_bytes(buffer, request), memory_order_relaxed);
    latency_share(&stats->latency[transport][request->opcode], smb_now_ns() - begun_ns, 1);
}

static int transfer(struct smb_buffer *buffer, const struct smb_request *request,
                    struct smb_outcome *outcome, const struct smb_link **link);

int smb_transfer(struct smb_buffer *buffer, const struct smb_request *request,
                 struct smb_outcome *outcome)
{
    const struct smb_link *link = NULL;
    bool counted = atomic_load_explicit(&buffer->client->stats.wanted, memory_order_relaxed);
    uint64_t begun_ns = counted ? smb_now_ns() : 0;
    *outcome = (struct smb_outcome){0};
    if (!transfer_is_sound(buffer, request))
        outcome->status = SMB_INVALID;
    else if (uses_itself(buffer, request))
        transfer_through_copies(buffer, request, outcome, &link);
    else
        transfer_apart(buffer, request, outcome, &link);
    if (counted)
        transfer_count(buffer, request, outcome, link, begun_ns);
    return outcome->status;
}

static int transfer_apart(struct smb_buffer *buffer, const struct smb_request *request,
                          struct smb_outcome *outcome, const struct smb_link **link)
{
    if (done_at_once(buffer, request, outcome, SMB_TRY, NULL))
        return outcome->status = SMB_OK;
    return transfer(buffer, request, outcome, link);
}

int transfer_begin(struct transfer *transfer, struct smb_buffer *buffer,
                   const struct smb_request *request, struct smb_outcome *outcome)
{
    if (!paths_are_set(buffer, request, &outcome->segment))
        return outcome->status = SMB_INVALID;
    if (!request_is_known(buffer, request, &outcome->segment))
        return outcome->status = SMB_VERSION;
    /* Sets all members except the embedded streams, which are 1 KiB and written when they are
     * used. */
    transfer->call = (struct call){
        .outcome = outcome, .deadline_ns = smb_now_ns() + (uint64_t)request->timeout_ms * 1000000U};
    transfer->local_outcome = (struct smb_outcome){0};
    transfer->work = (struct local_work){.buffer = buffer,
                                         .request = request,
                                         .call = &transfer->call,
                                         .outcome = &transfer->local_outcome,
                                         .deadline_ns = transfer->call.deadline_ns};
    transfer->has_local_work = false;
    transfer->streams = transfer->at_hand;
    uint32_t streams_max = buffer->layout.segment_count + buffer->further_count;
    if (streams_max > STREAMS_AT_HAND)
        transfer->streams = malloc(streams_max * sizeof *transfer->streams);
    bool sparse = request->wire == SMB_WIRE_SPARSE;
    bool needs_scratch = request->opcode == SMB_ACCUMULATE_FROM ||
                         (sparse ? request->opcode != SMB_READ : request->wire != SMB_WIRE_EXACT);
    /* A piece of entries is larger than one of elements: by 4 bytes for each entry, and the
     * smallest element has 1 byte. */
    uint32_t times = sparse ? 5U : request->source_count > 0 ? 2U : 1U;
    if (needs_scratch)
        transfer->work.scratch = aligned_alloc(4096, (size_t)buffer->layout.chunk_bytes * times);
    if (!transfer->streams || (needs_scratch && !transfer->work.scratch)) {
        transfer_end(transfer);
        return outcome->status = SMB_OUT_OF_MEMORY;
    }
    struct call *call = &transfer->call;
    call->streams = transfer->streams;
    call->stream_count = make_streams(buffer, request, call, call->streams,
                                      &transfer->has_local_work);
    call->streams_left = call->stream_count;
    return SMB_OK;
}

void transfer_end(struct transfer *transfer)
{
    if (transfer->streams != transfer->at_hand)
        free(transfer->streams);
    free(transfer->work.scratch);
}

static int transfer(struct smb_buffer *buffer, const struct smb_request *request,
                    struct smb_outcome *outcome, const struct smb_link **link)
{
    struct transfer transfer;
    if (transfer_begin(&transfer, buffer, request, outcome) != SMB_OK)
        return outcome->status;
    struct call *call = &transfer.call;
    if (call->stream_count > 0) {
        *link = call->streams[0].link;
        call_run(buffer->client, call, transfer.has_local_work ? local_step : NULL, &transfer.work);
    } else {
        uint64_t look_ns = smb_now_ns() + LOOK_MS * 1000000U;
        while (local_step(&transfer.work)) {
            if (smb_now_ns() < look_ns)
                continue;
            call->stopped |= client_look();
            look_ns = smb_now_ns() + LOOK_MS * 1000000U;
        }
    }
    transfer_end(&transfer);
    transfer_add_outcome(outcome, &transfer.local_outcome);
    return outcome->status;
}
