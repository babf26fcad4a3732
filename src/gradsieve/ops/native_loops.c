/* The inner loops: portable, which compilers vectorise for any CPU, and the sieve by hand for AVX2. */
#include "native_loops.h"

static __attribute__((noinline)) void
remember(const float *p, const float *memory, size_t start, size_t count, Hits *old) {
    for (size_t j = 0; j < count; j++)
        if (!(fabsf(p[j]) <= FLT_MAX)) push(old, start + j, memory[start + j]);
}

INLINE void sieve_plain(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    float *memory = job->memory;
    for (size_t i = start; i < stop; i += GROUP, bits++) {
        size_t count = smaller(GROUP, stop - i);
        float p[GROUP];
        uint32_t any = 0;
        for (size_t j = 0; j < count; j++) {
            p[j] = memory[i + j];
            if (kind != IN_PLACE) p[j] = p[j] * job->decay + load(kind, job->grad, i + j) * job->gain;
            any |= (int32_t)(bits_of(p[j]) & 0x7fffffffu) > job->limit;
        }
        *bits = 0;
        if (UNLIKELY(any)) {
            for (size_t j = 0; j < count; j++)
                *bits |= (uint64_t)((int32_t)(bits_of(p[j]) & 0x7fffffffu) > job->limit) << j;
            if (kind != IN_PLACE) remember(p, memory, i, count, job->old);
        }
        if (kind != IN_PLACE) memcpy(memory + i, p, count * sizeof *p);
    }
}

static void sieve_portable(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    switch (kind) { /* a constant kind lets the compiler vectorise each loop */
    case F32: sieve_plain(F32, job, start, stop, bits); break;
    case BF16: sieve_plain(BF16, job, start, stop, bits); break;
    case F16: sieve_plain(F16, job, start, stop, bits); break;
    default: sieve_plain(IN_PLACE, job, start, stop, bits);
    }
}

#define LANES 16u /* running sums, joined in one order: as many as keep the adders busy */

INLINE Moments measure_plain(const float *p, size_t count) {
    double sum[LANES] = {0}, squares[LANES] = {0};
    Moments moments = {0, 0};
    for (; count >= LANES; p += LANES, count -= LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            double x = p[lane];
            sum[lane] += x;
            squares[lane] += x * x;
        }
    for (size_t lane = 0; lane < LANES; lane++) {
        double x = lane < count ? p[lane] : 0.0;
        moments.sum += sum[lane] + x;
        moments.squares += squares[lane] + x * x;
    }
    return moments;
}

INLINE double squares_plain(const float *p, size_t count, float below) {
    double squares[LANES] = {0}, total = 0;
    for (; count >= LANES; p += LANES, count -= LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            double x = fabsf(p[lane]) < below ? p[lane] : 0.0f;
            squares[lane] += x * x;
        }
    for (size_t lane = 0; lane < LANES; lane++) {
        double x = lane < count && fabsf(p[lane]) < below ? p[lane] : 0.0f;
        total += squares[lane] + x * x;
    }
    return total;
}

static Moments measure_portable(const float *p, size_t count) { return measure_plain(p, count); }

static double squares_portable(const float *p, size_t count, float below) { return squares_plain(p, count, below); }

INLINE void feistel_plain(uint32_t *slots, size_t count, uint32_t half, uint32_t key) {
    uint32_t mask = (1u << half) - 1;
    for (size_t i = 0; i < count; i++) {
        uint32_t left = slots[i] >> half, right = slots[i] & mask;
        for (uint32_t round = 0; round < 6; round++) {
            uint32_t x = right + key + round * 0x9E3779B9u, old = right;
            x = (x ^ x >> 16) * 0x85EBCA6Bu;
            x = (x ^ x >> 13) * 0xC2B2AE35u;
            right = left ^ ((x ^ x >> 16) & mask);
            left = old;
        }
        slots[i] = left << half | right;
    }
}

static void feistel_portable(uint32_t *slots, size_t count, uint32_t half, uint32_t key) {
    feistel_plain(slots, count, half, key);
}

Sieve *sieve = sieve_portable;
Measure *measure = measure_portable;
Squares *squares = squares_portable;
Feistel *feistel = feistel_portable;

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,f16c")))

INLINE AVX2 __m256 load8(int kind, const void *from, size_t i) {
    if (kind == F32) return _mm256_loadu_ps((const float *)from + i);
    __m128i words = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + i));
    if (kind == F16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

INLINE AVX2 __m256i key8(__m256 p) { return _mm256_and_si256(_mm256_castps_si256(p), _mm256_set1_epi32(0x7fffffff)); }

/* As sieve_plain. `unit`: decay and gain are 1.
 * 256 bits on every CPU: where memory is the limit, wider vectors gain nothing. */
INLINE AVX2 void sieve_vectors(int kind, int unit, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    const __m256 decay = _mm256_set1_ps(job->decay), gain = _mm256_set1_ps(job->gain);
    const __m256i finite = _mm256_set1_epi32(0x7f7fffff);
    const __m256i limit = _mm256_set1_epi32(job->limit);
    float *memory = job->memory;
    size_t i = start;
    for (; i + GROUP <= stop; i += GROUP) {
        __m256 p[GROUP / 8];
        __m256i worst = _mm256_setzero_si256();
        uint64_t hits = 0;
        for (size_t v = 0; v < GROUP / 8; v++) {
            p[v] = _mm256_loadu_ps(memory + i + 8 * v);
            if (kind != IN_PLACE) {
                __m256 grad = load8(kind, job->grad, i + 8 * v);
                if (!unit) p[v] = _mm256_mul_ps(p[v], decay), grad = _mm256_mul_ps(grad, gain);
                p[v] = _mm256_add_ps(p[v], grad);
            }
            __m256i key = key8(p[v]);
            worst = _mm256_max_epi32(worst, key);
            uint32_t hit = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, limit)));
            hits |= (uint64_t)hit << 8 * v;
        }
        *bits++ = hits;
        if (kind == IN_PLACE) continue;
        if (UNLIKELY(_mm256_movemask_epi8(_mm256_cmpgt_epi32(worst, finite)))) {
            float copy[GROUP];
            for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(copy + 8 * v, p[v]);
            remember(copy, memory, i, GROUP, job->old);
        }
        for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(memory + i + 8 * v, p[v]);
    }
    if (i < stop) sieve_portable(kind, job, i, stop, bits);
}

INLINE AVX2 void sieve_kind(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    if (job->decay == 1.0f && job->gain == 1.0f) sieve_vectors(kind, 1, job, start, stop, bits);
    else sieve_vectors(kind, 0, job, start, stop, bits);
}

static AVX2 void sieve_avx2(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    switch (kind) {
    case F32: sieve_kind(F32, job, start, stop, bits); break;
    case BF16: sieve_kind(BF16, job, start, stop, bits); break;
    case F16: sieve_kind(F16, job, start, stop, bits); break;
    default: sieve_kind(IN_PLACE, job, start, stop, bits);
    }
}

static AVX2 Moments measure_avx2(const float *p, size_t count) { return measure_plain(p, count); }

static AVX2 double squares_avx2(const float *p, size_t count, float below) { return squares_plain(p, count, below); }

static AVX2 void feistel_avx2(uint32_t *slots, size_t count, uint32_t half, uint32_t key) {
    feistel_plain(slots, count, half, key);
}
#endif

/* Uses vectors by hand where this CPU has AVX2 and they are wanted. Returns whether it does. */
int gradsieve_vectors(int wanted) {
#if defined(__x86_64__)
    wanted = wanted && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"); /* never without f16c */
    sieve = wanted ? sieve_avx2 : sieve_portable;
    measure = wanted ? measure_avx2 : measure_portable;
    squares = wanted ? squares_avx2 : squares_portable;
    feistel = wanted ? feistel_avx2 : feistel_portable;
    return wanted;
#else
    (void)wanted;
    return 0;
#endif
}

static __attribute__((constructor)) void on_load(void) { gradsieve_vectors(1); }
