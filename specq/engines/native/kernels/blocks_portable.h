/* One group of a panel times one row, in plain C. See blocks.h. */
#pragma once
#include "activations.h"

enum { TILE_ROWS = 1 };
#define FOR_ROWS(each, format) each(format, 1)

/* Return the sum of the products of weights first .. end of column c of a block, without the format's offset. */
INLINE int32_t dot_column(int format, const uint8_t *block, int first, int end, int c, const int8_t *values) {
    int32_t sum = 0;
    for (int i = first; i < end; i++) {
        const int bits = weight_bits(format, block, i, c);
        sum += (format == Q8_0 ? (int8_t)bits : bits - offset_of(format)) * values[i];
    }
    return sum;
}

INLINE void add_column(int format, const uint8_t *floats, const uint8_t *group, int count, int c, const Activation *a,
                       float *out) {
    const uint8_t *scales = group, *blocks = group + scale_bytes(format);
    int32_t total = 0, lower = 0;
    for (int j = 0; j < count; j++, blocks += block_bytes(format)) {
        const int8_t *values = a->values + BLOCK * j;
        const uint8_t *own = floats + j * float_bytes(format) + 2 * c;
        if (format == Q6_K) {
            for (int half = 0; half < 2; half++)
                total += dot_column(format, blocks, 16 * half, 16 * half + 16, c, values) *
                         (int8_t)scales[16 * (2 * j + half) + c] * (1 << a->shifts[j]);
        } else if (is_super(format)) {
            total += dot_column(format, blocks, 0, BLOCK, c, values) * packed_scale(scales, 16 * j + c) * (1 << a->shifts[j]);
            lower += packed_minimum(scales, j, c) * a->block_sums[j];
        } else {
            *out += (float)dot_column(format, blocks, 0, BLOCK, c, values) * (from_half(own) * a->scales[j]);
            if (has_minima(format)) *out += from_half(own + 2 * PANEL) * a->minima[j];
        }
    }
    if (!is_super(format)) return;
    *out += (float)total * (from_half(floats + 2 * c) * a->scale);
    if (has_minima(format)) *out -= (float)lower * (from_half(floats + 2 * PANEL + 2 * c) * a->scale);
}

INLINE void add_group(int format, int rows, const uint8_t *floats, const uint8_t *group, int count, const Activation *a,
                      const uint8_t *ahead, float (*out)[PANEL]) {
    (void)ahead;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PANEL; c++) add_column(format, floats, group, count, c, a + r, out[r] + c);
}
