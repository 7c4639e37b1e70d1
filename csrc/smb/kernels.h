/* kernels.h: the engine's arithmetic on plain arrays: operations, optimizers' steps, wire formats,
 * deltas, sums. These functions use no segment, take no lock and do not block. The caller owns all
 * arrays. Conventions: smb/types.h. */
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
/* Applies one step of the rule to count elements. m and v are NULL if the rule has no such state.
 * No two of the arrays may overlap. */
int smb_kernel_step(int rule, float *b, const float *g, float *m, float *v, uint64_t count,
                    const struct smb_hyper *hyper);
/* Encodes count float32 elements into smb_wire_bytes(wire, count) bytes. `to` is aligned to 2
 * bytes. */
int smb_kernel_encode(int wire, const void *from, uint64_t count, void *to);
/* smb_kernel_apply for float32 with an encoded source, of which elements [first, first + count) are
 * used. */
int smb_kernel_apply_encoded(int wire, int op, void *target, const void *from, uint64_t first,
                             uint64_t count, double scale);
/* Rounds count float32 elements at byte `offset` of a buffer to the values that a transfer in this
 * wire format delivers. They are rounded piece by piece, cut at multiples of chunk_bytes. `to` may
 * be `from`. */
int smb_kernel_round(int wire, const void *from, uint64_t count, uint64_t offset,
                     uint32_t chunk_bytes, void *to);
/* The sums of states are numbers modulo this prime. */
#define SMB_SUM_PRIME 18446744073709551557ULL
/* The largest number of elements in one part of a delta. */
enum { SMB_DELTA_PART_MAX = 16777216 };
struct smb_delta {
    uint64_t bytes;   /* size of the part; 0: no element changed, so no part was written */
    uint64_t changes; /* number of changed elements */
    uint64_t sum;     /* what the part adds to the state's sum, modulo SMB_SUM_PRIME */
};
/* Elements of a state that lie one after the other in some memory, too: `count` of them, from
 * element `there` of the state and element `here` of the memory. Several runs are in the order of
 * `there` and do not overlap. */
struct smb_run {
    uint64_t there, here, count;
};
/* Encodes one part of the delta from `old` to `fresh`: the elements of these runs, of `width` bytes
 * (1, 2, 4, 8) each. They span less than 2^32 elements of the state. `old` becomes `fresh`. Bits
 * are compared, not values. SMB_OUT_OF_MEMORY: the part takes more than `room` bytes; `old` has
 * become `fresh` nevertheless. The format is in csrc/kernels/delta.h. */
int smb_delta_encode(uint32_t width, void *old, const void *fresh, const struct smb_run *runs,
                     uint32_t run_count, void *to, uint64_t room, struct smb_delta *delta);
/* Applies a delta of any number of parts to memory that has these runs of a state of `count`
 * elements; other changes are skipped. SMB_INVALID: the bytes are not a valid delta; the memory may
 * have changed. Any bytes are safe: the function writes nothing outside the runs. *sum, the sum of
 * the runs, is brought up to date if all of the delta was applied. */
int smb_delta_apply(uint32_t width, void *state, const struct smb_run *runs, uint32_t run_count,
                    uint64_t count, const void *delta, uint64_t bytes, uint64_t *sum);
/* The sum, modulo SMB_SUM_PRIME, of these runs of a state. That of a whole state is the sum over
 * any runs that have each of its elements once. */
uint64_t smb_state_sum(uint32_t width, const void *state, const struct smb_run *runs,
                       uint32_t run_count);
/* CRC-32C (Castagnoli). `crc` is the result for the bytes before `data`, or 0 at the start. */
uint32_t smb_crc32c(uint32_t crc, const void *data, uint64_t bytes);
/* The instruction sets that are compiled in and that this processor has, widest last. When the
 * library loads, it uses the one that SMB_ISA names. Without SMB_ISA it uses the fastest one on
 * this processor, as far as that was measured. */
int smb_isa_count(void);
const char *smb_isa_name(int isa);
int smb_isa_current(void);
/* For tests: makes the whole process use another instruction set from now on. */
int smb_isa_select(int isa);

/* cffi: end */

#endif
