/* layout.h: which bytes lie where. Pure. In addition to the functions of smb/types.h, a walk over
 * the part of a range that lies on one segment. */
#ifndef SMB_LAYOUT_H
#define SMB_LAYOUT_H

#include "smb/types.h"

/* Walks the pieces of buffer bytes [position, end) that lie on `segment`, each within one chunk. */
struct smb_cursor {
    const struct smb_layout *layout;
    uint64_t position;
    uint64_t end;
    uint32_t segment;
};

struct smb_cursor smb_cursor_make(const struct smb_layout *layout, uint32_t segment,
                                  uint64_t offset, uint64_t bytes);
bool smb_cursor_next(struct smb_cursor *cursor, struct smb_piece *piece);

#endif
