// SPDX-License-Identifier: Apache-2.0
// One row of inputs with many rows of weights.

__device__ __forceinline__ Weights weights_at(u64 base, u32 type, u64 rows, u32 width) {
    Weights w;
    w.base = (const u8 *)base;
    w.blocks = rows * width / (is_long(type) ? 256 : 32);
    return w;
}

// Rows that a warp multiplies together: their weights are loaded at the same time and use the same inputs.
#define ABREAST 8

// Writes the terms of `rows` rows from `first` on to shared memory, `stride` apart.
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
        UnitInputs<TYPE> inputs = inputs_of<TYPE>(in, unit);
#pragma unroll
        for (int i = 0; i < ABREAST; i++) {
            Unpacked<TYPE> v = unpack<TYPE>(w, units[i], places[i]);
            float term = term_of<TYPE>(v, numbers_of<TYPE>(units[i]), inputs);
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
        case Q6_K: if constexpr (HAS(Q6_K)) terms_of<Q6_K>(w, first, rows, width, in, to, stride); break;
        default: __trap();
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
        sum = __fmaf_rn(weight, row[i], sum);
    }
    for (int half = 8; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half, 16);
    return sum;
}

// Rounds results to blocks of inputs, each once the last of its numbers has been written.
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

// ---------------------------------------------------------------- one row of inputs: instructions

// The matrix and rows of one of an instruction's tiles: those of the first matrix come first, then those of the second.
__device__ __forceinline__ void tile_at(const Vector &op, u32 index, u32 *matrix, u32 *first, u32 *rows) {
    u32 tile = op.tile_rows, at = index < op.tile_ends[0] ? 0 : index < op.tile_ends[1] ? 1 : 2;
    index -= at == 0 ? 0 : op.tile_ends[at - 1];
    *matrix = at, *first = index * tile, *rows = min(tile, op.matrices[at].rows - index * tile);
}

// A grid barrier: each block announces its arrival, and then waits for all others. What others wrote is read past the
// first-level cache, so that nothing in it has to be invalidated here.
__device__ __forceinline__ void arrive(u64 *counter) {
    __syncthreads();
    if (threadIdx.x == 0) count_release(counter);
}

__device__ __forceinline__ void await(u64 *counter, u64 target) {
    if (threadIdx.x == 0) {
        u32 spins = 0;
        u64 seen;
        do {
            seen = load_relaxed(counter);
            if (++spins > MOST_SPINS) __trap();
        } while (seen < target);
    }
    __syncthreads();
}

__device__ __forceinline__ void vector(const Instruction &instruction, u8 *memory) {
    const Vector &op = instruction.vector;
    const GatedVector &gated = instruction.gated_vector;
    const u32 width = op.width, type = op.input_quant, keep = op.keep;
    const u32 units = units_of(width);
    const bool plain = is_plain(op.matrices[0].quant);
    Inputs in;
    in.low = (int4 *)memory;
    in.high = in.low + units;
    in.scale = (float *)(in.high + units);
    in.sum = (int *)(in.scale + units);
    float *row = plain ? (float *)memory : (float *)(memory + (units * 40 + 15) / 16 * 16);
    double *lanes = (double *)(row + 2 * width);
    float *to = plain ? (float *)(lanes + NORM_LANES) : row;
    if (op.is_normed) {
        norm_inputs((const float *)op.input, (const float *)op.norm_weight, __uint_as_float(op.epsilon), width,
                    plain ? F32 : type, row, lanes, in);
    } else if (plain) {
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)op.input + i);
        __syncthreads();
    } else {
        load_inputs((const u8 *)op.input, type, units, in, (u8 *)row);
    }
    const u32 all = op.tile_ends[2];
    for (u32 index = blockIdx.x; index < all; index += gridDim.x) {
        u32 at, first, some;
        tile_at(op, index, &at, &first, &some);
        const u32 kind = op.matrices[at].quant;
        const Weights weights = weights_at(op.weights[at], kind, op.matrices[at].rows, width);
        float *out = (float *)op.outs[at];
        u32 count = is_long(kind) ? units / 8 : units, stride = stride_of(count);
        // What a result is added to is loaded in the meantime.
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
                u32 type = op.matrices[at + half].quant;
                Weights w = weights_at(op.weights[at + half], type, op.matrices[at + half].rows, width);
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
        if (keep == GATED && gated.block_quant)
            round_when_full(out, (u8 *)gated.blocks, gated.block_quant, first, some, (u32 *)gated.counters);
    }
}
