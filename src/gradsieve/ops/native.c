/* The ops of reference.py for float32 memories on the CPU: one pass over gradient and memory.
 *
 * The pass (native_pass.c) writes p = decay * memory + gain * grad and finds the hits, those p that are not below a
 * threshold. A rule chooses among them (native_choose.c) and `gradsieve_send` packs the chosen. The memory holds p,
 * non-finite or not, until the end; old values under a non-finite p wait in a list and are put back last.
 * Work is cut into pieces (the part of a segment in a block) and sums are taken piece by piece, so that no result
 * depends on the number of threads or of workers.
 */
#include "native_plan.h"

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

void gradsieve_send(Step *step);

/* Sends at once where the slots are there. */
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
    if (step->slots >= 0) gradsieve_send(step);
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

/* Takes the first k of each segment's keyed permutation. */
void gradsieve_randomk(Step *step, const int64_t *k, const int64_t *keys, uint32_t *picks, int64_t *picked,
                       int64_t room) {
    draw(step, k, keys, picks, picked, room);
    gradsieve_take(step, picks, picked, room);
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
