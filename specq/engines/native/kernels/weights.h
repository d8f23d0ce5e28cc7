/* Weights of a linear layer, packed once into panels of 16 output columns, in their original format.
 *
 *     F32    [k][16] floats
 *     BF16   [k][16], if every weight is exactly a bfloat16. Word i of a 32-byte line holds column i in its low half
 *            and column i + 8 in its high half.
 *     Q4_1   [k / 32] of GGUF's blocks of 16 columns: 16 scales, 16 minima (half precision), then [4][16] words. Nibble
 *            j of a word is for k + j. weight = nibble * scale + minimum. The product is exact in a float. The sum is
 *            rounded once, as in GGUF's own dequantisation.
 *     Q8_0   [k / 32]: 16 scales, then [8][16] words. Byte j of a word is for k + j. weight = byte * scale, exact.
 *
 * `expand_line` and `expand_word` return the weights as floats, bit for bit the same in every format.
 */
#pragma once
#include "product.h"
#include "vec.h"

enum format { F32, BF16, Q4_1, Q8_0 };
enum { PARTS = PANEL / LANES, BLOCK = 32, MAX_STEP = 8 };

INLINE int step_of(int format) { return format == Q4_1 ? 8 : format == Q8_0 ? 4 : 1; }

/* Bytes of a panel for k rows of weights. */
INLINE long panel_bytes(int format, long k) {
    switch (format) {
    case F32: return k * PANEL * 4;
    case BF16: return k * PANEL * 2;
    case Q4_1: return k / BLOCK * PANEL * (4 + BLOCK / 2);
    default: return k / BLOCK * PANEL * (2 + BLOCK);
    }
}

/* Columns part * LANES .. of one k of a panel in F32 or BF16. */
INLINE void expand_line(int format, const char *line, vec w[PARTS]) {
    for (int part = 0; part < PARTS; part++) {
        if (format == F32) {
            w[part] = vec_load(line + 4 * LANES * part);
        } else {
#if LANES == 16
            v8i bits = *(const v8iu *)line;
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)(bits << 16)), (__m256i)bits, 1);
            w[part] = (vec)((vec_int)both & (int32_t)0xffff0000);
#else
            vec_int bits = vec_load_int(line + 4 * LANES * (part % (PARTS / 2)));
            w[part] = part < PARTS / 2 ? (vec)(bits << 16) : (vec)(bits & (int32_t)0xffff0000);
#endif
        }
    }
}

/* Scales and minima of a block. A Q8_0 scale has the factor 2^-24, since `expand_word` leaves a byte at the top of its
 * word. */
typedef struct {
    vec scale[PARTS], minimum[PARTS];
} Scales;

INLINE Scales load_scales(int format, const char *block) {
    Scales s;
    for (int part = 0; part < PARTS; part++) {
        s.scale[part] = vec_load_half(block + 2 * LANES * part);
        if (format == Q4_1)
            s.minimum[part] = vec_load_half(block + 2 * PANEL + 2 * LANES * part);
        else
            s.scale[part] *= 0x1p-24f; /* bytes stay at the top of their word */
    }
    return s;
}

/* The lowest nibble of each word as a float. */
INLINE vec vec_from_nibble(vec_int bits) {
#if LANES == 16
    const vec counting = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vec)_mm512_permutexvar_ps((__m512i)bits, (__m512)counting); /* it ignores the other bits */
#else
    return vec_from_int(bits & 15);
#endif
}

/* Return weight j of a word of 8 nibbles or 4 bytes. */
INLINE vec expand_word(int format, vec_int bits, int j, vec scale, vec minimum) {
    if (format == Q4_1) return vec_fma(vec_from_nibble(bits >> 4 * j), scale, minimum);
    return vec_from_int((bits << (24 - 8 * j)) & (int32_t)0xff000000) * scale;
}

/* Expand the blocks of a panel to [k][16] floats. */
INLINE void expand_blocks(int format, const char *panel, long k, float *out) {
    const int step = step_of(format), words = PANEL * (format == Q4_1 ? 4 : 2);
    for (long i = 0; i < k; i += BLOCK, panel += panel_bytes(format, BLOCK)) {
        const Scales s = load_scales(format, panel);
        for (int j = 0; j < BLOCK; j += step)
            for (int part = 0; part < PARTS; part++) {
                vec_int bits = vec_load_int(panel + words + (j / step) * 4 * PANEL + 4 * LANES * part);
                for (int n = 0; n < step; n++)
                    vec_store(out + (i + j + n) * PANEL + LANES * part,
                              expand_word(format, bits, n, s.scale[part], s.minimum[part]));
            }
    }
}

INLINE void expand_lines(int format, const char *panel, long k, float *out) {
    for (long i = 0; i < k; i++) {
        vec w[PARTS];
        expand_line(format, panel + i * panel_bytes(format, 1), w);
        for (int part = 0; part < PARTS; part++) vec_store(out + i * PANEL + LANES * part, w[part]);
    }
}

/* Expand a panel's weights to [k][16] floats. */
static void expand_panel(int format, const char *panel, long k, float *out) {
    switch (format) {
    case BF16: expand_lines(BF16, panel, k, out); break;
    case Q4_1: expand_blocks(Q4_1, panel, k, out); break;
    case Q8_0: expand_blocks(Q8_0, panel, k, out); break;
    default: expand_lines(F32, panel, k, out);
    }
}
