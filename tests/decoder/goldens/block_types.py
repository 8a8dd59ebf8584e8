#!/usr/bin/env python3
"""Makes block_types.json: blocks of every readable type, and the floats that ggml's own library decodes them to.

    block_types.py LIBGGML_BASE

LIBGGML_BASE is a built libggml-base.so; the committed file was made with the one in the npm package
@node-llama-cpp/linux-x64 3.22.1 (package/bins/linux-x64/libggml-base.so):

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xf node-llama-cpp-linux-x64-3.22.1.tgz

Each type has blocks quantised by ggml from normal random floats, and blocks of random bits whose scales are finite
halves, so that every bit of the layout counts. "Q8_0 of" are the floats from which the first blocks of Q8_0 were made.
Bytes and floats are written in hexadecimal, floats as their little-endian bytes. Needs numpy.
"""

import ctypes
import json
import os
import sys

import numpy as np

TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
# Offsets of the halves in a block: its scales.
SCALES = {"Q4_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


class TypeTraits(ctypes.Structure):  # struct ggml_type_traits of ggml.h
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("values_per_block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("bytes_per_block", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


def load(path):
    library = ctypes.CDLL(path)
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                                            ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return library


def quantize(library, number, floats, size):
    blocks = np.zeros(size, np.uint8)
    written = library.ggml_quantize_chunk(number, floats.ctypes.data, blocks.ctypes.data, 0, 1, floats.size, None)
    if written != size:
        sys.exit(f"type {number}: {written} bytes were written, {size} expected")
    return blocks


def random_blocks(rng, name, count, size):
    """[count, size] random bytes; the scales are finite halves, normal or subnormal, of either sign."""
    blocks = rng.integers(0, 256, (count, size)).astype(np.uint8)
    for offset in SCALES.get(name, []):
        halves = rng.integers(0, 0x7C00, count) | rng.integers(0, 2, count) << 15
        blocks[:, offset:offset + 2] = halves.astype("<u2").view(np.uint8).reshape(count, 2)
    return blocks


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    library = load(sys.argv[1])
    rng = np.random.default_rng(20)
    result = {}
    for name, number in TYPES.items():
        traits = library.ggml_get_type_traits(number).contents
        values, size = traits.values_per_block, traits.bytes_per_block
        whole = {1: 96, 32: 3, 256: 1}[values]  # blocks of each kind
        floats = (rng.standard_normal(whole * values) * 0.1).astype(np.float32)
        made = quantize(library, number, floats, whole * size)
        bits = random_blocks(rng, name, 2 * whole, size).reshape(-1)
        blocks = np.concatenate([made, bits])
        decoded = np.zeros(3 * whole * values, np.float32)
        traits.to_float(blocks.ctypes.data, decoded.ctypes.data, decoded.size)
        result[name] = {"blocks": blocks.tobytes().hex(), "floats": decoded.astype("<f4").tobytes().hex()}
        if name == "Q8_0":
            result["Q8_0 of"] = floats.astype("<f4").tobytes().hex()
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "block_types.json"), "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
