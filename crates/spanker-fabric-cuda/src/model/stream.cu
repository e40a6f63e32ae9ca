// SPDX-License-Identifier: Apache-2.0
// One row of inputs with many rows of weights, which come ahead of time.
//
// Each warp has a ring of slots in shared memory. It has them filled in the order in which it will meet them, over the
// ends of lines: while blocks wait for each other and inputs get ready, the next weights are on their way.

#ifdef STREAM
#define SLOTS 3
// A slot has so many units of two rows, and then their scales.
#define SPAN 64
#define PAIR 2
#define SLOT_SCALES (PAIR * SPAN * 16)
#define SLOT_BYTES (SLOT_SCALES + PAIR * SPAN * 2)
// Terms of a row that are folded at a time, how far apart those of rows are, and pairs of rows that are folded together.
#define CHUNK 128
#define APART_TERMS 132
#define PAIRS 3
#define TERM_FLOATS (PAIRS * PAIR * APART_TERMS)
#define RING_BYTES (WARPS * SLOTS * SLOT_BYTES)
// Pairs of a warp that come closer while others look back, and when: ticks of the clock, a microsecond has about 2000.
#define FAR 3
#define FIRST_FAR 1500
#define BETWEEN_FAR 2000
// How a line's inputs get ready.
enum Ready { NORMED = 1, ROUNDED = 2 };
// What others tell: a line's inputs, and what its results are added to.
enum Told { HEARD = 1, ADDED = 2 };

// A line's pairs of rows of a block's warp: the first, and what comes after the last. n: 16 pairs of every block, 17
// blocks that have one more.
__device__ __forceinline__ void own_pairs(const Line &line, u32 block, u32 *first, u32 *end) {
    u32 every = line.n[16], more = line.n[17], begin = block * every + min(block, more);
    *first = begin + threadIdx.x / 32, *end = begin + every + (block < more ? 1 : 0);
}

// The matrix and the first row of a pair that is not gated, and the first pair of the next matrix.
__device__ __forceinline__ void rows_of(const Line &line, u32 pair, u32 *matrix, u32 *row, u32 *last) {
    u32 first = line.n[6], second = line.n[7];
    *matrix = pair < first ? 0 : pair < second ? 1 : 2;
    *row = (pair - (*matrix == 0 ? 0 : *matrix == 1 ? first : second)) * PAIR;
    *last = *matrix == 0 ? first : *matrix == 1 ? second : ~0u;
}

// Where a warp's next slot comes from.
struct Ahead {
    const Line *line;
    u32 pair, last, end, unit, each, step, slot;
    // Two rows, and their scales.
    const u8 *one, *two, *one_scales, *two_scales;
};

__device__ __forceinline__ void find_rows(Ahead &a) {
    const Line &line = *a.line;
    const bool gated = line.n[4] == GATED;
    u32 matrix = 0, row = a.pair;
    a.last = ~0u;
    if (!gated) rows_of(line, a.pair, &matrix, &row, &a.last);
    a.last = min(a.last, a.end);
    u64 blocks = (u64)line.n[8 + matrix] * a.each, at = (u64)row * a.each;
    const u8 *one = (const u8 *)line.p[2 + matrix], *two = gated ? (const u8 *)line.p[3] : one + a.each * 16;
    a.one = one + at * 16, a.two = two + at * 16;
    a.one_scales = one + blocks * 16 + at * 2;
    a.two_scales = gated ? two + blocks * 16 + at * 2 : a.one_scales + a.each * 2;
    a.step = WARPS * (gated ? 1 : PAIR) * a.each;
}

// Goes to the first line with rows for this warp. `next` is its number and one, or 0; `at` is the line at work.
__device__ __forceinline__ void find_line(Ahead &a, const Line *window, const Line *lines, u32 next, u32 at) {
    a.line = nullptr;
    while (next != 0) {
        const Line *line = next <= at + NEAR_LINES ? window + (next - 1) % NEAR_LINES : lines + next - 1;
        own_pairs(*line, blockIdx.x, &a.pair, &a.end);
        if (a.pair < a.end) {
            a.line = line, a.unit = 0, a.each = units_of(line->n[0]);
            find_rows(a);
            return;
        }
        next = line->n[18];
    }
}

// Weights are read once: what is read again stays in the second-level cache.
__device__ __forceinline__ void copy16(u32 to, const u8 *from) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(once) : "memory");
}

// What a warp needs to send for slots: its ring, lines that are near and all lines, and the number of the one at work.
struct From {
    u32 ring;
    const Line *window, *lines;
    u32 now;
};

// Has a pair of a block's warp come closer: four lanes each a row, or its scales.
__device__ __forceinline__ void fetch_pair(const Line &line, u32 block, u32 which) {
#if __CUDA_ARCH__ >= 900
    const u32 part = threadIdx.x % 4, each = units_of(line.n[0]);
    u32 pair, end, matrix = 0, last;
    own_pairs(line, block, &pair, &end);
    pair += which * WARPS;
    if (pair >= end) return;
    const bool gated = line.n[4] == GATED, scales = part % 2;
    u32 row = pair;
    if (!gated) rows_of(line, pair, &matrix, &row, &last);
    const u64 at = (u64)(part < 2 || gated ? row : row + 1) * each, blocks = (u64)line.n[8 + matrix] * each;
    const u64 base = part < 2 || !gated ? line.p[2 + matrix] : line.p[3];
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :: "l"(base + (scales ? blocks * 16 + at * 2 : at * 16)), "r"(each * (scales ? 2 : 16)) : "memory");
#endif
}

// While some blocks look back, the others have weights of the line after next come closer: for themselves, and for those.
// Neither at once nor all: what blocks tell each other would wait behind them. `next` is the line that waits.
__device__ __forceinline__ void fetch_meanwhile(const Line &next, const Line &far, u32 heads) {
    if (!(next.n[1] & HEARD)) return;
    const u32 lane = threadIdx.x % 32, start = clock();
    const float *sign = (const float *)next.p[0] + threadIdx.x / 32;
    for (u32 which = 0; which < FAR; which++) {
        // All lanes go by the clock of the first.
        while (__shfl_sync(~0u, (u32)clock() - start, 0) < FIRST_FAR + which * BETWEEN_FAR) {
            if (__shfl_sync(~0u, is_written(look(sign)), 0)) return;
            __nanosleep(100);
        }
        if (lane < 4) fetch_pair(far, blockIdx.x, which);
        else if (lane < 8 && blockIdx.x - heads < heads) fetch_pair(far, blockIdx.x - heads, which);
        __syncwarp();
    }
}

// Sends for the next slot, if there is one.
__device__ __forceinline__ void send_for(Ahead &a, const From &from) {
    const u32 lane = threadIdx.x % 32;
    if (a.line) {
        u32 to = from.ring + a.slot * SLOT_BYTES + lane * 16, unit = a.unit + lane, each = a.each;
        const u8 *one = a.one + unit * 16, *two = a.two + unit * 16;
        if (unit < each) copy16(to, one), copy16(to + SPAN * 16, two);
        if (unit + 32 < each) copy16(to + 512, one + 512), copy16(to + SPAN * 16 + 512, two + 512);
        u32 piece = a.unit + lane % 8 * 8;
        if (lane < 16 && piece < each) copy16(to + SLOT_SCALES, (lane < 8 ? a.one_scales : a.two_scales) + piece * 2);
        a.slot = a.slot + 1 == SLOTS ? 0 : a.slot + 1;
        a.unit += SPAN;
        if (a.unit >= each) {
            a.unit = 0, a.pair += WARPS;
            if (a.pair < a.last) {
                a.one += (u64)a.step * 16, a.two += (u64)a.step * 16;
                a.one_scales += a.step * 2, a.two_scales += a.step * 2;
            } else if (a.pair < a.end) {
                find_rows(a);
            } else {
                find_line(a, from.window, from.lines, a.line->n[18], from.now);
            }
        }
    }
    // One group for each slot, whether there is anything in it or not: that is how they are counted.
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Eight numbers.
struct Eight {
    float4 a, b;
};

__device__ __forceinline__ Eight eight_of(const float *from, u32 eight) {
    const float4 *at = (const float4 *)from + 2 * eight;
    return {look(at), look(at + 1)};
}

__device__ __forceinline__ bool is_written(const Eight &v) {
    return is_written(v.a.x) && is_written(v.a.y) && is_written(v.a.z) && is_written(v.a.w) && is_written(v.b.x) &&
           is_written(v.b.y) && is_written(v.b.z) && is_written(v.b.w);
}

// Looks again until all of them are there.
__device__ __forceinline__ void hear_eight(Eight &v, const float *from, u32 eight, bool told) {
    for (u32 spins = 0; told && !is_written(v); spins++) {
        __nanosleep(40);
        v = eight_of(from, eight);
        if (spins > MOST_SPINS) __trap();
    }
}

// A row of numbers becomes inputs in shared memory.
__device__ __forceinline__ void stream_inputs(const Line &line, const Inputs &in, float *row, double *lanes) {
    const u32 eights = line.n[0] / 8;
    const float *x = (const float *)line.p[0], *weight = (const float *)line.p[1];
    const bool normed = line.n[2] == NORMED, told = line.n[1] & HEARD;
    if (normed) {
        // All but the first eights of a thread are read again: rows are seldom that long.
        const u32 first = min(threadIdx.x, eights - 1);
        Eight by = eight_of(weight, first), own = eight_of(x, first);
        hear_eight(own, x, first, told);
        for (u32 eight = threadIdx.x; eight < eights; eight += THREADS) {
            Eight more = own;
            if (eight != threadIdx.x) more = eight_of(x, eight), hear_eight(more, x, eight, told);
            ((float4 *)row)[2 * eight] = more.a, ((float4 *)row)[2 * eight + 1] = more.b;
        }
        __syncthreads();
        float scale = norm_of(row, line.n[0], __uint_as_float(line.n[3]), lanes);
        for (u32 eight = threadIdx.x; eight / 32 * 32 < eights; eight += THREADS) {
            if (eight != threadIdx.x) {
                u32 at = min(eight, eights - 1);
                own = eight_of(x, at), by = eight_of(weight, at);
            }
            float4 a = own.a, b = own.b, c = by.a, d = by.b;
            float v[8] = {(a.x * scale) * c.x, (a.y * scale) * c.y, (a.z * scale) * c.z, (a.w * scale) * c.w,
                          (b.x * scale) * d.x, (b.y * scale) * d.y, (b.z * scale) * d.z, (b.w * scale) * d.w};
            round_eight(v, eight, eight < eights, Q8_0, in);
        }
    } else {
        // The next are on their way while some are rounded.
        Eight one = eight_of(x, min(threadIdx.x, eights - 1)), two = eight_of(x, min(threadIdx.x + THREADS, eights - 1));
        for (u32 eight = threadIdx.x; eight / 32 * 32 < eights; eight += THREADS) {
            hear_eight(one, x, min(eight, eights - 1), told);
            float4 a = one.a, b = one.b;
            float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            round_eight(v, eight, eight < eights, Q8_0, in);
            one = two, two = eight_of(x, min(eight + 2 * THREADS, eights - 1));
        }
    }
    __syncthreads();
}

// Adds COUNT terms of a row to what came before, one after the other. Those that follow are on their way.
template <u32 COUNT> __device__ __forceinline__ float fold_some(float sum, const float4 *terms) {
    float4 v[COUNT / 4];
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; i++) v[i] = terms[i];
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; i++) sum = (((sum + v[i].x) + v[i].y) + v[i].z) + v[i].w;
    return sum;
}

// The same with so many terms: a multiple of eight, and CHUNK at most.
__device__ __forceinline__ float fold_on(float sum, const float *terms, u32 count) {
    const float4 *fours = (const float4 *)terms;
    if (count == CHUNK) return fold_some<CHUNK>(sum, fours);
    for (u32 at = 0; at < count; at += 8) sum = fold_some<8>(sum, fours + at / 4);
    return sum;
}

// A lane's units of a slot, out of it.
struct Taken {
    Unit units[2][PAIR];
};

__device__ __forceinline__ Taken take(const u8 *slot) {
    const u32 lane = threadIdx.x % 32;
    Taken t;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            const u32 place = i * SPAN + half * 32 + lane;
            t.units[half][i].a = *(const uint4 *)(slot + place * 16);
            t.units[half][i].x = *(const u16 *)(slot + SLOT_SCALES + place * 2);
        }
    return t;
}

// Their terms. What is beyond a row's end is nobody's.
__device__ __forceinline__ void give_terms(const Taken &t, const Met<Q4_0> met[2], float *to) {
    const u32 lane = threadIdx.x % 32;
    const Weights none = {nullptr, 0};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            const Unit &unit = t.units[half][i];
            float term = term_of<Q4_0>(unpack<Q4_0>(none, unit, 0), numbers_of<Q4_0>(unit), met[half]);
            to[i * APART_TERMS + half * 32 + lane] = term;
        }
}

// The matrix and row whose sum a lane keeps: lane 2 i has the first of the pair i, and lane 2 i + 1 the second. Of a
// gated pair, the first has what both make together.
__device__ __forceinline__ u32 place_of(const Line &line, u32 pair, u32 *matrix) {
    const u32 lane = threadIdx.x % 32;
    u32 own = pair + lane / PAIR * WARPS, row, last;
    *matrix = 0;
    if (line.n[4] == GATED) return own;
    rows_of(line, own, matrix, &row, &last);
    return row + lane % PAIR;
}

// n: 0 width, 1 what others tell, 2 how inputs get ready, 3 epsilon, 4 keep, 6 pairs of rows of the first matrix, 7 of the
// first two, 8.. rows of up to three matrices, 16 and 17 see `own_pairs`, 18 the next such line's number and one, or 0.
// p: 0 input, 1 norm's weight, 2, 3, 4 matrices, 5, 6, 7 outs, 8 what results are added to, 9, 10, 11 more outs or 0.
// A gated pair is a row of each of two matrices.
__device__ __forceinline__ void stream_line(const Line &line, u8 *memory, const u8 *ring, Ahead &ahead, u32 &slot,
                                            const From &from) {
    const u32 width = line.n[0], each = units_of(width), keep = line.n[4];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Who has no rows needs no inputs.
    if (line.n[16] == 0 && blockIdx.x >= line.n[17]) return;
    Inputs in;
    in.low = (int4 *)memory;
    in.high = in.low + each;
    in.scale = (float *)(in.high + each);
    in.sum = (int *)(in.scale + each);
    float *numbers = (float *)(memory + (each * 40 + 15) / 16 * 16);
    double *lanes = (double *)(numbers + width);
    stream_inputs(line, in, numbers, lanes);
    // Terms lie where the row was.
    float *to = numbers + warp * TERM_FLOATS;
    u32 pair, end;
    own_pairs(line, blockIdx.x, &pair, &end);
    const u32 most = each <= CHUNK ? PAIRS : 1;
    while (pair < end) {
        const u32 pairs = min(most, (end - pair + WARPS - 1) / WARPS);
        const bool own = lane < pairs * PAIR;
        u32 matrix, row = place_of(line, own ? pair : pair - lane / PAIR * WARPS, &matrix);
        float *out = (float *)line.p[5 + matrix] + row, *kept = (float *)line.p[9 + matrix];
        // What a result is added to is on its way in the meantime.
        const float *added = (const float *)line.p[8] + row;
        float sum = 0.0f, there = own && keep == INTO ? look(added) : 0.0f;
        for (u32 begin = 0; begin < each; begin += CHUNK) {
            u32 count = min((u32)CHUNK, each - begin);
            for (u32 i = 0; i < pairs; i++)
                for (u32 at = 0; at < count; at += SPAN) {
                    const u32 unit = begin + at + lane;
                    const Met<Q4_0> met[2] = {met_by<Q4_0>(in, unit), met_by<Q4_0>(in, unit + 32)};
                    asm volatile("cp.async.wait_group %0;" :: "n"(SLOTS - 1) : "memory");
                    __syncwarp();
                    const Taken taken = take(ring + slot * SLOT_BYTES);
                    __syncwarp();
                    slot = slot + 1 == SLOTS ? 0 : slot + 1;
                    send_for(ahead, from);
                    give_terms(taken, met, to + i * PAIR * APART_TERMS + at);
                }
            __syncwarp();
            if (own) sum = fold_on(sum, to + lane * APART_TERMS, count);
            __syncwarp();
        }
        if (keep == GATED) {
            sum = gate_of(sum, __shfl_down_sync(~0u, sum, 1));
        } else if (keep == INTO) {
            if (own && !is_written(there)) there = hear(added, line.n[1] & ADDED);
            sum = there + sum;
        }
        if (own && (keep != GATED || lane % PAIR == 0)) {
            tell(out, sum);
            if (kept) kept[row] = sum;
        }
        pair += pairs * WARPS;
    }
}
#endif
