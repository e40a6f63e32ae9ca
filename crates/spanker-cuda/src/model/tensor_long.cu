// SPDX-License-Identifier: Apache-2.0
// Many rows of inputs with weights in long blocks of 256, Q4_K, on tensor cores.
//
// A block has eight runs of 32 numbers, each with a scale and a minimum of its own. Their products are sums of integers below
// 2^22, which as floats are added, times their scales, exactly: four of them stay below 2^24, so that one rounding at the end
// gives what an integer would become. Minima times sums of inputs are one exact product of f16.
//
// What bounds it is the rate of instructions: 16 x 8 results of a run take a product of the tensor cores, and for each result
// two more; then six for each block.

#ifndef STREAM

// Bytes of a long block of inputs besides its numbers: sums of 16 numbers as f16, the scale, and nothing.
#define LONG_RECORD 48
#define LONG_RUNS 8
// Bytes of a block of weights, of which the first have its scales.
#define LONG_BYTES 144

// Long blocks of inputs, row by row, become packed ones: runs as short ones have them, and then a record for each block of
// each row.
__device__ APART void pack_long(const Pack &op) {
    const u32 units = units_of(op.width), rows = op.rows, blocks = units / LONG_RUNS;
    u8 *records = (u8 *)op.into + (u64)units * rows * 32;
    const u64 words = (u64)rows * units * 8;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)gridDim.x * THREADS) {
        const u32 word = i % 8, unit = i / 8 % units, row = i / 8 / units, run = unit % LONG_RUNS;
        const u8 *block = (const u8 *)op.from + ((u64)row * blocks + unit / LONG_RUNS) * 292;
        ((u32 *)op.into)[((u64)unit * rows + row) * 8 + word] = read((const u32 *)(block + 4) + run * 8 + word);
        u8 *record = records + ((u64)(unit / LONG_RUNS) * rows + row) * LONG_RECORD;
        if (word < 2) ((u16 *)record)[run * 2 + word] = to_half((float)(short)read((const u16 *)(block + 260) + run * 2 + word));
        if (word == 2 && run < 4) ((u32 *)record)[8 + run] = run == 0 ? read((const u32 *)block) : 0;
    }
}

// A tile, whose stage has a block of every row.
template <u32 ACROSS, u32 WIDE, u32 HIGH> struct LongTile {
    static constexpr u32 DOWN = WARPS / ACROSS, OUTS = ACROSS * WIDE * 16, ROWS = DOWN * HIGH * 8;
    // Four bits of two runs of all rows, and more, which keeps copies apart.
    static constexpr u32 PLANE = OUTS * 32 + 32, HEADS = 4 * PLANE, INPUTS = HEADS + OUTS * 16;
    static constexpr u32 RECORDS = INPUTS + LONG_RUNS * ROWS * 32, STAGE = RECORDS + ROWS * LONG_RECORD;
    // What is unpacked of one stage: scales of runs, and minima as pairs of f16.
    static constexpr u32 SCALES = 2 * STAGE, MINIMA = SCALES + LONG_RUNS * OUTS * 4;
};

template <class T> __device__ __forceinline__ void copy_block(const Matmul &op, u32 out, u32 row, u32 block, u8 *stage) {
    const u32 blocks = op.width / 256, to = shared_address(stage);
    const u8 *inputs = (const u8 *)op.packed, *records = inputs + (u64)op.width * op.rows;
    for (u32 i = threadIdx.x; i < T::OUTS * 9; i += THREADS) {
        const u32 part = i % 9, own = i / 9;
        const u64 at = (u64)min(out + own, op.outs - 1) * blocks + block;
        const u32 place = part == 0 ? T::HEADS + own * 16 : (part - 1) / 2 * T::PLANE + own * 32 + (part - 1) % 2 * 16;
        copy_async(to + place, (const u8 *)op.weights + at * LONG_BYTES + part * 16);
    }
    for (u32 i = threadIdx.x; i < T::ROWS * LONG_RUNS * 2; i += THREADS) {
        const u32 own = i / 2 % T::ROWS, unit = block * LONG_RUNS + i / 2 / T::ROWS;
        copy_async(to + T::INPUTS + i * 16, inputs + ((u64)unit * op.rows + min(row + own, op.rows - 1)) * 32 + i % 2 * 16);
    }
    for (u32 i = threadIdx.x; i < T::ROWS * 3; i += THREADS) {
        const u64 at = (u64)block * op.rows + min(row + i / 3, op.rows - 1);
        copy_async(to + T::RECORDS + i * 16, records + at * LONG_RECORD + i % 3 * 16);
    }
}

// Scales of a stage's runs as f32, and minima as pairs of f16.
template <class T> __device__ __forceinline__ void unpack_scales(const u8 *stage, u8 *memory) {
    for (u32 i = threadIdx.x; i < T::OUTS * LONG_RUNS; i += THREADS) {
        const u32 out = i % T::OUTS, run = i / T::OUTS;
        int scale, minimum;
        unpack_scale(*(const uint4 *)(stage + T::HEADS + out * 16), run, &scale, &minimum);
        ((float *)(memory + T::SCALES))[run * T::OUTS + out] = (float)scale;
        ((u32 *)(memory + T::MINIMA))[run * T::OUTS + out] = to_half((float)minimum) * 0x10001u;
    }
}

// Adds the terms of a stage's block to the results of a warp's 16 rows of weights.
template <class T, u32 HIGH>
__device__ __forceinline__ void add_long(const u8 *stage, const u8 *memory, u32 out, u32 row, float sums[HIGH][4]) {
    const u32 lane = threadIdx.x % 32, eighth = lane / 4, four = lane % 4;
    const float *scales = (const float *)(memory + T::SCALES) + out + eighth;
    const u8 *weights = stage + (out + eighth) * 32 + four * 8, *inputs = stage + T::INPUTS + (row + eighth) * 32 + four * 8;
    float halves[2][HIGH][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 pair = 0; pair < 2; pair++) {
            const u8 *plane = weights + (half * 2 + pair) * T::PLANE;
            const uint2 one = *(const uint2 *)plane, two = *(const uint2 *)(plane + 8 * 32);
#pragma unroll
            for (u32 which = 0; which < 2; which++) {
                const u32 run = half * 4 + pair * 2 + which, by = which * 4, M = 0x0f0f0f0fu;
                const u32 a[4] = {one.x >> by & M, two.x >> by & M, one.y >> by & M, two.y >> by & M};
                const float s[2] = {scales[run * T::OUTS], scales[run * T::OUTS + 8]};
#pragma unroll
                for (u32 j = 0; j < HIGH; j++) {
                    int p[4];
                    multiply_bytes(p, a, *(const uint2 *)(inputs + run * T::ROWS * 32 + j * 8 * 32), INTEGER_BITS);
#pragma unroll
                    for (u32 k = 0; k < 4; k++)
                        halves[half][j][k] =
                            __fmaf_rn(s[k / 2], __uint_as_float(p[k]) - INTEGER_ZERO, halves[half][j][k]);
                }
            }
        }
    const u32 *minima = (const u32 *)(memory + T::MINIMA) + out + eighth;
    const u32 m[4] = {minima[four * T::OUTS], minima[four * T::OUTS + 8], minima[(four + 4) * T::OUTS], minima[(four + 4) * T::OUTS + 8]};
    const u32 *heads = (const u32 *)(stage + T::HEADS) + (out + eighth) * 4;
    const u32 head[2] = {heads[0], heads[8 * 4]};
#pragma unroll
    for (u32 j = 0; j < HIGH; j++) {
        const u8 *record = stage + T::RECORDS + (row + j * 8) * LONG_RECORD;
        const u32 *of = (const u32 *)(record + eighth * LONG_RECORD);
        float least[4];
        multiply_more_halves(least, m, make_uint2(of[four], of[four + 4]));
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const float a = *(const float *)(record + (four * 2 + k % 2) * LONG_RECORD + 32);
            const float d = half_of(head[k / 2] & 0xffff), minimum = half_of(head[k / 2] >> 16);
            const float products = halves[0][j][k] + halves[1][j][k];
            sums[j][k] = sums[j][k] + (d * a * products - minimum * a * least[k]);
        }
    }
}

template <u32 ACROSS, u32 WIDE, u32 HIGH> __device__ APART void tensor_long_rows(const Matmul &op, u8 *memory) {
    using T = LongTile<ACROSS, WIDE, HIGH>;
    const u32 blocks = op.width / 256;
    const u32 across = (op.outs + T::OUTS - 1) / T::OUTS, down = (op.rows + T::ROWS - 1) / T::ROWS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 own_out = warp / T::DOWN * WIDE * 16, own_row = warp % T::DOWN * HIGH * 8;
    for (u32 tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        // Blocks that work at the same time share weights.
        const u32 first_row = tile % down * T::ROWS, first_out = tile / down * T::OUTS;
        float sums[WIDE][HIGH][4] = {};
        copy_block<T>(op, first_out, first_row, 0, memory);
        for (u32 block = 0; block < blocks; block++) {
            u8 *stage = memory + block % 2 * T::STAGE;
            await_all_copies();
            __syncthreads();
            // What was in the other stage has been multiplied.
            if (block + 1 < blocks) copy_block<T>(op, first_out, first_row, block + 1, memory + (block + 1) % 2 * T::STAGE);
            unpack_scales<T>(stage, memory);
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < WIDE; i++) add_long<T, HIGH>(stage, memory, own_out + i * 16, own_row, sums[i]);
        }
        const u32 out = first_out + own_out + lane / 4, row = first_row + own_row + lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < HIGH; j++)
#pragma unroll
            for (u32 i = 0; i < WIDE; i++)
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const u32 r = row + j * 8 + k % 2, o = out + i * 16 + k / 2 * 8;
                    if (r < op.rows && o < op.outs) ((float *)op.out)[(u64)r * op.outs + o] = sums[i][j][k];
                }
        // The next tile's first copies go where the last blocks of this one are.
        __syncthreads();
    }
}

__device__ __forceinline__ void tensor_long_tiles(const Matmul &op, u8 *memory) {
    if (op.tile_outs == 128) tensor_long_rows<4, 2, 4>(op, memory);
    else tensor_long_rows<2, 1, 2>(op, memory);
}
#endif
