/* What one call is about: the caller's Step, the pieces that it is cut into, and what is known of each. */
#ifndef GRADSIEVE_NATIVE_PLAN_H
#define GRADSIEVE_NATIVE_PLAN_H

#include "native_loops.h"

#define TILE 1024u /* coordinates that stay in the first-level cache between sieving and sending: at most 64 groups */
#define ALL_TIES SIZE_MAX
#define NAN_KEY 0x7f800001
#define NO_KEY 0x7fffffffu /* none is greater or equal */

/* What Python asks for; the fields of native.py's _Step. */
typedef struct {
    int64_t workers, size, segments, threads, measure, grad_kind, value_kind;
    double decay, gain;
    const void *grad;
    int64_t grad_stride;
    float *memory;
    int64_t memory_stride;
    const int64_t *bounds; /* of the segments */
    char *scratch;         /* room for hits; a call that needs more takes it from the heap and says so */
    int64_t scratch_bytes, scratch_wanted;
    int64_t *totals; /* how many coordinates the rule chose, a worker */
    int64_t slots;   /* below 0: the slots are made after the choice */
    int32_t *counts;
    int64_t counts_stride;
    uint16_t *offsets;
    int64_t offsets_stride;
    void *values;
    int64_t values_stride;
    int32_t *wanted;
    int64_t wanted_stride;
    int32_t *nonfinite;
    int64_t nonfinite_stride;
    double *error;
    void *plan; /* between the choice and the sending */
} Step;

/* The part of a segment that lies in one block, and what the pass found there. */
typedef struct {
    uint32_t start, stop, segment;
    float threshold;     /* hits are not below it */
    int overflowed;      /* so many hits that the pass gave up collecting them */
    int sent;            /* packed while it was in the cache */
    Hits *hits;
    size_t first, count; /* its stretch of the hits */
    uint32_t key;        /* sent: greater keys, and the first `ties` of this key */
    size_t ties, chosen, rank; /* how many are sent, and how many before it in its row */
    Moments moments; /* where the rule asks for them */
    double error;    /* squared norm of what is left in the memory */
} Piece;

enum { THRESHOLD, TOPK, GAUSSIAN, SAMPLED, TAKE };

typedef struct {
    Step *step;
    int rule;
    size_t row_pieces, parts;
    Piece *pieces;    /* [workers][row_pieces] */
    size_t *owns;     /* segment s owns pieces [owns[s], owns[s + 1]) of each row */
    Hits *hits, *old; /* [workers][parts] */
    Hits *retries;    /* [workers][segments], of passes over one segment in place */
    float threshold;
    const int64_t *k;      /* [segments] */
    float *hints;          /* [workers][segments][2]: last threshold, slack */
    const double *quantiles; /* [segments] */
    size_t stride, start;    /* of the sample */
    Hits *samples;           /* [workers][segments] */
    const uint32_t *picks;   /* [workers][room], ascending: the coordinates to take */
    const int64_t *picked;   /* [workers], how many */
    size_t room;
} Plan;

static inline Piece *pieces_of(const Plan *plan, size_t row, size_t segment, Piece **end) {
    Piece *pieces = plan->pieces + row * plan->row_pieces;
    *end = pieces + plan->owns[segment + 1];
    return pieces + plan->owns[segment];
}

static inline float *memory_of(const Plan *plan, size_t row) {
    return plan->step->memory + (int64_t)row * plan->step->memory_stride;
}

static inline size_t size_of(const Plan *plan, size_t segment) {
    return (size_t)(plan->step->bounds[segment + 1] - plan->step->bounds[segment]);
}

static inline float *hint_of(const Plan *plan, size_t row, size_t segment) {
    return plan->hints + 2 * (row * (size_t)plan->step->segments + segment);
}

/* native_pass.c */
INTERNAL void sieve_range(void *context, size_t range);
INTERNAL void collect(Plan *plan, size_t row, size_t segment, float threshold);
INTERNAL void collect_with_zeros(Plan *plan, size_t row, size_t segment, size_t zeros);
INTERNAL size_t count_greater(const float *value, size_t count, int32_t limit);
INTERNAL void send_hits(const Plan *plan, size_t row, Piece *piece);
INTERNAL size_t sample_start(const Plan *plan, size_t segment);

/* native_choose.c */
INTERNAL void choose_segment(void *context, size_t item);

/* native_draw.c */
INTERNAL void draw(const Step *step, const int64_t *k, const int64_t *keys, uint32_t *picks, int64_t *picked,
                   int64_t room);

#endif
