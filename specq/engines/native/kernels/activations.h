/* Activations as integers: 8 bits, one scale for 256 (a group), and a shift of 0 to 3 for each block of 32.
 *
 * value = scale * 2^shift * integer. A block far below the largest value of its group so keeps up to 3 more bits. The
 * shift belongs to the integers: a sum of products over a group stays exact. A group whose largest value is below
 * SMALLEST is zero. A group with a value that is not finite gets the scale NaN, and so does every output of its row.
 */
#pragma once
#include "formats.h"
#include "team.h"

enum { MOST_SHIFT = 3, MOST_NARROW = 32767 / 15 };
#define SMALLEST 1e-30f

/* A group of one row. What the K types need is together. The size is no power of 2, so that rows side by side do not all
 * meet in the same sets of a cache. */
typedef struct {
    int8_t values[SUPER];
    int32_t shifts[GROUP];
    int16_t short_shifts[GROUP]; /* the same */
    int16_t block_sums[GROUP];   /* sum of a block, shifted */
    float scale;
    int32_t is_narrow, pad[2];   /* whether every sum of a block times weights of 4 bits fits into 16 bits */
    int32_t offsets[2 * GROUP];  /* -32 * sum of 16 values */
    float scales[GROUP];         /* scale * 2^shift */
    float minima[GROUP];         /* sum of a block * its scale */
} Activation;

INLINE v8i larger(v8i a, v8i b) {
#if defined(__AVX2__)
    return (v8i)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (v8i)select8(a > b, (v8)a, (v8)b);
#endif
}

/* Return the largest magnitude of a block, as the bits of a float. NaN is larger than every number. */
INLINE int32_t magnitude(const float *x) {
    v8i top = {0};
    for (int i = 0; i < BLOCK; i += 8) top = larger(*(const v8iu *)(x + i) & 0x7fffffff, top);
    top = larger(top, __builtin_shufflevector(top, top, 4, 5, 6, 7, 0, 1, 2, 3));
    top = larger(top, __builtin_shufflevector(top, top, 2, 3, 0, 1, 6, 7, 4, 5));
    return top[0] > top[1] ? top[0] : top[1];
}

INLINE float as_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

typedef int8_t v8c __attribute__((vector_size(8)));

/* Round 8 products to integers, the even one of two at the same distance; return them. */
INLINE v8i round_eight(const float *x, float factor, int8_t *out) {
    const v8 magic = splat(12582912.0f); /* 1.5 * 2^23 */
    v8i whole = (v8i)(load(x) * factor + magic) - (v8i)magic;
    v8c bytes = __builtin_convertvector(whole, v8c);
    memcpy(out, &bytes, 8);
    return whole;
}

INLINE int32_t sum_of(v8i x) {
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return x[0] + x[1];
}

INLINE v8i positive(v8i x) { return x & ~(x >> 31); }

static void quantise_block(const float *x, float factor, int shift, int j, Activation *a) {
    int32_t sums[2], sum, above;
    v8i positives = {0};
    for (int half = 0; half < 2; half++) {
        const int at = BLOCK * j + 16 * half;
        const v8i first = round_eight(x + 16 * half, factor, a->values + at);
        const v8i second = round_eight(x + 16 * half + 8, factor, a->values + at + 8);
        sums[half] = sum_of(first + second);
        positives += positive(first) + positive(second);
        a->offsets[2 * j + half] = -32 * sums[half];
    }
    sum = sums[0] + sums[1], above = sum_of(positives);
    a->is_narrow &= above <= MOST_NARROW && above - sum <= MOST_NARROW;
    a->shifts[j] = a->short_shifts[j] = shift;
    a->block_sums[j] = (int16_t)(sum * (1 << shift));
    a->scales[j] = a->scale * (float)(1 << shift);
    a->minima[j] = (float)sum * a->scales[j];
}

/* What a block's sum of products begins with, since the bits of its weights are too large by the format's offset. */
INLINE int32_t begin_of(int format, const Activation *a, int j) {
    return (a->offsets[2 * j] + a->offsets[2 * j + 1]) / 32 * offset_of(format);
}

/* Quantise `count` blocks of a row as one group. */
static void quantise_group(const float *x, int count, Activation *a) {
    int32_t each[GROUP], most = 0;
    for (int j = 0; j < count; j++) {
        each[j] = magnitude(x + BLOCK * j);
        most = each[j] > most ? each[j] : most;
    }
    const float top = as_float(most);
    const int is_finite = most < 0x7f800000, is_zero = is_finite && top < SMALLEST;
    a->is_narrow = 1;
    a->scale = is_zero ? 0.0f : is_finite ? top / 1016.0f : NAN; /* 1016 = 127 << MOST_SHIFT */
    for (int j = 0; j < count; j++) {
        int shift = MOST_SHIFT;
        while (shift && as_float(each[j]) * (float)(1 << (4 - shift)) <= top) shift--;
        if (is_zero || !is_finite) {
            static const float zeros[BLOCK];
            quantise_block(zeros, 0.0f, 0, j, a);
        } else {
            quantise_block(x + BLOCK * j, (float)(1016 >> shift) / top, shift, j, a);
        }
    }
}
