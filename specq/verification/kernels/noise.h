/* Counter-based noise, with the bits of `specq.verification.noise` and `seeds`. */
#pragma once
#include "vectors.h"

enum { GUMBEL = 1 }; /* the domain of the rows' own noise */

/* The keys of a row's draws, as in `specq.verification.seeds`. */
typedef struct {
    uint32_t key0, key1;
} Keys;

static uint64_t splitmix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static Keys keys_of(uint64_t seed, uint64_t position, uint64_t domain) {
    uint64_t mixed = splitmix(splitmix(seed ^ domain * 0x9E3779B97F4A7C15u) + position);
    return (Keys){(uint32_t)mixed, (uint32_t)(mixed >> 32)};
}

/* The hashes of eight tokens, as `specq.verification.noise` holds them. */
INLINE v8u hash8(v8u token_ids, Keys keys) {
    v8u x = token_ids * 0x9E3779B1u + keys.key0;
    x ^= x >> 15;
    x *= 0x7FEB352Du;
    x += keys.key1;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

static double uniform(uint32_t token_id, Keys keys) {
    return ((double)(int32_t)hash8((v8u){token_id}, keys)[0] + 2147483648.5) * 0x1p-32;
}

/* Gumbel noise by its definition. */
static float gumbel(int token_id, Keys keys) { return (float)-log(-log1p(-uniform((uint32_t)token_id, keys))); }
