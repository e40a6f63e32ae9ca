// SPDX-License-Identifier: Apache-2.0
// One row of inputs with many rows of weights, which are prefetched.
//
// Each warp has a ring of slots in shared memory. It fills them in the order in which it will use them, across
// instructions: while blocks wait for each other and inputs are prepared, the next weights are already being copied.
//
// The number of machine instructions is the limit. So a warp's pairs of rows use the same inputs while these are in
// registers, and one warp of four folds the terms of all four, with a row in each of 24 lanes.

#ifdef STREAM
// Compiled with SLOTS of a ring; SPAN units of two rows in each, and then their scales; and PAIRS of rows of a warp that use
// the same inputs one after the other, which is a pass.
#define PAIR 2
#define SLOT_SCALES (PAIR * SPAN * 16)
#define SLOT_BYTES (SLOT_SCALES + PAIR * SPAN * 2)
// Warps whose terms one of them folds, a row in each lane, and how far apart terms of rows are.
#define TEAM 4
#define TEAMS (WARPS / TEAM)
#define APART_TERMS (SPAN + 4)
// Pairs of a warp that are prefetched to the second-level cache during attention of other blocks, and when: ticks of the
// clock, a microsecond has about 2000.
#define FAR 2
#define FIRST_FAR 500
#define BETWEEN_FAR 2000

// The number of a warp's first pair: those that fold have the last ones, and so not more than others.
__device__ __forceinline__ u32 rank_of(u32 warp) { return WARPS - 1 - warp; }

// A block's pairs of rows of an instruction: the first, and the end. A warp has every sixteenth of them.
__device__ __forceinline__ void own_pairs(const Streamed &op, u32 block, u32 *first, u32 *end) {
    u32 every = op.block_pairs, more = op.larger_blocks;
    *first = block * every + min(block, more), *end = *first + every + (block < more ? 1 : 0);
}

// The matrix and the first row of a pair.
__device__ __forceinline__ void rows_of(const Streamed &op, u32 pair, u32 *matrix, u32 *row) {
    *matrix = 0, *row = pair;
    if (op.keep == GATED) return;
    u32 first = op.pair_ends[0], second = op.pair_ends[1];
    *matrix = pair < first ? 0 : pair < second ? 1 : 2;
    *row = (pair - (*matrix == 0 ? 0 : *matrix == 1 ? first : second)) * PAIR;
}

// Two rows, and their scales.
struct __align__(16) Rows {
    const u8 *one, *two, *one_scales, *two_scales;
};

__device__ __forceinline__ Rows rows_at(const Streamed &op, u32 pair) {
    u32 matrix, row;
    rows_of(op, pair, &matrix, &row);
    const u64 each = units_of(op.width), scales = op.rows[matrix] * each * 16;
    const u8 *one = (const u8 *)op.weights[matrix] + row * each * 16;
    const u8 *one_scales = (const u8 *)op.weights[matrix] + scales + row * each * 2;
    if (op.keep != GATED) return {one, one + each * 16, one_scales, one_scales + each * 2};
    const u8 *two = (const u8 *)op.weights[1];
    return {one, two + row * each * 16, one_scales, two + scales + row * each * 2};
}

// What a warp prefetches next.
struct Prefetch {
    // The instruction's index and one, or 0.
    u32 number;
    // The first pair of a pass and the end of the instruction's, the pass's pairs and the current one, the unit in their
    // rows, and units of a row.
    u32 pair, end, pairs, at, unit, each;
};

// What a warp needs to prefetch: its ring, rows of its pass, the window of instructions and the whole program, and the
// index of the current instruction.
struct From {
    u32 ring;
    u32 rows;
    const Instruction *window, *program;
    u32 now;

    __device__ __forceinline__ const Streamed *at(u32 number) const {
        return &(number <= now + WINDOW ? window + (number - 1) % WINDOW : program + number - 1)->streamed;
    }
};

// Begins a pass.
__device__ __forceinline__ void find_rows(Prefetch &a, const From &from, const Streamed &op) {
    const u32 lane = threadIdx.x % 32;
    a.pairs = min((u32)PAIRS, (a.end - a.pair + WARPS - 1) / WARPS);
    a.at = 0, a.unit = 0;
    __syncwarp();
    if (lane < a.pairs) {
        const Rows rows = rows_at(op, a.pair + lane * WARPS);
        const u32 to = from.rows + lane * (u32)sizeof(Rows);
        store_pair(to, rows.one, rows.two);
        store_pair(to + 16, rows.one_scales, rows.two_scales);
    }
    __syncwarp();
}

// Goes to the first instruction from `next` on with rows for this warp. If there is none, rows have no units.
__device__ __forceinline__ void find_instruction(Prefetch &a, const From &from, u32 next) {
    for (a.number = next; a.number != 0;) {
        const Streamed *op = from.at(a.number);
        own_pairs(*op, blockIdx.x, &a.pair, &a.end);
        a.pair += rank_of(threadIdx.x / 32);
        if (a.pair < a.end) {
            a.each = units_of(op->width);
            return find_rows(a, from, *op);
        }
        a.number = op->next;
    }
    a.at = 0, a.pairs = 1, a.unit = 0, a.each = 0;
}

// Prefetches a pair of a block's warp to the second-level cache: four lanes each a row, or its scales.
__device__ __forceinline__ void prefetch_pair(const Streamed &op, u32 block, u32 which) {
    const u32 part = threadIdx.x % 4, each = units_of(op.width);
    u32 pair, end;
    own_pairs(op, block, &pair, &end);
    pair += rank_of(threadIdx.x / 32) + which * WARPS;
    if (pair >= end) return;
    const Rows rows = rows_at(op, pair);
    const u8 *from = part == 0 ? rows.one : part == 1 ? rows.two : part == 2 ? rows.one_scales : rows.two_scales;
    prefetch_bytes(from, each * (part < 2 ? 16 : 2));
}

// During attention of some blocks, the others prefetch weights of the instruction after next: for themselves, and for
// those. Neither at once nor all: writes to dataflow slots would queue behind them. `next` is the instruction that waits.
__device__ __forceinline__ void prefetch_meanwhile(const Streamed &next, const Streamed &far, u32 heads) {
    if (!(next.awaits & AWAITS_INPUT)) return;
    const u32 lane = threadIdx.x % 32, start = clock();
    const float *sign = (const float *)next.input + threadIdx.x / 32;
    for (u32 which = 0; which < FAR; which++) {
        // All lanes go by the clock of the first.
        while (__shfl_sync(~0u, (u32)clock() - start, 0) < FIRST_FAR + which * BETWEEN_FAR) {
            if (__shfl_sync(~0u, is_written(load_relaxed(sign)), 0)) return;
            __nanosleep(100);
        }
        if (lane < 4) prefetch_pair(far, blockIdx.x, which);
        else if (lane < 8 && blockIdx.x - heads < heads) prefetch_pair(far, blockIdx.x - heads, which);
        __syncwarp();
    }
}

// Starts to fill a slot with what is next, if there is anything. `slot` is its offset in the ring.
__device__ __forceinline__ void prefetch_slot(Prefetch &a, const From &from, u32 slot) {
    const u32 lane = threadIdx.x % 32, unit = a.unit + lane, part = a.unit + lane % 8 * 8;
    const u32 to = from.ring + slot + lane * 16, rows = from.rows + a.at * (u32)sizeof(Rows);
    u64 one, two, scales;
    load_pair(rows, one, two);
    scales = load_shared(rows + 16 + lane / 8 % 2 * 8);
    one += (u64)unit * 16, two += (u64)unit * 16;
    // Scales first: then the compiler needs no branch for them.
    copy_async_once(to + SLOT_SCALES, scales + (u64)part * 2, lane < 16 && part < a.each);
    copy_async_once(to, one, unit < a.each), copy_async_once(to + SPAN * 16, two, unit < a.each);
    copy_async_once(to + 512, one + 512, unit + 32 < a.each), copy_async_once(to + SPAN * 16 + 512, two + 512, unit + 32 < a.each);
    // One group for each slot, whether there is anything in it or not: that is how they are counted.
    commit_copies();
    if (++a.at < a.pairs) return;
    a.at = 0, a.unit += SPAN;
    if (a.unit < a.each || a.number == 0) return;
    const Streamed *op = from.at(a.number);
    a.pair += a.pairs * WARPS;
    if (a.pair < a.end) find_rows(a, from, *op);
    else find_instruction(a, from, op->next);
}

// Eight numbers.
struct Eight {
    float4 a, b;
};

__device__ __forceinline__ Eight eight_of(const float *from, u32 eight) {
    const float4 *at = (const float4 *)from + 2 * eight;
    return {load_relaxed(at), load_relaxed(at + 1)};
}

__device__ __forceinline__ bool is_written(const Eight &v) {
    return is_written(v.a.x) && is_written(v.a.y) && is_written(v.a.z) && is_written(v.a.w) && is_written(v.b.x) &&
           is_written(v.b.y) && is_written(v.b.z) && is_written(v.b.w);
}

// Polls the slot until all of them are written.
__device__ __forceinline__ void await_eight(Eight &v, const float *from, u32 eight, bool is_slot) {
    for (u32 spins = 0; is_slot && !is_written(v); spins++) {
        __nanosleep(40);
        v = eight_of(from, eight);
        if (spins > MOST_SPINS) __trap();
    }
}

// Inputs of units in shared memory: bytes in halves of 32, and scales as f16 with sums above them, -8 times.
struct Near {
    int4 *low, *high;
    u32 *numbers;
};

__device__ __forceinline__ void store_eight(const float v[8], u32 eight, bool there, const Near &in) {
    const Rounded rounded = round_eight(v, Q8_0);
    if (!there) return;
    ((uint2 *)((eight % 4 < 2 ? in.low : in.high) + eight / 4))[eight % 2] = rounded.bytes;
    if (eight % 4 == 0) in.numbers[eight / 4] = to_half(rounded.scale) | (u32)(-8 * rounded.sum) << 16;
}

// The inputs of a unit, whatever its row.
__device__ __forceinline__ UnitInputs<Q4_0> unit_inputs(const Near &in, u32 unit) {
    UnitInputs<Q4_0> m;
    const u32 numbers = in.numbers[unit];
    m.a = in.low[unit], m.b = in.high[unit];
    m.scale = half_of(numbers & 0xffff), m.sums[0] = (int)numbers >> 16;
    return m;
}

// A row of numbers becomes inputs in shared memory.
__device__ __forceinline__ void stream_inputs(const Streamed &op, const Near &in, float *row, double *lanes) {
    const u32 eights = op.width / 8;
    const float *x = (const float *)op.input, *weight = (const float *)op.norm_weight;
    const bool normed = op.ready == NORMED, is_slot = op.awaits & AWAITS_INPUT;
    if (normed) {
        // All but the first eights of a thread are read again: rows are seldom that long.
        const u32 first = min(threadIdx.x, eights - 1);
        Eight by = eight_of(weight, first), own = eight_of(x, first);
        await_eight(own, x, first, is_slot);
        for (u32 eight = threadIdx.x; eight < eights; eight += THREADS) {
            Eight more = own;
            if (eight != threadIdx.x) more = eight_of(x, eight), await_eight(more, x, eight, is_slot);
            ((float4 *)row)[2 * eight] = more.a, ((float4 *)row)[2 * eight + 1] = more.b;
        }
        __syncthreads();
        float scale = norm_of(row, op.width, __uint_as_float(op.epsilon), lanes);
        for (u32 eight = threadIdx.x; eight / 32 * 32 < eights; eight += THREADS) {
            if (eight != threadIdx.x) {
                u32 at = min(eight, eights - 1);
                own = eight_of(x, at), by = eight_of(weight, at);
            }
            float4 a = own.a, b = own.b, c = by.a, d = by.b;
            float v[8] = {(a.x * scale) * c.x, (a.y * scale) * c.y, (a.z * scale) * c.z, (a.w * scale) * c.w,
                          (b.x * scale) * d.x, (b.y * scale) * d.y, (b.z * scale) * d.z, (b.w * scale) * d.w};
            store_eight(v, eight, eight < eights, in);
        }
    } else {
        // The next are loaded while some are rounded.
        Eight one = eight_of(x, min(threadIdx.x, eights - 1)), two = eight_of(x, min(threadIdx.x + THREADS, eights - 1));
        for (u32 eight = threadIdx.x; eight / 32 * 32 < eights; eight += THREADS) {
            await_eight(one, x, min(eight, eights - 1), is_slot);
            float4 a = one.a, b = one.b;
            float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            store_eight(v, eight, eight < eights, in);
            one = two, two = eight_of(x, min(eight + 2 * THREADS, eights - 1));
        }
    }
    __syncthreads();
}

// Barriers of teams: terms are written, and terms have been folded.
enum Barrier { FULL = 1, EMPTY = FULL + TEAMS };

// Adds COUNT terms of a row to what came before, one after the other. Those that follow are being loaded.
template <u32 COUNT> __device__ __forceinline__ float fold_some(float sum, const float4 *terms) {
    float4 v[COUNT / 4];
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; i++) v[i] = terms[i];
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; i++) sum = (((sum + v[i].x) + v[i].y) + v[i].z) + v[i].w;
    return sum;
}

// The same with so many terms: a multiple of eight, and SPAN at most.
__device__ __forceinline__ float fold_on(float sum, const float *terms, u32 count) {
    const float4 *fours = (const float4 *)terms;
    if (count >= SPAN) return fold_some<SPAN>(sum, fours);
    for (u32 at = 0; at < count; at += 8) sum = fold_some<8>(sum, fours + at / 4);
    return sum;
}

// A lane's two units of each of a slot's rows, in registers.
struct SlotUnits {
    Unit units[PAIR][2];
};

__device__ __forceinline__ SlotUnits read_slot(const u8 *slot) {
    const u32 lane = threadIdx.x % 32;
    SlotUnits t;
#pragma unroll
    for (int i = 0; i < PAIR; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 place = i * SPAN + half * 32 + lane;
            t.units[i][half].a = *(const uint4 *)(slot + place * 16);
            t.units[i][half].x = *(const u16 *)(slot + SLOT_SCALES + place * 2);
        }
    return t;
}

// Writes their terms. Terms beyond a row's end are not used.
__device__ __forceinline__ void write_terms(const SlotUnits &t, const UnitInputs<Q4_0> inputs[2], float *to) {
    const u32 lane = threadIdx.x % 32;
    const Weights none = {nullptr, 0};
#pragma unroll
    for (int i = 0; i < PAIR; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Unit &unit = t.units[i][half];
            float term = term_of<Q4_0>(unpack<Q4_0>(none, unit, 0), numbers_of<Q4_0>(unit), inputs[half]);
            to[i * APART_TERMS + half * 32 + lane] = term;
        }
}

__device__ __forceinline__ void streamed(const Streamed &op, u8 *memory, const u8 *ring, Prefetch &next, u32 &slot,
                                            const From &from) {
    const u32 width = op.width, each = units_of(width), keep = op.keep;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A block without rows needs no inputs.
    if (op.block_pairs == 0 && blockIdx.x >= op.larger_blocks) return;
    const u32 places = (each + SPAN - 1) / SPAN * SPAN;
    Near in;
    in.low = (int4 *)memory;
    in.high = in.low + places;
    in.numbers = (u32 *)(in.high + places);
    // A row that is normed, and then terms.
    float *numbers = (float *)(in.numbers + places);
    const bool gated = keep == GATED;
    u32 begin, end;
    own_pairs(op, blockIdx.x, &begin, &end);
    // The first warp of a team folds the terms of all: a lane has a row of a warp's pass.
    const u32 team = warp % TEAMS, mate = warp / TEAMS, place = lane % (PAIRS * PAIR);
    const u32 folded = begin + rank_of(lane / (PAIRS * PAIR) * TEAMS + team) + place / PAIR * WARPS;
    float *terms = numbers + team * TEAM * PAIRS * PAIR * APART_TERMS;
    float *out = nullptr, *store = nullptr, there = 0.0f;
    const float *added = nullptr;
    bool own = false;
    auto begin_pass = [&](u32 pass) {
        own = mate == 0 && lane < TEAM * PAIRS * PAIR && folded + pass * WARPS < end;
        if (!own) return;
        u32 matrix, row;
        rows_of(op, folded + pass * WARPS, &matrix, &row);
        if (!gated) row += place % PAIR;
        out = (float *)op.outs[matrix] + row;
        store = op.stores[matrix] ? (float *)op.stores[matrix] + row : nullptr;
        // What a result is added to is loaded in the meantime.
        added = (const float *)op.added + row;
        if (keep == INTO) there = load_relaxed(added);
    };
    // Nothing of it waits for inputs.
    begin_pass(0);
    stream_inputs(op, in, numbers, (double *)(numbers + width));
    float *to = terms + mate * PAIRS * PAIR * APART_TERMS;
    u32 pair = begin + rank_of(warp);
    const u32 passes = (end - begin + WARPS - 1) / WARPS;
    for (u32 pass = 0; pass < passes; pass += PAIRS) {
        const u32 pairs = pair < end ? min((u32)PAIRS, (end - pair + WARPS - 1) / WARPS) : 0;
        float sum = 0.0f;
        for (u32 unit = 0; unit < each; unit += SPAN) {
            const UnitInputs<Q4_0> inputs[2] = {unit_inputs(in, unit + lane), unit_inputs(in, unit + 32 + lane)};
            const bool first = pass == 0 && unit == 0;
            if (pairs == 0 && mate != 0 && !first) barrier_wait<TEAM * 32>(EMPTY + team);
            for (u32 i = 0; i < pairs; i++) {
                await_copies<SLOTS - 1>();
                __syncwarp();
                const SlotUnits units = read_slot(ring + slot);
                __syncwarp();
                prefetch_slot(next, from, slot);
                slot = slot == (SLOTS - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
                // Earlier terms have been folded.
                if (i == 0 && mate != 0 && !first) barrier_wait<TEAM * 32>(EMPTY + team);
                write_terms(units, inputs, to + i * PAIR * APART_TERMS);
            }
            if (mate != 0) {
                barrier_arrive<TEAM * 32>(FULL + team);
            } else {
                barrier_wait<TEAM * 32>(FULL + team);
                if (own) sum = fold_on(sum, terms + lane * APART_TERMS, each - unit);
                __syncwarp();
                if (unit + SPAN < each || pass + PAIRS < passes) barrier_arrive<TEAM * 32>(EMPTY + team);
            }
        }
        if (mate == 0) {
            if (gated) {
                sum = gate_of(sum, __shfl_down_sync(~0u, sum, 1));
            } else if (keep == INTO) {
                if (own && !is_written(there)) there = await_slot(added, op.awaits & AWAITS_ADDED);
                sum = there + sum;
            }
            if (own && (!gated || place % PAIR == 0)) {
                publish(out, sum);
                if (store) *store = sum;
            }
            if (pass + PAIRS < passes) begin_pass(pass + PAIRS);
            __syncwarp();
        }
        pair += PAIRS * WARPS;
    }
}
#endif
