/* sync_barrier.h: rounds, seats, and parties that are away. */
#ifndef SMB_SYNC_BARRIER_H
#define SMB_SYNC_BARRIER_H

#include "base/tree.h"
#include "memory/sync_state.h"

/* A session with seats in the round under way. */
struct party {
    struct tree_node by_session, by_absence; /* the latter while it is absent */
    uint64_t session;
    uint32_t seats, waiting;
    uint64_t absent_ns; /* since when fewer wait than have seats; UINT64_MAX: they are there */
};

/* 0 if the words can't be: more parties than there are seats, or more seats taken than
 * parties. */
uint64_t barrier_arrived(const struct sync *sync);
/* NULL: the session has no seat in the round under way. */
struct party *barrier_party(const struct sync *sync, uint64_t session);
void barrier_judge_presence(struct sync *sync, struct party *party, uint64_t now_ns,
                            struct news *news);
void barrier_clear(struct sync *sync);
/* The round under way is over. Its own bit is right before the word moves on, and nobody looks at
 * it until then. So it may hold the bit of an older round, or of a judgement that a kill
 * interrupted. */
void barrier_end_round(struct sync *sync, bool broken, struct news *news);
/* After a restart: sessions that had seats are expected back. False: out of memory. */
bool barrier_find_parties(struct sync *sync, uint64_t now_ns);
/* When its round is broken: a party has been away for too long, or one that waits gives up. */
uint64_t barrier_end_ns(const struct sync *sync);
/* Requests; see sync.h. */
int barrier_ask_arrive(struct sync *sync, const struct sync_request *request, uint64_t now_ns,
                       struct sync_answer *reply, struct news *news);
int barrier_ask_await(struct sync *sync, struct waiter *waiter, uint64_t now_ns, struct news *news);

#endif
