/* The whole forward pass of a Llama, Qwen2 or Qwen3 decoder in one call: token ids and slots in, logits out. */
#define _GNU_SOURCE /* for pthread_setaffinity_np */
#include "attention.h"
#ifdef INTEGER
#include "blocks.h"
#include "repack.h"
#else
#include "matmul.h"
#include "pack.h"
#endif
#include "rows.h"
#include "top.h"

typedef struct {
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm; /* q_norm, k_norm: [head_dim] or NULL */
    Matrix qkv, out, gate_up, down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scale;
    const void *embedding;               /* float [vocab][hidden]; for integer arithmetic, a Matrix */
    const float *final_norm;             /* [hidden] */
    const float *cos, *sin;              /* [position][head_dim / 2] */
    const Layer *layers;
    Matrix head;
    float *keys, *values; /* [layer][num_kv_heads][slot][head_dim] */
    int64_t num_slots;
} Model;

/* Hidden states to copy out: of these rows, after these layers. FINAL: after the final norm. */
typedef struct {
    int32_t num_layers, num_rows;
    const int32_t *layers, *rows;
    float *out; /* [row][layer][hidden] */
} Tap;

enum { FINAL = -1 };

/* Rows row .. end of one session, which attend together. */
typedef struct {
    int32_t session, row, end;
} Span;

typedef struct {
    float *hidden, *normed, *qkv, *attended, *act;
    float *scores;                              /* one per thread */
    float *room;                                /* of products: rooms() of ld_room floats */
    Span *spans;                                /* at most one per row */
    int ld_hidden, ld_qkv, ld_attended, ld_act; /* row strides in floats: whole panels */
    int num_spans;
    long ld_scores, ld_room;
} Workspace;

/* Shared data of the threads of a forward pass. Only the caller changes it, and only between tasks. */
typedef struct {
    const Model *m;
    const Batch *b;
    Workspace w;
    Team *team;
    const Tap *tap; /* NULL: no states are copied out */
    int layer;
    const float *norm;
} Pass;

enum { FEW_ROWS = 4 }; /* chunk size for work that is fast per row */

static int whole_panels(int n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Return the most inputs of any linear layer. */
static long longest_input(const Model *m) {
    long attended = m->num_heads * m->head_dim, most = m->hidden > attended ? m->hidden : attended;
    return m->intermediate > most ? m->intermediate : most;
}

/* Divide `block` among the buffers; return their size in floats. With NULL, only count. */
static int64_t lay_out(const Model *m, const Batch *b, const Team *team, float *block, Workspace *w) {
    int64_t rows = b->num_rows, threads = team ? team->num_threads : 1, used = 0;
    w->ld_hidden = whole_panels(m->hidden);
    w->ld_qkv = whole_panels((m->num_heads + 2 * m->num_kv_heads) * m->head_dim);
    w->ld_attended = m->num_heads * m->head_dim;
    w->ld_act = whole_panels(m->intermediate);
    w->ld_scores = (b->max_slots + 15) / 8 * 8;
    w->ld_room = room_each(longest_input(m));
    w->room = block + used, used += rooms(rows, threads) * w->ld_room;
    w->hidden = block + used, used += rows * w->ld_hidden;
    w->normed = block + used, used += rows * w->ld_hidden;
    w->qkv = block + used, used += rows * w->ld_qkv;
    w->attended = block + used, used += rows * w->ld_attended;
    w->act = block + used, used += rows * w->ld_act;
    w->spans = (Span *)(block + used), used += rows * (sizeof(Span) / sizeof(float));
    w->scores = block + used, used += threads * MAX_QUERIES * w->ld_scores;
    return used;
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    v8 squares = {0};
    for (int i = 0; i < n; i += 8) squares = fma8(load(x + i), load(x + i), squares);
    float scale = 1.0f / sqrtf(sum8(squares) / n + eps);
    for (int i = 0; i < n; i += 8) store(out + i, load(x + i) * scale * load(weight + i));
}

static void norm_some(const void *pass, int first, int end, int worker) {
    const Pass *p = pass;
    const Workspace *w = &p->w;
    (void)worker;
    for (long r = first; r < end; r++)
        rms_norm(w->hidden + r * w->ld_hidden, p->norm, p->m->hidden, p->m->eps, w->normed + r * w->ld_hidden);
}

static void multiply_rows(Pass *p, const Matrix *m, const float *x, int ldx, int num_rows, float *out, int ldo,
                          enum epilogue epilogue) {
    const Product product = {.m = m, .x = x, .out = out, .num_rows = num_rows, .ldx = ldx, .ldo = ldo,
                             .epilogue = epilogue, .room = p->w.room, .ld_room = p->w.ld_room};
    matmul(p->team, product);
}

static void norm_rows(Pass *p, const float *weight, int num_rows) {
    p->norm = weight;
    share(p->team, norm_some, p, num_rows, FEW_ROWS);
}

/* Rotate one head in place. `scale` is multiplied into the queries. */
static void rotate(float *x, const float *cos, const float *sin, int half, float scale) {
    for (int i = 0; i < half; i += 8) {
        v8 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, fma8(a, c, -(b * s)) * scale);
        store(x + half + i, fma8(b, c, a * s) * scale);
    }
}

/* Norm (Qwen3), rotate and scale one row's queries and keys, and write its KV to its slot of this layer's pools. */
static void prepare_row(const Model *m, const Layer *l, float *qkv, int position, int slot, float *keys,
                        float *values) {
    int half = m->head_dim / 2, num_rotated = m->num_heads + m->num_kv_heads;
    const float *cos = m->cos + (long)position * half, *sin = m->sin + (long)position * half;
    for (int h = 0; h < num_rotated; h++) {
        float *x = qkv + h * m->head_dim;
        const float *norm = h < m->num_heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm(x, norm, m->head_dim, m->eps, x);
        rotate(x, cos, sin, half, h < m->num_heads ? m->scale : 1.0f);
    }
    for (int h = 0; h < m->num_kv_heads; h++) {
        long to = (h * m->num_slots + slot) * m->head_dim;
        memcpy(keys + to, qkv + (m->num_heads + h) * m->head_dim, m->head_dim * sizeof(float));
        memcpy(values + to, qkv + (num_rotated + h) * m->head_dim, m->head_dim * sizeof(float));
    }
}

/* Return where the layer's keys or values begin in their pool. */
INLINE float *of_layer(const Pass *p, float *pool) {
    return pool + p->layer * p->m->num_kv_heads * p->m->num_slots * p->m->head_dim;
}

static void prepare_some(const void *pass, int first, int end, int worker) {
    const Pass *p = pass;
    const Model *m = p->m;
    (void)worker;
    for (long r = first; r < end; r++)
        prepare_row(m, &m->layers[p->layer], p->w.qkv + r * p->w.ld_qkv, p->b->positions[r], p->b->slots[r],
                    of_layer(p, m->keys), of_layer(p, m->values));
}

/* Compute attention of one span for one KV head. */
static void attend_head(const Pass *p, const Span *span, int h, float *scores) {
    const Model *m = p->m;
    const Workspace *w = &p->w;
    int per_row = m->num_heads / m->num_kv_heads;
    long offset = h * m->num_slots * m->head_dim;
    Tile t = {.head_dim = m->head_dim, .ld = w->ld_scores, .scores = scores};
    t.keys = of_layer(p, m->keys) + offset, t.values = of_layer(p, m->values) + offset;
    for (int g = 0; g < per_row; g += MAX_QUERIES) { /* more than 12 query heads per KV head are split */
        int heads = MIN(per_row - g, MAX_QUERIES);
        t.num_queries = (span->end - span->row) * heads;
        for (int q = 0; q < t.num_queries; q++) {
            long r = span->row + q / heads, column = (h * per_row + g + q % heads) * m->head_dim;
            t.queries[q] = w->qkv + r * w->ld_qkv + column;
            t.outputs[q] = w->attended + r * w->ld_attended + column;
        }
        attend_tile(p->b, &t, p->b->tables[span->session], span->row, span->end, heads);
    }
}

static void attend_some(const void *pass, int first, int end, int worker) {
    const Pass *p = pass;
    float *scores = p->w.scores + worker * MAX_QUERIES * p->w.ld_scores;
    for (int i = first; i < end; i++)
        attend_head(p, &p->w.spans[i / p->m->num_kv_heads], i % p->m->num_kv_heads, scores);
}

/* Cut each session's rows into spans that fill a tile. */
static void find_spans(const Model *m, const Batch *b, Workspace *w) {
    int step = MAX_QUERIES / MIN(m->num_heads / m->num_kv_heads, MAX_QUERIES);
    w->num_spans = 0;
    for (int s = 0; s < b->num_sessions; s++)
        for (int row = b->row_starts[s], end = b->row_starts[s + 1]; row < end; row += step)
            w->spans[w->num_spans++] = (Span){s, row, MIN(row + step, end)};
}

/* Keep only the rows that give logits, in their order. The other rows are not needed after the last layer's attention,
 * so their buffers are free. */
static void keep_logit_rows(const Batch *b, Workspace *w) {
    float *hidden = w->normed, *attended = w->qkv;
    for (long j = 0; j < b->num_logit_rows; j++) {
        long r = b->logit_rows[j];
        memcpy(hidden + j * w->ld_hidden, w->hidden + r * w->ld_hidden, w->ld_hidden * sizeof(float));
        memcpy(attended + j * w->ld_attended, w->attended + r * w->ld_attended, w->ld_attended * sizeof(float));
    }
    w->normed = w->hidden, w->hidden = hidden;
    w->attended = attended;
}

/* Copy out the requested states after a layer, or after the final norm. */
static void copy_out(const Pass *p, int layer) {
    const Tap *t = p->tap;
    const long hidden = p->m->hidden;
    for (long k = 0; t && k < t->num_layers; k++)
        for (long i = 0; t->layers[k] == layer && i < t->num_rows; i++) {
            const float *from = p->w.hidden + t->rows[i] * (long)p->w.ld_hidden;
            float *to = t->out + (i * t->num_layers + k) * hidden;
            if (layer == FINAL)
                rms_norm(from, p->m->final_norm, hidden, p->m->eps, to);
            else
                memcpy(to, from, hidden * sizeof(float));
        }
}

/* Return whether rows without logits are needed up to the end of the last layer. */
static int needs_all_rows(const Pass *p) {
    for (int k = 0; p->tap && k < p->tap->num_layers; k++)
        if (p->tap->layers[k] == FINAL || p->tap->layers[k] == p->m->num_layers - 1) return 1;
    return 0;
}

static void run_layer(Pass *p) {
    const Layer *l = &p->m->layers[p->layer];
    Workspace *w = &p->w;
    int rows = p->b->num_rows;
    norm_rows(p, l->attn_norm, rows);
    multiply_rows(p, &l->qkv, w->normed, w->ld_hidden, rows, w->qkv, w->ld_qkv, STORE);
    share(p->team, prepare_some, p, rows, FEW_ROWS);
    share(p->team, attend_some, p, w->num_spans * p->m->num_kv_heads, 1);
    if (p->layer == p->m->num_layers - 1 && !needs_all_rows(p)) {
        keep_logit_rows(p->b, w);
        rows = p->b->num_logit_rows;
    }
    multiply_rows(p, &l->out, w->attended, w->ld_attended, rows, w->hidden, w->ld_hidden, ADD);
    norm_rows(p, l->mlp_norm, rows);
    multiply_rows(p, &l->gate_up, w->normed, w->ld_hidden, rows, w->act, w->ld_act, SILU_MUL);
    multiply_rows(p, &l->down, w->act, w->ld_act, rows, w->hidden, w->ld_hidden, ADD);
}

static void embed(const Model *m, long token_id, float *out) {
#ifdef INTEGER
    expand_row(m->embedding, token_id, out);
#else
    memcpy(out, (const float *)m->embedding + token_id * m->hidden, m->hidden * sizeof(float));
#endif
}

static void run_pass(Pass *p, float *logits, float *hidden) {
    const Model *m = p->m;
    Workspace *w = &p->w;
    int num_rows = p->b->num_logit_rows;
    for (long r = 0; r < p->b->num_rows; r++)
        embed(m, p->b->token_ids[r], w->hidden + r * w->ld_hidden);
    for (p->layer = 0; p->layer < m->num_layers; p->layer++) {
        run_layer(p);
        copy_out(p, p->layer);
    }
    if (needs_all_rows(p)) {
        copy_out(p, FINAL);
        keep_logit_rows(p->b, w);
    }
    norm_rows(p, m->final_norm, num_rows);
    for (long j = 0; j < num_rows; j++)
        memcpy(hidden + j * m->hidden, w->normed + j * w->ld_hidden, m->hidden * sizeof(float));
    multiply_rows(p, &m->head, w->normed, w->ld_hidden, num_rows, logits, m->head.num_panels * PANEL, STORE);
}

/* Return how many rows a product computes at once. */
int64_t specq_tile_rows(void) { return TILE_ROWS; }

int64_t specq_workspace_floats(const Model *m, const Batch *b, const Team *team) {
    Workspace w;
    return lay_out(m, b, team, NULL, &w);
}

/* Run a forward pass. logits [num_logit_rows][whole panels of vocab]; hidden [num_logit_rows][hidden], after the final
 * norm. `team` may be NULL: only the caller computes then. `tap` may also be NULL. */
void specq_forward(const Model *m, const Batch *b, Team *team, float *block, float *logits, float *hidden, const Tap *tap) {
    Pass pass = {.m = m, .b = b, .team = team, .tap = tap};
    lay_out(m, b, team, block, &pass.w);
    find_spans(m, b, &pass.w);
    call_team(team);
    run_pass(&pass, logits, hidden);
    dismiss_team(team);
}

#include "chain.h"
