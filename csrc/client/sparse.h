/* sparse.h: calls on some elements of a range only. Pure. */
#ifndef SMB_SPARSE_H
#define SMB_SPARSE_H

#include "smb/client.h"

/* Cuts the part from the first entry on, with at most entries_max entries, off *rest. False: *rest
 * has no entry. */
bool sparse_cut(const struct smb_request *request, uint32_t element, uint64_t entries_max,
                struct smb_piece *rest, struct smb_piece *piece, uint64_t *first,
                uint64_t *entries);
/* For READ: cuts the first elements that are wanted and lie side by side off *rest; *first is the
 * number of the first one among the request's indices. False: none of *rest is wanted. */
bool sparse_run(const struct smb_request *request, uint32_t element, struct smb_piece *rest,
                struct smb_piece *piece, uint64_t *first);
/* Writes the piece's entries in their wire format: 4 + element bytes each. */
void sparse_encode(const struct smb_request *request, uint32_t element,
                   const struct smb_piece *piece, uint64_t first, uint64_t entries, uint8_t *to);
/* Whether the indices ascend, from the range's first element to its last. */
bool sparse_is_sound(const struct smb_request *request, uint32_t element);

#endif
