#include "client/inflight.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "client/sparse.h"
#include "smb/kernels.h"

void inflight_free_all(struct inflight *inflight)
{
    while (inflight) {
        struct inflight *next = inflight->next;
        if (inflight->unknown)
            smb_unknown_release(inflight->unknown);
        free(inflight->encoded);
        free(inflight);
        inflight = next;
    }
}

struct inflight *inflight_take(struct smb_link *link)
{
    struct inflight *inflight = link->spare;
    if (inflight)
        link->spare = inflight->next;
    else
        inflight = malloc(sizeof *inflight);
    return inflight;
}

struct inflight *inflight_take_from(struct inflight **at, struct inflight ***end)
{
    SMB_ASSERT(*at);
    struct inflight *inflight = *at;
    *at = inflight->next;
    if (*end == &inflight->next)
        *end = at;
    return inflight;
}

void inflight_put_back(struct smb_link *link, struct inflight *inflight)
{
    SMB_ASSERT(link->in_flight > 0 && link->in_flight_bytes >= inflight->length);
    link->in_flight--;
    link->in_flight_bytes -= inflight->length;
    link->atomics_in_flight -= opcode_is_atomic(inflight->opcode);
    if (inflight->unknown)
        smb_unknown_release(inflight->unknown);
    inflight->unknown = NULL;
    free(inflight->encoded);
    inflight->encoded = NULL;
    inflight->next = link->spare;
    link->spare = inflight;
}

void inflight_landed(struct smb_link *link, struct inflight *inflight)
{
    SMB_ASSERT(!inflight->stream || inflight->stream->in_flight > 0);
    struct stream *stream = inflight->stream;
    inflight_put_back(link, inflight);
    if (stream && --stream->in_flight == 0 && !stream->have_piece && !stream->queued)
        call_stream_finished(stream);
}

void inflight_seal(struct inflight *inflight)
{
    if (inflight->checksum_bytes == 0)
        return;
    uint32_t crc = smb_crc32c(0, inflight->header, SMB_FRAME_BYTES);
    crc = smb_crc32c(crc, inflight->small, inflight->small_bytes);
    smb_store_checksum(inflight->checksum,
                       smb_crc32c(crc, inflight->payload, inflight->payload_bytes));
}

void inflight_encode(struct smb_link *link, struct inflight *inflight, struct smb_frame *frame)
{
    frame->flags |= client_frame_flags(link->client);
    inflight->checksum_bytes = smb_frame_checksum_bytes(frame);
    frame->lane = link->lane;
    frame->epoch = inflight->epoch;
    frame->session = link->client->session;
    frame->sequence = inflight->sequence;
    frame->segment = inflight->segment_id;
    frame->length = inflight->length;
    frame->payload = inflight->small_bytes + inflight->payload_bytes + inflight->checksum_bytes;
    smb_frame_encode(frame, inflight->header);
    inflight_seal(inflight);
}

void inflight_put_small(struct inflight *inflight, uint64_t word)
{
    SMB_ASSERT(inflight->small_bytes + 8 <= SMB_RECORD_SMALL_BYTES);
    smb_store64(inflight->small + inflight->small_bytes, word);
    inflight->small_bytes += 8;
}

static void make_ask(struct smb_link *link, struct stream *stream, struct inflight *inflight)
{
    const struct smb_ask *ask = stream->ask;
    struct smb_frame frame = {.opcode = (uint8_t)ask->opcode, .argument = ask->argument};
    inflight->opcode = frame.opcode;
    for (int i = 0;
         i < (ask->opcode == SMB_AUTHORIZE ? (int)SMB_AUTHORIZE_WORDS : (int)SMB_SYNC_WORDS); i++)
        inflight_put_small(inflight, ask->words[i]);
    inflight_encode(link, inflight, &frame);
    stream->have_piece = false;
}

/* Encodes the elements, once, so that a repetition is the same. Fails without effect, when out of
 * memory. */
static bool make_encoded(const struct stream *stream, struct inflight *inflight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint32_t element = smb_dtype_bytes(stream->dtype);
    uint64_t bytes = request->wire == SMB_WIRE_SPARSE
                         ? stream->entries * (SMB_WIRE_INDEX_BYTES + element)
                         : smb_wire_bytes(request->wire, piece->bytes / 4);
    inflight->encoded = malloc(bytes);
    if (!inflight->encoded)
        return false;
    inflight->wire = (uint8_t)request->wire;
    if (request->opcode == SMB_READ) {
        inflight->answer_bytes = (uint32_t)bytes;
        return true;
    }
    if (request->wire == SMB_WIRE_SPARSE)
        sparse_encode(request, element, piece, stream->first_entry, stream->entries,
                      inflight->encoded);
    else
        smb_kernel_encode(request->wire,
                          (const uint8_t *)request->source +
                              (piece->buffer_offset - request->offset),
                          piece->bytes / 4, inflight->encoded);
    inflight->payload = inflight->encoded;
    inflight->payload_bytes = (uint32_t)bytes;
    return true;
}

static bool next_piece(struct stream *stream, struct smb_piece *piece)
{
    return smb_cursor_next(stream->shared ? stream->shared : &stream->cursor, piece);
}

void stream_advance(struct stream *stream)
{
    if (stream->request->wire != SMB_WIRE_SPARSE) {
        stream->have_piece = next_piece(stream, &stream->piece);
        return;
    }
    uint32_t element = smb_dtype_bytes(stream->dtype);
    do {
        if (stream->rest.bytes == 0 && !next_piece(stream, &stream->rest)) {
            stream->have_piece = false;
            return;
        }
        stream->have_piece = stream->request->opcode == SMB_READ
                                 ? sparse_run(stream->request, element, &stream->rest,
                                              &stream->piece, &stream->first_entry)
                                 : sparse_cut(stream->request, element,
                                              SMB_CHUNK_BYTES_MAX /
                                                  (SMB_WIRE_INDEX_BYTES + element),
                                              &stream->rest, &stream->piece, &stream->first_entry,
                                              &stream->entries);
    } while (!stream->have_piece);
}

bool stream_take(struct stream *stream)
{
    if (stream->shared && !stream->have_piece)
        stream_advance(stream);
    return stream->have_piece;
}

bool stream_is_empty(const struct stream *stream)
{
    return stream->shared && !stream->have_piece && stream->rest.bytes == 0 &&
           stream->shared->position >= stream->shared->end;
}

/* Sends the elements unchanged, from the caller's memory. */
static bool put_elements(struct smb_link *link, const struct smb_request *request, uint64_t within,
                         struct inflight *inflight)
{
    inflight->payload = (const uint8_t *)request->source + within;
    inflight->payload_bytes = inflight->length;
    if (!link->client->checksums)
        return true;
    /* the caller's array may change meanwhile, and the checksum must match the bytes that are
     * sent */
    inflight->encoded = malloc(inflight->length);
    if (!inflight->encoded)
        return false;
    memcpy(inflight->encoded, inflight->payload, inflight->length);
    inflight->payload = inflight->encoded;
    return true;
}

static void put_sources(const struct stream *stream, struct inflight *inflight)
{
    const struct smb_request *request = stream->request;
    uint64_t wires = 0;
    for (uint32_t i = 0; i < request->source_count; i++)
        wires |= (uint64_t)request->wires[i] << SMB_SOURCE_WIRE_BITS * i;
    inflight_put_small(inflight, wires);
    for (uint32_t i = 0; i < request->source_count; i++) {
        inflight_put_small(inflight, stream->source_ids[i]);
        inflight_put_small(inflight, smb_bits_of(request->scales[i]));
    }
}

static bool make_piece(struct smb_link *link, struct stream *stream, struct inflight *inflight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    /* a sparse read asks for each run of its elements as for any range */
    bool runs = request->wire == SMB_WIRE_SPARSE && request->opcode == SMB_READ;
    int wire = runs ? SMB_WIRE_EXACT : request->wire;
    uint64_t within = runs ? stream->first_entry * smb_dtype_bytes(stream->dtype)
                           : piece->buffer_offset - request->offset; /* in the caller's memory */
    SMB_ASSERT(piece->bytes <= SMB_CHUNK_BYTES_MAX);
    struct smb_frame frame = {.opcode = (uint8_t)request->opcode,
                              .dtype = stream->dtype,
                              .offset = piece->segment_offset,
                              .argument = request->argument};
    inflight->opcode = frame.opcode;
    inflight->length = inflight->answer_bytes = (uint32_t)piece->bytes;
    inflight->buffer_offset = piece->buffer_offset;
    if (request->opcode == SMB_ACCUMULATE_FROM)
        inflight->wire = (uint8_t)request->wire; /* the server rounds */
    else if (wire != SMB_WIRE_EXACT && !make_encoded(stream, inflight))
        return false;
    frame.flags |= (uint16_t)(wire << SMB_FLAG_WIRE_SHIFT);
    if (request->token) {
        frame.flags |= SMB_FLAG_FENCED;
        inflight_put_small(inflight, request->token);
    }
    if (stream->warden_id) {
        frame.flags |= SMB_FLAG_WARDEN;
        if (request->opcode == SMB_APPLY)
            frame.argument = stream->warden_id;
        else
            inflight_put_small(inflight, stream->warden_id);
    }
    switch (request->opcode) {
    case SMB_ACCUMULATE:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        if (request->sink)
            frame.flags |= SMB_FLAG_FETCH;
        /* fall through */
    case SMB_WRITE:
        if (!inflight->encoded && !put_elements(link, request, within, inflight))
            return false;
        break;
    case SMB_ACCUMULATE_FROM:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        if (request->source_count > 0) {
            put_sources(stream, inflight);
            break;
        }
        inflight_put_small(inflight, stream->source_ids[0]);
        inflight_put_small(inflight, piece->segment_offset);
        break;
    case SMB_APPLY:
        frame.op = (uint8_t)request->op;
        for (int i = 0; i < SMB_APPLY_SEGMENTS; i++)
            inflight_put_small(inflight, stream->source_ids[i]);
        smb_store_hyper(inflight->small + inflight->small_bytes, &request->hyper);
        inflight->small_bytes += 8 * SMB_HYPER_WORDS;
        if (request_brings(request) && !put_elements(link, request, within, inflight))
            return false;
        break;
    case SMB_COMPARE_SWAP: inflight_put_small(inflight, request->expected); break;
    }
    if (request->sink)
        inflight->sink = (uint8_t *)request->sink + within;
    inflight_encode(link, inflight, &frame);
    /* With several lanes the next piece is taken when this lane has room: other lanes may take it
     * first. */
    if (stream->shared && stream->rest.bytes == 0)
        stream->have_piece = false;
    else
        stream_advance(stream);
    return true;
}

bool inflight_make(struct smb_link *link, struct stream *stream)
{
    SMB_ASSERT(stream->have_piece);
    struct inflight *inflight = inflight_take(link);
    if (!inflight)
        return false;
    *inflight = (struct inflight){.stream = stream,
                                  .sequence = link_next_sequence(link),
                                  .segment_id = stream->segment_id,
                                  .epoch = link_epoch(link) ? link_epoch(link) : stream->epoch,
                                  .made_ns = smb_now_ns(),
                                  .fate = SMB_OUTCOME_NOT_APPLIED};
    if (stream->ask) {
        make_ask(link, stream, inflight);
    } else if (!make_piece(link, stream, inflight)) {
        inflight->next = link->spare;
        link->spare = inflight;
        return false;
    }
    inflight_append(&link->unsent_end, inflight);
    link->in_flight++;
    link->in_flight_bytes += inflight->length;
    link->atomics_in_flight += opcode_is_atomic(inflight->opcode);
    stream->in_flight++;
    return true;
}
