/* types.h: what the numbers of element types, operations, rules and wires mean: sizes, and which go
 * together. Pure. The functions are declared in smb/types.h. */
#ifndef SMB_TYPES_H
#define SMB_TYPES_H

#include "smb/types.h"

enum { INT4_BLOCK_BYTES = 4 + SMB_WIRE_INT4_BLOCK / 2 }; /* of the wire int4: a scale, elements */

#endif
