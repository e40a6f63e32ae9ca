// SPDX-License-Identifier: Apache-2.0
// A card's program as one kernel: every block runs the same list of instructions. There is a grid barrier after each, or,
// where weights are prefetched, blocks poll dataflow slots for the numbers that they need.
//
// Every number has the bits that ggml-spanker defines on a processor: sums of integers are exact in any order, sums of
// f32 are folded in the order that is written there, and nothing is fused unless it says so (compile with -fmad=false).
//
// What blocks write for each other is read past the first-level cache, which is not coherent.

// Where weights are prefetched, one block has all of a multiprocessor.
#ifdef STREAM
#define BLOCKS 1
#define THREADS 512
#else
#define BLOCKS 2
#define THREADS 256
#endif
#define WARPS (THREADS / 32)
// The types of weights that there are, as bits: compiling for all of them is slow.
#ifndef TYPES
#define TYPES ~0ull
#endif
#define HAS(type) (((TYPES) >> (type) & 1) != 0)
#define NORM_LANES 128
// Positions of a block of the KV cache.
#define KV_BLOCK 64
// What is not worth registers and instructions of every caller.
#define APART __noinline__
// Rows of inputs that weights are unpacked for at once, rows of weights, and units of 32 weights of each.
#define TILE_T 16
#define TILE_U 32
#ifndef TILE_R
#define TILE_R 32
#endif
// Instructions of which a block has copies: the current one and those that follow.
#define WINDOW 8
// A block polls so often for the others or for a slot: for some seconds.
#define MOST_SPINS (1u << 24)

// GGML's numbers of types.
enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15, BF16 = 30 };

// ---------------------------------------------------------------- numbers

__device__ __forceinline__ float bf16_of(u16 h) { return __uint_as_float((u32)h << 16); }

// e to the power of x, as ggml_spanker::ops::exp.
__device__ float power_of_e(float x) {
    const float ROUND = 12582912.0f;
    float clamped = x > 88.8f ? 88.8f : x;
    clamped = clamped < -88.0f ? -88.0f : clamped;
    float whole = (clamped * 1.44269504088896340736f + ROUND) - ROUND;
    float rest = (clamped - whole * 0.6933594f) - whole * -2.1219444e-4f;
    float p = 1.9875691e-4f;
    p = p * rest + 1.3981999e-3f;
    p = p * rest + 8.333452e-3f;
    p = p * rest + 4.1665796e-2f;
    p = p * rest + 1.6666665e-1f;
    p = p * rest + 0.5f;
    p = p * (rest * rest) + rest + 1.0f;
    float half = (whole * 0.5f + ROUND) - ROUND;
    u32 round_bits = __float_as_uint(ROUND);
    float one = __uint_as_float((__float_as_uint(half + ROUND) - round_bits + 127u) << 23);
    float two = __uint_as_float((__float_as_uint((whole - half) + ROUND) - round_bits + 127u) << 23);
    float scaled = p * one * two;
    scaled = x > 88.72284f ? __uint_as_float(0x7f800000u) : scaled;
    scaled = x < -87.33654f ? 0.0f : scaled;
    return x != x ? x : scaled;
}

// The byte that a value becomes in a block whose largest magnitude has this inverse.
__device__ __forceinline__ int round_to_byte(float value, float inverse) {
    const float ROUND = 12582912.0f;
    float exact = value * inverse;
    exact = exact < -127.0f ? -127.0f : exact;
    exact = exact > 127.0f ? 127.0f : exact;
    exact = exact != exact ? 0.0f : exact;
    return (int)(i8)(u8)(__float_as_uint(exact + ROUND) - __float_as_uint(ROUND));
}

__device__ __forceinline__ float gate_of(float gate, float up) {
    return gate / (1.0f + power_of_e(-gate)) * up;
}

// A 127th, as a division has it, for every number that is finite and not negative: all of them were tried.
__device__ __forceinline__ float part_of(float most) {
    const float by = 1.0f / 127.0f, near = most * by;
    return __fmaf_rn(__fmaf_rn(-near, 127.0f, most), by, near);
}

// A block's scale from the bits of its largest magnitude: what it is multiplied with, and what is stored.
__device__ __forceinline__ void scale_of(u32 largest, float *inverse, float *scale) {
    float most = __uint_as_float(largest);
    bool plain = largest != 0 && largest < 0x7f800000u;
    *inverse = plain ? 127.0f / most : 0.0f;
    *scale = plain ? part_of(most) : (largest == 0 ? 0.0f : __uint_as_float(0x7fc00000u));
}

// ---------------------------------------------------------------- memory

__device__ __forceinline__ float read(const float *p) { return __ldcg(p); }
__device__ __forceinline__ u16 read(const u16 *p) { return __ldcg(p); }
__device__ __forceinline__ u32 read(const u32 *p) { return __ldcg(p); }
__device__ __forceinline__ uint4 read(const uint4 *p) { return __ldcg(p); }

// Where weights are prefetched, there is no grid barrier: blocks pass numbers through dataflow slots, which begin as
// UNWRITTEN and are written once in a step. Consumers poll a slot until it is written. Sums and products have other bits
// where they are not numbers.
#define UNWRITTEN 0xffffffffu

__device__ __forceinline__ bool is_written(float value) { return __float_as_uint(value) != UNWRITTEN; }

__device__ __forceinline__ float await_slot(const float *p, bool is_slot) {
    float value = load_relaxed(p);
    for (u32 spins = 0; is_slot && !is_written(value); spins++) {
        value = load_relaxed(p);
        if (spins > MOST_SPINS) __trap();
    }
    return value;
}

// A shard of weights in the card's memory: what is read together is stored together, one plane after the other.
struct Weights {
    const u8 *base;
    u64 blocks;
};

// Weights are read once.
__device__ __forceinline__ uint4 weights16(const Weights &w, u64 at) { return load_once((const uint4 *)(w.base + at)); }
__device__ __forceinline__ u16 weights2(const Weights &w, u64 at) { return load_once((const u16 *)(w.base + at)); }
__device__ __forceinline__ u32 weights4(const Weights &w, u64 at) { return load_once((const u32 *)(w.base + at)); }
