/* What the products of linear layers have in common, in every arithmetic: the matrix, and what becomes of the sums. */
#pragma once
#include "vec.h"

enum { PANEL = 16 }; /* output columns that are computed together */
enum epilogue { STORE, ADD, SILU_MUL };

typedef struct {
    const void *weights; /* [num_panels] panels; for integer arithmetic, a Panel (formats.h) for each */
    const float *bias;   /* [num_panels * PANEL] or NULL */
    int32_t num_panels, k, format, pad;
} Matrix;

INLINE v8 silu_mul(v8 gate, v8 up) { return gate / (1.0f + exp8(-gate)) * up; }
INLINE vec vec_silu_mul(vec gate, vec up) { return gate / (1.0f + vec_exp(-gate)) * up; }
