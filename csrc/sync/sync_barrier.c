#include "sync/sync_barrier.h"

#include <stdlib.h>

#include "base/failpoint.h"
#include "sync/sync_queue.h"

enum { ROUND_SHIFT = 24, ARRIVED_MASK = (1 << ROUND_SHIFT) - 1, ROUNDS_KEPT = 62 };

static uint64_t round_of(const struct sync *sync)
{
    return word_get(&sync->words->round) >> ROUND_SHIFT;
}

uint64_t barrier_arrived(const struct sync *sync)
{
    uint64_t arrived = word_get(&sync->words->round) & ARRIVED_MASK,
             parties = word_get(&sync->words->parties);
    return parties <= sync->capacity && arrived < parties ? arrived : 0;
}

static uint64_t (*seats_of(const struct sync *sync, uint64_t round))[2]
{
    return sync->seats + round % 2 * sync->capacity;
}

struct party *barrier_party(const struct sync *sync, uint64_t session)
{
    return TREE_OWNER(tree_find(&sync->parties, session, 0), struct party, by_session);
}

/* Since when the party that left first has been away; UINT64_MAX: no party is away. */
static uint64_t first_absent_ns(const struct sync *sync)
{
    const struct party *party = TREE_OWNER(tree_first(&sync->absences), struct party, by_absence);
    return party ? party->absent_ns : UINT64_MAX;
}

static uint64_t absence_end_ns(const struct sync *sync)
{
    uint64_t since_ns = first_absent_ns(sync);
    return since_ns == UINT64_MAX ? UINT64_MAX : clock_later(since_ns, SYNC_ABSENCE_MS);
}

void barrier_judge_presence(struct sync *sync, struct party *party, uint64_t now_ns,
                            struct news *news)
{
    bool was_absent = party->absent_ns != UINT64_MAX, is_absent = party->waiting < party->seats;
    if (was_absent && !is_absent) {
        tree_take(&sync->absences, &party->by_absence);
        party->absent_ns = UINT64_MAX;
    } else if (!was_absent && is_absent) {
        party->absent_ns = now_ns;
        tree_add(&sync->absences, &party->by_absence, now_ns, 0, &sync->weights);
    }
    news_due(news, absence_end_ns(sync));
}

static bool seat_party(struct sync *sync, uint64_t session, uint64_t now_ns, struct news *news)
{
    struct party *party = barrier_party(sync, session);
    if (!party) {
        party = calloc(1, sizeof *party);
        if (!party)
            return false;
        party->session = session;
        party->absent_ns = UINT64_MAX;
        tree_add(&sync->parties, &party->by_session, session, 0, &sync->weights);
    }
    party->seats++;
    barrier_judge_presence(sync, party, now_ns, news);
    return true;
}

void barrier_clear(struct sync *sync)
{
    for (struct tree_node *node = tree_first(&sync->parties); node;
         node = tree_first(&sync->parties)) {
        tree_take(&sync->parties, node);
        free(TREE_OWNER(node, struct party, by_session));
    }
    sync->absences = (struct tree){0};
}

void barrier_end_round(struct sync *sync, bool broken, struct news *news)
{
    uint64_t round = round_of(sync);
    uint64_t bits = word_get(&sync->words->broken), own = (uint64_t)1 << (round % 64);
    word_put(&sync->words->broken, broken ? bits | own : bits & ~own);
    FAILPOINT("sync.round_judged");
    word_put(&sync->words->round, (round + 1) << ROUND_SHIFT);
    FAILPOINT("sync.round_ended");
    sync->broken_rounds += broken;
    if (broken)
        counter_add(&sync->counters->broken);
    barrier_clear(sync);
    queue_answer_all(sync, &sync->barrier, broken ? SMB_BROKEN : SMB_OK, news);
}

static bool find_seat(const struct sync *sync, const struct sync_request *request, uint64_t round,
                      uint64_t seats, struct sync_answer *reply)
{
    uint64_t (*row)[2] = seats_of(sync, round);
    for (uint64_t i = 0; i < seats; i++) {
        if (row[i][0] == request->session && row[i][1] == request->sequence) {
            *reply = (struct sync_answer){SMB_OK, round, i};
            return true;
        }
    }
    return false;
}

int barrier_ask_arrive(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                       struct sync_answer *reply, struct news *news)
{
    uint64_t parties = request->words[0], round = round_of(sync), arrived = barrier_arrived(sync);
    if (parties == 0 || parties > sync->capacity)
        return SMB_INVALID;
    if (find_seat(sync, request, round, arrived, reply) ||
        (round > 0 && find_seat(sync, request, round - 1, sync->capacity, reply)))
        return SMB_OK;
    if (arrived > 0 && parties != word_get(&sync->words->parties))
        return SMB_INVALID;
    if (!seat_party(sync, request->session, now_ns, news))
        return SMB_OUT_OF_MEMORY;
    if (arrived == 0) {
        /* replaces garbage, if the word had any */
        word_put(&sync->words->round, round << ROUND_SHIFT);
        word_put(&sync->words->parties, parties);
    }
    uint64_t *seat = seats_of(sync, round)[arrived];
    seat[0] = request->session;
    seat[1] = request->sequence;
    FAILPOINT("sync.seated");
    *reply = (struct sync_answer){SMB_OK, round, arrived};
    if (arrived + 1 == parties)
        barrier_end_round(sync, false, news);
    else
        word_put(&sync->words->round, round << ROUND_SHIFT | (arrived + 1));
    FAILPOINT("sync.arrived");
    return SMB_OK;
}

int barrier_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct news *news)
{
    uint64_t asked = waiter->request.words[0], round = round_of(sync);
    if (asked > round)
        return SMB_INVALID;
    if (asked < round)
        return round - asked > ROUNDS_KEPT || word_get(&sync->words->broken) >> (asked % 64) & 1
                   ? SMB_BROKEN
                   : SMB_OK;
    struct party *party = barrier_party(sync, waiter->request.session);
    if (!party)
        return SMB_INVALID; /* the session has no seat */
    if (waiter->request.words[1] == 0) {
        barrier_end_round(sync, true, news);
        return SMB_BROKEN;
    }
    party->waiting++;
    barrier_judge_presence(sync, party, now_ns, news);
    queue_keep(sync, waiter, 0, waiter->request.words[1], now_ns, news);
    return SMB_DEFERRED;
}

bool barrier_find_parties(struct sync *sync, uint64_t now_ns)
{
    /* the first sync_tick will find the due time */
    struct news first_news = {.due_ns = UINT64_MAX};
    uint64_t (*row)[2] = seats_of(sync, round_of(sync));
    for (uint64_t i = 0, arrived = barrier_arrived(sync); i < arrived; i++)
        if (!seat_party(sync, row[i][0], now_ns, &first_news))
            return false;
    return true;
}

uint64_t barrier_end_ns(const struct sync *sync)
{
    const struct waiter *waiter = queue_first_deadline(&sync->barrier);
    uint64_t absence_ns = absence_end_ns(sync);
    return waiter && waiter->deadline_ns < absence_ns ? waiter->deadline_ns : absence_ns;
}
