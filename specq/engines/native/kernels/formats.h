/* Weights of linear layers for integer arithmetic: a GGUF file's own blocks, repacked into panels of 16 output columns.
 *
 * A block is 32 weights of a column. A group is 8 blocks, the reach of one scale of the activations. The K types have
 * superblocks of that size. A panel begins with the floats of all its blocks (or superblocks): [16] scales and, where
 * the type has them, [16] minima, in half precision. Its groups follow at a multiple of 64 bytes. So a panel has the
 * size of the file's blocks, and up to 48 bytes more.
 *
 *     bits of 16 blocks    [4][16] words. Byte b of word c of line i: column c, weight 4i + b in the low half, weight
 *                          16 + 4i + b in the high half. Then, for 5 bits, [16] words: bit i of byte b is the fifth bit
 *                          of weight 4i + b. For 6 bits, [2][16] words: bits 2i of byte b of line h are those of weight
 *                          16h + 4i + b. For 8 bits, [8][16] words: byte b of line i is weight 4i + b, signed.
 *     Q4_K, Q5_K           before a group's bits 192 bytes: [8][16] scales and [4][16][2] minima, 6 bits each. The last
 *                          64 of these 256 numbers lie in the upper 2 bits of the others.
 *     Q6_K                 before a group's bits [16][16] scales, signed bytes, each of 16 weights.
 *     F32                  [k][16] floats, for matrices that are not quantised.
 *
 * Formats have GGUF's numbers. To add one: its line in the functions below, its blocks in repack.h, its bits in the
 * kernels (blocks_*.h), and its name in specq/engines/native/panels.py.
 */
#pragma once
#include "product.h"

enum format { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };
enum { BLOCK = 32, GROUP = 8, SUPER = BLOCK * GROUP, LINES = 8, NUM_FORMATS = 15 };

/* One panel of a matrix. */
typedef struct {
    const uint8_t *data;
    int64_t format;
} Panel;

INLINE int is_float(int format) { return format == F32 || format == F16 || format == BF16; }
INLINE int is_super(int format) { return format >= Q4_K && format <= Q6_K; }
INLINE int bits_of(int format) {
    return format == Q4_0 || format == Q4_1 || format == Q4_K ? 4 : format == Q8_0 ? 8 : format == Q6_K ? 6 : 5;
}
INLINE int has_minima(int format) { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }

/* What is subtracted from a weight's bits, read as an unsigned number. */
INLINE int offset_of(int format) {
    return format == Q4_0 ? 8 : format == Q5_0 ? 16 : format == Q8_0 ? 128 : format == Q6_K ? 32 : 0;
}

/* Bytes of 16 columns: floats of a block or superblock, integer scales of a group, bits of a block. */
INLINE long float_bytes(int format) { return has_minima(format) ? 4 * PANEL : 2 * PANEL; }
INLINE long scale_bytes(int format) { return format == Q6_K ? 256 : is_super(format) ? 192 : 0; }
INLINE long block_bytes(int format) { return BLOCK * PANEL * bits_of(format) / 8; }

/* Bytes from a panel's begin to its first group. */
INLINE long front_bytes(int format, long k) {
    return (float_bytes(format) * (is_super(format) ? k / SUPER : k / BLOCK) + 63) / 64 * 64;
}
INLINE long panel_bytes(int format, long k) {
    if (is_float(format)) return 4 * PANEL * k;
    return front_bytes(format, k) + k / BLOCK * block_bytes(format) + k / SUPER * scale_bytes(format);
}

/* Return the bits of weight i of column c of a block. */
INLINE int weight_bits(int format, const uint8_t *block, int i, int c) {
    const int line = i / 4 % 4, at = 4 * c + i % 4, bits = bits_of(format);
    if (bits == 8) return block[64 * (i / 4) + at];
    int found = i < 16 ? block[64 * line + at] & 15 : block[64 * line + at] >> 4;
    if (bits == 5) found |= (block[256 + at] >> (i / 4) & 1) << 4;
    if (bits == 6) found |= (block[256 + 64 * (i / 16) + at] >> 2 * line & 3) << 4;
    return found;
}

/* Return number i of the 256 scales and minima of a group of Q4_K or Q5_K: scale [j][c], minimum 128 + [j / 2][c][j % 2]. */
INLINE int packed_scale(const uint8_t *scales, int i) {
    if (i < 192) return scales[i] & 63;
    return scales[i - 192] >> 6 | scales[i - 128] >> 6 << 2 | scales[i - 64] >> 6 << 4;
}
INLINE int packed_minimum(const uint8_t *scales, int j, int c) { return packed_scale(scales, 128 + j / 2 * 32 + 2 * c + j % 2); }

/* Convert a finite half-precision number. Its bits, read as a float, are too small by a factor 2^112. */
INLINE float from_half(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
