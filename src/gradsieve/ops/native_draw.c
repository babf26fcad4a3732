/* Random rules: which coordinates they take. */
#include "native_plan.h"

/* Sorts numbers below `limit`, digit by digit. */
static void sort(uint32_t *numbers, size_t count, size_t limit) {
    uint32_t bits = 1, ends[3][4096];
    if (count < 2) return;
    while (bits < 32 && limit > (size_t)1 << bits) bits++;
    uint32_t passes = bits <= 24 ? 2 : 3, width = (bits + passes - 1) / passes, mask = (1u << width) - 1;
    uint32_t *from = numbers, *other = need(malloc(count * sizeof *other)), *to = other;
    memset(ends, 0, passes * sizeof *ends);
    for (size_t i = 0; i < count; i++) {
        if (i % 16 == 0) __builtin_prefetch(other + i, 1);
        for (uint32_t pass = 0; pass < passes; pass++) ends[pass][numbers[i] >> pass * width & mask]++;
    }
    for (uint32_t pass = 0; pass < passes; pass++) {
        uint32_t shift = pass * width, end = 0;
        for (uint32_t digit = 0; digit <= mask; digit++) {
            uint32_t same = ends[pass][digit];
            ends[pass][digit] = end;
            end += same;
        }
        for (size_t i = 0; i < count; i++) to[ends[pass][from[i] >> shift & mask]++] = from[i];
        uint32_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != numbers) memcpy(numbers, from, count * sizeof *numbers);
    free(other);
}

/* Sorts them, and drops repetitions. Returns how many are left. */
static size_t sort_once(uint32_t *numbers, size_t count, size_t limit) {
    size_t i = 1, left = 0;
    while (i < count && numbers[i - 1] < numbers[i]) i++;
    if (i >= count) return count;
    sort(numbers, count, limit);
    for (i = 0; i < count; i++)
        if (left == 0 || numbers[i] != numbers[left - 1]) numbers[left++] = numbers[i];
    return left;
}

static size_t draw_segment(uint32_t *picks, size_t begin, size_t size, size_t k, uint32_t key) {
    uint32_t half = (33u - (uint32_t)__builtin_clz(size > 2 ? (uint32_t)size - 1 : 1u)) / 2, walk[256];
    size_t drawn = 0;
    for (size_t slot = 0, waiting = 0; slot < k || waiting;) { /* results outside of the segment go round again */
        while (waiting < 256 && slot < k) walk[waiting++] = (uint32_t)slot++;
        for (size_t ahead = 256; ahead < 512; ahead += 16) __builtin_prefetch(picks + drawn + ahead, 1);
        size_t outside = walk_on(walk, waiting, half, key, (uint32_t)begin, (uint32_t)size, picks + drawn);
        drawn += waiting - outside;
        waiting = outside;
    }
    return drawn;
}

/* Picks the first k of each segment's keyed permutation, as reference.draw. */
void draw(const Step *step, const int64_t *k, const int64_t *keys, uint32_t *picks, int64_t *picked, int64_t room) {
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
        sort(row_picks, count, (size_t)step->size);
        picked[row] = (int64_t)count;
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
        picked[row] = (int64_t)sort_once(picks + row * room, (size_t)room, (size_t)step->size);
    }
    return 1;
}
