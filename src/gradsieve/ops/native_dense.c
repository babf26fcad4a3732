/* The ops that go back to dense: decode, mean, give_back, clear, bitmaps, and misplaced, the check before them. */
#include "native.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 16u /* coordinates in a cache line */
#define CACHED (1u << 20) /* coordinates: a larger result has left the cache before anyone reads it */
#define AHEAD 512u /* coordinates */

INLINE void divide_line(float *line, float divisor, float factor) {
    if (factor != 0.0f)
        for (size_t i = 0; i < LINE; i++) line[i] *= factor;
    else
        for (size_t i = 0; i < LINE; i++) line[i] /= divisor;
}

/* Writes a line of the result; `through`: past the cache, which would read it first. */
INLINE void put_line(int kind, void *out, size_t at, const float *line, int through) {
    if (kind != F32) {
        for (size_t i = 0; i < LINE; i++) store(kind, out, at + i, line[i]);
        return;
    }
    float *to = (float *)out + at;
#if defined(__SSE2__)
    if (through) {
        for (size_t i = 0; i < LINE; i += 4) _mm_stream_ps(to + i, _mm_load_ps(line + i));
        return;
    }
#endif
    (void)through;
    memcpy(to, line, LINE * sizeof *to);
}

typedef struct {
    int64_t workers, size, threads, kind, out_kind;
    double divisor;
    const void *rows;
    int64_t stride;
    void *out;
} Mean;

/* 1 / divisor where multiplying by it rounds as dividing does, else 0. */
static float factor_of(float divisor) {
    int exponent;
    float factor = 1.0f / divisor;
    return frexpf(divisor, &exponent) == 0.5f && factor >= FLT_MIN && factor <= FLT_MAX ? factor : 0.0f;
}

INLINE void sum_rows(int kind, const Mean *mean, size_t start, size_t count, float *total) {
    for (size_t i = 0; i < count; i++) total[i] = load(kind, mean->rows, start + i);
    for (size_t row = 1; row < (size_t)mean->workers; row++) {
        const void *from = row_of(mean->rows, kind, mean->stride, row);
        for (size_t i = 0; i < count; i++) total[i] += load(kind, from, start + i);
    }
}

/* A line at a time. Read ahead by hand: what is written past the cache makes the loads wait. */
INLINE void mean_lines(int kind, int out_kind, const Mean *mean, size_t start, size_t stop, int through) {
    float divisor = (float)mean->divisor, factor = factor_of(divisor);
    _Alignas(64) float total[LINE];
    for (; start + LINE <= stop; start += LINE) {
        for (size_t row = 0; row < (size_t)mean->workers; row++)
            __builtin_prefetch(row_of(row_of(mean->rows, kind, mean->stride, row), kind, 1, start + AHEAD));
        sum_rows(kind, mean, start, LINE, total);
        divide_line(total, divisor, factor);
        put_line(out_kind, mean->out, start, total, through);
    }
    sum_rows(kind, mean, start, stop - start, total);
    for (size_t i = 0; start + i < stop; i++) store(out_kind, mean->out, start + i, total[i] / divisor);
}

static void mean_block(void *context, size_t block) {
    const Mean *mean = context;
    size_t start = block * BLOCK, stop = smaller(start + BLOCK, (size_t)mean->size);
    int kind = (int)mean->kind, out_kind = (int)mean->out_kind;
    int through = mean->size >= CACHED && (uintptr_t)mean->out % 16 == 0;
    if (kind == F32 && out_kind == F32 && through) mean_lines(F32, F32, mean, start, stop, 1);
    else mean_lines(kind, out_kind, mean, start, stop, 0);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void gradsieve_mean(Mean *mean) {
    for_each(((size_t)mean->size + BLOCK - 1) / BLOCK, (size_t)mean->threads, mean_block, mean);
}

/* A Sparse and the dense tensor it meets. */
typedef struct {
    int64_t workers, size, slots, threads, value_kind, out_kind;
    double divisor;
    const int32_t *counts;
    int64_t counts_stride;
    const uint16_t *offsets;
    int64_t offsets_stride;
    const void *values;
    int64_t values_stride;
    void *out; /* decode: one row; give_back and clear: one a worker */
    int64_t out_stride;
    size_t *starts; /* the first slot of each block, [workers][blocks] */
} Meeting;

static size_t blocks_of(const Meeting *meeting) { return ((size_t)meeting->size + BLOCK - 1) / BLOCK; }

/* Finds where blocks start. Returns whether every element has a slot and a coordinate. */
static int find_starts(Meeting *meeting) {
    size_t blocks = blocks_of(meeting), tail = (size_t)meeting->size % BLOCK;
    for (size_t row = 0; row < (size_t)meeting->workers; row++) {
        const int32_t *counts = meeting->counts + (int64_t)row * meeting->counts_stride;
        const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
        size_t start = 0;
        for (size_t block = 0; block < blocks; block++) {
            if (counts[block] < 0) return 0;
            meeting->starts[row * blocks + block] = start;
            start += (size_t)counts[block];
        }
        if (start > (size_t)meeting->slots) return 0;
        for (size_t i = tail ? start - (size_t)counts[blocks - 1] : start; i < start; i++)
            if (offsets[i] >= tail) return 0;
    }
    return 1;
}

/* A block of the result while it is summed: in the cache, where the result itself is not. */
typedef struct {
    _Alignas(64) float total[BLOCK];
    uint8_t touched[BLOCK / LINE]; /* lines that are not zero */
} Sum;

static _Thread_local Sum sum_of_thread; /* zero between two blocks */

INLINE void add_kind(int kind, Sum *sum, const uint16_t *offsets, const void *values, size_t start, size_t stop) {
    for (size_t i = start; i < stop; i++) {
        sum->total[offsets[i]] += load(kind, values, i);
        sum->touched[offsets[i] / LINE] = 1;
    }
}

static void add_block(const Meeting *meeting, size_t block, Sum *sum) {
    for (size_t row = 0; row < (size_t)meeting->workers; row++) {
        size_t start = meeting->starts[row * blocks_of(meeting) + block];
        size_t stop = start + (size_t)meeting->counts[(int64_t)row * meeting->counts_stride + (int64_t)block];
        const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
        const void *values = row_of(meeting->values, (int)meeting->value_kind, meeting->values_stride, row);
        switch (meeting->value_kind) {
        case F32: add_kind(F32, sum, offsets, values, start, stop); break;
        case BF16: add_kind(BF16, sum, offsets, values, start, stop); break;
        default: add_kind(F16, sum, offsets, values, start, stop);
        }
    }
}

/* Divides the sum of [start, stop), writes it to the result and leaves zeros. */
INLINE void put_sum(int kind, const Meeting *meeting, Sum *sum, size_t start, size_t stop, int through) {
    static const _Alignas(64) float nothing[LINE];
    void *out = meeting->out;
    float divisor = (float)meeting->divisor, factor = factor_of(divisor), *line = sum->total;
    const uint8_t *touched = sum->touched;
    for (; start + LINE <= stop; start += LINE, line += LINE) {
        if (!*touched++) {
            put_line(kind, out, start, nothing, through);
            continue;
        }
        divide_line(line, divisor, factor);
        put_line(kind, out, start, line, through);
        memset(line, 0, LINE * sizeof *line);
    }
    for (; start < stop; start++, *line++ = 0.0f) store(kind, out, start, *line / divisor);
    memset(sum->touched, 0, sizeof sum->touched);
}

static void decode_block(void *context, size_t block) {
    const Meeting *meeting = context;
    size_t start = block * BLOCK, stop = smaller(start + BLOCK, (size_t)meeting->size);
    Sum *sum = &sum_of_thread;
    add_block(meeting, block, sum);
    if (meeting->out_kind == BF16) put_sum(BF16, meeting, sum, start, stop, 0);
    else if (meeting->out_kind == F16) put_sum(F16, meeting, sum, start, stop, 0);
    else if (meeting->size < CACHED || (uintptr_t)meeting->out % 16) put_sum(F32, meeting, sum, start, stop, 0);
    else put_sum(F32, meeting, sum, start, stop, 1);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static int meet(Meeting *meeting, size_t items, void (*work)(void *, size_t)) {
    meeting->starts = need(malloc(((size_t)meeting->workers * blocks_of(meeting) + 1) * sizeof *meeting->starts));
    int valid = find_starts(meeting);
    if (valid) for_each(items, (size_t)meeting->threads, work, meeting);
    free(meeting->starts);
    return valid;
}

int gradsieve_decode(Meeting *meeting) { return meet(meeting, blocks_of(meeting), decode_block); }

static void give_back_block(void *context, size_t item) {
    const Meeting *meeting = context;
    size_t blocks = blocks_of(meeting), row = item / blocks, block = item % blocks, i = meeting->starts[item];
    size_t stop = i + (size_t)meeting->counts[(int64_t)row * meeting->counts_stride + (int64_t)block];
    const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
    const void *values = row_of(meeting->values, (int)meeting->value_kind, meeting->values_stride, row);
    float *memory = (float *)meeting->out + (int64_t)row * meeting->out_stride + block * BLOCK;
    for (; i < stop; i++) memory[offsets[i]] += load((int)meeting->value_kind, values, i);
}

int gradsieve_give_back(Meeting *meeting) {
    return meet(meeting, (size_t)meeting->workers * blocks_of(meeting), give_back_block);
}

static void clear_block(void *context, size_t item) {
    const Meeting *meeting = context;
    size_t blocks = blocks_of(meeting), row = item / blocks, block = item % blocks, i = meeting->starts[item];
    size_t stop = i + (size_t)meeting->counts[(int64_t)row * meeting->counts_stride + (int64_t)block];
    const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
    float *target = (float *)meeting->out + (int64_t)row * meeting->out_stride + block * BLOCK;
    for (; i < stop; i++) target[offsets[i]] = 0.0f;
}

int gradsieve_clear(Meeting *meeting) {
    return meet(meeting, (size_t)meeting->workers * blocks_of(meeting), clear_block);
}

typedef struct {
    const Meeting *meeting;
    uint8_t *bad; /* [workers] */
} Check;

/* A block is sound if its offsets ascend; in any other order each must be new. */
static int unsound(const uint16_t *offsets, size_t count, size_t size) {
    size_t i = 1;
    while (i < count && offsets[i - 1] < offsets[i]) i++;
    if (i >= count) return count > 0 && offsets[count - 1] >= size;
    uint64_t seen[BLOCK / 64] = {0};
    for (i = 0; i < count; i++) {
        uint64_t bit = (uint64_t)1 << offsets[i] % 64;
        if (offsets[i] >= size || seen[offsets[i] / 64] & bit) return 1;
        seen[offsets[i] / 64] |= bit;
    }
    return 0;
}

static void check_row(void *context, size_t row) {
    const Check *check = context;
    const Meeting *meeting = check->meeting;
    const int32_t *counts = meeting->counts + (int64_t)row * meeting->counts_stride;
    const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
    size_t start = 0;
    check->bad[row] = 1;
    for (size_t block = 0; block < blocks_of(meeting); block++) {
        size_t count = (size_t)counts[block];
        if (counts[block] < 0 || count > BLOCK || start + count > (size_t)meeting->slots) return;
        if (unsound(offsets + start, count, smaller(BLOCK, (size_t)meeting->size - block * BLOCK))) return;
        start += count;
    }
    check->bad[row] = 0;
}

void gradsieve_misplaced(const Meeting *meeting, uint8_t *bad) {
    Check check = {meeting, bad};
    for_each((size_t)meeting->workers, (size_t)meeting->threads, check_row, &check);
}

/* Sets the bit of each element; the bitmap has a whole number of bytes a row. */
void gradsieve_to_bitmap(const Meeting *meeting, uint8_t *bitmap, int64_t stride, int64_t width) {
    size_t blocks = blocks_of(meeting);
    for (size_t row = 0; row < (size_t)meeting->workers; row++) {
        const int32_t *counts = meeting->counts + (int64_t)row * meeting->counts_stride;
        const uint16_t *offsets = meeting->offsets + (int64_t)row * meeting->offsets_stride;
        uint8_t *to = bitmap + (int64_t)row * stride;
        zero(to, (size_t)width);
        for (size_t block = 0; block < blocks; block++, to += BLOCK / 8)
            for (const uint16_t *end = offsets + counts[block]; offsets < end; offsets++)
                to[*offsets / 8] |= (uint8_t)(1u << *offsets % 8);
    }
}

/* Lists the bits of one block as offsets, as far as there is room. Returns how many there are. */
static size_t list_bits(const uint8_t *bitmap, size_t bytes, uint16_t *offsets, size_t room) {
    size_t found = 0;
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = 0;
        memcpy(&bits, bitmap + at, smaller(8, bytes - at));
        for (; bits; bits &= bits - 1, found++)
            if (found < room) offsets[found] = (uint16_t)(8 * at + (size_t)__builtin_ctzll(bits));
    }
    return found;
}

/* Writes the offsets that a bitmap says; a row is wrong whose bits and counts disagree or lie past the end. */
void gradsieve_from_bitmap(const Meeting *meeting, const uint8_t *bitmap, int64_t stride, int64_t width,
                           uint8_t *wrong) {
    size_t blocks = blocks_of(meeting), size = (size_t)meeting->size, bytes = (size + 7) / 8;
    for (size_t row = 0; row < (size_t)meeting->workers; row++) {
        const int32_t *counts = meeting->counts + (int64_t)row * meeting->counts_stride;
        uint16_t *offsets = (uint16_t *)meeting->offsets + (int64_t)row * meeting->offsets_stride;
        const uint8_t *from = bitmap + (int64_t)row * stride;
        size_t room = (size_t)meeting->slots;
        wrong[row] = size % 8 && from[bytes - 1] >> size % 8 != 0;
        for (size_t at = bytes; at < (size_t)width; at++) wrong[row] |= from[at] != 0;
        for (size_t block = 0; block < blocks; block++) {
            size_t start = block * (BLOCK / 8);
            size_t found = list_bits(from + start, smaller(BLOCK / 8, bytes - start), offsets, room);
            wrong[row] |= counts[block] < 0 || found != (size_t)counts[block];
            offsets += smaller(found, room);
            room -= smaller(found, room);
        }
    }
}
