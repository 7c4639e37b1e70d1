/* Requests on their way: made from streams, kept in lists. Driver only. */
#include "client/inflight.h"

#include <stdlib.h>
#include <string.h>

void flights_free(struct flight *flight)
{
    while (flight) {
        struct flight *next = flight->next;
        if (flight->doubt)
            smb_doubt_release(flight->doubt);
        free(flight->encoded);
        free(flight);
        flight = next;
    }
}

struct flight *flight_take(struct smb_link *link)
{
    struct flight *flight = link->spare;
    if (flight)
        link->spare = flight->next;
    else
        flight = malloc(sizeof *flight);
    return flight;
}

struct flight *flight_take_from(struct flight **at, struct flight ***end)
{
    struct flight *flight = *at;
    *at = flight->next;
    if (*end == &flight->next)
        *end = at;
    return flight;
}

void flight_put_back(struct smb_link *link, struct flight *flight)
{
    link->flying--;
    link->flying_bytes -= flight->length;
    link->atomics_flying -= opcode_is_atomic(flight->opcode);
    if (flight->doubt)
        smb_doubt_release(flight->doubt);
    flight->doubt = NULL;
    free(flight->encoded);
    flight->encoded = NULL;
    flight->next = link->spare;
    link->spare = flight;
}

void flight_landed(struct smb_link *link, struct flight *flight)
{
    struct stream *stream = flight->stream;
    flight_put_back(link, flight);
    if (stream && --stream->in_flight == 0 && !stream->have_piece && !stream->queued)
        call_stream_finished(stream);
}

void flight_seal(struct flight *flight)
{
    if (flight->checksum_bytes == 0)
        return;
    uint32_t crc = smb_crc32c(0, flight->header, SMB_FRAME_BYTES);
    crc = smb_crc32c(crc, flight->small, flight->small_bytes);
    smb_store_checksum(flight->checksum, smb_crc32c(crc, flight->payload, flight->payload_bytes));
}

void flight_encode(struct smb_link *link, struct flight *flight, struct smb_frame *frame)
{
    frame->flags |= client_frame_flags(link->client);
    flight->checksum_bytes = smb_frame_checksum_bytes(frame);
    frame->lane = link->lane;
    frame->epoch = flight->epoch;
    frame->session = link->client->session;
    frame->sequence = flight->sequence;
    frame->segment = flight->segment_id;
    frame->length = flight->length;
    frame->payload = flight->small_bytes + flight->payload_bytes + flight->checksum_bytes;
    smb_frame_encode(frame, flight->header);
    flight_seal(flight);
}

void flight_put_small(struct flight *flight, uint64_t word)
{
    smb_store64(flight->small + flight->small_bytes, word);
    flight->small_bytes += 8;
}

static void make_ask(struct smb_link *link, struct stream *stream, struct flight *flight)
{
    const struct smb_ask *ask = stream->ask;
    struct smb_frame frame = {.opcode = (uint8_t)ask->opcode, .argument = ask->argument};
    flight->opcode = frame.opcode;
    for (int i = 0; i < (ask->opcode == SMB_AUTHORIZE ? (int)SMB_AUTHORIZE_WORDS : (int)SMB_SYNC_WORDS); i++)
        flight_put_small(flight, ask->words[i]);
    flight_encode(link, flight, &frame);
    stream->have_piece = false;
}

/* Elements that travel encoded: made once, so that what is sent again is the same. Only where this fails is nothing done. */
static bool make_encoded(const struct stream *stream, struct flight *flight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint32_t element = smb_dtype_bytes(stream->dtype);
    uint64_t bytes = request->wire == SMB_WIRE_SPARSE ? stream->entries * (SMB_WIRE_INDEX_BYTES + element)
                                                      : smb_wire_bytes(request->wire, piece->bytes / 4);
    flight->encoded = malloc(bytes);
    if (!flight->encoded)
        return false;
    flight->wire = (uint8_t)request->wire;
    if (request->opcode == SMB_READ) {
        flight->answer_bytes = (uint32_t)bytes;
        return true;
    }
    if (request->wire == SMB_WIRE_SPARSE)
        sparse_encode(request, element, piece, stream->first_entry, stream->entries, flight->encoded);
    else
        smb_kernel_encode(request->wire, (const uint8_t *)request->source + (piece->buffer_offset - request->offset),
                          piece->bytes / 4, flight->encoded);
    flight->payload = flight->encoded;
    flight->payload_bytes = (uint32_t)bytes;
    return true;
}

void stream_advance(struct stream *stream)
{
    if (stream->request->wire != SMB_WIRE_SPARSE) {
        stream->have_piece = smb_cursor_next(&stream->cursor, &stream->piece);
        return;
    }
    uint32_t element = smb_dtype_bytes(stream->dtype);
    do {
        if (stream->rest.bytes == 0 && !smb_cursor_next(&stream->cursor, &stream->rest)) {
            stream->have_piece = false;
            return;
        }
        stream->have_piece = sparse_cut(stream->request, element, SMB_CHUNK_BYTES_MAX / (SMB_WIRE_INDEX_BYTES + element),
                                        &stream->rest, &stream->piece, &stream->first_entry, &stream->entries);
    } while (!stream->have_piece);
}

static bool make_piece(struct smb_link *link, struct stream *stream, struct flight *flight)
{
    const struct smb_request *request = stream->request;
    const struct smb_piece *piece = &stream->piece;
    uint64_t within = piece->buffer_offset - request->offset; /* in the caller's memory */
    struct smb_frame frame = {.opcode = (uint8_t)request->opcode, .dtype = stream->dtype, .offset = piece->segment_offset,
                              .argument = request->argument};
    flight->opcode = frame.opcode;
    flight->length = flight->answer_bytes = (uint32_t)piece->bytes;
    flight->buffer_offset = piece->buffer_offset;
    if (request->wire != SMB_WIRE_EXACT && !make_encoded(stream, flight))
        return false;
    frame.flags |= (uint16_t)(request->wire << SMB_FLAG_WIRE_SHIFT);
    if (request->fenced) {
        frame.flags |= SMB_FLAG_FENCED;
        flight_put_small(flight, request->token);
    }
    switch (request->opcode) {
    case SMB_ACCUMULATE:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        if (request->sink)
            frame.flags |= SMB_FLAG_FETCH;
        /* fall through */
    case SMB_WRITE:
        if (flight->encoded)
            break;
        flight->payload = (const uint8_t *)request->source + within;
        flight->payload_bytes = flight->length;
        if (link->client->checksums) { /* a caller's array may change meanwhile: what is sent is what the checksum is of */
            flight->encoded = malloc(flight->length);
            if (!flight->encoded)
                return false;
            memcpy(flight->encoded, flight->payload, flight->length);
            flight->payload = flight->encoded;
        }
        break;
    case SMB_ACCUMULATE_FROM:
        frame.op = (uint8_t)request->op;
        frame.argument = smb_bits_of(request->scale);
        flight_put_small(flight, stream->source_ids[0]);
        flight_put_small(flight, piece->segment_offset);
        break;
    case SMB_APPLY:
        frame.op = (uint8_t)request->op;
        for (int i = 0; i < SMB_APPLY_SEGMENTS; i++)
            flight_put_small(flight, stream->source_ids[i]);
        smb_store_hyper(flight->small + flight->small_bytes, &request->hyper);
        flight->small_bytes += 8 * SMB_HYPER_WORDS;
        break;
    case SMB_COMPARE_SWAP: flight_put_small(flight, request->expected); break;
    }
    if (request->sink)
        flight->sink = (uint8_t *)request->sink + within;
    flight_encode(link, flight, &frame);
    stream_advance(stream);
    return true;
}

bool flight_make(struct smb_link *link, struct stream *stream)
{
    struct flight *flight = flight_take(link);
    if (!flight)
        return false;
    *flight = (struct flight){.stream = stream, .sequence = link_next_sequence(link), .segment_id = stream->segment_id,
                              .epoch = stream->epoch, .made_ns = smb_now_ns(), .fate = SMB_DOUBT_NOT_APPLIED};
    if (stream->ask) {
        make_ask(link, stream, flight);
    } else if (!make_piece(link, stream, flight)) {
        flight->next = link->spare;
        link->spare = flight;
        return false;
    }
    flight_append(&link->unsent_end, flight);
    link->flying++;
    link->flying_bytes += flight->length;
    link->atomics_flying += opcode_is_atomic(flight->opcode);
    stream->in_flight++;
    return true;
}
