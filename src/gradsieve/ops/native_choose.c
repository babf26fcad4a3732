/* Which hits of a segment are sent: top-k exactly, Gaussian-k and sampled top-k by a threshold that is refined. */
#include "native_plan.h"

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

void choose_segment(void *context, size_t item) {
    Plan *plan = context;
    size_t segments = (size_t)plan->step->segments, row = item / segments, segment = item % segments;
    size_t size = size_of(plan, segment);
    size_t k = plan->k[segment] > 0 ? smaller((size_t)plan->k[segment], size) : 0;
    if (k == 0) choose(plan, row, segment, NO_KEY, 0);
    else if (plan->rule == TOPK) choose_topk(plan, row, segment, k);
    else if (plan->rule == GAUSSIAN) choose_gaussian(plan, row, segment, size, k);
    else choose_sampled(plan, row, segment, size, k);
}
