/* The whole forward pass of a Llama, Qwen2 or Qwen3 decoder in one call: token ids and slots in, logits out. */
#include "attention.h"
#include "matmul.h"
#include "top.h"

typedef struct {
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm; /* q_norm, k_norm: [head_dim] or NULL */
    Matrix qkv, out, gate_up, down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scale;
    const float *embedding, *final_norm; /* [vocab][hidden], [hidden] */
    const float *cos, *sin;              /* [position][head_dim / 2] */
    const Layer *layers;
    Matrix head;
    float *keys, *values; /* [layer][num_kv_heads][slot][head_dim] */
    int64_t num_slots;
} Model;

typedef struct {
    float *hidden, *normed, *qkv, *attended, *act, *scores;
    int ld_hidden, ld_qkv, ld_attended, ld_act; /* row strides in floats: whole panels */
    long ld_scores;
} Workspace;

static int whole_panels(int n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Divide `block` among the buffers; return how many floats they take. With NULL, only count. */
static int64_t lay_out(const Model *m, const Batch *b, float *block, Workspace *w) {
    int64_t rows = b->num_rows, used = 0;
    w->ld_hidden = whole_panels(m->hidden);
    w->ld_qkv = whole_panels((m->num_heads + 2 * m->num_kv_heads) * m->head_dim);
    w->ld_attended = m->num_heads * m->head_dim;
    w->ld_act = whole_panels(m->intermediate);
    w->ld_scores = (b->max_slots + 15) / 8 * 8;
    w->hidden = block + used, used += rows * w->ld_hidden;
    w->normed = block + used, used += rows * w->ld_hidden;
    w->qkv = block + used, used += rows * w->ld_qkv;
    w->attended = block + used, used += rows * w->ld_attended;
    w->act = block + used, used += rows * w->ld_act;
    w->scores = block + used, used += MAX_QUERIES * w->ld_scores;
    return used;
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    v8 squares = {0};
    for (int i = 0; i < n; i += 8) squares = fma8(load(x + i), load(x + i), squares);
    float scale = 1.0f / sqrtf(sum8(squares) / n + eps);
    for (int i = 0; i < n; i += 8) store(out + i, load(x + i) * scale * load(weight + i));
}

static void norm_rows(const Model *m, const Workspace *w, const float *weight, int num_rows) {
    for (long r = 0; r < num_rows; r++)
        rms_norm(w->hidden + r * w->ld_hidden, weight, m->hidden, m->eps, w->normed + r * w->ld_hidden);
}

/* Rotate one head in place; `scale` goes into the queries. */
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

static void attend_rows(const Model *m, const Batch *b, const Workspace *w, const float *keys, const float *values,
                        int session, int row, int end) {
    int per_row = m->num_heads / m->num_kv_heads;
    for (int h = 0; h < m->num_kv_heads; h++)
        for (int g = 0; g < per_row; g += MAX_QUERIES) { /* more than 12 query heads a KV head: in portions */
            int heads = MIN(per_row - g, MAX_QUERIES);
            Tile t = {.head_dim = m->head_dim, .ld = w->ld_scores, .scores = w->scores};
            t.num_queries = (end - row) * heads;
            t.keys = keys + h * m->num_slots * m->head_dim, t.values = values + h * m->num_slots * m->head_dim;
            for (int q = 0; q < t.num_queries; q++) {
                long r = row + q / heads, offset = (h * per_row + g + q % heads) * m->head_dim;
                t.queries[q] = w->qkv + r * w->ld_qkv + offset;
                t.outputs[q] = w->attended + r * w->ld_attended + offset;
            }
            attend_tile(b, &t, b->tables[session], row, end, heads);
        }
}

static void attention(const Model *m, const Batch *b, const Workspace *w, int layer) {
    long offset = layer * m->num_kv_heads * m->num_slots * m->head_dim;
    float *keys = m->keys + offset, *values = m->values + offset;
    for (long r = 0; r < b->num_rows; r++)
        prepare_row(m, &m->layers[layer], w->qkv + r * w->ld_qkv, b->positions[r], b->slots[r], keys, values);
    int step = MAX_QUERIES / MIN(m->num_heads / m->num_kv_heads, MAX_QUERIES);
    for (int s = 0; s < b->num_sessions; s++)
        for (int row = b->row_starts[s], end = b->row_starts[s + 1]; row < end; row += step)
            attend_rows(m, b, w, keys, values, s, row, MIN(row + step, end));
}

/* Move the rows that are judged to the front; after the last layer's attention the others are needed no more. */
static void keep_judged(const Batch *b, const Workspace *w) {
    for (long j = 0; j < b->num_logit_rows; j++) {
        long r = b->logit_rows[j];
        memmove(w->hidden + j * w->ld_hidden, w->hidden + r * w->ld_hidden, w->ld_hidden * sizeof(float));
        memmove(w->attended + j * w->ld_attended, w->attended + r * w->ld_attended, w->ld_attended * sizeof(float));
    }
}

static void run_layer(const Model *m, const Batch *b, const Workspace *w, int layer) {
    const Layer *l = &m->layers[layer];
    int rows = b->num_rows;
    norm_rows(m, w, l->attn_norm, rows);
    matmul(&l->qkv, w->normed, w->ld_hidden, rows, w->qkv, w->ld_qkv, STORE);
    attention(m, b, w, layer);
    if (layer == m->num_layers - 1) {
        keep_judged(b, w);
        rows = b->num_logit_rows;
    }
    matmul(&l->out, w->attended, w->ld_attended, rows, w->hidden, w->ld_hidden, ADD);
    norm_rows(m, w, l->mlp_norm, rows);
    matmul(&l->gate_up, w->normed, w->ld_hidden, rows, w->act, w->ld_act, SILU_MUL);
    matmul(&l->down, w->act, w->ld_act, rows, w->hidden, w->ld_hidden, ADD);
}

int64_t specq_workspace_floats(const Model *m, const Batch *b) {
    Workspace w;
    return lay_out(m, b, NULL, &w);
}

/* logits [num_logit_rows][whole panels of vocab]; hidden [num_logit_rows][hidden]: after the final norm. */
void specq_forward(const Model *m, const Batch *b, float *block, float *logits, float *hidden) {
    Workspace w;
    lay_out(m, b, block, &w);
    for (long r = 0; r < b->num_rows; r++)
        memcpy(w.hidden + r * w.ld_hidden, m->embedding + (long)b->token_ids[r] * m->hidden, m->hidden * sizeof(float));
    for (int layer = 0; layer < m->num_layers; layer++) run_layer(m, b, &w, layer);
    norm_rows(m, &w, m->final_norm, b->num_logit_rows);
    for (long j = 0; j < b->num_logit_rows; j++)
        memcpy(hidden + j * m->hidden, w.normed + j * w.ld_hidden, m->hidden * sizeof(float));
    matmul(&m->head, w.normed, w.ld_hidden, b->num_logit_rows, logits, m->head.num_panels * PANEL, STORE);
}
