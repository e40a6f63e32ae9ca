// SPDX-License-Identifier: Apache-2.0
// Copies pieces of memory end to end: what an audit captures of a step.

typedef unsigned int u32;
typedef unsigned long long u64;

// As `Piece` of device.rs has it.
struct Piece {
    u64 from, into, stride;
    u32 rows, length;
};

struct Pieces {
    Piece all[PIECES];
};

template <class T> __device__ void copy(const Piece &piece) {
    const u32 each = piece.length / sizeof(T), count = piece.rows * each;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += gridDim.y * blockDim.x)
        ((T *)piece.into)[i] = ((const T *)(piece.from + i / each * piece.stride))[i % each];
}

// A piece for each block in x, which the blocks in y share.
extern "C" __global__ void spanker_gather(const Pieces pieces) {
    const Piece &piece = pieces.all[blockIdx.x];
    const u64 all = piece.from | piece.into | piece.length | (piece.rows > 1 ? piece.stride : 0);
    if (all % 16 == 0) copy<uint4>(piece);
    else if (all % 4 == 0) copy<u32>(piece);
    else if (all % 2 == 0) copy<unsigned short>(piece);
    else copy<unsigned char>(piece);
}
