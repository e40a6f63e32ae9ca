// SPDX-License-Identifier: Apache-2.0
// Folds the same elements of several buffers in card order and writes the result to all of them, or to one.
//
// Compiled for one element type (TYPE_..) and one operation (OP_..), without contraction: every element gets the
// bits of the serial fold. Elements are folded in ACC, which is float for the 16-bit types, and rounded once.
//
// PIECES: how many loads of 16 bytes a thread has in flight, over all buffers; STREAMING: whether caches are told that
// nothing is used twice; THREADS: threads of a block.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// --- elements --------------------------------------------------------------------------------------------------

#if defined(TYPE_F32)
typedef float Element;
typedef float Acc;
__device__ __forceinline__ Acc widen(Element x) { return x; }
__device__ __forceinline__ Element narrow(Acc x) { return x; }
#elif defined(TYPE_F64)
typedef double Element;
typedef double Acc;
__device__ __forceinline__ Acc widen(Element x) { return x; }
__device__ __forceinline__ Element narrow(Acc x) { return x; }
#elif defined(TYPE_F16)
typedef u16 Element;
typedef float Acc;
__device__ __forceinline__ Acc widen(Element x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}
__device__ __forceinline__ Element narrow(Acc x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#elif defined(TYPE_BF16)
typedef u16 Element;
typedef float Acc;
__device__ __forceinline__ Acc widen(Element x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ Element narrow(Acc x) {
    u32 bits = __float_as_uint(x);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32 quiet = (bits >> 16) | 0x40;
    return (Element)(x != x ? quiet : rounded);
}
#elif defined(TYPE_I32)
typedef int Element;
typedef int Acc;
typedef u32 Bits;
#define INTEGER 0x7fffffff
#elif defined(TYPE_I64)
typedef long long Element;
typedef long long Acc;
typedef u64 Bits;
#define INTEGER 0x7fffffff
#elif defined(TYPE_U8)
typedef u8 Element;
typedef u8 Acc;
typedef u32 Bits;
#define INTEGER 0xff
#elif defined(TYPE_U32)
typedef u32 Element;
typedef u32 Acc;
typedef u32 Bits;
#define INTEGER 0x7fffffff
#else
#error "no element type"
#endif

// --- operations ------------------------------------------------------------------------------------------------

#ifdef INTEGER
// Sums and products wrap, so they are computed on the bits.
__device__ __forceinline__ Acc widen(Element x) { return x; }
__device__ __forceinline__ Element narrow(Acc x) { return x; }
__device__ __forceinline__ Acc add(Acc a, Acc b) { return (Acc)((Bits)a + (Bits)b); }
__device__ __forceinline__ Acc multiply(Acc a, Acc b) { return (Acc)((Bits)a * (Bits)b); }
__device__ __forceinline__ Acc larger(Acc a, Acc b) { return b > a ? b : a; }
__device__ __forceinline__ Acc smaller(Acc a, Acc b) { return b < a ? b : a; }
// More cards than the type can count to are more than any total.
__device__ __forceinline__ Acc over(Acc total, u32 count) {
    return count > INTEGER ? (Acc)0 : (Acc)(total / (Acc)count);
}
#else
__device__ __forceinline__ Acc add(Acc a, Acc b) { return a + b; }
__device__ __forceinline__ Acc multiply(Acc a, Acc b) { return a * b; }
// The later operand if it is larger or NaN, otherwise the earlier one.
__device__ __forceinline__ Acc larger(Acc a, Acc b) { return (b > a || b != b) ? b : a; }
__device__ __forceinline__ Acc smaller(Acc a, Acc b) { return (b < a || b != b) ? b : a; }
__device__ __forceinline__ Acc over(Acc total, u32 count) { return total / (Acc)count; }
#endif

#if defined(OP_SUM) || defined(OP_AVG)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return add(a, b); }
#elif defined(OP_PRODUCT)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return multiply(a, b); }
#elif defined(OP_MAX)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return larger(a, b); }
#elif defined(OP_MIN)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return smaller(a, b); }
#elif defined(OP_LOGSUMEXP)
// In double: one rounding for each fold.
__device__ __forceinline__ Acc fold(Acc x, Acc y) {
    double a = x, b = y;
    if (a != a || b != b) return (Acc)(a + b);
    double low = a < b ? a : b;
    double high = a < b ? b : a;
    // Both infinities of one sign have no defined difference.
    if (low == high && isinf(high)) return (Acc)high;
    return (Acc)(high + log1p(exp(low - high)));
}
#elif defined(OP_OR)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return a | b; }
#elif defined(OP_AND)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return a & b; }
#elif defined(OP_XOR)
__device__ __forceinline__ Acc fold(Acc a, Acc b) { return a ^ b; }
#else
#error "no operation"
#endif

__device__ __forceinline__ Acc finish(Acc total, u32 count) {
#ifdef OP_AVG
    return over(total, count);
#else
    return total;
#endif
}

// --- the loops -------------------------------------------------------------------------------------------------

// As many as 16 bytes hold.
#define EACH (16 / sizeof(Element))

union Pack {
    uint4 bits;
    Element at[EACH];
};

__device__ __forceinline__ uint4 load(const uint4 *from) {
#if STREAMING
    return __ldcs(from);
#else
    return *from;
#endif
}

__device__ __forceinline__ void store(uint4 *to, uint4 bits) {
#if STREAMING
    __stcs(to, bits);
#else
    *to = bits;
#endif
}

// What is the same for all threads. The elements are `head` single ones, `packs` times 16 bytes, and single ones
// again; `root` is the buffer that gets the result, or negative for all.
struct Extent {
    u64 head;
    u64 packs;
    u64 total;
    int root;
    u32 count;
};

template <u32 COUNT> struct Cards {
    Element *at[COUNT];
};

// Elements that no block of 16 bytes covers, one for each thread.
template <u32 COUNT>
__device__ __forceinline__ void singles(const Cards<COUNT> &cards, const Extent &extent, u32 count) {
    u64 covered = extent.packs * EACH;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 j = (u64)blockIdx.x * blockDim.x + threadIdx.x; j < extent.total - covered; j += stride) {
        u64 i = j < extent.head ? j : j + covered;
        Acc total = widen(cards.at[0][i]);
        for (u32 card = 1; card < count; card++) total = fold(total, widen(cards.at[card][i]));
        Element result = narrow(finish(total, count));
        if (extent.root >= 0) {
            cards.at[extent.root][i] = result;
        } else {
            for (u32 card = 0; card < count; card++) cards.at[card][i] = result;
        }
    }
}

// A number of cards that the compiler knows: all loads of a thread are under way before the first is used.
template <u32 COUNT, u32 VECTORS>
__device__ __forceinline__ void fixed(const Cards<COUNT> &cards, const Extent &extent) {
    u64 tile = (u64)blockDim.x * VECTORS;
    for (u64 base = blockIdx.x * tile; base < extent.packs; base += gridDim.x * tile) {
        Pack pieces[VECTORS][COUNT];
#pragma unroll
        for (u32 v = 0; v < VECTORS; v++) {
            u64 at = base + v * blockDim.x + threadIdx.x;
            if (at < extent.packs) {
#pragma unroll
                for (u32 card = 0; card < COUNT; card++)
                    pieces[v][card].bits = load((const uint4 *)(cards.at[card] + extent.head) + at);
            }
        }
#pragma unroll
        for (u32 v = 0; v < VECTORS; v++) {
            u64 at = base + v * blockDim.x + threadIdx.x;
            Pack result;
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
                Acc total = widen(pieces[v][0].at[e]);
#pragma unroll
                for (u32 card = 1; card < COUNT; card++) total = fold(total, widen(pieces[v][card].at[e]));
                result.at[e] = narrow(finish(total, COUNT));
            }
            if (at < extent.packs) {
                if (extent.root >= 0) {
                    store((uint4 *)(cards.at[extent.root] + extent.head) + at, result.bits);
                } else {
#pragma unroll
                    for (u32 card = 0; card < COUNT; card++)
                        store((uint4 *)(cards.at[card] + extent.head) + at, result.bits);
                }
            }
        }
    }
    singles(cards, extent, COUNT);
}

// Any number of cards: a loop over them, four loads ahead.
template <u32 COUNT>
__device__ __forceinline__ void looped(const Cards<COUNT> &cards, const Extent &extent) {
    u32 count = extent.count;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < extent.packs; at += stride) {
        Pack first;
        first.bits = load((const uint4 *)(cards.at[0] + extent.head) + at);
        Acc total[EACH];
#pragma unroll
        for (u32 e = 0; e < EACH; e++) total[e] = widen(first.at[e]);
        for (u32 card = 1; card < count; card += 4) {
            Pack next[4];
#pragma unroll
            for (u32 ahead = 0; ahead < 4; ahead++)
                if (card + ahead < count)
                    next[ahead].bits = load((const uint4 *)(cards.at[card + ahead] + extent.head) + at);
#pragma unroll
            for (u32 ahead = 0; ahead < 4; ahead++)
                if (card + ahead < count) {
#pragma unroll
                    for (u32 e = 0; e < EACH; e++) total[e] = fold(total[e], widen(next[ahead].at[e]));
                }
        }
        Pack result;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) result.at[e] = narrow(finish(total[e], count));
        if (extent.root >= 0) {
            store((uint4 *)(cards.at[extent.root] + extent.head) + at, result.bits);
        } else {
            for (u32 card = 0; card < count; card++)
                store((uint4 *)(cards.at[card] + extent.head) + at, result.bits);
        }
    }
    singles(cards, extent, count);
}

// CARDS is the number of buffers, or 0 for any. A logsumexp is long, so it is not written out for each card.
#if CARDS > 0 && !defined(OP_LOGSUMEXP)
extern "C" __global__ void __launch_bounds__(THREADS) fold_cards(const __grid_constant__ Cards<CARDS> cards,
                                                                 const __grid_constant__ Extent extent) {
    fixed<CARDS, (PIECES + CARDS - 1) / CARDS>(cards, extent);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS) fold_cards(const __grid_constant__ Cards<MOST_CARDS> cards,
                                                                 const __grid_constant__ Extent extent) {
    looped<MOST_CARDS>(cards, extent);
}
#endif
