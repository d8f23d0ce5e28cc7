/* Activations as integers of 8 bits, in blocks of 32.
 *
 * For Q4_0 .. Q8_0 a block has its own scale: value = scale * integer. For the K types 256 values (a group) have a scale,
 * and each block has a shift of 0 to 3: value = scale * 2^shift * integer. A block far below the largest value of its
 * group so keeps up to 3 more bits. The shift belongs to the integers: a sum of products over a group stays exact.
 *
 * A block or group whose largest value is below SMALLEST is zero. If a value is not finite, its scale is NaN, and so is
 * every output of its row.
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
    float scales[GROUP];         /* of each block */
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

/* Quantise one block; return the sum of its integers. Factor 0 makes zeros. */
static int32_t quantise_block(const float *x, float factor, float scale, int j, Activation *a) {
    static const float zeros[BLOCK];
    int32_t sums[2], above;
    v8i positives = {0};
    if (factor == 0) x = zeros;
    for (int half = 0; half < 2; half++) {
        const int at = BLOCK * j + 16 * half;
        const v8i first = round_eight(x + 16 * half, factor, a->values + at);
        const v8i second = round_eight(x + 16 * half + 8, factor, a->values + at + 8);
        sums[half] = sum_of(first + second);
        positives += positive(first) + positive(second);
        a->offsets[2 * j + half] = -32 * sums[half];
    }
    above = sum_of(positives);
    a->is_narrow &= above <= MOST_NARROW && above - sums[0] - sums[1] <= MOST_NARROW;
    a->scales[j] = scale;
    a->minima[j] = (float)(sums[0] + sums[1]) * scale;
    return sums[0] + sums[1];
}

INLINE int is_finite(int32_t magnitude) { return magnitude < 0x7f800000; }
INLINE int is_used(int32_t magnitude) { return is_finite(magnitude) && as_float(magnitude) >= SMALLEST; }

/* Return the scale with which the largest magnitude becomes the integer `largest`. */
INLINE float scale_of(int32_t magnitude, float largest) {
    return is_used(magnitude) ? as_float(magnitude) / largest : is_finite(magnitude) ? 0.0f : NAN;
}

/* What a block's sum of products begins with, since the bits of its weights are too large by the format's offset. */
INLINE int32_t begin_of(int format, const Activation *a, int j) {
    return (a->offsets[2 * j] + a->offsets[2 * j + 1]) / 32 * offset_of(format);
}

/* Quantise `count` blocks of a row for Q4_0 .. Q8_0. */
static void quantise_blocks(const float *x, int count, Activation *a) {
    for (int j = 0; j < count; j++, x += BLOCK) {
        const int32_t most = magnitude(x);
        quantise_block(x, is_used(most) ? 127.0f / as_float(most) : 0.0f, scale_of(most, 127.0f), j, a);
    }
}

/* Quantise `count` blocks of a row for the K types, as one group. */
static void quantise_group(const float *x, int count, Activation *a) {
    int32_t each[GROUP], most = 0;
    for (int j = 0; j < count; j++) {
        each[j] = magnitude(x + BLOCK * j);
        most = each[j] > most ? each[j] : most;
    }
    const float top = as_float(most);
    a->is_narrow = 1;
    a->scale = scale_of(most, 127 << MOST_SHIFT);
    for (int j = 0; j < count; j++) {
        int shift = is_used(most) ? MOST_SHIFT : 0;
        while (shift && as_float(each[j]) * (float)(1 << (4 - shift)) <= top) shift--;
        const float factor = is_used(most) ? (float)((127 << MOST_SHIFT) >> shift) / top : 0.0f;
        const int32_t sum = quantise_block(x + BLOCK * j, factor, a->scale * (float)(1 << shift), j, a);
        a->shifts[j] = a->short_shifts[j] = shift;
        a->block_sums[j] = (int16_t)(sum * (1 << shift));
    }
}
