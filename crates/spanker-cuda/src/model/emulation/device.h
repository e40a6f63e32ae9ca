// SPDX-License-Identifier: Apache-2.0
// An emulation of what the kernel asks of a graphics processor, for tests on a host: in place of device.cu, so that a C++
// compiler for the host compiles the kernel's own source.
//
// A block is a thread of the host, and its threads are fibers that take turns where the kernel synchronises or polls. Shared
// memory is the thread's, and begins as numbers that are none. Asynchronous copies arrive when they are waited for and not
// before. Not emulated: how strongly a processor orders memory, its caches, and time.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <time.h>
#include <type_traits>
#include <vector>

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(bytes) alignas(bytes)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int4 make_int4(u32 x, u32 y, u32 z, u32 w) { return {(int)x, (int)y, (int)z, (int)w}; }

template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a > (C)b ? (C)a : (C)b;
}

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of another number");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(u32 bits) { return bits_as<float>(bits); }
inline u32 __float_as_uint(float value) { return bits_as<u32>(value); }
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(i8)(a >> i) * (int)(i8)(b >> i);
    return sum;
}
inline u32 __vsub4(u32 a, u32 b) {
    u32 out = 0;
    for (int i = 0; i < 32; i += 8) out |= ((a >> i) - (b >> i) & 0xff) << i;
    return out;
}
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

[[noreturn]] inline void stop(const char *why) {
    fprintf(stderr, "the emulated kernel stopped: %s\n", why);
    abort();
}
[[noreturn]] inline void __trap() { stop("a trap"); }

// ---------------------------------------------------------------- fibers

#define MOST_THREADS 512
#define STACK_BYTES (128 << 10)
// A fiber that waits looks so often, of which many are while other blocks work.
#define MOST_LOOKS (1ull << 26)

struct Place { u32 x; };
static thread_local Place threadIdx, blockIdx, gridDim;

#if defined(__x86_64__)
extern "C" void emulation_switch(void **from, void *to);
asm(R"(
    .text
    .local emulation_switch
    .type emulation_switch, @function
emulation_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
#else
#error "threads of a block are emulated on x86-64 alone"
#endif

struct Copy {
    u8 *to;
    u8 bytes[16];
    u32 group, length;
};

struct Fiber {
    void *stack_pointer;
    std::vector<Copy> copies;
    u32 groups;
    u64 warp_steps;
};

// What the lanes of a warp give each other: two steps in turn, of which nobody is further than one ahead.
struct Warp {
    u64 given[2][32];
    u64 arrivals;
};

struct Named { u32 count; u64 turn; };

// A block.
struct Block {
    u32 threads, current, done;
    // Fibers take turns upwards or downwards.
    bool backwards;
    void *home;
    Fiber fibers[MOST_THREADS];
    Warp warps[MOST_THREADS / 32];
    Named barriers[16];
    u64 ticks;
};
static thread_local Block *block;

static void go_to(u32 next) {
    Block &b = *block;
    if (next == b.current) return;
    Fiber &from = b.fibers[b.current];
    b.current = next, threadIdx.x = next;
    emulation_switch(&from.stack_pointer, b.fibers[next].stack_pointer);
}

// The next fiber of the block, whatever it waits for.
static void give_way() {
    const u32 n = block->threads, at = block->current;
    const u32 next = block->backwards ? (at + n - 1) % n : (at + 1) % n;
    if (next == 0) std::this_thread::yield();
    go_to(next);
}

// The next lane of the warp.
static void give_way_to_lane() {
    const u32 at = block->current;
    go_to(at / 32 * 32 + (at + (block->backwards ? 31 : 1)) % 32);
}

static void barrier_on(Named &barrier, u32 count, bool waits) {
    const u64 turn = barrier.turn;
    if (++barrier.count == count) {
        barrier.count = 0, barrier.turn++;
        return;
    }
    for (u64 looks = 0; waits && barrier.turn == turn; looks++) {
        if (looks > MOST_LOOKS) stop("a barrier that not all threads reach");
        give_way();
    }
}

inline void __syncthreads() { barrier_on(block->barriers[0], block->threads, true); }

// Gives a lane's number to its warp and returns everybody's.
static const u64 *together(u64 given) {
    Fiber &fiber = block->fibers[block->current];
    Warp &warp = block->warps[block->current / 32];
    u64 *all = warp.given[fiber.warp_steps % 2];
    all[block->current % 32] = given;
    warp.arrivals++;
    fiber.warp_steps++;
    for (u64 looks = 0; warp.arrivals < fiber.warp_steps * 32; looks++) {
        if (looks > MOST_LOOKS) stop("lanes of a warp that do not come together");
        // A lane may be at a barrier of the block.
        looks % 64 == 63 ? give_way() : give_way_to_lane();
    }
    return all;
}

template <class T> inline T lane_of(T value, u32 from) {
    u64 given = 0;
    memcpy(&given, &value, sizeof value);
    const u64 *all = together(given);
    memcpy(&value, all + from, sizeof value);
    return value;
}
inline void __syncwarp() { together(0); }
template <class T> inline T __shfl_sync(u32, T value, u32 from, u32 width = 32) {
    const u32 lane = threadIdx.x % 32;
    return lane_of(value, lane / width * width + from % width);
}
template <class T> inline T __shfl_xor_sync(u32, T value, u32 by, u32 = 32) { return lane_of(value, threadIdx.x % 32 ^ by); }
template <class T> inline T __shfl_down_sync(u32, T value, u32 by, u32 width = 32) {
    const u32 lane = threadIdx.x % 32;
    return lane_of(value, lane % width + by < width ? lane + by : lane);
}
inline bool __all_sync(u32, bool value) {
    const u64 *all = together(value);
    bool every = true;
    for (int i = 0; i < 32; i++) every = every && all[i];
    return every;
}
inline u32 largest_in_warp(u32 bits) {
    const u64 *all = together(bits);
    u32 most = 0;
    for (int i = 0; i < 32; i++) most = max(most, (u32)all[i]);
    return most;
}
// Numbers of a lane of a product on tensor cores, for its whole warp.
template <u32 COUNT> inline void share(const u32 *own, u32 all[32][COUNT]) {
    for (u32 i = 0; i < COUNT; i++) {
        const u64 *given = together(own[i]);
        for (u32 lane = 0; lane < 32; lane++) all[lane][i] = (u32)given[lane];
    }
}
inline int byte_at(u32 word, u32 at) { return (i8)(word >> 8 * at); }
inline void multiply_bytes(int out[4], const u32 a[4], uint2 b, int from) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b.x, b.y}, lane = threadIdx.x % 32;
    u32 all[32][6];
    share<6>(own, all);
    for (u32 i = 0; i < 4; i++) {
        const u32 row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;
        int sum = from;
        for (u32 k = 0; k < 32; k++)
            sum += byte_at(all[row + k % 16 / 4][i / 2 + k / 16 * 2], k % 4) * byte_at(all[column + k % 16 / 4][4 + k / 16], k % 4);
        out[i] = sum;
    }
}
inline float half_of(u16 h);
inline void multiply_halves(float out[4], const u32 a[2], u32 b) {
    const u32 own[3] = {a[0], a[1], b}, lane = threadIdx.x % 32;
    u32 all[32][3];
    share<3>(own, all);
    for (u32 i = 0; i < 4; i++) {
        const u32 row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;
        float sum = 0.0f;
        for (u32 k = 0; k < 8; k++)
            sum += half_of((u16)(all[row + k / 2][i / 2] >> k % 2 * 16)) * half_of((u16)(all[column + k / 2][2] >> k % 2 * 16));
        out[i] = sum;
    }
}
inline void multiply_more_halves(float out[4], const u32 a[4], uint2 b) {
    float more[4];
    const u32 rest[2] = {a[2], a[3]};
    multiply_halves(out, a, b.x);
    multiply_halves(more, rest, b.y);
    for (u32 i = 0; i < 4; i++) out[i] += more[i];
}
inline u32 mask_and_flip(u32 bits, u32 mask, u32 flipped) { return (bits & mask) ^ flipped; }
inline void __nanosleep(u32) { give_way(); }
inline u32 emulated_clock() { return (u32)(block->ticks += 50); }
#define clock emulated_clock

// ---------------------------------------------------------------- numbers

inline float half_of(u16 h) {
    const u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    const float value = exponent == 0 ? ldexpf((float)mantissa, -24) : ldexpf((float)(mantissa | 0x400), (int)exponent - 25);
    return sign ? -value : value;
}

inline u16 to_half(float f) {
    const u32 bits = __float_as_uint(f);
    const u16 sign = bits >> 16 & 0x8000;
    const float most = fabsf(f);
    if (f != f) return 0x7fff;
    if (most >= 65520.0f) return sign | 0x7c00;
    if (most < 0x1p-14f) return sign | (u16)nearbyintf(most * 0x1p24f);
    // Ties go to the even mantissa.
    const u32 kept = (bits & 0x7fffffffu) - (112u << 23);
    return sign | (u16)(kept + 0xfff + (kept >> 13 & 1) >> 13);
}

inline float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

// As inexact as a processor's may be.
inline double approximate_root(double y) {
    return bits_as<double>(bits_as<u64>(1.0 / sqrt(y)) & ~0xffffffffull);
}

inline int dot16u(uint4 w, int4 q) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    const int others[4] = {q.x, q.y, q.z, q.w};
    int sum = 0;
    for (int i = 0; i < 4; i++)
        for (int at = 0; at < 32; at += 8) sum += (int)(words[i] >> at & 0xff) * (int)(i8)(others[i] >> at);
    return sum;
}

// ---------------------------------------------------------------- the card's memory

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T load_once(const T *p) { return *p; }
inline u32 atomicAdd(u32 *p, u32 by) { return __atomic_fetch_add(p, by, __ATOMIC_SEQ_CST); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void publish(float *p, float value) { __atomic_store_n((u32 *)p, __float_as_uint(value), __ATOMIC_SEQ_CST); }
// Who reads so may wait for somebody.
inline float load_relaxed(const float *p) {
    give_way();
    return __uint_as_float(__atomic_load_n((const u32 *)p, __ATOMIC_SEQ_CST));
}
inline float4 load_relaxed(const float4 *p) {
    const float *of = (const float *)p;
    return {load_relaxed(of), load_relaxed(of + 1), load_relaxed(of + 2), load_relaxed(of + 3)};
}
inline u64 load_relaxed(const u64 *p) {
    give_way();
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
inline void count_release(u64 *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }
// What is prefetched must be there.
inline void prefetch_line(u64 address) { (void)*(const volatile u8 *)address; }
inline void prefetch_bytes(const u8 *from, u32 bytes) {
    for (u32 at = 0; at < bytes; at += 16) (void)*(const volatile u8 *)(from + at);
}
inline u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000ull + now.tv_nsec;
}

// ---------------------------------------------------------------- shared memory

#define SHARED_BYTES (227 << 10)
alignas(128) static thread_local u8 shared[SHARED_BYTES];

inline u32 shared_address(const void *p) { return (u32)((const u8 *)p - shared); }
inline u8 *shared_place(u32 address) { return shared + (int)address; }
inline void store_pair(u32 to, const u8 *one, const u8 *two) {
    const u8 *pair[2] = {one, two};
    memcpy(shared_place(to), pair, 16);
}
inline void load_pair(u32 from, u64 &one, u64 &two) {
    memcpy(&one, shared_place(from), 8);
    memcpy(&two, shared_place(from) + 8, 8);
}
inline u64 load_shared(u32 from) {
    u64 v;
    memcpy(&v, shared_place(from), 8);
    return v;
}

inline void copy_async(u32 to, const u8 *from) {
    Fiber &fiber = block->fibers[block->current];
    if ((to | (u32)(u64)from) % 16) stop("an asynchronous copy that is not aligned");
    Copy copy = {shared_place(to), {}, fiber.groups, 16};
    memcpy(copy.bytes, from, 16);
    fiber.copies.push_back(copy);
}
inline void copy_async_eight(u32 to, const u8 *from) {
    Fiber &fiber = block->fibers[block->current];
    if ((to | (u32)(u64)from) % 8) stop("an asynchronous copy that is not aligned");
    Copy copy = {shared_place(to), {}, fiber.groups, 8};
    memcpy(copy.bytes, from, 8);
    fiber.copies.push_back(copy);
}
inline void copy_async_once(u32 to, u64 from, bool there) {
    if (there) copy_async(to, (const u8 *)from);
}
inline void commit_copies() { block->fibers[block->current].groups++; }
// Groups before this one arrive.
inline void arrive_copies(u32 group) {
    std::vector<Copy> &copies = block->fibers[block->current].copies;
    size_t at = 0;
    for (; at < copies.size() && copies[at].group < group; at++) memcpy(copies[at].to, copies[at].bytes, copies[at].length);
    copies.erase(copies.begin(), copies.begin() + at);
}
template <u32 GROUPS> inline void await_copies() {
    const u32 groups = block->fibers[block->current].groups;
    if (groups > GROUPS) arrive_copies(groups - GROUPS);
}
inline void await_all_copies() { arrive_copies(~0u); }

template <u32 COUNT> inline void barrier_arrive(u32 barrier) { barrier_on(block->barriers[barrier], COUNT, false); }
template <u32 COUNT> inline void barrier_wait(u32 barrier) { barrier_on(block->barriers[barrier], COUNT, true); }
