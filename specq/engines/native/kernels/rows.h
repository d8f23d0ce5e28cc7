/* Integers of a forward pass: packed rows from steps (specq/engines/native/rows.py), and the block that attention on a
 * GPU needs (specq/engines/torch/cuda/attention_plan.py has its layout). */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ITEM = 8 }; /* integers of an item */

/* Sizes of pieces: UNIT below position GROWTH, twice as many below 2 * GROWTH, and so on, at most LARGEST. */
enum { UNIT = 64, GROWTH = 1024, LARGEST = 1024 };

/* An item's length without a limit. */
enum { ENDLESS = 1 << 30 };

/* The rows of a block read a prefix of at most this length again for each run: that takes less than its partials. */
enum { SHORT = 128 };

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
    int32_t num_rows, rows_per_block, num_chunks, max_items, max_partials;
} Layout;

typedef struct {
    const int32_t *slots, *ctx_lens, *extra_starts, *extras;
    int32_t *prefixes, *tails, *spans, *lists;
    int32_t num_prefixes, num_tails, num_partials, max_items, max_partials, list_end;
} Plan;

static int32_t piece_size(int32_t position) {
    int32_t size = UNIT;
    for (int64_t limit = GROWTH; position >= limit && size < LARGEST; limit *= 2) size *= 2;
    return size;
}

static int32_t piece_start(int32_t position) { return position - position % piece_size(position); }

static int32_t count_pieces(int32_t start, int32_t end) {
    int32_t count = 0;
    for (; start < end; start += piece_size(start)) count++;
    return count;
}

/* Return the end of the item from position 0: the list's, or the last end of a piece up to `chunk`. */
static int32_t first_end(int32_t end, int32_t chunk) { return end <= chunk ? end : piece_start(chunk); }

/* Return how many items, and partials of each row, cover 0 .. end. */
static int32_t count_items(int32_t end, int32_t chunk) {
    const int32_t first = first_end(end, chunk);
    return (end > 0) + count_pieces(first, end);
}

static int32_t num_extras(const Plan *p, int32_t row) { return p->extra_starts[row + 1] - p->extra_starts[row]; }

static int32_t row_length(const Plan *p, int32_t row) { return p->ctx_lens[row] + num_extras(p, row); }

/* Return whether the next row sees all that a row sees, at the same positions. */
static int goes_on(const Plan *p, int32_t row) {
    const int32_t own = num_extras(p, row), next = row + 1;
    if (!own) return p->ctx_lens[row] <= p->ctx_lens[next];
    return p->ctx_lens[row] == p->ctx_lens[next] && num_extras(p, next) == own + 1 &&
           p->extras[p->extra_starts[next + 1] - 2] == p->slots[row];
}

static int32_t run_end(const Plan *p, int32_t row, int32_t end) {
    while (row < end - 1 && goes_on(p, row)) row++;
    return row + 1;
}

/* Append a row's extras to the lists; return where they begin. */
static int32_t plan_list(Plan *p, int32_t row) {
    const int32_t count = num_extras(p, row), start = p->list_end;
    memcpy(p->lists + start, p->extras + p->extra_starts[row], sizeof(int32_t) * count);
    p->list_end += count;
    return start;
}

/* Plan items for rows first .. end against positions start .. stop of the last row's list. `part`: the first item's
 * place among the partials of each row; -1: there is one item, which writes the result. */
static void plan_items(Plan *p, int32_t *items, int32_t *count, int32_t first, int32_t end, int32_t start,
                       int32_t stop, int32_t table, int32_t chunk, int32_t part) {
    const int32_t split = p->ctx_lens[end - 1], extras = stop > split ? plan_list(p, end - 1) : 0;
    for (int32_t next; start < stop; start = next, part++) {
        next = start ? start + piece_size(start) : first_end(stop, chunk);
        next = next < stop ? next : stop;
        const int32_t item[ITEM] = {first, end - first, start, next, table, split, extras, part};
        memcpy(items + ITEM * (*count)++, item, sizeof item);
    }
}

/* Give rows their partials, or none. */
static void plan_spans(Plan *p, int32_t first, int32_t end, int32_t parts) {
    for (int32_t row = first; row < end; row++) {
        p->spans[2 * row] = p->num_partials;
        p->spans[2 * row + 1] = parts;
        p->num_partials += parts;
    }
}

/* Return whether there is room for a block's items and partials. Without a limit of length each block has its part. */
static int has_room(const Plan *p, int32_t rows, int32_t chunk, int64_t items, int64_t partials) {
    if (chunk == ENDLESS) return items <= 2 * rows && partials <= 3 * rows;
    return items <= p->max_items - p->num_prefixes - p->num_tails && partials <= p->max_partials - p->num_partials;
}

/* Plan a block's rows in one run. Return 0 if there is no room. */
static int plan_run(Plan *p, int32_t first, int32_t end, int32_t table, int32_t chunk) {
    const int32_t length = row_length(p, end - 1), items = count_items(length, chunk), parts = items > 1 ? items : 0;
    if (!has_room(p, end - first, chunk, items, (int64_t)parts * (end - first))) return 0;
    plan_items(p, p->prefixes, &p->num_prefixes, first, end, 0, length, table, chunk, parts ? 0 : -1);
    plan_spans(p, first, end, parts);
    return 1;
}

/* Plan a block's rows in runs that share a prefix. 0: each run reads all. Return 0 if there is no room. */
static int plan_runs(Plan *p, int32_t first, int32_t end, int32_t prefix, int32_t table, int32_t chunk) {
    const int32_t parts = count_items(prefix, chunk);
    int64_t items = parts, partials = 0;
    for (int32_t row = first, stop; row < end; row = stop) {
        stop = run_end(p, row, end);
        const int32_t pieces = prefix ? count_pieces(prefix, row_length(p, stop - 1)) : 1;
        items += pieces;
        partials += prefix ? (int64_t)(stop - row) * (parts + pieces) : 0;
    }
    if (!has_room(p, end - first, chunk, items, partials)) return 0;
    plan_items(p, p->prefixes, &p->num_prefixes, first, end, 0, prefix, table, chunk, 0);
    for (int32_t row = first, stop; row < end; row = stop) {
        stop = run_end(p, row, end);
        const int32_t length = row_length(p, stop - 1);
        plan_items(p, p->tails, &p->num_tails, row, stop, prefix, length, table, length, prefix ? parts : -1);
        plan_spans(p, row, stop, prefix ? parts + count_pieces(prefix, length) : 0);
    }
    return 1;
}

/* Plan a block's rows: one run, or runs that share a prefix. Return 0 if there is no room. */
static int plan_block(Plan *p, int32_t first, int32_t end, int32_t table, int32_t chunk) {
    if (run_end(p, first, end) == end) return plan_run(p, first, end, table, chunk);
    int32_t shared = INT32_MAX;
    for (int32_t row = first; row < end; row = run_end(p, row, end)) {
        const int32_t context = p->ctx_lens[run_end(p, row, end) - 1];
        shared = context < shared ? context : shared;
    }
    const int32_t prefix = shared <= SHORT ? 0 : piece_start(shared);
    return plan_runs(p, first, end, prefix, table, chunk) ||
           (chunk == ENDLESS && plan_runs(p, first, end, 0, table, chunk));
}

static int32_t longest(const Plan *p, int32_t first, int32_t end) {
    int32_t found = 0;
    for (int32_t row = first; row < end; row++) found = row_length(p, row) > found ? row_length(p, row) : found;
    return found;
}

static int32_t most(const int32_t *values, int32_t first, int32_t end) {
    int32_t found = 0;
    for (int32_t i = first; i < end; i++) found = values[i] > found ? values[i] : found;
    return found;
}

static int32_t block_end(const Layout *l, int32_t first, int32_t stop) {
    return l->rows_per_block < stop - first ? first + l->rows_per_block : stop;
}

/* Plan all rows, with a first item of `chunk` at most. Return 0 if there is no room. */
static int plan_rows(Plan *p, const Packed *r, const Layout *l, const int32_t *row_starts, int32_t chunk) {
    p->num_prefixes = p->num_tails = p->num_partials = p->list_end = 0;
    for (int32_t i = 0; i < r->num_sessions; i++) {
        const int32_t begin = row_starts[i], stop = row_starts[i + 1], table = p->list_end;
        const int32_t context = most(p->ctx_lens, begin, stop);
        memcpy(p->lists + table, r->tables[i], sizeof(int32_t) * context);
        p->list_end += context;
        for (int32_t first = begin; first < stop; first += l->rows_per_block)
            if (!plan_block(p, first, block_end(l, first, stop), table, chunk)) return 0;
    }
    return 1;
}

/* Return the length of first items with which the device has about num_chunks items: a multiple of UNIT. */
static int32_t choose_chunk(const Plan *p, const Packed *r, const Layout *l, const int32_t *row_starts) {
    int64_t total = 0;
    for (int32_t i = 0; i < r->num_sessions; i++)
        for (int32_t first = row_starts[i]; first < row_starts[i + 1]; first += l->rows_per_block)
            total += longest(p, first, block_end(l, first, row_starts[i + 1]));
    const int64_t each = (int64_t)l->num_chunks * UNIT, times = (total + each - 1) / each;
    return UNIT * times;
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
    Plan p = {.slots = positions + rows, .max_items = l->max_items, .max_partials = l->max_partials};
    p.ctx_lens = p.slots + rows;
    p.extra_starts = p.ctx_lens + rows;
    p.extras = p.extra_starts + rows + 1;
    row_starts = p.extras + r->num_extras;
    int32_t *to = put(block, token_ids, rows, padded, 0);
    to = put(to, positions, rows, padded, 0);
    to = put(to, p.slots, rows, padded, -1);
    for (int32_t i = 0; i < padded; i++) to[i] = i < rows ? row_length(&p, i) : 0;
    p.spans = to + padded;
    to = p.spans + 2 * padded;
    memset(p.spans + 2 * rows, 0, sizeof(int32_t) * 2 * (padded - rows));
    put(to, row_starts + r->num_sessions + 1, r->num_logits, padded, 0);
    int32_t *num_items = to + padded;
    p.prefixes = num_items + 4;
    p.lists = p.prefixes + ITEM * (int64_t)l->max_items;
    p.tails = malloc(sizeof(int32_t) * ITEM * l->max_items);
    if (!p.tails) return -1;
    int32_t chunk = choose_chunk(&p, r, l, row_starts);
    while (!plan_rows(&p, r, l, row_starts, chunk)) chunk = chunk < ENDLESS / 2 ? 2 * chunk : ENDLESS;
    memcpy(p.prefixes + ITEM * (int64_t)p.num_prefixes, p.tails, sizeof(int32_t) * ITEM * p.num_tails);
    num_items[0] = p.num_prefixes + p.num_tails;
    free(p.tails);
    return p.lists - block + p.list_end;
}
