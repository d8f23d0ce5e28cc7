/* out = x W^T for 1 to a few hundred rows; weights.h says how W is packed.
 *
 * With few rows, reading W limits the speed. All rows of a tile then use a panel at once, and its weights are expanded
 * in registers. With more rows than a few tiles, arithmetic limits the speed. A panel is then expanded to floats once
 * for all tiles.
 */
#pragma once
#include "team.h"
#include "weights.h"

enum { GROUP = 6, MAX_BLOCK_PANELS = 3 };        /* panels of a chunk of work; panels of blocks multiplied at once */
enum { TILE_ROWS = LANES == 16 ? 8 : 6 };

typedef struct {
    const Matrix *m;
    const float *x; /* [num_rows][ldx] */
    float *out;     /* [num_rows][ldo]; ldo covers whole panels */
    int num_rows, ldx, ldo;
    enum epilogue epilogue;
    long ahead;     /* prefetch distance in bytes: to a thread's next group */
    float *room;    /* [threads][ld_room]: for an expanded panel each */
    long ld_room;
} Product;

/* Floats of room that a product needs for each thread: an expanded panel. */
static long room_each(long longest_input) { return PANEL * longest_input; }
static long rooms(long num_rows, long num_threads) {
    (void)num_rows;
    return num_threads;
}

/* Write a tile's sums [rows][panels][PANEL] to the output. It must not be inlined: the constants of exp8 would push the
 * tile's sums out of the registers. SILU_MUL: a panel holds 8 gate columns and the matching 8 up columns. */
static __attribute__((noinline)) void finish(enum epilogue epilogue, const float *sums, int rows, int panels,
                                             const float *bias, int panel, float *out, int ldo) {
    for (int r = 0; r < rows; r++, out += ldo)
        for (int p = panel; p < panel + panels; p++, sums += PANEL) {
            v8 low = load(sums), high = load(sums + 8);
            if (bias) low += load(bias + p * PANEL), high += load(bias + p * PANEL + 8);
            if (epilogue == ADD) low += load(out + p * PANEL), high += load(out + p * PANEL + 8);
            if (epilogue == SILU_MUL) {
                store(out + p * 8, silu_mul(low, high));
            } else {
                store(out + p * PANEL, low);
                store(out + p * PANEL + 8, high);
            }
        }
}

/* sums += x[.][i] w for all rows of a tile. */
INLINE void add_products(int rows, const vec w[PARTS], const float *x, int ldx, vec (*sums)[PARTS]) {
    for (int r = 0; r < rows; r++) {
        vec factor = vec_splat(x[r * ldx]);
        for (int part = 0; part < PARTS; part++) sums[r][part] = vec_fma(factor, w[part], sums[r][part]);
    }
}

/* Compute rows x panels of the output, all sums in registers. rows, panels and format are constants after inlining. */
INLINE void tile_of_lines(int rows, int panels, int format, const Product *t, const char *weights, const float *x,
                          vec sums[][TILE_ROWS][PARTS]) {
    const long line = panel_bytes(format, 1), next_panel = line * t->m->k, next = t->ahead;
    const int ldx = t->ldx;
    for (long i = 0; i < t->m->k; i++)
        for (int p = 0; p < panels; p++) {
            const char *columns = weights + p * next_panel + i * line;
            vec w[PARTS];
            __builtin_prefetch(columns + next, 0, 2); /* into the L2 cache */
            expand_line(format, columns, w);
            add_products(rows, w, x + i, ldx, sums[p]);
        }
}

INLINE void tile_of_blocks(int rows, int panels, int format, const Product *t, const char *weights, const float *x,
                           vec sums[][TILE_ROWS][PARTS]) {
    const int step = step_of(format), ldx = t->ldx;
    const long next_panel = panel_bytes(format, t->m->k), next = t->ahead, words = PANEL * (format == Q4_1 ? 4 : 2);
    for (long i = 0; i < t->m->k; i += BLOCK, weights += panel_bytes(format, BLOCK)) {
        Scales scales[MAX_BLOCK_PANELS];
        for (int p = 0; p < panels; p++) scales[p] = load_scales(format, weights + p * next_panel);
        for (int j = 0; j < BLOCK; j += step) {
            vec_int bits[MAX_BLOCK_PANELS][PARTS];
            for (int p = 0; p < panels; p++) {
                const char *line = weights + p * next_panel + words + (j / step) * 4 * PANEL;
                __builtin_prefetch(line + next, 0, 2);
                for (int part = 0; part < PARTS; part++) bits[p][part] = vec_load_int(line + 4 * LANES * part);
            }
            for (int n = 0; n < step; n++)
                for (int p = 0; p < panels; p++) {
                    const Scales *s = &scales[p];
                    vec w[PARTS];
                    for (int part = 0; part < PARTS; part++)
                        w[part] = expand_word(format, bits[p][part], n, s->scale[part], s->minimum[part]);
                    add_products(rows, w, x + i + j + n, ldx, sums[p]);
                }
        }
    }
}

INLINE void tile(int rows, int panels, int format, const Product *t, const char *weights, int panel, const float *x,
                 float *out) {
    vec sums[GROUP][TILE_ROWS][PARTS] = {0};
    float done[GROUP * TILE_ROWS * PANEL];
    if (format == F32 || format == BF16)
        tile_of_lines(rows, panels, format, t, weights, x, sums);
    else
        tile_of_blocks(rows, panels, format, t, weights, x, sums);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int part = 0; part < PARTS; part++)
                vec_store(done + (r * panels + p) * PANEL + part * LANES, sums[p][r][part]);
    finish(t->epilogue, done, rows, panels, t->m->bias, panel, out, t->ldo);
}

/* Return how many panels are multiplied at once. Panels of lines fill the registers. For blocks, whose scales also take
 * registers, there are enough panels that a sum's next product does not wait for the last one. */
INLINE int panels_at_once(int rows, int format) {
    const int fit = ACCUMULATORS / (rows * PARTS), most = fit > GROUP ? GROUP : fit < 1 ? 1 : fit;
    if (format == F32 || format == BF16) return most;
    return LANES < 16 ? 1 : rows > 1 ? 2 : MAX_BLOCK_PANELS;
}

/* Compute panels panel .. end for one tile of rows. */
INLINE void tiles(int rows, int format, const Product *t, const char *weights, int panel, int end, const float *x,
                  float *out) {
    const int at_once = panels_at_once(rows, format);
    const long bytes = panel_bytes(format, t->m->k);
    for (; panel + at_once <= end; panel += at_once, weights += at_once * bytes)
        tile(rows, at_once, format, t, weights, panel, x, out);
    for (; panel < end; panel++, weights += bytes) tile(rows, 1, format, t, weights, panel, x, out);
}

/* Return the next tile's rows: equal shares of the rest, since a tile with few rows does not use all multipliers. */
INLINE int next_rows(int left) {
    const int num_tiles = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + num_tiles - 1) / num_tiles;
}

/* Compute all rows over panels panel .. end, whose packed weights begin at `weights`. */
INLINE void rows_over(int format, const Product *t, const char *weights, int panel, int end) {
    for (int row = 0, rows; row < t->num_rows; row += rows) {
        const float *x = t->x + (long)row * t->ldx;
        float *out = t->out + (long)row * t->ldo;
        rows = next_rows(t->num_rows - row);
        switch (rows) {
        case 1: tiles(1, format, t, weights, panel, end, x, out); break;
        case 2: tiles(2, format, t, weights, panel, end, x, out); break;
        case 3: tiles(3, format, t, weights, panel, end, x, out); break;
        case 4: tiles(4, format, t, weights, panel, end, x, out); break;
        case 5: tiles(5, format, t, weights, panel, end, x, out); break;
#if LANES == 16
        case 6: tiles(6, format, t, weights, panel, end, x, out); break;
        case 7: tiles(7, format, t, weights, panel, end, x, out); break;
#endif
        default: tiles(TILE_ROWS, format, t, weights, panel, end, x, out);
        }
    }
}

/* Consecutive tiles use the same few panels, just enough to fill the registers. These stay in the nearest cache. */
INLINE void all_rows(int format, const Product *t, const char *weights, int panel, int end) {
    const int few = t->num_rows > TILE_ROWS ? ACCUMULATORS / (TILE_ROWS * PARTS) : end - panel;
    for (int last; panel < end; weights += (last - panel) * panel_bytes(format, t->m->k), panel = last) {
        last = MIN(panel + few, end);
        rows_over(format, t, weights, panel, last);
    }
}

/* Expand each panel once. The next panel is prefetched while the tiles of this one are computed. */
static void multiply_expanded(const Product *t, int first, int end, int worker) {
    const long bytes = panel_bytes(t->m->format, t->m->k);
    float *expanded = t->room + worker * t->ld_room;
    Product at = *t;
    for (int panel = first; panel < end; panel++) {
        const char *weights = (const char *)t->m->weights + panel * bytes;
        at.ahead = weights + (panel + 1 < end ? bytes : t->ahead) - (const char *)expanded;
        expand_panel(t->m->format, weights, t->m->k, expanded);
        all_rows(F32, &at, (const char *)expanded, panel, panel + 1);
    }
}

/* Return whether every tile expands the weights again. Expanding a bfloat16 costs less than reading an expanded panel
 * from the cache. With the widest vectors and few tiles, so does expanding a block. */
static int is_direct(const Product *t) {
    const int tiles = t->m->format == BF16 ? 4 : LANES == 16 ? 3 : 1;
    return t->m->format == F32 || t->num_rows <= tiles * TILE_ROWS;
}

static void multiply(const void *product, int first, int end, int worker) {
    const Product *t = product;
    const char *weights = (const char *)t->m->weights + first * panel_bytes(t->m->format, t->m->k);
    if (!is_direct(t)) {
        multiply_expanded(t, first, end, worker);
        return;
    }
    switch (t->m->format) {
    case F32: all_rows(F32, t, weights, first, end); break;
    case BF16: all_rows(BF16, t, weights, first, end); break;
    case Q4_1: all_rows(Q4_1, t, weights, first, end); break;
    default: all_rows(Q8_0, t, weights, first, end);
    }
}

static void matmul(Team *team, Product product) {
    const Matrix *m = product.m;
    product.ahead = (long)GROUP * (team ? team->num_threads : 1) * panel_bytes(m->format, m->k);
    share(team, multiply, &product, m->num_panels, GROUP);
}
