// SPDX-License-Identifier: Apache-2.0
// Many rows of inputs on tensor cores.
//
// Products of blocks are sums of integers, which are exact in any order: tensor cores add them. What a block adds to a
// result is rounded in f32 and added in the order of the blocks, so that results have the bits that one row has.
//
// A tile of results is in registers. Blocks of 32 numbers of its rows of weights and of inputs come to shared memory some at
// a time, asynchronously, while those before them are multiplied.
//
// What bounds it is the rate of instructions: 16 x 8 results of a block take two products of the tensor cores, one of bytes
// and one of scales (which is exact as well: all but one of its terms are zero), and for each result three more: an integer
// becomes a float, and the term is rounded and added.

#ifndef STREAM

// Blocks of a row that are in shared memory at a time, and how many times that.
#define CHUNK 4
#define STAGES 3
// An integer below 2^22 is added to these bits: as a float they are this number, and it.
#define INTEGER_BITS 0x4b400000
#define INTEGER_ZERO 12582912.0f

// Inputs of products, as tensor cores read them: for each block of 32 numbers of a row those of all rows of inputs; and then
// scales, four of a row at a time, of an even number of rows. For weights of four bits, four numbers of the first half of a
// block and four of the second take turns.
struct Packed {
    const u8 *bytes;
    const u8 *scales;
};

__device__ __forceinline__ u32 even(u32 rows) { return (rows + 1) / 2 * 2; }

__device__ __forceinline__ Packed packed_at(u64 base, u32 rows, u32 units) {
    const u8 *bytes = (const u8 *)base;
    return {bytes, bytes + (u64)units * rows * 32};
}

// Blocks of inputs, row by row, become packed ones.
__device__ APART void pack(const Pack &op) {
    const u32 units = units_of(op.width), rows = op.rows;
    const Packed to = packed_at(op.into, rows, units);
    const u64 words = (u64)rows * units * 8;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)gridDim.x * THREADS) {
        const u32 word = i % 8, unit = i / 8 % units, row = i / 8 / units;
        const u16 *block = (const u16 *)op.from + ((u64)row * units + unit) * 17;
        const u32 low = read(block + 1 + 2 * word), high = read(block + 2 + 2 * word);
        const u32 place = op.is_interleaved ? word % 4 * 2 + word / 4 : word;
        ((u32 *)to.bytes)[((u64)unit * rows + row) * 8 + place] = low | high << 16;
        if (word == 0) ((u16 *)to.scales)[((u64)(unit / CHUNK) * even(rows) + row) * CHUNK + unit % CHUNK] = read(block);
    }
}

// A tile: warps side by side over rows of weights (and the rest over rows of inputs), and products of 16 x 8 results of each
// in both directions.
template <int TYPE, u32 ACROSS, u32 WIDE, u32 HIGH> struct Tile {
    static constexpr u32 DOWN = WARPS / ACROSS, OUTS = ACROSS * WIDE * 16, ROWS = DOWN * HIGH * 8;
    // Bytes of a block of weights without its scale, and of a block of each row. What is more keeps copies apart.
    static constexpr u32 BLOCK = TYPE == Q8_0 ? 32 : 16, PLANE = OUTS * BLOCK + 32, PARTS = BLOCK / 16;
    // Offsets in a stage.
    static constexpr u32 INPUTS = CHUNK * PLANE, SCALES = INPUTS + CHUNK * ROWS * 32;
    static constexpr u32 INPUT_SCALES = SCALES + CHUNK * OUTS * 2, STAGE = INPUT_SCALES + CHUNK * ROWS * 2;
    // Copies of 16 bytes, and those of a thread.
    static constexpr u32 COPIES = OUTS * CHUNK * PARTS, OWN = (COPIES + THREADS - 1) / THREADS;
    static constexpr u32 INPUT_COPIES = ROWS * CHUNK * 2, OWN_INPUTS = (INPUT_COPIES + THREADS - 1) / THREADS;
    // A product of bytes is what it stands for, so many times: 4 bits are in the upper halves of bytes.
    static constexpr float PART = TYPE == Q4_0 ? 0.0625f : 1.0f;
};

// Where a thread's copies of a tile come from: in parts of 16 bytes from the beginning.
template <class T> struct Copies {
    const u8 *weights, *inputs;
    u32 own[T::OWN], own_inputs[T::OWN_INPUTS];
    // Scales of a row of weights, in numbers.
    const u16 *scales, *input_scales;
    u32 units, rows;
    u32 out, last;
};

template <class T> __device__ __forceinline__ Copies<T> copies_of(const Matmul &op, u32 out, u32 row) {
    Copies<T> c;
    c.units = units_of(op.width), c.rows = op.rows, c.out = out, c.last = op.outs - 1;
    c.weights = (const u8 *)op.weights;
    c.scales = (const u16 *)(c.weights + (u64)op.outs * c.units * T::BLOCK);
    const Packed packed = packed_at(op.packed, op.rows, c.units);
    c.inputs = packed.bytes, c.input_scales = (const u16 *)packed.scales + (u64)row * CHUNK;
#pragma unroll
    for (u32 i = 0; i < T::OWN; i++) {
        const u32 at = threadIdx.x + i * THREADS, part = at % T::PARTS, block = at / T::PARTS % CHUNK;
        c.own[i] = (min(out + at / T::PARTS / CHUNK, c.last) * c.units + block) * T::PARTS + part;
    }
#pragma unroll
    for (u32 i = 0; i < T::OWN_INPUTS; i++) {
        const u32 at = threadIdx.x + i * THREADS, half = at % 2, block = at / 2 / T::ROWS;
        c.own_inputs[i] = (block * c.rows + min(row + at / 2 % T::ROWS, c.rows - 1)) * 2 + half;
    }
    return c;
}

// Starts to copy blocks from `first` on.
template <class T> __device__ __forceinline__ void copy_chunk(const Copies<T> &c, u32 first, u8 *stage) {
    const u32 count = c.units - first, to = shared_address(stage);
#pragma unroll
    for (u32 i = 0; i < T::OWN; i++) {
        const u32 at = threadIdx.x + i * THREADS, part = at % T::PARTS, block = at / T::PARTS % CHUNK;
        const u32 place = block * T::PLANE + at / T::PARTS / CHUNK * T::BLOCK + part * 16;
        if ((T::COPIES % THREADS == 0 || at < T::COPIES) && block < count)
            copy_async(to + place, c.weights + (u64)(c.own[i] + first * T::PARTS) * 16);
    }
#pragma unroll
    for (u32 i = 0; i < T::OWN_INPUTS; i++) {
        const u32 at = threadIdx.x + i * THREADS;
        if ((T::INPUT_COPIES % THREADS == 0 || at < T::INPUT_COPIES) && at / 2 / T::ROWS < count)
            copy_async(to + T::INPUTS + at * 16, c.inputs + (u64)(c.own_inputs[i] + first * c.rows * 2) * 16);
    }
    if (c.units % CHUNK == 0) {
        if (threadIdx.x < T::OUTS) {
            const u16 *from = c.scales + (u64)min(c.out + threadIdx.x, c.last) * c.units + first;
            copy_async_eight(to + T::SCALES + threadIdx.x * 8, (const u8 *)from);
        }
    } else {
        for (u32 i = threadIdx.x; i < T::OUTS * CHUNK; i += THREADS)
            ((u16 *)(stage + T::SCALES))[i] =
                load_once(c.scales + (u64)min(c.out + i / CHUNK, c.last) * c.units + min(first + i % CHUNK, c.units - 1));
    }
    // Two rows at a time, and of rows that are not there, too: nobody uses what comes of them.
    if (threadIdx.x >= THREADS - T::ROWS / 2) {
        const u32 pair = threadIdx.x - (THREADS - T::ROWS / 2);
        copy_async(to + T::INPUT_SCALES + pair * 16, (const u8 *)(c.input_scales + (u64)first * even(c.rows) + pair * 2 * CHUNK));
    }
}

// The lane's eight numbers of a block of a row of weights, as bytes: of four bits those of four bytes, first the lower halves
// and then the upper ones, 16 times what they stand for.
template <int TYPE> __device__ __forceinline__ uint2 weight_bytes(const u8 *block, u32 four) {
    if (TYPE == Q8_0) return *(const uint2 *)(block + four * 8);
    const u32 v = *(const u32 *)(block + four * 4);
    return make_uint2(mask_and_flip(v << 4, 0xf0f0f0f0u, 0x80808080u), mask_and_flip(v, 0xf0f0f0f0u, 0x80808080u));
}

// Scales of a stage's blocks: a lane has those of one of four blocks. Those of the others are multiplied with zeros.
template <u32 WIDE, u32 HIGH> struct StageScales {
    u32 own[WIDE][2], inputs[HIGH];
};

// Adds the terms of a block to the warp's results.
template <int TYPE, class T, u32 WIDE, u32 HIGH>
__device__ __forceinline__ void add_block_terms(const u8 *weights, const u8 *inputs, u32 block, const StageScales<WIDE, HIGH> &scales,
                                                float sums[WIDE][HIGH][4]) {
    const u32 four = threadIdx.x % 4;
    u32 a[WIDE][4], by[HIGH];
    uint2 b[HIGH];
#pragma unroll
    for (u32 i = 0; i < WIDE; i++) {
        const uint2 one = weight_bytes<TYPE>(weights + block * T::PLANE + i * 16 * T::BLOCK, four);
        const uint2 two = weight_bytes<TYPE>(weights + block * T::PLANE + (i * 16 + 8) * T::BLOCK, four);
        a[i][0] = one.x, a[i][1] = two.x, a[i][2] = one.y, a[i][3] = two.y;
    }
#pragma unroll
    for (u32 j = 0; j < HIGH; j++) {
        b[j] = *(const uint2 *)(inputs + block * T::ROWS * 32 + j * 8 * 32);
        by[j] = four == block ? scales.inputs[j] : 0;
    }
#pragma unroll
    for (u32 i = 0; i < WIDE; i++) {
        int p[HIGH][4];
        float s[HIGH][4];
#pragma unroll
        for (u32 j = 0; j < HIGH; j++) multiply_bytes(p[j], a[i], b[j], INTEGER_BITS);
#pragma unroll
        for (u32 j = 0; j < HIGH; j++) multiply_halves(s[j], scales.own[i], by[j]);
#pragma unroll
        for (u32 j = 0; j < HIGH; j++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sums[i][j][k] = sums[i][j][k] + s[j][k] * (__uint_as_float(p[j][k]) - INTEGER_ZERO);
    }
}

// Adds the terms of a stage's blocks to the warp's results, block after block.
template <int TYPE, class T, u32 WIDE, u32 HIGH>
__device__ __forceinline__ void add_chunk(const u8 *stage, u32 count, float sums[WIDE][HIGH][4]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane / 4, four = lane % 4;
    const u32 out = warp / T::DOWN * WIDE * 16 + eighth, row = warp % T::DOWN * HIGH * 8 + eighth;
    const u16 *own = (const u16 *)(stage + T::SCALES) + four, *inputs = (const u16 *)(stage + T::INPUT_SCALES) + four;
    StageScales<WIDE, HIGH> scales;
#pragma unroll
    for (u32 i = 0; i < WIDE; i++)
        scales.own[i][0] = own[(out + i * 16) * CHUNK], scales.own[i][1] = own[(out + i * 16 + 8) * CHUNK];
#pragma unroll
    for (u32 j = 0; j < HIGH; j++) scales.inputs[j] = inputs[(row + j * 8) * CHUNK];
    const u8 *weights = stage + out * T::BLOCK, *rows = stage + T::INPUTS + row * 32 + four * 8;
#pragma unroll
    for (u32 block = 0; block < CHUNK; block++)
        if (block < count) add_block_terms<TYPE, T, WIDE, HIGH>(weights, rows, block, scales, sums);
}

template <int TYPE, u32 ACROSS, u32 WIDE, u32 HIGH> __device__ APART void tensor_rows(const Matmul &op, u8 *memory) {
    using T = Tile<TYPE, ACROSS, WIDE, HIGH>;
    const u32 units = units_of(op.width), chunks = (units + CHUNK - 1) / CHUNK;
    const u32 across = (op.outs + T::OUTS - 1) / T::OUTS, down = (op.rows + T::ROWS - 1) / T::ROWS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        // Blocks that work at the same time share weights.
        const u32 first_row = tile % down * T::ROWS, first_out = tile / down * T::OUTS;
        const Copies<T> copies = copies_of<T>(op, first_out, first_row);
        float sums[WIDE][HIGH][4] = {};
        for (u32 at = 0; at < STAGES - 1; at++) {
            if (at < chunks) copy_chunk<T>(copies, at * CHUNK, memory + at * T::STAGE);
            commit_copies();
        }
        u32 stage = 0, later = (STAGES - 1) * T::STAGE;
        for (u32 at = 0; at < chunks; at++) {
            await_copies<STAGES - 2>();
            __syncthreads();
            // What was in the other stage has been multiplied.
            if (at + STAGES - 1 < chunks) copy_chunk<T>(copies, (at + STAGES - 1) * CHUNK, memory + later);
            commit_copies();
            add_chunk<TYPE, T, WIDE, HIGH>(memory + stage, min((u32)CHUNK, units - at * CHUNK), sums);
            later = stage;
            stage = stage == (STAGES - 1) * T::STAGE ? 0 : stage + T::STAGE;
        }
        const u32 out = first_out + warp / T::DOWN * WIDE * 16 + lane / 4, row = first_row + warp % T::DOWN * HIGH * 8 + lane % 4 * 2;
#pragma unroll
        for (u32 j = 0; j < HIGH; j++)
#pragma unroll
            for (u32 i = 0; i < WIDE; i++)
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const u32 r = row + j * 8 + k % 2, o = out + i * 16 + k / 2 * 8;
                    if (r < op.rows && o < op.outs) ((float *)op.out)[(u64)r * op.outs + o] = sums[i][j][k] * T::PART;
                }
        // The next tile's first copies go where the last blocks of this one are.
        __syncthreads();
    }
}

// Tiles of a type, by their number of rows of weights: fewer where there would be too few tiles for all blocks.
template <int TYPE> __device__ __forceinline__ void tensor_tiles(const Matmul &op, u8 *memory) {
    if (op.tile_outs == 128) tensor_rows<TYPE, 4, 2, 4>(op, memory);
    else tensor_rows<TYPE, 2, 1, 2>(op, memory);
}
#endif
