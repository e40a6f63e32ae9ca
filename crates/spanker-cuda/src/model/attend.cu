// SPDX-License-Identifier: Apache-2.0
// The KV cache in blocks, and attention over it.
//
// A block has 64 positions of a sequence. Of each head it has the keys, number by number, and then the values, position by
// position; as Q8_0 the scales follow each in the same order. A warp has a block of keys: two positions in each lane, whose
// scores are sums from the first number on. Blocks become a largest score, a sum of weights and a row of values by
// themselves, and are put together from the first.

// Where a row of the step lies. Nobody writes the tables of a step while the kernel runs.
__device__ __forceinline__ RowAt row_at(u64 rows, u32 row) {
    const uint2 at = __ldg((const uint2 *)rows + row);
    return {at.x, at.y};
}

__device__ __forceinline__ bool is_short(u32 quant) { return quant == Q8_0; }

// One head's keys and values in the blocks of a sequence.
struct KvHead {
    u8 *cache;
    const u32 *table;
    // Bytes of a block, and of one head's keys in it, or of its values.
    u64 block;
    u32 half, size, quant;

    // Its keys in a block of the sequence. Values follow.
    __device__ __forceinline__ u8 *keys(u32 index) const { return cache + __ldg(table + index) * block; }
};

__device__ __forceinline__ KvHead kv_head(u64 cache, u64 tables, u32 table, u32 heads, u32 head, u32 size, u32 quant) {
    const u32 half = KV_BLOCK * (is_short(quant) ? size / 32 * 34 : size * 2);
    return {(u8 *)cache + (u64)head * 2 * half, (const u32 *)tables + table, (u64)heads * 2 * half, half, size, quant};
}

// Stores a rounded number of a key or value in a block, and the scale of 32 with the first of them.
__device__ __forceinline__ void store_number(const KvHead &kv, u8 *base, u32 slot, bool is_key, u32 number, u16 bits, u16 scale) {
    const u32 at = is_key ? number * KV_BLOCK + slot : slot * kv.size + number, run = number / 32;
    if (!is_short(kv.quant)) {
        ((u16 *)base)[at] = bits;
        return;
    }
    base[at] = (u8)bits;
    if (number % 32 == 0)
        ((u16 *)(base + KV_BLOCK * kv.size))[is_key ? run * KV_BLOCK + slot : slot * (kv.size / 32) + run] = scale;
}

// Rounds a number of a key or value, one of 32 for each lane of a warp, and stores it if it `is_stored`, and in a copy of its
// block if there is one. Numbers from the head's size on are not there. Returns the number as it is read.
__device__ __forceinline__ float keep_number(const KvHead &kv, u32 position, bool is_key, u32 number, float value,
                                             bool is_stored, u8 *copy) {
    const u32 slot = position % KV_BLOCK;
    u16 bits, scale = 0;
    float kept;
    if (is_short(kv.quant)) {
        int byte;
        scale = to_half(round_values<1>(&value, &byte));
        bits = (u16)(u8)byte;
        kept = half_of(scale) * (float)byte;
    } else {
        bits = to_half(value);
        kept = half_of(bits);
    }
    if (number >= kv.size) return kept;
    if (is_stored) {
        u8 *base = kv.keys(position / KV_BLOCK) + (is_key ? 0 : kv.half);
        store_number(kv, base, slot, is_key, number, bits, scale);
    }
    if (copy) store_number(kv, copy, slot, is_key, number, bits, scale);
    return kept;
}

// Rotary embedding of a pair of numbers of a head.
__device__ __forceinline__ void rotate_pair(float *head, u32 pair, u32 dims, u32 halves, float2 angle) {
    u32 one = halves ? pair : 2 * pair, two = halves ? pair + dims / 2 : 2 * pair + 1;
    float cos = angle.x, sin = angle.y, a = head[one], b = head[two];
    head[one] = a * cos - b * sin;
    head[two] = a * sin + b * cos;
}

// Numbers of a key that are in registers at a time, three times. A head has a multiple of them.
#define KEY_PART 8

// These of two positions: a lane of a warp has a pair of positions of a block.
struct KeyPart {
    u32 pairs[KEY_PART];
};

// Keys of a layer are read after they were written and not before, so that the first-level cache has none that are out of
// date.
template <bool SHORT> __device__ __forceinline__ KeyPart key_part(const u8 *keys, u32 begin) {
    const u32 lane = threadIdx.x % 32;
    KeyPart k;
#pragma unroll
    for (int i = 0; i < KEY_PART; i++) {
        const u32 at = (begin + i) * (KV_BLOCK / 2) + lane;
        k.pairs[i] = SHORT ? ((const u16 *)keys)[at] : ((const u32 *)keys)[at];
    }
    return k;
}

// Sums of products of a query and the keys of a lane's two positions, number by number, and of a new key, if there is one.
struct Scores {
    float one, two, fresh;
};

// Adds the products of one number of a query.
template <bool SHORT> __device__ __forceinline__ void add_pair(Scores &s, float q, u32 pair, float by_one, float by_two) {
    s.one = s.one + q * (SHORT ? by_one * (float)(i8)(pair & 0xff) : half_of(pair & 0xffff));
    s.two = s.two + q * (SHORT ? by_two * (float)(i8)(pair >> 8) : half_of(pair >> 16));
}

template <bool SHORT, bool NEW>
__device__ __forceinline__ Scores scores_of(const float *query, const u8 *keys, const float *new_key, u32 size) {
    const u32 *scales = (const u32 *)(keys + KV_BLOCK * size) + threadIdx.x % 32;
    Scores s = {0.0f, 0.0f, 0.0f};
    // Two parts are on their way while one is used.
    KeyPart k = key_part<SHORT>(keys, 0), next = key_part<SHORT>(keys, KEY_PART);
    for (u32 begin = 0; begin < size; begin += KEY_PART) {
        KeyPart after = next;
        if (begin + 2 * KEY_PART < size) after = key_part<SHORT>(keys, begin + 2 * KEY_PART);
        const u32 both = SHORT ? scales[begin / 32 * (KV_BLOCK / 2)] : 0;
        const float by_one = half_of(both & 0xffff), by_two = half_of(both >> 16);
#pragma unroll
        for (int i = 0; i < KEY_PART; i++) {
            const float q = query[begin + i];
            add_pair<SHORT>(s, q, k.pairs[i], by_one, by_two);
            if (NEW) s.fresh = s.fresh + q * new_key[begin + i];
        }
        k = next, next = after;
    }
    return s;
}

// The same of a block that is in shared memory, with its new key.
template <bool SHORT> __device__ __forceinline__ Scores near_scores(const float *query, const u8 *keys, u32 size) {
    const u32 lane = threadIdx.x % 32;
    const u32 *scales = (const u32 *)(keys + KV_BLOCK * size) + lane;
    Scores s = {0.0f, 0.0f, 0.0f};
    for (u32 begin = 0; begin < size; begin += 16) {
        const u32 both = SHORT ? scales[begin / 32 * (KV_BLOCK / 2)] : 0;
        const float by_one = half_of(both & 0xffff), by_two = half_of(both >> 16);
        float4 q[4];
        u32 pairs[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 at = (begin + i) * (KV_BLOCK / 2) + lane;
            if (i % 4 == 0) q[i / 4] = ((const float4 *)(query + begin))[i / 4];
            pairs[i] = SHORT ? ((const u16 *)keys)[at] : ((const u32 *)keys)[at];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            add_pair<SHORT>(s, q[i].x, pairs[4 * i], by_one, by_two);
            add_pair<SHORT>(s, q[i].y, pairs[4 * i + 1], by_one, by_two);
            add_pair<SHORT>(s, q[i].z, pairs[4 * i + 2], by_one, by_two);
            add_pair<SHORT>(s, q[i].w, pairs[4 * i + 3], by_one, by_two);
        }
    }
    return s;
}

// Scores of a block's positions become weights. Of the positions, so many are seen. Returns the largest score and the sum of
// weights.
__device__ __forceinline__ float2 weigh(Scores s, float scale, u32 seen, float2 *weights) {
    const u32 lane = threadIdx.x % 32;
    const float least = -__uint_as_float(0x7f800000u);
    const float one = 2 * lane < seen ? s.one * scale : least, two = 2 * lane + 1 < seen ? s.two * scale : least;
    float most = one > least ? one : least;
    most = two > most ? two : most;
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(~0u, most, by);
        most = other > most ? other : most;
    }
    const float a = 2 * lane < seen ? power_of_e(one - most) : 0.0f;
    const float b = 2 * lane + 1 < seen ? power_of_e(two - most) : 0.0f;
    weights[lane] = make_float2(a, b);
    // Of sixteen lanes each adds every sixteenth weight; then lanes are added in halves. A lane of the warp has two of them.
    float x = 0.0f, y = 0.0f;
    for (int i = 0; i < 4; i++) {
        x = x + __shfl_sync(~0u, a, lane % 8 + 8 * i);
        y = y + __shfl_sync(~0u, b, lane % 8 + 8 * i);
    }
    for (int by = 4; by > 0; by /= 2) {
        x = x + __shfl_xor_sync(~0u, x, by);
        y = y + __shfl_xor_sync(~0u, y, by);
    }
    return make_float2(most, x + y);
}

// Copies values of some positions, from the beginning of a block on, to shared memory, asynchronously.
__device__ __forceinline__ void copy_values(const KvHead &kv, u32 first, u32 count, u8 *near) {
    const u32 to = shared_address(near), whole = KV_BLOCK * kv.size;
    const bool is_whole = !is_short(kv.quant);
    // A position's numbers, in parts of 16 bytes, and the parts of a block before its scales.
    const u32 parts = kv.size / (is_whole ? 8 : 16), numbers = KV_BLOCK * parts;
    for (u32 i = threadIdx.x; i < count * parts; i += THREADS) {
        const u32 block = i / numbers, at = i % numbers * 16;
        copy_async(to + block * kv.half + at, kv.keys(first / KV_BLOCK + block) + kv.half + at);
    }
    if (is_whole) return;
    const u32 scales = (kv.half - whole) / 16;
    for (u32 i = threadIdx.x; i < (count + KV_BLOCK - 1) / KV_BLOCK * scales; i += THREADS) {
        const u32 block = i / scales, at = whole + i % scales * 16;
        copy_async(to + block * kv.half + at, kv.keys(first / KV_BLOCK + block) + kv.half + at);
    }
}

// Positions whose keys are in shared memory, where the values of `near` are.
__device__ __forceinline__ u32 near_keys(u32 near) { return near / 2 / KV_BLOCK * KV_BLOCK; }

// Copies the keys of a sequence's first blocks, with all of their slots, to shared memory, asynchronously.
__device__ __forceinline__ void copy_keys(const KvHead &kv, u32 count, u8 *near) {
    const u32 to = shared_address(near), parts = kv.half / 16, blocks = (count + KV_BLOCK - 1) / KV_BLOCK;
    for (u32 i = threadIdx.x; i < blocks * parts; i += THREADS) {
        const u32 block = i / parts, at = i % parts * 16;
        copy_async(to + block * kv.half + at, kv.keys(block) + at);
    }
}

// Adds COUNT values of a block, each times its weight, one after the other. `near` has the block, `at` is the first position.
template <bool SHORT, u32 COUNT>
__device__ __forceinline__ float add_values(float sum, const float *weights, const u8 *near, u32 at, u32 size, u32 dim) {
    float values[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        const u32 place = (at + i) * size + dim;
        if (SHORT) {
            const u16 scale = ((const u16 *)(near + KV_BLOCK * size))[(at + i) * (size / 32) + dim / 32];
            values[i] = half_of(scale) * (float)(i8)near[place];
        } else {
            values[i] = half_of(((const u16 *)near)[place]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) sum = sum + weights[at + i] * values[i];
    return sum;
}

// So many values of a block.
template <bool SHORT>
__device__ __forceinline__ float add_block(const float *weights, const u8 *near, u32 count, u32 size, u32 dim) {
    float sum = 0.0f;
    u32 at = 0;
    for (; at + 16 <= count; at += 16) sum = add_values<SHORT, 16>(sum, weights, near, at, size, dim);
    for (; at + 4 <= count; at += 4) sum = add_values<SHORT, 4>(sum, weights, near, at, size, dim);
    for (; at < count; at++) sum = add_values<SHORT, 1>(sum, weights, near, at, size, dim);
    return sum;
}

// What attention has in shared memory.
struct Attending {
    // A query, and the key and value of a new position as they are read.
    float *query, *new_key, *new_value;
    // Of each warp's block, the largest score and the sum of weights, and what those before it and it are multiplied with.
    float2 *blocks, *factors;
    // Rows of values of blocks that are near, their values, and keys of the first blocks.
    float *rows;
    u8 *near, *keys;
    float *weights;
};

__device__ __forceinline__ Attending attending(u8 *memory, u32 size, u32 near, u32 half) {
    Attending a;
    a.query = (float *)memory;
    a.new_key = a.query + size;
    a.new_value = a.new_key + size;
    a.blocks = (float2 *)(a.new_value + size);
    a.factors = a.blocks + WARPS;
    a.rows = (float *)(a.factors + WARPS);
    a.near = (u8 *)(a.rows + near / KV_BLOCK * size);
    a.keys = a.near + near / KV_BLOCK * half;
    a.weights = (float *)(a.keys + near_keys(near) / KV_BLOCK * half);
    return a;
}

// Where a head of a row is in its sequence. Of the positions that it sees, so many are in the KV cache; one more may be new.
struct Seen {
    u32 row, head, kv, position, positions, cached;
    // Of heads that share keys, the first stores a new one.
    bool stores;
};

// A row's query becomes ready, and with a new position its key and value: rotated, rounded and stored.
__device__ __forceinline__ void query_of(const Attend &op, const KvHead &kv, const Seen &seen, const Attending &a) {
    const u32 size = op.head_size, dims = op.dims, i = threadIdx.x, fresh = op.is_fresh;
    // A head has no more numbers than a block has threads.
    const u32 pair = i % max(dims / 2, 1u);
    float2 angle = make_float2(0.0f, 0.0f);
    if (fresh && i < dims) angle = __ldg((const float2 *)op.table + (u64)seen.position * (dims / 2) + pair);
    if (i < size) {
        float asked, key = 0.0f, value = 0.0f;
        u32 spins = 0;
        do {
            asked = load_relaxed((const float *)op.queries + ((u64)seen.row * op.heads + seen.head) * size + i);
            if (fresh) {
                key = load_relaxed((const float *)op.new_keys + seen.kv * size + i);
                value = load_relaxed((const float *)op.new_values + seen.kv * size + i);
            }
            if (++spins > MOST_SPINS) __trap();
        } while (op.is_awaiting && !(is_written(asked) && is_written(key) && is_written(value)));
        a.query[i] = asked;
        if (fresh) a.new_key[i] = key, a.new_value[i] = value;
    }
    // Keys that are near are there before a new one comes among them.
    await_all_copies();
    __syncthreads();
    if (!fresh) return;
    if (i < dims / 2) rotate_pair(a.query, pair, dims, op.pairs, angle);
    else if (i < dims) rotate_pair(a.new_key, pair, dims, op.pairs, angle);
    __syncthreads();
    const u32 runs = (size + 31) / 32, lane = i % 32;
    const bool is_near = seen.position < near_keys(op.near);
    for (u32 run = i / 32; run < 2 * runs; run += WARPS) {
        const bool is_key = run < runs;
        const u32 number = run % runs * 32 + lane;
        float *from = is_key ? a.new_key : a.new_value;
        const float value = number < size ? from[number] : 0.0f;
        u8 *copy = is_near && is_key ? a.keys + seen.position / KV_BLOCK * kv.half : nullptr;
        const float kept = keep_number(kv, seen.position, is_key, number, value, seen.stores, copy);
        if (number < size) from[number] = kept;
    }
    __syncthreads();
}

// Weights of the warp's block from `first` on, if the row sees it.
template <bool SHORT>
__device__ __forceinline__ void weigh_block(const Attend &op, const KvHead &kv, const Seen &seen, const Attending &a,
                                            u32 first) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, start = first + warp * KV_BLOCK;
    if (start >= seen.positions) return;
    const u32 count = min((u32)KV_BLOCK, seen.positions - start), last = seen.positions - 1;
    const bool has_new = seen.cached < seen.positions && last - start < KV_BLOCK, is_near = start < near_keys(op.near);
    const u8 *keys = is_near ? nullptr : kv.keys(start / KV_BLOCK);
    Scores s;
    if (is_near) {
        s = near_scores<SHORT>(a.query, a.keys + start / KV_BLOCK * kv.half, op.head_size);
    } else if (has_new) {
        s = scores_of<SHORT, true>(a.query, keys, a.new_key, op.head_size);
        if (start + 2 * lane == last) s.one = s.fresh;
        if (start + 2 * lane + 1 == last) s.two = s.fresh;
    } else {
        s = scores_of<SHORT, false>(a.query, keys, a.new_key, op.head_size);
    }
    const float2 block = weigh(s, __uint_as_float(op.scale), count, (float2 *)(a.weights + warp * KV_BLOCK));
    if (lane == 0) a.blocks[warp] = block;
}

// One head of one row. Threads of the first group return a number of the head each.
template <bool SHORT>
__device__ __forceinline__ float attend_head(const Attend &op, const KvHead &kv, const Seen &seen, const Attending &a) {
    const u32 size = op.head_size, NEAR = op.near;
    // The first keys and values are loaded while other blocks still write the query.
    copy_keys(kv, min(near_keys(NEAR), seen.cached), a.keys);
    copy_values(kv, 0, min(NEAR, seen.cached), a.near);
    query_of(op, kv, seen, a);
    // Each thread has a number of the head, and groups of threads share the blocks.
    const u32 groups = THREADS / size, mine = threadIdx.x / size, dim = threadIdx.x % size;
    float total = 0.0f, sum = 0.0f, most = -__uint_as_float(0x7f800000u);
    for (u32 first = 0; first < seen.positions; first += WARPS * KV_BLOCK) {
        if (first > 0) __syncthreads();
        weigh_block<SHORT>(op, kv, seen, a, first);
        __syncthreads();
        const u32 end = min(seen.positions, first + WARPS * KV_BLOCK), count = (end - first + KV_BLOCK - 1) / KV_BLOCK;
        // What is multiplied when a block comes to those before it; they wait for the next barrier.
        if (threadIdx.x < count) {
            float before = most;
            for (u32 i = 0; i < threadIdx.x; i++) before = a.blocks[i].x > before ? a.blocks[i].x : before;
            const float own = a.blocks[threadIdx.x].x, largest = own > before ? own : before;
            a.factors[threadIdx.x] = make_float2(power_of_e(before - largest), power_of_e(own - largest));
        }
        for (u32 i = 0; i < count; i++) most = a.blocks[i].x > most ? a.blocks[i].x : most;
        for (u32 tile = first; tile < end; tile += NEAR) {
            const u32 some = min(NEAR, end - tile), kept = min(some, seen.cached > tile ? seen.cached - tile : 0);
            if (tile > 0) {
                __syncthreads();
                copy_values(kv, tile, kept, a.near);
            }
            await_all_copies();
            __syncthreads();
            for (u32 from = mine * KV_BLOCK; mine < groups && from < some; from += groups * KV_BLOCK) {
                const float *weights = a.weights + tile - first + from;
                const u32 there = kept > from ? min((u32)KV_BLOCK, kept - from) : 0;
                float row = add_block<SHORT>(weights, a.near + from / KV_BLOCK * kv.half, there, size, dim);
                // A new value comes last.
                if (there < min((u32)KV_BLOCK, some - from)) row = row + weights[there] * a.new_value[dim];
                a.rows[from / KV_BLOCK * size + dim] = row;
            }
            __syncthreads();
            if (mine == 0)
                for (u32 at = 0; at * KV_BLOCK < some; at++) {
                    const u32 block = (tile - first) / KV_BLOCK + at;
                    const float2 by = a.factors[block];
                    sum = sum * by.x + a.blocks[block].y * by.y;
                    total = total * by.x + a.rows[at * size + dim] * by.y;
                }
        }
    }
    return total / sum;
}

// Queries of a tile, which go through the blocks of a sequence together. Fewer rows of it are done one by one.
#define TILE_QUERIES 64
#define FEWEST_QUERIES 16

// Whether the rows of a tile are of one sequence, one position after the other, and enough of them.
__device__ __forceinline__ bool is_tile(const Attend &op, u32 tile) {
    const u32 row = tile * TILE_QUERIES, count = min((u32)TILE_QUERIES, op.rows - row);
    if (!op.is_tiled || count < FEWEST_QUERIES) return false;
    const RowAt one = row_at(op.at, row), last = row_at(op.at, row + count - 1);
    return one.table == last.table && one.position + count - 1 == last.position;
}

__device__ __forceinline__ void attend(const Attend &op, u8 *memory) {
    const u32 heads = op.heads, size = op.head_size;
    for (u32 unit = blockIdx.x; unit < op.rows * heads; unit += gridDim.x) {
        if (is_tile(op, unit / heads / TILE_QUERIES)) continue;
        Seen seen;
        seen.row = unit / heads, seen.head = unit % heads, seen.kv = (op.offset + seen.head) / op.group;
        const RowAt at = row_at(op.at, seen.row);
        seen.position = at.position, seen.positions = at.position + 1;
        seen.cached = op.is_fresh ? seen.position : seen.positions;
        seen.stores = seen.head == 0 || (op.offset + seen.head - 1) / op.group != seen.kv;
        const KvHead kv = kv_head(op.cache, op.tables, at.table, op.kv_heads, seen.kv, size, op.quant);
        const Attending a = attending(memory, size, op.near, kv.half);
        __syncthreads();
        const float total = is_short(op.quant) ? attend_head<true>(op, kv, seen, a) : attend_head<false>(op, kv, seen, a);
        const u64 place = ((u64)seen.row * heads + seen.head) * size;
        if (threadIdx.x < size) {
            publish((float *)op.into + place + threadIdx.x, total);
            if (op.store) ((float *)op.store)[place + threadIdx.x] = total;
            a.query[threadIdx.x] = total;
        }
        __syncthreads();
        if (op.block_quant == Q8_0) {
            u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            for (u32 at = warp; at < size / 32; at += WARPS) {
                int byte;
                float rounded = round_values<1>(a.query + at * 32 + lane, &byte);
                u8 *block = (u8 *)op.blocks + (place / 32 + at) * 34;
                block[2 + lane] = (u8)byte;
                if (lane == 0) *(u16 *)block = to_half(rounded);
            }
        }
    }
}

// Prefetches the blocks of the KV cache that this block of the kernel will attend to.
__device__ __forceinline__ void prefetch_kv(const Attend &op) {
    const u32 head = blockIdx.x;
    if (op.rows != 1 || head >= op.heads) return;
    const RowAt at = row_at(op.at, 0);
    const KvHead kv = kv_head(op.cache, op.tables, at.table, op.kv_heads, (op.offset + head) / op.group, op.head_size, op.quant);
    const u32 lines = (2 * kv.half + 127) / 128, count = (at.position + KV_BLOCK - 1) / KV_BLOCK * lines;
    for (u32 i = threadIdx.x; i < count; i += THREADS) prefetch_line((u64)(kv.keys(i / lines)) + i % lines * 128);
}
