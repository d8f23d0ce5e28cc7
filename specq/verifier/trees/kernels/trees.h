/* The columns of `specq.verifier.trees.arrays`, in the same order, and the common part of all operations. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { MAX_LIVE = 512, MAX_LANES = 8, TABLE = 4096, WINDOW = 1024, BINS = 12, NUM_COUNTS = 9 };
enum { FIRST_OWN_LANE = 240, OWN_LANES = 16 };
enum { NONE = -1, CUT = -1, COMMITTED = -2 };
enum { DRAFTED, STALE, ORPHANS, HITS, MISSES, DRAFTED_ROUNDS, LEAVES, DEPTHS, MIN_ACCEPT_PROBS };
enum { NODES, SESSIONS, LANES, GROUPS };

typedef struct {
    int32_t *token, *parent, *first_child, *next_sibling, *position, *node_session, *node_lane, *node_id, *first_ref;
    int32_t *group, *rank, *depends_on, *mark, *free_nodes;
    uint8_t *is_measured;
    double *score, *predicted, *arrived, *reach_prob;

    int32_t *length, *num_live, *first_root, *num_lanes, (*session_lanes)[MAX_LANES], *drafted_at, *beats_waited;
    int32_t (*recent)[WINDOW];
    uint8_t *takes_distributions;
    int64_t (*counts)[NUM_COUNTS];
    int32_t (*verified_at)[MAX_LIVE][2], (*num_declined)[OWN_LANES], *free_sessions;

    int32_t *lane_id;
    int64_t *newest_id, *first_after_loss;
    int32_t *num_refs, *table_ids, *table_nodes, *table_next; /* the tables of all lanes, one after the other */
    double (*trials)[BINS], (*accepted)[BINS];
    int32_t *free_lanes;

    int32_t *group_size, *free_groups;
    double *sampled_trials, *sampled_accepted;
    int64_t *room, *num_free;
} Trees;

/* --- calibration, as in `specq.drafting.calibration` */

static inline int bin_of(double predicted) { return predicted < 1 ? (int)(predicted * BINS) : BINS - 1; }

static inline double chance_of(double score) { return score < 0 ? exp(score) : 1; }

static double calibrated(const double *trials, const double *accepted, double score) {
    double predicted = chance_of(score);
    int i = bin_of(predicted);
    return (accepted[i] + 2.0 * predicted) / (trials[i] + 2.0);
}

static void observe(double *trials, double *accepted, double score, int is_accepted) {
    const double fade = 1.0 - 1.0 / 200.0;
    int i = bin_of(chance_of(score));
    trials[i] = trials[i] * fade + 1.0;
    accepted[i] = accepted[i] * fade + is_accepted;
}

static inline int is_open(const Trees *t, int64_t session) {
    return session >= 0 && session < t->room[SESSIONS] && t->length[session] >= 0;
}

/* --- nodes and the places of node tables that name them */

static inline long place_of(int32_t lane, int64_t node_id) { return (long)lane * TABLE + (node_id & (TABLE - 1)); }

static void give(int32_t *stack, int64_t *num_free, int32_t place) { stack[(*num_free)++] = place; }

/* Map all ids of a node to CUT or COMMITTED - length, and free its place. */
static void settle(Trees *t, int32_t node, int32_t becomes) {
    for (int32_t at = t->first_ref[node]; at != NONE; at = t->table_next[at])
        t->table_nodes[at] = becomes, t->num_refs[at / TABLE]--;
    int32_t group = t->group[node];
    if (group != NONE && !--t->group_size[group]) give(t->free_groups, &t->num_free[GROUPS], group);
    t->node_session[node] = NONE;
    give(t->free_nodes, &t->num_free[NODES], node);
}

/* Cut a node and all nodes below it; return their number. `mark` chains the nodes still to cut. */
static int cut(Trees *t, int32_t node) {
    int num_cut = 0;
    t->mark[node] = NONE;
    for (int32_t left = node; left != NONE; num_cut++) {
        int32_t ending = left;
        left = t->mark[ending];
        for (int32_t child = t->first_child[ending]; child != NONE; child = t->next_sibling[child])
            t->mark[child] = left, left = child;
        settle(t, ending, CUT);
    }
    return num_cut;
}
