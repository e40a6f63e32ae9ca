// SPDX-License-Identifier: Apache-2.0
// What a model does between products, and the kernel that goes through a program.

__device__ float decoded(const u8 *base, u32 type, u64 blocks, u64 block, u32 at) {
    // Rows of this kernel's own are tables as well.
    if (type == F32) return read((const float *)base + block);
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

__device__ APART void embed(const Embed &op) {
    const u32 *ids = (const u32 *)op.ids;
    const u32 rows = op.rows, width = op.width, type = op.quant, first = op.first, count = op.count;
    const u32 size = is_plain(type) ? 1 : is_long(type) ? 256 : 32;
    const u64 blocks = (u64)count * width / size;
    // A block has as many numbers at a time as it has threads.
    const u32 parts = (width + THREADS - 1) / THREADS;
    for (u32 part = blockIdx.x; part < rows * parts; part += gridDim.x) {
        const u32 row = part / parts, i = part % parts * THREADS + threadIdx.x;
        if (i >= width) continue;
        u32 id = __ldg(ids + row);
        bool here = id >= first && id - first < count;
        u64 start = here ? (u64)(id - first) * width : 0;
        float *into = (float *)op.into + (u64)row * width;
        u64 at = start + i;
        float value = here ? decoded((const u8 *)op.table, type, blocks, at / size, at % size) : into[i];
        if (here && !op.is_overwritten) into[i] = value;
        if (op.slot) publish((float *)op.slot + i, is_written(value) ? value : __uint_as_float(0x7fffffffu));
    }
}

__device__ APART void norm(const Norm &op, u8 *memory) {
    const u32 rows = op.rows, width = op.width;
    float *row = (float *)memory;
    double *lanes = (double *)(row + (width + 1) / 2 * 2);
    const float *weight = (const float *)op.weight;
    for (u32 at = blockIdx.x; at < rows; at += gridDim.x) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += THREADS) row[i] = read((const float *)op.from + (u64)at * width + i);
        __syncthreads();
        float scale = norm_of(row, width, __uint_as_float(op.epsilon), lanes);
        float *out = (float *)op.into + (u64)at * width;
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

__device__ APART void quantize(const Quantize &op) {
    const float *from = (const float *)op.from;
    u64 values = (u64)op.rows * op.width;
    if (op.quant == F32) {
        for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < values; i += (u64)gridDim.x * THREADS)
            ((float *)op.into)[i] = read(from + i);
        return;
    }
    if (op.quant == Q8_K) {
        round_long(values / 256, (u8 *)op.into, [=](u64 block, u32 at) { return read(from + block * 256 + at); });
        return;
    }
    // A thread has eight values: all of a warp take part, whether there are any or not.
    const u64 eights = values / 8;
    for (u64 eight = (u64)blockIdx.x * THREADS + threadIdx.x; eight / 32 * 32 < eights; eight += (u64)gridDim.x * THREADS) {
        const bool there = eight < eights;
        const float4 *of = (const float4 *)from + (there ? eight : 0) * 2;
        const float4 a = __ldcg(of), b = __ldcg(of + 1);
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const Rounded rounded = round_eight(v, Q8_0);
        if (!there) continue;
        u16 *block = (u16 *)op.into + eight / 4 * 17, *bytes = block + 1 + eight % 4 * 4;
        bytes[0] = (u16)rounded.bytes.x, bytes[1] = (u16)(rounded.bytes.x >> 16);
        bytes[2] = (u16)rounded.bytes.y, bytes[3] = (u16)(rounded.bytes.y >> 16);
        if (eight % 4 == 0) block[0] = to_half(rounded.scale);
    }
}

// Rows of Q4_K become inputs.
__device__ APART void round_q4_k(const RoundQ4K &op) {
    const u8 *from = (const u8 *)op.from;
    u64 blocks = op.blocks;
    round_long(blocks, (u8 *)op.into, [=](u64 block, u32 at) { return decoded(from, Q4_K, blocks, block, at); });
}

__device__ APART void rotate(const Rotate &op) {
    const u32 heads = op.heads, size = op.head_size, dims = op.dims, half = dims / 2;
    u64 count = (u64)op.rows * heads * half;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 pair = i % half;
        u64 head = i / half, row = head / heads;
        float *data = (float *)op.data + head * size;
        const u32 position = row_at(op.at, row).position;
        if (position >= op.positions) continue;
        const float *table = (const float *)op.table + (u64)position * dims;
        u32 one = op.pairs ? pair : 2 * pair, two = op.pairs ? pair + half : 2 * pair + 1;
        float cos = table[2 * pair], sin = table[2 * pair + 1], a = read(data + one), b = read(data + two);
        data[one] = a * cos - b * sin;
        data[two] = a * sin + b * cos;
    }
}

// Keys as f16, 16 numbers of a head for each row. A lane has a row: positions that follow each other are written together.
__device__ __forceinline__ void keep_keys(const KeepKv &op) {
    const u32 parts = op.head_size / 16, lane = threadIdx.x % 32, units = (op.rows + 31) / 32 * op.kv_heads * parts;
    for (u32 unit = (blockIdx.x * THREADS + threadIdx.x) / 32; unit < units; unit += gridDim.x * WARPS) {
        const u32 number = unit % parts * 16, head = unit / parts % op.kv_heads, row = unit / parts / op.kv_heads * 32 + lane;
        if (row >= op.rows) continue;
        const RowAt at = row_at(op.at, row);
        const KvHead kv = kv_head(op.cache, op.tables, at.table, op.kv_heads, head, op.head_size, op.quant);
        const float4 *from = (const float4 *)((const float *)op.keys + ((u64)row * op.kv_heads + head) * op.head_size + number);
        u16 *to = (u16 *)kv.keys(at.position / KV_BLOCK) + number * KV_BLOCK + at.position % KV_BLOCK;
        float4 v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = __ldcg(from + i);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            to[4 * i * KV_BLOCK] = to_half(v[i].x), to[(4 * i + 1) * KV_BLOCK] = to_half(v[i].y);
            to[(4 * i + 2) * KV_BLOCK] = to_half(v[i].z), to[(4 * i + 3) * KV_BLOCK] = to_half(v[i].w);
        }
    }
}

// Runs of 32 numbers of a head for each warp, some at a time: of keys that are not written above, and then of values.
#define KEPT_RUNS 4
__device__ APART void keep_kv(const KeepKv &op) {
    const u32 size = op.head_size, runs = (size + 31) / 32, lane = threadIdx.x % 32;
    const u64 count = (u64)op.rows * op.kv_heads * runs * 2;
    const u64 step = (u64)gridDim.x * WARPS, begin = is_short(op.quant) ? 0 : count / 2;
    if (begin > 0) keep_keys(op);
    for (u64 first = begin + ((u64)blockIdx.x * THREADS + threadIdx.x) / 32; first < count; first += KEPT_RUNS * step) {
        // All are loaded before the first is stored.
        float values[KEPT_RUNS];
        RowAt at[KEPT_RUNS];
#pragma unroll
        for (u32 which = 0; which < KEPT_RUNS; which++) {
            const u64 i = min(first + which * step, count - 1), of = i % (count / 2), head = of / runs;
            const u32 number = of % runs * 32 + lane;
            const float *from = (const float *)(i < count / 2 ? op.keys : op.values) + head * size;
            values[which] = number < size ? read(from + number) : 0.0f;
            at[which] = row_at(op.at, head / op.kv_heads);
        }
#pragma unroll
        for (u32 which = 0; which < KEPT_RUNS; which++) {
            const u64 i = first + which * step, of = i % (count / 2), head = of / runs;
            if (i >= count) break;
            const KvHead kv =
                kv_head(op.cache, op.tables, at[which].table, op.kv_heads, head % op.kv_heads, size, op.quant);
            keep_number(kv, at[which].position, i < count / 2, of % runs * 32 + lane, values[which], true, nullptr);
        }
    }
}

// Whether numbers can be read and written four at a time.
__device__ __forceinline__ bool in_fours(u64 a, u64 b, u64 c, u32 elements) { return ((a | b | c) & 15) == 0 && elements % 4 == 0; }

__device__ void gate(const Gate &op) {
    if (in_fours(op.gate, op.up, op.into, op.elements)) {
        for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.elements / 4; i += gridDim.x * THREADS) {
            const float4 a = __ldcg((const float4 *)op.gate + i), b = __ldcg((const float4 *)op.up + i);
            ((float4 *)op.into)[i] = {gate_of(a.x, b.x), gate_of(a.y, b.y), gate_of(a.z, b.z), gate_of(a.w, b.w)};
        }
        return;
    }
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.elements; i += gridDim.x * THREADS)
        ((float *)op.into)[i] = gate_of(read((const float *)op.gate + i), read((const float *)op.up + i));
}

__device__ void add(const Add &op) {
    if (in_fours(op.into, op.more, 0, op.elements)) {
        for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.elements / 4; i += gridDim.x * THREADS) {
            const float4 a = __ldcg((const float4 *)op.into + i), b = __ldcg((const float4 *)op.more + i);
            ((float4 *)op.into)[i] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        }
        return;
    }
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.elements; i += gridDim.x * THREADS)
        ((float *)op.into)[i] = read((const float *)op.into + i) + read((const float *)op.more + i);
}

__device__ void add_row(const AddRow &op) {
    const u64 count = (u64)op.rows * op.width;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS)
        ((float *)op.into)[i] = read((const float *)op.into + i) + __ldg((const float *)op.row + i % op.width);
}

__device__ void fill(const Fill &op) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.words; i += gridDim.x * THREADS)
        ((u32 *)op.into)[i] = op.pattern;
}

// Pairs of bytes, where not more are possible: blocks of Q8_0 begin at even ones.
__device__ void copy(const CopyBytes &op) {
    if (((op.from | op.into | op.bytes) & 15) == 0) {
        for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.bytes / 16; i += gridDim.x * THREADS)
            ((uint4 *)op.into)[i] = read((const uint4 *)op.from + i);
        return;
    }
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.bytes / 2; i += gridDim.x * THREADS)
        ((u16 *)op.into)[i] = read((const u16 *)op.from + i);
}

// Parts of rows in units: each is read once, and written to every card that gets it.
template <class T> __device__ __forceinline__ void gather_units(const Gather &op) {
    u32 each = 0;
    for (u32 giver = 0; giver < op.givers; giver++) each += op.lengths[giver];
    const u32 count = op.rows * each;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        const u32 row = i / each;
        u32 at = i % each, giver = 0;
        while (at >= op.lengths[giver]) at -= op.lengths[giver++];
        const T unit = read((const T *)op.from[giver] + row * op.lengths[giver] + at);
        const u32 into = row * op.width + op.starts[giver] + at;
        for (u32 getter = 0; getter < op.getters; getter++) ((T *)op.into[getter])[into] = unit;
    }
}

__device__ APART void gather(const Gather &op) {
    switch (op.unit) {
        case 16: gather_units<uint4>(op); break;
        case 4: gather_units<u32>(op); break;
        default: gather_units<u16>(op);
    }
}

// Words of cards, folded in the order of their ranks.
__device__ APART void fold_words(const FoldWords &op) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < op.words; i += gridDim.x * THREADS) {
        u32 word = read((const u32 *)op.data[0] + i);
#pragma unroll 4
        for (u32 card = 1; card < op.cards; card++) {
            const u32 more = read((const u32 *)op.data[card] + i);
            word = op.fold == OR_U32 ? word | more : __float_as_uint(__uint_as_float(word) + __uint_as_float(more));
        }
        for (u32 card = 0; card < op.cards; card++) ((u32 *)op.data[card])[i] = word;
    }
}

__device__ __forceinline__ void note_time(u64 *times, u32 at) {
    if (times == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
    times[at] = nanoseconds();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
spanker_card(const Instruction *program, u32 count, Step step) {
    __shared__ Instruction window[WINDOW];
    const u32 WORDS = sizeof(Instruction) / 4;
    for (u32 i = threadIdx.x; i < min(count, (u32)WINDOW) * WORDS; i += THREADS)
        ((u32 *)window)[i] = __ldg((const u32 *)program + i);
    __syncthreads();
#ifdef STREAM
    // Everyone waits for the embedding, so it goes first: a run has it at its beginning or not at all.
    if (window[0].kind == EMBED) embed(window[0].embed);
    const u8 *ring = shared + step.ring + threadIdx.x / 32 * SLOTS * SLOT_BYTES;
    __shared__ Prefetch saved[WARPS];
    __shared__ Rows rows[WARPS][PAIRS];
    const u32 own_rows = shared_address(rows[threadIdx.x / 32]);
    From from = {shared_address(ring), own_rows, window, program, 0};
    Prefetch next;
    u32 slot = 0;
    find_instruction(next, from, step.streamed);
    for (u32 i = 0; i < SLOTS; i++) prefetch_slot(next, from, i * SLOT_BYTES);
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < step.unwritten_parts; i += (u64)gridDim.x * THREADS)
        step.unwritten[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
#endif
#ifndef STREAM
    // The counter's value when everybody has arrived. The first thread alone needs it, and it is in nobody's registers.
    __shared__ u64 arrived;
    if (threadIdx.x == 0) arrived = step.arrived;
#endif
    for (u32 at = 0; at < count; at++) {
        note_time(step.times, at);
        const Instruction &instruction = window[at % WINDOW];
        u8 *memory = shared;
        // Keys and values are prefetched an instruction before they are needed.
        const Instruction &after = window[(at + 1) % WINDOW];
        if (at + 1 < count && (after.kind & ~JOINED) == ATTEND) prefetch_kv(after.attend);
        // Another instruction is loaded in the meantime.
        bool more = threadIdx.x < WORDS && at + WINDOW < count;
        u32 word = more ? __ldg((const u32 *)(program + at + WINDOW) + threadIdx.x) : 0;
#ifdef STREAM
        from.now = at;
#endif
        switch (instruction.kind & ~JOINED) {
#ifdef STREAM
            case EMBED: if (at > 0) __trap(); break;
            case ATTEND:
                // What is not needed in the meantime leaves its registers.
                if (threadIdx.x % 32 == 0) saved[threadIdx.x / 32] = next;
                attend(instruction.attend, memory);
                __syncwarp();
                next = saved[threadIdx.x / 32];
                if (at + 1 < count && blockIdx.x >= instruction.attend.heads && after.kind == STREAMED &&
                    after.streamed.next != 0 && after.streamed.next < at + WINDOW)
                    prefetch_meanwhile(after.streamed, window[(after.streamed.next - 1) % WINDOW].streamed,
                                       instruction.attend.heads);
                break;
            case STREAMED: streamed(instruction.streamed, memory, ring, next, slot, from); break;
#else
            case EMBED: embed(instruction.embed); break;
            case ATTEND:
                if (instruction.attend.is_tiled) attend_tiles(instruction.attend, memory);
                attend(instruction.attend, memory);
                break;
            case PACK: instruction.pack.is_long ? pack_long(instruction.pack) : pack(instruction.pack); break;
            case VECTOR: vector(instruction, memory); break;
            case MATMUL: matmul(instruction.matmul, memory); break;
            case NORM: norm(instruction.norm, memory); break;
            case QUANTIZE: quantize(instruction.quantize); break;
            case ROTATE: rotate(instruction.rotate); break;
            case KEEP_KV: keep_kv(instruction.keep_kv); break;
            case GATE: gate(instruction.gate); break;
            case ADD: add(instruction.add); break;
            case ADD_ROW: add_row(instruction.add_row); break;
            case FILL: fill(instruction.fill); break;
            case COPY: copy(instruction.copy_bytes); break;
            case GATHER: gather(instruction.gather); break;
            case FOLD: fold_words(instruction.fold_words); break;
            case ROUND_Q4_K: round_q4_k(instruction.round_q4_k); break;
#endif
            default: __trap();
        }
        if (at + 1 < count) {
#ifdef STREAM
            __syncthreads();
#else
            if (instruction.kind & JOINED) {
                // The next instruction is of another card: it needs nothing of this one but the block's shared memory.
                __syncthreads();
            } else {
                arrive(step.barrier);
                await(step.barrier, threadIdx.x == 0 ? arrived += gridDim.x : 0);
            }
#endif
            if (more) ((u32 *)&window[at % WINDOW])[threadIdx.x] = word;
        }
    }
    note_time(step.times, count);
}
