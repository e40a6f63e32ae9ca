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
// How a line's inputs get ready.
enum Ready { NORMED = 1, ROUNDED = 2 };

// A line's pairs of rows of this warp: the first, and what comes after the last. n: 16 pairs of every block, 17 blocks
// that have one more.
__device__ __forceinline__ void own_pairs(const Line &line, u32 *first, u32 *end) {
    u32 every = line.n[16], more = line.n[17], begin = blockIdx.x * every + min(blockIdx.x, more);
    *first = begin + threadIdx.x / 32, *end = begin + every + (blockIdx.x < more ? 1 : 0);
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
        own_pairs(*line, &a.pair, &a.end);
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

// Has a norm's weights come closer: each block some.
__device__ __forceinline__ void fetch_norm(const Line &line) {
    if (line.kind != STREAMED || line.n[2] != NORMED || threadIdx.x != 0) return;
    for (u32 at = blockIdx.x * 32; at < line.n[0]; at += gridDim.x * 32)
        asm volatile("prefetch.global.L2 [%0];" :: "l"(line.p[1] + at * 4));
}

// Eight numbers.
struct Eight {
    float4 a, b;
};

__device__ __forceinline__ Eight eight_of(const float *from, u32 eight) {
    const float4 *at = (const float4 *)from + 2 * eight;
    return {__ldcg(at), __ldcg(at + 1)};
}

// A row of numbers becomes inputs in shared memory.
__device__ __forceinline__ void stream_inputs(const Line &line, const Inputs &in, float *row, double *lanes) {
    const u32 eights = line.n[0] / 8;
    const float *x = (const float *)line.p[0], *weight = (const float *)line.p[1];
    const bool normed = line.n[2] == NORMED;
    if (normed) {
        // All but the first eights of a thread are read again: rows are seldom that long.
        const u32 first = min(threadIdx.x, eights - 1);
        Eight own = eight_of(x, first), by = eight_of(weight, first);
        for (u32 eight = threadIdx.x; eight < eights; eight += THREADS) {
            Eight more = eight == threadIdx.x ? own : eight_of(x, eight);
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
        for (u32 begin = threadIdx.x; begin / 32 * 32 < eights; begin += 3 * THREADS) {
            // What a thread rounds comes at once.
            Eight some[3];
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (begin + i * THREADS < eights) some[i] = eight_of(x, begin + i * THREADS);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                u32 eight = begin + i * THREADS;
                float4 a = some[i].a, b = some[i].b;
                float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                if (eight / 32 * 32 < eights) round_eight(v, eight, eight < eights, Q8_0, in);
            }
        }
    }
    __syncthreads();
}

// Adds terms of a row to what came before, one after the other.
__device__ __forceinline__ float fold_on(float sum, const float *terms, u32 count) {
    const float4 *fours = (const float4 *)terms;
    u32 at = 0;
    for (; at + 8 <= count / 4; at += 8) {
        float4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = fours[at + i];
#pragma unroll
        for (int i = 0; i < 8; i++) sum = (((sum + v[i].x) + v[i].y) + v[i].z) + v[i].w;
    }
    for (; at < count / 4; at++) {
        float4 v = fours[at];
        sum = (((sum + v.x) + v.y) + v.z) + v.w;
    }
    return sum;
}

// The terms of a slot's units.
__device__ __forceinline__ void slot_terms(const u8 *slot, const Inputs &in, u32 first, u32 each, float *to) {
    const u32 lane = threadIdx.x % 32;
    const Weights none = {nullptr, 0};
#pragma unroll
    for (int half = 0; half < SPAN / 32; half++) {
        u32 place = half * 32 + lane, unit = first + place;
        Met<Q4_0> met = met_by<Q4_0>(in, min(unit, each - 1));
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            Unit loaded;
            loaded.a = *(const uint4 *)(slot + (i * SPAN + place) * 16);
            u32 x = *(const u16 *)(slot + SLOT_SCALES + (i * SPAN + place) * 2);
            float term = term_of<Q4_0>(unpack<Q4_0>(none, loaded, 0), x, met);
            if (unit < each) to[i * APART_TERMS + place] = term;
        }
    }
}

// Where a lane keeps the sum of its row: lane 2 i has the first of the pair i, and lane 2 i + 1 the second. Of a gated
// pair, the first has what both make together.
__device__ __forceinline__ float *place_of(const Line &line, u32 pair) {
    const u32 lane = threadIdx.x % 32;
    u32 own = pair + lane / PAIR * WARPS, matrix = 0, row, last;
    if (line.n[4] == GATED) return (float *)line.p[5] + own;
    rows_of(line, own, &matrix, &row, &last);
    return (float *)line.p[5 + matrix] + row + lane % PAIR;
}

// n: 0 width, 2 how inputs get ready, 3 epsilon, 4 keep, 6 pairs of rows of the first matrix, 7 of the first two,
// 8.. rows of up to three matrices, 16 and 17 see `own_pairs`, 18 the next such line's number and one, or 0. p: 0 input,
// 1 norm's weight, 2, 3, 4 matrices, 5, 6, 7 outs. A gated pair is a row of each of two matrices.
__device__ __forceinline__ void stream_line(const Line &line, u8 *memory, const u8 *ring, Ahead &ahead, u32 &slot,
                                            const From &from) {
    const u32 width = line.n[0], each = units_of(width), keep = line.n[4];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Inputs in;
    in.low = (int4 *)memory;
    in.high = in.low + each;
    in.scale = (float *)(in.high + each);
    in.sum = (int *)(in.scale + each);
    float *row = (float *)(memory + (each * 40 + 15) / 16 * 16);
    double *lanes = (double *)(row + width);
    stream_inputs(line, in, row, lanes);
    // Terms lie where the row was.
    float *to = row + warp * TERM_FLOATS;
    u32 pair, end;
    own_pairs(line, &pair, &end);
    const u32 most = each <= CHUNK ? PAIRS : 1;
    while (pair < end) {
        const u32 pairs = min(most, (end - pair + WARPS - 1) / WARPS);
        const bool own = lane < pairs * PAIR;
        float *out = place_of(line, own ? pair : pair - lane / PAIR * WARPS);
        // What a result is added to is on its way in the meantime.
        float sum = 0.0f, there = own && keep == INTO ? read(out) : 0.0f;
        for (u32 begin = 0; begin < each; begin += CHUNK) {
            u32 count = min((u32)CHUNK, each - begin);
            for (u32 i = 0; i < pairs; i++)
                for (u32 at = 0; at < count; at += SPAN) {
                    asm volatile("cp.async.wait_group %0;" :: "n"(SLOTS - 1) : "memory");
                    __syncwarp();
                    slot_terms(ring + slot * SLOT_BYTES, in, begin + at, each, to + i * PAIR * APART_TERMS + at);
                    __syncwarp();
                    slot = slot + 1 == SLOTS ? 0 : slot + 1;
                    send_for(ahead, from);
                }
            if (own) sum = fold_on(sum, to + lane * APART_TERMS, count);
            __syncwarp();
        }
        if (keep == GATED) {
            float up = __shfl_down_sync(~0u, sum, 1);
            if (own && lane % PAIR == 0) *out = gate_of(sum, up);
        } else if (own) {
            *out = keep == INTO ? there + sum : sum;
        }
        pair += pairs * WARPS;
    }
}
#endif
