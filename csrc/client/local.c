#include "client/local.h"

#include "base/clock.h"
#include "client/unknown.h"
#include "client/sparse.h"
#include "memory/change.h"

enum {
    /* the longest wait for a chunk's lock before the links are served, because this thread may have
     * to move the bytes of other calls */
    STEP_WAIT_NS = 1000000,
    /* From this size on a call uses stores that go around the caches. Measured against plain
     * copies: 0.7 times as fast at 4 MiB, 1.3 times at 16. The size of the last cache is no guide,
     * because virtual machines report a size that they share with others. */
    STREAMING_BYTES = 16 << 20
};

/* Notes that the piece and the segment's later pieces failed. The other segments still do their
 * part. */
static void local_failed(struct local_work *work, struct smb_piece piece, int status)
{
    struct call account = {.outcome = work->outcome};
    if (work->outcome->status == SMB_OK) {
        work->outcome->status = status;
        work->outcome->segment = work->index;
    }
    bool more = true;
    while (more && smb_opcode_changes(work->request->opcode)) {
        call_note_unknown(&account, piece.buffer_offset, (uint32_t)piece.bytes,
                          SMB_OUTCOME_NOT_APPLIED);
        more = smb_cursor_next(&work->cursor, &piece);
    }
    work->cursor.position = work->cursor.end;
    work->rest.bytes = 0;
}

/* Gets a source's elements, rounded as if they had been sent. */
static int local_source(struct local_work *work, const struct smb_piece *piece,
                        struct smb_buffer *source, int wire, uint64_t deadline_ns, void *to)
{
    struct smb_change read = {
        .opcode = SMB_READ, .offset = piece->segment_offset, .bytes = piece->bytes, .sink = to};
    int status = smb_segment_apply(source->paths[work->index].segment, &read, deadline_ns);
    if (status == SMB_OK && wire != SMB_WIRE_EXACT)
        smb_kernel_round(wire, to, piece->bytes / 4, piece->buffer_offset,
                         work->buffer->layout.chunk_bytes, to);
    return status;
}

/* Computes the sum of several sources, in the scratch's first half. */
static int local_sum(struct local_work *work, const struct smb_piece *piece, uint64_t deadline_ns)
{
    const struct smb_request *request = work->request;
    const struct smb_buffer *buffer = work->buffer;
    uint8_t *sum = work->scratch, *one = sum + buffer->layout.chunk_bytes;
    for (uint32_t i = 0; i < request->source_count; i++) {
        int status = local_source(work, piece, request->sources[i], request->wires[i], deadline_ns,
                                  one);
        if (status != SMB_OK)
            return status;
        smb_kernel_apply(buffer->dtype, i == 0 ? SMB_REPLACE : SMB_SUM, sum, one,
                         piece->bytes / smb_dtype_bytes(buffer->dtype), request->scales[i]);
    }
    return SMB_OK;
}

/* Reads the elements of the piece that a sparse read wants, run by run. A run that does not get its
 * lock in time is the first one of the next try: many runs take longer than one try has. */
static int local_runs(struct local_work *work, const struct smb_piece *piece, uint64_t deadline_ns)
{
    const struct smb_request *request = work->request;
    uint32_t element = smb_dtype_bytes(work->buffer->dtype);
    struct smb_piece run;
    uint64_t first;
    if (work->rest.bytes == 0)
        work->rest = *piece;
    while (work->rest.bytes > 0) {
        struct smb_piece before = work->rest;
        if (!sparse_run(request, element, &work->rest, &run, &first))
            break;
        struct smb_change read = {.opcode = SMB_READ,
                                  .offset = run.segment_offset,
                                  .bytes = run.bytes,
                                  .sink = (uint8_t *)request->sink + first * element};
        int status = smb_segment_apply(work->buffer->paths[work->index].segment, &read,
                                       deadline_ns);
        if (status != SMB_OK) {
            work->rest = before;
            return status;
        }
        work->outcome->bytes_applied += run.bytes;
        work->bytes_here += run.bytes;
    }
    return SMB_OK;
}

static int local_piece(struct local_work *work, const struct smb_piece *piece, uint64_t deadline_ns)
{
    const struct smb_request *request = work->request;
    if (request->opcode == SMB_READ && request->wire == SMB_WIRE_SPARSE)
        return local_runs(work, piece, deadline_ns);
    struct path *path = &work->buffer->paths[work->index];
    uint64_t within = piece->buffer_offset - request->offset;
    struct smb_change change = {
        .opcode = request->opcode,
        .op = request->op,
        .scale = request->scale,
        .offset = piece->segment_offset,
        .bytes = piece->bytes,
        .source = request->source ? (const uint8_t *)request->source + within : NULL,
        .sink = request->sink ? (uint8_t *)request->sink + within : NULL,
        .argument = request->argument,
        .expected = request->expected,
        .streaming = request->bytes >= STREAMING_BYTES || work->whole_bytes >= STREAMING_BYTES,
    };
    if (request->opcode == SMB_ACCUMULATE_FROM) {
        int status = request->source_count > 0
                         ? local_sum(work, piece, deadline_ns)
                         : local_source(work, piece, request->other, request->wire, deadline_ns,
                                        work->scratch);
        if (status != SMB_OK)
            return status;
        change.source = work->scratch;
    } else if (request->wire == SMB_WIRE_SPARSE) {
        uint32_t element = smb_dtype_bytes(work->buffer->dtype);
        struct smb_piece rest = *piece, touched;
        uint64_t first, entries;
        if (!sparse_cut(request, element, UINT64_MAX, &rest, &touched, &first, &entries))
            return SMB_OK;
        sparse_encode(request, element, &touched, first, entries, work->scratch);
        change.offset = touched.segment_offset;
        change.bytes = touched.bytes;
        change.source_bytes = (uint32_t)(entries * (SMB_WIRE_INDEX_BYTES + element));
        change.wire = request->wire;
        change.source = work->scratch;
    } else if (request->wire != SMB_WIRE_EXACT && request->opcode != SMB_READ) {
        smb_kernel_encode(request->wire, change.source, piece->bytes / 4, work->scratch);
        change.wire = request->wire;
        change.source = work->scratch;
    }
    int status = smb_segment_apply(path->segment, &change, deadline_ns);
    if (status == SMB_OK) {
        if (request->wire != SMB_WIRE_EXACT && request->opcode == SMB_READ)
            smb_kernel_round(request->wire, change.sink, piece->bytes / 4, piece->buffer_offset,
                             work->buffer->layout.chunk_bytes, change.sink);
        work->outcome->sent |= request->opcode != SMB_READ;
        work->outcome->bytes_applied += piece->bytes;
        work->outcome->result = change.result;
        work->bytes_here += piece->bytes;
    }
    return status;
}

bool local_step(void *argument)
{
    struct local_work *work = argument;
    struct smb_buffer *buffer = work->buffer;
    for (; work->index < buffer->layout.segment_count; work->index++, work->walking = false) {
        struct path *path = &buffer->paths[work->index];
        if (!path->segment)
            continue;
        if (!work->walking) {
            work->cursor = smb_cursor_make(&buffer->layout, work->index, work->request->offset,
                                           work->request->bytes);
            work->walking = true;
            work->bytes_here = 0;
        }
        struct smb_cursor here = work->cursor;
        struct smb_piece piece;
        if (smb_cursor_next(&work->cursor, &piece)) {
            uint64_t step_end_ns = smb_now_ns() + STEP_WAIT_NS;
            bool last_try = step_end_ns >= work->deadline_ns;
            int status = work->call->stopped
                             ? SMB_TIMEOUT
                             : local_piece(work, &piece,
                                           last_try ? work->deadline_ns : step_end_ns);
            if (status == SMB_OK)
                return true;
            if (status == SMB_TIMEOUT && !last_try && !work->call->stopped) {
                work->cursor = here; /* tried again, after the links were served */
                return true;
            }
            local_failed(work, piece, status);
        }
        if (work->bytes_here > 0)
            smb_segment_count(path->segment, work->request->opcode, work->bytes_here);
    }
    return false;
}
