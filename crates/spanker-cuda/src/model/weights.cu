// SPDX-License-Identifier: Apache-2.0
// Types of weights: how a unit of 32 is loaded, unpacked and multiplied, and how its inputs are prepared.

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

__device__ __forceinline__ int dot16(int4 w, int4 q, int from = 0) {
    int s = __dp4a(w.x, q.x, from);
    s = __dp4a(w.y, q.y, s);
    s = __dp4a(w.z, q.z, s);
    return __dp4a(w.w, q.w, s);
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

// The inputs of a unit, whatever its row.
template <int TYPE> struct UnitInputs {
    int4 a, b;
    float scale;
    // Of a short type, the inputs' sum, of Q4_0 -8 times; of a long one with minima, the sums of both halves.
    int sums[2];
};

// `at` is the unit within the row.
template <int TYPE> __device__ __forceinline__ UnitInputs<TYPE> inputs_of(const Inputs &in, u32 at) {
    UnitInputs<TYPE> m;
    if (TYPE == Q4_K || TYPE == Q5_K) {
        u32 group = at / 2 * 2;
        const int4 *from = at % 2 == 0 ? in.low : in.high;
        m.a = from[group], m.b = from[group + 1];
        m.sums[0] = sum16(m.a), m.sums[1] = sum16(m.b);
        m.scale = in.scale[at / 8];
    } else {
        m.a = in.low[at], m.b = in.high[at];
        m.scale = in.scale[TYPE == Q6_K ? at / 8 : at];
        if (TYPE != Q6_K && TYPE != Q8_0) m.sums[0] = in.sum[at] * (TYPE == Q4_0 ? -8 : 1);
    }
    return m;
}

// The term that a block adds. Of a long type, the first of its eight lanes has it.
template <int TYPE>
__device__ __forceinline__ float term_of(const Unpacked<TYPE> &v, u32 x, const UnitInputs<TYPE> &m) {
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
        products = dot16(v.a, m.a, TYPE == Q4_0 ? m.sums[0] : 0) + (dot16u(make_uint4(v.b.x, v.b.y, v.b.z, v.b.w), m.b) >> 4);
    } else {
        products = dot16(v.a, m.a) + dot16(v.b, m.b);
    }
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

// Makes a block's bytes from values in registers of a warp: lane i has values i, i + 32, ..
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

// Loads a row of blocks from the card's memory as inputs in shared memory, by way of `raw` there.
__device__ __forceinline__ void load_inputs(const u8 *row, u32 type, u32 units, const Inputs &in, u8 *raw) {
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

// One over the root of a mean square, rounded to f32. What is found by approximation is right where everything that it
// might be rounds to the same; where not, it is computed as it is defined.
__device__ __forceinline__ float root_scale(double sum, u32 width, float epsilon) {
    bool even = (width & (width - 1)) == 0;
    double mean = even ? sum * __longlong_as_double((long long)(1024 - __ffs(width)) << 52) : sum / (double)width;
    double y = mean + (double)epsilon, r = approximate_root(y);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        double off = __fma_rn(-(y * r), r, 1.0);
        r = __fma_rn(r * off, 0.5, r);
    }
    float low = (float)(r * (1.0 - 0x1p-48)), high = (float)(r * (1.0 + 0x1p-48));
    return low == high ? low : (float)(1.0 / sqrt(y));
}

// The same for a row in shared memory.
__device__ __forceinline__ float norm_of(const float *row, u32 width, float epsilon, double *lanes) {
    if (threadIdx.x < NORM_LANES) {
        double sum = 0.0;
        u32 i = threadIdx.x;
        // The product of two f32 is exact in f64, so that fusing it changes nothing.
        for (; i + 7 * NORM_LANES < width; i += 8 * NORM_LANES) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = row[i + j * NORM_LANES];
#pragma unroll
            for (int j = 0; j < 8; j++) sum = __fma_rn((double)v[j], (double)v[j], sum);
        }
        for (; i < width; i += NORM_LANES) sum = __fma_rn((double)row[i], (double)row[i], sum);
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    // Every warp adds lanes up for itself.
    u32 l = threadIdx.x % 32;
    double a = lanes[l] + lanes[l + 64], b = lanes[l + 32] + lanes[l + 96];
    double sum = a + b;
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    return root_scale(__shfl_sync(~0u, sum, 0), width, epsilon);
}

// Eight values as bytes, the sum of their block's, and its scale.
struct Rounded {
    uint2 bytes;
    int sum;
    float scale;
};

// Four threads have a short block and a warp has a long one: all of them come here.
__device__ __forceinline__ Rounded round_eight(const float v[8], u32 type) {
    float most = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = larger(most, fabsf(v[i]));
    u32 largest = __float_as_uint(most);
    if (type == Q8_0) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    } else {
        largest = largest_in_warp(largest);
    }
    float inverse, stored;
    scale_of(largest, &inverse, &stored);
    bool plain = largest != 0 && largest < 0x7f800000u;
    u32 words[2] = {0, 0};
    if (__all_sync(~0u, plain && inverse < __uint_as_float(0x7f800000u))) {
        // Nothing is beyond 127, and nothing is no number.
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            u32 bits[4];
#pragma unroll
            for (int j = 0; j < 4; j++) bits[j] = __float_as_uint(v[i + j] * inverse + 12582912.0f);
            words[i / 4] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            words[i / 4] |= (plain ? (u32)round_to_byte(v[i], inverse) & 0xff : 0) << (8 * (i % 4));
    }
    int sum = __dp4a((int)words[0], 0x01010101, __dp4a((int)words[1], 0x01010101, 0));
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return {make_uint2(words[0], words[1]), sum, stored};
}

// Norms a row and rounds it to inputs in shared memory, without a copy in the card's. `row` is twice as long as the row:
// the norm's weights follow it.
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
        for (u32 eight = threadIdx.x; eight / 32 * 32 < width / 8; eight += THREADS) {
            bool there = eight < width / 8;
            const float4 *values = (const float4 *)row + (there ? eight : 0) * 2;
            const float4 *by = (const float4 *)weights + (there ? eight : 0) * 2;
            float4 a = values[0], b = values[1], c = by[0], d = by[1];
            float v[8] = {(a.x * scale) * c.x, (a.y * scale) * c.y, (a.z * scale) * c.z, (a.w * scale) * c.w,
                          (b.x * scale) * d.x, (b.y * scale) * d.y, (b.z * scale) * d.z, (b.w * scale) * d.w};
            const Rounded rounded = round_eight(v, type);
            if (!there) continue;
            ((uint2 *)((eight % 4 < 2 ? in.low : in.high) + eight / 4))[eight % 2] = rounded.bytes;
            if (type == Q8_0 && eight % 4 == 0) {
                in.scale[eight / 4] = half_of(to_half(rounded.scale));
                in.sum[eight / 4] = rounded.sum;
            }
            if (type == Q8_K && eight % 32 == 0) in.scale[eight / 32] = rounded.scale;
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = (row[i] * scale) * weights[i];
    }
    __syncthreads();
}
