/* Target logits on a CPU: the own tokens, distributions and draws of some rows of float32 logits.
 * `specq.verification.sampling` defines them. The values are those of its formulas to the last bit, except for the order of float64 sums.
 *
 * Rule: the result for a row does not depend on the other rows. */
#include <float.h>
#include <stdlib.h>
#include <string.h>
#include "noise.h"
#include "walk.h"

enum { HEAD = 12, ALL_KEYS = 0x7fffffff };

/* ROW of `specq.verification.host_kernels`. */
typedef struct {
    int64_t logit_row, position;
    uint64_t seed;
    int64_t top_k;
    double top_p;
    float temperature, log_min_p;
} Row;

/* As in `specq.verification.target_rows.Distributions`. top and bound are float32 values. */
typedef struct {
    double top, bound, mass, moment;
} Distribution;

/* Buffers for one row. `width` is a multiple of LANES. Beyond the vocabulary, scaled logits are -inf and weights 0. */
typedef struct {
    int vocab, width;
    float *scaled, *limits;
    double *weights, *heads;
} Work;

/* Each thread keeps its own buffers between calls. */
static Work *work_of(int vocab) {
    static _Thread_local Work work;
    static _Thread_local int room;
    work.vocab = vocab, work.width = (vocab + LANES - 1) / LANES * LANES;
    if (work.width > room) {
        free(work.scaled);
        room = (work.width + 63) / 64 * 64;
        work.scaled = aligned_alloc(64, room * (2 * sizeof(float) + 2 * sizeof(double)));
        work.limits = work.scaled + room;
        work.weights = (double *)(work.limits + room), work.heads = work.weights + room;
    }
    return &work;
}

/* The largest of a row's logits, or NaN if one is NaN. */
static float largest(const float *x, int n) {
    v8 best = (v8){0} - INFINITY;
    v8i is_nan = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        v8 v = *(const v8_any *)(x + i);
        is_nan |= v != v;
        best = select8(v > best, v, best);
    }
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) top = best[lane] > top ? best[lane] : top;
    for (; i < n; i++) {
        if (x[i] != x[i]) return NAN;
        top = x[i] > top ? x[i] : top;
    }
    return any8(is_nan) ? NAN : top;
}

/* The first place of a value, which must be present. */
static int place_of(const float *x, float value) {
    int i = 0;
    while (x[i] != value) i++;
    return i;
}

/* Fill work->scaled, and return the largest logit. */
static float scale(const float *logits, const Row *row, Work *work) {
    float top = largest(logits, work->vocab), temperature = row->temperature;
    int i = 0;
    for (; i + LANES <= work->vocab; i += LANES)
        *(v8 *)(work->scaled + i) = (*(const v8_any *)(logits + i) - top) / temperature;
    for (; i < work->vocab; i++) work->scaled[i] = (logits[i] - top) / temperature;
    for (; i < work->width; i++) work->scaled[i] = -INFINITY;
    return top;
}

/* Fill work->weights with e^scaled, and return their sum. */
static double weigh(Work *work) {
    v4d sum = {0};
    for (int i = 0; i < work->width; i += QUARTER) {
        v4d weight = exp4(__builtin_convertvector(*(const v4 *)(work->scaled + i), v4d));
        *(v4d *)(work->weights + i) = weight;
        sum += weight;
    }
    return sum4(sum);
}

/* Sort keys. Scaled logits are <= 0, so the bits of their absolute values ascend where they descend. */
INLINE uint32_t key_of(float scaled) {
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    return bits & ALL_KEYS;
}

/* The keys of a row's tokens, or of its likeliest, and their weights. Without weights each counts 1. */
typedef struct {
    const uint32_t *keys;
    const double *weights;
    int count;
} Keyed;

/* The key, among those up to `last`, at which the sum over ascending keys reaches `aim`. Its digits are found one by one.
 * Rounding may leave the aim just beyond the sum. Then the result is the largest key. */
static uint32_t key_reaching(Keyed of, uint32_t last, double aim) {
    static const int shifts[] = {20, 10, 0};
    uint32_t found = 0;
    double before = 0;
    for (int digit = 0; digit < 3; digit++) {
        double sums[2048] = {0};
        int shift = shifts[digit], above = digit ? shift + 10 : 31, size = digit ? 1024 : 2048, at = 0, nonzero = 0;
        for (int i = 0; i < of.count; i++)
            if (of.keys[i] <= last && (uint64_t)of.keys[i] >> above == (uint64_t)found >> above)
                sums[of.keys[i] >> shift & (size - 1)] += of.weights ? of.weights[i] : 1;
        for (; at < size && before + sums[at] < aim; at++) before += sums[at], nonzero = sums[at] > 0 ? at : nonzero;
        if (at == size) at = nonzero, before -= sums[at];
        found |= (uint32_t)at << shift;
    }
    return found;
}

/* Gather the tokens with scaled >= -depth, in place of limits and into `heads`. */
static Keyed gather(Work *work, float depth) {
    uint32_t *keys = (uint32_t *)work->limits;
    int count = 0;
    for (int i = 0; i < work->width; i += LANES) {
        if (!any8(*(v8 *)(work->scaled + i) >= -depth)) continue;
        for (int token = i; token < i + LANES; token++) {
            keys[count] = key_of(work->scaled[token]), work->heads[count] = work->weights[token];
            count += work->scaled[token] >= -depth;
        }
    }
    return (Keyed){keys, work->heads, count};
}

static double sum_up_to(Keyed of, uint32_t last) {
    double sum = 0;
    for (int i = 0; i < of.count; i++) sum += of.keys[i] <= last ? of.weights[i] : 0;
    return sum;
}

/* The least scaled logit that top-k, top-p and min-p keep. `total` is the sum of the weights, needed for top-p. Usually few
 * tokens are likely, so the first pass reads only tokens within HEAD of the likeliest. */
static float lower_bound(const Row *row, Work *work, double total) {
    int has_top_k = row->top_k > 0 && row->top_k < work->vocab;
    if (!has_top_k && row->top_p >= 1) return row->log_min_p;
    Keyed of = gather(work, HEAD);
    if (has_top_k ? of.count < row->top_k : sum_up_to(of, ALL_KEYS) < row->top_p * total) of = gather(work, INFINITY);
    uint32_t last = ALL_KEYS;
    if (has_top_k) {
        last = key_reaching((Keyed){of.keys, NULL, of.count}, last, row->top_k);
        if (row->top_p < 1) total = sum_up_to(of, last);
    }
    if (row->top_p < 1) last = key_reaching(of, last, row->top_p * total);
    float edge;
    memcpy(&edge, &last, sizeof edge);
    return fmaxf(-edge, row->log_min_p);
}

/* Sum the weights, and weights times scaled logits, of the tokens that the bound keeps. */
static void sum_kept(const Work *work, double bound, Distribution *distribution) {
    v4d mass = {0}, moment = {0};
    for (int i = 0; i < work->width; i += QUARTER) {
        v4d scaled = __builtin_convertvector(*(const v4 *)(work->scaled + i), v4d);
        v4d weight = *(const v4d *)(work->weights + i);
        v4l is_kept = (scaled >= bound) & (weight > 0);
        mass += select4(is_kept, weight, (v4d){0});
        moment += select4(is_kept, weight * scaled, (v4d){0});
    }
    distribution->mass = sum4(mass), distribution->moment = sum4(moment);
}

static int find_distribution(const float *logits, const Row *row, Work *work, Distribution *distribution) {
    float top = scale(logits, row, work);
    if (!isfinite(top)) return 1;
    float bound = lower_bound(row, work, weigh(work));
    *distribution = (Distribution){.top = top, .bound = bound};
    sum_kept(work, bound, distribution);
    return 0;
}

/* Write found [num] for rows with T > 0, from logits [][stride]. Write probs [num_places][num_tokens]: the probabilities of token_ids
 * in rows which[num_places], 0 for a token id of -1. Return whether a row has no finite largest logit. */
int specq_distributions(const float *logits, long stride, int vocab, int num, const Row *rows, Distribution *found,
               const int64_t *which, const int64_t *token_ids, double *probs, long num_places, long num_tokens) {
    Work *work = work_of(vocab);
    for (int i = 0; i < num; i++)
        if (find_distribution(logits + rows[i].logit_row * stride, rows + i, work, found + i)) return 1;
    for (; num_places > 0; num_places--, which++) {
        const Row *row = rows + *which;
        const Distribution *distribution = found + *which;
        for (long i = 0; i < num_tokens; i++, token_ids++, probs++) {
            float logit = *token_ids < 0 ? -INFINITY : logits[row->logit_row * stride + *token_ids];
            float scaled = (logit - (float)distribution->top) / row->temperature;
            *probs = scaled >= (float)distribution->bound ? exp(scaled) / distribution->mass : 0;
        }
    }
    return 0;
}

/* Write uniforms [num] for the domain's draws. */
void specq_uniforms(int num, const uint64_t *seeds, const int64_t *positions, const int64_t *token_ids, int domain,
                    double *uniforms) {
    for (int i = 0; i < num; i++)
        uniforms[i] = uniform((uint32_t)token_ids[i], keys_of(seeds[i], (uint64_t)positions[i], (uint64_t)domain));
}

/* Fill work->limits with upper bounds of scaled logits plus noise, -inf where scaled < bound. Return the largest.
 * -log(-log1p(-u)) <= -log(u), and a float's bits, as an integer, are at most 2^23 (log2 + 127). The bounds are up to 0.06 too
 * high, which costs a few more candidates. MARGIN covers the rounding of the bounds. */
static float limit_scores(Keys keys, Work *work, float bound) {
    const float LOG2 = 0.693147181f, MARGIN = 1e-3f;
    v8u token_ids = {0, 1, 2, 3, 4, 5, 6, 7};
    v8 best = (v8){0} - INFINITY;
    bound = fmaxf(bound, -FLT_MAX);
    for (int i = 0; i < work->width; i += LANES, token_ids += LANES) {
        if (!any8(*(v8 *)(work->scaled + i) >= bound)) { /* masked, or cut off: saves the noise */
            *(v8 *)(work->limits + i) = (v8){0} - INFINITY;
            continue;
        }
        v8u half = (hash8(token_ids, keys) ^ 0x80000000u) >> 1; /* half of the hash, rounded down: fits int32 */
        v8 log2 = __builtin_convertvector((v8i)__builtin_convertvector((v8i)half, v8), v8) * 0x1p-23f - 127;
        v8 scaled = *(v8 *)(work->scaled + i), limit = scaled + (LOG2 * (31 - log2) + MARGIN);
        limit = select8(scaled >= bound, limit, (v8){0} - INFINITY);
        *(v8 *)(work->limits + i) = limit;
        best = select8(limit > best, limit, best);
    }
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) top = best[lane] > top ? best[lane] : top;
    return top;
}

/* The argmax of scaled logits plus noise over tokens with scaled >= bound, the first of equals. Exact noise is computed only
 * for tokens that can win. */
static int choose(Keys keys, Work *work, float bound) {
    float highest = limit_scores(keys, work, bound);
    int likely = place_of(work->limits, highest), found = likely;
    float best = work->scaled[likely] + gumbel(likely, keys), floor = best;
    for (int i = 0; i < work->width; i += LANES) {
        if (!any8(*(v8 *)(work->limits + i) >= floor)) continue;
        for (int token = i; token < i + LANES; token++) {
            if (work->limits[token] < floor) continue;
            float score = work->scaled[token] + gumbel(token, keys);
            if (score > best || (score == best && token < found)) best = score, found = token;
        }
    }
    return found;
}

/* Write token_ids [num]: each row's own token. Return whether a row has none. */
int specq_own_tokens(const float *logits, long stride, int vocab, int num, const Row *rows, int32_t *token_ids) {
    Work *work = work_of(vocab);
    for (; num > 0; num--, rows++, token_ids++) {
        const float *own = logits + rows->logit_row * stride;
        Keys keys = keys_of(rows->seed, (uint64_t)rows->position, GUMBEL);
        float top = rows->temperature > 0 ? scale(own, rows, work) : largest(own, vocab);
        if (!isfinite(top)) return 1;
        if (rows->temperature == 0)
            *token_ids = place_of(own, top);
        else
            *token_ids = choose(keys, work, lower_bound(rows, work, rows->top_p < 1 ? weigh(work) : 0));
    }
    return 0;
}

/* Draw from the edited distributions of rows. Token edit_ids[i] has probability edit_values[i], for i from
 * edit_starts[row] to edit_starts[row + 1] - 1.
 * Write token_ids [num] by inversion: the first whose cumulative weight exceeds uniform times the sum. */
int specq_draw(const float *logits, long stride, int vocab, int num, const Row *rows, const Distribution *found,
               const int64_t *edit_starts, const int64_t *edit_ids, const double *edit_values, const double *uniforms,
               int32_t *token_ids) {
    Work *work = work_of(vocab);
    for (int n = 0; n < num; n++) {
        scale(logits + rows[n].logit_row * stride, rows + n, work);
        weigh(work);
        double *weights = work->weights, sum = 0;
        for (int i = 0; i < vocab; i++) weights[i] = work->scaled[i] >= (float)found[n].bound ? weights[i] : 0;
        for (int64_t e = edit_starts[n]; e < edit_starts[n + 1]; e++) weights[edit_ids[e]] = edit_values[e] * found[n].mass;
        for (int i = 0; i < vocab; i++) weights[i] = sum += weights[i];
        int chosen = 0, last = vocab - 1;
        while (chosen < last && weights[chosen] <= uniforms[n] * sum) chosen++;
        token_ids[n] = chosen;
    }
    return 0;
}

/* Set the logits of forbidden tokens to -inf in the rows [num], with masks words [num][num_words]: a bit for each token. */
void specq_mask(float *logits, long stride, int vocab, int num, const int64_t *rows, const uint32_t *words,
                long num_words) {
    for (int n = 0; n < num; n++) {
        float *row = logits + rows[n] * stride;
        const uint32_t *own = words + n * num_words;
        for (int first = 0; first < vocab; first += 32) {
            const uint32_t word = first >> 5 < num_words ? own[first >> 5] : 0;  // what is not named is forbidden
            const int end = vocab - first < 32 ? vocab - first : 32;
            if (word == 0xFFFFFFFFu) continue;
            for (int i = 0; i < end; i++) row[first + i] = word >> i & 1 ? row[first + i] : -INFINITY;
        }
    }
}

#include "guess.h"
