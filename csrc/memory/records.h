/* records.h: completion records: how far each lane of each session has come on a segment.
 * docs/decisions/0008-exactly-once.md.
 *
 * The table lies in the segment's file and survives the daemon. Only the daemon writes it. One
 * thread at a time writes a record's watermark, because a lane has one connection and its changes
 * are in order. Under the mutex, a record that no request uses may be given to another lane.
 *
 * The daemon may be killed between any two stores, and the next daemon reads the table. As with the
 * journal (journal.h), only the program's order matters. Release stores and compiler fences keep
 * it. */
#ifndef SMB_RECORDS_H
#define SMB_RECORDS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The most fetch_add and compare_swap operations of a lane that may be unanswered at any time. */
enum {
    RECORD_RESULTS = 4,
    RECORD_REFUSAL_WORDS = 2,
    /* sequence numbers; a client has at most 64 unanswered */
    RECORD_REFUSALS = 63 * RECORD_REFUSAL_WORDS,
    RECORD_BYTES = 128,
    RECORDS_MIN = 128,
    RECORDS_MIN_BEFORE = 32,
    RECORDS_MAX = 1024
};

struct record {
    _Atomic uint64_t session; /* 0: an empty record */
    _Atomic uint64_t lane;
    /* all changes up to this sequence number were applied; written last */
    _Atomic uint64_t watermark;
    _Atomic uint64_t used_ns; /* CLOCK_BOOTTIME; 0: the session has ended */
    struct {
        uint64_t sequence, result;
    } results[RECORD_RESULTS]; /* results of fetch_add and compare_swap */
    /* Changes that were refused although later ones were applied, so that the watermark is not true
     * for them. One bit for each of the last RECORD_REFUSALS sequence numbers up to `refused_top`,
     * at the number's remainder. The highest bit of each of these words is set. In records of
     * earlier releases it is clear: they have three sequence numbers there. Those releases read a
     * word with that bit as a sequence number that never comes, and treat every refusal as
     * forgotten: unknown, not made twice. */
    uint64_t refused[RECORD_REFUSAL_WORDS];
    uint64_t refused_top;
    /* up to this number there may be refusals that are forgotten, so outcomes are unknown;
     * REFUSED_FELL */
    uint64_t refused_floor;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "two cache lines");

/* Where the records and counters lie in a mapped segment. */
struct record_table {
    struct record *records;
    uint32_t count;
    /* evictions of sessions that may come back: whether a repeated change is new is then unknown */
    _Atomic uint64_t *evictions;
    _Atomic uint64_t *ended_evictions; /* evictions of sessions that had ended */
};

struct records;

/* The number of records in a segment of data_bytes: about 1.6 % of its size. */
uint32_t records_count_for(uint64_t data_bytes);
/* The number of records in a segment of format 2. */
uint32_t records_count_before(uint64_t data_bytes);
/* Creates the index. `ended_are_known` must live as long: it is set while this server knows every
 * session that has ended, and refuses them. While it is not set, evictions of ended sessions count
 * as all others do. */
int records_create(struct record_table table, const _Atomic bool *ended_are_known,
                   struct records **records);
void records_destroy(struct records *records);

/* Takes the record of a lane, creating it if needed; it is not evicted until released. With `retry`
 * (the frame was sent before) a missing record is SMB_EVICTED if the table ever evicted a record of
 * a session that may come back. *hint: the record's index, kept by the caller for the next time. */
int records_take(struct records *records, uint64_t session, uint16_t lane, uint64_t sequence,
                 bool retry, uint32_t *hint, struct record **record);
void records_release(struct records *records, struct record *record);
/* Reads a lane's watermark without creating a record: SMB_OK and the watermark, 0 if there is no
 * record and never was; SMB_EVICTED if there may have been one. */
int records_watermark(struct records *records, uint64_t session, uint16_t lane, uint64_t *watermark,
                      uint64_t *refused);
/* Notes that the session sends nothing more: its records are the first to be evicted. */
void records_end_session(struct records *records, uint64_t session);

/* For copying the segment to another server: the indices of all records, those unused for longest
 * first; returns how many. `indices` has room for the whole table. */
uint32_t records_indices(struct records *records, uint32_t *indices);
/* Called with a record's image. */
typedef void (*records_see)(void *argument, const uint8_t bytes[RECORD_BYTES]);
/* Calls `see` under the mutex with the record at that index, as bytes, while nobody changes it.
 * SMB_BUSY: a request holds the record. SMB_NOT_FOUND: the record is empty. */
int records_image(struct records *records, uint32_t index, records_see see, void *argument);
/* At the other copy: stores a lane's record from its image. SMB_INVALID: the bytes are not such an
 * image. */
int records_install(struct records *records, const uint8_t bytes[RECORD_BYTES]);
/* How many records were evicted; at the other copy, a lower bound. */
void records_evicted(const struct records *records, uint64_t *evictions, uint64_t *ended);
void records_have_evicted(struct records *records, uint64_t evictions, uint64_t ended);

/* Whether a change was made. SMB_OK: it was not. SMB_EXISTS: it was. SMB_EVICTED: that is
 * forgotten. */
int record_judge(const struct record *record, uint64_t sequence);
/* Notes that the change was refused. */
void record_refuse(struct record *record, uint64_t sequence);
/* Notes that the change was made. `with_result`: a repetition must get the same result. */
void record_note(struct record *record, uint64_t sequence, bool with_result, uint64_t result);
bool record_result(const struct record *record, uint64_t sequence, uint64_t *result);

#endif
