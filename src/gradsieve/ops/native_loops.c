/* The inner loops: portable, which compilers vectorise for any CPU, and the sieve by hand for AVX2 and AVX-512. */
#include "native_loops.h"

static __attribute__((noinline)) void
remember(const float *p, const float *memory, size_t start, size_t count, Hits *old) {
    for (size_t j = 0; j < count; j++)
        if (!(fabsf(p[j]) <= FLT_MAX)) push(old, start + j, memory[start + j]);
}

/* `word` is the number of the first group. */
INLINE uint64_t sieve_plain(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits, size_t word) {
    float *memory = job->memory;
    uint64_t found = 0;
    for (size_t i = start; i < stop; i += GROUP, word++) {
        size_t count = smaller(GROUP, stop - i);
        float p[GROUP];
        uint32_t any = 0;
        for (size_t j = 0; j < count; j++) {
            p[j] = memory[i + j];
            if (kind != IN_PLACE) p[j] = p[j] * job->decay + load(kind, job->grad, i + j) * job->gain;
            any |= (int32_t)(bits_of(p[j]) & 0x7fffffffu) > job->limit;
        }
        bits[word] = 0;
        if (UNLIKELY(any)) {
            for (size_t j = 0; j < count; j++)
                bits[word] |= (uint64_t)((int32_t)(bits_of(p[j]) & 0x7fffffffu) > job->limit) << j;
            found |= (uint64_t)1 << word;
            if (kind != IN_PLACE) remember(p, memory, i, count, job->old);
        }
        if (kind != IN_PLACE) memcpy(memory + i, p, count * sizeof *p);
    }
    return found;
}

static uint64_t sieve_rest(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits, size_t word) {
    switch (kind) { /* a constant kind lets the compiler vectorise each loop */
    case F32: return sieve_plain(F32, job, start, stop, bits, word);
    case BF16: return sieve_plain(BF16, job, start, stop, bits, word);
    case F16: return sieve_plain(F16, job, start, stop, bits, word);
    default: return sieve_plain(IN_PLACE, job, start, stop, bits, word);
    }
}

static uint64_t sieve_portable(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    return sieve_rest(kind, job, start, stop, bits, 0);
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

INLINE size_t walk_plain(uint32_t *walk, size_t count, uint32_t half, uint32_t key, uint32_t begin, uint32_t size,
                         uint32_t *picks) {
    size_t outside = 0;
    feistel_plain(walk, count, half, key);
    for (size_t i = 0; i < count; i++) { /* both are written: a branch would be guessed wrong too often */
        uint32_t at = walk[i];
        *picks = begin + at;
        walk[outside] = at;
        picks += at < size;
        outside += at >= size;
    }
    return outside;
}

static size_t walk_portable(uint32_t *walk, size_t count, uint32_t half, uint32_t key, uint32_t begin, uint32_t size,
                            uint32_t *picks) {
    return walk_plain(walk, count, half, key, begin, size, picks);
}

Sieve *sieve = sieve_portable;
Measure *measure = measure_portable;
Squares *squares = squares_portable;
Walk *walk_on = walk_portable;

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

/* As sieve_plain. `unit`: decay and gain are 1. */
INLINE AVX2 uint64_t sieve8(int kind, int unit, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    const __m256 decay = _mm256_set1_ps(job->decay), gain = _mm256_set1_ps(job->gain);
    const __m256i finite = _mm256_set1_epi32(0x7f7fffff), limit = _mm256_set1_epi32(job->limit);
    float *memory = job->memory;
    const void *from = job->grad;
    uint64_t found = 0;
    size_t i = start, word = 0;
    for (; i + GROUP <= stop; i += GROUP, word++) {
        __m256 p[GROUP / 8];
        __m256i worst = _mm256_setzero_si256();
        uint64_t hits = 0;
        for (size_t v = 0; v < GROUP / 8; v++) {
            p[v] = _mm256_loadu_ps(memory + i + 8 * v);
            if (kind != IN_PLACE) {
                __m256 grad = load8(kind, from, i + 8 * v);
                if (!unit) p[v] = _mm256_mul_ps(p[v], decay), grad = _mm256_mul_ps(grad, gain);
                p[v] = _mm256_add_ps(p[v], grad);
            }
            __m256i key = key8(p[v]);
            worst = _mm256_max_epi32(worst, key);
            uint32_t hit = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, limit)));
            hits |= (uint64_t)hit << 8 * v;
        }
        bits[word] = hits;
        found |= (uint64_t)(hits != 0) << word;
        if (kind == IN_PLACE) continue;
        if (UNLIKELY(_mm256_movemask_epi8(_mm256_cmpgt_epi32(worst, finite)))) {
            float copy[GROUP];
            for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(copy + 8 * v, p[v]);
            remember(copy, memory, i, GROUP, job->old);
        }
        for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(memory + i + 8 * v, p[v]);
    }
    return i < stop ? found | sieve_rest(kind, job, i, stop, bits, word) : found;
}

#define AVX512 __attribute__((target("avx512f")))

INLINE AVX512 __m512 load16(int kind, const void *from, size_t i) {
    if (kind == F32) return _mm512_loadu_ps((const float *)from + i);
    __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + i));
    if (kind == F16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

INLINE AVX512 __m512i key16(__m512 p) { return _mm512_and_si512(_mm512_castps_si512(p), _mm512_set1_epi32(0x7fffffff)); }

/* As sieve8: where nobody else uses the memory, vectors of 256 bits come out behind it. */
INLINE AVX512 uint64_t sieve16(int kind, int unit, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    const __m512 decay = _mm512_set1_ps(job->decay), gain = _mm512_set1_ps(job->gain);
    const __m512i finite = _mm512_set1_epi32(0x7f7fffff), limit = _mm512_set1_epi32(job->limit);
    float *memory = job->memory;
    const void *from = job->grad;
    uint64_t found = 0;
    size_t i = start, word = 0;
    for (; i + GROUP <= stop; i += GROUP, word++) {
        __m512 p[GROUP / 16];
        __m512i worst = _mm512_setzero_si512();
        uint64_t hits = 0;
        for (size_t v = 0; v < GROUP / 16; v++) {
            p[v] = _mm512_loadu_ps(memory + i + 16 * v);
            if (kind != IN_PLACE) {
                __m512 grad = load16(kind, from, i + 16 * v);
                if (!unit) p[v] = _mm512_mul_ps(p[v], decay), grad = _mm512_mul_ps(grad, gain);
                p[v] = _mm512_add_ps(p[v], grad);
            }
            __m512i key = key16(p[v]);
            worst = _mm512_max_epi32(worst, key);
            hits |= (uint64_t)_mm512_cmpgt_epi32_mask(key, limit) << 16 * v;
        }
        bits[word] = hits;
        found |= (uint64_t)(hits != 0) << word;
        if (kind == IN_PLACE) continue;
        if (UNLIKELY(_mm512_cmpgt_epi32_mask(worst, finite))) {
            float copy[GROUP];
            for (size_t v = 0; v < GROUP / 16; v++) _mm512_storeu_ps(copy + 16 * v, p[v]);
            remember(copy, memory, i, GROUP, job->old);
        }
        for (size_t v = 0; v < GROUP / 16; v++) _mm512_storeu_ps(memory + i + 16 * v, p[v]);
    }
    return i < stop ? found | sieve_rest(kind, job, i, stop, bits, word) : found;
}

#define EACH_KIND(sieve) \
    int unit = job->decay == 1.0f && job->gain == 1.0f; \
    switch (kind) { \
    case F32: return unit ? sieve(F32, 1, job, start, stop, bits) : sieve(F32, 0, job, start, stop, bits); \
    case BF16: return unit ? sieve(BF16, 1, job, start, stop, bits) : sieve(BF16, 0, job, start, stop, bits); \
    case F16: return unit ? sieve(F16, 1, job, start, stop, bits) : sieve(F16, 0, job, start, stop, bits); \
    default: return sieve(IN_PLACE, 1, job, start, stop, bits); \
    }

static AVX2 uint64_t sieve_avx2(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    EACH_KIND(sieve8)
}

static AVX512 uint64_t sieve_avx512(int kind, const Job *job, size_t start, size_t stop, uint64_t *bits) {
    EACH_KIND(sieve16)
}

static AVX2 Moments measure_avx2(const float *p, size_t count) { return measure_plain(p, count); }

static AVX2 double squares_avx2(const float *p, size_t count, float below) { return squares_plain(p, count, below); }

static AVX2 size_t walk_avx2(uint32_t *walk, size_t count, uint32_t half, uint32_t key, uint32_t begin, uint32_t size,
                             uint32_t *picks) {
    return walk_plain(walk, count, half, key, begin, size, picks);
}

static __attribute__((target("avx512f,popcnt,prefer-vector-width=512"))) size_t
walk_avx512(uint32_t *walk, size_t count, uint32_t half, uint32_t key, uint32_t begin, uint32_t size, uint32_t *picks) {
    uint32_t *outside = walk;
    feistel_plain(walk, count, half, key);
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 there = (__mmask16)(count - i < 16 ? (1u << (count - i)) - 1 : 0xffffu);
        __m512i at = _mm512_maskz_loadu_epi32(there, walk + i);
        __mmask16 in = _mm512_mask_cmplt_epu32_mask(there, at, _mm512_set1_epi32((int)size));
        __mmask16 out = (__mmask16)(there & ~in);
        uint32_t drawn = (uint32_t)__builtin_popcount(in), others = (uint32_t)__builtin_popcount(out);
        __m512i pick = _mm512_add_epi32(at, _mm512_set1_epi32((int)begin));
        _mm512_mask_storeu_epi32(picks, (__mmask16)((1u << drawn) - 1), _mm512_maskz_compress_epi32(in, pick));
        _mm512_mask_storeu_epi32(outside, (__mmask16)((1u << others) - 1), _mm512_maskz_compress_epi32(out, at));
        picks += drawn;
        outside += others;
    }
    return (size_t)(outside - walk);
}
#endif

/* Uses the widest vectors up to `most` that this CPU has (0: portable code, 1: AVX2, 2: AVX-512). Returns which. */
int gradsieve_vectors(int most) {
    int level = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) level = 1; /* never without f16c */
    if (level && __builtin_cpu_supports("avx512f")) level = 2;
    level = level < most ? level : most;
    sieve = level == 2 ? sieve_avx512 : level ? sieve_avx2 : sieve_portable;
    measure = level ? measure_avx2 : measure_portable;
    squares = level ? squares_avx2 : squares_portable;
    walk_on = level == 2 ? walk_avx512 : level ? walk_avx2 : walk_portable;
#else
    (void)most;
#endif
    return level;
}

static __attribute__((constructor)) void on_load(void) { gradsieve_vectors(2); }
