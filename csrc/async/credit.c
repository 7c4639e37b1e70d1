#include "async/credit.h"

uint64_t window_slice_bytes(const struct smb_operation *operation)
{
    if (operation->window->counts_calls)
        return 1;
    if (!operation->buffer)
        return operation->request.bytes;
    uint64_t chunk = operation->buffer->layout.chunk_bytes;
    uint64_t most = operation->window->credit / SLICES_PER_CREDIT;
    uint64_t begin = operation->request.offset + operation->sliced_bytes;
    uint64_t end = begin + (most > chunk ? most : chunk);
    uint64_t left = operation->request.bytes - operation->sliced_bytes;
    end -= end % chunk;
    return end - begin < left ? end - begin : left;
}

bool window_has_room(const struct smb_window *window, const struct smb_operation *operation)
{
    return window->in_flight == 0 ||
           (!window->empties &&
            window->in_flight + window_slice_bytes(operation) <= window->credit);
}

void window_measure(struct smb_window *window, uint64_t begun_ns, uint64_t delivered_bytes,
                    uint64_t now_ns)
{
    if (!window->measured)
        return;
    uint64_t took_ns = now_ns > begun_ns ? now_ns - begun_ns : 1;
    double rate = (double)(window->delivered_bytes - delivered_bytes) / (double)took_ns;
    if (window->delay_ns == 0 || took_ns < window->delay_ns)
        window->delay_ns = took_ns;
    if (rate > window->rate)
        window->rate = rate;
    double most = window->rate > window->rate_before ? window->rate : window->rate_before;
    double credit = 2 * most * (double)window->delay_ns;
    window->credit = credit < CREDIT_LEAST  ? (uint64_t)CREDIT_LEAST
                     : credit > CREDIT_MOST ? (uint64_t)CREDIT_MOST
                                            : (uint64_t)credit;
    window->empties |= now_ns - window->measured_since_ns > MEASURED_NS;
    if (!window->empties || window->in_flight > 0)
        return;
    window->empties = false;
    window->measured_since_ns = now_ns;
    window->delay_ns = 0;
    window->rate_before = window->rate;
    window->rate = 0;
}
