/* Graft drafts; `specq.verifier.trees.reference_graft` explains the rules. */
#pragma once
#include "trees.h"

/* A draft's columns in `heads`, and a node to attach. */
enum { SESSION, LANE, BASE_LEN, FIRST_ID, SIZE, IS_WHOLE, IS_MEASURED, NUM_ADDED, HEAD };

typedef struct {
    int32_t session, lane, node_id, token, parent, position, group, rank;
    double score, arrived;
    uint8_t is_measured;
} Fresh;

static void remove_lane(Trees *t, int32_t session, int k) {
    int32_t *lanes = t->session_lanes[session];
    give(t->free_lanes, &t->num_free[LANES], lanes[k]);
    memmove(lanes + k, lanes + k + 1, (--t->num_lanes[session] - k) * sizeof *lanes);
}

/* A lane of a session, created if needed. With too many, it replaces the oldest idle lane; NONE without one. */
static int32_t lane_of(Trees *t, int32_t session, int32_t lane_id) {
    int32_t *lanes = t->session_lanes[session];
    int count = t->num_lanes[session], idle = 0;
    for (int k = 0; k < count; k++)
        if (t->lane_id[lanes[k]] == lane_id) return lanes[k];
    if (count == MAX_LANES) {
        while (idle < count && t->num_refs[lanes[idle]]) idle++;
        if (idle == count) return NONE;
        remove_lane(t, session, idle);
    }
    int32_t lane = t->free_lanes[--t->num_free[LANES]];
    lanes[t->num_lanes[session]++] = lane;
    t->lane_id[lane] = lane_id, t->newest_id[lane] = -1, t->first_after_loss[lane] = 0, t->num_refs[lane] = 0;
    memset(t->table_ids + (long)lane * TABLE, 0xff, TABLE * sizeof *t->table_ids);
    memset(t->trials[lane], 0, sizeof t->trials[lane]);
    memset(t->accepted[lane], 0, sizeof t->accepted[lane]);
    return lane;
}

static void note(Trees *t, int32_t lane, int64_t first_id, int64_t size) {
    if (first_id > t->newest_id[lane] + 1) t->first_after_loss[lane] = first_id;
    if (first_id + size - 1 > t->newest_id[lane]) t->newest_id[lane] = first_id + size - 1;
}

static int has_room(const Trees *t, int32_t lane, int64_t first_id, int64_t size) {
    if (size > TABLE) return 0;
    for (int64_t node_id = first_id; node_id < first_id + size; node_id++) {
        long at = place_of(lane, node_id);
        if (t->table_ids[at] != NONE && t->table_ids[at] != node_id && t->table_nodes[at] >= 0) return 0;
    }
    return 1;
}

static void name(Trees *t, int32_t lane, int32_t node_id, int32_t node) {
    long at = place_of(lane, node_id);
    t->table_ids[at] = node_id, t->table_nodes[at] = node;
    if (node < 0) return;
    t->table_next[at] = t->first_ref[node], t->first_ref[node] = (int32_t)at;
    t->num_refs[lane]++;
}

static int32_t new_node(Trees *t, const Fresh *fresh, int32_t last) {
    int32_t node = t->free_nodes[--t->num_free[NODES]];
    t->token[node] = fresh->token, t->parent[node] = fresh->parent, t->position[node] = fresh->position;
    t->first_child[node] = t->next_sibling[node] = t->first_ref[node] = t->group[node] = t->depends_on[node] = NONE;
    t->node_session[node] = fresh->session, t->node_lane[node] = fresh->lane, t->node_id[node] = fresh->node_id;
    t->rank[node] = 0, t->is_measured[node] = fresh->is_measured, t->reach_prob[node] = 0;
    t->score[node] = t->predicted[node] = fresh->score, t->arrived[node] = fresh->arrived;
    if (last != NONE) t->next_sibling[last] = node;
    else if (fresh->parent != NONE) t->first_child[fresh->parent] = node;
    else t->first_root[fresh->session] = node;
    t->num_live[fresh->session]++;
    return node;
}

/* Turn a point mass into the sampled node; its children stay. */
static void draw(Trees *t, int32_t node, const Fresh *drawn) {
    if (t->group[node] == NONE) t->group_size[drawn->group]++;
    t->group[node] = drawn->group, t->rank[node] = drawn->rank;
    t->node_lane[node] = drawn->lane, t->node_id[node] = drawn->node_id;
    double raised = log(calibrated(t->sampled_trials, t->sampled_accepted, drawn->score));
    t->predicted[node] = drawn->score, t->score[node] = raised > drawn->score ? raised : drawn->score;
}

static void attach(Trees *t, Fresh *fresh) {
    int32_t at = fresh->parent != NONE ? t->first_child[fresh->parent] : t->first_root[fresh->session];
    int32_t node = NONE, last = NONE, group = NONE;
    for (; at != NONE && (node == NONE || fresh->group != NONE); last = at, at = t->next_sibling[at]) {
        if (t->token[at] == fresh->token) node = at;
        if (t->group[at] != NONE) group = t->group[at];
    }
    if (group != NONE && group != fresh->group) fresh->group = NONE;
    if (node == NONE) {
        if (t->num_live[fresh->session] >= MAX_LIVE) return;
        node = new_node(t, fresh, last);
    } else if (t->node_lane[node] == fresh->lane) t->node_id[node] = fresh->node_id; /* sent again */
    name(t, fresh->lane, fresh->node_id, node);
    if (fresh->group != NONE) draw(t, node, fresh);
}

static void align(Trees *t, Fresh *fresh, const int64_t *head, int64_t seen_before, int64_t parent_id) {
    int32_t length = t->length[fresh->session];
    int64_t above = head[BASE_LEN], first_id = head[FIRST_ID];
    if (parent_id >= 0) {
        long at = place_of(fresh->lane, parent_id);
        int32_t found = t->table_ids[at] == parent_id ? t->table_nodes[at] : CUT;
        if (found >= 0) {
            fresh->parent = found, fresh->position = t->position[found] + 1;
            attach(t, fresh);
            return;
        }
        above = found == CUT ? NONE : COMMITTED - found;
    }
    int is_recent = above >= 0 && above < length && length - above <= WINDOW;
    if (above == length) {
        fresh->parent = NONE, fresh->position = length;
        attach(t, fresh);
    } else if (is_recent && t->recent[fresh->session][above & (WINDOW - 1)] == fresh->token)
        name(t, fresh->lane, fresh->node_id, COMMITTED - (int32_t)(above + 1));
    else
        t->counts[fresh->session][seen_before < parent_id && parent_id < first_id ? ORPHANS : STALE]++;
}

static void graft(Trees *t, int64_t *head, const int32_t *tokens, const int32_t *parent_ids, const double *scores,
                  const int32_t *groups, double arrived) {
    int32_t session = (int32_t)head[SESSION], lane = lane_of(t, session, (int32_t)head[LANE]);
    int64_t size = head[SIZE], before = t->num_live[session];
    if (lane == NONE) return;
    int64_t *counts = t->counts[session], seen_before = t->newest_id[lane];
    int is_relative = head[FIRST_ID] < 0;
    if (is_relative) head[FIRST_ID] = seen_before + 1;
    counts[DRAFTED] += size, t->beats_waited[session] = 0;
    if (head[BASE_LEN] > t->drafted_at[session]) t->drafted_at[session] = (int32_t)head[BASE_LEN];
    note(t, lane, head[FIRST_ID], size);
    if ((head[IS_WHOLE] && before + size > MAX_LIVE) || !has_room(t, lane, head[FIRST_ID], size)) {
        counts[STALE] += size, t->first_after_loss[lane] = t->newest_id[lane] + 1;
        return;
    }
    for (int64_t i = 0; i < size; i++) {
        int64_t node_id = head[FIRST_ID] + i, parent_id = parent_ids[i];
        if (t->table_ids[place_of(lane, node_id)] == node_id) continue;
        Fresh fresh = {session, lane, (int32_t)node_id, tokens[i], NONE, 0, groups ? groups[i] : NONE, (int32_t)i,
                       scores[i], arrived, (uint8_t)head[IS_MEASURED]};
        align(t, &fresh, head, seen_before, is_relative && parent_id >= 0 ? head[FIRST_ID] + parent_id : parent_id);
    }
    head[NUM_ADDED] = t->num_live[session] - before;
}

/* Graft drafts from `first` on; return the first draft without room, or `num_drafts`. */
long trees_graft(Trees *t, long first, long num_drafts, int64_t (*heads)[HEAD], const int32_t *tokens,
                 const int32_t *parent_ids, const double *scores, const int32_t *groups, const double *arrived) {
    int64_t node = 0;
    for (long i = 0; i < first; i++) node += heads[i][SIZE];
    for (; first < num_drafts; node += heads[first++][SIZE]) {
        if (t->num_free[NODES] < heads[first][SIZE] || !t->num_free[LANES]) return first;
        heads[first][NUM_ADDED] = 0;
        if (is_open(t, heads[first][SESSION]))
            graft(t, heads[first], tokens + node, parent_ids + node, scores + node, groups ? groups + node : 0,
                  arrived[first]);
    }
    return first;
}
