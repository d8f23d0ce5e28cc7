/* Scaled logits plus noise, precise enough for drafters, which guess what the target will draw. */
#pragma once

/* ln x of normal floats, with an error of about 1e-7 (the polynomial is Cephes' logf). */
INLINE v8 log8(v8 x) {
    static const float factors[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                    -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    v8i bits = (v8i)x, exponent = (bits >> 23) - 126;
    v8 m = (v8)((bits & 0x007fffff) | 0x3f000000); /* 0.5 <= m < 1 */
    v8i is_low = m < 0.707106781f;
    m = m + select8(is_low, m, (v8){0}) - 1.0f;
    v8 e = __builtin_convertvector(exponent + is_low, v8), z = m * m, y = (v8){0} + 7.0376836292e-2f;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) y = y * m + factors[i];
    return m + (y * m * z - 0.5f * z) + e * 0.693147181f;
}

/* Gumbel noise of eight hashes, within 1e-5 of its definition. */
INLINE v8 near_gumbel8(v8u hashes) {
    v8u h = hashes ^ 0x80000000u;
    v8 u = (__builtin_convertvector(h, v8) + 0.5f) * 0x1p-32f, left = (__builtin_convertvector(~h, v8) + 0.5f) * 0x1p-32f;
    v8 small = u * (1.0f + u * (0.5f + u * (0.333333333f + 0.25f * u)));
    return -log8(select8(u < 0.015625f, small, -log8(left)));
}

typedef uint32_t v8u_any __attribute__((vector_size(32), aligned(4), may_alias));

/* Scaled logits of tokens i .. i + 7 and their noise. */
INLINE v8 near_score8(Keys keys, const Work *work, int i, v8u token_ids) {
    return *(const v8 *)(work->scaled + i) + near_gumbel8(hash8(token_ids, keys));
}

static void add_near_noise(Keys keys, const int32_t *token_ids, const Work *work, float *out) {
    const v8u first = {0, 1, 2, 3, 4, 5, 6, 7};
    int i = 0;
    for (; i + LANES <= work->vocab; i += LANES) {
        v8u own = token_ids ? (v8u) * (const v8u_any *)(token_ids + i) : first + (uint32_t)i;
        *(v8_any *)(out + i) = near_score8(keys, work, i, own);
    }
    if (i < work->vocab) {
        const size_t rest = (work->vocab - i) * sizeof(float);
        v8u own = first + (uint32_t)i;
        if (token_ids) memcpy(&own, token_ids + i, rest);
        v8 scores = near_score8(keys, work, i, own);
        memcpy(out + i, &scores, rest);
    }
}

/* Write the scores of rows with T > 0 and without cuts, out [num][vocab]. token_ids [vocab]: the token of each column, or NULL
 * if it is the column's number. `later`: added to the rows' positions. */
void specq_near_scores(const float *logits, long stride, int vocab, int num, const Row *rows, const int32_t *token_ids,
                       long later, float *out) {
    Work *work = work_of(vocab);
    for (; num > 0; num--, rows++, logits += stride, out += vocab) {
        scale(logits, rows, work);
        add_near_noise(keys_of(rows->seed, (uint64_t)(rows->position + later), GUMBEL), token_ids, work, out);
    }
}
