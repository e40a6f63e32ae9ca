// SPDX-License-Identifier: Apache-2.0
// Attention.

// Rotary embedding of a pair of numbers of a head.
__device__ __forceinline__ void rotate_pair(float *head, u32 pair, u32 dims, u32 halves, float2 angle) {
    u32 one = halves ? pair : 2 * pair, two = halves ? pair + dims / 2 : 2 * pair + 1;
    float cos = angle.x, sin = angle.y, a = head[one], b = head[two];
    head[one] = a * cos - b * sin;
    head[two] = a * sin + b * cos;
}

// A part of a key: 128 numbers by four threads, each of which has four of every sixteen.
struct Key {
    uint2 words[8];
};

// Keys of a layer are read after they were written and not before, so that the first-level cache has none that are out of
// date. WHOLE: there are 128 numbers.
template <bool WHOLE> __device__ __forceinline__ Key key_of(const u8 *key, u32 begin, u32 size, u32 quarter) {
    Key k;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (WHOLE || begin + 16 * i < size) k.words[i] = ((const uint2 *)key)[(begin + 16 * i) / 4 + quarter];
    return k;
}

// A query with one position's key, by four threads: each has four of the sixteen lanes. All four have the sum. The first
// part of the key is already loaded.
template <bool WHOLE>
__device__ __forceinline__ float score_of(const float *query, const u8 *key, Key k, u32 size, u32 quarter) {
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 e = 0; e < (WHOLE ? 128 : size); e += 128) {
        if (e > 0) k = key_of<false>(key, e, size, quarter);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (WHOLE || e + 16 * i < size) {
                const float4 q = *(const float4 *)(query + e + 16 * i + 4 * quarter);
                lanes[0] = lanes[0] + q.x * half_of(k.words[i].x & 0xffff);
                lanes[1] = lanes[1] + q.y * half_of(k.words[i].x >> 16);
                lanes[2] = lanes[2] + q.z * half_of(k.words[i].y & 0xffff);
                lanes[3] = lanes[3] + q.w * half_of(k.words[i].y >> 16);
            }
    }
    // Lanes are added in halves: eight apart, four apart, two apart, one apart.
#pragma unroll
    for (int by = 2; by > 0; by /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) lanes[i] = lanes[i] + __shfl_xor_sync(~0u, lanes[i], by, 4);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// A query, and the keys that it attends to: in the KV cache, and the last one in shared memory if it is new.
struct Attention {
    const float *query;
    const u8 *keys, *new_key;
    u64 stride;
    u32 positions, size;
    float scale;
};

// Scores of positions, a warp eight at a time, if there are any for it. Returns the largest that a thread has seen. The
// first keys are already loaded.
template <bool WHOLE> __device__ __forceinline__ float scores_of(const Attention &attention, Key k, float *scores) {
    const u32 quarter = threadIdx.x % 4, last = attention.positions - 1, size = attention.size;
    float own = -__uint_as_float(0x7f800000u);
    for (u32 base = 0; base + threadIdx.x / 32 * 8 < attention.positions; base += THREADS / 4) {
        const u32 at = base + threadIdx.x / 4;
        const bool is_new = attention.new_key && at >= last;
        const u8 *key = is_new ? attention.new_key : attention.keys + min(at, last) * attention.stride;
        if (base > 0 || is_new) k = key_of<WHOLE>(key, 0, size, quarter);
        float score = score_of<WHOLE>(attention.query, key, k, size, quarter) * attention.scale;
        if (at <= last) {
            if (quarter == 0) scores[at] = score;
            own = score > own ? score : own;
        }
    }
    return own;
}

// Copies values of some positions to shared memory, asynchronously.
__device__ __forceinline__ void copy_values(const u8 *values, u64 stride, u32 size, u32 first, u32 count, u8 *near) {
    u32 to = (u32)__cvta_generic_to_shared(near), parts = size / 8;
    for (u32 i = threadIdx.x; i < count * parts; i += THREADS) {
        u32 at = i / parts, part = i % parts;
        const u8 *from = values + (first + at) * stride + part * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + (at * parts + part) * 16), "l"(from) : "memory");
    }
}

// Adds COUNT values, each times its score, one after the other.
template <u32 COUNT>
__device__ __forceinline__ float add_values(float sum, const float *scores, const u16 *values, u32 size) {
    float4 by[COUNT / 4];
    u16 some[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        if (i % 4 == 0) by[i / 4] = ((const float4 *)scores)[i / 4];
        some[i] = values[i * size];
    }
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; i++) {
        sum = sum + by[i].x * half_of(some[4 * i]);
        sum = sum + by[i].y * half_of(some[4 * i + 1]);
        sum = sum + by[i].z * half_of(some[4 * i + 2]);
        sum = sum + by[i].w * half_of(some[4 * i + 3]);
    }
    return sum;
}

__device__ __forceinline__ void attend(const Attend &op, const Step &step, u8 *memory) {
    const u32 rows = op.rows, heads = op.heads, kv_heads = op.kv_heads, size = op.head_size;
    const u32 group = op.group, offset = op.offset, fresh = op.is_fresh, dims = op.dims, NEAR = op.near;
    const float scale = __uint_as_float(op.scale);
    const u64 stride = (u64)kv_heads * size * 2;
    float *query = (float *)memory;
    float *new_key = query + size;
    u16 *key_bits = (u16 *)(new_key + size);
    float *most = (float *)(key_bits + size);
    float *parts = most + WARPS;
    u8 *near = (u8 *)(parts + NEAR / RUN * size);
    float *scores = (float *)(near + NEAR * size * 2);
    if (step.past + rows > step.scores_each) scores = step.scores + (u64)blockIdx.x * ((step.past + rows + 3) / 4 * 4);
    for (u32 unit = blockIdx.x; unit < rows * heads; unit += gridDim.x) {
        u32 row = unit / heads, head = unit % heads;
        u32 kv = (offset + head) / group, positions = step.past + row + 1;
        const u8 *keys = (const u8 *)op.keys + (u64)kv * size * 2;
        const u8 *values = (const u8 *)op.values + (u64)kv * size * 2;
        // Positions whose keys and values are in the KV cache.
        const u32 cached = fresh ? step.past : positions;
        __syncthreads();
        copy_values(values, stride, size, 0, min(NEAR, cached), near);
        // The first keys are loaded while other blocks still write the query.
        const u32 quarter = threadIdx.x % 4;
        Key first_key = {};
        if (cached > 0) first_key = key_of<false>(keys + min(threadIdx.x / 4, cached - 1) * stride, 0, size, quarter);
        // A head has no more numbers than a block has threads.
        u32 own_pair = threadIdx.x % max(dims / 2, 1u);
        float2 angle = make_float2(0.0f, 0.0f);
        if (fresh && threadIdx.x < dims)
            angle = __ldg((const float2 *)op.table + (u64)step.past * (dims / 2) + own_pair);
        // Of heads that share keys, the first stores them.
        const bool first = fresh && (head == 0 || (offset + head - 1) / group != kv);
        u16 new_value = 0;
        if (threadIdx.x < size) {
            u32 i = threadIdx.x;
            float asked, key = 0.0f, value = 0.0f;
            u32 spins = 0;
            do {
                asked = load_relaxed((const float *)op.queries + ((u64)row * heads + head) * size + i);
                if (fresh) {
                    key = load_relaxed((const float *)op.new_keys + kv * size + i);
                    value = load_relaxed((const float *)op.new_values + kv * size + i);
                }
                if (++spins > MOST_SPINS) __trap();
            } while (op.is_awaiting && !(is_written(asked) && is_written(key) && is_written(value)));
            query[i] = asked;
            new_key[i] = key;
            new_value = to_half(value);
            if (first) ((u16 *)(values + step.past * stride))[i] = new_value;
        }
        __syncthreads();
        if (fresh) {
            const u32 i = threadIdx.x;
            auto store = [&](u32 at) {
                u16 bits = to_half(new_key[at]);
                key_bits[at] = bits;
                if (first) ((u16 *)(keys + step.past * stride))[at] = bits;
            };
            if (i < dims / 2) {
                rotate_pair(query, own_pair, dims, op.pairs, angle);
            } else if (i < dims) {
                rotate_pair(new_key, own_pair, dims, op.pairs, angle);
                store(op.pairs ? own_pair : 2 * own_pair);
                store(op.pairs ? own_pair + dims / 2 : 2 * own_pair + 1);
            } else if (i < size) {
                store(i);
            }
            __syncthreads();
        }
        const Attention attention = {query, keys, fresh ? (const u8 *)key_bits : nullptr, stride, positions, size, scale};
        float own = size == 128 ? scores_of<true>(attention, first_key, scores) : scores_of<false>(attention, first_key, scores);
        // Four lanes have the same.
        for (int by = 16; by > 2; by /= 2) {
            float other = __shfl_xor_sync(~0u, own, by);
            own = other > own ? other : own;
        }
        if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
        __syncthreads();
        float largest = most[0];
        for (int i = 1; i < WARPS; i++) largest = most[i] > largest ? most[i] : largest;
        for (u32 at = threadIdx.x; at < positions; at += THREADS) scores[at] = power_of_e(scores[at] - largest);
        __syncthreads();
        // Every warp adds for itself: half of it has the sixteen lanes, and the other half the same.
        float sum = 0.0f;
#pragma unroll 4
        for (u32 at = threadIdx.x % 16; at < positions; at += 16) sum = sum + scores[at];
        for (int half = 8; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half, 16);
        sum = __shfl_sync(~0u, sum, 0);
        __syncthreads();
        for (u32 at = threadIdx.x; at < positions; at += THREADS) scores[at] = scores[at] / sum;
        // Values are copied to shared memory in tiles, the first of which was started at the beginning. Each thread has a
        // number of the head and adds up runs. Runs are added from the first.
        const u32 groups = THREADS / size, mine = threadIdx.x / size, dim = threadIdx.x % size;
        float total = 0.0f;
        for (u32 tile = 0; tile < positions; tile += NEAR) {
            u32 count = min(NEAR, positions - tile);
            if (tile > 0) {
                __syncthreads();
                copy_values(values, stride, size, tile, min(count, cached > tile ? cached - tile : 0), near);
            }
            // The new one is put among them.
            if (fresh && step.past - tile < count && threadIdx.x < size)
                ((u16 *)near)[(step.past - tile) * size + threadIdx.x] = new_value;
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            const u16 *value = (const u16 *)near + dim;
            for (u32 from = mine * RUN; mine < groups && from < count; from += groups * RUN) {
                float part = 0.0f;
                const u32 to = min(from + RUN, count);
                const u16 *some = value + from * size;
                u32 at = from;
                for (; at + 16 <= to; at += 16, some += 16 * size) part = add_values<16>(part, scores + tile + at, some, size);
                for (; at + 4 <= to; at += 4, some += 4 * size) part = add_values<4>(part, scores + tile + at, some, size);
                for (; at < to; at++, some += size) part = part + scores[tile + at] * half_of(*some);
                parts[from / RUN * size + dim] = part;
            }
            __syncthreads();
            if (mine == 0)
                for (u32 run = 0; run * RUN < count; run++) total = total + parts[run * size + dim];
        }
        u64 place = ((u64)row * heads + head) * size;
        if (mine == 0) {
            publish((float *)op.into + place + dim, total);
            if (op.store) ((float *)op.store)[place + dim] = total;
            query[dim] = total;
        }
        __syncthreads();
        if (op.block_quant == Q8_0) {
            u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            for (u32 at = warp; at < size / 32; at += WARPS) {
                int byte;
                float rounded = round_values<1>(query + at * 32 + lane, &byte);
                u8 *block = (u8 *)op.blocks + (place / 32 + at) * 34;
                block[2 + lane] = (u8)byte;
                if (lane == 0) *(u16 *)block = to_half(rounded);
            }
        }
    }
}

// Prefetches the part of the KV cache that this block will attend to.
__device__ __forceinline__ void prefetch_kv(const Attend &op, const Step &step) {
    const u32 size = op.head_size, head = blockIdx.x;
    if (op.rows != 1 || head >= op.heads) return;
    const u64 stride = (u64)op.kv_heads * size * 2, start = (u64)((op.offset + head) / op.group) * size * 2;
    for (u32 at = threadIdx.x; at < step.past; at += THREADS)
        for (u32 off = 0; off < size * 2; off += 128) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(op.keys + start + at * stride + off));
            asm volatile("prefetch.global.L2 [%0];" :: "l"(op.values + start + at * stride + off));
        }
}
