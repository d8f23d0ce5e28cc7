/* Attention of packed rows over paged KV: a row sees the first ctx_len slots of its session's table, then its extras.
 *
 * The rows of a session are processed in tiles, so that a key or value is loaded once for all rows of a tile. Slots
 * that only some rows see (the causal staircase of a chunk, the ancestors of a tree node) follow row by row. Both loops
 * add in the order of positions, which keeps the rule of simd.h.
 */
#pragma once
#include "vec.h"

enum {
    MAX_QUERIES = 12,               /* query vectors of a tile: rows x query heads of one KV head */
    AT_ONCE = LANES == 16 ? 6 : 3, /* query vectors that are computed together */
    AHEAD = 16                      /* slots to prefetch; the hardware cannot predict a table's jumps */
};

typedef struct {
    int32_t num_rows, num_sessions, num_logit_rows, max_slots;
    const int32_t *token_ids, *positions, *slots;          /* [num_rows]; slots: where the row's own KV goes */
    const int32_t *ctx_lens, *extra_starts, *extras;       /* [num_rows], [num_rows + 1], [extra_starts[num_rows]] */
    const int32_t *row_starts, *logit_rows;                /* [num_sessions + 1], [num_logit_rows] */
    const int32_t *const *tables;                          /* [num_sessions] */
} Batch;

typedef struct {
    int num_queries, head_dim;
    long ld;                    /* floats from one query's scores to the next */
    const float *keys, *values; /* [slot][head_dim] of this layer and KV head */
    const float *queries[MAX_QUERIES];
    float *outputs[MAX_QUERIES], *scores;
} Tile;

INLINE void fetch(const float *pool, const int32_t *slots, int j, int n, int head_dim) {
    if (j + AHEAD < n)
        for (int i = 0; i < head_dim; i += 16) __builtin_prefetch(pool + (long)slots[j + AHEAD] * head_dim + i);
}

/* Compute scores of `count` <= AT_ONCE queries, from `first` on, against 4 slots. */
INLINE void score4(const Tile *t, int first, int count, const int32_t *slots, long at) {
    v8 sums[AT_ONCE][4] = {0};
    for (int i = 0; i < t->head_dim; i += 8) {
        v8 keys[4];
        for (int j = 0; j < 4; j++) keys[j] = held(load(t->keys + (long)slots[j] * t->head_dim + i));
        for (int q = 0; q < count; q++) {
            const v8 query = held(load(t->queries[first + q] + i));
            for (int j = 0; j < 4; j++) sums[q][j] = fma8(query, keys[j], sums[q][j]);
        }
    }
    for (int q = 0; q < count; q++)
        *(v4u *)(t->scores + (first + q) * t->ld + at) = sums4(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
}

/* Compute scores of queries first .. end against slots[0 .. n). They go to column `at`, and may overwrite 3 more. */
static void score(const Tile *t, int first, int end, const int32_t *slots, int n, long at) {
    for (int j = 0; j < n; j += 4) {
        int32_t four[4];
        for (int i = 0; i < 4; i++) {
            four[i] = slots[MIN(j + i, n - 1)];
            fetch(t->keys, slots, j + i, n, t->head_dim);
        }
        int q = first;
        for (; q + AT_ONCE <= end; q += AT_ONCE) score4(t, q, AT_ONCE, four, at + j);
        if (AT_ONCE > 3 && q + 3 <= end) score4(t, q, 3, four, at + j), q += 3;
        if (end - q == 2) score4(t, q, 2, four, at + j);
        if (end - q == 1) score4(t, q, 1, four, at + j);
    }
}

/* outputs += scores x values for `count` queries and `width` vectors of the head, added in slot order. */
INLINE void mix(const Tile *t, int first, int count, int dim, int width, const int32_t *slots, int n, long at) {
    vec sums[AT_ONCE][4];
    for (int q = 0; q < count; q++)
        for (int i = 0; i < width; i++) sums[q][i] = vec_load(t->outputs[first + q] + dim + LANES * i);
    for (int j = 0; j < n; j++) {
        const float *value = t->values + (long)slots[j] * t->head_dim + dim;
        vec parts[4];
        for (int i = 0; i < width; i++) parts[i] = vec_held(vec_load(value + LANES * i));
        if (dim == 0) fetch(t->values, slots, j, n, t->head_dim);
        for (int q = 0; q < count; q++) {
            vec weight = vec_splat(t->scores[(first + q) * t->ld + at + j]);
            for (int i = 0; i < width; i++) sums[q][i] = vec_fma(weight, parts[i], sums[q][i]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int i = 0; i < width; i++) vec_store(t->outputs[first + q] + dim + LANES * i, sums[q][i]);
}

INLINE void mix_head(const Tile *t, int first, int count, const int32_t *slots, int n, long at) {
    int dim = 0;
    for (; dim + 4 * LANES <= t->head_dim; dim += 4 * LANES) mix(t, first, count, dim, 4, slots, n, at);
    for (; dim < t->head_dim; dim += LANES) mix(t, first, count, dim, 1, slots, n, at);
}

static void mix_queries(const Tile *t, int first, int end, const int32_t *slots, int n, long at) {
    int q = first;
    for (; q + AT_ONCE <= end; q += AT_ONCE) mix_head(t, q, AT_ONCE, slots, n, at);
    if (AT_ONCE > 3 && q + 3 <= end) mix_head(t, q, 3, slots, n, at), q += 3;
    if (end - q == 2) mix_head(t, q, 2, slots, n, at);
    if (end - q == 1) mix_head(t, q, 1, slots, n, at);
}

/* Replace n scores by weights e^(s - max); return 1 / their sum. */
static float softmax(float *scores, int n) {
    v8 top = splat(-INFINITY), total = {0};
    for (int i = n; i % 8; i++) scores[i] = -INFINITY;
    for (int i = 0; i < n; i += 8) top = max8(load(scores + i), top);
    float max = top[0];
    for (int i = 1; i < 8; i++) max = top[i] > max ? top[i] : max;
    for (int i = 0; i < n; i += 8) {
        v8 s = load(scores + i), e = select8(s > -INFINITY, exp8(s - max), (v8){0});
        total += e;
        store(scores + i, e);
    }
    return 1.0f / sum8(total);
}

/* Apply `step` to the slots that only this row of the tile sees: the rest of its context, then its extras. `step` is
 * `score` or `mix_queries`. */
typedef void Step(const Tile *, int, int, const int32_t *, int, long);
static void rest(const Batch *b, const Tile *t, Step *step, const int32_t *table, int row, int shared, int first,
                 int end) {
    int context = b->ctx_lens[row], extra = b->extra_starts[row];
    step(t, first, end, table + shared, context - shared, shared);
    step(t, first, end, b->extras + extra, b->extra_starts[row + 1] - extra, context);
}

/* Compute rows first .. end of one session for one KV head, which per_row query heads share. */
static void attend_tile(const Batch *b, Tile *t, const int32_t *table, int row, int end, int per_row) {
    int shared = b->ctx_lens[row];
    for (int r = row; r < end; r++) shared = MIN(shared, b->ctx_lens[r]);
    score(t, 0, t->num_queries, table, shared, 0);
    for (int r = row, q = 0; r < end; r++, q += per_row) rest(b, t, score, table, r, shared, q, q + per_row);
    float scales[MAX_QUERIES];
    for (int q = 0; q < t->num_queries; q++) {
        int r = row + q / per_row;
        scales[q] = softmax(t->scores + q * t->ld, b->ctx_lens[r] + b->extra_starts[r + 1] - b->extra_starts[r]);
        memset(t->outputs[q], 0, t->head_dim * sizeof(float));
    }
    mix_queries(t, 0, t->num_queries, table, shared, 0);
    for (int r = row, q = 0; r < end; r++, q += per_row) rest(b, t, mix_queries, table, r, shared, q, q + per_row);
    for (int q = 0; q < t->num_queries; q++)
        for (int i = 0; i < t->head_dim; i += 8) store(t->outputs[q] + i, load(t->outputs[q] + i) * scales[q]);
}
