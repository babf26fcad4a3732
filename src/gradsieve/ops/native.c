/* The ops of reference.py for float32 memories on the CPU: one pass over gradient and memory.
 *
 * A pass writes p = decay * memory + gain * grad and collects the hits, those p that are not below a threshold.
 * A rule then chooses among the hits and `gradsieve_send` packs the chosen. The memory holds p, non-finite or not,
 * until the end; old values under a non-finite p wait in a list and are put back last.
 * Work is cut into pieces (the part of a segment in a block) and sums are taken piece by piece, so that no result
 * depends on the number of threads or of workers.
 */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 65536u
#define TILE 4096u /* coordinates that stay in the first-level cache between sieving and sending */
#define GROUP 64u  /* coordinates tested at once */
#define INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define ALL_TIES SIZE_MAX
#define NO_KEY UINT32_MAX

enum { F32, BF16, F16, IN_PLACE }; /* the last: no gradient, the memory holds p already */

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void *need(void *memory) {
    if (memory == NULL) {
        fputs("gradsieve: out of memory\n", stderr);
        abort();
    }
    return memory;
}

/* ---- numbers */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Orders magnitudes as integers; every NaN is one key above infinity. */
INLINE uint32_t key_of(float x) {
    uint32_t bits = bits_of(x) & 0x7fffffffu;
    return bits <= 0x7f800000u ? bits : 0x7f800001u;
}

INLINE float from_half(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    float x = float_of(magnitude) * 0x1p112f;
    uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits_of(x);
    return float_of(bits | sign);
}

INLINE uint16_t to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (magnitude < 0x38800000u) /* subnormal: adding 0.5 aligns and rounds the last bit */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (magnitude - 0x38000000u) >> 13);
}

INLINE uint16_t to_bfloat(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? 0x7fc0u : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

INLINE float load(int kind, const void *from, size_t i) {
    if (kind == F32) return ((const float *)from)[i];
    uint16_t word = ((const uint16_t *)from)[i];
    return kind == BF16 ? float_of((uint32_t)word << 16) : from_half(word);
}

INLINE void store(int kind, void *to, size_t i, float x) {
    if (kind == F32) ((float *)to)[i] = x;
    else ((uint16_t *)to)[i] = kind == BF16 ? to_bfloat(x) : to_half(x);
}

/* Rounds to the wire's precision, saturating; returns what receivers will read. */
INLINE float put(int kind, void *to, size_t i, float x) {
    float limit = kind == F32 ? FLT_MAX : kind == BF16 ? 0x1.fep127f : 65504.0f;
    store(kind, to, i, x > limit ? limit : x < -limit ? -limit : x);
    return load(kind, to, i);
}

/* ---- a list of coordinates with their values, in scratch memory until it outgrows it */

typedef struct {
    uint32_t *index;
    float *value;
    size_t length, capacity;
    int owned;
} Hits;

static void reserve(Hits *hits, size_t more) {
    size_t capacity = hits->length + more;
    if (capacity <= hits->capacity) return;
    capacity += capacity / 2;
    uint32_t *index = need(realloc(hits->owned ? hits->index : NULL, capacity * sizeof *index));
    float *value = need(realloc(hits->owned ? hits->value : NULL, capacity * sizeof *value));
    if (!hits->owned && hits->length) {
        memcpy(index, hits->index, hits->length * sizeof *index);
        memcpy(value, hits->value, hits->length * sizeof *value);
    }
    *hits = (Hits){index, value, hits->length, capacity, 1};
}

static void push(Hits *hits, size_t index, float value) {
    reserve(hits, 1);
    hits->index[hits->length] = (uint32_t)index;
    hits->value[hits->length++] = value;
}

static void release(Hits *hits) {
    if (!hits->owned) return;
    free(hits->index);
    free(hits->value);
}

/* ---- threads */

typedef struct {
    void (*work)(void *context, size_t item);
    void *context;
    size_t count, next;
} Loop;

static void *drain(void *argument) {
    Loop *loop = argument;
    for (size_t i; (i = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < loop->count;) loop->work(loop->context, i);
    return NULL;
}

static void for_each(size_t count, size_t threads, void (*work)(void *, size_t), void *context) {
    Loop loop = {work, context, count, 0};
    pthread_t helpers[64];
    size_t started = 0;
    threads = smaller(smaller(threads, count), 64);
    while (started + 1 < threads && pthread_create(&helpers[started], NULL, drain, &loop) == 0) started++;
    drain(&loop);
    while (started > 0) pthread_join(helpers[--started], NULL);
}

/* ---- the sieve: add [start, stop) of the gradient to the memory, append what is not below the threshold */

typedef struct {
    float decay, gain, threshold;
} Form;

typedef void Sieve(int kind, const void *grad, float *memory, size_t start, size_t stop, Form form, Hits *hits, Hits *old);

static __attribute__((noinline)) void remember(const float *p, const float *memory, size_t start, size_t count, Hits *old) {
    for (size_t j = 0; j < count; j++)
        if (!(fabsf(p[j]) <= FLT_MAX)) push(old, start + j, memory[start + j]);
}

INLINE void sieve_plain(int kind, const void *grad, float *memory, size_t start, size_t stop, Form form, Hits *hits, Hits *old) {
    reserve(hits, stop - start);
    for (size_t i = start; i < stop; i += GROUP) {
        size_t count = smaller(GROUP, stop - i);
        float p[GROUP];
        uint32_t any = 0;
        for (size_t j = 0; j < count; j++) {
            p[j] = kind == IN_PLACE ? memory[i + j] : memory[i + j] * form.decay + load(kind, grad, i + j) * form.gain;
            any |= !(fabsf(p[j]) < form.threshold);
        }
        if (UNLIKELY(any)) {
            size_t length = hits->length;
            for (size_t j = 0; j < count; j++) {
                hits->index[length] = (uint32_t)(i + j);
                hits->value[length] = p[j];
                length += !(fabsf(p[j]) < form.threshold);
                if (length == hits->capacity) reserve(hits, hits->capacity - hits->length + GROUP);
            }
            hits->length = length;
            if (kind != IN_PLACE) remember(p, memory, i, count, old);
        }
        if (kind != IN_PLACE) memcpy(memory + i, p, count * sizeof *p);
    }
}
