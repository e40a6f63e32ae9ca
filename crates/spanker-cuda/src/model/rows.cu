// SPDX-License-Identifier: Apache-2.0
// Many rows of inputs.

template <int TYPE> __device__ APART void many_rows(const Matmul &op, u8 *memory) {
    const u32 rows = op.rows, width = op.width, outs = op.outs, type = op.input_quant;
    const bool eighths = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K;
    const u32 units = units_of(width), STRIDE = TILE_U + 1;
    // Rows of weights of a thread, and sums that it folds.
    const u32 OWN = TILE_R * TILE_U / THREADS, FOLDS = TILE_R * TILE_T / THREADS;
    const u64 row_bytes = type == Q8_0 ? (u64)units * 34 : (u64)units / 8 * 292;
    Weights w = weights_at(op.weights, TYPE, outs, width);
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
            // Inputs as blocks, and then as products read them.
            u32 first = type == Q8_0 ? u0 * 34 : u0 / 8 * 292, halves = (type == Q8_0 ? us * 34 : us / 8 * 292) / 2;
            for (u32 t = warp; t < ts; t += WARPS) {
                const u16 *from = (const u16 *)((const u8 *)op.inputs + (t0 + t) * row_bytes + first);
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
                    float term = term_of<TYPE>(v, x, inputs_of<TYPE>(part, at));
                    float *target = to + (r * TILE_T + t) * STRIDE;
                    if (!eighths) target[lane] = term;
                    else if (lane % 8 == 0) target[lane / 8] = term;
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
            if (r < rs && t < ts) ((float *)op.out)[(u64)(t0 + t) * outs + r0 + r] = sums[f];
        }
        __syncthreads();
    }
}

__device__ APART void plain_rows(const Matmul &op, u8 *memory) {
    const u32 rows = op.rows, width = op.width, outs = op.outs, type = op.weight_quant;
    float *row = (float *)memory;
    for (u32 t = 0; t < rows; t++) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)op.inputs + (u64)t * width + i);
        __syncthreads();
        u32 pair = (blockIdx.x * THREADS + threadIdx.x) / 16, pairs = gridDim.x * THREADS / 16;
        for (u32 r = pair; r < (outs + 1) / 2 * 2; r += pairs) {
            u32 safe = min(r, outs - 1);
            const u8 *w = (const u8 *)op.weights + (u64)safe * width * plain_bytes(type);
            float sum = plain_dot(w, type, row, width, threadIdx.x % 16);
            if (threadIdx.x % 16 == 0 && r < outs) ((float *)op.out)[(u64)t * outs + r] = sum;
        }
    }
}

__device__ APART void matmul(const Matmul &op, u8 *memory) {
#ifndef STREAM
    if (op.packed) {
        switch (op.weight_quant) {
            case Q4_0: if constexpr (HAS(Q4_0)) tensor_tiles<Q4_0>(op, memory); break;
            case Q8_0: if constexpr (HAS(Q8_0)) tensor_tiles<Q8_0>(op, memory); break;
            case Q4_K: if constexpr (HAS(Q4_K)) tensor_long_tiles(op, memory); break;
            default: __trap();
        }
        return;
    }
#endif
    switch (op.weight_quant) {
        case Q4_0: if constexpr (HAS(Q4_0)) many_rows<Q4_0>(op, memory); break;
        case Q4_1: if constexpr (HAS(Q4_1)) many_rows<Q4_1>(op, memory); break;
        case Q5_0: if constexpr (HAS(Q5_0)) many_rows<Q5_0>(op, memory); break;
        case Q5_1: if constexpr (HAS(Q5_1)) many_rows<Q5_1>(op, memory); break;
        case Q8_0: if constexpr (HAS(Q8_0)) many_rows<Q8_0>(op, memory); break;
        case Q4_K: if constexpr (HAS(Q4_K)) many_rows<Q4_K>(op, memory); break;
        case Q5_K: if constexpr (HAS(Q5_K)) many_rows<Q5_K>(op, memory); break;
        case Q6_K: if constexpr (HAS(Q6_K)) many_rows<Q6_K>(op, memory); break;
        case F32: case F16: case BF16: plain_rows(op, memory); break;
        default: __trap();
    }
}
