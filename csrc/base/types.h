/* types.h: the meaning of the numbers of element types, operations, rules and wire formats: sizes,
 * and which combinations are valid. Pure. smb/types.h declares the functions. */
#ifndef SMB_TYPES_H
#define SMB_TYPES_H

#include "smb/types.h"

/* block of the wire format int4: a scale and the block's elements */
enum { INT4_BLOCK_BYTES = 4 + SMB_WIRE_INT4_BLOCK / 2 };

#endif
