/* Convert rows of weights from files to the panels of weights.h, in one pass over each, once per model. */
#pragma once
#include "weights.h"

static void pack_floats(const float *const *rows, long k, float *out) {
    for (int c = 0; c < PANEL; c++)
        for (long i = 0; i < k; i++) out[i * PANEL + c] = rows[c] ? rows[c][i] : 0;
}

static void pack_bfloats(const float *const *rows, long k, uint16_t *out) {
    for (int c = 0; c < PANEL; c++)
        for (long i = 0; i < k; i++) {
            uint32_t bits = 0;
            if (rows[c]) memcpy(&bits, rows[c] + i, 4);
            out[i * PANEL + c % 8 * 2 + c / 8] = bits >> 16;
        }
}

/* GGUF's block of 32: scale, minimum, 16 bytes. Byte i has weight i in its low half and weight i + 16 in its high
 * half. */
static void pack_nibbles(const uint8_t *const *rows, long k, uint8_t *out) {
    for (long b = 0; b < k / BLOCK; b++, out += panel_bytes(Q4_1, BLOCK))
        for (int c = 0; c < PANEL; c++) {
            if (!rows[c]) continue;
            const uint8_t *block = rows[c] + b * (4 + BLOCK / 2), *nibbles = block + 4;
            memcpy(out + 2 * c, block, 2);
            memcpy(out + 2 * PANEL + 2 * c, block + 2, 2);
            for (int i = 0; i < BLOCK; i++) {
                int nibble = i < BLOCK / 2 ? nibbles[i] & 15 : nibbles[i - BLOCK / 2] >> 4;
                out[4 * PANEL + (i / 8 * PANEL + c) * 4 + i % 8 / 2] |= nibble << i % 2 * 4;
            }
        }
}

/* GGUF's block of 32: scale, 32 bytes. */
static void pack_bytes(const uint8_t *const *rows, long k, uint8_t *out) {
    for (long b = 0; b < k / BLOCK; b++, out += panel_bytes(Q8_0, BLOCK))
        for (int c = 0; c < PANEL; c++) {
            if (!rows[c]) continue;
            const uint8_t *block = rows[c] + b * (2 + BLOCK);
            memcpy(out + 2 * c, block, 2);
            for (int i = 0; i < BLOCK; i++) out[2 * PANEL + (i / 4 * PANEL + c) * 4 + i % 4] = block[2 + i];
        }
}

int64_t specq_packed_bytes(int format, int64_t num_panels, int64_t k) { return num_panels * panel_bytes(format, k); }

/* rows: the address of each column's weights, floats or GGUF's blocks; NULL: no weights. `out` must be zero. */
void specq_pack(int format, const void *const *rows, int64_t num_panels, int64_t k, char *out) {
    for (int64_t panel = 0; panel < num_panels; panel++, rows += PANEL, out += panel_bytes(format, k)) {
        if (format == F32) pack_floats((const float *const *)rows, k, (float *)out);
        if (format == BF16) pack_bfloats((const float *const *)rows, k, (uint16_t *)out);
        if (format == Q4_1) pack_nibbles((const uint8_t *const *)rows, k, (uint8_t *)out);
        if (format == Q8_0) pack_bytes((const uint8_t *const *)rows, k, (uint8_t *)out);
    }
}

/* Return whether all floats are exactly bfloat16. */
int specq_is_bf16(const uint32_t *floats, int64_t count) {
    uint32_t low = 0;
    for (int64_t i = 0; i < count; i++) low |= floats[i];
    return !(low & 0xffff);
}
