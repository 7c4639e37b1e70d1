/* sync_words.h: what of locks, barrier and version lies in a segment's header page and survives the
 * daemon. */
#ifndef SMB_SYNC_WORDS_H
#define SMB_SYNC_WORDS_H

#include <stdatomic.h>
#include <stdint.h>

/* the lowest bit of every token of it */
enum sync_lock { SYNC_USER = 0, SYNC_PUBLISHER = 1, SYNC_LOCKS = 2 };

enum { SYNC_SLOTS_MAX = 16 };
enum { SYNC_LOCK_BITS = 8 }; /* of a LOCK's argument: which one; above them the buffer's slots */
enum { SYNC_VERSION_BITS = 56 }; /* of a version; a granted turn has the slot above them */
static const uint64_t SYNC_BEGUN = (uint64_t)1 << 63;

/* In the segment's header page. Zeroes: nothing was ever locked, published or awaited. Everything
 * may hold garbage (recovery trusts nothing): what is read from here is bounded before it is used.
 * Times are CLOCK_BOOTTIME nanoseconds: the host's, so they go on while no daemon runs. */
struct sync_words {
    struct sync_lock_words {
        /* 0: free. Written last when granted, first when released: decides alone */
        _Atomic uint64_t expires_ns;
        _Atomic uint64_t token;    /* the last one granted; 0: none ever */
        _Atomic uint64_t session;  /* of the holder */
        _Atomic uint64_t request;  /* its sequence number */
        _Atomic uint64_t released; /* bit (token / 2 mod 64): that one was released by its holder */
        _Atomic uint64_t fence;    /* lower tokens are refused */
    } locks[SYNC_LOCKS];
    _Atomic uint64_t version; /* published */
    /* a publication of this version has begun (it may never end); 0: none ever */
    _Atomic uint64_t writing;
    _Atomic uint64_t round;   /* of the barrier: round number << 24 | arrived */
    _Atomic uint64_t parties; /* of the round under way */
    _Atomic uint64_t broken;  /* bit (round mod 64): that round was broken */
    /* SYNC_RETIRED: nothing is asked of it any more; any other value means nothing */
    _Atomic uint64_t retired;
    /* The version in each of the buffer's slots; SYNC_BEGUN | version while that is being written
     * there. A slot that was never written holds version 0, zeros. Only one is in the middle of
     * that, and nobody needs what is there: the next publication goes there. */
    _Atomic uint64_t slots[SYNC_SLOTS_MAX];
};
static const uint64_t SYNC_RETIRED = 0x64656E7275746572; /* "returned" */
_Static_assert(sizeof(struct sync_words) <= 512, "a place in the header page");

/* The slot in which this is; -1: none. The caller sees to it that it has so many slots. */
static inline int sync_find_slot(const struct sync_words *words, uint64_t content)
{
    for (int slot = 0; slot < SYNC_SLOTS_MAX; slot++)
        if (atomic_load_explicit(&words->slots[slot], memory_order_acquire) == content)
            return slot;
    return -1;
}

#endif
