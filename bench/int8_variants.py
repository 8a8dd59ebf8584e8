#!/usr/bin/env python3
"""Ways to compute attention in 8 bits: what each does to the output on recorded layers, and how many products it takes.

    OPENBLAS_NUM_THREADS=1 int8_variants.py FOLDER [--out bench/results/int8_variants.json]

FOLDER holds a capture, tinyllama_*.safetensors: post-RoPE q, k and v of layers. Each way is modelled in double: numbers are rounded as the
way rounds them, sums are exact. The last 128 queries attend to all keys before them and their own; all heads count. The error is that of
the output against attention in double, both as root mean squares over a layer. `all` is the root mean square over layers. Time
is products alone: float does 1 multiply-add where bfloat16 does 2 and 8 bits do 4; softmax, packing and scaling are not in it.

Needs numpy.
"""

import argparse
import collections
import json
import pathlib

import numpy as np

CHUNK = 128  # queries
BLOCK, QUAD, PANEL = 112, 4, 32  # keys of a block, keys of a product of values, rows of a panel: AVX-512
FLOAT, BF16, INT8 = 1.0, 1 / 2, 1 / 4  # time of a multiply-add


# ---- captures -------------------------------------------------------------------------------------------------------------


def layers_of(folder):
    """{layer: (q [q_heads, len, dim], k, v [kv_heads, len, dim])}"""
    (file,) = sorted(pathlib.Path(folder).glob("tinyllama_*.safetensors"))
    data = file.read_bytes()
    head = int.from_bytes(data[:8], "little")
    of = {}
    for name, one in json.loads(data[8:8 + head]).items():
        if name != "__metadata__":
            begin, end = (8 + head + at for at in one["data_offsets"])
            dtype = {"F16": np.float16, "F32": np.float32}[one["dtype"]]
            of[name] = np.frombuffer(data[begin:end], dtype).reshape(one["shape"]).astype(np.float64)
    names = dict.fromkeys(name.split(".")[0] for name in of)
    return file.name, {name: tuple(of[f"{name}.{which}"] for which in "qkv") for name in sorted(names, key=lambda n: int(n[5:]))}


Head = collections.namedtuple("Head", "q k v hidden past")  # q [rows, dim]: of all query heads of a KV head; hidden [rows, keys]


def heads_of(q, k, v):
    group, length = len(q) // len(k), k.shape[1]
    hidden = np.arange(length) > np.arange(length - CHUNK, length)[:, None]
    for i in range(len(k)):
        rows = q[i * group:(i + 1) * group, -CHUNK:].reshape(-1, q.shape[2])
        yield Head(rows, k[i], v[i], np.tile(hidden, (group, 1)), length - CHUNK)


# ---- rounding --------------------------------------------------------------------------------------------------------------


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def scale_of(x, axis=-1):
    return np.abs(x).max(axis, keepdims=True) / 127.0


def codes(x, scale):
    return np.rint(x / np.where(scale > 0.0, scale, 1.0))


def int8(x, axis=-1):
    """What codes with a scale a row stand for."""
    scale = scale_of(x, axis)
    return codes(x, scale) * scale


def rotated(x, apart=4):
    """int8_packing.hpp: the Hadamard transform of channels c, c + 4, c + 8, ... in groups of at most 8 slabs of 16; its own inverse."""
    slabs = x.shape[-1] // 16
    out, first = np.empty_like(x), 0
    while first < slabs:
        group = next(n for n in (8, 4, 2, 1) if n <= slabs - first)
        part = slice(16 * first, 16 * (first + group))
        size = 16 // apart * group
        out[..., part] = np.einsum("ij,...jc->...ic", hadamard(size), x[..., part].reshape(*x.shape[:-1], size, apart)).reshape(x[..., part].shape)
        first += group
    return out


def by_slabs(x):
    """The same of channels c, c + 16, c + 32, ..."""
    return rotated(x, 16)


def hadamard(size):
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


# ---- logits: each gives x [rows, keys] without scale and mask, and the time of a multiply-add -------------------------------


def exact_logits(h):
    return h.q @ h.k.T, FLOAT


def bf16_logits(h):
    return bf16(h.q) @ bf16(h.k).T, BF16


def rotated_logits(h):
    return int8(rotated(h.q)) @ int8(rotated(h.k)).T, INT8


def whole(x):
    """All channels in one Hadamard transform, which is its own inverse."""
    return x @ hadamard(x.shape[-1])


def plain_logits(h):
    return int8(h.q) @ int8(h.k).T, INT8


def slab_logits(h):
    return int8(by_slabs(h.q)) @ int8(by_slabs(h.k)).T, INT8


def wholly_rotated_logits(h):
    return int8(whole(h.q)) @ int8(whole(h.k)).T, INT8


def less_mean(turn, by_block):
    """Softmax does not see the mean of the past; that of a block is given back by one product in float."""
    def logits(h):
        mean = np.broadcast_to(h.k[:h.past].mean(0), h.k.shape)
        if by_block:
            blocks = np.arange(len(h.k)) // BLOCK
            mean = np.array([h.k[blocks == b].mean(0) for b in range(blocks[-1] + 1)])[blocks]
        x = int8(turn(h.q)) @ int8(turn(h.k - mean)).T
        return (x + h.q @ mean.T, INT8 + FLOAT / BLOCK) if by_block else (x, INT8)
    return logits


def apart(turn, which):
    """A 16th of the channels in bfloat16, the others in 8 bits: the largest of the past's keys, those with the largest products with the
    queries, or RoPE's slowest pairs, which are adjacent."""
    def logits(h):
        dim = h.q.shape[1]
        few = dim // 16
        size = (h.k[:h.past] ** 2).mean(0) * ((h.q ** 2).mean(0) if which == "products" else 1.0)
        chosen = np.arange(dim - few, dim) if which == "slow" else np.argsort(-size)[:few]
        out = np.zeros(dim, bool)
        out[chosen] = True
        rest = int8(turn(np.where(out, 0.0, h.q))) @ int8(turn(np.where(out, 0.0, h.k))).T
        return rest + bf16(h.q[:, out]) @ bf16(h.k[:, out]).T, INT8 * 15 / 16 + BF16 / 16
    return logits


def balanced(turn):
    """Channels of keys divided, those of queries multiplied, so that both have the same mean square."""
    def logits(h):
        by = np.sqrt(np.sqrt((h.k[:h.past] ** 2).mean(0) / (h.q ** 2).mean(0)))
        return int8(turn(h.q * by)) @ int8(turn(h.k / by)).T, INT8
    return logits


def two_steps(rows, time):
    """8 bits for all; again, `time` a multiply-add, where one of `rows` rows gives a key more than 2^-8 of its largest weight."""
    def logits(h):
        x, exact = rotated_logits(h)[0], bf16_logits(h)[0] if time == BF16 else exact_logits(h)[0]
        seen = np.where(h.hidden, -np.inf, x) / np.sqrt(h.q.shape[1])
        again = seen > seen.max(1, keepdims=True) - 8 * np.log(2)
        again = np.repeat(again.reshape(-1, rows, again.shape[1]).any(1), rows, 0)
        return np.where(again, exact, x), INT8 + time * again[~h.hidden].mean()
    return logits


# ---- weights and values: each gives the output [rows, dim] from logits, and the time of a multiply-add ----------------------


def exact_values(x, h):
    w = np.exp(x - x.max(1, keepdims=True))
    return w @ h.v / w.sum(1, keepdims=True), FLOAT


def bf16_values(x, h):
    w = bf16(np.exp(x - x.max(1, keepdims=True)))
    return w @ bf16(h.v) / w.sum(1, keepdims=True), BF16


def coded_values(x, v, part=None, skipped=None):
    """int8_panels.hpp: weights have 255 steps below what adds most of a block, e^x times the value's scale. `part`: channels that share a scale
    (all), 0 for a scale of each channel and block, which weights have no part in. skipped: gets [quads left out, quads]."""
    top, out = x.max(1, keepdims=True), np.zeros((len(x), v.shape[1]))
    total = np.exp(x - top).sum(1, keepdims=True)
    for first in range(0, len(v), BLOCK):
        xb, vb = x[:, first:first + BLOCK], v[first:first + BLOCK]
        for c in range(0, v.shape[1], part or v.shape[1]):
            channels = slice(c, c + (part or v.shape[1]))
            scale = scale_of(vb[:, channels], 0 if part == 0 else 1)
            g = np.ones((len(vb), 1)) if part == 0 else scale
            with np.errstate(divide="ignore"):
                added = xb + np.log(g[:, 0])
            reference = np.maximum(xb.max(1, keepdims=True) - 60.0, added.max(1, keepdims=True))
            reference = np.where(np.isfinite(reference), reference, 0.0)
            w = np.rint(255.0 * np.exp(xb - reference) * g[:, 0])
            sums = w @ codes(vb[:, channels], scale)
            out[:, channels] += np.exp(reference - top) / 255.0 * (sums * scale if part == 0 else sums)
            if skipped is not None:
                nothing = (w == 0.0) | (xb < top - 16 * np.log(2))
                nothing = nothing[:, :len(vb) // QUAD * QUAD].reshape(-1, PANEL, len(vb) // QUAD, QUAD).all((1, 3))
                skipped += nothing.sum(), nothing.size
    return out / total


def row_values(x, h):
    return coded_values(x, h.v), INT8


def channel_values(x, h):
    return coded_values(x, h.v, 0), INT8


def turned_values(x, h):
    return rotated(coded_values(x, rotated(h.v))), INT8


def slab_values(x, h):
    return by_slabs(coded_values(x, by_slabs(h.v))), INT8


def wholly_turned_values(x, h):
    return whole(coded_values(x, whole(h.v))), INT8


def centred_values(x, h):
    mean = h.v[:h.past].mean(0)
    return rotated(coded_values(x, rotated(h.v - mean))) + mean, INT8


def sparse_values(x, h):
    """Quads of keys that no row of a panel gives a step, or 2^-16 of its largest weight, are left out."""
    skipped = np.zeros(2)
    out = rotated(coded_values(x, rotated(h.v), None, skipped))
    return out, INT8 * (1 - skipped[0] / skipped[1])


# ---- the ways ----------------------------------------------------------------------------------------------------------------

same = lambda x: x  # noqa: E731
WAYS = {
    "bfloat16": (bf16_logits, bf16_values),
    "int8, as the library has it": (rotated_logits, turned_values),
    "logits int8, values float": (rotated_logits, exact_values),
    "logits float, values int8": (exact_logits, turned_values),
    "logits int8, values bfloat16": (rotated_logits, bf16_values),
    "logits bfloat16, values int8": (bf16_logits, turned_values),
    "nothing rotated": (plain_logits, row_values),
    "values not rotated": (rotated_logits, row_values),
    "queries and keys not rotated": (plain_logits, turned_values),
    "channels 16 apart rotated, values not: as it was": (slab_logits, row_values),
    "channels 16 apart rotated": (slab_logits, slab_values),
    "all channels in one rotation": (wholly_rotated_logits, wholly_turned_values),
    "keys less the past's mean": (less_mean(rotated, False), turned_values),
    "keys less the past's mean, not rotated": (less_mean(same, False), turned_values),
    "keys less a block's mean": (less_mean(rotated, True), turned_values),
    "keys less a block's mean, not rotated": (less_mean(same, True), turned_values),
    "largest channels apart": (apart(rotated, "largest"), turned_values),
    "largest channels apart, not rotated": (apart(same, "largest"), turned_values),
    "slow RoPE pairs apart": (apart(rotated, "slow"), turned_values),
    "slow RoPE pairs apart, not rotated": (apart(same, "slow"), turned_values),
    "channels with the largest products apart": (apart(rotated, "products"), turned_values),
    "channels of keys and queries balanced": (balanced(rotated), turned_values),
    "balanced, all channels in one rotation": (balanced(whole), wholly_turned_values),
    "two steps, pair by pair": (two_steps(1, FLOAT), turned_values),
    "two steps, panel by panel": (two_steps(PANEL, FLOAT), turned_values),
    "two steps in bfloat16, panel by panel": (two_steps(PANEL, BF16), turned_values),
    "values: a scale a channel and block, not rotated": (rotated_logits, channel_values),
    "values less the past's mean": (rotated_logits, centred_values),
    "largest channels apart, values bfloat16": (apart(rotated, "largest"), bf16_values),
    "keys without weight left out of the values": (rotated_logits, sparse_values),
}


def attend(h, way):
    logits, values = way
    x, logit_time = logits(h)
    out, value_time = values(np.where(h.hidden, -np.inf, x / np.sqrt(h.q.shape[1])), h)
    return out, (logit_time + value_time) / 2


def rounded(x):
    return float(f"{x:.4g}")


def store(path, head, results):
    """A row a line."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ",\n".join("  " + json.dumps(one) for one in results)
    pathlib.Path(path).write_text("{\n" + ",\n".join([*parts, f' "results": [\n{lines}\n ]']) + "\n}\n")


def arguments(what, out):
    """The folder of the capture, and where results go."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--out", default=out)
    return parser.parse_args()


def main():
    flags = arguments(__doc__, "int8_variants.json")
    file, layers = layers_of(flags.folder)
    squares, time, sizes = collections.defaultdict(dict), collections.defaultdict(list), collections.Counter()
    for layer, of in layers.items():
        for i, h in enumerate(heads_of(*of)):
            true, _ = attend(h, (exact_logits, exact_values))
            sizes[layer] += (true ** 2).sum()
            for name, way in WAYS.items():
                out, cost = attend(h, way)
                squares[name][layer, i] = ((out - true) ** 2).sum()
                time[name].append(cost)
        print(layer, flush=True)
    # Mixes: what is worst in 8 bits is computed in bfloat16.
    ours, sixteen = squares["int8, as the library has it"], squares["bfloat16"]
    share = {at: ours[at] / sizes[at[0]] for at in ours}
    of_layer = {layer: sum(x for at, x in share.items() if at[0] == layer) for layer in layers}
    worst_layer = max(of_layer, key=of_layer.get)
    worst_heads = sorted(share, key=share.get)[-len(share) // 4:]
    mixes = {"the worst layer in bfloat16": [at for at in share if at[0] == worst_layer],
             "the worst quarter of KV heads in bfloat16": worst_heads}
    for name, chosen in mixes.items():
        squares[name] = {at: sixteen[at] if at in chosen else ours[at] for at in ours}
        time[name] = [BF16 if at in chosen else INT8 for at in ours]
    results = []
    for name in squares:
        error = {layer: np.sqrt(sum(x for at, x in squares[name].items() if at[0] == layer) / sizes[layer]) for layer in layers}
        of_all = np.sqrt(np.mean([x ** 2 for x in error.values()]))
        results.append({"way": name, "time": rounded(np.mean(time[name])), "all": rounded(of_all),
                        "error": {layer: rounded(x) for layer, x in error.items()}})
        print(f"{name:52} {results[-1]['time']:.3f} {of_all:.2e} ", *(f"{x:.2e}" for x in error.values()))
    store(flags.out, {"command": "OPENBLAS_NUM_THREADS=1 python3 bench/int8_variants.py FOLDER --out bench/results/int8_variants.json",
                      "capture": file, "queries": CHUNK, "layers": list(layers)}, results)


if __name__ == "__main__":
    main()
