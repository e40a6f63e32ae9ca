// SPDX-License-Identifier: Apache-2.0
// A card's program as one kernel: every block goes through the same list of lines, and all blocks meet after each.
//
// Every number has the bits that ggml-spanker defines on a processor: sums of integers are exact in any order, sums of
// f32 are folded in the order that is written there, and nothing is fused (compile with -fmad=false).
//
// What blocks write for each other is read past the first-level cache, which is not coherent.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCKS 2
#define THREADS 256
#define WARPS (THREADS / 32)
// The types of weights that there are, as bits: compiling for all of them takes long.
#ifndef TYPES
#define TYPES ~0ull
#endif
#define HAS(type) (((TYPES) >> (type) & 1) != 0)
#define NORM_LANES 128
#define RUN 64
// What is not worth registers and instructions of every place that calls it.
#define APART __noinline__
// What is not worth registers and instructions of every place that calls it.
#define APART __noinline__
// Positions whose values are on the way at the same time.
#ifndef BATCH
#define BATCH 32
#endif
// Rows of inputs that weights are unpacked for at once, rows of weights, and units of 32 weights of each.
#define TILE_T 16
#define TILE_U 32
#define TILE_R 32
// A block waits so long for the others: some seconds.
#define MOST_SPINS (1u << 27)

enum Kind {
    EMBED = 1, NORM, QUANTIZE, MATMUL, ROTATE, HALVE, GATE, ADD, ATTEND, FILL, COPY, VECTOR, ROUND_Q4_K
};

// GGML's numbers of types.
enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15, BF16 = 30 };

struct Line {
    u32 kind;
    u32 n[19];
    u64 p[8];
};

// What changes from step to step.
struct Step {
    u32 past;
    u32 token;
    const u32 *ids;
    u64 *meet;
    u64 met;
    float *scores;
    u32 scores_each;
};

// All shared memory that is asked for at the start.
extern __shared__ __align__(128) u8 shared[];

// ---------------------------------------------------------------- numbers

__device__ __forceinline__ float half_of(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

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

__device__ __forceinline__ u32 largest_in_warp(u32 bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, bits);
#else
    for (int by = 16; by > 0; by /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, by));
    return bits;
#endif
}

__device__ __forceinline__ int sum_in_warp(int value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, value);
#else
    for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(~0u, value, by);
    return value;
#endif
}

// A block's scale from the bits of its largest magnitude: what it is multiplied with, and what it is kept as.
__device__ __forceinline__ void scale_of(u32 largest, float *inverse, float *scale) {
    float most = __uint_as_float(largest);
    bool plain = largest != 0 && largest < 0x7f800000u;
    *inverse = plain ? 127.0f / most : 0.0f;
    *scale = plain ? most / 127.0f : (largest == 0 ? 0.0f : __uint_as_float(0x7fc00000u));
}

// ---------------------------------------------------------------- memory

__device__ __forceinline__ float read(const float *p) { return __ldcg(p); }
__device__ __forceinline__ u16 read(const u16 *p) { return __ldcg(p); }
__device__ __forceinline__ u32 read(const u32 *p) { return __ldcg(p); }

// A piece of weights as it lies here: what is read together lies together, one plane after the other.
struct Weights {
    const u8 *base;
    u64 blocks;
};

// Weights are read once.
__device__ __forceinline__ uint4 weights16(const Weights &w, u64 at) {
    const u8 *p = w.base + at;

    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u16 weights2(const Weights &w, u64 at) {
    const u8 *p = w.base + at;
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 weights4(const Weights &w, u64 at) {
    const u8 *p = w.base + at;
    u32 v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// ---------------------------------------------------------------- types of weights

__device__ __forceinline__ u32 units_of(u32 width) { return width / 32; }
__device__ __forceinline__ bool is_long(u32 type) { return type == Q4_K || type == Q5_K || type == Q6_K; }
__device__ __forceinline__ bool is_plain(u32 type) { return type == F32 || type == F16 || type == BF16; }
__device__ __forceinline__ u32 plain_bytes(u32 type) { return type == F32 ? 4 : 2; }

// 32 weights, or an eighth of a block of 256, with the block's numbers.
struct Unit {
    uint4 a;
    uint4 b;
    u32 x;
    u32 y;
};

template <int TYPE> __device__ __forceinline__ Unit load_unit(const Weights &w, u64 unit) {
    Unit u;
    if (TYPE == Q4_0) {
        u.a = weights16(w, unit * 16);
        u.x = weights2(w, w.blocks * 16 + unit * 2);
    } else if (TYPE == Q4_1) {
        u.a = weights16(w, unit * 16);
        u.x = weights4(w, w.blocks * 16 + unit * 4);
    } else if (TYPE == Q5_0) {
        u.a = weights16(w, unit * 16);
        u.y = weights4(w, w.blocks * 16 + unit * 4);
        u.x = weights2(w, w.blocks * 20 + unit * 2);
    } else if (TYPE == Q5_1) {
        u.a = weights16(w, unit * 16);
        u.y = weights4(w, w.blocks * 16 + unit * 4);
        u.x = weights4(w, w.blocks * 20 + unit * 4);
    } else if (TYPE == Q8_0) {
        u.a = weights16(w, unit * 32);
        u.b = weights16(w, unit * 32 + 16);
        u.x = weights2(w, w.blocks * 32 + unit * 2);
    } else if (TYPE == Q4_K) {
        u64 block = unit / 8 * 144;
        u.a = weights16(w, block + 16 + unit % 8 * 16);
        u.b = weights16(w, block);
    } else if (TYPE == Q5_K) {
        u64 block = unit / 8 * 176;
        u.a = weights16(w, block + 48 + unit % 8 * 16);
        u.b = weights16(w, block);
    } else if (TYPE == Q6_K) {
        u64 block = unit / 8;
        u.x = weights2(w, w.blocks * 208 + block * 2);
        // The scales of the unit's two runs of 16.
        u.y = weights2(w, w.blocks * 192 + block * 16 + unit % 8 * 2);
    }
    return u;
}

__device__ __forceinline__ int dot16(int4 w, int4 q) {
    int s = __dp4a(w.x, q.x, 0);
    s = __dp4a(w.y, q.y, s);
    s = __dp4a(w.z, q.z, s);
    return __dp4a(w.w, q.w, s);
}

// The same with 16 unsigned bytes.
__device__ __forceinline__ int dot16u(uint4 w, int4 q) {
    int s;
    asm("{ dp4a.u32.s32 %0, %1, %5, 0; dp4a.u32.s32 %0, %2, %6, %0; dp4a.u32.s32 %0, %3, %7, %0; dp4a.u32.s32 %0, %4, %8, %0; }"
        : "=&r"(s) : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w));
    return s;
}

__device__ __forceinline__ int sum16(int4 q) {
    const int ONES = 0x01010101;
    return dot16(make_int4(ONES, ONES, ONES, ONES), q);
}

__device__ __forceinline__ int4 low_nibbles(uint4 v) {
    const u32 M = 0x0f0f0f0fu;
    return make_int4(v.x & M, v.y & M, v.z & M, v.w & M);
}

__device__ __forceinline__ int4 high_nibbles(uint4 v) {
    const u32 M = 0x0f0f0f0fu;
    return make_int4((v.x >> 4) & M, (v.y >> 4) & M, (v.z >> 4) & M, (v.w >> 4) & M);
}

// Four bits as the fifth bits of four bytes.
__device__ __forceinline__ u32 fifths(u32 bits) {
    bits &= 15;
    return ((bits & 1) << 4) | ((bits & 2) << 11) | ((bits & 4) << 18) | ((bits & 8) << 25);
}

__device__ __forceinline__ int4 with_fifths(int4 v, u32 bits) {
    return make_int4(v.x | fifths(bits), v.y | fifths(bits >> 4), v.z | fifths(bits >> 8), v.w | fifths(bits >> 12));
}

// Rows of inputs in shared memory: bytes in halves of 32, scales and sums.
struct Inputs {
    int4 *low;
    int4 *high;
    float *scale;
    int *sum;
};

__device__ __forceinline__ int byte_of(u32 word, int at) { return (word >> (8 * at)) & 0xff; }

// Scale and minimum of a sub-block, from the 12 bytes that pack them.
__device__ __forceinline__ void unpack_scale(uint4 head, int sub, int *scale, int *minimum) {
    int i = sub & 3;
    int s = byte_of(head.y, i), m = byte_of(head.z, i), low = byte_of(head.w, i);
    bool first = sub < 4;
    *scale = first ? s & 63 : (low & 15) | (s >> 6 << 4);
    *minimum = first ? m & 63 : (low >> 4) | (m >> 6 << 4);
}

// Bits of a Q5_K block's high plane as fifth bits: byte i of `v` has those of weight i of each sub-block.
__device__ __forceinline__ int4 long_fifths(int4 w, uint4 v, int sub) {
    const u32 M = 0x01010101u;
    return make_int4(w.x | (((v.x >> sub) & M) << 4), w.y | (((v.y >> sub) & M) << 4),
                     w.z | (((v.z >> sub) & M) << 4), w.w | (((v.w >> sub) & M) << 4));
}

// 16 weights of 6 bits less 32, from low halves and two high bits.
__device__ __forceinline__ int4 sixes(uint4 low, uint4 high, int quarter) {
    const u32 F = 0x0f0f0f0fu, T = 0x03030303u;
    int by = 4 * (quarter / 2), bits = 2 * quarter;
    u32 x = ((low.x >> by) & F) | (((high.x >> bits) & T) << 4);
    u32 y = ((low.y >> by) & F) | (((high.y >> bits) & T) << 4);
    u32 z = ((low.z >> by) & F) | (((high.z >> bits) & T) << 4);
    u32 w = ((low.w >> by) & F) | (((high.w >> bits) & T) << 4);
    const u32 O = 0x20202020u;
    return make_int4(__vsub4(x, O), __vsub4(y, O), __vsub4(z, O), __vsub4(w, O));
}

// What a type's unpacked unit is multiplied with again and again.
template <int TYPE> struct Unpacked {
    int4 a, b;
    int scales[2], minima[2];
};

template <int TYPE>
__device__ __forceinline__ Unpacked<TYPE> unpack(const Weights &w, const Unit &u, u64 unit) {
    Unpacked<TYPE> v;
    if (TYPE == Q4_0 || TYPE == Q4_1) {
        v.a = low_nibbles(u.a);
        // 16 times the high halves: what comes out is divided once instead.
        v.b = make_int4(u.a.x & 0xf0f0f0f0u, u.a.y & 0xf0f0f0f0u, u.a.z & 0xf0f0f0f0u, u.a.w & 0xf0f0f0f0u);
    } else if (TYPE == Q5_0 || TYPE == Q5_1) {
        v.a = with_fifths(low_nibbles(u.a), u.y);
        v.b = with_fifths(high_nibbles(u.a), u.y >> 16);
    } else if (TYPE == Q8_0) {
        v.a = make_int4(u.a.x, u.a.y, u.a.z, u.a.w);
        v.b = make_int4(u.b.x, u.b.y, u.b.z, u.b.w);
    } else if (TYPE == Q4_K || TYPE == Q5_K) {
        int chunk = unit % 8 / 2;
        v.a = low_nibbles(u.a);
        v.b = high_nibbles(u.a);
        if (TYPE == Q5_K) {
            uint4 high = weights16(w, unit / 8 * 176 + 16 + unit % 2 * 16);
            v.a = long_fifths(v.a, high, 2 * chunk);
            v.b = long_fifths(v.b, high, 2 * chunk + 1);
        }
        unpack_scale(u.b, 2 * chunk, &v.scales[0], &v.minima[0]);
        unpack_scale(u.b, 2 * chunk + 1, &v.scales[1], &v.minima[1]);
    } else if (TYPE == Q6_K) {
        u64 block = unit / 8;
        int half = unit % 8 / 4, quarter = unit % 4;
        u64 low = block * 128 + 64 * half + 32 * (quarter % 2), high = w.blocks * 128 + block * 64 + 32 * half;
        v.a = sixes(weights16(w, low), weights16(w, high), quarter);
        v.b = sixes(weights16(w, low + 16), weights16(w, high + 16), quarter);
        v.scales[0] = (int)(i8)(u.y & 0xff);
        v.scales[1] = (int)(i8)(u.y >> 8);
    }
    return v;
}

// The inputs that a unit meets, whatever its row.
template <int TYPE> struct Met {
    int4 a, b;
    float scale;
    // Of a short type, the inputs' sum; of a long one with minima, the sums of both halves.
    int sums[2];
};

// `at` is the unit within the row.
template <int TYPE> __device__ __forceinline__ Met<TYPE> met_by(const Inputs &in, u32 at) {
    Met<TYPE> m;
    if (TYPE == Q4_K || TYPE == Q5_K) {
        u32 group = at / 2 * 2;
        const int4 *from = at % 2 == 0 ? in.low : in.high;
        m.a = from[group], m.b = from[group + 1];
        m.sums[0] = sum16(m.a), m.sums[1] = sum16(m.b);
        m.scale = in.scale[at / 8];
    } else {
        m.a = in.low[at], m.b = in.high[at];
        m.scale = in.scale[TYPE == Q6_K ? at / 8 : at];
        if (TYPE != Q6_K && TYPE != Q8_0) m.sums[0] = in.sum[at];
    }
    return m;
}

// The term that a block adds. Of a long type, the first of its eight lanes has it.
template <int TYPE>
__device__ __forceinline__ float term_of(const Unpacked<TYPE> &v, u32 x, const Met<TYPE> &m) {
    float a = m.scale;
    if (TYPE == Q4_K || TYPE == Q5_K) {
        int products = v.scales[0] * dot16(v.a, m.a) + v.scales[1] * dot16(v.b, m.b);
        int minima = v.minima[0] * m.sums[0] + v.minima[1] * m.sums[1];
        for (int by = 4; by > 0; by /= 2) {
            products += __shfl_xor_sync(~0u, products, by);
            minima += __shfl_xor_sync(~0u, minima, by);
        }
        float d = half_of(x & 0xffff), least = half_of(x >> 16);
        return (d * a) * (float)products - (least * a) * (float)minima;
    }
    if (TYPE == Q6_K) {
        int products = v.scales[0] * dot16(v.a, m.a) + v.scales[1] * dot16(v.b, m.b);
        for (int by = 4; by > 0; by /= 2) products += __shfl_xor_sync(~0u, products, by);
        return (half_of(x) * a) * (float)products;
    }
    int products;
    if (TYPE == Q4_0 || TYPE == Q4_1) {
        products = dot16(v.a, m.a) + (dot16u(make_uint4(v.b.x, v.b.y, v.b.z, v.b.w), m.b) >> 4);
    } else {
        products = dot16(v.a, m.a) + dot16(v.b, m.b);
    }
    if (TYPE == Q4_0) products -= 8 * m.sums[0];
    if (TYPE == Q5_0) products -= 16 * m.sums[0];
    if (TYPE == Q4_1 || TYPE == Q5_1) {
        float d = half_of(x & 0xffff), least = half_of(x >> 16);
        return (d * a) * (float)products + (least * a) * (float)m.sums[0];
    }
    return (half_of(x) * a) * (float)products;
}

// The block's numbers of a loaded unit.
template <int TYPE> __device__ __forceinline__ u32 numbers_of(const Unit &u) {
    return TYPE == Q4_K || TYPE == Q5_K ? u.b.x : u.x;
}

// ---------------------------------------------------------------- inputs of products

// Makes a block's bytes from values that threads of a warp hold: lane i has values i, i + 32, ..
template <int EACH> __device__ __forceinline__ float round_values(const float *values, int *bytes) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    largest = largest_in_warp(largest);
    float inverse, scale;
    scale_of(largest, &inverse, &scale);
    bool plain = largest != 0 && largest < 0x7f800000u;
#pragma unroll
    for (int i = 0; i < EACH; i++) bytes[i] = plain ? round_to_byte(values[i], inverse) : 0;
    return scale;
}

// A row as it lies in the memory of a card becomes inputs in shared memory, by way of `raw` there.
__device__ __forceinline__ void take_inputs(const u8 *row, u32 type, u32 units, const Inputs &in, u8 *raw) {
    u32 bytes = type == Q8_0 ? units * 34 : units / 8 * 292;
    for (u32 at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        *(uint4 *)(raw + at) = __ldcg((const uint4 *)(row + at));
    __syncthreads();
    for (u32 at = threadIdx.x; at < units; at += THREADS) {
        if (type == Q8_0) {
            const u16 *block = (const u16 *)(raw + at * 34);
            u32 words[8];
#pragma unroll
            for (int i = 0; i < 8; i++) words[i] = (u32)block[1 + 2 * i] | (u32)block[2 + 2 * i] << 16;
            int4 low = make_int4(words[0], words[1], words[2], words[3]);
            int4 high = make_int4(words[4], words[5], words[6], words[7]);
            in.low[at] = low;
            in.high[at] = high;
            in.scale[at] = half_of(block[0]);
            in.sum[at] = sum16(low) + sum16(high);
        } else {
            const u32 *block = (const u32 *)(raw + at / 8 * 292);
            const u32 *q = block + 1 + at % 8 * 8;
            in.low[at] = make_int4(q[0], q[1], q[2], q[3]);
            in.high[at] = make_int4(q[4], q[5], q[6], q[7]);
            if (at % 8 == 0) in.scale[at / 8] = __uint_as_float(block[0]);
        }
    }
    __syncthreads();
}

// One over the root of a row's mean square, for a row in shared memory.
__device__ float norm_of(const float *row, u32 width, float epsilon, double *lanes) {
    __shared__ float result;
    if (threadIdx.x < NORM_LANES) {
        double sum = 0.0;
        // The product of two f32 is exact in f64, so that fusing it changes nothing.
#pragma unroll 8
        for (u32 i = threadIdx.x; i < width; i += NORM_LANES) sum = __fma_rn((double)row[i], (double)row[i], sum);
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 l = threadIdx.x;
        double a = lanes[l] + lanes[l + 64], b = lanes[l + 32] + lanes[l + 96];
        double sum = a + b;
        for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
        if (l == 0) result = (float)(1.0 / sqrt(sum / (double)width + (double)epsilon));
    }
    __syncthreads();
    return result;
}

// A row is normed and becomes inputs in shared memory, without a way through the card's. `row` has room for twice the
// row: the norm's weights follow it.
__device__ __forceinline__ void norm_inputs(const float *x, const float *weight, float epsilon, u32 width, u32 type,
                            float *row, double *lanes, const Inputs &in) {
    float *weights = row + width;
    if (width % 4 == 0) {
        for (u32 i = threadIdx.x; i < width / 4; i += THREADS) {
            ((float4 *)row)[i] = __ldcg((const float4 *)x + i);
            ((float4 *)weights)[i] = __ldg((const float4 *)weight + i);
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += THREADS) {
            row[i] = read(x + i);
            weights[i] = weight[i];
        }
    }
    __syncthreads();
    float scale = norm_of(row, width, epsilon, lanes);
    if (type == Q8_0 || type == Q8_K) {
        // Eight values to a thread, so that four threads have a short block and a warp has a long one.
        for (u32 eight = threadIdx.x; eight / 32 * 32 < width / 8; eight += THREADS) {
            bool there = eight < width / 8;
            const float4 *values = (const float4 *)row + (there ? eight : 0) * 2;
            const float4 *by = (const float4 *)weights + (there ? eight : 0) * 2;
            float4 a = values[0], b = values[1], c = by[0], d = by[1];
            float v[8] = {(a.x * scale) * c.x, (a.y * scale) * c.y, (a.z * scale) * c.z, (a.w * scale) * c.w,
                          (b.x * scale) * d.x, (b.y * scale) * d.y, (b.z * scale) * d.z, (b.w * scale) * d.w};
            u32 largest = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
            if (type == Q8_0) {
                largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            } else {
                largest = largest_in_warp(largest);
            }
            float inverse, kept;
            scale_of(largest, &inverse, &kept);
            bool plain = largest != 0 && largest < 0x7f800000u;
            u32 words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 8; i++)
                words[i / 4] |= (plain ? (u32)round_to_byte(v[i], inverse) & 0xff : 0) << (8 * (i % 4));
            int sum = __dp4a((int)words[0], 0x01010101, __dp4a((int)words[1], 0x01010101, 0));
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (there) {
                int4 *half = eight % 4 < 2 ? in.low : in.high;
                ((uint2 *)(half + eight / 4))[eight % 2] = make_uint2(words[0], words[1]);
                if (type == Q8_0 && eight % 4 == 0) {
                    in.scale[eight / 4] = half_of(to_half(kept));
                    in.sum[eight / 4] = sum;
                }
                if (type == Q8_K && eight % 32 == 0) in.scale[eight / 32] = kept;
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = (row[i] * scale) * weights[i];
    }
    __syncthreads();
}

// ---------------------------------------------------------------- one row of inputs with many rows of weights

__device__ __forceinline__ Weights weights_at(u64 base, u32 type, u64 rows, u32 width) {
    Weights w;
    w.base = (const u8 *)base;
    w.blocks = rows * width / (is_long(type) ? 256 : 32);
    return w;
}

// Rows that a warp takes together: their weights are on the way at the same time and meet the same inputs.
#define ABREAST 8

// The terms of `rows` rows from `first` on go to shared memory, `stride` apart.
template <int TYPE>
__device__ __forceinline__ void terms_of(const Weights &w, u32 first, u32 rows, u32 width, const Inputs &in,
                                         float *terms, u32 stride) {
    const u32 each = units_of(width), lane = threadIdx.x % 32;
    const u32 runs = (each + 31) / 32, abreast = (rows + ABREAST - 1) / ABREAST;
    const bool eighths = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K;
    u32 run = threadIdx.x / 32, row = 0;
    while (true) {
        while (run >= runs) run -= runs, row += ABREAST;
        if (row >= abreast * ABREAST) break;
        // All lanes take part: those of a long type's block belong together.
        u32 at = run * 32 + lane, unit = min(at, each - 1);
        Unit units[ABREAST];
        u32 places[ABREAST];
#pragma unroll
        for (int i = 0; i < ABREAST; i++) {
            places[i] = (first + min(row + i, rows - 1)) * each + unit;
            units[i] = load_unit<TYPE>(w, places[i]);
        }
        Met<TYPE> met = met_by<TYPE>(in, unit);
#pragma unroll
        for (int i = 0; i < ABREAST; i++) {
            Unpacked<TYPE> v = unpack<TYPE>(w, units[i], places[i]);
            float term = term_of<TYPE>(v, numbers_of<TYPE>(units[i]), met);
            if (at < each && row + i < rows) {
                if (!eighths) terms[(row + i) * stride + at] = term;
                else if (at % 8 == 0) terms[(row + i) * stride + at / 8] = term;
            }
        }
        run += WARPS;
    }
}

__device__ __forceinline__ void terms(u32 type, const Weights &w, u32 first, u32 rows, u32 width, const Inputs &in, float *to,
                      u32 stride) {
    switch (type) {
        case Q4_0: if constexpr (HAS(Q4_0)) terms_of<Q4_0>(w, first, rows, width, in, to, stride); break;
        case Q4_1: if constexpr (HAS(Q4_1)) terms_of<Q4_1>(w, first, rows, width, in, to, stride); break;
        case Q5_0: if constexpr (HAS(Q5_0)) terms_of<Q5_0>(w, first, rows, width, in, to, stride); break;
        case Q5_1: if constexpr (HAS(Q5_1)) terms_of<Q5_1>(w, first, rows, width, in, to, stride); break;
        case Q8_0: if constexpr (HAS(Q8_0)) terms_of<Q8_0>(w, first, rows, width, in, to, stride); break;
        case Q4_K: if constexpr (HAS(Q4_K)) terms_of<Q4_K>(w, first, rows, width, in, to, stride); break;
        case Q5_K: if constexpr (HAS(Q5_K)) terms_of<Q5_K>(w, first, rows, width, in, to, stride); break;
        default: if constexpr (HAS(Q6_K)) terms_of<Q6_K>(w, first, rows, width, in, to, stride); break;
    }
}

// Terms of rows lie so far apart that four at a time are read by eight rows at once.
__device__ __forceinline__ u32 stride_of(u32 count) { return ((count + 3) / 4 | 1) * 4; }

// Adds a row's terms one after the other.
__device__ __forceinline__ float fold(const float *terms, u32 count) {
    const float4 *fours = (const float4 *)terms;
    float sum = 0.0f;
    u32 whole = count / 4;
    float4 one = fours[0], two = fours[1];
    for (u32 i = 0; i < whole; i++) {
        float4 three = fours[min(i + 2, (count + 3) / 4)];
        sum = sum + one.x;
        sum = sum + one.y;
        sum = sum + one.z;
        sum = sum + one.w;
        one = two, two = three;
    }
    for (u32 i = whole * 4; i < count; i++) sum = sum + terms[i];
    return sum;
}

// A plain row of weights with the row of inputs in shared memory, by 16 lanes.
__device__ __forceinline__ float plain_dot(const u8 *weights, u32 type, const float *row, u32 width, u32 lane) {
    float sum = 0.0f;
    for (u32 i = lane; i < width; i += 16) {
        float weight = type == F32 ? __ldg((const float *)weights + i)
                     : type == F16 ? half_of(__ldg((const u16 *)weights + i))
                                   : bf16_of(__ldg((const u16 *)weights + i));
        sum = sum + weight * row[i];
    }
    for (int half = 8; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half, 16);
    return sum;
}

// How a product's results are kept.
enum Keep { STORE = 0, INTO = 1, GATED = 2 };

// Rounds rows that have all been written to blocks of inputs, once the last of each block is there.
__device__ __forceinline__ void round_when_full(const float *values, u8 *out, u32 type, u32 first, u32 rows, u32 *counters) {
    __shared__ u32 full[64];
    __shared__ u32 found;
    u32 size = type == Q8_0 ? 32 : 256;
    u32 begin = first / size, end = (first + rows - 1) / size + 1;
    __threadfence();
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (u32 group = begin + threadIdx.x; group < end; group += THREADS) {
        u32 from = max(first, group * size), to = min(first + rows, (group + 1) * size);
        u32 before = atomicAdd(counters + group, to - from);
        if (before + to - from == size) {
            counters[group] = 0;
            full[atomicAdd(&found, 1)] = group;
        }
    }
    __syncthreads();
    __threadfence();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = warp; i < found; i += WARPS) {
        u32 group = full[i];
        if (type == Q8_0) {
            float value = read(values + group * 32 + lane);
            int byte;
            float scale = round_values<1>(&value, &byte);
            u8 *block = out + (u64)group * 34;
            block[2 + lane] = (u8)byte;
            if (lane == 0) *(u16 *)block = to_half(scale);
        } else {
            float v[8];
            int bytes[8];
            for (int j = 0; j < 8; j++) v[j] = read(values + group * 256 + j * 32 + lane);
            float scale = round_values<8>(v, bytes);
            u8 *block = out + (u64)group * 292;
            for (int j = 0; j < 8; j++) {
                block[4 + j * 32 + lane] = (u8)bytes[j];
                int half = bytes[j];
                for (int by = 8; by > 0; by /= 2) half += __shfl_xor_sync(~0u, half, by);
                if (lane % 16 == 0) *(u16 *)(block + 260 + (2 * j + lane / 16) * 2) = (u16)(short)half;
            }
            if (lane == 0) *(float *)block = scale;
        }
    }
    __syncthreads();
}

// ---------------------------------------------------------------- one row of inputs: lines

// The matrix and rows of one of a line's tiles: their numbers are those of the first matrix, then those of the second.
__device__ __forceinline__ void tile_at(const Line &line, u32 index, u32 *matrix, u32 *first, u32 *rows) {
    u32 tile = line.n[5], at = index < line.n[13] ? 0 : index < line.n[14] ? 1 : 2;
    index -= at == 0 ? 0 : line.n[12 + at];
    *matrix = at, *first = index * tile, *rows = min(tile, line.n[7 + 2 * at] - index * tile);
}

// All blocks have come here before any goes on.
__device__ __forceinline__ void meet(u64 *counter, u64 target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" :: "l"(counter) : "memory");
        u32 spins = 0;
        u64 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
            if (++spins > MOST_SPINS) __trap();
        } while (seen < target);
    }
    __syncthreads();
}

// n: 0 width, 1 input's type, 2 whether it is normed first, 3 epsilon, 4 keep, 5 rows of a tile, 6.. types and rows
// of up to three matrices, 12 the type of blocks of gated results. p: 0 input, 1 norm's weight, 2, 3, 4 matrices,
// 5 out, 6 second out or counters, 7 third out or blocks of gated results.
__device__ __forceinline__ void vector_line(const Line &line, u8 *memory) {
    const u32 width = line.n[0], type = line.n[1], keep = line.n[4];
    const u32 units = units_of(width);
    const bool plain = is_plain(line.n[6]);
    Inputs in;
    in.low = (int4 *)memory;
    in.high = in.low + units;
    in.scale = (float *)(in.high + units);
    in.sum = (int *)(in.scale + units);
    float *row = plain ? (float *)memory : (float *)(memory + (units * 40 + 15) / 16 * 16);
    double *lanes = (double *)(row + 2 * width);
    float *to = plain ? (float *)(lanes + NORM_LANES) : row;
    if (line.n[2]) {
        norm_inputs((const float *)line.p[0], (const float *)line.p[1], __uint_as_float(line.n[3]), width,
                    plain ? F32 : type, row, lanes, in);
    } else if (plain) {
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)line.p[0] + i);
        __syncthreads();
    } else {
        take_inputs((const u8 *)line.p[0], type, units, in, (u8 *)row);
    }
    const u32 all = line.n[15];
    for (u32 index = blockIdx.x; index < all; index += gridDim.x) {
        u32 at, first, some;
        tile_at(line, index, &at, &first, &some);
        const u32 kind = line.n[6 + 2 * at];
        const Weights weights = weights_at(line.p[2 + at], kind, line.n[7 + 2 * at], width);
        float *out = (float *)line.p[5 + at];
        u32 count = is_long(kind) ? units / 8 : units, stride = stride_of(count);
        // What a result is added to is on its way in the meantime.
        float there = keep == INTO && threadIdx.x < some ? read(out + first + threadIdx.x) : 0.0f;
        if (is_plain(kind)) {
            for (u32 r = threadIdx.x / 16; r < (some + 1) / 2 * 2; r += THREADS / 16) {
                const u8 *w = weights.base + (u64)(first + min(r, some - 1)) * width * plain_bytes(kind);
                float sum = plain_dot(w, kind, row, width, threadIdx.x % 16);
                if (threadIdx.x % 16 == 0 && r < some) to[r] = sum;
            }
            count = 1, stride = 1;
        } else {
            // Both halves of a gated pair have the same blocks.
            for (u32 half = 0; half < (keep == GATED ? 2 : 1); half++) {
                u32 type = line.n[6 + 2 * (at + half)];
                Weights w = weights_at(line.p[2 + at + half], type, line.n[7 + 2 * (at + half)], width);
                terms(type, w, first, some, width, in, to + half * some * stride, stride);
            }
        }
        __syncthreads();
        for (u32 r = threadIdx.x; r < some; r += THREADS) {
            float sum = count == 1 ? to[r * stride] : fold(to + r * stride, count);
            if (keep == INTO) {
                sum = (r < THREADS ? there : read(out + first + r)) + sum;
            } else if (keep == GATED) {
                sum = gate_of(sum, fold(to + (some + r) * stride, count));
            }
            out[first + r] = sum;
        }
        __syncthreads();
        if (keep == GATED && line.n[12])
            round_when_full(out, (u8 *)line.p[7], line.n[12], first, some, (u32 *)line.p[6]);
    }
}

// ---------------------------------------------------------------- many rows of inputs

// n: 0 rows of inputs, 1 width, 2 rows of weights, 3 input's type, 4 weights' type. p: 0 inputs, 1 weights, 2 out.
template <int TYPE> __device__ APART void many_rows(const Line &line, u8 *memory) {
    const u32 rows = line.n[0], width = line.n[1], outs = line.n[2], type = line.n[3];
    const bool eighths = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K;
    const u32 units = units_of(width), STRIDE = TILE_U + 1;
    // Rows of weights of a thread, and sums that it folds.
    const u32 OWN = TILE_R * TILE_U / THREADS, FOLDS = TILE_R * TILE_T / THREADS;
    const u64 row_bytes = type == Q8_0 ? (u64)units * 34 : (u64)units / 8 * 292;
    Weights w = weights_at(line.p[1], TYPE, outs, width);
    Inputs in;
    in.low = (int4 *)memory;
    in.high = in.low + TILE_T * TILE_U;
    in.scale = (float *)(in.high + TILE_T * TILE_U);
    in.sum = (int *)(in.scale + TILE_T * TILE_U);
    float *to = (float *)(in.sum + TILE_T * TILE_U);
    u16 *raw = (u16 *)(to + TILE_R * TILE_T * STRIDE);
    const u32 across = (outs + TILE_R - 1) / TILE_R, down = (rows + TILE_T - 1) / TILE_T;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        // Blocks that work at the same time share weights.
        u32 t0 = tile % down * TILE_T, r0 = tile / down * TILE_R;
        u32 ts = min(TILE_T, rows - t0), rs = min(TILE_R, outs - r0);
        float sums[FOLDS] = {};
        for (u32 u0 = 0; u0 < units; u0 += TILE_U) {
            u32 us = min(TILE_U, units - u0), at = min(lane, us - 1);
            Unit loaded[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                loaded[i] = load_unit<TYPE>(w, (u64)(r0 + min(warp + i * WARPS, rs - 1)) * units + u0 + at);
            // Inputs as they lie, and then as products take them.
            u32 first = type == Q8_0 ? u0 * 34 : u0 / 8 * 292, halves = (type == Q8_0 ? us * 34 : us / 8 * 292) / 2;
            for (u32 t = warp; t < ts; t += WARPS) {
                const u16 *from = (const u16 *)((const u8 *)line.p[0] + (t0 + t) * row_bytes + first);
                for (u32 i = lane; i < halves; i += 32) raw[t * TILE_U * 20 + i] = read(from + i);
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < ts * TILE_U; i += THREADS) {
                u32 t = i / TILE_U, unit = i % TILE_U;
                if (unit >= us) continue;
                const u16 *row = raw + t * TILE_U * 20;
                const u16 *q = type == Q8_0 ? row + unit * 17 + 1 : row + unit / 8 * 146 + 2 + unit % 8 * 16;
                u32 words[8];
#pragma unroll
                for (int j = 0; j < 8; j++) words[j] = (u32)q[2 * j] | (u32)q[2 * j + 1] << 16;
                int4 low = make_int4(words[0], words[1], words[2], words[3]);
                int4 high = make_int4(words[4], words[5], words[6], words[7]);
                in.low[i] = low, in.high[i] = high;
                if (type == Q8_0) {
                    in.scale[i] = half_of(q[-1]);
                    in.sum[i] = sum16(low) + sum16(high);
                } else if (unit % 8 == 0) {
                    in.scale[t * TILE_U + unit / 8] = __uint_as_float((u32)q[-2] | (u32)q[-1] << 16);
                }
            }
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                u32 r = warp + i * WARPS;
                u64 unit = (u64)(r0 + min(r, rs - 1)) * units + u0 + at;
                Unpacked<TYPE> v = unpack<TYPE>(w, loaded[i], unit);
                u32 x = numbers_of<TYPE>(loaded[i]);
                for (u32 t = 0; t < ts; t++) {
                    Inputs part = in;
                    part.low += t * TILE_U, part.high += t * TILE_U, part.scale += t * TILE_U, part.sum += t * TILE_U;
                    float term = term_of<TYPE>(v, x, met_by<TYPE>(part, at));
                    float *place = to + (r * TILE_T + t) * STRIDE;
                    if (!eighths) place[lane] = term;
                    else if (lane % 8 == 0) place[lane / 8] = term;
                }
            }
            __syncthreads();
            u32 count = eighths ? us / 8 : us;
#pragma unroll
            for (u32 f = 0; f < FOLDS; f++) {
                u32 pair = threadIdx.x + f * THREADS;
                if (pair / TILE_T < rs && pair % TILE_T < ts)
                    for (u32 i = 0; i < count; i++) sums[f] = sums[f] + to[pair * STRIDE + i];
            }
        }
#pragma unroll
        for (u32 f = 0; f < FOLDS; f++) {
            u32 pair = threadIdx.x + f * THREADS, r = pair / TILE_T, t = pair % TILE_T;
            if (r < rs && t < ts) ((float *)line.p[2])[(u64)(t0 + t) * outs + r0 + r] = sums[f];
        }
        __syncthreads();
    }
}

__device__ APART void plain_rows(const Line &line, u8 *memory) {
    const u32 rows = line.n[0], width = line.n[1], outs = line.n[2], type = line.n[4];
    float *row = (float *)memory;
    for (u32 t = 0; t < rows; t++) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)line.p[0] + (u64)t * width + i);
        __syncthreads();
        u32 pair = (blockIdx.x * THREADS + threadIdx.x) / 16, pairs = gridDim.x * THREADS / 16;
        for (u32 r = pair; r < (outs + 1) / 2 * 2; r += pairs) {
            u32 safe = min(r, outs - 1);
            const u8 *w = (const u8 *)line.p[1] + (u64)safe * width * plain_bytes(type);
            float sum = plain_dot(w, type, row, width, threadIdx.x % 16);
            if (threadIdx.x % 16 == 0 && r < outs) ((float *)line.p[2])[(u64)t * outs + r] = sum;
        }
    }
}

__device__ APART void matmul_line(const Line &line, u8 *memory) {
    switch (line.n[4]) {
        case Q4_0: if constexpr (HAS(Q4_0)) many_rows<Q4_0>(line, memory); break;
        case Q4_1: if constexpr (HAS(Q4_1)) many_rows<Q4_1>(line, memory); break;
        case Q5_0: if constexpr (HAS(Q5_0)) many_rows<Q5_0>(line, memory); break;
        case Q5_1: if constexpr (HAS(Q5_1)) many_rows<Q5_1>(line, memory); break;
        case Q8_0: if constexpr (HAS(Q8_0)) many_rows<Q8_0>(line, memory); break;
        case Q4_K: if constexpr (HAS(Q4_K)) many_rows<Q4_K>(line, memory); break;
        case Q5_K: if constexpr (HAS(Q5_K)) many_rows<Q5_K>(line, memory); break;
        case Q6_K: if constexpr (HAS(Q6_K)) many_rows<Q6_K>(line, memory); break;
        default: plain_rows(line, memory); break;
    }
}

// ---------------------------------------------------------------- attention

// Turns a pair of numbers of a head by a position.
__device__ __forceinline__ void turn(float *head, u32 pair, u32 dims, u32 halves, float2 angle) {
    u32 one = halves ? pair : 2 * pair, two = halves ? pair + dims / 2 : 2 * pair + 1;
    float cos = angle.x, sin = angle.y, a = head[one], b = head[two];
    head[one] = a * cos - b * sin;
    head[two] = a * sin + b * cos;
}

// A query with one position's key, by four threads: each has four of the sixteen lanes. All four have the sum.
__device__ __forceinline__ float score_of(const float *query, const uint2 *key, u32 size, u32 quarter) {
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 e = 0; e < size; e += 128) {
        uint2 words[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (e + 16 * i < size) words[i] = key[(e + 16 * i) / 4];
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (e + 16 * i < size) {
                const float4 q = *(const float4 *)(query + e + 16 * i + 4 * quarter);
                lanes[0] = lanes[0] + q.x * half_of(words[i].x & 0xffff);
                lanes[1] = lanes[1] + q.y * half_of(words[i].x >> 16);
                lanes[2] = lanes[2] + q.z * half_of(words[i].y & 0xffff);
                lanes[3] = lanes[3] + q.w * half_of(words[i].y >> 16);
            }
    }
    // Lanes are added in halves: eight apart, four apart, two apart, one apart.
#pragma unroll
    for (int by = 2; by > 0; by /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(~0u, lanes[i], by, 4);
            lanes[i] = quarter & by ? other + lanes[i] : lanes[i] + other;
        }
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Positions whose values are near at a time: whole runs.
#define NEAR 128

// Has values of some positions come into shared memory.
__device__ __forceinline__ void near_values(const u8 *values, u64 stride, u32 size, u32 first, u32 count, u8 *near) {
    u32 to = (u32)__cvta_generic_to_shared(near), pieces = size / 8;
    for (u32 i = threadIdx.x; i < count * pieces; i += THREADS) {
        u32 at = i / pieces, piece = i % pieces;
        const u8 *from = values + (first + at) * stride + piece * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + (at * pieces + piece) * 16), "l"(from) : "memory");
    }
}

// n: 0 rows, 1 heads, 2 heads of keys, 3 head's size, 4 group, 5 offset, 6 scale, 7 whether keys are new and unturned,
// 8 dims, 9 pairs, 10 the type of blocks of results. p: 0 queries, 1 keys, 2 values, 3 into, 4 table, 5 new keys,
// 6 new values, 7 blocks of results.
__device__ __forceinline__ void attend_line(const Line &line, const Step &step, u8 *memory) {
    const u32 rows = line.n[0], heads = line.n[1], kv_heads = line.n[2], size = line.n[3];
    const u32 group = line.n[4], offset = line.n[5], fresh = line.n[7], dims = line.n[8];
    const float scale = __uint_as_float(line.n[6]);
    const u64 stride = (u64)kv_heads * size * 2;
    float *query = (float *)memory;
    float *new_key = query + size, *new_value = new_key + size;
    u16 *key_bits = (u16 *)(new_value + size);
    float *most = (float *)(key_bits + size);
    u8 *near = (u8 *)(most + WARPS);
    float *scores = (float *)(near + NEAR * size * 2);
    if (step.past + rows > step.scores_each) scores = step.scores + (u64)blockIdx.x * (step.past + rows);
    for (u32 unit = blockIdx.x; unit < rows * heads; unit += gridDim.x) {
        u32 row = unit / heads, head = unit % heads;
        u32 kv = (offset + head) / group, positions = step.past + row + 1;
        const u8 *keys = (const u8 *)line.p[1] + (u64)kv * size * 2;
        const u8 *values = (const u8 *)line.p[2] + (u64)kv * size * 2;
        // Positions whose keys and values are in the card's memory.
        const u32 kept = fresh ? step.past : positions;
        __syncthreads();
        near_values(values, stride, size, 0, min((u32)NEAR, kept), near);
        // A head has no more numbers than a block has threads.
        u32 own_pair = threadIdx.x % max(dims / 2, 1u);
        float2 angle = make_float2(0.0f, 0.0f);
        if (fresh && threadIdx.x < dims)
            angle = __ldg((const float2 *)line.p[4] + (u64)step.past * (dims / 2) + own_pair);
        if (threadIdx.x < size) {
            u32 i = threadIdx.x;
            float asked = read((const float *)line.p[0] + ((u64)row * heads + head) * size + i), key = 0.0f, value = 0.0f;
            if (fresh) {
                key = read((const float *)line.p[5] + kv * size + i);
                value = read((const float *)line.p[6] + kv * size + i);
            }
            query[i] = asked;
            new_key[i] = key;
            new_value[i] = half_of(to_half(value));
        }
        __syncthreads();
        if (fresh) {
            if (threadIdx.x < dims) turn(threadIdx.x < dims / 2 ? query : new_key, own_pair, dims, line.n[9], angle);
            __syncthreads();
            bool first = head == 0 || (offset + head - 1) / group != kv;
            for (u32 i = threadIdx.x; i < size; i += THREADS) {
                u16 bits = to_half(new_key[i]);
                key_bits[i] = bits;
                if (first) {
                    ((u16 *)(keys + step.past * stride))[i] = bits;
                    ((u16 *)(values + step.past * stride))[i] = to_half(new_value[i]);
                }
            }
            __syncthreads();
        }
        float own = -__uint_as_float(0x7f800000u);
        u32 quarter = threadIdx.x % 4;
        for (u32 base = 0; base < positions; base += THREADS / 4) {
            u32 at = base + threadIdx.x / 4, safe = min(at, positions - 1);
            const u8 *key = fresh && safe == step.past ? (const u8 *)key_bits : keys + safe * stride;
            float score = score_of(query, (const uint2 *)key + quarter, size, quarter) * scale;
            if (at < positions) {
                if (quarter == 0) scores[at] = score;
                own = score > own ? score : own;
            }
        }
        for (int by = 16; by > 0; by /= 2) {
            float other = __shfl_xor_sync(~0u, own, by);
            own = other > own ? other : own;
        }
        if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
        __syncthreads();
        float largest = most[0];
        for (int i = 1; i < WARPS; i++) largest = most[i] > largest ? most[i] : largest;
        for (u32 at = threadIdx.x; at < positions; at += THREADS) scores[at] = power_of_e(scores[at] - largest);
        __syncthreads();
        if (threadIdx.x < 32) {
            float sum = 0.0f;
            if (threadIdx.x < 16)
                for (u32 at = threadIdx.x; at < positions; at += 16) sum = sum + scores[at];
            for (int half = 8; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half, 16);
            if (threadIdx.x == 0) most[0] = sum;
        }
        __syncthreads();
        float sum = most[0];
        for (u32 at = threadIdx.x; at < positions; at += THREADS) scores[at] = scores[at] / sum;
        __syncthreads();
        // Values come near in tiles, the first of which is on its way since the beginning. Each thread has a number
        // of the head, adds up runs, and adds runs from the first.
        float total = 0.0f;
        for (u32 tile = 0; tile < positions; tile += NEAR) {
            u32 count = min(NEAR, positions - tile);
            if (tile > 0) {
                __syncthreads();
                near_values(values, stride, size, tile, min(count, kept > tile ? kept - tile : 0), near);
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            if (threadIdx.x < size) {
                const u16 *value = (const u16 *)near + threadIdx.x;
                for (u32 from = 0; from < count; from += RUN) {
                    float part = 0.0f;
                    u32 to = min(from + RUN, count);
                    if (to == from + RUN && (!fresh || tile + to <= step.past)) {
#pragma unroll 16
                        for (u32 i = 0; i < RUN; i++)
                            part = part + scores[tile + from + i] * half_of(value[(from + i) * size]);
                    } else {
                        for (u32 at = from; at < to; at++) {
                            float kept_value = fresh && tile + at == step.past ? new_value[threadIdx.x] : half_of(value[at * size]);
                            part = part + scores[tile + at] * kept_value;
                        }
                    }
                    total = total + part;
                }
            }
        }
        u32 mine = threadIdx.x / size, dim = threadIdx.x % size;
        u64 place = ((u64)row * heads + head) * size;
        if (mine == 0) {
            ((float *)line.p[3])[place + dim] = total;
            query[dim] = total;
        }
        __syncthreads();
        if (line.n[10] == Q8_0) {
            u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            for (u32 at = warp; at < size / 32; at += WARPS) {
                int byte;
                float rounded = round_values<1>(query + at * 32 + lane, &byte);
                u8 *block = (u8 *)line.p[7] + (place / 32 + at) * 34;
                block[2 + lane] = (u8)byte;
                if (lane == 0) *(u16 *)block = to_half(rounded);
            }
        }
    }
}

// Has keys and values that this block will look back on come closer.
__device__ void fetch_kept(const Line &line, const Step &step) {
    const u32 size = line.n[3], head = blockIdx.x;
    if (line.n[0] != 1 || head >= line.n[1]) return;
    const u64 stride = (u64)line.n[2] * size * 2, start = (u64)((line.n[5] + head) / line.n[4]) * size * 2;
    for (u32 at = threadIdx.x; at < step.past; at += THREADS)
        for (u32 off = 0; off < size * 2; off += 128) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(line.p[1] + start + at * stride + off));
            asm volatile("prefetch.global.L2 [%0];" :: "l"(line.p[2] + start + at * stride + off));
        }
}

// ---------------------------------------------------------------- between products

__device__ float decoded(const u8 *base, u32 type, u64 blocks, u64 block, u32 at) {
    if (type == F32) return ((const float *)base)[block];
    if (type == F16) return half_of(((const u16 *)base)[block]);
    if (type == BF16) return bf16_of(((const u16 *)base)[block]);
    if (type == Q4_K || type == Q5_K) {
        const u8 *b = base + block * (type == Q4_K ? 144 : 176);
        uint4 head = *(const uint4 *)b;
        u32 sub = at / 32;
        int scale, minimum;
        unpack_scale(head, sub, &scale, &minimum);
        const u8 *quants = b + (type == Q4_K ? 16 : 48);
        int q = quants[32 * (at / 64) + at % 32] >> (4 * (at / 32 % 2)) & 15;
        if (type == Q5_K) q |= (b[16 + at % 32] >> sub & 1) << 4;
        float d = half_of(head.x & 0xffff), least = half_of(head.x >> 16);
        return (d * (float)scale) * (float)q - least * (float)minimum;
    }
    if (type == Q6_K) {
        u32 half = at / 128, quarter = at % 128 / 32, column = at % 32;
        int low = base[block * 128 + 64 * half + 32 * (quarter % 2) + column] >> (4 * (quarter / 2)) & 15;
        int high = base[blocks * 128 + block * 64 + 32 * half + column] >> (2 * quarter) & 3;
        float d = half_of(*(const u16 *)(base + blocks * 208 + block * 2));
        float scale = (float)(i8)base[blocks * 192 + block * 16 + at / 16];
        return d * scale * (float)((low | high << 4) - 32);
    }
    float d, least = 0.0f;
    int q;
    if (type == Q8_0) {
        q = (i8)base[block * 32 + at];
        d = half_of(*(const u16 *)(base + blocks * 32 + block * 2));
    } else {
        u8 byte = base[block * 16 + at % 16];
        q = at < 16 ? byte & 15 : byte >> 4;
        if (type == Q4_0) {
            q -= 8;
            d = half_of(*(const u16 *)(base + blocks * 16 + block * 2));
        } else if (type == Q4_1) {
            d = half_of(*(const u16 *)(base + blocks * 16 + block * 4));
            least = half_of(*(const u16 *)(base + blocks * 16 + block * 4 + 2));
        } else {
            u32 bits = *(const u32 *)(base + blocks * 16 + block * 4);
            q |= (bits >> at & 1) << 4;
            if (type == Q5_0) {
                q -= 16;
                d = half_of(*(const u16 *)(base + blocks * 20 + block * 2));
            } else {
                d = half_of(*(const u16 *)(base + blocks * 20 + block * 4));
                least = half_of(*(const u16 *)(base + blocks * 20 + block * 4 + 2));
            }
        }
    }
    return d * (float)q + least;
}

// n: 0 rows, 1 width, 2 type, 3 first, 4 count. p: 0 table, 1 into.
__device__ APART void embed_line(const Line &line, const Step &step) {
    const u32 rows = line.n[0], width = line.n[1], type = line.n[2], first = line.n[3], count = line.n[4];
    const u32 size = is_plain(type) ? 1 : is_long(type) ? 256 : 32;
    const u64 blocks = (u64)count * width / size;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        u32 id = rows == 1 ? step.token : read(step.ids + row);
        if (id < first || id - first >= count) continue;
        u64 start = (u64)(id - first) * width;
        for (u32 i = threadIdx.x; i < width; i += THREADS)
            ((float *)line.p[1])[(u64)row * width + i] =
                decoded((const u8 *)line.p[0], type, blocks, (start + i) / size, (start + i) % size);
    }
}

// n: 0 rows, 1 width, 2 epsilon. p: 0 from, 1 weight, 2 into.
__device__ APART void norm_line(const Line &line, u8 *memory) {
    const u32 rows = line.n[0], width = line.n[1];
    float *row = (float *)memory;
    double *lanes = (double *)(row + (width + 1) / 2 * 2);
    const float *weight = (const float *)line.p[1];
    for (u32 at = blockIdx.x; at < rows; at += gridDim.x) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)line.p[0] + (u64)at * width + i);
        __syncthreads();
        float scale = norm_of(row, width, __uint_as_float(line.n[2]), lanes);
        float *out = (float *)line.p[2] + (u64)at * width;
        for (u32 i = threadIdx.x; i < width; i += THREADS) out[i] = (row[i] * scale) * weight[i];
    }
}

// Blocks of Q8_K from values that `value` gives.
template <class F> __device__ void round_long(u64 blocks, u8 *out, F value) {
    u32 lane = threadIdx.x % 32;
    for (u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) / 32; at < blocks; at += (u64)gridDim.x * WARPS) {
        float v[8];
        int bytes[8];
        for (int j = 0; j < 8; j++) v[j] = value(at, j * 32 + lane);
        float scale = round_values<8>(v, bytes);
        u8 *block = out + at * 292;
        for (int j = 0; j < 8; j++) {
            block[4 + j * 32 + lane] = (u8)bytes[j];
            int half = bytes[j];
            for (int by = 8; by > 0; by /= 2) half += __shfl_xor_sync(~0u, half, by);
            if (lane % 16 == 0) *(u16 *)(block + 260 + (2 * j + lane / 16) * 2) = (u16)(short)half;
        }
        if (lane == 0) *(float *)block = scale;
    }
}

// n: 0 rows, 1 width, 2 type. p: 0 from, 1 into.
__device__ APART void quantize_line(const Line &line) {
    const float *from = (const float *)line.p[0];
    u64 values = (u64)line.n[0] * line.n[1];
    if (line.n[2] == F32) {
        for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < values; i += (u64)gridDim.x * THREADS)
            ((float *)line.p[1])[i] = read(from + i);
        return;
    }
    if (line.n[2] == Q8_K) {
        round_long(values / 256, (u8 *)line.p[1], [=](u64 block, u32 at) { return read(from + block * 256 + at); });
        return;
    }
    u32 lane = threadIdx.x % 32;
    for (u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) / 32; at < values / 32; at += (u64)gridDim.x * WARPS) {
        float value = read(from + at * 32 + lane);
        int byte;
        float scale = round_values<1>(&value, &byte);
        u8 *block = (u8 *)line.p[1] + at * 34;
        block[2 + lane] = (u8)byte;
        if (lane == 0) *(u16 *)block = to_half(scale);
    }
}

// Rows of Q4_K become inputs. n: 0 blocks. p: 0 from, 1 into.
__device__ APART void round_q4_k_line(const Line &line) {
    const u8 *from = (const u8 *)line.p[0];
    u64 blocks = line.n[0];
    round_long(blocks, (u8 *)line.p[1], [=](u64 block, u32 at) { return decoded(from, Q4_K, blocks, block, at); });
}

// n: 0 rows, 1 heads, 2 head's size, 3 dims, 4 pairs. p: 0 data, 1 table.
__device__ APART void rotate_line(const Line &line, const Step &step) {
    const u32 heads = line.n[1], size = line.n[2], dims = line.n[3], half = dims / 2;
    u64 count = (u64)line.n[0] * heads * half;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 pair = i % half;
        u64 head = i / half, row = head / heads;
        float *data = (float *)line.p[0] + head * size;
        const float *table = (const float *)line.p[1] + (step.past + row) * dims;
        u32 one = line.n[4] ? pair : 2 * pair, two = line.n[4] ? pair + half : 2 * pair + 1;
        float cos = table[2 * pair], sin = table[2 * pair + 1], a = read(data + one), b = read(data + two);
        data[one] = a * cos - b * sin;
        data[two] = a * sin + b * cos;
    }
}

// n: 0 elements, 1 elements of a row. p: 0 from, 1 into.
__device__ void halve_line(const Line &line, const Step &step) {
    u16 *into = (u16 *)line.p[1] + (u64)step.past * line.n[1];
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < line.n[0]; i += gridDim.x * THREADS)
        into[i] = to_half(read((const float *)line.p[0] + i));
}

__device__ void gate_line(const Line &line) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < line.n[0]; i += gridDim.x * THREADS)
        ((float *)line.p[2])[i] = gate_of(read((const float *)line.p[0] + i), read((const float *)line.p[1] + i));
}

__device__ void add_line(const Line &line) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < line.n[0]; i += gridDim.x * THREADS)
        ((float *)line.p[0])[i] = read((const float *)line.p[0] + i) + read((const float *)line.p[1] + i);
}

__device__ void fill_line(const Line &line) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < line.n[0]; i += gridDim.x * THREADS)
        ((u32 *)line.p[0])[i] = line.n[1];
}

// Pairs of bytes: blocks of Q8_0 begin at even ones.
__device__ void copy_line(const Line &line) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < line.n[0] / 2; i += gridDim.x * THREADS)
        ((u16 *)line.p[1])[i] = read((const u16 *)line.p[0] + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
spanker_card(const Line *lines, u32 count, Step step) {
    __shared__ Line window[2];
    const u32 WORDS = sizeof(Line) / 4;
    if (threadIdx.x < WORDS) ((u32 *)&window[0])[threadIdx.x] = ((const u32 *)lines)[threadIdx.x];
    __syncthreads();
    for (u32 at = 0; at < count; at++) {
        const Line &line = window[at % 2];
        u8 *memory = shared;
        // The next line is on its way while this one is at work.
        if (threadIdx.x < WORDS && at + 1 < count)
            ((u32 *)&window[(at + 1) % 2])[threadIdx.x] = __ldg((const u32 *)(lines + at + 1) + threadIdx.x);
        switch (line.kind) {
            case VECTOR: vector_line(line, memory); break;
            case ATTEND: attend_line(line, step, memory); break;
            case MATMUL: matmul_line(line, memory); break;
            case EMBED: embed_line(line, step); break;
            case NORM: norm_line(line, memory); break;
            case QUANTIZE: quantize_line(line); break;
            case ROTATE: rotate_line(line, step); break;
            case HALVE: halve_line(line, step); break;
            case GATE: gate_line(line); break;
            case ADD: add_line(line); break;
            case FILL: fill_line(line); break;
            case COPY: copy_line(line); break;
            case ROUND_Q4_K: round_q4_k_line(line); break;
            default: __trap();
        }
        if (at + 1 < count) {
            __syncthreads();
            if (window[(at + 1) % 2].kind == ATTEND) fetch_kept(window[(at + 1) % 2], step);
            meet(step.meet, step.met + (u64)(at + 1) * gridDim.x);
        }
    }
}
