#!/usr/bin/env python3
"""One packing for selection and for attention in 8 bits? What each way to code keys gives to either, on recorded layers.

    OPENBLAS_NUM_THREADS=1 one_packing.py FOLDER [--out bench/results/one_packing.json]

Keys are coded as the sketch has them (cache/key_sketch.hpp), as attention has them (packing/int8_packing.hpp), or as q8_0 has them, in
blocks of 32 with a scale of 16 bits; queries in 8 bits in the same way. Selection: QuoKA's with the paper's defaults, 16 queries of the last 128, the
best keys of the past by cosine. `recall` is the share of the true best that are the best by codes; `again` how many keys must be
scored in float for the bound to prove the best (select/sketch/sketched_top_k.hpp), over those that are chosen. Attention: the error of the output, as
int8_variants.py has it, over the capture's keys and values and over the same after q8_0, against attention in double over the same.

Needs numpy.
"""

import collections

import numpy as np

from int8_variants import (CHUNK, arguments, bf16_logits, bf16_values, coded_values, codes, exact_logits, exact_values, heads_of, int8, layers_of,
                           rotated, rounded, scale_of, store, whole)

QUERIES = 16  # of each head


def q8_0(x):
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = scale_of(blocks)
    return (codes(blocks, scale) * scale.astype(np.float16).astype(np.float64)).reshape(x.shape)


# What turns rows first, and what codes stand for.
WAYS = {
    "the sketch's": (lambda x: x, int8),
    "`int8`'s": (rotated, int8),
    "all channels in one rotation": (whole, int8),
    "q8_0's": (lambda x: x, q8_0),
}
# Of a key of 128 channels, without room: scale, error and length; scale and the sum of codes; a scale for each 32.
BYTES = {"the sketch's": 128 + 12, "`int8`'s": 128 + 8, "all channels in one rotation": 128 + 8, "q8_0's": 128 + 8}


def kept_queries(h):
    """Of each head the queries least like the mean; their mean over heads by rank."""
    q = h.q.reshape(-1, CHUNK, h.q.shape[1])
    mean, unit = q.mean(1, keepdims=True), q / np.linalg.norm(q, axis=2, keepdims=True)
    likeness = (unit * mean).sum(2) / np.linalg.norm(mean, axis=2)
    chosen = np.argsort(likeness, 1, kind="stable")[:, :QUERIES]
    return np.take_along_axis(unit, chosen[:, :, None], 1).mean(0)


def selected(h, way, count):
    """(share of the `count` best that are the best by codes, keys that are scored again over `count`)"""
    turn, coded = way
    queries, k = kept_queries(h), h.k[:h.past]
    length = np.linalg.norm(k, axis=1)
    true = (queries @ k.T).max(0) / length
    near_k, turned = coded(turn(k)), turn(queries)
    # The scan compares integers: all queries have one scale, but for q8_0's.
    near_q = q8_0(turned) if coded is q8_0 else int8(turned.reshape(1, -1)).reshape(turned.shape)
    score = (near_q @ near_k.T).max(0) / length
    order = lambda x: np.argsort(-x, kind="stable")  # noqa: E731
    recall = len(np.intersect1d(order(true)[:count], order(score)[:count])) / count
    missed = np.linalg.norm(turned - near_q, axis=1).max()
    bound = missed + (np.linalg.norm(queries, axis=1).max() + missed) * np.linalg.norm(turn(k) - near_k, axis=1) / length
    assert (abs(true - score) <= bound + 1e-12).all()
    high, low = np.sort(score + bound)[::-1], np.sort(score - bound)[::-1]
    sure = score - bound > high[count]
    again = (score + bound >= low[count - 1]) & ~sure
    return recall, again.sum() / count


def attended(h, logits, values):
    return values(np.where(h.hidden, -np.inf, logits / np.sqrt(h.q.shape[1])), h)


def main():
    flags = arguments(__doc__, "one_packing.json")
    file, layers = layers_of(flags.folder)
    found, errors, eighth = collections.defaultdict(list), collections.defaultdict(lambda: collections.defaultdict(float)), 0
    for layer, of in layers.items():
        for h in heads_of(*of):
            eighth = h.past // 8
            for name, way in WAYS.items():
                for count in (1024, eighth):
                    found[name, count].append(selected(h, way, count))
            for cache in ("float", "q8_0"):
                here = h._replace(k=q8_0(h.k), v=q8_0(h.v)) if cache == "q8_0" else h
                true = attended(here, exact_logits(here)[0], exact_values)[0]
                errors["size", "", cache][layer] += (true ** 2).sum()
                out = attended(here, bf16_logits(here)[0], bf16_values)[0]
                errors["`bfloat16`", "own", cache][layer] += ((out - true) ** 2).sum()
                for name, (turn, coded) in WAYS.items():
                    logits = coded(turn(here.q)) @ coded(turn(here.k)).T
                    for values in ("own", "as they lie"):
                        if values == "as they lie" and coded is not q8_0:
                            continue
                        v, part = (q8_0(here.v), 32) if values == "as they lie" else (here.v, None)
                        turned = part is None  # as the library has values
                        sums = attended(here, logits, lambda x, _: coded_values(x, rotated(v) if turned else v, part))
                        out = rotated(sums) if turned else sums
                        errors[name, values, cache][layer] += ((out - true) ** 2).sum()
        print(layer, flush=True)
    results = []
    for name, values, cache in errors:
        if name == "size" or cache != "float":
            continue
        one = {"keys": name, "values": values, "bytes": BYTES.get(name)}
        for other, key in (("float", "error"), ("q8_0", "error_q8_0")):
            squares, sizes = errors[name, values, other], errors["size", "", other]
            one[key] = rounded(np.sqrt(np.mean([squares[layer] / sizes[layer] for layer in layers])))
        for count, key in ((1024, "1024"), (eighth, "eighth")):
            if (name, count) in found:
                recall, again = np.mean(found[name, count], 0)
                one |= {f"recall_{key}": rounded(recall), f"again_{key}": rounded(again)}
                one[f"least_recall_{key}"] = rounded(min(x for x, _ in found[name, count]))
        results.append(one)
        print(one)
    store(flags.out, {"command": "OPENBLAS_NUM_THREADS=1 python3 bench/one_packing.py FOLDER --out bench/results/one_packing.json", "capture": file,
                      "queries": CHUNK, "past": h.past, "eighth": eighth, "layers": list(layers)}, results)


if __name__ == "__main__":
    main()
