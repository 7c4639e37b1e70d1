/* credit.h: how many bytes of async operations are in flight at once.
 *
 * A request is cut into slices at the borders of chunks, each a quarter of the window's credit at
 * most. So an urgent operation waits for what is in flight, and not for the rest of a large one. A
 * window in which nothing is in flight takes any slice.
 *
 * If the user sets no credit, it is about twice the bandwidth, the highest measured, times the
 * delay, the lowest measured, of slices over links. Every MEASURED_NS the window runs empty once,
 * so that the delay is that of the path and not of slices that wait in front of it.
 *
 * The mutex of the client's struct smb_async guards everything here. */
#ifndef SMB_CREDIT_H
#define SMB_CREDIT_H

#include "async/order.h"

enum { SLICES_PER_CREDIT = 4 }; /* so that the path stays full while one slice is answered */

/* Limits of a measured credit. */
enum {
    CREDIT_FIRST = 4 << 20, /* until the first measurement */
    CREDIT_LEAST = 1 << 20, /* four chunks: less would leave a processor idle between them */
    /* 2.5 Gb/s over 100 ms, twice; also limits how much of the caller's memory is held */
    CREDIT_MOST = 64 << 20,
};
static const uint64_t MEASURED_NS = 10000000000;

struct smb_window {
    struct smb_async *async;
    struct smb_window *next; /* in the list of all windows */
    bool counts_calls;       /* credit and in_flight count operations */
    bool measured;           /* credit is measured */
    bool empties;            /* no operation begins until nothing is in flight */
    uint64_t credit, in_flight;
    uint64_t operations; /* operations that their submitter still knows */
    struct heap heap;
    uint64_t delivered_bytes, measured_since_ns;
    uint64_t delay_ns; /* the lowest since measured_since_ns; 0: none yet */
    /* bytes per ns: the highest in the present period, and in the one before */
    double rate, rate_before;
};

/* Size of the operation's next slice; 1 if calls are counted. */
uint64_t window_slice_bytes(const struct smb_operation *operation);
bool window_has_room(const struct smb_window *window, const struct smb_operation *operation);

/* Measures with a slice that was delivered over links. When the slice began, the window had
 * delivered `delivered_bytes`. */
void window_measure(struct smb_window *window, uint64_t begun_ns, uint64_t delivered_bytes,
                    uint64_t now_ns);

#endif
