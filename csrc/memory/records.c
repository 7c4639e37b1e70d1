#include "memory/records.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "smb/types.h"

enum { NONE = UINT32_MAX };

/* This process's index entry of one record. The index saves searches in shared memory. */
struct indexed_record {
    uint32_t next; /* in its bucket, or in the list of empty entries */
    /* NONE: empty. Kept here because local clients can write to the record itself */
    uint32_t bucket;
    /* neighbours in the list of entries that are not empty, by last use; those of ended sessions
     * are oldest */
    uint32_t older, newer;
    uint16_t in_use; /* number of requests that hold it */
};

struct records {
    pthread_mutex_t mutex;
    struct record_table table;
    const _Atomic bool *ended_are_known;
    uint32_t empty, oldest, newest;
    uint32_t *buckets; /* the first entry of each bucket; as many buckets as records */
    struct indexed_record entries[];
};

static uint32_t count_of_at_least(uint64_t data_bytes, uint32_t least)
{
    uint64_t count = data_bytes / ((uint64_t)RECORD_BYTES * 64);
    return (uint32_t)(count < least ? least : count > RECORDS_MAX ? RECORDS_MAX : count);
}

uint32_t records_count_for(uint64_t data_bytes)
{
    return count_of_at_least(data_bytes, RECORDS_MIN);
}

uint32_t records_count_before(uint64_t data_bytes)
{
    return count_of_at_least(data_bytes, RECORDS_MIN_BEFORE);
}

static uint64_t read_word(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void write_word(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static struct record *record_at(const struct records *records, uint32_t index)
{
    SMB_ASSERT(index < records->table.count);
    return &records->table.records[index];
}

static bool is_of(const struct record *record, uint64_t session, uint16_t lane)
{
    return read_word(&record->session) == session && read_word(&record->lane) == lane;
}

/* ---- which record is whose ------------------------------------------------------------------- */

static uint32_t bucket_of(const struct records *records, uint64_t session, uint64_t lane)
{
    return (uint32_t)(((session ^ lane) * 0x9E3779B97F4A7C15U) >> 32) % records->table.count;
}

static void put_in_bucket(struct records *records, uint32_t index)
{
    const struct record *record = record_at(records, index);
    struct indexed_record *entry = &records->entries[index];
    entry->bucket = bucket_of(records, read_word(&record->session), read_word(&record->lane));
    entry->next = records->buckets[entry->bucket];
    records->buckets[entry->bucket] = index;
}

static void take_out_of_bucket(struct records *records, uint32_t index)
{
    uint32_t *at = &records->buckets[records->entries[index].bucket];
    while (*at != index)
        at = &records->entries[*at].next;
    *at = records->entries[index].next;
    records->entries[index].bucket = NONE;
}

static uint32_t search(const struct records *records, uint64_t session, uint16_t lane)
{
    uint32_t at = records->buckets[bucket_of(records, session, lane)];
    while (at != NONE && !is_of(record_at(records, at), session, lane))
        at = records->entries[at].next;
    return at;
}

/* ---- refusals -------------------------------------------------------------------------------- */

/* Flag bits of the words of refusals. REFUSED_NONE is the highest bit of each. REFUSED_FELL, in the
 * floor's word, says that refusals above the watermark were forgotten. They matter only once the
 * watermark has passed them: until the next change no change between the two was made, so the
 * outcome of changes that were made stays known. */
static const uint64_t REFUSED_NONE = (uint64_t)1 << 63, REFUSED_FELL = (uint64_t)1 << 62;

static uint64_t floor_of(const struct record *record)
{
    return record->refused_floor & ~(REFUSED_NONE | REFUSED_FELL);
}

static uint64_t top_of(const struct record *record)
{
    return record->refused_top & ~REFUSED_NONE;
}

static bool is_refused(const struct record *record, uint64_t sequence)
{
    uint64_t top = top_of(record), bit_index = sequence % RECORD_REFUSALS;
    return sequence <= top && top - sequence < RECORD_REFUSALS &&
           (record->refused[bit_index / 63] >> bit_index % 63 & 1) != 0;
}

static void set_refused(struct record *record, uint64_t sequence, bool refused)
{
    uint64_t bit_index = sequence % RECORD_REFUSALS, bit = (uint64_t)1 << bit_index % 63;
    if (top_of(record) - sequence >= RECORD_REFUSALS)
        return;
    atomic_signal_fence(memory_order_seq_cst);
    record->refused[bit_index / 63] = refused ? record->refused[bit_index / 63] | bit
                                              : record->refused[bit_index / 63] & ~bit;
    atomic_signal_fence(memory_order_seq_cst);
}

/* Also clears REFUSED_FELL. */
static void raise_floor(struct record *record, uint64_t sequence)
{
    uint64_t floor = floor_of(record);
    record->refused_floor = REFUSED_NONE | (sequence > floor ? sequence : floor);
    atomic_signal_fence(memory_order_seq_cst);
}

static void forget_refusal(struct record *record, uint64_t sequence)
{
    if (sequence > read_word(&record->watermark))
        record->refused_floor |= REFUSED_FELL;
    else
        record->refused_floor = (record->refused_floor & REFUSED_FELL) | REFUSED_NONE |
                                (sequence > floor_of(record) ? sequence : floor_of(record));
    /* a kill in between leaves one refusal known twice; in the other order it would be forgotten */
    atomic_signal_fence(memory_order_seq_cst);
}

/* Makes room for the sequence numbers up to `sequence` by forgetting the oldest. */
static void advance(struct record *record, uint64_t sequence)
{
    uint64_t top = top_of(record);
    if (sequence <= top)
        return;
    bool any = record->refused[0] != REFUSED_NONE || record->refused[1] != REFUSED_NONE;
    uint64_t steps = sequence - top < RECORD_REFUSALS ? sequence - top : RECORD_REFUSALS;
    for (uint64_t i = 1; any && i <= steps; i++) {
        uint64_t bit_index = (top + i) % RECORD_REFUSALS, bit = (uint64_t)1 << bit_index % 63;
        if ((record->refused[bit_index / 63] & bit) == 0)
            continue;
        forget_refusal(record, top + i - RECORD_REFUSALS);
        record->refused[bit_index / 63] &= ~bit;
        atomic_signal_fence(memory_order_seq_cst);
    }
    record->refused_top = REFUSED_NONE | sequence;
    atomic_signal_fence(memory_order_seq_cst);
}
_Static_assert((int)RECORD_REFUSAL_WORDS == 2, "advance looks at both");

/* The highest sequence number that was refused, or may have been. */
static uint64_t refused_last(const struct record *record)
{
    uint64_t top = top_of(record);
    for (uint64_t i = 0; i < RECORD_REFUSALS && i < top; i++)
        if (is_refused(record, top - i))
            return top - i;
    return record->refused_floor & REFUSED_FELL ? top - RECORD_REFUSALS : floor_of(record);
}

/* Converts a record of an earlier release, which has three sequence numbers and a floor. A kill in
 * between makes a refusal forgotten, never applied. */
static void convert(struct record *record)
{
    uint64_t *words[] = {&record->refused[0], &record->refused[1], &record->refused_top};
    uint64_t refused[3], floor = floor_of(record), last = floor;
    bool whole = record->refused_floor & REFUSED_NONE;
    for (int i = 0; i < 3; i++) {
        refused[i] = *words[i] & REFUSED_NONE ? 0 : *words[i];
        whole = whole && *words[i] & REFUSED_NONE;
        last = refused[i] > last ? refused[i] : last;
    }
    if (whole)
        return;
    raise_floor(record, last);
    for (int i = 0; i < 3; i++)
        *words[i] = REFUSED_NONE;
    advance(record, last);
    for (int i = 0; i < 3; i++)
        if (refused[i] > 0 && last - refused[i] < RECORD_REFUSALS)
            set_refused(record, refused[i], true);
        else if (refused[i] > floor)
            floor = refused[i];
    atomic_signal_fence(memory_order_seq_cst);
    record->refused_floor = REFUSED_NONE | floor;
}

/* ---- taking one ------------------------------------------------------------------------------ */

/* ---- which was used last --------------------------------------------------------------------- */

static void unlink_entry(struct records *records, uint32_t index)
{
    struct indexed_record *entry = &records->entries[index];
    *(entry->older == NONE ? &records->oldest
                           : &records->entries[entry->older].newer) = entry->newer;
    *(entry->newer == NONE ? &records->newest
                           : &records->entries[entry->newer].older) = entry->older;
}

static void link_newest(struct records *records, uint32_t index)
{
    records->entries[index].older = records->newest;
    records->entries[index].newer = NONE;
    *(records->newest == NONE ? &records->oldest
                              : &records->entries[records->newest].newer) = index;
    records->newest = index;
}

static void link_oldest(struct records *records, uint32_t index)
{
    records->entries[index].newer = records->oldest;
    records->entries[index].older = NONE;
    *(records->oldest == NONE ? &records->newest
                              : &records->entries[records->oldest].older) = index;
    records->oldest = index;
}

static uint32_t longest_unused(const struct records *records)
{
    uint32_t at = records->oldest;
    while (at != NONE && records->entries[at].in_use > 0)
        at = records->entries[at].newer;
    return at;
}

struct last_use {
    uint64_t used_ns;
    uint32_t index;
};

static int earlier(const void *a, const void *b)
{
    const struct last_use *left = a, *right = b;
    return left->used_ns < right->used_ns ? -1 : left->used_ns > right->used_ns;
}

/* Reads the table, which may contain anything. */
static void read_table(struct records *records, struct last_use *uses)
{
    uint32_t used = 0;
    for (uint32_t i = records->table.count; i-- > 0;) {
        struct record *record = record_at(records, i);
        if (read_word(&record->session) == 0) {
            records->entries[i].next = records->empty;
            records->entries[i].bucket = NONE;
            records->empty = i;
        } else {
            convert(record);
            put_in_bucket(records, i);
            uses[used++] = (struct last_use){read_word(&record->used_ns), i};
        }
    }
    qsort(uses, used, sizeof *uses, earlier);
    for (uint32_t i = 0; i < used; i++)
        link_newest(records, uses[i].index);
}

int records_create(struct record_table table, const _Atomic bool *ended_are_known,
                   struct records **records)
{
    struct records *made = calloc(1, sizeof *made + table.count * sizeof made->entries[0]);
    uint32_t *buckets = malloc(table.count * sizeof *buckets);
    struct last_use *uses = malloc(table.count * sizeof *uses);
    if (made && buckets && uses) {
        pthread_mutex_init(&made->mutex, NULL);
        made->table = table;
        made->ended_are_known = ended_are_known;
        made->empty = made->oldest = made->newest = NONE;
        made->buckets = buckets;
        for (uint32_t i = 0; i < table.count; i++)
            buckets[i] = NONE;
        read_table(made, uses);
        free(uses);
        *records = made;
        return SMB_OK;
    }
    free(made);
    free(buckets);
    free(uses);
    return SMB_OUT_OF_MEMORY;
}

void records_destroy(struct records *records)
{
    pthread_mutex_destroy(&records->mutex);
    free(records->buckets);
    free(records);
}

/* ---- taking one ------------------------------------------------------------------------------ */

/* Whether this segment may have lost the record of a session that may still send. A session that
 * has ended sends nothing more, as long as the ended sessions are known. They are not known between
 * the daemon's start and the coordinator's first answer, nor once some of them are forgotten. */
static bool may_have_lost_one(const struct records *records)
{
    return read_word(records->table.evictions) > 0 ||
           (read_word(records->table.ended_evictions) > 0 &&
            /* pairs with the release stores in smb_server_know_ended and smb_server_end_session */
            !atomic_load_explicit(records->ended_are_known, memory_order_acquire));
}

/* A daemon killed between these stores leaves an empty record, or one of the lane without a
 * watermark. Both are true. */
static void begin_record(struct record *record, uint64_t session, uint16_t lane, uint64_t forgotten)
{
    write_word(&record->session, 0);
    /* a kill may come in between: first clear the session, then the words that name the old lane */
    atomic_signal_fence(memory_order_seq_cst);
    FAILPOINT("records.emptied");
    write_word(&record->watermark, 0);
    for (int i = 0; i < RECORD_RESULTS; i++)
        record->results[i].sequence = record->results[i].result = 0;
    for (int i = 0; i < RECORD_REFUSAL_WORDS; i++)
        record->refused[i] = REFUSED_NONE;
    record->refused_top = REFUSED_NONE;
    record->refused_floor = REFUSED_NONE | forgotten;
    write_word(&record->lane, lane);
    write_word(&record->session, session);
    FAILPOINT("records.begun");
}

/* Finds an empty entry, or the one unused for longest, and takes it out of its list; NONE if all
 * are in use. */
static uint32_t make_room(struct records *records)
{
    uint32_t index = records->empty;
    if (index != NONE) {
        records->empty = records->entries[index].next;
        return index;
    }
    index = longest_unused(records);
    if (index == NONE)
        return NONE;
    bool ended = read_word(&record_at(records, index)->used_ns) == 0;
    /* Counts the eviction before it happens: an eviction that was not counted could make an old
     * change look like a new one. */
    atomic_fetch_add_explicit(ended ? records->table.ended_evictions : records->table.evictions, 1,
                              memory_order_release);
    FAILPOINT("records.counted");
    take_out_of_bucket(records, index);
    unlink_entry(records, index);
    return index;
}

static int take_locked(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence,
                       bool retry, uint32_t *index)
{
    *index = search(records, session, lane);
    if (*index != NONE)
        return SMB_OK;
    if (retry && may_have_lost_one(records))
        return SMB_EVICTED;
    *index = make_room(records);
    if (*index == NONE)
        return SMB_BUSY;
    /* An earlier record of this lane may have been evicted. */
    begin_record(record_at(records, *index), session, lane,
                 may_have_lost_one(records) ? sequence - 1 : 0);
    put_in_bucket(records, *index);
    link_newest(records, *index);
    return SMB_OK;
}

int records_take(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence,
                 bool retry, uint32_t *hint, struct record **record)
{
    uint64_t now_ns = smb_boot_ns();
    pthread_mutex_lock(&records->mutex);
    uint32_t index = *hint;
    int status = SMB_OK;
    if (index >= records->table.count || records->entries[index].bucket == NONE ||
        !is_of(record_at(records, index), session, lane))
        status = take_locked(records, session, lane, sequence, retry, &index);
    if (status == SMB_OK) {
        records->entries[index].in_use++;
        if (records->newest != index) {
            unlink_entry(records, index);
            link_newest(records, index);
        }
        *hint = index;
        *record = record_at(records, index);
        write_word(&(*record)->used_ns, now_ns);
    }
    pthread_mutex_unlock(&records->mutex);
    return status;
}

void records_release(struct records *records, struct record *record)
{
    SMB_ASSERT(record >= records->table.records &&
               record < records->table.records + records->table.count);
    pthread_mutex_lock(&records->mutex);
    records->entries[record - records->table.records].in_use--;
    pthread_mutex_unlock(&records->mutex);
}

int records_watermark(struct records *records, uint64_t session, uint16_t lane, uint64_t *watermark,
                      uint64_t *refused)
{
    pthread_mutex_lock(&records->mutex);
    uint32_t index = search(records, session, lane);
    *watermark = *refused = 0;
    if (index != NONE) {
        const struct record *record = record_at(records, index);
        *watermark = read_word(&record->watermark);
        *refused = refused_last(record);
    }
    bool unknown = index == NONE && may_have_lost_one(records);
    pthread_mutex_unlock(&records->mutex);
    return unknown ? SMB_EVICTED : SMB_OK;
}

void records_end_session(struct records *records, uint64_t session)
{
    pthread_mutex_lock(&records->mutex);
    for (uint32_t i = 0; i < records->table.count; i++) {
        if (records->entries[i].bucket == NONE ||
            read_word(&record_at(records, i)->session) != session)
            continue;
        write_word(&record_at(records, i)->used_ns, 0);
        unlink_entry(records, i);
        link_oldest(records, i);
    }
    pthread_mutex_unlock(&records->mutex);
}

/* ---- copies elsewhere ------------------------------------------------------------------------ */

enum {
    IMAGE_RESULTS_AT = 32,
    IMAGE_REFUSED_AT = IMAGE_RESULTS_AT + 16 * RECORD_RESULTS,
    IMAGE_TOP_AT = IMAGE_REFUSED_AT + 8 * RECORD_REFUSAL_WORDS,
    IMAGE_FLOOR_AT = IMAGE_TOP_AT + 8
};
_Static_assert((int)IMAGE_FLOOR_AT + 8 == (int)RECORD_BYTES, "an image is as large as a record");

static void put_word(uint8_t *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t word_at(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

uint32_t records_indices(struct records *records, uint32_t *indices)
{
    uint32_t count = 0;
    pthread_mutex_lock(&records->mutex);
    for (uint32_t at = records->oldest; at != NONE; at = records->entries[at].newer)
        indices[count++] = at;
    pthread_mutex_unlock(&records->mutex);
    return count;
}

int records_image(struct records *records, uint32_t index, records_see see, void *argument)
{
    int status = SMB_OK;
    pthread_mutex_lock(&records->mutex);
    if (records->entries[index].bucket == NONE) {
        status = SMB_NOT_FOUND;
    } else if (records->entries[index].in_use > 0) {
        status = SMB_BUSY;
    } else {
        const struct record *record = record_at(records, index);
        uint8_t bytes[RECORD_BYTES];
        put_word(bytes, read_word(&record->session));
        put_word(bytes + 8, read_word(&record->lane));
        put_word(bytes + 16, read_word(&record->watermark));
        /* 0 or 1, because the servers' clocks differ */
        put_word(bytes + 24, read_word(&record->used_ns) != 0);
        for (int i = 0; i < RECORD_RESULTS; i++) {
            put_word(bytes + IMAGE_RESULTS_AT + 16 * i, record->results[i].sequence);
            put_word(bytes + IMAGE_RESULTS_AT + 16 * i + 8, record->results[i].result);
        }
        for (int i = 0; i < RECORD_REFUSAL_WORDS; i++)
            put_word(bytes + IMAGE_REFUSED_AT + 8 * i, record->refused[i]);
        put_word(bytes + IMAGE_TOP_AT, record->refused_top);
        put_word(bytes + IMAGE_FLOOR_AT, record->refused_floor);
        see(argument, bytes);
    }
    pthread_mutex_unlock(&records->mutex);
    return status;
}

int records_install(struct records *records, const uint8_t bytes[RECORD_BYTES])
{
    uint64_t session = word_at(bytes), lane = word_at(bytes + 8), watermark = word_at(bytes + 16);
    uint32_t hint = NONE;
    struct record *record;
    if (session == 0 || lane > UINT16_MAX)
        return SMB_INVALID;
    int status = records_take(records, session, (uint16_t)lane, 1, false, &hint, &record);
    if (status != SMB_OK)
        return status;
    for (int i = 0; i < RECORD_RESULTS; i++) {
        record->results[i].sequence = word_at(bytes + IMAGE_RESULTS_AT + 16 * i);
        record->results[i].result = word_at(bytes + IMAGE_RESULTS_AT + 16 * i + 8);
    }
    for (int i = 0; i < RECORD_REFUSAL_WORDS; i++)
        record->refused[i] = word_at(bytes + IMAGE_REFUSED_AT + 8 * i);
    record->refused_top = word_at(bytes + IMAGE_TOP_AT);
    record->refused_floor = word_at(bytes + IMAGE_FLOOR_AT);
    convert(record);
    write_word(&record->watermark, watermark);
    records_release(records, record);
    if (word_at(bytes + 24) == 0)
        records_end_session(records, session);
    return SMB_OK;
}

void records_evicted(const struct records *records, uint64_t *evictions, uint64_t *ended)
{
    *evictions = read_word(records->table.evictions);
    *ended = read_word(records->table.ended_evictions);
}

void records_have_evicted(struct records *records, uint64_t evictions, uint64_t ended)
{
    pthread_mutex_lock(&records->mutex);
    if (read_word(records->table.evictions) < evictions)
        write_word(records->table.evictions, evictions);
    if (read_word(records->table.ended_evictions) < ended)
        write_word(records->table.ended_evictions, ended);
    pthread_mutex_unlock(&records->mutex);
}

/* ---- one record ------------------------------------------------------------------------------ */

void record_note(struct record *record, uint64_t sequence, bool with_result, uint64_t result)
{
    SMB_ASSERT(sequence > 0);
    if (with_result) {
        int oldest = 0;
        for (int i = 0; i < RECORD_RESULTS; i++) {
            if (record->results[i].sequence == sequence) {
                oldest = i;
                break;
            }
            if (record->results[i].sequence < record->results[oldest].sequence)
                oldest = i;
        }
        record->results[oldest].result = result;
        record->results[oldest].sequence = sequence;
    }
    /* the change and its result are stored before the record says so, here and below */
    atomic_signal_fence(memory_order_seq_cst);
    convert(record);
    advance(record, sequence);
    if (record->refused_floor & REFUSED_FELL && sequence > read_word(&record->watermark))
        /* the top is about to pass these sequence numbers */
        raise_floor(record, top_of(record) - RECORD_REFUSALS);
    /* the change may have been refused at first, and is made now */
    set_refused(record, sequence, false);
    if (sequence > read_word(&record->watermark))
        write_word(&record->watermark, sequence);
}

int record_judge(const struct record *record, uint64_t sequence)
{
    if (sequence > read_word(&record->watermark))
        return SMB_OK;
    if (is_refused(record, sequence))
        return SMB_OK;
    return sequence <= floor_of(record) ? SMB_EVICTED : SMB_EXISTS;
}

void record_refuse(struct record *record, uint64_t sequence)
{
    convert(record);
    advance(record, sequence);
    if (top_of(record) - sequence < RECORD_REFUSALS)
        set_refused(record, sequence, true);
    else
        forget_refusal(record, sequence);
}

bool record_result(const struct record *record, uint64_t sequence, uint64_t *result)
{
    for (int i = 0; i < RECORD_RESULTS; i++) {
        if (record->results[i].sequence == sequence) {
            *result = record->results[i].result;
            return true;
        }
    }
    return false;
}
