/* out = x W^T for 1 to a few hundred rows, with W packed once into panels of 16 output columns.
 *
 * A panel is [k][16] contiguous; the kernel streams it once per tile of up to 6 rows. Few rows are bound by the bytes
 * of W, so a matrix whose every weight is exactly a bfloat16 is stored as such: word i of a 32-byte line holds column
 * i in its low half and column i + 8 in its high half, and a shift and a mask turn it into the same floats.
 */
#pragma once
#include "team.h"

enum { PANEL = 16, GROUP = 4, TILE_ROWS = 6 };
enum epilogue { STORE, ADD, SILU_MUL };

typedef struct {
    const void *weights; /* [num_panels][k][PANEL], float or bfloat16 */
    const float *bias;   /* [num_panels * PANEL] or NULL */
    int32_t num_panels, k, is_bf16, pad;
} Matrix;

typedef struct {
    const Matrix *m;
    const float *x; /* [num_rows][ldx] */
    float *out;     /* [num_rows][ldo]; ldo covers whole panels */
    int num_rows, ldx, ldo;
    enum epilogue epilogue;
    int ahead; /* panels to fetch ahead: a thread's next group */
} Product;

INLINE void load_columns(const void *line, int is_bf16, v8 *low, v8 *high) {
    if (is_bf16) {
        v8i bits = *(const v8iu *)line;
        *low = (v8)(bits << 16);
        *high = (v8)(bits & (int32_t)0xffff0000);
    } else {
        *low = load(line);
        *high = load((const float *)line + 8);
    }
}

/* Write a tile's sums [rows][panels][PANEL] to the output. A call of its own, or the constants of exp8 crowd the tile's
 * sums out of the registers. SILU_MUL: a panel holds 8 gate columns and the 8 up columns that go with them. */
static __attribute__((noinline)) void finish(enum epilogue epilogue, const float *sums, int rows, int panels,
                                             const float *bias, int panel, float *out, int ldo) {
    for (int r = 0; r < rows; r++, out += ldo)
        for (int p = panel; p < panel + panels; p++, sums += PANEL) {
            v8 low = load(sums), high = load(sums + 8);
            if (bias) low += load(bias + p * PANEL), high += load(bias + p * PANEL + 8);
            if (epilogue == ADD) low += load(out + p * PANEL), high += load(out + p * PANEL + 8);
            if (epilogue == SILU_MUL) {
                store(out + p * 8, low / (1.0f + exp8(-low)) * high);
            } else {
                store(out + p * PANEL, low);
                store(out + p * PANEL + 8, high);
            }
        }
}

/* rows x panels of the output, all sums in registers; rows, panels and is_bf16 are constants where this is inlined. */
INLINE void tile(int rows, int panels, int is_bf16, const Product *t, int panel, const float *x, float *out) {
    const Matrix *m = t->m;
    const int ldx = t->ldx;
    const long line = is_bf16 ? 2 * PANEL : 4 * PANEL, panel_bytes = line * m->k, next = t->ahead * panel_bytes;
    const char *w = (const char *)m->weights + panel * panel_bytes;
    v8 sums[TILE_ROWS][GROUP][2] = {0};
    for (long i = 0; i < m->k; i++)
        for (int p = 0; p < panels; p++) {
            v8 low, high;
            const char *columns = w + p * panel_bytes + i * line;
            __builtin_prefetch(columns + next, 0, 2); /* into the L2 cache */
            load_columns(columns, is_bf16, &low, &high);
            for (int r = 0; r < rows; r++) {
                v8 factor = splat(x[r * ldx + i]);
                sums[r][p][0] = fma8(factor, low, sums[r][p][0]);
                sums[r][p][1] = fma8(factor, high, sums[r][p][1]);
            }
        }
    float done[TILE_ROWS * GROUP * PANEL];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            store(done + (r * panels + p) * PANEL, sums[r][p][0]);
            store(done + (r * panels + p) * PANEL + 8, sums[r][p][1]);
        }
    finish(t->epilogue, done, rows, panels, m->bias, panel, out, t->ldo);
}

/* One group of panels for one tile of rows: as many panels at once as fill the registers. */
INLINE void group(int rows, int at_once, int is_bf16, const Product *t, int panel, int end, const float *x,
                  float *out) {
    for (; panel + at_once <= end; panel += at_once) tile(rows, at_once, is_bf16, t, panel, x, out);
    for (; panel < end; panel++) tile(rows, 1, is_bf16, t, panel, x, out);
}

/* Tiles of 6 rows, but the last 7 to 10 in halves: few rows at once leave the multipliers waiting for their sums. */
INLINE int next_rows(int left) { return left > TILE_ROWS && left <= 10 ? (left + 1) / 2 : MIN(left, TILE_ROWS); }

INLINE void groups(int is_bf16, const Product *t, int first, int last) {
    for (int panel = first * GROUP; panel < MIN(last * GROUP, t->m->num_panels); panel += GROUP) {
        int end = MIN(panel + GROUP, t->m->num_panels);
        for (int row = 0, rows; row < t->num_rows; row += rows) {
            const float *x = t->x + (long)row * t->ldx;
            float *out = t->out + (long)row * t->ldo;
            rows = next_rows(t->num_rows - row);
            switch (rows) {
            case 1: group(1, 4, is_bf16, t, panel, end, x, out); break;
            case 2: group(2, 2, is_bf16, t, panel, end, x, out); break;
            case 3: group(3, 1, is_bf16, t, panel, end, x, out); break;
            case 4: group(4, 1, is_bf16, t, panel, end, x, out); break;
            case 5: group(5, 1, is_bf16, t, panel, end, x, out); break;
            default: group(6, 1, is_bf16, t, panel, end, x, out);
            }
        }
    }
}

static void multiply(const void *product, int first, int end, int worker) {
    const Product *t = product;
    (void)worker;
    if (t->m->is_bf16)
        groups(1, t, first, end);
    else
        groups(0, t, first, end);
}

static void matmul(Team *team, const Matrix *m, const float *x, int ldx, int num_rows, float *out, int ldo,
                   enum epilogue epilogue) {
    Product product = {m, x, out, num_rows, ldx, ldo, epilogue, GROUP * (team ? team->num_threads : 1)};
    share(team, multiply, &product, (m->num_panels + GROUP - 1) / GROUP, 1);
}
