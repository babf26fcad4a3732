/* The pass: sieves pieces tile by tile, sends what is found while it is in the cache, or lists it for a choice. */
#include "native_plan.h"

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

/* Where elements are going to be sent, and picks come from: the pass has driven it out of the caches. */
INLINE void fetch(const Slots *slots, size_t rank) {
    __builtin_prefetch((const char *)slots->values + (rank + 32) * (slots->kind == F32 ? 4 : 2), 1);
    __builtin_prefetch(slots->offsets + rank + 64, 1);
}

/* Sends one element, if there is a slot; the memory keeps what rounding left of it, which is returned. */
INLINE float send(const Slots *slots, size_t rank, float *memory, uint32_t index, float value) {
    if (rank >= slots->count) return value;
    value -= put(slots->kind, slots->values, rank, value);
    slots->offsets[rank] = (uint16_t)(index % BLOCK);
    return memory[index] = value;
}

INLINE double square_if_finite(float x) { return fabsf(x) <= FLT_MAX ? (double)x * (double)x : 0.0; }

/* What the sieve found in one tile. */
typedef struct {
    size_t start, count;
    uint64_t found, bits[TILE / GROUP]; /* words that have a bit, and all words */
} Tile;

static void send_bits(const Plan *plan, size_t row, Piece *piece, const Tile *tile, size_t *rank) {
    const Slots slots = slots_of(plan, row);
    float *memory = memory_of(plan, row);
    size_t next = *rank;
    int measured = (int)plan->step->measure;
    fetch(&slots, next);
    for (uint64_t words = tile->found; words; words &= words - 1) {
        size_t word = (size_t)__builtin_ctzll(words);
        for (uint64_t left = tile->bits[word]; left; left &= left - 1) {
            uint32_t index = (uint32_t)(tile->start + word * GROUP + (size_t)__builtin_ctzll(left));
            float rest = send(&slots, next++, memory, index, memory[index]);
            if (measured) piece->error += square_if_finite(rest);
        }
    }
    *rank = next;
}

static void list_bits(const Plan *plan, size_t row, const Tile *tile, Hits *hits) {
    const float *memory = memory_of(plan, row);
    reserve(hits, (size_t)__builtin_popcountll(tile->found) * GROUP);
    size_t length = hits->length;
    for (uint64_t words = tile->found; words; words &= words - 1) {
        size_t word = (size_t)__builtin_ctzll(words);
        for (uint64_t left = tile->bits[word]; left; left &= left - 1, length++) {
            size_t index = tile->start + word * GROUP + (size_t)__builtin_ctzll(left);
            hits->index[length] = (uint32_t)index;
            hits->value[length] = memory[index];
        }
    }
    hits->length = length;
}

/* Bits of up to TILE listed values: whether a key is greater than the limit. Returns which words have one. */
static uint64_t bits_of_list(const float *value, size_t count, int32_t limit, uint64_t *bits) {
    Job job = {.memory = (float *)value, .limit = limit < NAN_KEY ? limit : INT32_MAX}; /* nothing is above a NaN */
    return sieve(IN_PLACE, &job, 0, count, bits);
}

/* How many listed values have a greater key. */
size_t count_greater(const float *value, size_t count, int32_t limit) {
    size_t found = 0;
    for (size_t start = 0; start < count; start += TILE) {
        uint64_t bits[TILE / GROUP];
        uint64_t words = bits_of_list(value + start, smaller(TILE, count - start), limit, bits);
        for (; words; words &= words - 1) found += (size_t)__builtin_popcountll(bits[__builtin_ctzll(words)]);
    }
    return found;
}

/* Sends a piece's chosen hits. */
void send_hits(const Plan *plan, size_t row, Piece *piece) {
    const Slots slots = slots_of(plan, row);
    float *memory = memory_of(plan, row);
    const uint32_t *index = piece->hits->index + piece->first;
    const float *value = piece->hits->value + piece->first;
    size_t rank = piece->rank, end = rank + piece->chosen;
    int measured = (int)plan->step->measure;
    if (measured) piece->error += squares(value, piece->count, piece->key < 0x7f800000u ? float_of(piece->key) : INFINITY);
    for (size_t start = 0; start < piece->count && (rank < end || measured); start += TILE) {
        uint64_t bits[TILE / GROUP];
        uint64_t words = bits_of_list(value + start, smaller(TILE, piece->count - start), (int32_t)piece->key - 1, bits);
        for (; words; words &= words - 1) {
            size_t word = (size_t)__builtin_ctzll(words);
            for (uint64_t left = bits[word]; left; left &= left - 1) {
                size_t i = start + word * GROUP + (size_t)__builtin_ctzll(left);
                int sent = key_of(value[i]) != piece->key || (piece->ties && piece->ties--);
                float rest = sent ? send(&slots, rank++, memory, index[i], value[i]) : value[i];
                if (measured) piece->error += square_if_finite(rest);
            }
        }
    }
}

/* Where a segment's strided sample begins, counted from the segment's start. */
size_t sample_start(const Plan *plan, size_t segment) {
    return plan->start % smaller(plan->stride, size_of(plan, segment));
}

static void take_sample(const Plan *plan, size_t row, const Piece *piece, size_t start, size_t stop) {
    size_t first = (size_t)plan->step->bounds[piece->segment] + sample_start(plan, piece->segment);
    size_t number = start <= first ? 0 : (start - first + plan->stride - 1) / plan->stride;
    Hits *sample = &plan->samples[row * (size_t)plan->step->segments + piece->segment];
    for (size_t i = first + number * plan->stride; i < stop; i += plan->stride)
        sample->value[number++] = memory_of(plan, row)[i];
}

/* Sends the picks that lie in a tile; `rank` is the number of the first. */
static void send_picks(const Plan *plan, size_t row, const Tile *tile, size_t *rank) {
    const Slots slots = slots_of(plan, row);
    const uint32_t *picks = plan->picks + row * plan->room;
    float *memory = memory_of(plan, row);
    size_t stop = tile->start + tile->count, end = (size_t)plan->picked[row], next = *rank;
    fetch(&slots, next);
    __builtin_prefetch(picks + next + 32);
    for (; next < end && picks[next] < stop; next++) send(&slots, next, memory, picks[next], memory[picks[next]]);
    *rank = next;
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

/* With `rank`, what is found in a tile is sent while it is in the cache; else it is listed. */
static void serve(const Plan *plan, size_t row, Piece *piece, const Tile *tile, Hits *hits, size_t *rank) {
    float *memory = memory_of(plan, row) + tile->start;
    if (plan->rule == TAKE) send_picks(plan, row, tile, rank);
    else if (rank) send_bits(plan, row, piece, tile, rank);
    else list_bits(plan, row, tile, hits);
    if (plan->step->measure && plan->rule == TAKE) piece->error += squares(memory, tile->count, INFINITY);
}

/* Sieves one piece, tile by tile. A tile is served after the next one is sieved: what was just written is on its way to
 * the cache, and reading it would wait for it. */
static void sieve_piece(const Plan *plan, size_t row, Piece *piece, int kind, Hits *hits, Hits *old, size_t *rank) {
    const Step *step = plan->step;
    float *memory = memory_of(plan, row);
    const void *grad = row_of(step->grad, (int)step->grad_kind, step->grad_stride, row);
    int32_t limit = piece->threshold > 0.0f ? (int32_t)bits_of(piece->threshold) - 1 : -1;
    Job job = {grad, memory, (float)step->decay, (float)step->gain, limit, old};
    Tile tiles[2] = {0};
    size_t turn = 0;
    piece->hits = hits;
    piece->first = hits->length;
    piece->key = 0;
    piece->ties = ALL_TIES;
    piece->error = 0.0;
    for (size_t start = piece->start, stop; start < piece->stop; start = stop, turn ^= 1) {
        Tile *tile = &tiles[turn];
        stop = smaller(start / TILE * TILE + TILE, piece->stop);
        tile->start = start;
        tile->count = stop - start;
        tile->found = sieve(kind, &job, start, stop, tile->bits);
        if (plan->rule == SAMPLED && kind != IN_PLACE) take_sample(plan, row, piece, start, stop);
        if (plan->rule == GAUSSIAN && kind != IN_PLACE) {
            Moments moments = measure(memory + start, tile->count);
            piece->moments.sum += moments.sum;
            piece->moments.squares += moments.squares;
        }
        if (step->measure && plan->rule != TAKE) piece->error += squares(memory + start, tile->count, piece->threshold);
        if (start > piece->start) serve(plan, row, piece, &tiles[turn ^ 1], hits, rank);
    }
    if (piece->start < piece->stop) serve(plan, row, piece, &tiles[turn ^ 1], hits, rank);
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
void sieve_range(void *context, size_t range) {
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
void collect(Plan *plan, size_t row, size_t segment, float threshold) {
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
void collect_with_zeros(Plan *plan, size_t row, size_t segment, size_t zeros) {
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
