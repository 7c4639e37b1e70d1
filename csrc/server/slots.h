/* slots.h: slots that somebody outside fills, an RDMA network card. Any thread: they have
 * references of their own. */
#ifndef SMB_SLOTS_H
#define SMB_SLOTS_H

#include <stdint.h>

struct slot;
struct smb_slots;

void slots_retain(struct smb_slots *slots);
/* One of them; NULL if there is no such. */
const struct slot *slots_at(const struct smb_slots *slots, uint64_t index);

#endif
