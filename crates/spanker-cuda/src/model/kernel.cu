// SPDX-License-Identifier: Apache-2.0
// What a model does between products, and the kernel that goes through a program.

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

// n: 0 rows, 1 width, 2 type, 3 first, 4 count, 5 whether a later line writes `into`. p: 0 table, 1 into, 8 where others
// are told, or 0.
__device__ APART void embed_line(const Line &line, u32 token, const u32 *ids) {
    const u32 rows = line.n[0], width = line.n[1], type = line.n[2], first = line.n[3], count = line.n[4];
    const u32 size = is_plain(type) ? 1 : is_long(type) ? 256 : 32;
    const u64 blocks = (u64)count * width / size;
    // A block has as many numbers at a time as it has threads.
    const u32 pieces = (width + THREADS - 1) / THREADS;
    for (u32 piece = blockIdx.x; piece < rows * pieces; piece += gridDim.x) {
        const u32 row = piece / pieces, i = piece % pieces * THREADS + threadIdx.x;
        if (i >= width) continue;
        u32 id = rows == 1 ? token : read(ids + row);
        bool here = id >= first && id - first < count;
        u64 start = here ? (u64)(id - first) * width : 0;
        float *into = (float *)line.p[1] + (u64)row * width;
        u64 at = start + i;
        float value = here ? decoded((const u8 *)line.p[0], type, blocks, at / size, at % size) : into[i];
        if (here && !line.n[5]) into[i] = value;
        if (line.p[8]) tell((float *)line.p[8] + i, is_written(value) ? value : __uint_as_float(0x7fffffffu));
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
__device__ APART void rotate_line(const Line &line, u32 past) {
    const u32 heads = line.n[1], size = line.n[2], dims = line.n[3], half = dims / 2;
    u64 count = (u64)line.n[0] * heads * half;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 pair = i % half;
        u64 head = i / half, row = head / heads;
        float *data = (float *)line.p[0] + head * size;
        const float *table = (const float *)line.p[1] + (past + row) * dims;
        u32 one = line.n[4] ? pair : 2 * pair, two = line.n[4] ? pair + half : 2 * pair + 1;
        float cos = table[2 * pair], sin = table[2 * pair + 1], a = read(data + one), b = read(data + two);
        data[one] = a * cos - b * sin;
        data[two] = a * sin + b * cos;
    }
}

// n: 0 elements, 1 elements of a row. p: 0 from, 1 into.
__device__ void halve_line(const Line &line, u32 past) {
    u16 *into = (u16 *)line.p[1] + (u64)past * line.n[1];
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

__device__ __forceinline__ void note_time(u64 *times, u32 at) {
    if (times == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    times[at] = now;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
spanker_card(const Line *lines, u32 count, Step step) {
    __shared__ Line window[NEAR_LINES];
    const u32 WORDS = sizeof(Line) / 4;
    for (u32 i = threadIdx.x; i < min(count, (u32)NEAR_LINES) * WORDS; i += THREADS)
        ((u32 *)window)[i] = __ldg((const u32 *)lines + i);
    __syncthreads();
#ifdef STREAM
    // What everyone waits for goes first: a run has it at its beginning or not at all.
    if (window[0].kind == EMBED) embed_line(window[0], step.token, step.ids);
    const u8 *ring = shared + step.ring + threadIdx.x / 32 * SLOTS * SLOT_BYTES;
    __shared__ Ahead aheads[WARPS];
    __shared__ Rows rows[WARPS][PAIRS];
    const u32 own_rows = (u32)__cvta_generic_to_shared(rows[threadIdx.x / 32]);
    From from = {(u32)__cvta_generic_to_shared(ring), own_rows, window, lines, 0};
    Ahead ahead;
    u32 slot = 0;
    find_line(ahead, from, step.streamed);
    for (u32 i = 0; i < SLOTS; i++) send_for(ahead, from, i * SLOT_BYTES);
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < step.pieces; i += (u64)gridDim.x * THREADS)
        step.unwritten[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
#endif
    for (u32 at = 0; at < count; at++) {
        note_time(step.times, at);
        const Line &line = window[at % NEAR_LINES];
        u8 *memory = shared;
        // Keys and values come closer a line before they are needed.
        const Line &after = window[(at + 1) % NEAR_LINES];
        if (at + 1 < count && after.kind == ATTEND) fetch_kept(after, step);
        // Another line is on its way in the meantime.
        bool more = threadIdx.x < WORDS && at + NEAR_LINES < count;
        u32 word = more ? __ldg((const u32 *)(lines + at + NEAR_LINES) + threadIdx.x) : 0;
#ifdef STREAM
        from.now = at;
#endif
        switch (line.kind) {
#ifdef STREAM
            case EMBED: if (at > 0) __trap(); break;
            case ATTEND:
                // What is not needed in the meantime leaves its registers.
                if (threadIdx.x % 32 == 0) aheads[threadIdx.x / 32] = ahead;
                attend_line(line, step, memory);
                __syncwarp();
                ahead = aheads[threadIdx.x / 32];
                if (at + 1 < count && blockIdx.x >= line.n[1] && after.kind == STREAMED && after.n[18] != 0 &&
                    after.n[18] < at + NEAR_LINES)
                    fetch_meanwhile(after, window[(after.n[18] - 1) % NEAR_LINES], line.n[1]);
                break;
            case STREAMED: stream_line(line, memory, ring, ahead, slot, from); break;
#else
            case EMBED: embed_line(line, step.token, step.ids); break;
            case ATTEND: attend_line(line, step, memory); break;
            case VECTOR: vector_line(line, memory); break;
            case MATMUL: matmul_line(line, memory); break;
            case NORM: norm_line(line, memory); break;
            case QUANTIZE: quantize_line(line); break;
            case ROTATE: rotate_line(line, step.past); break;
            case HALVE: halve_line(line, step.past); break;
            case GATE: gate_line(line); break;
            case ADD: add_line(line); break;
            case FILL: fill_line(line); break;
            case COPY: copy_line(line); break;
            case ROUND_Q4_K: round_q4_k_line(line); break;
#endif
            default: __trap();
        }
        if (at + 1 < count) {
#ifdef STREAM
            __syncthreads();
#else
            arrive(step.meet);
            await(step.meet, step.met + (u64)(at + 1) * gridDim.x);
#endif
            if (more) ((u32 *)&window[at % NEAR_LINES])[threadIdx.x] = word;
        }
    }
    note_time(step.times, count);
}
