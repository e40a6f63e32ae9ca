// SPDX-License-Identifier: Apache-2.0
// What memory and launches are measured with: a stream of reads, a stream of writes, and nothing.

typedef unsigned long long u64;
typedef unsigned int u32;

// 16-byte pieces that a thread reads or writes.
#define EACH 8

extern "C" __global__ void __launch_bounds__(256) read(const uint4 *from, u64 pieces, u32 *seen) {
    u64 first = (u64)blockIdx.x * blockDim.x * EACH + threadIdx.x;
    uint4 piece[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u64 at = first + (u64)i * blockDim.x;
        piece[i] = at < pieces ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
    }
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) sum += piece[i].x + piece[i].y + piece[i].z + piece[i].w;
    // Zeros never add up to this, and the compiler does not know that they are zeros.
    if (sum == 0x5eed5eed) *seen = sum;
}

extern "C" __global__ void __launch_bounds__(256) write(uint4 *to, u64 pieces, u32 bits) {
    u64 first = (u64)blockIdx.x * blockDim.x * EACH + threadIdx.x;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u64 at = first + (u64)i * blockDim.x;
        if (at < pieces) __stcs(to + at, make_uint4(bits, bits, bits, bits));
    }
}

extern "C" __global__ void nothing() {}
