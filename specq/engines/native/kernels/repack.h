/* Convert a GGUF file's blocks to the panels of formats.h, once per file; and a panel's column back to floats. */
#pragma once
#include "formats.h"

/* The bits and numbers of a block or superblock of one column. */
typedef struct {
    uint8_t bits[SUPER];
    uint8_t scales[16], minima[GROUP]; /* integers of the K types */
    uint8_t floats[4];                 /* scale and minimum, as halves */
} Unpacked;

INLINE long file_block_bytes(int format) {
    switch (format) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case F32: return 4;
    default: return 2;
    }
}
INLINE int file_block(int format) { return is_float(format) ? 1 : is_super(format) ? SUPER : BLOCK; }

/* Q4_0 .. Q8_0: scale, then minimum, fifth bits and weights as far as the type has them. */
INLINE void unpack_block(int format, const uint8_t *from, Unpacked *u) {
    const int floats = has_minima(format) ? 4 : 2;
    const uint8_t *bits = from + floats + (bits_of(format) == 5 ? 4 : 0);
    memcpy(u->floats, from, floats);
    if (bits_of(format) == 8) {
        memcpy(u->bits, bits, BLOCK);
        return;
    }
    for (int i = 0; i < 16; i++) u->bits[i] = bits[i] & 15, u->bits[16 + i] = bits[i] >> 4;
    if (bits_of(format) != 5) return;
    uint32_t fifth;
    memcpy(&fifth, from + floats, 4);
    for (int i = 0; i < BLOCK; i++) u->bits[i] |= (fifth >> i & 1) << 4;
}

/* Q4_K, Q5_K: scale, minimum, 12 bytes of scales and minima in 6 bits, fifth bits, weights. */
INLINE void unpack_super(int format, const uint8_t *from, Unpacked *u) {
    const uint8_t *s = from + 4, *fifth = from + 16, *bits = fifth + (format == Q5_K ? 32 : 0);
    memcpy(u->floats, from, 4);
    for (int j = 0; j < 4; j++) {
        u->scales[j] = s[j] & 63, u->minima[j] = s[j + 4] & 63;
        u->scales[j + 4] = (s[j + 8] & 15) | s[j] >> 6 << 4;
        u->minima[j + 4] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < 32; i++) {
            const int high = format == Q5_K ? fifth[i] >> 2 * t : 0;
            u->bits[64 * t + i] = (bits[32 * t + i] & 15) | (high & 1) << 4;
            u->bits[64 * t + 32 + i] = bits[32 * t + i] >> 4 | (high >> 1 & 1) << 4;
        }
}

/* Q6_K: low bits, high bits, scales, scale. */
INLINE void unpack_six(const uint8_t *from, Unpacked *u) {
    memcpy(u->floats, from + 208, 2);
    memcpy(u->scales, from + 192, 16);
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *low = from + 64 * n + i, high = from[128 + 32 * n + i];
            uint8_t *to = u->bits + 128 * n + i;
            to[0] = (low[0] & 15) | (high & 3) << 4;
            to[32] = (low[32] & 15) | (high >> 2 & 3) << 4;
            to[64] = low[0] >> 4 | (high >> 4 & 3) << 4;
            to[96] = low[32] >> 4 | high >> 6 << 4;
        }
}

/* Write 32 weights as column c of a block. */
INLINE void pack_bits(int format, const uint8_t *bits, int c, uint8_t *block) {
    const int wide = bits_of(format);
    if (wide == 8) {
        for (int i = 0; i < 8; i++) memcpy(block + 64 * i + 4 * c, bits + 4 * i, 4);
        return;
    }
    uint8_t low[16], fifth[4] = {0}, high[8] = {0};
    for (int i = 0; i < 16; i++) low[i] = (bits[i] & 15) | (bits[16 + i] & 15) << 4;
    for (int i = 0; i < 4; i++) memcpy(block + 64 * i + 4 * c, low + 4 * i, 4);
    if (wide == 5) {
        for (int i = 0; i < BLOCK; i++) fifth[i % 4] |= bits[i] >> 4 << i / 4;
        memcpy(block + 256 + 4 * c, fifth, 4);
    }
    if (wide == 6) {
        for (int i = 0; i < BLOCK; i++) high[i / 16 * 4 + i % 4] |= bits[i] >> 4 << i / 4 % 4 * 2;
        memcpy(block + 256 + 4 * c, high, 4);
        memcpy(block + 320 + 4 * c, high + 4, 4);
    }
}

/* Write column c's integer scales of a group. The bytes must be zero before the first column. */
INLINE void pack_scales(int format, const Unpacked *u, int c, uint8_t *scales) {
    if (format == Q6_K) {
        for (int j = 0; j < 16; j++) scales[16 * j + c] = u->scales[j];
        return;
    }
    for (int j = 0; j < GROUP; j++) {
        const int at = 128 + j / 2 * 32 + 2 * c + j % 2, minimum = u->minima[j];
        scales[16 * j + c] |= u->scales[j];
        if (at < 192) scales[at] |= minimum;
        for (int part = 0; at >= 192 && part < 3; part++) scales[at - 192 + 64 * part] |= (minimum >> 2 * part & 3) << 6;
    }
}

INLINE int is_infinite(const uint8_t *half) { return (half[1] & 0x7c) == 0x7c; }

/* Repack one column; return the number of its first block with a scale that is not finite, or -1. */
INLINE long repack_column(int format, const uint8_t *from, long k, int c, uint8_t *panel) {
    const int super = is_super(format), num_blocks = super ? GROUP : 1;
    uint8_t *group = panel + front_bytes(format, k);
    for (long b = 0; b < k / (BLOCK * num_blocks); b++, from += file_block_bytes(format)) {
        Unpacked u;
        if (format == Q6_K)
            unpack_six(from, &u);
        else if (super)
            unpack_super(format, from, &u);
        else
            unpack_block(format, from, &u);
        if (is_infinite(u.floats) || (has_minima(format) && is_infinite(u.floats + 2))) return b;
        uint8_t *floats = panel + b * float_bytes(format) + 2 * c;
        memcpy(floats, u.floats, 2);
        if (has_minima(format)) memcpy(floats + 2 * PANEL, u.floats + 2, 2);
        if (super) pack_scales(format, &u, c, group);
        group += scale_bytes(format);
        for (int j = 0; j < num_blocks; j++, group += block_bytes(format)) pack_bits(format, u.bits + BLOCK * j, c, group);
    }
    return -1;
}

INLINE long repack_floats(int format, const uint8_t *from, long k, int c, float *panel) {
    for (long i = 0; i < k; i++, from += file_block_bytes(format)) {
        uint32_t bits;
        float value;
        if (format == F32)
            memcpy(&value, from, 4);
        else if (format == BF16)
            bits = (uint32_t)(from[0] | from[1] << 8) << 16, memcpy(&value, &bits, 4);
        else
            value = from_half(from);
        memcpy(&bits, &value, 4);
        if ((bits & 0x7f800000) == 0x7f800000 || (format == F16 && is_infinite(from))) return i;
        panel[i * PANEL + c] = value;
    }
    return -1;
}

/* Repack rows 0 .. num_rows of a matrix, `stride` bytes apart, to whole panels, which must be zero. Return -1, or
 * row * blocks of a row + block of the first scale (of floats: value) that is not finite. */
int64_t specq_repack(int format, const uint8_t *rows, int64_t stride, int64_t num_rows, int64_t k, uint8_t *out) {
    for (int64_t row = 0; row < num_rows; row++) {
        uint8_t *panel = out + row / PANEL * panel_bytes(format, k);
        const uint8_t *from = rows + row * stride;
        const int c = row % PANEL;
        long bad;
        switch (format) { /* a constant format makes the compiler drop what it does not need */
        case Q4_0: bad = repack_column(Q4_0, from, k, c, panel); break;
        case Q4_1: bad = repack_column(Q4_1, from, k, c, panel); break;
        case Q5_0: bad = repack_column(Q5_0, from, k, c, panel); break;
        case Q5_1: bad = repack_column(Q5_1, from, k, c, panel); break;
        case Q8_0: bad = repack_column(Q8_0, from, k, c, panel); break;
        case Q4_K: bad = repack_column(Q4_K, from, k, c, panel); break;
        case Q5_K: bad = repack_column(Q5_K, from, k, c, panel); break;
        case Q6_K: bad = repack_column(Q6_K, from, k, c, panel); break;
        default: bad = repack_floats(format, from, k, c, (float *)panel);
        }
        if (bad >= 0) return row * (k / file_block(format)) + bad;
    }
    return -1;
}

int64_t specq_panel_bytes(int format, int64_t k) { return panel_bytes(format, k); }

/* Write row `row` of a matrix as floats, exactly as GGUF's own dequantisation rounds them. */
static void expand_row(const Matrix *m, long row, float *out) {
    const Panel *panel = (const Panel *)m->weights + row / PANEL;
    const int format = panel->format, c = row % PANEL, num_scales = is_super(format) ? GROUP : 1;
    const uint8_t *floats = panel->data, *group = floats + front_bytes(format, m->k);
    if (is_float(format)) {
        for (long i = 0; i < m->k; i++) out[i] = ((const float *)panel->data)[i * PANEL + c];
        return;
    }
    for (long i = 0; i < m->k; i += BLOCK * num_scales, floats += float_bytes(format)) {
        const float scale = from_half(floats + 2 * c);
        const float minimum = has_minima(format) ? from_half(floats + 2 * PANEL + 2 * c) : 0;
        const uint8_t *scales = group;
        group += scale_bytes(format);
        for (int j = 0; j < num_scales; j++, group += block_bytes(format), out += BLOCK)
            for (int n = 0; n < BLOCK; n++) {
                float factor = scale, lowest = minimum;
                if (format == Q6_K) factor *= (float)(int8_t)scales[16 * (2 * j + n / 16) + c];
                if (format == Q4_K || format == Q5_K)
                    factor *= (float)packed_scale(scales, 16 * j + c), lowest *= -(float)packed_minimum(scales, j, c);
                const int bits = weight_bits(format, group, n, c);
                const int weight = format == Q8_0 ? (int8_t)bits : bits - offset_of(format);
                out[n] = has_minima(format) ? factor * (float)weight + lowest : factor * (float)weight;
            }
    }
}
