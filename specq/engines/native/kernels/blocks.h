/* out = x W^T in integers, for blocks of weights (formats.h) and 8-bit activations (activations.h).
 *
 * Within a group of a K type, and within a block of the others, the sum of products is an exact integer. It is converted
 * to float, which rounds once, and multiplied with the product of both scales. Then the minima's part is subtracted (K
 * types) or added. Groups and blocks follow in the order of k. No multiplication and addition is fused. So an output has
 * the same bits for any number of rows and threads, and on every instruction set.
 *
 * Instruction sets: each has a file with `add_group`, TILE_ROWS and FOR_ROWS (1 .. TILE_ROWS). To add one, write such a
 * file and include it below.
 */
#pragma once
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#include "blocks_vnni.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#include "blocks_avx2.h"
#else
#include "blocks_portable.h"
#endif

enum {
    ROW_BLOCK = 32,          /* rows whose activations are together, group by group */
    AHEAD_BYTES = 6144,      /* prefetch distance */
    CHUNK_BYTES = 256 << 10, /* weights of a chunk of work, about */
    CHUNK_FLOATS = 8 << 10,  /* activations of a chunk of work, if there is more than one row */
    LEAST_CHUNKS = 2         /* of a product, for each thread */
};

typedef struct {
    const Matrix *m;
    const float *x; /* [num_rows][ldx] */
    float *out;     /* [num_rows][ldo]; ldo covers whole panels */
    int num_rows, ldx, ldo;
    enum epilogue epilogue;
    void *room; /* room_floats */
    long ld_room;
} Product;

INLINE long groups_of(long k) { return (k + SUPER - 1) / SUPER; }

/* Kinds of a matrix's panels, in its `format`: each needs the activations in its own form. */
enum kinds { HAS_SUPERS = 1, HAS_BLOCKS = 2 };

/* Floats of room that a product needs: for each row, all of its groups in both forms. */
static long room_each(long longest_input) { return 2 * groups_of(longest_input) * (long)(sizeof(Activation) / sizeof(float)); }
static long rooms(long num_rows, long num_threads) {
    (void)num_threads;
    return num_rows;
}

/* Return where a block of rows has its activations, [group][rows of the block]. */
INLINE Activation *activations_of(const Product *t, int super, int row) {
    const long first = super ? 0 : t->num_rows;
    return (Activation *)t->room + (first + row / ROW_BLOCK * ROW_BLOCK) * groups_of(t->m->k);
}
INLINE int rows_of_block(const Product *t, int row) { return MIN(t->num_rows - row / ROW_BLOCK * ROW_BLOCK, ROW_BLOCK); }

static void quantise_row(const Product *t, int super, int row) {
    const float *x = t->x + (long)row * t->ldx;
    Activation *a = activations_of(t, super, row) + row % ROW_BLOCK;
    for (int i = 0; i < t->m->k; i += SUPER, a += rows_of_block(t, row)) {
        const int count = MIN(t->m->k - i, SUPER) / BLOCK;
        if (super)
            quantise_group(x + i, count, a);
        else
            quantise_blocks(x + i, count, a);
    }
}

static void quantise_some(const void *product, int first, int end, int worker) {
    const Product *t = product;
    (void)worker;
    for (int row = first; row < end; row++) {
        if (t->m->format & HAS_SUPERS) quantise_row(t, 1, row);
        if (t->m->format & HAS_BLOCKS) quantise_row(t, 0, row);
    }
}

/* A group of a panel for one tile of rows. */
typedef void AddGroup(const uint8_t *floats, const uint8_t *group, int count, const Activation *a, const uint8_t *ahead,
                      float (*out)[PANEL]);

#define ADD_GROUP(format, rows)                                                                                      \
    static __attribute__((noinline)) void add_##format##_##rows(const uint8_t *floats, const uint8_t *group, int count, \
                                                                const Activation *a, const uint8_t *ahead,           \
                                                                float (*out)[PANEL]) {                               \
        add_group(format, rows, floats, group, count, a, ahead, out);                                                \
    }
#define FOR_5_ROWS(each, format) each(format, 1) each(format, 2) each(format, 3) each(format, 4) each(format, 5)
#define FOR_8_ROWS(each, format) FOR_5_ROWS(each, format) each(format, 6) each(format, 7) each(format, 8)
#define FOR_FORMATS(each)                                                                                             \
    FOR_ROWS(each, Q4_0) FOR_ROWS(each, Q4_1) FOR_ROWS(each, Q5_0) FOR_ROWS(each, Q5_1) FOR_ROWS(each, Q8_0)         \
        FOR_ROWS(each, Q4_K) FOR_ROWS(each, Q5_K) FOR_ROWS(each, Q6_K)
FOR_FORMATS(ADD_GROUP)

#define NAME_GROUP(format, rows) [format][rows] = add_##format##_##rows,
static AddGroup *const ADD_GROUPS[NUM_FORMATS][TILE_ROWS + 1] = {FOR_FORMATS(NAME_GROUP)};

/* Add a panel's sums for `rows` rows of a block of rows; `sums` must be zero. */
static void add_panel(const Panel *panel, long k, int rows, const Activation *a, float (*sums)[PANEL]) {
    const int format = panel->format, super = is_super(format), num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const long floats_each = float_bytes(format) * (super ? 1 : GROUP);
    const long group_each = scale_bytes(format) + GROUP * block_bytes(format), front = front_bytes(format, k);
    const uint8_t *floats = panel->data, *group = floats + front;
    for (long i = 0; i < front; i += 64) __builtin_prefetch(floats + AHEAD_BYTES + i, 0, 2);
    for (long i = 0; i < k; i += SUPER, floats += floats_each, group += group_each, a += rows) {
        const int count = MIN(k - i, SUPER) / BLOCK;
        for (int tile = 0, row = 0; tile < num_tiles; tile++) {
            const int here = (rows - row + num_tiles - tile - 1) / (num_tiles - tile);
            /* later tiles fetch what is there already */
            ADD_GROUPS[format][here](floats, group, count, a + row, group + (tile ? 0 : AHEAD_BYTES), sums + row);
            row += here;
        }
    }
}

/* The same for floats: products in the order of k, without activations in integers. */
static void add_float_panel(const float *panel, long k, int rows, const float *x, int ldx, float (*sums)[PANEL]) {
    for (int r = 0; r < rows; r++) {
        v8 low = {0}, high = {0};
        for (long i = 0; i < k; i++) {
            const v8 factor = splat(x[(long)r * ldx + i]);
            low += factor * load(panel + i * PANEL);
            high += factor * load(panel + i * PANEL + 8);
        }
        store(sums[r], low), store(sums[r] + 8, high);
    }
}

static void sum_panel(const Product *t, int panel, int row, int rows, float (*sums)[PANEL]) {
    const Panel *p = (const Panel *)t->m->weights + panel;
    memset(sums, 0, rows * sizeof *sums);
    if (is_float(p->format))
        add_float_panel((const float *)p->data, t->m->k, rows, t->x + (long)row * t->ldx, t->ldx, sums);
    else
        add_panel(p, t->m->k, rows, activations_of(t, is_super(p->format), row), sums);
    for (int r = 0; t->m->bias && r < rows; r++)
        for (int i = 0; i < PANEL; i += 8) store(sums[r] + i, load(sums[r] + i) + load(t->m->bias + panel * PANEL + i));
}

/* Write sums to the output of columns of a panel. `up` only for SILU_MUL. */
static void finish(enum epilogue epilogue, int rows, float (*sums)[PANEL], float (*up)[PANEL], float *out, int ldo) {
    for (int r = 0; r < rows; r++, out += ldo)
        for (int i = 0; i < PANEL; i += LANES) {
            vec sum = vec_load(sums[r] + i);
            if (epilogue == ADD) sum += vec_load(out + i);
            if (epilogue == SILU_MUL) sum = vec_silu_mul(sum, vec_load(up[r] + i));
            vec_store(out + i, sum);
        }
}

/* Compute panels first .. end, or pairs of panels for SILU_MUL: the first of a pair is the gate's. */
static void multiply(const void *product, int first, int end, int worker) {
    const Product *t = product;
    float sums[2][ROW_BLOCK][PANEL] __attribute__((aligned(64)));
    const int each = t->epilogue == SILU_MUL ? 2 : 1;
    (void)worker;
    for (int row = 0; row < t->num_rows; row += ROW_BLOCK) {
        const int rows = rows_of_block(t, row);
        for (int unit = first; unit < end; unit++) {
            for (int i = 0; i < each; i++) sum_panel(t, unit * each + i, row, rows, sums[i]);
            finish(t->epilogue, rows, sums[0], sums[1], t->out + (long)row * t->ldo + unit * PANEL, t->ldo);
        }
    }
}

/* Return the units of a chunk: chunks of equal size, as many for each thread. */
INLINE int units_of_chunk(const Matrix *m, int num_units, int num_threads) {
    const long bytes = m->num_panels * panel_bytes(((const Panel *)m->weights)->format, m->k);
    const long for_each = (bytes + CHUNK_BYTES * num_threads - 1) / ((long)CHUNK_BYTES * num_threads);
    const long chunks = (for_each > LEAST_CHUNKS ? for_each : LEAST_CHUNKS) * num_threads;
    return (num_units + chunks - 1) / chunks;
}

static void matmul(Team *team, Product product) {
    const Matrix *m = product.m;
    const int num_units = m->num_panels / (product.epilogue == SILU_MUL ? 2 : 1);
    const int few_rows = CHUNK_FLOATS / m->k;
    share(team, quantise_some, &product, product.num_rows, few_rows > 1 ? few_rows : 1);
    share(team, multiply, &product, num_units, units_of_chunk(m, num_units, team ? team->num_threads : 1));
}
