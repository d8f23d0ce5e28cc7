/* The operations on the draft trees of all sessions, equal to the modules `specq.verifier.trees.reference_*` to the last bit. */
#include "choose.h"
#include "graft.h"
#include "select.h"

long trees_size(void) { return sizeof(Trees) / sizeof(void *); }

static void count_round(Trees *t, int32_t session, int64_t size, const int32_t *nodes, const uint8_t *is_accepted) {
    int32_t at = NONE, deepest = 0;
    int64_t *counts = t->counts[session], leaves = size;
    counts[t->num_live[session] ? HITS : MISSES]++;
    if (!size) return;
    for (int64_t i = 0; i < size; i++) t->mark[nodes[i]] = 0;
    for (int64_t i = 0; i < size; i++)
        if (t->parent[nodes[i]] != NONE) t->mark[t->parent[nodes[i]]] = 1;
    for (int64_t i = 0; i < size; i++) {
        int32_t node = nodes[i], lane = t->node_lane[node], depth = t->position[node] - t->length[session];
        leaves -= t->mark[node];
        if (depth > deepest) deepest = depth;
        if (depth >= 0 && depth < MAX_LIVE) {
            t->verified_at[session][depth][0]++;
            t->verified_at[session][depth][1] += is_accepted[i];
        }
        if (!t->takes_distributions[session] || t->parent[node] != at) continue;
        observe(t->trials[lane], t->accepted[lane], t->score[node], is_accepted[i]);
        if (t->group[node] != NONE) observe(t->sampled_trials, t->sampled_accepted, t->predicted[node], is_accepted[i]);
        if (is_accepted[i]) at = node;
    }
    counts[DRAFTED_ROUNDS]++, counts[LEAVES] += leaves, counts[DEPTHS] += deepest + 1;
}

/* Count rounds before their commit. Lanes of sampled drafts learn here from the judged nodes: those with an accepted parent,
 * up to the accepted one among their siblings. */
void trees_count(Trees *t, long num_rounds, const int32_t *sessions, const int32_t *sizes, const int32_t *nodes,
                 const uint8_t *is_accepted, long min_accept_prob) {
    for (long r = 0; r < num_rounds; nodes += sizes[r], is_accepted += sizes[r], r++)
        if (is_open(t, sessions[r])) {
            count_round(t, sessions[r], sizes[r], nodes, is_accepted);
            t->counts[sessions[r]][MIN_ACCEPT_PROBS] += min_accept_prob;
        }
}

/* Follow committed tokens down a session's tree; return the number of nodes removed. */
static int move_root(Trees *t, int32_t session, const int32_t *tokens, int64_t size) {
    int num_gone = 0;
    int32_t head = t->first_root[session];
    for (int64_t i = 0; i < size && head != NONE; i++) {
        int32_t follower = NONE;
        for (int32_t node = head, next; node != NONE; node = next) {
            int32_t lane = t->node_lane[node];
            int is_accepted = t->token[node] == tokens[i];
            next = t->next_sibling[node];
            if (!t->takes_distributions[session])
                observe(t->trials[lane], t->accepted[lane], t->score[node], is_accepted);
            if (is_accepted) follower = node;
            else num_gone += cut(t, node);
        }
        head = NONE;
        if (follower == NONE) continue;
        head = t->first_child[follower], num_gone++;
        settle(t, follower, COMMITTED - (t->position[follower] + 1));
    }
    t->first_root[session] = head;
    for (; head != NONE; head = t->next_sibling[head]) t->parent[head] = NONE;
    return num_gone;
}

/* Commit tokens: keep the branch that agrees with them, cut all others. */
void trees_commit(Trees *t, long num_rounds, const int32_t *sessions, const int32_t *sizes, const int32_t *tokens,
                  const int32_t *num_verified) {
    for (long r = 0; r < num_rounds; tokens += sizes[r++]) {
        int32_t session = sessions[r];
        if (!is_open(t, session)) continue;
        int num_gone = move_root(t, session, tokens, sizes[r]);
        if (num_gone > num_verified[r]) t->counts[session][STALE] += num_gone - num_verified[r];
        t->num_live[session] -= num_gone;
        for (int32_t i = 0; i < sizes[r]; i++) t->recent[session][t->length[session]++ & (WINDOW - 1)] = tokens[i];
    }
}

/* Drop all drafts of a session, and the state of its drafters. */
void trees_forget(Trees *t, long session) {
    if (!is_open(t, session)) return;
    for (int32_t node = t->first_root[session], next; node != NONE; node = next) {
        next = t->next_sibling[node];
        t->num_live[session] -= cut(t, node);
    }
    t->first_root[session] = NONE;
    while (t->num_lanes[session]) remove_lane(t, (int32_t)session, t->num_lanes[session] - 1);
}
