/* kernels.h: the engine's arithmetic on plain arrays: operations, optimizers' steps, wire formats,
 * deltas, sums. No segment, no lock. Conventions: smb/types.h. */
#ifndef SMB_PUBLIC_KERNELS_H
#define SMB_PUBLIC_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "smb/types.h"

/* cffi: begin */

/* target[i] = op(target[i], source[i]) for count elements. Pointers need no alignment beyond the
 * element's. The two ranges may be the same but must not overlap otherwise. */
int smb_kernel_apply(int dtype, int op, void *target, const void *source, uint64_t count,
                     double scale);
/* The rule for count elements. m and v are NULL if the rule has none; no two of the arrays
 * overlap. */
int smb_kernel_step(int rule, float *b, const float *g, float *m, float *v, uint64_t count,
                    const struct smb_hyper *hyper);
/* count float32 elements into smb_wire_bytes of them. `to` is aligned to 2 bytes. */
int smb_kernel_encode(int wire, const void *from, uint64_t count, void *to);
/* smb_kernel_apply for float32 with a source that is encoded: elements [first, first + count) of
 * it. */
int smb_kernel_apply_encoded(int wire, int op, void *target, const void *from, uint64_t first,
                             uint64_t count, double scale);
/* Gives count float32 elements at byte `offset` of a buffer the values that they arrive with. They
 * are rounded piece by piece, cut at multiples of chunk_bytes. `to` may be `from`. */
int smb_kernel_round(int wire, const void *from, uint64_t count, uint64_t offset,
                     uint32_t chunk_bytes, void *to);
/* Elements of one part of a delta at most. */
enum { SMB_DELTA_PART_MAX = 16777216 };
struct smb_delta {
    uint64_t bytes;   /* of the part; 0: nothing changed, there is none */
    uint64_t changes; /* elements */
    uint64_t sum;     /* what they add to the state's sum, modulo 2^64 */
};
/* Encodes one part of the delta from `old` to `fresh`: count elements of `width` bytes (1, 2, 4,
 * 8), whole 64-bit words. The first of them is element `first` of the state. `old` becomes `fresh`.
 * Bits are compared, not values. SMB_OUT_OF_MEMORY: it takes more than `room` bytes; `old` has
 * become it all the same. The format is in csrc/memory/delta.h. */
int smb_delta_encode(uint32_t width, void *old, const void *fresh, uint64_t count, uint64_t first,
                     void *to, uint64_t room, struct smb_delta *delta);
/* Applies a delta of any number of parts to a state of count elements, whole 64-bit words.
 * SMB_INVALID: it is none; the state may have changed. Any bytes are safe: nothing outside of the
 * state is touched. *sum becomes what it is by then. */
int smb_delta_apply(uint32_t width, void *state, uint64_t count, const void *delta, uint64_t bytes,
                    uint64_t *sum);
/* The sum of a state of so many 64-bit words. */
uint64_t smb_state_sum(const void *state, uint64_t words);
/* CRC-32C (Castagnoli) of bytes that follow those of which `crc` is it; 0 at first. */
uint32_t smb_crc32c(uint32_t crc, const void *data, uint64_t bytes);
/* Instruction sets compiled in and usable here, widest last. When the library loads, it takes the
 * one that SMB_ISA names; without SMB_ISA the fastest on this processor, as far as that was
 * measured. */
int smb_isa_count(void);
const char *smb_isa_name(int isa);
int smb_isa_current(void);
/* For tests: use another one from now on, in the whole process. */
int smb_isa_select(int isa);

/* cffi: end */

#endif
