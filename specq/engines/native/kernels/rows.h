/* Integers of a forward pass: packed rows from steps (specq/engines/native/rows.py), and the block that attention on a
 * GPU needs (specq/engines/torch/cuda/attention_plan.py has its layout). */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ITEM = 8, CHUNK = 64 }; /* integers of an item; a prefix item has a multiple of CHUNK slots */

/* Steps in sequence: each session's tokens, then its nodes. */
typedef struct {
    int32_t num_sessions;
    const int32_t *num_tokens, *num_nodes, *starts, *judged; /* of each session */
    const int32_t *token_ids, *slots;                        /* of all rows */
    const int32_t *parents;                                  /* of all nodes, within their session */
} Steps;

/* Write the arrays of PackedRows into block, in sequence. The input is sizes[0], the number of rows. The outputs are
 * sizes[1], the number of extras, and sizes[2], the number of rows with logits. Returns the length, or -1 if it exceeds
 * room. */
int64_t specq_pack_rows(const Steps *s, int32_t *sizes, int32_t *block, int64_t room) {
    const int32_t rows = sizes[0];
    int32_t *token_ids = block, *positions = token_ids + rows, *slots = positions + rows, *ctx_lens = slots + rows;
    int32_t *extra_starts = ctx_lens + rows, *extras = extra_starts + rows + 1;
    const int64_t head = 5 * (int64_t)rows + 1;
    const int32_t *parents = s->parents;
    int32_t row = 0, end = 0;
    if (head > room) return -1;
    memcpy(token_ids, s->token_ids, sizeof(int32_t) * rows);
    memcpy(slots, s->slots, sizeof(int32_t) * rows);
    extra_starts[0] = 0;
    for (int32_t i = 0; i < s->num_sessions; i++) {
        const int32_t base = s->starts[i] + s->num_tokens[i];
        for (int32_t position = s->starts[i]; position < base; position++, row++) {
            positions[row] = position;
            ctx_lens[row] = position + 1;
            extra_starts[row + 1] = end;
        }
        for (int32_t node = 0, first = row; node < s->num_nodes[i]; node++, row++) {
            const int32_t parent = *parents++;
            const int32_t *line = extras + (parent < 0 ? 0 : extra_starts[first + parent]);
            const int32_t depth = parent < 0 ? 0 : extra_starts[first + parent + 1] - extra_starts[first + parent];
            if (head + end + depth + 1 > room) return -1;
            memcpy(extras + end, line, sizeof(int32_t) * depth);
            extras[end + depth] = slots[row];
            end += depth + 1;
            positions[row] = base + depth;
            ctx_lens[row] = base;
            extra_starts[row + 1] = end;
        }
    }
    if (head + end + s->num_sessions + 1 + rows > room) return -1;
    int32_t *row_starts = extras + end, *logit_rows = row_starts + s->num_sessions + 1, num_logits = 0;
    row = 0;
    for (int32_t i = 0; i < s->num_sessions; i++) {
        row_starts[i] = row;
        row += s->num_tokens[i] + s->num_nodes[i];
        for (int32_t k = row - s->num_nodes[i] - 1; s->judged[i] && k < row; k++) logit_rows[num_logits++] = k;
    }
    row_starts[s->num_sessions] = row;
    sizes[1] = end;
    sizes[2] = num_logits;
    return head + end + s->num_sessions + 1 + num_logits;
}

typedef struct {
    int32_t num_rows, num_sessions, num_logits, num_extras;
    const int32_t *block;         /* the arrays of PackedRows */
    const int32_t *const *tables; /* of each session */
} Packed;

typedef struct {
    int32_t num_rows, rows_per_block, num_chunks, joins, max_items;
} Layout;

typedef struct {
    const int32_t *slots, *ctx_lens, *extra_starts, *extras;
    int32_t *prefixes, *nodes, *spans, *lists;
    int32_t num_prefixes, num_nodes, num_partials, list_end;
} Plan;

static void plan_item(int32_t *items, int32_t *count, int32_t row, int32_t rows, int32_t start, int32_t length,
                      int32_t position, int32_t partial, int32_t split) {
    const int32_t item[ITEM] = {row, rows, start, length, position, partial, split, 0};
    memcpy(items + ITEM * (*count)++, item, sizeof item);
}

/* Append a row's extras to the lists; return their number. */
static int32_t plan_list(Plan *p, int32_t row) {
    const int32_t count = p->extra_starts[row + 1] - p->extra_starts[row];
    memcpy(p->lists + p->list_end, p->extras + p->extra_starts[row], sizeof(int32_t) * count);
    p->list_end += count;
    return count;
}

/* Return the end of the run that begins with a row. A run is rows with extras, each the child of the row before. */
static int32_t run_end(const Plan *p, int32_t row, int32_t end) {
    const int32_t *starts = p->extra_starts;
    for (row++; row < end; row++) {
        const int32_t count = starts[row + 1] - starts[row];
        if (count != starts[row] - starts[row - 1] + 1 || p->extras[starts[row + 1] - 2] != p->slots[row - 1]) break;
    }
    return row;
}

static int32_t first_with_extras(const Plan *p, int32_t row, int32_t end) {
    while (row < end && p->extra_starts[row + 1] == p->extra_starts[row]) row++;
    return row;
}

static int32_t most(const int32_t *values, int32_t first, int32_t end) {
    int32_t found = values[first];
    for (int32_t i = first + 1; i < end; i++) found = values[i] > found ? values[i] : found;
    return found;
}

static void plan_block(Plan *p, const Layout *l, int32_t first, int32_t end, int32_t table, int32_t chunk, int may_join) {
    const int32_t size = end - first, seen = most(p->ctx_lens, first, end);
    const int32_t opened = first_with_extras(p, first, end), closed = opened < end ? run_end(p, opened, end) : end;
    if (l->joins && may_join && seen <= chunk && first_with_extras(p, closed, end) == end) {
        const int32_t length = seen + (opened < end ? plan_list(p, closed - 1) : 0);
        plan_item(p->prefixes, &p->num_prefixes, first, size, table, length, 0, -1, seen);
        memset(p->spans + 3 * first, 0, sizeof(int32_t) * 3 * size);
        return;
    }
    const int32_t parts = (seen + chunk - 1) / chunk, partial = p->num_partials;
    for (int32_t part = 0; part < parts; part++) {
        const int32_t position = part * chunk, length = seen - position < chunk ? seen - position : chunk;
        plan_item(p->prefixes, &p->num_prefixes, first, size, table + position, length, position, partial + part * size,
                  length);
    }
    for (int32_t row = opened; row < end;) {
        const int32_t stop = run_end(p, row, end), start = p->list_end, length = plan_list(p, stop - 1);
        plan_item(p->nodes, &p->num_nodes, row, stop - row, start, length, 0, partial + parts * size + row - first, 0);
        row = first_with_extras(p, stop, end);
    }
    for (int32_t row = first; row < end; row++) {
        p->spans[3 * row] = partial + row - first;
        p->spans[3 * row + 1] = size;
        p->spans[3 * row + 2] = parts + (p->extra_starts[row + 1] > p->extra_starts[row]);
    }
    p->num_partials += (parts + (opened < end)) * size;
}

static int32_t *put(int32_t *to, const int32_t *from, int32_t count, int32_t padded, int32_t padding) {
    memcpy(to, from, sizeof(int32_t) * count);
    for (int32_t i = count; i < padded; i++) to[i] = padding;
    return to + padded;
}

/* Fill the block for packed rows. Return the length used, or -1 if there is no memory. */
int64_t specq_lay_out(const Packed *r, const Layout *l, int32_t *block) {
    const int32_t rows = r->num_rows, padded = l->num_rows;
    const int32_t *token_ids = r->block, *positions = token_ids + rows, *row_starts;
    Plan p = {.slots = positions + rows};
    p.ctx_lens = p.slots + rows;
    p.extra_starts = p.ctx_lens + rows;
    p.extras = p.extra_starts + rows + 1;
    row_starts = p.extras + r->num_extras;
    int32_t *to = put(block, token_ids, rows, padded, 0);
    to = put(to, positions, rows, padded, 0);
    to = put(to, p.slots, rows, padded, -1);
    to = put(to, p.ctx_lens, rows, padded, 0);
    for (int32_t i = 0; i < padded; i++) to[i] = i < rows ? p.extra_starts[i + 1] - p.extra_starts[i] : 0;
    p.spans = to + padded;
    to = p.spans + 3 * padded;
    memset(p.spans + 3 * rows, 0, sizeof(int32_t) * 3 * (padded - rows));
    put(to, row_starts + r->num_sessions + 1, r->num_logits, padded, 0);
    int32_t *num_items = to + padded;
    p.prefixes = num_items + 4;
    p.lists = p.prefixes + ITEM * (int64_t)l->max_items;
    p.nodes = malloc(sizeof(int32_t) * ITEM * rows);
    if (!p.nodes) return -1;
    int64_t total = 0;
    for (int32_t i = 0; i < r->num_sessions; i++)
        for (int32_t first = row_starts[i]; first < row_starts[i + 1]; first += l->rows_per_block) {
            const int32_t end = first + l->rows_per_block;
            total += most(p.ctx_lens, first, end < row_starts[i + 1] ? end : row_starts[i + 1]);
        }
    const int64_t each = (int64_t)l->num_chunks * CHUNK, times = (total + each - 1) / each;
    const int32_t chunk = CHUNK * (times < 1 ? 1 : times);
    for (int32_t i = 0; i < r->num_sessions; i++) {
        const int32_t begin = row_starts[i], stop = row_starts[i + 1], table = p.list_end;
        const int32_t context = most(p.ctx_lens, begin, stop);
        memcpy(p.lists + table, r->tables[i], sizeof(int32_t) * context);
        p.list_end += context;
        for (int32_t first = begin; first < stop; first += l->rows_per_block) {
            const int32_t end = first + l->rows_per_block < stop ? first + l->rows_per_block : stop;
            plan_block(&p, l, first, end, table, chunk, stop - begin <= l->rows_per_block);
        }
    }
    memcpy(p.prefixes + ITEM * (int64_t)p.num_prefixes, p.nodes, sizeof(int32_t) * ITEM * p.num_nodes);
    num_items[0] = p.num_prefixes + p.num_nodes;
    free(p.nodes);
    return p.lists - block + p.list_end;
}
