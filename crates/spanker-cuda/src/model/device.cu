// SPDX-License-Identifier: Apache-2.0
// What the kernel asks of a processor and C++ has no words for: its instructions, by name. The emulation that tests run has
// another file in place of this one.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// All shared memory that is asked for at the start.
extern __shared__ __align__(128) u8 shared[];

// ---------------------------------------------------------------- numbers

__device__ __forceinline__ float half_of(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// The larger of two numbers; no number if one of them is none.
__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Nearly one over the root of a number.
__device__ __forceinline__ double approximate_root(double y) {
    double r;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(y));
    return r;
}

// Products of 16 unsigned with 16 signed bytes, added up.
__device__ __forceinline__ int dot16u(uint4 w, int4 q) {
    int s;
    asm("{ dp4a.u32.s32 %0, %1, %5, 0; dp4a.u32.s32 %0, %2, %6, %0; dp4a.u32.s32 %0, %3, %7, %0; dp4a.u32.s32 %0, %4, %8, %0; }"
        : "=&r"(s) : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w));
    return s;
}

// 16 x 32 signed bytes times 32 x 8 on a warp's tensor cores, added to a number. A lane has of the first, from the first
// four bytes of its place among four lanes on, those of rows an eighth of the warp apart, and then 16 bytes further those of
// the same rows; of the second two times four bytes of a column; and of the results two neighbours of each of its rows.
__device__ __forceinline__ void multiply_bytes(int out[4], const u32 a[4], uint2 b, int from) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(from));
}

// The same of 16 x 8 f16 times 8 x 8, in f32: a lane has two neighbours of the same rows, and of a column.
__device__ __forceinline__ void multiply_halves(float out[4], const u32 a[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.0f));
}

// The same of 16 x 16 times 16 x 8: a lane has eight more numbers of each row, and of a column.
__device__ __forceinline__ void multiply_more_halves(float out[4], const u32 a[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}

// Bits of a mask, some of them changed.
__device__ __forceinline__ u32 mask_and_flip(u32 bits, u32 mask, u32 flipped) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(bits), "r"(mask), "r"(flipped));
    return out;
}

__device__ __forceinline__ u32 largest_in_warp(u32 bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, bits);
#else
    for (int by = 16; by > 0; by /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, by));
    return bits;
#endif
}

// ---------------------------------------------------------------- the card's memory

// Numbers that blocks of the kernel pass to each other are written and read past the first-level cache.
__device__ __forceinline__ void publish(float *p, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" :: "l"(p), "f"(value) : "memory");
}

__device__ __forceinline__ float4 load_relaxed(const float4 *p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ float load_relaxed(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ u64 load_relaxed(const u64 *p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// Adds one, after everything that was written before.
__device__ __forceinline__ void count_release(u64 *counter) {
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" :: "l"(counter) : "memory");
}

// What nobody writes while the kernel runs and is read once.
__device__ __forceinline__ uint4 load_once(const uint4 *p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u16 load_once(const u16 *p) {
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 load_once(const u32 *p) {
    u32 v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Has the line of an address come into the second-level cache.
__device__ __forceinline__ void prefetch_line(u64 address) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
}

// The same for so many bytes, where processors can; elsewhere nothing.
__device__ __forceinline__ void prefetch_bytes(const u8 *from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
#endif
}

// Nanoseconds of the device's clock.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// ---------------------------------------------------------------- shared memory

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void store_pair(u32 to, const u8 *one, const u8 *two) {
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" :: "r"(to), "l"(one), "l"(two) : "memory");
}

__device__ __forceinline__ void load_pair(u32 from, u64 &one, u64 &two) {
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(one), "=l"(two) : "r"(from) : "memory");
}

__device__ __forceinline__ u64 load_shared(u32 from) {
    u64 v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(from) : "memory");
    return v;
}

// Copies 16 bytes to shared memory, asynchronously.
__device__ __forceinline__ void copy_async(u32 to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

// The same of eight bytes that nobody writes while the kernel runs.
__device__ __forceinline__ void copy_async_eight(u32 to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from) : "memory");
}

// Weights are read once: what is read again stays in the second-level cache. Where it is known what `createpolicy` makes
// of that, it is a constant, which needs fewer instructions.
#if __CUDA_ARCH__ == 900
__constant__ u64 READ_ONCE = 0x12f0000000000000ull;
#endif

__device__ __forceinline__ void copy_async_once(u32 to, u64 from, bool there) {
#if __CUDA_ARCH__ == 900
    const u64 once = READ_ONCE;
#else
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
#endif
    if (there)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(once) : "memory");
}

// What was copied since the last group is a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but so many groups are there.
template <u32 GROUPS> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}

__device__ __forceinline__ void await_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Barriers of so many threads.
template <u32 COUNT> __device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}

template <u32 COUNT> __device__ __forceinline__ void barrier_wait(u32 barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}
