/* The ops of reference.py for float32 memories on the CPU: one pass over gradient and memory.
 *
 * A pass writes p = decay * memory + gain * grad and collects the hits, those p that are not below a threshold.
 * A rule then chooses among the hits and `gradsieve_send` packs the chosen. The memory holds p, non-finite or not,
 * until the end; old values under a non-finite p wait in a list and are put back last.
 * Work is cut into pieces (the part of a segment in a block) and sums are taken piece by piece, so that no result
 * depends on the number of threads or of workers.
 */
#include "native.h"
#include "native_loops.h"

#define TILE 1024u /* coordinates that stay in the first-level cache between sieving and sending */
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

static size_t cut_into_pieces(const Step *step, Piece *pieces, size_t *owns) {
    size_t count = 0;
    for (size_t s = 0; s < (size_t)step->segments; s++) {
        if (owns) owns[s] = count;
        size_t start = (size_t)step->bounds[s], end = (size_t)step->bounds[s + 1];
        for (size_t stop; start < end; start = stop, count++) {
            stop = smaller(end, (start / BLOCK + 1) * BLOCK);
            if (pieces) pieces[count] = (Piece){(uint32_t)start, (uint32_t)stop, (uint32_t)s, .threshold = INFINITY};
        }
    }
    if (owns) owns[step->segments] = count;
    return count;
}

static Plan *make_plan(Step *step, int rule) {
    Plan *plan = need(calloc(1, sizeof *plan));
    size_t workers = (size_t)step->workers, segments = (size_t)step->segments, threads = (size_t)step->threads;
    plan->step = step;
    plan->rule = rule;
    plan->row_pieces = cut_into_pieces(step, NULL, NULL);
    plan->parts = workers && workers < threads ? (threads + workers - 1) / workers : 1;
    plan->pieces = need(malloc((workers * plan->row_pieces + 1) * sizeof *plan->pieces));
    plan->owns = need(malloc((segments + 1) * sizeof *plan->owns));
    cut_into_pieces(step, plan->pieces, plan->owns);
    for (size_t row = 1; row < workers; row++)
        memcpy(plan->pieces + row * plan->row_pieces, plan->pieces, plan->row_pieces * sizeof *plan->pieces);

    size_t ranges = workers * plan->parts;
    plan->hits = need(calloc(2 * ranges + 2 * workers * segments + 1, sizeof *plan->hits)); /* and the lists below */
    plan->old = plan->hits + ranges;
    plan->retries = plan->old + ranges;
    plan->samples = plan->retries + workers * segments;
    size_t room = ranges ? (size_t)step->scratch_bytes / ranges / 8 : 0;
    for (size_t range = 0; range < ranges; range++) {
        char *base = step->scratch + range * room * 8;
        plan->hits[range] = (Hits){(uint32_t *)base, (float *)(base + room * 4), 0, room, 0};
    }
    step->plan = plan;
    return plan;
}

static Piece *pieces_of(const Plan *plan, size_t row, size_t segment, Piece **end) {
    Piece *pieces = plan->pieces + row * plan->row_pieces;
    *end = pieces + plan->owns[segment + 1];
    return pieces + plan->owns[segment];
}

static float *memory_of(const Plan *plan, size_t row) {
    return plan->step->memory + (int64_t)row * plan->step->memory_stride;
}

static size_t size_of(const Plan *plan, size_t segment) {
    return (size_t)(plan->step->bounds[segment + 1] - plan->step->bounds[segment]);
}

static float *hint_of(const Plan *plan, size_t row, size_t segment) {
    return plan->hints + 2 * (row * (size_t)plan->step->segments + segment);
}

static const void *row_of(const void *base, int kind, int64_t stride, size_t row) {
    return (const char *)base + (int64_t)row * stride * (kind == F32 ? 4 : 2);
}

/* Where the slots of a row are. */
typedef struct {
    uint16_t *offsets;
    void *values;
    size_t count;
    int kind;
} Slots;

static Slots slots_of(const Plan *plan, size_t row) {
    const Step *step = plan->step;
    void *values = (void *)row_of(step->values, (int)step->value_kind, step->values_stride, row);
    uint16_t *offsets = step->offsets + (int64_t)row * step->offsets_stride;
    return (Slots){offsets, values, (size_t)step->slots, (int)step->value_kind};
}

/* Sends one element, if there is a slot; the memory keeps what rounding left of it, which is returned. */
INLINE float send(const Slots *slots, size_t rank, float *memory, uint32_t index, float value) {
    if (rank >= slots->count) return value;
    value -= put(slots->kind, slots->values, rank, value);
    slots->offsets[rank] = (uint16_t)(index % BLOCK);
    return memory[index] = value;
}

INLINE double square_if_finite(float x) { return fabsf(x) <= FLT_MAX ? (double)x * (double)x : 0.0; }

/* Sends all hits of a tile, while it is in the cache. */
static void send_bits(const Plan *plan, size_t row, Piece *piece, size_t start, const uint64_t *bits, size_t words,
                      size_t *rank) {
    const Slots slots = slots_of(plan, row);
    float *memory = memory_of(plan, row);
    size_t next = *rank;
    int measured = plan->step->measure && plan->rule != TAKE;
    for (size_t word = 0; word < words; word++, start += GROUP)
        for (uint64_t left = bits[word]; left; left &= left - 1) {
            uint32_t index = (uint32_t)(start + (size_t)__builtin_ctzll(left));
            float rest = send(&slots, next++, memory, index, memory[index]);
            if (measured) piece->error += square_if_finite(rest);
        }
    *rank = next;
}

static void list_bits(const Plan *plan, size_t row, size_t start, const uint64_t *bits, size_t words, Hits *hits) {
    const float *memory = memory_of(plan, row);
    reserve(hits, words * GROUP);
    size_t length = hits->length;
    for (size_t word = 0; word < words; word++, start += GROUP)
        for (uint64_t left = bits[word]; left; left &= left - 1, length++) {
            size_t index = start + (size_t)__builtin_ctzll(left);
            hits->index[length] = (uint32_t)index;
            hits->value[length] = memory[index];
        }
    hits->length = length;
}

/* Bits of up to TILE listed values: whether a key is greater than the limit. */
static size_t bits_of_list(const float *value, size_t count, int32_t limit, uint64_t *bits) {
    Job job = {.memory = (float *)value, .limit = limit < NAN_KEY ? limit : INT32_MAX}; /* nothing is above a NaN */
    sieve(IN_PLACE, &job, 0, count, bits);
    return (count + GROUP - 1) / GROUP;
}

/* How many listed values have a greater key. */
static size_t count_greater(const float *value, size_t count, int32_t limit) {
    size_t found = 0;
    for (size_t start = 0; start < count; start += TILE) {
        uint64_t bits[TILE / GROUP];
        size_t words = bits_of_list(value + start, smaller(TILE, count - start), limit, bits);
        for (size_t word = 0; word < words; word++) found += (size_t)__builtin_popcountll(bits[word]);
    }
    return found;
}

/* Sends a piece's chosen hits. */
static void send_hits(const Plan *plan, size_t row, Piece *piece) {
    const Slots slots = slots_of(plan, row);
    float *memory = memory_of(plan, row);
    const uint32_t *index = piece->hits->index + piece->first;
    const float *value = piece->hits->value + piece->first;
    size_t rank = piece->rank, end = rank + piece->chosen;
    int measured = (int)plan->step->measure;
    if (measured) piece->error += squares(value, piece->count, piece->key < 0x7f800000u ? float_of(piece->key) : INFINITY);
    for (size_t start = 0; start < piece->count && (rank < end || measured); start += TILE) {
        uint64_t bits[TILE / GROUP];
        size_t words = bits_of_list(value + start, smaller(TILE, piece->count - start), (int32_t)piece->key - 1, bits);
        for (size_t word = 0; word < words; word++)
            for (uint64_t left = bits[word]; left; left &= left - 1) {
                size_t i = start + word * GROUP + (size_t)__builtin_ctzll(left);
                int sent = key_of(value[i]) != piece->key || (piece->ties && piece->ties--);
                float rest = sent ? send(&slots, rank++, memory, index[i], value[i]) : value[i];
                if (measured) piece->error += square_if_finite(rest);
            }
    }
}

/* Where a segment's strided sample begins, counted from the segment's start. */
static size_t sample_start(const Plan *plan, size_t segment) {
    return plan->start % smaller(plan->stride, size_of(plan, segment));
}

static void take_sample(const Plan *plan, size_t row, const Piece *piece, size_t start, size_t stop) {
    size_t first = (size_t)plan->step->bounds[piece->segment] + sample_start(plan, piece->segment);
    size_t number = start <= first ? 0 : (start - first + plan->stride - 1) / plan->stride;
    Hits *sample = &plan->samples[row * (size_t)plan->step->segments + piece->segment];
    for (size_t i = first + number * plan->stride; i < stop; i += plan->stride)
        sample->value[number++] = memory_of(plan, row)[i];
}

/* The picks from number `next` on that lie in [start, stop), as bits. */
static void mark_picks(const Plan *plan, size_t row, size_t next, size_t start, size_t stop, uint64_t *bits) {
    const uint32_t *picks = plan->picks + row * plan->room, *pick = picks + next, *end = picks + plan->picked[row];
    zero(bits, TILE / GROUP * sizeof *bits);
    for (; pick < end && *pick < stop; pick++) bits[(*pick - start) / GROUP] |= (uint64_t)1 << (*pick - start) % GROUP;
}

static size_t picks_before(const Plan *plan, size_t row, size_t coordinate) {
    const uint32_t *picks = plan->picks + row * plan->room;
    size_t low = 0, high = (size_t)plan->picked[row];
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (picks[middle] < coordinate) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Sieves one piece, tile by tile. With `rank`, what is found is sent while it is in the cache; else it is listed. */
static void sieve_piece(const Plan *plan, size_t row, Piece *piece, int kind, Hits *hits, Hits *old, size_t *rank) {
    const Step *step = plan->step;
    float *memory = memory_of(plan, row);
    const void *grad = row_of(step->grad, (int)step->grad_kind, step->grad_stride, row);
    int32_t limit = piece->threshold > 0.0f ? (int32_t)bits_of(piece->threshold) - 1 : -1;
    Job job = {grad, memory, (float)step->decay, (float)step->gain, limit, old};
    piece->hits = hits;
    piece->first = hits->length;
    piece->key = 0;
    piece->ties = ALL_TIES;
    piece->error = 0.0;
    for (size_t start = piece->start, stop; start < piece->stop; start = stop) {
        stop = smaller(start / TILE * TILE + TILE, piece->stop);
        uint64_t bits[TILE / GROUP];
        size_t count = stop - start, words = (count + GROUP - 1) / GROUP;
        sieve(kind, &job, start, stop, bits);
        if (plan->rule == TAKE) mark_picks(plan, row, *rank, start, stop, bits);
        if (plan->rule == SAMPLED && kind != IN_PLACE) take_sample(plan, row, piece, start, stop);
        if (plan->rule == GAUSSIAN && kind != IN_PLACE) {
            Moments moments = measure(memory + start, count);
            piece->moments.sum += moments.sum;
            piece->moments.squares += moments.squares;
        }
        if (step->measure && plan->rule != TAKE) piece->error += squares(memory + start, count, piece->threshold);
        if (rank) send_bits(plan, row, piece, start, bits, words, rank);
        else list_bits(plan, row, start, bits, words, hits);
        if (step->measure && plan->rule == TAKE) piece->error += squares(memory + start, count, INFINITY);
    }
    piece->count = hits->length - piece->first;
}

/* The threshold of the first pass: a little under the last step's, or infinite (non-finite p only). */
static float first_threshold(const Plan *plan, size_t row, size_t segment) {
    if (plan->rule == THRESHOLD) return plan->threshold;
    if (plan->rule == TAKE || plan->k[segment] <= 0) return INFINITY;
    if (plan->rule == TOPK && (size_t)plan->k[segment] >= size_of(plan, segment)) return 0.0f;
    const float *hint = hint_of(plan, row, segment);
    if (!(hint[0] > 0.0f && hint[0] <= FLT_MAX)) return INFINITY;
    float slack = hint[1] >= 0.3f && hint[1] <= 0.99f ? hint[1] : 0.9f;
    return fmaxf(hint[0] * slack, FLT_TRUE_MIN);
}

/* So many that a hint must be stale. A Gaussian start is often exceeded 20 k times, but hardly by size / 8. */
static size_t most_hits(const Plan *plan, size_t segment) {
    return TILE + (plan->rule == TOPK ? 16 * (size_t)plan->k[segment] : size_of(plan, segment) / 8);
}

/* The first pass over a range: the pieces of one part of one row. */
static void sieve_range(void *context, size_t range) {
    Plan *plan = context;
    size_t row = range / plan->parts, part = range % plan->parts, rank = 0, found = 0;
    Piece *pieces = plan->pieces + row * plan->row_pieces;
    Piece *from = pieces + plan->row_pieces * part / plan->parts;
    Piece *to = pieces + plan->row_pieces * (part + 1) / plan->parts;
    int kind = (int)plan->step->grad_kind;
    int at_once = plan->step->slots >= 0 && (plan->rule == TAKE || (plan->rule == THRESHOLD && part == 0));
    if (plan->rule == TAKE && from < to) rank = picks_before(plan, row, from->start);
    float threshold = INFINITY;
    for (Piece *piece = from; piece < to; piece++) {
        size_t segment = piece->segment, before = rank;
        if (piece == from || segment != piece[-1].segment) {
            threshold = first_threshold(plan, row, segment);
            found = 0;
        }
        piece->threshold = threshold;
        sieve_piece(plan, row, piece, kind, &plan->hits[range], &plan->old[range], at_once ? &rank : NULL);
        piece->sent = at_once;
        piece->chosen = at_once ? rank - before : piece->count;
        found += piece->count;
        if (plan->k && threshold > 0.0f && found > most_hits(plan, segment)) {
            piece->overflowed = 1; /* a stale hint: do not drag all of the segment along */
            threshold = INFINITY;
        }
    }
}

/* Collects the hits of one segment anew, from the memory. */
static void collect(Plan *plan, size_t row, size_t segment, float threshold) {
    Hits *hits = &plan->retries[row * (size_t)plan->step->segments + segment];
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    hits->length = 0;
    for (; piece < end; piece++) {
        piece->threshold = threshold;
        piece->overflowed = 0;
        sieve_piece(plan, row, piece, IN_PLACE, hits, NULL, NULL);
    }
}

/* As `collect` with all that is not zero, and the first of the zeros up to k in all. */
static void collect_with_zeros(Plan *plan, size_t row, size_t segment, size_t zeros) {
    Hits *hits = &plan->retries[row * (size_t)plan->step->segments + segment];
    const float *memory = memory_of(plan, row);
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    hits->length = 0;
    for (; piece < end; piece++) {
        piece->hits = hits;
        piece->first = hits->length;
        for (size_t i = piece->start; i < piece->stop; i++)
            if (memory[i] != 0.0f || (zeros && zeros--)) push(hits, i, memory[i]);
        piece->count = hits->length - piece->first;
    }
}

static size_t hits_in(const Piece *piece, const Piece *end) {
    size_t count = 0;
    for (; piece < end; piece++) count += piece->count;
    return count;
}

/* The key of the k-th largest of the hits, by counting leading bits. Returns how many of that key are among the k. */
static size_t kth(const Piece *from, const Piece *end, size_t k, uint32_t *key) {
    static const uint32_t widths[] = {10, 11, 10};
    uint32_t prefix = 0, shift = 31;
    for (int level = 0; level < 3; level++) {
        uint32_t bins[2048] = {0}, above = shift, bin = (1u << widths[level]) - 1;
        shift -= widths[level];
        for (const Piece *piece = from; piece < end; piece++) {
            const float *value = piece->hits->value + piece->first;
            for (size_t i = 0; i < piece->count; i++) {
                uint32_t bits = key_of(value[i]);
                if (bits >> above == prefix) bins[bits >> shift & bin]++;
            }
        }
        for (; bins[bin] < k; bin--) k -= bins[bin];
        prefix = prefix << widths[level] | bin;
    }
    *key = prefix;
    return k;
}

/* A threshold that about k of a segment reach, rather more than fewer, from a sample of cache lines. */
static float estimate(const Plan *plan, size_t row, size_t segment, size_t k) {
    enum { RUNS = 1024, RUN = 16 };
    const float *memory = memory_of(plan, row) + plan->step->bounds[segment];
    size_t size = size_of(plan, segment), step = size / RUNS, rank = k;
    float copy[RUNS * RUN];
    Hits hits = {NULL, (float *)memory, size, size, 0};
    if (size > 4 * RUNS * RUN) {
        for (size_t run = 0; run < RUNS; run++) memcpy(copy + run * RUN, memory + run * step, sizeof(float) * RUN);
        hits = (Hits){NULL, copy, RUNS * RUN, RUNS * RUN, 0};
        double expected = (double)k * (double)hits.length / (double)size;
        rank = (size_t)(expected + 3 * sqrt(expected) + 3);
    }
    if (rank >= hits.length) return 0.0f;
    Piece all = {.hits = &hits, .count = hits.length};
    uint32_t key;
    kth(&all, &all + 1, rank, &key);
    return float_of(key);
}

/* Chooses the greater keys and the first `ties` of this key. */
static void choose(Plan *plan, size_t row, size_t segment, uint32_t key, size_t ties) {
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    for (; piece < end; piece++) {
        const float *value = piece->hits->value + piece->first;
        piece->key = key;
        piece->ties = 0;
        piece->chosen = count_greater(value, piece->count, (int32_t)key);
        if (ties && piece->chosen < piece->count) {
            size_t equal = count_greater(value, piece->count, (int32_t)key - 1) - piece->chosen;
            piece->ties = smaller(equal, ties);
            piece->chosen += piece->ties;
            ties -= ties == ALL_TIES ? 0 : piece->ties;
        }
    }
}

/* Steers the slack between too few hits, which cost a second pass, and too many, which cost time each. */
static void steer(float *hint, float threshold, size_t found, size_t k, int missed) {
    float slack = hint[1] >= 0.3f && hint[1] <= 0.99f ? hint[1] : 0.9f;
    if (missed) slack *= 0.95f;
    else if (found > 4 * k) slack += 0.05f * (1.0f - slack);
    hint[0] = threshold <= FLT_MAX ? fmaxf(threshold, FLT_TRUE_MIN) : 0.0f;
    hint[1] = fminf(fmaxf(slack, 0.3f), 0.99f);
}

static void choose_topk(Plan *plan, size_t row, size_t segment, size_t k) {
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    size_t found = hits_in(piece, end);
    int missed = found < k, overflowed = 0;
    float threshold = INFINITY;
    for (const Piece *p = piece; p < end; p++) {
        overflowed |= p->overflowed;
        threshold = fminf(threshold, p->threshold);
    }
    if (missed || overflowed) {
        int cold = !(threshold <= FLT_MAX), nonzeros = threshold <= FLT_TRUE_MIN && found < k;
        for (size_t goal = k; !nonzeros; goal *= 4) {
            threshold = fmaxf(estimate(plan, row, segment, goal), FLT_TRUE_MIN);
            collect(plan, row, segment, threshold);
            found = hits_in(piece, end);
            if (found >= k) break;
            nonzeros = threshold <= FLT_TRUE_MIN;
        }
        if (nonzeros) collect_with_zeros(plan, row, segment, k - found);
        missed = !cold && !nonzeros && !overflowed;
    }
    uint32_t key;
    size_t ties = kth(piece, end, k, &key);
    choose(plan, row, segment, key, ties);
    steer(hint_of(plan, row, segment), float_of(key), found, k, missed);
}

/* How many of a segment exceed t; all of them where t is negative or NaN. Collects anew where the hits do not reach. */
static size_t count_above(Plan *plan, size_t row, size_t segment, double t, float *lowest, int *missed) {
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    float limit = t >= 0.0 ? (float)t : -1.0f;
    for (const Piece *p = piece; p < end; p++)
        if (p->overflowed || p->threshold > fmaxf(limit, 0.0f)) {
            *missed |= !p->overflowed && p->threshold <= FLT_MAX;
            collect(plan, row, segment, fmaxf(limit * 0.95f, 0.0f));
            break;
        }
    *lowest = fminf(*lowest, limit);
    choose(plan, row, segment, limit < 0.0f ? 0 : key_of(limit), limit < 0.0f ? ALL_TIES : 0);
    size_t count = 0;
    for (; piece < end; piece++) count += piece->chosen;
    return count;
}

/* reference.refine: moves t until low * k <= count <= high * k, at most four times. */
static size_t refine(Plan *plan, size_t row, size_t segment, double t, size_t size, size_t k, double low, double high) {
    float *hint = hint_of(plan, row, segment), lowest = INFINITY;
    double under = 0.0, log_under = log((double)size), over = INFINITY, log_over = 0.0, goal = log((double)k);
    int missed = 0;
    size_t count = 0;
    for (int trial = 0; trial < 5; trial++) {
        count = count_above(plan, row, segment, t, &lowest, &missed);
        int near = low * (double)k <= (double)count && (double)count <= high * (double)k;
        if (near || trial == 4 || !isfinite(t)) break;
        double log_count = log(count ? (double)count : 0.5);
        if (count > k) {
            under = t;
            log_under = log_count;
        } else {
            over = t;
            log_over = log_count;
        }
        if (isfinite(over)) t = under + (over - under) * (log_under - goal) / (log_under - log_over);
        else t *= fmin(fmax((log((double)size) - goal) / fmax(log((double)size) - log_count, 1e-9), 1 + 1e-3), 4.0);
    }
    if (lowest > 0.0f) {
        Piece *end, *piece = pieces_of(plan, row, segment, &end);
        steer(hint, lowest, hits_in(piece, end), 2 * k, missed);
    }
    return count;
}

static void choose_gaussian(Plan *plan, size_t row, size_t segment, size_t size, size_t k) {
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    double sum = 0.0, squared = 0.0;
    for (; piece < end; piece++) {
        sum += piece->moments.sum;
        squared += piece->moments.squares;
    }
    double mean = sum / (double)size, variance = squared / (double)size - mean * mean;
    double t = k < size ? fabs(mean) + sqrt(variance < 0.0 ? 0.0 : variance) * plan->quantiles[segment] : -1.0;
    refine(plan, row, segment, t, size, k, 2.0 / 3.0, 4.0 / 3.0);
}

static void choose_sampled(Plan *plan, size_t row, size_t segment, size_t size, size_t k) {
    Piece *end, *piece = pieces_of(plan, row, segment, &end);
    double t = -1.0;
    uint32_t key;
    if (k < size) {
        Hits *hits = &plan->samples[row * (size_t)plan->step->segments + segment];
        Piece sample = {.hits = hits, .count = hits->length};
        size_t rank = (size_t)((double)(hits->length * k) / (double)size);
        kth(&sample, &sample + 1, rank ? rank : 1, &key);
        t = key >= 0x7f800000u ? FLT_MAX : float_of(key);
    }
    if ((double)refine(plan, row, segment, t, size, k, 0.8, 1.3) > 1.3 * (double)k) {
        size_t ties = kth(piece, end, k, &key);
        choose(plan, row, segment, key, ties);
    }
}

static void choose_segment(void *context, size_t item) {
    Plan *plan = context;
    size_t segments = (size_t)plan->step->segments, row = item / segments, segment = item % segments;
    size_t size = size_of(plan, segment);
    size_t k = plan->k[segment] > 0 ? smaller((size_t)plan->k[segment], size) : 0;
    if (k == 0) choose(plan, row, segment, NO_KEY, 0);
    else if (plan->rule == TOPK) choose_topk(plan, row, segment, k);
    else if (plan->rule == GAUSSIAN) choose_gaussian(plan, row, segment, size, k);
    else choose_sampled(plan, row, segment, size, k);
}

static void run(Plan *plan) {
    Step *step = plan->step;
    size_t workers = (size_t)step->workers, ranges = workers * plan->parts, most = 0;
    for_each(ranges, (size_t)step->threads, sieve_range, plan);
    if (plan->k) for_each(workers * (size_t)step->segments, (size_t)step->threads, choose_segment, plan);
    for (size_t range = 0; range < ranges; range++)
        if (plan->hits[range].length > most) most = plan->hits[range].length;
    step->scratch_wanted = (int64_t)((most + TILE + GROUP) * 8 * ranges);
    for (size_t row = 0; row < workers; row++) {
        size_t rank = 0;
        Piece *piece = plan->pieces + row * plan->row_pieces;
        for (Piece *end = piece + plan->row_pieces; piece < end; piece++) {
            piece->rank = rank;
            rank += piece->chosen;
        }
        step->totals[row] = (int64_t)rank;
    }
}

void gradsieve_threshold(Step *step, double threshold) {
    Plan *plan = make_plan(step, THRESHOLD);
    plan->threshold = (float)threshold;
    run(plan);
}

void gradsieve_topk(Step *step, const int64_t *k, float *hints) {
    Plan *plan = make_plan(step, TOPK);
    plan->k = k;
    plan->hints = hints;
    run(plan);
}

void gradsieve_gaussiank(Step *step, const int64_t *k, const double *quantiles, float *hints) {
    Plan *plan = make_plan(step, GAUSSIAN);
    plan->k = k;
    plan->quantiles = quantiles;
    plan->hints = hints;
    run(plan);
}

void gradsieve_sampledk(Step *step, const int64_t *k, int64_t stride, int64_t start, float *hints) {
    Plan *plan = make_plan(step, SAMPLED);
    plan->k = k;
    plan->hints = hints;
    plan->stride = (size_t)stride;
    plan->start = (size_t)start;
    for (size_t row = 0, i = 0; row < (size_t)step->workers; row++)
        for (size_t s = 0; s < (size_t)step->segments; s++, i++) {
            if (size_of(plan, s) == 0) continue;
            size_t length = (size_of(plan, s) - sample_start(plan, s) + plan->stride - 1) / plan->stride;
            reserve(&plan->samples[i], length);
            plan->samples[i].length = length;
        }
    run(plan);
}

/* Takes picked coordinates; the slots must be there. */
void gradsieve_take(Step *step, const uint32_t *picks, const int64_t *picked, int64_t room) {
    Plan *plan = make_plan(step, TAKE);
    plan->picks = picks;
    plan->picked = picked;
    plan->room = (size_t)room;
    run(plan);
}

static void send_piece(void *context, size_t item) {
    Plan *plan = context;
    Piece *piece = &plan->pieces[item];
    if (!piece->sent) send_hits(plan, item / plan->row_pieces, piece);
}

static void put_back_old(const Plan *plan, size_t row, size_t *count, double *error) {
    for (Hits *old = plan->old + row * plan->parts, *end = old + plan->parts; old < end; old++) {
        *count += old->length;
        for (size_t i = 0; i < old->length; i++) {
            memory_of(plan, row)[old->index[i]] = old->value[i];
            *error += (double)old->value[i] * (double)old->value[i];
        }
    }
}

/* Packs what was chosen into the slots, finishes the memory and frees the plan. */
void gradsieve_send(Step *step) {
    Plan *plan = step->plan;
    size_t workers = (size_t)step->workers, slots = (size_t)step->slots;
    size_t blocks = ((size_t)step->size + BLOCK - 1) / BLOCK;
    size_t lists = 2 * workers * (plan->parts + (size_t)step->segments);
    for_each(workers * plan->row_pieces, (size_t)step->threads, send_piece, plan);
    for (size_t row = 0; row < workers; row++) {
        int32_t *counts = step->counts + (int64_t)row * step->counts_stride;
        size_t nonfinite = 0;
        double error = 0.0;
        zero(counts, blocks * sizeof *counts);
        Piece *piece = plan->pieces + row * plan->row_pieces;
        for (Piece *end = piece + plan->row_pieces; piece < end; piece++) {
            size_t sent = smaller(piece->rank + piece->chosen, slots) - smaller(piece->rank, slots);
            counts[piece->start / BLOCK] += (int32_t)sent;
            error += piece->error;
        }
        put_back_old(plan, row, &nonfinite, &error);
        step->wanted[(int64_t)row * step->wanted_stride] = (int32_t)step->totals[row];
        step->nonfinite[(int64_t)row * step->nonfinite_stride] = (int32_t)nonfinite;
        if (step->measure) step->error[row] = error;
    }
    for (size_t i = 0; i < lists; i++) release(&plan->hits[i]);
    free(plan->hits);
    free(plan->owns);
    free(plan->pieces);
    free(plan);
    step->plan = NULL;
}

/* Sorts numbers below `limit`, digit by digit, and drops repetitions. Returns how many are left. */
static size_t sort(uint32_t *numbers, size_t count, size_t limit) {
    uint32_t bits = 1, ends[4096], passes, width;
    size_t i = 1, left = 0;
    while (bits < 32 && limit > (size_t)1 << bits) bits++;
    passes = bits <= 24 ? 2 : 3;
    width = (bits + passes - 1) / passes;
    while (i < count && numbers[i - 1] < numbers[i]) i++;
    if (i >= count) return count;
    uint32_t *from = numbers, *other = need(malloc(count * sizeof *other)), *to = other;
    for (uint32_t pass = 0; pass < passes; pass++) {
        uint32_t shift = pass * width, mask = (1u << width) - 1, end = 0;
        memset(ends, 0, sizeof ends);
        for (i = 0; i < count; i++) ends[from[i] >> shift & mask]++;
        for (uint32_t digit = 0; digit <= mask; digit++) {
            uint32_t same = ends[digit];
            ends[digit] = end;
            end += same;
        }
        for (i = 0; i < count; i++) to[ends[from[i] >> shift & mask]++] = from[i];
        uint32_t *swap = from;
        from = to;
        to = swap;
    }
    for (i = 0; i < count; i++)
        if (left == 0 || from[i] != numbers[left - 1]) numbers[left++] = from[i];
    free(other);
    return left;
}

static size_t draw_segment(uint32_t *picks, size_t begin, size_t size, size_t k, uint32_t key) {
    uint32_t half = (33u - (uint32_t)__builtin_clz(size > 2 ? (uint32_t)size - 1 : 1u)) / 2, walk[256];
    size_t drawn = 0;
    for (size_t slot = 0, waiting = 0; slot < k || waiting;) { /* results outside of the segment go round again */
        while (waiting < 256 && slot < k) walk[waiting++] = (uint32_t)slot++;
        feistel(walk, waiting, half, key);
        size_t outside = 0;
        for (size_t i = 0; i < waiting; i++) { /* both are written: a branch would be guessed wrong too often */
            uint32_t at = walk[i];
            picks[drawn] = (uint32_t)begin + at;
            walk[outside] = at;
            drawn += at < size;
            outside += at >= size;
        }
        waiting = outside;
    }
    return drawn;
}

/* Picks the first k of each segment's keyed permutation, as reference.draw. */
void gradsieve_draw(const Step *step, const int64_t *k, const int64_t *keys, uint32_t *picks, int64_t *picked,
                    int64_t room) {
    size_t segments = (size_t)step->segments;
    for (size_t row = 0; row < (size_t)step->workers; row++) {
        const int64_t *row_keys = keys + row * segments;
        uint32_t *row_picks = picks + row * (size_t)room;
        if (row && room && memcmp(keys, row_keys, segments * sizeof *keys) == 0) {
            memcpy(row_picks, picks, (size_t)room * sizeof *picks);
            picked[row] = picked[0];
            continue;
        }
        size_t count = 0;
        for (size_t s = 0; s < segments; s++) {
            size_t begin = (size_t)step->bounds[s], size = (size_t)step->bounds[s + 1] - begin;
            size_t slots = k[s] > 0 ? smaller((size_t)k[s], size) : 0;
            if (slots) count += draw_segment(row_picks + count, begin, size, slots, (uint32_t)row_keys[s]);
        }
        picked[row] = (int64_t)sort(row_picks, count, (size_t)step->size);
    }
}

/* Picks given coordinates. Returns whether all are inside. */
int gradsieve_pick(const Step *step, const int64_t *index, uint32_t *picks, int64_t *picked, int64_t room) {
    for (int64_t row = 0; row < step->workers; row++) {
        for (int64_t i = 0; i < room; i++) {
            int64_t at = index[row * room + i];
            if (at < 0 || at >= step->size) return 0;
            picks[row * room + i] = (uint32_t)at;
        }
        picked[row] = (int64_t)sort(picks + row * room, (size_t)room, (size_t)step->size);
    }
    return 1;
}
