/* Vectors of the processor's full width, for matrix products and for values of attention. Each lane is a separate
 * output, so the width does not change the result. A vector has LANES floats. ACCUMULATORS is how many sums fit into the
 * registers beside a loop's other data.
 */
#pragma once
#include "simd.h"

#if defined(__AVX512F__)
#define LANES 16
enum { ACCUMULATORS = 24 };
#elif defined(__AVX2__)
#define LANES 8
enum { ACCUMULATORS = 12 };
#elif defined(__aarch64__)
#define LANES 4
enum { ACCUMULATORS = 24 };
#else
#define LANES 4
enum { ACCUMULATORS = 8 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_int __attribute__((vector_size(4 * LANES)));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t vec_int_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t vec_half_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec vec_load(const void *p) { return *(const vec_at *)p; }
INLINE vec_int vec_load_int(const void *p) { return *(const vec_int_at *)p; }
INLINE void vec_store(float *p, vec x) { *(vec_at *)p = x; }
INLINE vec vec_splat(float x) { return x - (vec){0}; }
INLINE vec vec_held(vec x) {
#if defined(__AVX__)
    __asm__("" : "+v"(x));
#endif
    return x;
}
INLINE vec vec_from_int(vec_int x) { return __builtin_convertvector(x, vec); }

/* a * b + c, fused like fma8. */
INLINE vec vec_fma(vec a, vec b, vec c) {
#if defined(INTEGER)
    return a * b + c;
#elif defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

/* a > b ? a : b, and a < b ? a : b. */
INLINE vec vec_max(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)max8((v8)a, (v8)b);
#else
    const vec_int larger = a > b;
    return (vec)((larger & (vec_int)a) | (~larger & (vec_int)b));
#endif
}
INLINE vec vec_min(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)min8((v8)a, (v8)b);
#else
    const vec_int smaller = a < b;
    return (vec)((smaller & (vec_int)a) | (~smaller & (vec_int)b));
#endif
}

DEFINE_EXP(vec_exp, vec, vec_int, vec_splat, vec_fma, vec_max, vec_min)

/* Convert finite half-precision numbers (IEEE) to float. Their bits, read as a float, are too small by a factor
 * 2^112. */
INLINE vec vec_load_half(const void *p) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(__F16C__) && LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    vec_int bits = __builtin_convertvector(*(const vec_half_at *)p, vec_int);
    vec magnitude = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vec)((vec_int)magnitude | (bits & 0x8000) << 16);
#endif
}
