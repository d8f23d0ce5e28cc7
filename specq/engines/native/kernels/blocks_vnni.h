/* One group of a panel times up to 8 rows, on AVX-512 with VNNI: 64 products an instruction. See blocks.h. */
#pragma once
#include "activations.h"

enum { TILE_ROWS = 8 };
#define FOR_ROWS FOR_8_ROWS

/* sum += weights x 4 values in each lane. The compiler would load the values with an instruction of its own. */
INLINE __m512i dot4(__m512i sum, __m512i weights, const int8_t *values) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int32_t(*)[1])values));
    return sum;
}

/* Return line i of a block's weights as unsigned bytes. */
INLINE __m512i line_of(int format, const uint8_t *block, int i) {
    const int bits = bits_of(format);
    if (bits == 8) return _mm512_xor_si512(_mm512_loadu_si512(block + 64 * i), _mm512_set1_epi8(-128));
    __m512i low = _mm512_loadu_si512(block + 64 * (i % 4)), high;
    low = _mm512_and_si512(i < 4 ? low : _mm512_srli_epi16(low, 4), _mm512_set1_epi8(15));
    if (bits == 4) return low;
    if (bits == 5) {
        high = _mm512_loadu_si512(block + 256);
        high = i <= 4 ? _mm512_slli_epi16(high, 4 - i) : _mm512_srli_epi16(high, i - 4);
    } else {
        high = _mm512_loadu_si512(block + 256 + 64 * (i / 4));
        high = i % 4 <= 2 ? _mm512_slli_epi16(high, 4 - 2 * (i % 4)) : _mm512_srli_epi16(high, 2);
    }
    return _mm512_ternarylogic_epi64(high, _mm512_set1_epi8(bits == 5 ? 16 : 48), low, 0xEA); /* high & mask | low */
}

/* sums[r] += lines first .. end of a block times each row's values, with prefetches spread between. */
INLINE void dot_lines(int format, int rows, const uint8_t *block, int first, int end, const Activation *a, int j,
                      const uint8_t *ahead, __m512i *sums) {
#pragma GCC unroll 8
    for (int i = first; i < end; i++) {
        const __m512i weights = line_of(format, block, i);
        if (64 * i < block_bytes(format)) __builtin_prefetch(ahead + 64 * i, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = dot4(sums[r], weights, a[r].values + BLOCK * j + 4 * i);
    }
}

INLINE __m512 halves16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* Q4_0 .. Q8_0: `count` blocks, each with its own floats. */
INLINE void add_blocks(int format, int rows, const uint8_t *floats, const uint8_t *group, int count, const Activation *a,
                       const uint8_t *ahead, float (*out)[PANEL]) {
    __m512 totals[TILE_ROWS];
    for (int r = 0; r < rows; r++) totals[r] = _mm512_loadu_ps(out[r]);
#pragma GCC unroll 1
    for (int j = 0; j < count; j++) {
        const long at = j * block_bytes(format);
        __m512i sums[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sums[r] = offset_of(format) ? _mm512_set1_epi32(begin_of(format, a + r, j)) : _mm512_setzero_si512();
        dot_lines(format, rows, group + at, 0, LINES, a, j, ahead + at, sums);
        const __m512 scale = halves16(floats + j * float_bytes(format));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(a[r].scales[j]));
            totals[r] = _mm512_add_ps(totals[r], _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r]), factor));
        }
        if (!has_minima(format)) continue;
        const __m512 minimum = halves16(floats + j * float_bytes(format) + 2 * PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            totals[r] = _mm512_add_ps(totals[r], _mm512_mul_ps(minimum, _mm512_set1_ps(a[r].minima[j])));
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(out[r], totals[r]);
}

/* Write the 256 scales and minima of a group of Q4_K or Q5_K as bytes. */
INLINE void unpack_scales(const uint8_t *scales, uint8_t *out) {
    const __m512i low = _mm512_set1_epi8(63);
    __m512i parts[3], last;
    for (int i = 0; i < 3; i++) {
        parts[i] = _mm512_loadu_si512(scales + 64 * i);
        _mm512_storeu_si512(out + 64 * i, _mm512_and_si512(parts[i], low));
    }
    last = _mm512_and_si512(_mm512_srli_epi16(parts[0], 6), _mm512_set1_epi8(3));
    last = _mm512_ternarylogic_epi64(_mm512_srli_epi16(parts[1], 4), _mm512_set1_epi8(12), last, 0xEA);
    last = _mm512_ternarylogic_epi64(_mm512_srli_epi16(parts[2], 2), _mm512_set1_epi8(48), last, 0xEA);
    _mm512_storeu_si512(out + 192, last);
}

INLINE __m512i shifted(__m512i x, const Activation *a, int j) { return _mm512_sllv_epi32(x, _mm512_set1_epi32(a->shifts[j])); }

INLINE __m512i scales16(const uint8_t *scales) {
    return _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
}

/* totals += sums of block j of a superblock x its scales and shifts. */
INLINE void add_block(int format, int rows, const uint8_t *group, const uint8_t *scales, const Activation *a, int j,
                      const uint8_t *ahead, __m512i *totals) {
    const long at = scale_bytes(format) + j * block_bytes(format);
    __m512i sums[TILE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r] = _mm512_setzero_si512();
    dot_lines(format, rows, group + at, 0, LINES, a, j, ahead + at, sums);
    const __m512i scale = scales16(scales + 16 * j);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        totals[r] = _mm512_add_epi32(totals[r], shifted(_mm512_mullo_epi32(sums[r], scale), a + r, j));
}

/* The same for blocks j and j + 1 of narrow rows: one multiplication instead of two. Multiplications and products of the
 * dot instruction take the same units, which limit the speed with several rows. */
INLINE void add_two_blocks(int format, int rows, const uint8_t *group, const uint8_t *scales, const Activation *a, int j,
                           const uint8_t *ahead, __m512i *totals) {
    const long at = scale_bytes(format) + j * block_bytes(format), next = at + block_bytes(format);
    __m512i sums[2][TILE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[0][r] = sums[1][r] = _mm512_setzero_si512();
    dot_lines(format, rows, group + at, 0, LINES, a, j, ahead + at, sums[0]);
    dot_lines(format, rows, group + next, 0, LINES, a, j + 1, ahead + next, sums[1]);
    const __m512i second = _mm512_slli_epi32(scales16(scales + 16 * (j + 1)), 16);
    const __m512i scale = _mm512_or_si512(scales16(scales + 16 * j), second);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int32_t shifts;
        memcpy(&shifts, a[r].short_shifts + j, sizeof shifts);
        const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAA, sums[0][r], _mm512_slli_epi32(sums[1][r], 16));
        totals[r] = _mm512_dpwssd_epi32(totals[r], both, _mm512_sllv_epi16(scale, _mm512_set1_epi32(shifts)));
    }
}

INLINE int are_narrow(int rows, const Activation *a) {
    int32_t all = 1;
    for (int r = 0; r < rows; r++) all &= a[r].is_narrow;
    return all;
}

/* totals += integers x scale x the row's scale. */
INLINE __m512 scaled(__m512i sums, __m512 scale, const Activation *a) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scale, _mm512_set1_ps(a->scale)));
}

/* Q4_K, Q5_K: a superblock. */
INLINE void add_super(int format, int rows, const uint8_t *floats, const uint8_t *group, const Activation *a,
                      const uint8_t *ahead, float (*out)[PANEL]) {
    uint8_t scales[SUPER] __attribute__((aligned(64)));
    __m512i totals[TILE_ROWS], minima[4];
    unpack_scales(group, scales);
    for (int i = 0; i < 3; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) totals[r] = _mm512_setzero_si512();
    if (bits_of(format) == 4 && rows > 1 && are_narrow(rows, a)) {
#pragma GCC unroll 1
        for (int j = 0; j < GROUP; j += 2) add_two_blocks(format, rows, group, scales, a, j, ahead, totals);
    } else {
#pragma GCC unroll 1
        for (int j = 0; j < GROUP; j++) add_block(format, rows, group, scales, a, j, ahead, totals);
    }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++)
        minima[p] = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i *)(scales + 128 + 32 * p)));
    const __m512 scale = halves16(floats), minimum = halves16(floats + 2 * PANEL);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        __m512i lower = _mm512_setzero_si512();
        int32_t pairs[4];
        memcpy(pairs, a[r].block_sums, sizeof pairs);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) lower = _mm512_dpwssd_epi32(lower, minima[p], _mm512_set1_epi32(pairs[p]));
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(out[r]), scaled(totals[r], scale, a + r));
        _mm512_storeu_ps(out[r], _mm512_sub_ps(sum, scaled(lower, minimum, a + r)));
    }
}

/* Q6_K: a superblock. */
INLINE void add_six(int rows, const uint8_t *floats, const uint8_t *group, const Activation *a, const uint8_t *ahead,
                    float (*out)[PANEL]) {
    __m512i totals[TILE_ROWS];
    for (int i = 0; i < 4; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) totals[r] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int j = 0; j < GROUP; j++) {
        const long at = scale_bytes(Q6_K) + j * block_bytes(Q6_K);
        __m512i parts[TILE_ROWS], sums[TILE_ROWS];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r] = _mm512_set1_epi32(a[r].offsets[2 * j + half]);
            dot_lines(Q6_K, rows, group + at, 4 * half, 4 * half + 4, a, j, ahead + at, sums);
            const uint8_t *bytes = group + 16 * (2 * j + half);
            const __m512i scale = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const __m512i part = _mm512_mullo_epi32(sums[r], scale);
                parts[r] = half ? _mm512_add_epi32(parts[r], part) : part;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) totals[r] = _mm512_add_epi32(totals[r], shifted(parts[r], a + r, j));
    }
    const __m512 scale = halves16(floats);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], _mm512_add_ps(_mm512_loadu_ps(out[r]), scaled(totals[r], scale, a + r)));
}

INLINE void add_group(int format, int rows, const uint8_t *floats, const uint8_t *group, int count, const Activation *a,
                      const uint8_t *ahead, float (*out)[PANEL]) {
    if (format == Q6_K)
        add_six(rows, floats, group, a, ahead, out);
    else if (is_super(format))
        add_super(format, rows, floats, group, a, ahead, out);
    else
        add_blocks(format, rows, floats, group, count, a, ahead, out);
}
