// SPDX-License-Identifier: Apache-2.0
// Attention of many rows of one sequence: tiles of queries go through the blocks of the KV cache together.
//
// A thread has four queries and four positions of a block, and then the same queries with some numbers of a head. Sums are
// added in the order that one row has them in, without tensor cores: a product and a sum, both rounded, for each number.
// That is what bounds it: two instructions for each query, position and number of keys, and again of values.

#ifndef STREAM

// How far a row of numbers of all queries is from the next: so that few are in the same bank.
#define TILE_STRIDE (TILE_QUERIES + 4)

// What a tile has in shared memory: queries and keys number by number, or values position by position, and weights position
// by position.
struct AttendTile {
    float *queries, *near, *weights;
};

// Rows of one head of a sequence.
struct TileRows {
    u32 row, count, head, position;
};

__device__ __forceinline__ void store_four(float *to, float a, float b, float c, float d) {
    *(float4 *)to = {a, b, c, d};
}

// Eight numbers of the cache that follow each other, with their scales, on their way to shared memory.
template <bool SHORT> struct CacheEight {
    uint4 numbers, scales;

    __device__ __forceinline__ void load(const u8 *from, u32 at) {
        if (SHORT) numbers.x = read((const u32 *)(from + at)), numbers.y = read((const u32 *)(from + at) + 1);
        else numbers = read((const uint4 *)(from + at * 2));
    }

    // Scales are as many as numbers, or one is for all.
    __device__ __forceinline__ void widen(float out[8], bool has_own) const {
        const u32 words[4] = {numbers.x, numbers.y, numbers.z, numbers.w}, by[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 scale = has_own ? by[i / 2] >> (16 * (i % 2)) & 0xffff : by[0];
            out[i] = SHORT ? half_of(scale) * (float)(i8)(words[i / 4] >> (8 * (i % 4)))
                           : half_of(words[i / 2] >> (16 * (i % 2)) & 0xffff);
        }
    }
};

// A thread's part of the keys or values of a block.
template <u32 SIZE, bool SHORT> struct CachePart {
    CacheEight<SHORT> eights[SIZE * KV_BLOCK / 8 / THREADS];
};
#define PART_EIGHTS (SIZE * KV_BLOCK / 8 / THREADS)

template <u32 SIZE, bool SHORT> __device__ __forceinline__ void load_keys(const u8 *keys, CachePart<SIZE, SHORT> &part) {
#pragma unroll
    for (u32 i = 0; i < PART_EIGHTS; i++) {
        const u32 at = threadIdx.x + i * THREADS, number = at / 8, slot = at % 8 * 8;
        part.eights[i].load(keys, number * KV_BLOCK + slot);
        if (SHORT) part.eights[i].scales = read((const uint4 *)(keys + KV_BLOCK * SIZE + (number / 32 * KV_BLOCK + slot) * 2));
    }
}

// Keys as f32, number by number. Four positions 16 apart are next to each other: a lane has them.
template <u32 SIZE, bool SHORT> __device__ __forceinline__ void store_keys(const CachePart<SIZE, SHORT> &part, float *near) {
#pragma unroll
    for (u32 i = 0; i < PART_EIGHTS; i++) {
        const u32 at = threadIdx.x + i * THREADS, number = at / 8, slot = at % 8 * 8;
        float v[8];
        part.eights[i].widen(v, true);
#pragma unroll
        for (u32 j = 0; j < 8; j++) near[number * TILE_STRIDE + (slot + j) % 16 * 4 + slot / 16] = v[j];
    }
}

// Values of a block's first positions; of the others zeros.
template <u32 SIZE, bool SHORT>
__device__ __forceinline__ void load_values(const u8 *values, u32 there, CachePart<SIZE, SHORT> &part) {
#pragma unroll
    for (u32 i = 0; i < PART_EIGHTS; i++) {
        const u32 at = threadIdx.x + i * THREADS, slot = at / (SIZE / 8), number = at % (SIZE / 8) * 8;
        part.eights[i] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (slot >= there) continue;
        part.eights[i].load(values, slot * SIZE + number);
        if (SHORT) part.eights[i].scales.x = read((const u16 *)(values + KV_BLOCK * SIZE) + slot * (SIZE / 32) + number / 32);
    }
}

// Values as f32, position by position.
template <u32 SIZE, bool SHORT> __device__ __forceinline__ void store_values(const CachePart<SIZE, SHORT> &part, float *near) {
#pragma unroll
    for (u32 i = 0; i < PART_EIGHTS; i++) {
        float v[8];
        part.eights[i].widen(v, false);
        float *to = near + (threadIdx.x + i * THREADS) * 8;
        store_four(to, v[0], v[1], v[2], v[3]);
        store_four(to + 4, v[4], v[5], v[6], v[7]);
    }
}

// Scores of four queries with a block become weights in shared memory. Returns for each the block's largest score and the
// sum of weights; 16 lanes have the same queries.
__device__ __forceinline__ void weigh_tile(float scores[4][4], float scale, const u32 seen[4], float *weights,
                                           float2 blocks[4]) {
    const u32 part = threadIdx.x % 16, first = threadIdx.x / 16 * 4;
    const float least = -__uint_as_float(0x7f800000u);
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        float most = least;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float score = scores[q][i] * scale;
            scores[q][i] = part + 16 * i < seen[q] ? score : least;
            most = scores[q][i] > most ? scores[q][i] : most;
        }
        for (int by = 8; by > 0; by /= 2) {
            const float other = __shfl_xor_sync(~0u, most, by);
            most = other > most ? other : most;
        }
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            scores[q][i] = part + 16 * i < seen[q] ? power_of_e(scores[q][i] - most) : 0.0f;
            sum = sum + scores[q][i];
        }
        for (int by = 8; by > 0; by /= 2) sum = sum + __shfl_xor_sync(~0u, sum, by);
        blocks[q] = make_float2(most, sum);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        store_four(weights + (part + 16 * i) * TILE_STRIDE + first, scores[0][i], scores[1][i], scores[2][i], scores[3][i]);
}

// Attention of a tile.
template <u32 SIZE, bool SHORT>
__device__ APART void attend_tile(const Attend &op, const KvHead &kv, const TileRows &rows, u8 *memory) {
    // Numbers of a head of a thread: fours, 64 apart.
    constexpr u32 FOURS = SIZE / 64;
    AttendTile a;
    a.queries = (float *)memory;
    a.near = a.queries + SIZE * TILE_STRIDE;
    a.weights = a.near + SIZE * TILE_STRIDE;
    const u32 part = threadIdx.x % 16, first = threadIdx.x / 16 * 4, last = rows.position + rows.count - 1;
    const float scale = __uint_as_float(op.scale);
    __syncthreads();
    for (u32 i = threadIdx.x; i < SIZE * TILE_QUERIES; i += THREADS) {
        const u32 number = i % SIZE, query = i / SIZE, row = rows.row + min(query, rows.count - 1);
        a.queries[number * TILE_STRIDE + query] =
            read((const float *)op.queries + ((u64)row * op.heads + rows.head) * SIZE + number);
    }
    float total[4][FOURS * 4] = {}, most[4], sum[4];
#pragma unroll
    for (u32 q = 0; q < 4; q++) most[q] = -__uint_as_float(0x7f800000u), sum[q] = 0.0f;
    // Keys are loaded while values of the block before them are used, and values while keys are.
    CachePart<SIZE, SHORT> loaded;
    const u8 *keys = kv.keys(0);
    load_keys<SIZE, SHORT>(keys, loaded);
#pragma unroll 1
    for (u32 start = 0; start <= last; start += KV_BLOCK) {
        store_keys<SIZE, SHORT>(loaded, a.near);
        __syncthreads();
        load_values<SIZE, SHORT>(keys + kv.half, last + 1 - start, loaded);
        float scores[4][4] = {};
#pragma unroll 4
        for (u32 number = 0; number < SIZE; number++) {
            const float4 q = *(const float4 *)(a.queries + number * TILE_STRIDE + first);
            const float4 k = *(const float4 *)(a.near + number * TILE_STRIDE + part * 4);
            const float qs[4] = {q.x, q.y, q.z, q.w}, ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) scores[i][j] = scores[i][j] + qs[i] * ks[j];
        }
        u32 seen[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 end = rows.position + min(first + q, rows.count - 1) + 1;
            seen[q] = end > start ? min(end - start, (u32)KV_BLOCK) : 0;
        }
        float2 blocks[4];
        weigh_tile(scores, scale, seen, a.weights, blocks);
        // Keys have been used, and weights are there.
        __syncthreads();
        store_values<SIZE, SHORT>(loaded, a.near);
        __syncthreads();
        if (start + KV_BLOCK <= last) {
            keys = kv.keys(start / KV_BLOCK + 1);
            load_keys<SIZE, SHORT>(keys, loaded);
        }
        float row[4][FOURS * 4] = {};
        const u32 there = min((u32)KV_BLOCK, last + 1 - start);
#pragma unroll 2
        for (u32 slot = 0; slot < there; slot++) {
            const float4 w = *(const float4 *)(a.weights + slot * TILE_STRIDE + first);
            const float ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (u32 f = 0; f < FOURS; f++) {
                const float4 v = *(const float4 *)(a.near + slot * SIZE + f * 64 + part * 4);
#pragma unroll
                for (u32 q = 0; q < 4; q++) {
                    row[q][4 * f] = row[q][4 * f] + ws[q] * v.x;
                    row[q][4 * f + 1] = row[q][4 * f + 1] + ws[q] * v.y;
                    row[q][4 * f + 2] = row[q][4 * f + 2] + ws[q] * v.z;
                    row[q][4 * f + 3] = row[q][4 * f + 3] + ws[q] * v.w;
                }
            }
        }
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            if (seen[q] == 0) continue;
            const float own = blocks[q].x, largest = own > most[q] ? own : most[q];
            const float old = power_of_e(most[q] - largest), by = power_of_e(own - largest);
            most[q] = largest;
            sum[q] = sum[q] * old + blocks[q].y * by;
#pragma unroll
            for (u32 i = 0; i < FOURS * 4; i++) total[q][i] = total[q][i] * old + row[q][i] * by;
        }
        // Values have been used.
        __syncthreads();
    }
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        if (first + q >= rows.count) continue;
        float *out = (float *)op.into + ((u64)(rows.row + first + q) * op.heads + rows.head) * SIZE;
#pragma unroll
        for (u32 f = 0; f < FOURS; f++)
            store_four(out + f * 64 + part * 4, total[q][4 * f] / sum[q], total[q][4 * f + 1] / sum[q],
                       total[q][4 * f + 2] / sum[q], total[q][4 * f + 3] / sum[q]);
    }
}

// Attention of those rows that are tiles. The longest come first.
__device__ __forceinline__ void attend_tiles(const Attend &op, u8 *memory) {
    const u32 tiles = (op.rows + TILE_QUERIES - 1) / TILE_QUERIES;
    for (u32 unit = blockIdx.x; unit < tiles * op.heads; unit += gridDim.x) {
        TileRows rows;
        const u32 tile = tiles - 1 - unit / op.heads;
        if (!is_tile(op, tile)) continue;
        rows.row = tile * TILE_QUERIES, rows.head = unit % op.heads;
        rows.count = min((u32)TILE_QUERIES, op.rows - rows.row);
        const RowAt at = row_at(op.at, rows.row);
        rows.position = at.position;
        const u32 head = (op.offset + rows.head) / op.group;
        const KvHead kv = kv_head(op.cache, op.tables, at.table, op.kv_heads, head, op.head_size, op.quant);
        if (op.head_size == 64) {
            if (is_short(op.quant)) attend_tile<64, true>(op, kv, rows, memory);
            else attend_tile<64, false>(op, kv, rows, memory);
        } else if (is_short(op.quant)) {
            attend_tile<128, true>(op, kv, rows, memory);
        } else {
            attend_tile<128, false>(op, kv, rows, memory);
        }
    }
}
#endif
