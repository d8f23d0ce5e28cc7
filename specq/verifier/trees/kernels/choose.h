/* The nodes that may be verified, and chosen nodes as arrays; `specq.verifier.trees.reference_choice` explains the rules. */
#pragma once
#include "trees.h"

static int is_before(const Trees *t, int32_t one, int32_t other) {
    int is_point = t->group[one] == NONE, other_is_point = t->group[other] == NONE;
    if (is_point != other_is_point) return other_is_point;
    return !is_point && t->rank[one] < t->rank[other];
}

/* Siblings in the order of judgement: sampled ones in the order of draws, then point masses. */
static int in_order(const Trees *t, int32_t at, int32_t *found) {
    int count = 0;
    for (; at != NONE; at = t->next_sibling[at]) {
        int place = count++;
        for (; place && is_before(t, at, found[place - 1]); place--) found[place] = found[place - 1];
        found[place] = at;
    }
    return count;
}

static double probability(const Trees *t, int32_t node) {
    if (t->is_measured[node] && t->group[node] == NONE) return chance_of(t->score[node]);
    return calibrated(t->trials[t->node_lane[node]], t->accepted[t->node_lane[node]], t->score[node]);
}

/* Set `reach_prob` and `depends_on` of siblings; append the nodes that may be verified to `found`. */
static long weigh(Trees *t, int32_t head, double reach_prob, int32_t above, double floor, int32_t end, int32_t *found) {
    int32_t siblings[MAX_LIVE];
    int count = in_order(t, head, siblings);
    long num_found = 0;
    double most = reach_prob, left = reach_prob;
    for (int i = 0; i < count; i++) {
        int32_t node = siblings[i];
        double own = left * probability(t, node);
        t->depends_on[node] = above;
        if (t->group[node] != NONE) {
            most = own = own < most ? own : most;
            left -= own, above = node;
        }
        t->reach_prob[node] = own;
        if (own >= floor && t->position[node] < end) found[num_found++] = node;
    }
    return num_found;
}

void trees_candidates(Trees *t, long num_sessions, const int32_t *sessions, const int32_t *ends, double floor,
                      int64_t *firsts, int32_t *found) {
    long count = 0;
    for (long s = 0; s < num_sessions; s++) {
        long at = firsts[s] = count;
        if (!is_open(t, sessions[s])) continue;
        count += weigh(t, t->first_root[sessions[s]], 1.0, NONE, floor, ends[s], found + count);
        for (; at < count; at++) {
            int32_t node = found[at], above = t->group[node] != NONE ? node : t->depends_on[node];
            count += weigh(t, t->first_child[node], t->reach_prob[node], above, floor, ends[s], found + count);
        }
    }
    firsts[num_sessions] = count;
}

/* Keep the most promising chain of each session's candidates; see `reference_choice.best_chain`. */
void trees_best_chains(Trees *t, long num_sessions, long most, int64_t *firsts, int32_t *nodes, double *promises,
                       int32_t *following, int32_t *depths) {
    long count = 0;
    for (long s = 0; s < num_sessions; s++) {
        long first = firsts[s], size = firsts[s + 1] - first;
        int32_t root = NONE;
        for (long i = 0; i < size; i++) {
            int32_t node = nodes[first + i], parent = t->parent[node];
            long above = parent != NONE ? t->mark[parent] : NONE;
            int is_below = above != NONE && above < i && nodes[first + above] == parent && depths[above] <= most;
            t->mark[node] = (int32_t)i, promises[i] = 0, following[i] = NONE;
            depths[i] = parent == NONE ? 1 : is_below ? depths[above] + 1 : (int32_t)most + 1;
        }
        for (long last = size; last;) {
            long begin = last - 1;
            int32_t parent = t->parent[nodes[first + begin]], best = NONE;
            while (begin && t->parent[nodes[first + begin - 1]] == parent) begin--;
            long end = t->group[nodes[first + begin]] == NONE ? last : begin + 1;
            for (long i = begin; i < end && depths[begin] <= most; i++)
                if (best == NONE || t->reach_prob[nodes[first + i]] + promises[i] >
                                        t->reach_prob[nodes[first + best]] + promises[best])
                    best = (int32_t)i;
            if (best != NONE) {
                int is_point = t->group[nodes[first + best]] == NONE;
                double promise = t->reach_prob[nodes[first + best]] + (is_point ? promises[best] : 0);
                if (parent == NONE) root = best;
                else following[t->mark[parent]] = best, promises[t->mark[parent]] = promise;
            }
            last = begin;
        }
        long begin = count;
        for (int32_t i = root; i != NONE; i = following[i]) depths[count++ - begin] = nodes[first + i];
        memcpy(nodes + begin, depths, (count - begin) * sizeof *nodes);
        firsts[s] = begin;
    }
    firsts[num_sessions] = count;
}

/* Tokens, parents within the session's nodes, and scores; return the place of a node without its parent before it, or -1. */
long trees_flatten(Trees *t, long num_sessions, const int64_t *firsts, const int32_t *nodes, int32_t *tokens,
                   int32_t *parents, float *scores) {
    for (long s = 0; s < num_sessions; s++)
        for (int64_t i = firsts[s]; i < firsts[s + 1]; i++) {
            int32_t node = nodes[i], parent = t->parent[node];
            t->mark[node] = (int32_t)(i - firsts[s]);
            tokens[i] = t->token[node], scores[i] = (float)t->score[node], parents[i] = NONE;
            if (parent == NONE) continue;
            int64_t above = firsts[s] + t->mark[parent];
            if (above < firsts[s] || above >= i || nodes[above] != parent) return i;
            parents[i] = t->mark[parent];
        }
    return -1;
}

/* The live nodes of a session, parents first. */
long trees_live(const Trees *t, long session, int32_t *found) {
    long count = 0;
    if (!is_open(t, session)) return 0;
    for (int32_t at = t->first_root[session]; at != NONE; at = t->next_sibling[at]) found[count++] = at;
    for (long i = 0; i < count; i++)
        for (int32_t at = t->first_child[found[i]]; at != NONE; at = t->next_sibling[at]) found[count++] = at;
    return count;
}
