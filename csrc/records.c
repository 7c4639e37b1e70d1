#include "records.h"

#include <stdlib.h>

#include "clock.h"
#include "failpoint.h"

struct records {
    pthread_mutex_t mutex;
    struct record *table;
    uint32_t count;
    _Atomic uint64_t *evictions;
    uint16_t in_use[]; /* by index: requests that hold it */
};

uint32_t records_count_for(uint64_t data_bytes)
{
    uint64_t count = data_bytes / ((uint64_t)RECORD_BYTES * 64);
    return (uint32_t)(count < RECORDS_MIN ? RECORDS_MIN : count > RECORDS_MAX ? RECORDS_MAX : count);
}

int records_create(struct record *table, uint32_t count, _Atomic uint64_t *evictions, struct records **records)
{
    struct records *made = calloc(1, sizeof *made + count * sizeof made->in_use[0]);
    if (!made)
        return SMB_OUT_OF_MEMORY;
    pthread_mutex_init(&made->mutex, NULL);
    made->table = table;
    made->count = count;
    made->evictions = evictions;
    *records = made;
    return SMB_OK;
}

void records_destroy(struct records *records)
{
    pthread_mutex_destroy(&records->mutex);
    free(records);
}

static uint64_t read_word(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void write_word(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static bool is_of(const struct record *record, uint64_t session, uint16_t lane)
{
    return read_word(&record->session) == session && read_word(&record->lane) == lane;
}

/* The lane's index, or that of the first empty record, or count. Records are emptied only for a moment, when one makes room
 * for another; a kill in that moment leaves a hole, so that after the first eviction a search does not end at one. */
static uint32_t search(const struct records *records, uint64_t session, uint16_t lane)
{
    uint32_t at = (uint32_t)(((session ^ lane) * 0x9E3779B97F4A7C15U) >> 32) % records->count;
    uint32_t empty = records->count;
    bool evicted = read_word(records->evictions) > 0;
    for (uint32_t i = 0; i < records->count; i++) {
        const struct record *record = &records->table[at];
        if (is_of(record, session, lane))
            return at;
        if (read_word(&record->session) == 0 && empty == records->count)
            empty = at;
        if (empty < records->count && !evicted)
            break;
        at = at + 1 == records->count ? 0 : at + 1;
    }
    return empty;
}

static uint32_t longest_unused(const struct records *records)
{
    uint32_t best = records->count;
    for (uint32_t i = 0; i < records->count; i++)
        if (records->in_use[i] == 0 &&
            (best == records->count || read_word(&records->table[i].used_ns) < read_word(&records->table[best].used_ns)))
            best = i;
    return best;
}

/* A daemon killed between these stores leaves an empty record, or one of the lane with no watermark: both are true. */
static void begin_record(struct record *record, uint64_t session, uint16_t lane, uint64_t forgotten)
{
    write_word(&record->session, 0);
    atomic_signal_fence(memory_order_seq_cst); /* before anything that the old lane is told from is gone: a kill may come in between */
    FAILPOINT("records.emptied");
    write_word(&record->watermark, 0);
    for (int i = 0; i < RECORD_RESULTS; i++)
        record->results[i].sequence = record->results[i].result = 0;
    for (int i = 0; i < RECORD_REFUSALS; i++)
        record->refused[i] = 0;
    record->refused_floor = forgotten;
    write_word(&record->lane, lane);
    write_word(&record->session, session);
    FAILPOINT("records.begun");
}

static int take_locked(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence, bool retry,
                       uint32_t *index)
{
    *index = search(records, session, lane);
    if (*index < records->count && is_of(&records->table[*index], session, lane))
        return SMB_OK;
    if (retry && read_word(records->evictions) > 0)
        return SMB_EVICTED;
    if (*index == records->count) {
        *index = longest_unused(records);
        if (*index == records->count)
            return SMB_BUSY;
        /* Counted before it is done: to have evicted, and not to know it, would be taking an old change for a new one. */
        atomic_fetch_add_explicit(records->evictions, 1, memory_order_release);
        FAILPOINT("records.counted");
    }
    /* What came before may have had a record that was evicted. */
    begin_record(&records->table[*index], session, lane, read_word(records->evictions) > 0 ? sequence - 1 : 0);
    return SMB_OK;
}

int records_take(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence, bool retry, uint32_t *hint,
                 struct record **record)
{
    pthread_mutex_lock(&records->mutex);
    uint32_t index = *hint;
    int status = SMB_OK;
    if (index >= records->count || !is_of(&records->table[index], session, lane))
        status = take_locked(records, session, lane, sequence, retry, &index);
    if (status == SMB_OK)
        records->in_use[index]++;
    pthread_mutex_unlock(&records->mutex);
    if (status == SMB_OK) {
        *hint = index;
        *record = &records->table[index];
        write_word(&(*record)->used_ns, smb_boot_ns());
    }
    return status;
}

void records_release(struct records *records, struct record *record)
{
    pthread_mutex_lock(&records->mutex);
    records->in_use[record - records->table]--;
    pthread_mutex_unlock(&records->mutex);
}

int records_watermark(struct records *records, uint64_t session, uint16_t lane, uint64_t *watermark, uint64_t *refused)
{
    pthread_mutex_lock(&records->mutex);
    uint32_t index = search(records, session, lane);
    bool found = index < records->count && is_of(&records->table[index], session, lane);
    *watermark = found ? read_word(&records->table[index].watermark) : 0;
    *refused = 0;
    if (found) {
        const struct record *record = &records->table[index];
        *refused = record->refused_floor;
        for (int i = 0; i < RECORD_REFUSALS; i++)
            if (record->refused[i] > *refused)
                *refused = record->refused[i];
    }
    bool unknown = !found && read_word(records->evictions) > 0;
    pthread_mutex_unlock(&records->mutex);
    return unknown ? SMB_EVICTED : SMB_OK;
}

void records_end_session(struct records *records, uint64_t session)
{
    pthread_mutex_lock(&records->mutex);
    for (uint32_t i = 0; i < records->count; i++)
        if (read_word(&records->table[i].session) == session)
            write_word(&records->table[i].used_ns, 0);
    pthread_mutex_unlock(&records->mutex);
}

void record_note(struct record *record, uint64_t sequence, bool with_result, uint64_t result)
{
    if (with_result) {
        int place = 0;
        for (int i = 0; i < RECORD_RESULTS; i++) {
            if (record->results[i].sequence == sequence) {
                place = i;
                break;
            }
            if (record->results[i].sequence < record->results[place].sequence)
                place = i;
        }
        record->results[place].result = result;
        record->results[place].sequence = sequence;
    }
    atomic_signal_fence(memory_order_seq_cst); /* the change and its result are made before the record says so, here or below */
    for (int i = 0; i < RECORD_REFUSALS; i++)
        if (record->refused[i] == sequence)
            record->refused[i] = 0; /* refused at first, and made now */
    if (sequence > read_word(&record->watermark))
        write_word(&record->watermark, sequence);
}

int record_judge(const struct record *record, uint64_t sequence)
{
    if (sequence > read_word(&record->watermark))
        return SMB_OK;
    for (int i = 0; i < RECORD_REFUSALS; i++)
        if (record->refused[i] == sequence)
            return SMB_OK;
    return sequence <= record->refused_floor ? SMB_EVICTED : SMB_EXISTS;
}

void record_refuse(struct record *record, uint64_t sequence)
{
    int oldest = 0;
    for (int i = 0; i < RECORD_REFUSALS; i++) {
        if (record->refused[i] == sequence)
            return;
        if (record->refused[i] < record->refused[oldest])
            oldest = i;
    }
    if (record->refused[oldest] > record->refused_floor)
        record->refused_floor = record->refused[oldest];
    atomic_signal_fence(memory_order_seq_cst); /* killed in between, the oldest is known twice; the other way round, not at all */
    record->refused[oldest] = sequence;
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
