/* kernels.h: beside what smb/kernels.h declares, a copy for the engine itself, and optimizers'
 * steps in parts. */
#ifndef SMB_KERNELS_H
#define SMB_KERNELS_H

#include "smb/kernels.h"

/* memcpy of ranges that do not overlap, or are the same. Where the target is aligned to an
 * element's size and `bytes` is a multiple of it, nobody ever sees a part of an element there.
 * around_cache: with stores that go around the cache, for data that does not fit there. A line that
 * is overwritten whole need not be read first. That saves a third of the memory traffic. */
void kernel_copy(void *to, const void *from, uint64_t bytes, bool around_cache);
/* The same of one element, of 1, 2, 4 or 8 bytes. */
void kernel_put(void *to, const void *from, uint32_t element);

/* A rule's numbers as they meet elements. */
struct factors {
    float lr; /* of Adam divided by its first correction; of elastic alpha */
    float scale;
    float decay;
    float mu; /* of Adam beta1 */
    float one_less_mu;
    float beta2;
    float one_less_beta2;
    float root; /* 1/sqrt of the second correction */
    float eps;
    float keep; /* what decoupled decay leaves of b */
};

/* Once for all parts of a step: its powers take as long as a hundred elements. Of numbers that
 * smb_rule_accepts does not, any. */
struct factors kernel_factors_of(int rule, const struct smb_hyper *hyper);
void kernel_step(int rule, const struct factors *factors, float *b, const float *g, float *m,
                 float *v, uint64_t count);

#endif
