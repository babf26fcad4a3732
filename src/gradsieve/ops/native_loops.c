/* The inner loops: portable, which compilers vectorise for any CPU, and by hand for AVX2 and AVX-512. */
#include "native_loops.h"

static __attribute__((noinline)) void
remember(const float *p, const float *memory, size_t start, size_t count, Hits *old) {
    for (size_t j = 0; j < count; j++)
        if (!(fabsf(p[j]) <= FLT_MAX)) push(old, start + j, memory[start + j]);
}

INLINE void sieve_plain(int kind, const Job *job, size_t start, size_t stop) {
    float *memory = job->memory;
    Hits *hits = job->hits;
    reserve(hits, stop - start + 1);
    for (size_t i = start; i < stop; i += GROUP) {
        size_t count = smaller(GROUP, stop - i);
        float p[GROUP];
        uint32_t any = 0;
        for (size_t j = 0; j < count; j++) {
            p[j] = memory[i + j];
            if (kind != IN_PLACE) p[j] = p[j] * job->decay + load(kind, job->grad, i + j) * job->gain;
            any |= !(fabsf(p[j]) < job->threshold);
        }
        if (UNLIKELY(any)) {
            size_t length = hits->length;
            for (size_t j = 0; j < count; j++) {
                hits->index[length] = (uint32_t)(i + j);
                hits->value[length] = p[j];
                length += !(fabsf(p[j]) < job->threshold);
            }
            hits->length = length;
            if (kind != IN_PLACE) remember(p, memory, i, count, job->old);
        }
        if (kind != IN_PLACE) memcpy(memory + i, p, count * sizeof *p);
    }
}

static void sieve_portable(int kind, const Job *job, size_t start, size_t stop) {
    switch (kind) { /* a constant kind lets the compiler vectorise each loop */
    case F32: sieve_plain(F32, job, start, stop); break;
    case BF16: sieve_plain(BF16, job, start, stop); break;
    case F16: sieve_plain(F16, job, start, stop); break;
    default: sieve_plain(IN_PLACE, job, start, stop);
    }
}

#define LANES 16u /* running sums, joined in one order: as many as keep the adders busy */

static Moments fold(const double *sum, const double *squares, const float *rest, size_t count, float threshold) {
    Moments moments = {0, 0};
    for (size_t lane = 0; lane < LANES; lane++) {
        double x = lane < count && fabsf(rest[lane]) < threshold ? rest[lane] : 0.0;
        moments.sum += sum[lane] + x;
        moments.squares += squares[lane] + x * x;
    }
    return moments;
}

static Moments measure_portable(const float *p, size_t count, float threshold) {
    double sum[LANES] = {0}, squares[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            double x = fabsf(p[i + lane]) < threshold ? p[i + lane] : 0.0;
            sum[lane] += x;
            squares[lane] += x * x;
        }
    return fold(sum, squares, p + i, count - i, threshold);
}

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
Feistel *feistel = feistel_portable;

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,f16c,popcnt")))

INLINE AVX2 __m256 load8(int kind, const void *from, size_t i) {
    if (kind == F32) return _mm256_loadu_ps((const float *)from + i);
    __m128i words = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + i));
    if (kind == F16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

INLINE AVX2 __m256i key8(__m256 p) { return _mm256_and_si256(_mm256_castps_si256(p), _mm256_set1_epi32(0x7fffffff)); }

INLINE AVX2 int any_greater(__m256i key, __m256i limit) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(key, limit)); }

/* One bit for each of 32 numbers: whether its key is greater than the limit. */
INLINE AVX2 uint32_t greater32(const float *p, __m256i limit) {
    __m256i hit[4];
    for (size_t v = 0; v < 4; v++) hit[v] = _mm256_cmpgt_epi32(key8(_mm256_loadu_ps(p + 8 * v)), limit);
    __m256i low = _mm256_packs_epi32(hit[0], hit[1]), high = _mm256_packs_epi32(hit[2], hit[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing went by halves of vectors */
    return (uint32_t)_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}

/* As sieve_plain; magnitudes are compared as integers, where a NaN is the greatest. `unit`: decay and gain are 1.
 * `dense`: groups are not asked first whether they have a hit, since a wrong guess costs more than looking for it. */
INLINE AVX2 void sieve_vectors(int kind, int unit, int dense, const Job *job, size_t start, size_t stop) {
    const __m256 decay = _mm256_set1_ps(job->decay), gain = _mm256_set1_ps(job->gain);
    const __m256i finite = _mm256_set1_epi32(0x7f7fffff);
    const __m256i limit = _mm256_set1_epi32(job->threshold > 0.0f ? (int)bits_of(job->threshold) - 1 : -1);
    float *memory = job->memory;
    Hits *hits = job->hits;
    size_t i = start;
    reserve(hits, stop - start + 2);
    uint32_t *index = hits->index + hits->length;
    float *value = hits->value + hits->length;
    for (; i + GROUP <= stop; i += GROUP) {
        __m256 p[GROUP / 8];
        __m256i worst = _mm256_setzero_si256();
        for (size_t v = 0; v < GROUP / 8; v++) {
            p[v] = _mm256_loadu_ps(memory + i + 8 * v);
            if (kind != IN_PLACE) {
                __m256 grad = load8(kind, job->grad, i + 8 * v);
                if (!unit) p[v] = _mm256_mul_ps(p[v], decay), grad = _mm256_mul_ps(grad, gain);
                p[v] = _mm256_add_ps(p[v], grad);
            }
            worst = _mm256_max_epi32(worst, key8(p[v]));
        }
        int hit = dense || any_greater(worst, limit);
        if (kind != IN_PLACE && UNLIKELY(hit && any_greater(worst, finite))) {
            float copy[GROUP];
            for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(copy + 8 * v, p[v]);
            remember(copy, memory, i, GROUP, job->old);
        }
        if (kind != IN_PLACE)
            for (size_t v = 0; v < GROUP / 8; v++) _mm256_storeu_ps(memory + i + 8 * v, p[v]);
        if (!hit) continue;
        uint64_t mask = greater32(memory + i, limit) | (uint64_t)greater32(memory + i + 32, limit) << 32;
        size_t count = (size_t)__builtin_popcountll(mask);
        for (size_t j = 0; j < 2; j++, mask &= mask - 1) { /* written also where there are fewer: no branch to guess */
            index[j] = (uint32_t)(i + _tzcnt_u64(mask) % 64);
            value[j] = memory[index[j]];
        }
        for (size_t j = 2; mask; j++, mask &= mask - 1) {
            index[j] = (uint32_t)(i + _tzcnt_u64(mask));
            value[j] = memory[index[j]];
        }
        index += count;
        value += count;
    }
    hits->length = (size_t)(index - hits->index);
    if (i < stop) sieve_portable(kind, job, i, stop);
}

INLINE AVX2 void sieve_kind(int kind, const Job *job, size_t start, size_t stop) {
    int unit = job->decay == 1.0f && job->gain == 1.0f;
    if (unit && job->dense) sieve_vectors(kind, 1, 1, job, start, stop);
    else if (unit) sieve_vectors(kind, 1, 0, job, start, stop);
    else if (job->dense) sieve_vectors(kind, 0, 1, job, start, stop);
    else sieve_vectors(kind, 0, 0, job, start, stop);
}

static AVX2 void sieve_avx2(int kind, const Job *job, size_t start, size_t stop) {
    switch (kind) {
    case F32: sieve_kind(F32, job, start, stop); break;
    case BF16: sieve_kind(BF16, job, start, stop); break;
    case F16: sieve_kind(F16, job, start, stop); break;
    default: sieve_kind(IN_PLACE, job, start, stop);
    }
}

static AVX2 Moments measure_avx2(const float *p, size_t count, float threshold) {
    const __m256i limit = _mm256_set1_epi32((int)bits_of(threshold));
    __m256d totals[LANES / 4], totals_of_squares[LANES / 4];
    double sum[LANES], squares[LANES];
    size_t i = 0;
    for (size_t v = 0; v < LANES / 4; v++) totals[v] = totals_of_squares[v] = _mm256_setzero_pd();
    for (; threshold > 0.0f && i + LANES <= count; i += LANES)
        for (size_t v = 0; v < LANES / 4; v++) {
            __m128 x = _mm_loadu_ps(p + i + 4 * v);
            __m128i key = _mm_and_si128(_mm_castps_si128(x), _mm_set1_epi32(0x7fffffff));
            x = _mm_and_ps(x, _mm_castsi128_ps(_mm_cmpgt_epi32(_mm256_castsi256_si128(limit), key)));
            __m256d wide = _mm256_cvtps_pd(x);
            totals[v] = _mm256_add_pd(totals[v], wide);
            totals_of_squares[v] = _mm256_add_pd(totals_of_squares[v], _mm256_mul_pd(wide, wide));
        }
    for (size_t v = 0; v < LANES / 4; v++) {
        _mm256_storeu_pd(sum + 4 * v, totals[v]);
        _mm256_storeu_pd(squares + 4 * v, totals_of_squares[v]);
    }
    return fold(sum, squares, p + i, smaller(count - i, LANES), threshold);
}

static AVX2 void feistel_avx2(uint32_t *slots, size_t count, uint32_t half, uint32_t key) {
    feistel_plain(slots, count, half, key);
}

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,f16c,popcnt")))

INLINE AVX512 __m512 load16(int kind, const void *from, size_t i) {
    if (kind == F32) return _mm512_loadu_ps((const float *)from + i);
    __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + i));
    if (kind == F16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

INLINE AVX512 __m512i key16(__m512 p) {
    return _mm512_and_si512(_mm512_castps_si512(p), _mm512_set1_epi32(0x7fffffff));
}

/* As sieve_vectors; hits are pushed together in a register and stored from there, whole vectors at a time. */
INLINE AVX512 void sieve_wide(int kind, int unit, int dense, const Job *job, size_t start, size_t stop) {
    const __m512 decay = _mm512_set1_ps(job->decay), gain = _mm512_set1_ps(job->gain);
    const __m512i finite = _mm512_set1_epi32(0x7f7fffff);
    const __m512i limit = _mm512_set1_epi32(job->threshold > 0.0f ? (int)bits_of(job->threshold) - 1 : -1);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float *memory = job->memory;
    Hits *hits = job->hits;
    size_t i = start;
    reserve(hits, stop - start + 16);
    uint32_t *index = hits->index + hits->length;
    float *value = hits->value + hits->length;
    for (; i + GROUP <= stop; i += GROUP) {
        __m512 p[GROUP / 16];
        __m512i worst = _mm512_setzero_si512();
        for (size_t v = 0; v < GROUP / 16; v++) {
            p[v] = _mm512_loadu_ps(memory + i + 16 * v);
            if (kind != IN_PLACE) {
                __m512 grad = load16(kind, job->grad, i + 16 * v);
                if (!unit) p[v] = _mm512_mul_ps(p[v], decay), grad = _mm512_mul_ps(grad, gain);
                p[v] = _mm512_add_ps(p[v], grad);
            }
            worst = _mm512_max_epi32(worst, key16(p[v]));
        }
        int hit = dense || _mm512_cmpgt_epi32_mask(worst, limit);
        if (kind != IN_PLACE && UNLIKELY(hit && _mm512_cmpgt_epi32_mask(worst, finite))) {
            float copy[GROUP];
            for (size_t v = 0; v < GROUP / 16; v++) _mm512_storeu_ps(copy + 16 * v, p[v]);
            remember(copy, memory, i, GROUP, job->old);
        }
        if (kind != IN_PLACE)
            for (size_t v = 0; v < GROUP / 16; v++) _mm512_storeu_ps(memory + i + 16 * v, p[v]);
        if (!hit) continue;
        for (size_t v = 0; v < GROUP / 16; v++) {
            __mmask16 mask = _mm512_cmpgt_epi32_mask(key16(p[v]), limit);
            __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(i + 16 * v)));
            _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(mask, at));
            _mm512_storeu_ps(value, _mm512_maskz_compress_ps(mask, p[v]));
            index += __builtin_popcount(mask);
            value += __builtin_popcount(mask);
        }
    }
    hits->length = (size_t)(index - hits->index);
    if (i < stop) sieve_portable(kind, job, i, stop);
}

INLINE AVX512 void sieve_wide_kind(int kind, const Job *job, size_t start, size_t stop) {
    int unit = job->decay == 1.0f && job->gain == 1.0f;
    if (unit && job->dense) sieve_wide(kind, 1, 1, job, start, stop);
    else if (unit) sieve_wide(kind, 1, 0, job, start, stop);
    else if (job->dense) sieve_wide(kind, 0, 1, job, start, stop);
    else sieve_wide(kind, 0, 0, job, start, stop);
}

static AVX512 void sieve_avx512(int kind, const Job *job, size_t start, size_t stop) {
    switch (kind) {
    case F32: sieve_wide_kind(F32, job, start, stop); break;
    case BF16: sieve_wide_kind(BF16, job, start, stop); break;
    case F16: sieve_wide_kind(F16, job, start, stop); break;
    default: sieve_wide_kind(IN_PLACE, job, start, stop);
    }
}
#endif

/* Uses the widest vectors up to `most` that this CPU has (0: portable code, 1: AVX2, 2: AVX-512). Returns which. */
int gradsieve_vectors(int most) {
    int level = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) level = 1; /* never without f16c and popcnt */
    if (level && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        level = 2;
    if (level > most) level = most;
    sieve = level == 2 ? sieve_avx512 : level == 1 ? sieve_avx2 : sieve_portable;
    measure = level ? measure_avx2 : measure_portable;
    feistel = level ? feistel_avx2 : feistel_portable;
#else
    (void)most;
#endif
    return level;
}

static __attribute__((constructor)) void on_load(void) { gradsieve_vectors(2); }
