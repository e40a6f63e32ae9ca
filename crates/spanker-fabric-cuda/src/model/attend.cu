// SPDX-License-Identifier: Apache-2.0
// Attention.

// Turns a pair of numbers of a head by a position.
__device__ __forceinline__ void turn(float *head, u32 pair, u32 dims, u32 halves, float2 angle) {
    u32 one = halves ? pair : 2 * pair, two = halves ? pair + dims / 2 : 2 * pair + 1;
    float cos = angle.x, sin = angle.y, a = head[one], b = head[two];
    head[one] = a * cos - b * sin;
    head[two] = a * sin + b * cos;
}

// A query with one position's key, by four threads: each has four of the sixteen lanes. All four have the sum. Keys of a
// layer are read after they were written and not before, so that the first-level cache has none that are out of date.
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
// 8 dims, 9 pairs, 10 the type of blocks of results, 11 positions whose values are near at a time: whole runs. p: 0 queries, 1 keys, 2 values, 3 into, 4 table, 5 new keys,
// 6 new values, 7 blocks of results.
__device__ __forceinline__ void attend_line(const Line &line, const Step &step, u8 *memory) {
    const u32 rows = line.n[0], heads = line.n[1], kv_heads = line.n[2], size = line.n[3];
    const u32 group = line.n[4], offset = line.n[5], fresh = line.n[7], dims = line.n[8], NEAR = line.n[11];
    const float scale = __uint_as_float(line.n[6]);
    const u64 stride = (u64)kv_heads * size * 2;
    float *query = (float *)memory;
    float *new_key = query + size, *new_value = new_key + size;
    u16 *key_bits = (u16 *)(new_value + size);
    float *most = (float *)(key_bits + size);
    float *parts = most + WARPS;
    u8 *near = (u8 *)(parts + NEAR / RUN * size);
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
        near_values(values, stride, size, 0, min(NEAR, kept), near);
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
        // of the head and adds up runs. Runs are added from the first.
        const u32 groups = THREADS / size, mine = threadIdx.x / size, dim = threadIdx.x % size;
        float total = 0.0f;
        for (u32 tile = 0; tile < positions; tile += NEAR) {
            u32 count = min(NEAR, positions - tile);
            if (tile > 0) {
                __syncthreads();
                near_values(values, stride, size, tile, min(count, kept > tile ? kept - tile : 0), near);
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            const u16 *value = (const u16 *)near + dim;
            for (u32 from = mine * RUN; mine < groups && from < count; from += groups * RUN) {
                float part = 0.0f;
                u32 to = min(from + RUN, count);
                if (to == from + RUN && (!fresh || tile + to <= step.past)) {
#pragma unroll 16
                    for (u32 i = 0; i < RUN; i++)
                        part = part + scores[tile + from + i] * half_of(value[(from + i) * size]);
                } else {
                    for (u32 at = from; at < to; at++) {
                        float kept_value = fresh && tile + at == step.past ? new_value[dim] : half_of(value[at * size]);
                        part = part + scores[tile + at] * kept_value;
                    }
                }
                parts[from / RUN * size + dim] = part;
            }
            __syncthreads();
            if (mine == 0)
                for (u32 run = 0; run * RUN < count; run++) total = total + parts[run * size + dim];
        }
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
__device__ __forceinline__ void fetch_kept(const Line &line, const Step &step) {
    const u32 size = line.n[3], head = blockIdx.x;
    if (line.n[0] != 1 || head >= line.n[1]) return;
    const u64 stride = (u64)line.n[2] * size * 2, start = (u64)((line.n[5] + head) / line.n[4]) * size * 2;
    for (u32 at = threadIdx.x; at < step.past; at += THREADS)
        for (u32 off = 0; off < size * 2; off += 128) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(line.p[1] + start + at * stride + off));
            asm volatile("prefetch.global.L2 [%0];" :: "l"(line.p[2] + start + at * stride + off));
        }
}
