/* slots.h: slots that an RDMA network card fills. They have their own references; any thread may
 * use them. */
#ifndef SMB_SLOTS_H
#define SMB_SLOTS_H

#include <stdint.h>

struct slot;
struct smb_slots;

void slots_retain(struct smb_slots *slots);
/* The slot of that index; NULL: out of range. */
const struct slot *slots_at(const struct smb_slots *slots, uint64_t index);

#endif
