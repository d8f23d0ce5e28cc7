/* The k largest of each row, with their log-softmax. For drafters: torch's general operations take longer than a small
 * model itself. */
#pragma once
#include "simd.h"

/* Return log(sum(e^x)) of `width` scores. `top` is the largest of the scores. */
static float log_sum(const float *scores, int width, float top) {
    v8 sums = {0};
    int i = 0;
    for (; i + 8 <= width; i += 8) {
        v8 s = load(scores + i);
        sums += select8(s > -INFINITY, exp8(s - top), (v8){0});
    }
    float sum = sum8(sums);
    for (; i < width; i++) sum += expf(scores[i] - top);
    return top + logf(sum);
}

/* Insert a score into the best so far, which are in descending order. The last one is dropped. */
static void insert(float *best, int32_t *token_ids, int k, float score, int32_t token_id) {
    int at = k - 1;
    for (; at > 0 && best[at - 1] < score; at--) best[at] = best[at - 1], token_ids[at] = token_ids[at - 1];
    best[at] = score, token_ids[at] = token_id;
}

/* scores [num_rows][stride], the first `width` are used; best, token_ids [num_rows][k], k <= width. Among equal scores,
 * the lower id comes first. */
void specq_top(const float *scores, long stride, int num_rows, int width, int k, float *best, int32_t *token_ids) {
    for (int row = 0; row < num_rows; row++, scores += stride, best += k, token_ids += k) {
        for (int i = 0; i < k; i++) best[i] = -INFINITY, token_ids[i] = -1;
        for (int i = 0; i < width; i++)
            if (scores[i] > best[k - 1]) insert(best, token_ids, k, scores[i], i);
        float total = log_sum(scores, width, best[0]);
        for (int i = 0; i < k; i++) best[i] -= total;
    }
}
