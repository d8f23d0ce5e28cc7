/* Products with weights of every format against plain sums in the order that the kernels promise; prints one line a format:
 * how many outputs differ in any bit, and one output, so that runs on two machines can be compared. */
#include "forward.c"
#include <stdio.h>

enum { K = 96, COLUMNS = 48, ROWS = 28, NUM_FORMATS = 4 };

static float values[COLUMNS][K], x[ROWS][K], out[ROWS][COLUMNS], room[PANEL * K];
static uint8_t nibble_blocks[COLUMNS][K / BLOCK][20], byte_blocks[COLUMNS][K / BLOCK][34];

static uint32_t draw(void) {
    static uint32_t state = 1;
    return (state = state * 1664525u + 1013904223u) >> 8;
}

static float draw_value(int is_bf16) {
    float value = (draw() % 2001 - 1000.0f) / 999;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits &= is_bf16 ? 0xffff0000 : 0xffffffff;
    memcpy(&value, &bits, 4);
    return value;
}

/* Half precision numbers, now and then a subnormal one. */
static uint16_t draw_half(void) { return draw() % 8 ? (0x2c00 | draw() % 2 << 15) + draw() % 1024 : draw() % 1024; }

static float from_half(uint16_t half) {
    int exponent = half >> 10 & 31;
    float size = exponent ? ldexpf(1024 + (half & 1023), exponent - 25) : ldexpf(half & 1023, -24);
    return half >> 15 ? -size : size;
}

static void draw_block(int format, int column, int b) {
    uint16_t scale = draw_half(), minimum = draw_half();
    uint8_t *nibbles = nibble_blocks[column][b], *bytes = byte_blocks[column][b];
    float *to = values[column] + b * BLOCK;
    memcpy(nibbles, &scale, 2), memcpy(nibbles + 2, &minimum, 2), memcpy(bytes, &scale, 2);
    for (int i = 0; i < BLOCK; i++) {
        int nibble = draw() % 16, byte = (int)(draw() % 256) - 128;
        uint8_t *pair = nibbles + 4 + i % 16;
        *pair = i < 16 ? nibble : *pair | nibble << 4;
        bytes[2 + i] = byte;
        volatile float product = nibble * from_half(scale); /* rounded by itself, as GGUF's dequantising rounds it */
        to[i] = format == Q4_1 ? product + from_half(minimum)
                : format == Q8_0 ? byte * from_half(scale)
                                 : draw_value(format == BF16);
    }
}

static int count_wrong(const Matrix *m, int num_rows) {
    Product product = {.m = m, .x = x[0], .out = out[0], .num_rows = num_rows, .ldx = K, .ldo = COLUMNS};
    int wrong = 0;
    product.room = room, product.ld_room = PANEL * K;
    matmul(NULL, product);
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float sum = 0;
            for (int i = 0; i < K; i++) sum = fmaf(x[r][i], values[c][i], sum);
            wrong += memcmp(&sum, &out[r][c], sizeof(float)) != 0;
        }
    return wrong;
}

int main(void) {
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < K; i++) x[r][i] = draw_value(0);
    for (int format = 0; format < NUM_FORMATS; format++) {
        const void *rows[COLUMNS];
        int wrong = 0;
        for (int c = 0; c < COLUMNS; c++) {
            for (int b = 0; b < K / BLOCK; b++) draw_block(format, c, b);
            rows[c] = format == Q4_1 ? (void *)nibble_blocks[c] : format == Q8_0 ? (void *)byte_blocks[c] : values[c];
        }
        char *packed = calloc(1, specq_packed_bytes(format, COLUMNS / PANEL, K));
        Matrix m = {.weights = packed, .num_panels = COLUMNS / PANEL, .k = K, .format = format};
        specq_pack(format, rows, COLUMNS / PANEL, K, packed);
        for (int num_rows = 1; num_rows <= ROWS; num_rows++) wrong += count_wrong(&m, num_rows);
        printf("format %d: %d wrong, %a\n", format, wrong, (double)out[7][11]);
        free(packed);
    }
    return 0;
}
