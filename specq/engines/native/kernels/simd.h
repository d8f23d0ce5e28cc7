/* Eight floats at a time, in the vector extensions that GCC and Clang share, so one source serves x86 and ARM.
 *
 * Rule of all kernels: the value of an output does not depend on the rest of the batch. Every sum runs in one fixed
 * order, for any number of rows and any tile. So a token's logits are bit for bit the same alone, in a tree, and in a
 * prefill chunk. Therefore neither -ffast-math nor contraction is used. A compiler fuses a multiplication and an
 * addition in some places only (GCC decides loop by loop for Zen). fma8 marks the places that are fused. In integer
 * arithmetic (integer.c) nothing is fused, since not every instruction set can.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float v4 __attribute__((vector_size(16)));
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8iu __attribute__((vector_size(32), aligned(4), may_alias));

INLINE v8 load(const float *p) { return *(const v8u *)p; }
INLINE void store(float *p, v8 x) { *(v8u *)p = x; }
INLINE v8 splat(float x) { return x - (v8){0}; }

INLINE v4 low4(v8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE v4 high4(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

/* a * b + c, fused if the processor can. */
INLINE v8 fma8(v8 a, v8 b, v8 c) {
#if defined(INTEGER)
    return a * b + c;
#elif defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    v4 low = vfmaq_f32(low4(c), low4(a), low4(b)), high = vfmaq_f32(high4(c), high4(a), high4(b));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return a * b + c;
#endif
}

/* Keep a vector in a register. The compiler would load it again for each of its uses. */
INLINE v8 held(v8 x) {
#if defined(__AVX__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* mask lanes are all ones or all zeros, like the results of comparisons. */
INLINE v8 select8(v8i mask, v8 yes, v8 no) { return (v8)((mask & (v8i)yes) | (~mask & (v8i)no)); }

/* a > b ? a : b, and a < b ? a : b. The compiler makes several instructions of the general form. */
INLINE v8 max8(v8 a, v8 b) {
#if defined(__AVX__)
    return (v8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select8(a > b, a, b);
#endif
}
INLINE v8 min8(v8 a, v8 b) {
#if defined(__AVX__)
    return (v8)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select8(a < b, a, b);
#endif
}

INLINE v4 halves(v8 x) { return low4(x) + high4(x); }

/* Sums of four vectors; lane i is the sum of the i-th. */
INLINE v4 sums4(v8 a, v8 b, v8 c, v8 d) {
    v4 w = halves(a), x = halves(b), y = halves(c), z = halves(d);
    v4 wx = __builtin_shufflevector(w, x, 0, 1, 4, 5) + __builtin_shufflevector(w, x, 2, 3, 6, 7);
    v4 yz = __builtin_shufflevector(y, z, 0, 1, 4, 5) + __builtin_shufflevector(y, z, 2, 3, 6, 7);
    return __builtin_shufflevector(wx, yz, 0, 2, 4, 6) + __builtin_shufflevector(wx, yz, 1, 3, 5, 7);
}

INLINE float sum8(v8 x) { return sums4(x, x, x, x)[0]; }

/* NAME(x) is e^x with an error of about 1 unit in the last place (the polynomial is Cephes' expf). Below -87: e^-87;
 * above 88.375: e^88.375, since a larger result is no finite float. `magic`, 1.5 * 2^23, rounds to an integer. */
#define DEFINE_EXP(NAME, VECTOR, INTEGERS, SPLAT, FMA, MAX, LEAST)               \
    INLINE VECTOR NAME(VECTOR x) {                                               \
        const VECTOR magic = SPLAT(12582912.0f);                                 \
        x = LEAST(SPLAT(88.375f), MAX(x, SPLAT(-87.0f)));                        \
        VECTOR n = FMA(x, SPLAT(1.44269504f), magic) - magic;                    \
        VECTOR r = FMA(n, SPLAT(2.12194440e-4f), FMA(n, SPLAT(-0.693359375f), x)); \
        VECTOR y = SPLAT(1.9875691500e-4f);                                      \
        y = FMA(y, r, SPLAT(1.3981999507e-3f));                                  \
        y = FMA(y, r, SPLAT(8.3334519073e-3f));                                  \
        y = FMA(y, r, SPLAT(4.1665795894e-2f));                                  \
        y = FMA(y, r, SPLAT(1.6666665459e-1f));                                  \
        y = FMA(y, r, SPLAT(5.0000001201e-1f));                                  \
        y = FMA(y, r * r, r) + 1.0f;                                             \
        return (VECTOR)((INTEGERS)y + (__builtin_convertvector(n, INTEGERS) << 23)); \
    }
DEFINE_EXP(exp8, v8, v8i, splat, fma8, max8, min8)
