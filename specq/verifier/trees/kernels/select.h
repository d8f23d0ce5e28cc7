/* The drafted nodes to graft; `specq.verifier.trees.reference_choice` explains the rules. */
#pragma once
#include "trees.h"

static const double untried[BINS] = {0};

/* The share of a lane's predictions that came true, at most 1; as in `specq.drafting.calibration`. */
static double reliability(const double *trials, const double *accepted) {
    double predicted = 0, came_true = 0;
    for (int i = 0; i < BINS; i++) predicted += (i + 0.5) / BINS * trials[i], came_true += accepted[i];
    double found = (came_true + 0.5) / (predicted + 0.5);
    return found < 1 ? found : 1;
}

static int32_t lane_known(const Trees *t, int32_t session, int32_t lane_id) {
    for (int k = 0; k < t->num_lanes[session]; k++)
        if (t->lane_id[t->session_lanes[session][k]] == lane_id) return t->session_lanes[session][k];
    return NONE;
}

/* Mark each node's place among the kept nodes, or NONE; return the number of tokens that these promise. */
static double keep(const Trees *t, int32_t lane, long size, const int32_t *parents, const double *scores, double least,
                   int32_t *places, long *num_kept) {
    const double *trials = lane == NONE ? untried : t->trials[lane], *accepted = lane == NONE ? untried : t->accepted[lane];
    double reach[MAX_LIVE], promise = 0, trust = reliability(trials, accepted);
    *num_kept = 0;
    for (long i = 0; i < size; i++) {
        double above = parents[i] >= 0 ? reach[parents[i]] : 1;
        reach[i] = above >= least ? above * trust * calibrated(trials, accepted, scores[i]) : 0;
        places[i] = reach[i] >= least ? (int32_t)(*num_kept)++ : NONE;
        if (places[i] != NONE) promise += reach[i];
    }
    return *num_kept ? promise : reach[0];
}

/* Keep the nodes to graft of each session, at most MAX_LIVE; return their number. sizes: before and after. */
long trees_select(const Trees *t, long num, const int32_t *sessions, long lane_id, int32_t *sizes, int32_t *tokens,
                  int32_t *parents, const double *scores, const double *enough, long rarity, double least,
                  float *kept_scores) {
    long first = 0, count = 0;
    for (long s = 0; s < num; s++) {
        int32_t places[MAX_LIVE];
        long size = sizes[s], num_kept, begin = first;
        first += size, sizes[s] = 0;
        if (!size || !is_open(t, sessions[s])) continue;
        double promise = keep(t, lane_known(t, sessions[s], (int32_t)lane_id), size, parents + begin, scores + begin, least,
                              places, &num_kept);
        if (!num_kept) {
            int32_t *num_declined = t->num_declined[sessions[s]] + lane_id - FIRST_OWN_LANE;
            *num_declined = (int32_t)((*num_declined + 1) % rarity);
            if (*num_declined) continue;
            places[0] = 0;
        }
        if (promise < enough[s]) continue;
        for (long i = 0; i < size; i++) {
            if (places[i] == NONE) continue;
            int32_t parent = parents[begin + i];
            tokens[count] = tokens[begin + i], kept_scores[count] = (float)scores[begin + i];
            parents[count++] = parent < 0 ? NONE : places[parent], sizes[s]++;
        }
    }
    return count;
}
