/* The inner loops, in the fastest form that this CPU runs: native_loops.c chooses when the library is loaded. */
#ifndef GRADSIEVE_NATIVE_LOOPS_H
#define GRADSIEVE_NATIVE_LOOPS_H

#include "native.h"

#define GROUP 64u /* coordinates tested at once */

typedef struct {
    const void *grad;
    float *memory, decay, gain, threshold;
    Hits *hits, *old; /* old: what a non-finite p replaced */
    int dense;        /* hits are so frequent that most groups have one: changes the speed alone */
} Job;

typedef struct {
    double sum, squares;
} Moments;

/* Adds [start, stop) of the gradient to the memory and appends what is not below the threshold. */
typedef void Sieve(int kind, const Job *job, size_t start, size_t stop);

/* Sums over what is below the threshold; the order of addition is the same on every CPU. */
typedef Moments Measure(const float *p, size_t count, float threshold);

/* Six rounds of a Feistel network on 2 * half bits, as rng.permute. */
typedef void Feistel(uint32_t *slots, size_t count, uint32_t half, uint32_t key);

extern Sieve *sieve;
extern Measure *measure;
extern Feistel *feistel;

#endif
