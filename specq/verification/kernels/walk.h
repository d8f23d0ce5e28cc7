/* Speculative sampling down the drafted trees of many sessions.
   `specq.verification.strategies.probabilistic` has the rule. */
#pragma once
#include <math.h>
#include <stdint.h>

/* The children of one node while they are judged. It has an entry for each token of the children or their distribution. See
 * `walks.SiblingGroup`. */
typedef struct {
    int64_t *token_ids;
    double *weights, *residual, total, mass;
    int count;
} SiblingGroup;

static int place_in(const SiblingGroup *group, int64_t token_id) {
    int i = 0;
    while (i < group->count && group->token_ids[i] != token_id) i++;
    return i;
}

static void add(SiblingGroup *group, int64_t token_id, double weight, double prob) {
    if (token_id < 0) return;
    group->token_ids[group->count] = token_id;
    group->weights[group->count] = weight, group->total += weight;
    group->residual[group->count++] = prob;
}

static int judge_child(SiblingGroup *group, int64_t token_id, double uniform, int is_sampled) {
    int place = place_in(group, token_id);
    double scale = is_sampled ? group->mass / fmax(group->total, 1) : group->mass, taken = 0;
    double own = is_sampled ? group->weights[place] : 1;
    if (uniform * own * scale < group->residual[place]) return 1;
    for (int i = 0; i < group->count; i++) {
        double part = fmin(group->residual[i], (is_sampled ? group->weights[i] : i == place) * scale);
        group->residual[i] -= part, taken += part;
    }
    group->mass -= taken;
    group->total -= group->weights[place], group->weights[place] = 0; /* later siblings were drawn without it */
    return 0;
}

/* Walk down the drafted nodes, with nodes and paths as in `walks`. A row of `named`, `weights` and `probs` has the `width` tokens of
 * a draft distribution. Rows of `named` and `probs` have one more element. The edits have `room` places per step. */
void specq_walk(long num_steps, long width, long room, long levels, const int64_t *firsts, const int32_t *parents,
                const uint8_t *is_sampled, const int64_t *named, const double *weights, const double *uniforms,
                const double *probs, int64_t *ends, int64_t *lengths, int32_t *nodes, uint8_t *has_ended,
                int64_t *num_edits, int64_t *edit_ids, double *edit_values) {
    double weights_left[room + 1];
    for (long step = 0; step < num_steps; step++) {
        int64_t first = firsts[step], end = firsts[step + 1];
        for (long level = 0; level < levels && !has_ended[step]; level++) {
            SiblingGroup group = {edit_ids + step * room, weights_left, edit_values + step * room, 0, 1, 0};
            int64_t accepted = -1;
            for (int64_t i = first; i < end && !group.count; i++) /* the distribution that sampled siblings share */
                for (long c = 0; c < width && parents[i] == ends[step] && is_sampled[i]; c++)
                    add(&group, named[i * (width + 1) + c], weights[i * width + c], probs[i * (width + 1) + c]);
            for (int sampled = 1; sampled >= 0 && accepted < 0; sampled--) /* sampled ones first, then point masses */
                for (int64_t i = first; i < end && accepted < 0; i++) {
                    int64_t own = (i + 1) * (width + 1) - 1;
                    if (parents[i] != ends[step] || is_sampled[i] != sampled) continue;
                    if (place_in(&group, named[own]) == group.count) add(&group, named[own], 0, probs[own]);
                    if (judge_child(&group, named[own], uniforms[i], sampled)) accepted = i - first;
                }
            if (accepted < 0)
                num_edits[step] = group.count, has_ended[step] = 1;
            else
                nodes[first + lengths[step]++] = (int32_t)accepted, ends[step] = accepted;
        }
    }
}

/* Find the longest path of accepted nodes of each step, as `longest.longest_path` does. Arrays as above. */
void specq_longest(long num_steps, const int64_t *firsts, const int32_t *parents, const uint8_t *accepted, const double *probs,
                   int64_t *lengths, int32_t *nodes) {
    for (long step = 0; step < num_steps; step++) {
        int64_t first = firsts[step], num = firsts[step + 1] - first, best = 0;
        int64_t depths[num + 1]; /* of the end of the context, then of the nodes; -1: without an accepted path */
        double likelihoods[num + 1];
        depths[0] = 0, likelihoods[0] = 0;
        for (int64_t i = 1; i <= num; i++) {
            int64_t node = first + i - 1, parent = parents[node] + 1;
            depths[i] = accepted[node] && depths[parent] >= 0 ? depths[parent] + 1 : -1;
            if (depths[i] < 0) continue;
            likelihoods[i] = likelihoods[parent] + log(probs[node]);
            if (depths[i] > depths[best] || (depths[i] == depths[best] && likelihoods[i] > likelihoods[best])) best = i;
        }
        lengths[step] = depths[best];
        for (int64_t i = best; i > 0; i = parents[first + i - 1] + 1) nodes[first + depths[i] - 1] = (int32_t)(i - 1);
    }
}
