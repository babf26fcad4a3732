/* The inner loops, in the fastest form that this CPU runs: native_loops.c chooses when the library is loaded. */
#ifndef GRADSIEVE_NATIVE_LOOPS_H
#define GRADSIEVE_NATIVE_LOOPS_H

#include "native.h"

#define GROUP 64u /* coordinates whose hits are the bits of one word */

typedef struct {
    const void *grad;
    float *memory, decay, gain;
    int32_t limit; /* hits are the p whose key is greater */
    Hits *old;     /* what a non-finite p replaced */
} Job;

typedef struct {
    double sum, squares;
} Moments;

/* Adds [start, stop) of the gradient to the memory; a bit for each coordinate says whether it is a hit.
 * Bits instead of a list: a branch for each hit would stop the loads that run ahead of it.
 * Returns which words have a hit, up to 64 of them. */
typedef uint64_t Sieve(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits);

/* Sums whose order of addition is the same on every CPU. */
typedef Moments Measure(const float *p, size_t count);
typedef double Squares(const float *p, size_t count, float below);

/* Six rounds of a Feistel network on 2 * half bits, as rng.permute. Results below `size` become picks, from `begin` on;
 * the others stay in the walk. Returns how many others. */
typedef size_t Walk(uint32_t *walk, size_t count, uint32_t half, uint32_t key, uint32_t begin, uint32_t size,
                    uint32_t *picks);

INTERNAL extern Sieve *sieve;
INTERNAL extern Measure *measure;
INTERNAL extern Squares *squares;
INTERNAL extern Walk *walk_on;

#endif
