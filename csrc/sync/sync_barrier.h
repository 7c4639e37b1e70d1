/* sync_barrier.h: a barrier's rounds and seats, and parties that are away. */
#ifndef SMB_SYNC_BARRIER_H
#define SMB_SYNC_BARRIER_H

#include "base/tree.h"
#include "sync/sync_state.h"

/* A session with seats in the present round. */
struct party {
    struct tree_node by_session, by_absence; /* by_absence only while the party is away */
    uint64_t session;
    uint32_t seats, waiting;
    /* since when fewer of its requests wait than it has seats; UINT64_MAX: the party is present */
    uint64_t absent_ns;
};

/* 0 if the words are inconsistent: more parties than seats, or more seats taken than parties. */
uint64_t barrier_arrived(const struct sync *sync);
/* NULL: the session has no seat in the present round. */
struct party *barrier_party(const struct sync *sync, uint64_t session);
void barrier_judge_presence(struct sync *sync, struct party *party, uint64_t now_ns,
                            struct news *news);
void barrier_clear(struct sync *sync);
/* Ends the present round. Its own bit in `broken` is set before the round's word moves on, and is
 * not read before that. So the bit may hold the value of an older round, or of a call that a kill
 * interrupted. */
void barrier_end_round(struct sync *sync, bool broken, struct news *news);
/* After a restart: sessions that had seats are expected to come back. False: out of memory. */
bool barrier_find_parties(struct sync *sync, uint64_t now_ns);
/* When the present round will break: a party has been away for too long, or a waiting one times
 * out. */
uint64_t barrier_end_ns(const struct sync *sync);
/* Requests: see sync.h. */
int barrier_ask_arrive(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                       struct sync_answer *reply, struct news *news);
int barrier_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct news *news);

#endif
