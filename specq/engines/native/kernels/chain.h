/* Chains of draft tokens in one call: the best token of each level is the next one's input. Included by forward.c. */
#pragma once

/* Writes the scores of a row of logits with the noise of the token `later` positions further on. It has the type of
 * specq_near_scores in specq.verification. */
typedef void NearScores(const float *logits, long stride, int num_columns, int num, const void *row, const int32_t *columns,
                        long later, float *out);

typedef struct {
    int32_t depth, count, num_columns, row_bytes; /* levels; tokens per level; columns of logits that may be chosen */
    int64_t first_stride;
    const float *first;         /* [num_rows][first_stride] logits of the first level */
    const int32_t *columns;     /* [num_columns] the token of each column; NULL: its number */
    int32_t *token_ids;         /* [depth][num_rows][count], best first */
    float *scores;              /* same shape: log-probabilities */
    int32_t *room;              /* 4 * num_rows + 1 + extras of the last level */
    NearScores *near_scores;
    const uint8_t *is_sampled;  /* [num_rows] whether a row has noise, taken from `rows` */
    const char *rows;           /* [num_rows][row_bytes] */
    float *near;                /* [num_columns] */
} Chains;

static void choose_level(const Chains *c, int level, int num_rows, const float *logits, int64_t stride) {
    int64_t at = (int64_t)level * num_rows * c->count;
    for (int r = 0; r < num_rows; r++, logits += stride, at += c->count) {
        const float *scores = c->is_sampled[r] ? c->near : logits;
        int32_t *token_ids = c->token_ids + at;
        if (c->is_sampled[r])
            c->near_scores(logits, stride, c->num_columns, 1, c->rows + (int64_t)r * c->row_bytes, c->columns, level, c->near);
        specq_top(scores, stride, 1, c->num_columns, c->count, c->scores + at, token_ids);
        for (int i = 0; i < c->count; i++) {
            if (token_ids[i] < 0) token_ids[i] = 0; /* too few logits above -inf, as with NaN */
            if (c->columns) token_ids[i] = c->columns[token_ids[i]];
        }
    }
}

/* Describe the rows that compute the tokens of a level. They are the rows of `last`, the last computed level, without
 * one extra for each level between the two. */
static void fill_level(const Chains *c, int level, const Batch *last, Batch *b) {
    const int rows = last->num_rows, left = c->depth - 2 - level;
    const int32_t *chosen = c->token_ids + (int64_t)level * rows * c->count;
    int32_t *token_ids = c->room, *positions = token_ids + rows, *slots = positions + rows, *starts = slots + rows;
    int32_t *extras = starts + rows + 1;
    *b = *last, b->token_ids = token_ids, b->positions = positions, b->slots = slots, b->extra_starts = starts;
    b->extras = extras, starts[0] = 0;
    for (int r = 0; r < rows; r++) {
        const int32_t *own = last->extras + last->extra_starts[r];
        const int32_t count = last->extra_starts[r + 1] - last->extra_starts[r] - left;
        memcpy(extras + starts[r], own, count * sizeof(int32_t));
        starts[r + 1] = starts[r] + count;
        token_ids[r] = chosen[(int64_t)r * c->count], positions[r] = last->positions[r] - left, slots[r] = own[count - 1];
    }
}

/* Draft chains. `last` has a row for each chain: its last node but one. The row's extras end with the slots of all
 * earlier nodes and its own slot. The other arguments are as for specq_forward; `logits` and `hidden` hold one
 * level. */
void specq_draft_chains(const Model *m, const Batch *last, Team *team, float *block, float *logits, float *hidden,
                        const Chains *c) {
    choose_level(c, 0, last->num_rows, c->first, c->first_stride);
    call_team(team);
    for (int level = 0; level + 1 < c->depth; level++) {
        Batch batch;
        Pass pass = {.m = m, .b = &batch, .team = team};
        fill_level(c, level, last, &batch);
        lay_out(m, &batch, team, block, &pass.w);
        find_spans(m, &batch, &pass.w);
        run_pass(&pass, logits, hidden);
        choose_level(c, level + 1, last->num_rows, logits, m->head.num_panels * PANEL);
    }
    dismiss_team(team);
}
