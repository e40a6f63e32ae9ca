# SPDX-License-Identifier: Apache-2.0
"""Makes the Q4_K test vectors beside this script with the decoder of the `gguf` package.

It is not part of the build: the vectors are kept in the repository, and this script
says where they came from. README.md describes the files.

    pip install gguf numpy
    python make_q4_k_vectors.py
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

SEED = 20260107
BLOCK_BYTES = 144
HERE = Path(__file__).parent

# (d, dmin) as f16 bits, for blocks whose other bytes are random.
EDGE_SCALES = [
    (0x0000, 0x2E66),  # d is zero
    (0x8000, 0x0000),  # d is minus zero, dmin is zero
    (0xB266, 0x2E66),  # d is negative
    (0x3266, 0xAE66),  # dmin is negative
    (0x0001, 0x03FF),  # the smallest and the largest subnormal
    (0x83FF, 0x8001),  # the same, negative and swapped
    (0x7BFF, 0x7BFF),  # the largest finite value twice
]


def random_blocks(rng, count):
    """Random bytes with d in [0.001, 0.1) and dmin in [0.001, 0.05)."""
    blocks = rng.integers(0, 256, size=(count, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, 0:2] = rng.uniform(0.001, 0.1, (count, 1)).astype("<f2").view(np.uint8)
    blocks[:, 2:4] = rng.uniform(0.001, 0.05, (count, 1)).astype("<f2").view(np.uint8)
    return blocks


def edge_blocks(rng):
    """One block per pair of EDGE_SCALES, then three with extreme scales and quants."""
    blocks = random_blocks(rng, len(EDGE_SCALES) + 3)
    for block, scales in zip(blocks, EDGE_SCALES):
        block[0:4] = np.array(scales, dtype="<u2").view(np.uint8)
    blocks[-3, 4:] = 0xFF
    blocks[-2, 4:16] = 0xFF
    blocks[-1, 4:16] = 0x00
    return blocks


def decode(blocks):
    return dequantize(blocks, GGMLQuantizationType.Q4_K)


def save(name, array):
    array.tofile(HERE / name)
    print(f"  {name}: {array.nbytes} bytes")


def main():
    rng = np.random.default_rng(SEED)
    print(f"gguf {version('gguf')}, numpy {np.__version__}, seed {SEED}")

    blocks = np.concatenate([random_blocks(rng, 6), edge_blocks(rng)])
    save("q4_k_blocks.bin", blocks)
    save("q4_k_values.bin", decode(blocks).astype("<f4"))

    m, k, n = 5, 1024, 7
    a = random_blocks(rng, m * k // 256).reshape(m, -1)
    b = random_blocks(rng, n * k // 256).reshape(n, -1)
    product = decode(a).astype(np.float64) @ decode(b).astype(np.float64).T
    save("q4_k_a.bin", a)
    save("q4_k_b.bin", b)
    save("q4_k_product.bin", product.astype("<f8"))


if __name__ == "__main__":
    main()
