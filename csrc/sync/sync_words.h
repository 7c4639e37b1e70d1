/* sync_words.h: the words of locks, barrier and version in a segment's header page, which survive
 * the daemon. */
#ifndef SMB_SYNC_WORDS_H
#define SMB_SYNC_WORDS_H

#include <stdatomic.h>
#include <stdint.h>

/* the value is the lowest bit of every token of that lock */
enum sync_lock { SYNC_USER = 0, SYNC_PUBLISHER = 1, SYNC_LOCKS = 2 };

enum { SYNC_SLOTS_MAX = 16 };
/* bits of the argument of LOCK, UNLOCK and RENEW that say which lock. Above them, for the
 * publisher's LOCK, is the number of slots; for the user's lock SYNC_SHARED if the holding is
 * shared. */
enum { SYNC_LOCK_BITS = 8, SYNC_SHARED = 1 };
/* bits of a version; in the answer to a publisher's LOCK the slot is above them */
enum { SYNC_VERSION_BITS = 56 };
static const uint64_t SYNC_BEGUN = (uint64_t)1 << 63;

/* In the segment's header page. All zeros: nothing was ever locked, published or awaited. Any word
 * may hold garbage (recovery trusts nothing), so a value is bounded before it is used. Times are
 * CLOCK_BOOTTIME nanoseconds: the host's clock, which goes on while no daemon runs. */
struct sync_words {
    struct sync_lock_words {
        /* 0: free. Written last at a grant and first at a release, so this word alone decides */
        _Atomic uint64_t expires_ns;
        _Atomic uint64_t token;    /* the last token that was granted; 0: none */
        _Atomic uint64_t session;  /* the holder's; 0: shared holders, whose last lease ends then */
        _Atomic uint64_t request;  /* sequence number of the holder's request */
        _Atomic uint64_t released; /* bit (token / 2 mod 64): the holder released that token */
        _Atomic uint64_t fence;    /* lower tokens are refused */
    } locks[SYNC_LOCKS];
    _Atomic uint64_t version; /* the version published last */
    /* the version whose publication has begun (it may never end); 0: none */
    _Atomic uint64_t writing;
    /* the barrier's round number << 24 | number of parties that arrived */
    _Atomic uint64_t round;
    _Atomic uint64_t parties; /* number of parties of the present round */
    _Atomic uint64_t broken;  /* bit (round mod 64): that round broke */
    /* SYNC_RETIRED: requests are refused for good; any other value means nothing */
    _Atomic uint64_t retired;
    /* The version in each of the buffer's slots; SYNC_BEGUN | version while that version is being
     * written there. A slot that was never written holds version 0, which is zeros. At most one
     * slot is being written; its content is not needed, and the next publication goes there. */
    _Atomic uint64_t slots[SYNC_SLOTS_MAX];
};
static const uint64_t SYNC_RETIRED = 0x64656E7275746572; /* "returned" */
_Static_assert(sizeof(struct sync_words) <= 512, "a place in the header page");

/* The slot with this content; -1: none. The caller checks that the buffer has that slot. */
static inline int sync_find_slot(const struct sync_words *words, uint64_t content)
{
    for (int slot = 0; slot < SYNC_SLOTS_MAX; slot++)
        if (atomic_load_explicit(&words->slots[slot], memory_order_acquire) == content)
            return slot;
    return -1;
}

#endif
