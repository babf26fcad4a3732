/* What the C files share: number formats, a growing list of hits, threads. */
#ifndef GRADSIEVE_NATIVE_H
#define GRADSIEVE_NATIVE_H

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 65536u
#define INLINE static inline __attribute__((always_inline))
#define INTERNAL __attribute__((visibility("hidden")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum { F32, BF16, F16, IN_PLACE }; /* the last: no gradient, the memory holds p already */

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static inline void zero(void *to, size_t bytes) {
    if (bytes) memset(to, 0, bytes); /* nothing to zero may come as a null pointer */
}

static inline void *need(void *memory) {
    if (memory == NULL) {
        fputs("gradsieve: out of memory\n", stderr);
        abort();
    }
    return memory;
}

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

static inline const void *row_of(const void *base, int kind, int64_t stride, size_t row) {
    return (const char *)base + (int64_t)row * stride * (kind == F32 ? 4 : 2);
}

/* Rounds to the wire's precision, saturating; returns what receivers will read. */
INLINE float put(int kind, void *to, size_t i, float x) {
    float limit = kind == F32 ? FLT_MAX : kind == BF16 ? 0x1.fep127f : 65504.0f;
    store(kind, to, i, x > limit ? limit : x < -limit ? -limit : x);
    return load(kind, to, i);
}

/* A list of coordinates with their values, in scratch memory until it outgrows it */

typedef struct {
    uint32_t *index;
    float *value;
    size_t length, capacity;
    int owned;
} Hits;

static inline void reserve(Hits *hits, size_t more) {
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

static inline void push(Hits *hits, size_t index, float value) {
    reserve(hits, 1);
    hits->index[hits->length] = (uint32_t)index;
    hits->value[hits->length++] = value;
}

static inline void release(Hits *hits) {
    if (!hits->owned) return;
    free(hits->index);
    free(hits->value);
}

typedef struct {
    void (*work)(void *context, size_t item);
    void *context;
    size_t count, next;
} Loop;

static inline void *drain(void *argument) {
    Loop *loop = argument;
    size_t i;
    while ((i = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < loop->count) loop->work(loop->context, i);
    return NULL;
}

static inline void for_each(size_t count, size_t threads, void (*work)(void *, size_t), void *context) {
    Loop loop = {work, context, count, 0};
    pthread_t helpers[64];
    size_t started = 0;
    threads = smaller(smaller(threads, count), 64);
    while (started + 1 < threads && pthread_create(&helpers[started], NULL, drain, &loop) == 0) started++;
    drain(&loop);
    while (started > 0) pthread_join(helpers[--started], NULL);
}

#endif
