/* kernels.h: the engine's own copy functions, and optimizers' steps in parts. smb/kernels.h
 * declares the other kernels. This folder is a room: it includes csrc/base alone, and others enter
 * it by these two headers. */
#ifndef SMB_KERNELS_H
#define SMB_KERNELS_H

#include "smb/kernels.h"

/* Copies between ranges that do not overlap, or are the same. If the target is aligned to an
 * element's size and `bytes` is a multiple of that size, nobody ever sees a part of an element
 * there. around_cache: uses stores that go around the cache, for data that does not fit there. A
 * line that is overwritten whole need not be read first, which saves a third of the memory
 * traffic. */
void kernel_copy(void *to, const void *from, uint64_t bytes, bool around_cache);
/* Copies one element, of 1, 2, 4 or 8 bytes, in the same way. */
void kernel_put(void *to, const void *from, uint32_t element);

/* The factors of a rule, as they are applied to elements. */
struct factors {
    float lr; /* for Adam divided by its first correction; for elastic alpha */
    float scale;
    float decay;
    float mu; /* for Adam beta1 */
    float one_less_mu;
    float beta2;
    float one_less_beta2;
    float root; /* 1/sqrt of the second correction */
    float eps;
    float keep; /* the part of b that decoupled decay leaves */
};

/* Computes the factors once for all parts of a step, because their powers take as long as a hundred
 * elements. If smb_rule_accepts refuses the parameters, the factors have any values. */
struct factors kernel_factors_of(int rule, const struct smb_hyper *hyper);
void kernel_step(int rule, const struct factors *factors, float *b, const float *g, float *m,
                 float *v, uint64_t count);

#endif
