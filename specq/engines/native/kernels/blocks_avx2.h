/* One group of a panel times up to 5 rows, on AVX2. See blocks.h.
 *
 * Products of two neighbours are added in 16 bits. `most_sums` says how many such sums of a format fit into 16 bits.
 */
#pragma once
#include "activations.h"

enum { TILE_ROWS = 5 };
#define FOR_ROWS FOR_5_ROWS

INLINE int most_sums(int format) { /* 15 * 127 * 2 * 8, 31 * 127 * 2 * 4 and so on are below 2^15 */
    return bits_of(format) == 4 ? 8 : bits_of(format) == 5 ? 4 : bits_of(format) == 6 ? 2 : 1;
}

/* Return line i of a block's weights, 8 columns: unsigned bytes, or signed ones for 8 bits. */
INLINE __m256i line_of(int format, const uint8_t *block, int i) {
    const int bits = bits_of(format);
    if (bits == 8) return _mm256_loadu_si256((const __m256i *)(block + 64 * i));
    __m256i low = _mm256_loadu_si256((const __m256i *)(block + 64 * (i % 4))), high;
    low = _mm256_and_si256(i < 4 ? low : _mm256_srli_epi16(low, 4), _mm256_set1_epi8(15));
    if (bits == 4) return low;
    if (bits == 5) {
        high = _mm256_loadu_si256((const __m256i *)(block + 256));
        high = i <= 4 ? _mm256_slli_epi16(high, 4 - i) : _mm256_srli_epi16(high, i - 4);
    } else {
        high = _mm256_loadu_si256((const __m256i *)(block + 256 + 64 * (i / 4)));
        high = i % 4 <= 2 ? _mm256_slli_epi16(high, 4 - 2 * (i % 4)) : _mm256_srli_epi16(high, 2);
    }
    return _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi8(bits == 5 ? 16 : 48)), low);
}

INLINE __m256i pairs(int format, __m256i weights, const int8_t *values) {
    int32_t four;
    memcpy(&four, values, 4);
    const __m256i repeated = _mm256_set1_epi32(four);
    if (bits_of(format) == 8) /* the weight's sign goes to the value: 128 * 127 * 2 fits */
        return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(repeated, weights));
    return _mm256_maddubs_epi16(weights, repeated);
}

/* sums[r] += factor x (lines first .. end of a block times each row's values). `factor` is twice in each lane, in 16
 * bits. */
INLINE void dot_lines(int format, int rows, const uint8_t *block, int first, int end, const Activation *a, int j,
                      __m256i factor, __m256i *sums) {
    const int at_once = most_sums(format);
#pragma GCC unroll 8
    for (int start = first; start < end; start += at_once) {
        __m256i parts[TILE_ROWS];
#pragma GCC unroll 8
        for (int i = start; i < start + at_once && i < end; i++) {
            const __m256i weights = line_of(format, block, i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                __m256i part = pairs(format, weights, a[r].values + BLOCK * j + 4 * i);
                if (i > start) part = _mm256_add_epi16(parts[r], part);
                __asm__("" : "+x"(part)); /* keeps the compiler from gathering all products first and spilling them */
                parts[r] = part;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(parts[r], factor));
    }
}

INLINE __m256 halves8(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m256i twice(__m256i x) { return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(x, 16)); }
INLINE __m256i unsigned8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE __m256i signed8(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE __m256i shifted(__m256i x, const Activation *a, int j) { return _mm256_sllv_epi32(x, _mm256_set1_epi32(a->shifts[j])); }
INLINE __m256 scaled(__m256i sums, __m256 scale, const Activation *a) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(scale, _mm256_set1_ps(a->scale)));
}

/* Q4_0 .. Q8_0: `count` blocks, each with its own floats. The pointers are those of 8 columns. */
INLINE void add_blocks(int format, int rows, const uint8_t *floats, const uint8_t *group, int count, const Activation *a,
                       int columns, float (*out)[PANEL]) {
    const int has_offset = offset_of(format) && format != Q8_0;
#pragma GCC unroll 1
    for (int j = 0; j < count; j++) {
        __m256i sums[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_set1_epi32(has_offset ? begin_of(format, a + r, j) : 0);
        dot_lines(format, rows, group + j * block_bytes(format), 0, LINES, a, j, _mm256_set1_epi16(1), sums);
        const uint8_t *own = floats + j * float_bytes(format);
        const __m256 scale = halves8(own);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(a[r].scales[j]));
            __m256 total = _mm256_loadu_ps(out[r] + columns);
            total = _mm256_add_ps(total, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r]), factor));
            if (has_minima(format))
                total = _mm256_add_ps(total, _mm256_mul_ps(halves8(own + 2 * PANEL), _mm256_set1_ps(a[r].minima[j])));
            _mm256_storeu_ps(out[r] + columns, total);
        }
    }
}

/* Write the 256 scales and minima of a group of Q4_K or Q5_K as bytes. */
INLINE void unpack_scales(const uint8_t *scales, uint8_t *out) {
    for (int half = 0; half < 64; half += 32) {
        __m256i parts[3], last;
        for (int i = 0; i < 3; i++) {
            parts[i] = _mm256_loadu_si256((const __m256i *)(scales + 64 * i + half));
            _mm256_storeu_si256((__m256i *)(out + 64 * i + half), _mm256_and_si256(parts[i], _mm256_set1_epi8(63)));
        }
        last = _mm256_and_si256(_mm256_srli_epi16(parts[0], 6), _mm256_set1_epi8(3));
        last = _mm256_or_si256(last, _mm256_and_si256(_mm256_srli_epi16(parts[1], 4), _mm256_set1_epi8(12)));
        last = _mm256_or_si256(last, _mm256_and_si256(_mm256_srli_epi16(parts[2], 2), _mm256_set1_epi8(48)));
        _mm256_storeu_si256((__m256i *)(out + 192 + half), last);
    }
}

/* Return the sum of four pairs of 16-bit numbers, `numbers` repeated in each lane. */
INLINE __m256i dot_pairs(const __m256i weights[4], const int16_t *numbers) {
    __m256i sum = _mm256_setzero_si256();
    int32_t both[4];
    memcpy(both, numbers, sizeof both);
    for (int p = 0; p < 4; p++) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights[p], _mm256_set1_epi32(both[p])));
    return sum;
}

/* Q4_K, Q5_K: a superblock. */
INLINE void add_super(int format, int rows, const uint8_t *floats, const uint8_t *group, const uint8_t *scales,
                      const Activation *a, int columns, float (*out)[PANEL]) {
    __m256i totals[TILE_ROWS], minima[4];
    for (int r = 0; r < rows; r++) totals[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int j = 0; j < GROUP; j++, group += block_bytes(format)) {
        __m256i sums[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_setzero_si256();
        dot_lines(format, rows, group, 0, LINES, a, j, twice(unsigned8(scales + 16 * j + columns)), sums);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) totals[r] = _mm256_add_epi32(totals[r], shifted(sums[r], a + r, j));
    }
    for (int p = 0; p < 4; p++)
        minima[p] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(scales + 128 + 32 * p + 2 * columns)));
    const __m256 scale = halves8(floats), minimum = halves8(floats + 2 * PANEL);
    for (int r = 0; r < rows; r++) {
        __m256 sum = _mm256_add_ps(_mm256_loadu_ps(out[r] + columns), scaled(totals[r], scale, a + r));
        sum = _mm256_sub_ps(sum, scaled(dot_pairs(minima, a[r].block_sums), minimum, a + r));
        _mm256_storeu_ps(out[r] + columns, sum);
    }
}

/* Return factor x the part that the offset of the weights takes from the sum of 16 products. */
INLINE __m256i offset(__m256i factor, const Activation *a, int part) {
    return _mm256_mullo_epi32(factor, _mm256_set1_epi32(a->offsets[part]));
}

/* Q6_K: a superblock. */
INLINE void add_six(int rows, const uint8_t *floats, const uint8_t *group, const uint8_t *scales, const Activation *a,
                    int columns, float (*out)[PANEL]) {
    __m256i totals[TILE_ROWS];
    for (int r = 0; r < rows; r++) totals[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int j = 0; j < GROUP; j++, group += block_bytes(Q6_K)) {
        const __m256i first = signed8(scales + 32 * j + columns), second = signed8(scales + 32 * j + 16 + columns);
        __m256i sums[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = _mm256_add_epi32(offset(first, a + r, 2 * j), offset(second, a + r, 2 * j + 1));
        dot_lines(Q6_K, rows, group, 0, 4, a, j, twice(first), sums);
        dot_lines(Q6_K, rows, group, 4, 8, a, j, twice(second), sums);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) totals[r] = _mm256_add_epi32(totals[r], shifted(sums[r], a + r, j));
    }
    const __m256 scale = halves8(floats);
    for (int r = 0; r < rows; r++)
        _mm256_storeu_ps(out[r] + columns,
                         _mm256_add_ps(_mm256_loadu_ps(out[r] + columns), scaled(totals[r], scale, a + r)));
}

INLINE void add_group(int format, int rows, const uint8_t *floats, const uint8_t *group, int count, const Activation *a,
                      const uint8_t *ahead, float (*out)[PANEL]) {
    uint8_t scales[SUPER] __attribute__((aligned(64)));
    const long bytes = scale_bytes(format) + count * block_bytes(format);
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    if (format == Q4_K || format == Q5_K) unpack_scales(group, scales);
#pragma GCC unroll 1
    for (int columns = 0; columns < PANEL; columns += 8) {
        const uint8_t *own = floats + 2 * columns, *bits = group + scale_bytes(format) + 4 * columns;
        if (format == Q6_K)
            add_six(rows, own, bits, group, a, columns, out);
        else if (is_super(format))
            add_super(format, rows, own, bits, scales, a, columns, out);
        else
            add_blocks(format, rows, own, bits, count, a, columns, out);
    }
}
