#include "async/order.h"

#include <stdlib.h>

#include "base/assert.h"

bool order_goes_first(const struct smb_operation *a, const struct smb_operation *b)
{
    return a->urgency != b->urgency ? a->urgency > b->urgency : a->number < b->number;
}

bool heap_make_room(struct heap *heap, size_t operations)
{
    if (operations <= heap->room)
        return true;
    size_t room = heap->room ? 2 * heap->room : 64;
    struct smb_operation **made = realloc(heap->operations, room * sizeof(struct smb_operation *));
    if (!made)
        return false;
    heap->operations = made;
    heap->room = room;
    return true;
}

static void heap_put(struct heap *heap, size_t at, struct smb_operation *operation)
{
    heap->operations[at] = operation;
    operation->heap_index = at;
}

/* Restores the heap after the operation at `at` changed its urgency or was replaced. */
static void heap_mend(struct heap *heap, size_t at)
{
    struct smb_operation *operation = heap->operations[at];
    for (; at > 0 && order_goes_first(operation, heap->operations[(at - 1) / 2]); at = (at - 1) / 2)
        heap_put(heap, at, heap->operations[(at - 1) / 2]);
    for (;;) {
        size_t child = 2 * at + 1;
        if (child + 1 < heap->count &&
            order_goes_first(heap->operations[child + 1], heap->operations[child]))
            child++;
        if (child >= heap->count || !order_goes_first(heap->operations[child], operation))
            break;
        heap_put(heap, at, heap->operations[child]);
        at = child;
    }
    heap_put(heap, at, operation);
}

void heap_add(struct smb_operation *operation)
{
    struct heap *heap = operation->heap;
    SMB_ASSERT(!operation->in_heap && heap->count < heap->room);
    operation->in_heap = true;
    heap_put(heap, heap->count++, operation);
    heap_mend(heap, operation->heap_index);
}

void heap_remove(struct smb_operation *operation)
{
    struct heap *heap = operation->heap;
    SMB_ASSERT(operation->in_heap);
    size_t at = operation->heap_index;
    operation->in_heap = false;
    heap->count--;
    if (at == heap->count)
        return;
    heap_put(heap, at, heap->operations[heap->count]);
    heap_mend(heap, at);
}

static bool conflict(const struct smb_operation *a, const struct smb_operation *b)
{
    return a->key == b->key && (a->changes || b->changes) &&
           a->request.offset < b->request.offset + b->request.bytes &&
           b->request.offset < a->request.offset + a->request.bytes;
}

/* Makes the operations that `later` waits for, and those that these wait for, at least as urgent as
 * `later`. The list is walked once, backward from its end `last`, because an operation waits only
 * for earlier ones. */
static void raise_earlier(struct smb_operation *later, struct smb_operation *last)
{
    struct smb_operation *raised = later;
    later->next_raised = NULL;
    for (struct smb_operation *operation = last; operation; operation = operation->earlier) {
        if (operation->urgency >= later->urgency)
            continue;
        const struct smb_operation *other = raised;
        while (other && !conflict(operation, other))
            other = other->next_raised;
        if (!other)
            continue;
        operation->urgency = later->urgency;
        if (operation->in_heap)
            heap_mend(operation->heap, operation->heap_index);
        operation->next_raised = raised;
        raised = operation;
    }
}

void order_enter(struct order *order, struct smb_operation *operation)
{
    size_t list = operation->key % ORDERS;
    struct smb_operation *last = order->last[list];
    operation->number = ++order->count;
    for (struct smb_operation *earlier = last; earlier; earlier = earlier->earlier)
        operation->waits_for += conflict(earlier, operation);
    if (operation->waits_for > 0)
        raise_earlier(operation, last);
    else
        heap_add(operation);
    operation->earlier = last;
    if (last)
        last->later = operation;
    else
        order->first[list] = operation;
    order->last[list] = operation;
}

void order_leave(struct order *order, struct smb_operation *operation)
{
    size_t list = operation->key % ORDERS;
    SMB_ASSERT(!operation->in_heap);
    for (struct smb_operation *later = operation->later; later; later = later->later)
        if (conflict(operation, later) && --later->waits_for == 0 &&
            later->state == OPERATION_WAITS)
            heap_add(later);
    if (operation->earlier)
        operation->earlier->later = operation->later;
    else
        order->first[list] = operation->later;
    if (operation->later)
        operation->later->earlier = operation->earlier;
    else
        order->last[list] = operation->earlier;
}

bool order_blocks(const struct order *order, const struct smb_operation *asked, uint64_t count)
{
    const struct smb_operation *earlier = order->first[asked->key % ORDERS];
    while (earlier && earlier->number <= count && !conflict(earlier, asked))
        earlier = earlier->later;
    return earlier && earlier->number <= count;
}

void order_raise(const struct order *order, struct smb_operation *asked)
{
    raise_earlier(asked, order->last[asked->key % ORDERS]);
}

struct smb_operation *order_find_waiting(const struct order *order, uint64_t tag)
{
    struct smb_operation *found = NULL;
    for (int list = 0; list < ORDERS && !found; list++) {
        found = order->first[list];
        while (found && (found->tag != tag || found->state != OPERATION_WAITS))
            found = found->later;
    }
    return found;
}
