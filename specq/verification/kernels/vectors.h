/* Vectors of eight floats and four doubles, in the extensions that GCC and Clang share. */
#pragma once
#include <math.h>
#include <stdint.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, QUARTER = 4 };
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef double v4d __attribute__((vector_size(32)));
typedef int64_t v4l __attribute__((vector_size(32)));
typedef float v8_any __attribute__((vector_size(32), aligned(4), may_alias));

INLINE v8 select8(v8i mask, v8 yes, v8 no) { return (v8)((mask & (v8i)yes) | (~mask & (v8i)no)); }
INLINE v4d select4(v4l mask, v4d yes, v4d no) { return (v4d)((mask & (v4l)yes) | (~mask & (v4l)no)); }

static int any8(v8i mask) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
}

/* a * b + c, fused if the processor supports it. */
INLINE v4d fma4(v4d a, v4d b, v4d c) {
#if defined(__FMA__)
    return (v4d)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    for (int i = 0; i < QUARTER; i++) c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* e^x for x <= 0, within 2 units in the last place: 2^n e^r, r by its Taylor series; ln 2 in two parts as in fdlibm. */
INLINE v4d exp4(v4d x) {
    static const double inverse[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                     1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,
                                     1.0};
    v4d zero = {0}, magic = zero + 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
    v4l is_tiny = x < -700.0;
    x = select4(is_tiny, zero, x);
    v4d shifted = fma4(x, zero + 1.4426950408889634, magic), n = shifted - magic;
    v4d r = fma4(n, zero - 1.90821492927058770002e-10, fma4(n, zero - 6.93147180369123816490e-01, x));
    v4d y = zero + 1.0 / 6227020800;
#pragma GCC unroll 13
    for (int i = 0; i < 13; i++) y = fma4(y, r, zero + inverse[i]);
    return select4(is_tiny, zero, (v4d)((v4l)y + ((v4l)shifted << 52)));
}

INLINE double sum4(v4d x) { return (x[0] + x[1]) + (x[2] + x[3]); }
