#include "memory/change.h"

#include <string.h>

#include "base/assert.h"
#include "memory/mapping.h"

enum { READ_ATTEMPTS = 8 };

/* A reader without the lock races with writers by design: its copy is thrown away if the count
 * moved. ThreadSanitizer cannot know that, so under it the copy is a loop that it does not
 * instrument. */
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread,
               noinline)) static void racing_copy(const struct smb_change *change, const void *from)
{
    for (uint64_t i = 0; i < change->bytes; i++)
        ((volatile uint8_t *)change->sink)[i] = ((const volatile uint8_t *)from)[i];
}
#else
static void racing_copy(const struct smb_change *change, const void *from)
{
    kernel_copy(change->sink, from, change->bytes, change->streaming);
}
#endif

static bool read_unlocked(struct smb_segment *segment, struct chunk_state *chunk,
                          const struct smb_change *change, int attempts)
{
    for (int attempt = 0; attempt < attempts; attempt++) {
        uint32_t before = atomic_load_explicit(&chunk->sequence, memory_order_acquire);
        if (before % 2 == 0) {
            racing_copy(change, segment->data + change->offset);
            atomic_thread_fence(memory_order_acquire);
            if (atomic_load_explicit(&chunk->sequence, memory_order_relaxed) == before)
                return true;
        }
        pause_cpu();
    }
    return false;
}

static void fill(uint8_t *target, uint64_t bytes, uint32_t element, uint64_t bits)
{
    switch (element) {
    case 1: memset(target, (int)(uint8_t)bits, bytes); break;
    case 2:
        for (uint64_t i = 0; i < bytes / 2; i++)
            ((uint16_t *)target)[i] = (uint16_t)bits;
        break;
    case 4:
        for (uint64_t i = 0; i < bytes / 4; i++)
            ((uint32_t *)target)[i] = (uint32_t)bits;
        break;
    default:
        for (uint64_t i = 0; i < bytes / 8; i++)
            ((uint64_t *)target)[i] = bits;
    }
}

/* Returns the element's bits in the low bytes of a word, and 0 in the others. */
static uint64_t bits_at(const uint8_t *target, uint64_t bytes)
{
    uint64_t bits = 0;
    memcpy(&bits, target, bytes); /* both ends are little-endian */
    return bits;
}

/* Adds two elements, given as bits_at returns them. Only the low bytes of the sum count. */
static uint64_t sum_of(uint32_t dtype, uint64_t bits, uint64_t addend)
{
    if (dtype == SMB_FLOAT32) {
        float a, b;
        memcpy(&a, &bits, sizeof a);
        memcpy(&b, &addend, sizeof b);
        a += b;
        memcpy(&bits, &a, sizeof a);
        return bits;
    }
    if (dtype == SMB_FLOAT64) {
        double a, b;
        memcpy(&a, &bits, sizeof a);
        memcpy(&b, &addend, sizeof b);
        a += b;
        memcpy(&bits, &a, sizeof a);
        return bits;
    }
    return bits + addend;
}

static uint32_t index_of(const uint8_t *entry)
{
    uint32_t index;
    memcpy(&index, entry, sizeof index); /* both ends are little-endian */
    return index;
}

static bool entries_are_sound(const struct smb_change *change, uint32_t element)
{
    uint32_t entry = SMB_WIRE_INDEX_BYTES + element;
    const uint8_t *entries = change->source;
    if (change->source_bytes == 0 || change->source_bytes % entry != 0)
        return false;
    uint64_t next = 0;
    for (uint32_t at = 0; at < change->source_bytes; at += entry) {
        uint64_t index = index_of(entries + at);
        if (index < next)
            return false;
        next = index + 1;
    }
    return next <= change->bytes / element;
}

/* Combines the entries for elements [first, end) of the range. */
static void apply_entries(struct smb_segment *segment, const struct smb_change *change,
                          uint64_t first, uint64_t end)
{
    enum { BATCH = 256 };
    uint64_t old[BATCH], values[BATCH]; /* room for elements of any dtype */
    uint32_t element = smb_dtype_bytes((int)segment->dtype), entry = SMB_WIRE_INDEX_BYTES + element;
    const uint8_t *entries = change->source;
    uint8_t *target = segment->data + change->offset;
    uint64_t low = 0, count = change->source_bytes / entry;
    for (uint64_t high = count; low < high;) {
        uint64_t middle = low + (high - low) / 2;
        if (index_of(entries + middle * entry) < first)
            low = middle + 1;
        else
            high = middle;
    }
    while (low < count && index_of(entries + low * entry) < end) {
        uint64_t n = 0;
        for (; n < BATCH && low + n < count && index_of(entries + (low + n) * entry) < end; n++) {
            const uint8_t *here = entries + (low + n) * entry;
            memcpy((uint8_t *)old + n * element, target + (uint64_t)index_of(here) * element,
                   element);
            memcpy((uint8_t *)values + n * element, here + SMB_WIRE_INDEX_BYTES, element);
        }
        smb_kernel_apply((int)segment->dtype, change->op, old, values, n, change->scale);
        for (uint64_t i = 0; i < n; i++)
            kernel_put(target + (uint64_t)index_of(entries + (low + i) * entry) * element,
                       (uint8_t *)old + i * element, element);
        low += n;
    }
}

void smb_segment_change_range(struct smb_segment *segment, struct smb_change *change, uint64_t from,
                              uint64_t bytes)
{
    SMB_ASSERT(bytes > 0 && from <= change->bytes && bytes <= change->bytes - from);
    uint8_t *target = segment->data + change->offset + from;
    uint32_t element = smb_dtype_bytes((int)segment->dtype);
    if (change->wire == SMB_WIRE_SPARSE) {
        apply_entries(segment, change, from / element, (from + bytes) / element);
        return;
    }
    if (change->wire != SMB_WIRE_EXACT) {
        smb_kernel_apply_encoded(change->wire,
                                 change->opcode == SMB_WRITE ? SMB_REPLACE : change->op, target,
                                 change->source, from / element, bytes / element,
                                 change->opcode == SMB_WRITE ? 1.0 : change->scale);
        return;
    }
    switch (change->opcode) {
    case SMB_WRITE:
        kernel_copy(target, (const uint8_t *)change->source + from, bytes, change->streaming);
        break;
    case SMB_ACCUMULATE:
    case SMB_ACCUMULATE_FROM:
        smb_kernel_apply((int)segment->dtype, change->op, target,
                         (const uint8_t *)change->source + from, bytes / element, change->scale);
        break;
    case SMB_APPLY: {
        float *states[SMB_RULE_STATES_MAX] = {NULL};
        for (int i = 0; i < SMB_RULE_STATES_MAX; i++)
            if (change->states[i])
                states[i] = (float *)(change->states[i]->data + change->offset + from);
        kernel_step(change->op, &change->factors, (float *)target,
                    (const float *)((const uint8_t *)change->source + from), states[0], states[1],
                    bytes / element);
        break;
    }
    case SMB_FILL: fill(target, bytes, element, change->argument); break;
    case SMB_FETCH_ADD: {
        change->result = bits_at(target, bytes);
        uint64_t sum = sum_of(segment->dtype, change->result, change->argument);
        kernel_put(target, (const uint8_t *)&sum, (uint32_t)bytes);
        break;
    }
    case SMB_COMPARE_SWAP:
        change->result = bits_at(target, bytes);
        if (memcmp(&change->result, &change->expected, bytes) == 0)
            kernel_put(target, (const uint8_t *)&change->argument, (uint32_t)bytes);
        break;
    }
}

/* Whether there are as many states as the rule has, each in another segment with that range in one
 * chunk. */
static bool step_fits(const struct smb_segment *segment, const struct smb_change *change)
{
    int count = smb_rule_states(change->op);
    if (segment->dtype != SMB_FLOAT32 || change->sink ||
        !smb_rule_accepts(change->op, &change->hyper))
        return false;
    for (int i = 0; i < SMB_RULE_STATES_MAX; i++) {
        const struct smb_segment *state = change->states[i];
        if ((state != NULL) != (i < count))
            return false;
        if (state &&
            (state == segment || (i > 0 && state == change->states[0]) ||
             state->dtype != SMB_FLOAT32 || !mapping_holds(state, change->offset, change->bytes)))
            return false;
    }
    return true;
}

int smb_segment_targets(struct smb_segment *segment, const struct smb_change *change,
                        struct smb_segment *targets[SMB_TARGETS_MAX])
{
    int count = 0;
    targets[count++] = segment;
    for (int i = 0; change->opcode == SMB_APPLY && i < SMB_RULE_STATES_MAX; i++)
        if (change->states[i])
            targets[count++] = change->states[i];
    return count;
}

bool smb_segment_change_fits(const struct smb_segment *segment, const struct smb_change *change)
{
    uint32_t element = smb_dtype_bytes((int)segment->dtype);
    if (!mapping_holds(segment, change->offset, change->bytes) || change->offset % element != 0 ||
        change->bytes % element != 0)
        return false;
    bool encoded = smb_wire_is_dense(change->wire) && segment->dtype == SMB_FLOAT32 &&
                   (change->opcode == SMB_WRITE || change->opcode == SMB_ACCUMULATE);
    if (change->wire == SMB_WIRE_SPARSE)
        encoded = change->opcode == SMB_ACCUMULATE && !change->sink &&
                  entries_are_sound(change, element);
    if (change->wire != SMB_WIRE_EXACT && !encoded)
        return false;
    switch (change->opcode) {
    case SMB_READ:
    case SMB_WRITE:
    case SMB_FILL: return true;
    case SMB_ACCUMULATE:
    case SMB_ACCUMULATE_FROM: return smb_op_accepts((int)segment->dtype, change->op, change->scale);
    case SMB_FETCH_ADD:
    case SMB_COMPARE_SWAP:
        return change->bytes == element && smb_dtype_is_atomic((int)segment->dtype);
    case SMB_APPLY: return step_fits(segment, change);
    default: return false;
    }
}

int smb_segment_still_there(const struct smb_segment *segment)
{
    atomic_thread_fence(memory_order_acquire);
    return mapping_check(segment);
}

int smb_segment_apply(struct smb_segment *segment, struct smb_change *change, uint64_t deadline_ns)
{
    /* Only the gate executes APPLY, because APPLY takes several locks. */
    if (change->opcode == SMB_APPLY || !smb_segment_change_fits(segment, change))
        return SMB_INVALID;
    struct chunk_state *chunk = chunk_at(segment, change->offset);
    int status = mapping_check(segment);
    if (status != SMB_OK)
        return status;
    if (!mapping_is_shared(segment))
        return SMB_NAMESPACE;
    if (change->opcode == SMB_READ &&
        read_unlocked(segment, chunk, change, deadline_ns == SMB_TRY_ONCE ? 2 : READ_ATTEMPTS))
        return smb_segment_still_there(segment);
    status = chunk_lock(segment, chunk, deadline_ns);
    if (status != SMB_OK)
        return status;
    /* After the daemon has gated the segment, it takes this lock before it copies the chunk to
     * another server. So a change is either in that copy or refused here. */
    status = mapping_check(segment);
    if (status != SMB_OK) {
        pthread_mutex_unlock(&chunk->lock);
        return status;
    }
    if (change->opcode == SMB_READ) {
        kernel_copy(change->sink, segment->data + change->offset, change->bytes, change->streaming);
    } else {
        chunk_change_begin(chunk);
        smb_segment_change_range(segment, change, 0, change->bytes);
        if (change->sink)
            memcpy(change->sink, segment->data + change->offset, change->bytes);
        chunk_change_end(chunk);
    }
    /* Checked under the lock: once the lock is released the segment may move, with this change, and
     * be deleted here. */
    status = mapping_is_deleted(segment) ? SMB_NOT_FOUND : SMB_OK;
    pthread_mutex_unlock(&chunk->lock);
    return status;
}
