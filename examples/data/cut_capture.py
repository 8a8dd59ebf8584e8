#!/usr/bin/env python3
"""Cuts layers and KV heads out of a capture, into a smaller safetensors file.

    cut_capture.py IN OUT --layers 11 --kv-heads 0,1

A capture holds NAME.q [q_heads, len, head_dim] and NAME.k, NAME.v [kv_heads, len, dim] for each layer; a leading
batch axis of 1 is allowed. Every KV head that is kept brings the query heads that read it (q_head // group), so the
cut is a capture of the same form. Types and values are kept bit for bit, and the metadata too, with one more entry,
"cut", that says what was taken. Python's standard library is all it needs.
"""

import argparse
import json
import os
import struct
import sys


def read_header(file):
    """Returns (header, data_start), or raises ValueError."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"the file has {size} bytes; the header length alone takes 8")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise ValueError(f"the header length is {length} but only {size - 8} bytes follow it")
    header = json.loads(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            sound = 0 <= begin <= end <= size - 8 - length and all(extent >= 0 for extent in entry["shape"])
            sound = sound and isinstance(entry["dtype"], str)
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise ValueError(f"tensor {name!r}: dtype, shape or data_offsets are not sound")
    return header, 8 + length


def heads_of(header, name):
    """Number of heads of a tensor [heads, len, dim] or [1, heads, len, dim]."""
    if name not in header:
        raise ValueError(f"there is no tensor {name!r}")
    shape = header[name]["shape"]
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[0] != 1) or shape[-3] == 0:
        raise ValueError(f"tensor {name!r} has shape {shape}; [heads, len, dim] of batch 1 is needed")
    return shape[-3]


def cut(file, layers, kv_heads):
    """Yields (name, entry without offsets, bytes) for every tensor of the cut; and what was cut, as name None."""
    header, data_start = read_header(file)
    taken = []
    for layer in layers:
        if f"{layer}.q" not in header:
            layer = f"layer{layer}"
        n_q, n_kv = heads_of(header, f"{layer}.q"), heads_of(header, f"{layer}.k")
        if n_q % n_kv or heads_of(header, f"{layer}.v") != n_kv:
            raise ValueError(f"{layer}: {n_q} query heads do not fit {n_kv} KV heads")
        group = n_q // n_kv
        for head in kv_heads:
            if not 0 <= head < n_kv:
                raise ValueError(f"{layer}: there is no KV head {head} among {n_kv}")
        q_heads = [head * group + i for head in kv_heads for i in range(group)]
        for suffix, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
            entry = header[f"{layer}.{suffix}"]
            begin, end = entry["data_offsets"]
            per_head, rest = divmod(end - begin, entry["shape"][-3])
            if rest:
                raise ValueError(f"{layer}.{suffix}: {end - begin} bytes do not divide into {entry['shape'][-3]} heads")
            data = bytearray()
            for head in heads:
                file.seek(data_start + begin + head * per_head)
                data += file.read(per_head)
            yield f"{layer}.{suffix}", {"dtype": entry["dtype"], "shape": [len(heads), *entry["shape"][-2:]]}, data
        taken.append(f"{layer}: KV heads {kv_heads} of {n_kv} with their query heads {q_heads} of {n_q}")
    metadata = dict(header.get("__metadata__", {}))
    metadata["cut"] = "; ".join(filter(None, [metadata.get("cut"), f"from {os.path.basename(file.name)}", *taken]))
    yield None, metadata, b""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="IN")
    parser.add_argument("output", metavar="OUT")
    parser.add_argument("--layers", required=True, help="numbers or names, with commas: 11 or layer11,layer16")
    parser.add_argument("--kv-heads", required=True, help="numbers from 0, with commas: 0,1")
    arguments = parser.parse_args()
    try:
        layers = arguments.layers.split(",")
        kv_heads = [int(head) for head in arguments.kv_heads.split(",")]
        if len(set(layers)) != len(layers) or len(set(kv_heads)) != len(kv_heads):
            raise ValueError("a layer or a KV head is named twice")
        if os.path.exists(arguments.output) and os.path.samefile(arguments.input, arguments.output):
            raise ValueError("IN and OUT are the same file")

        header, parts, begin = {}, [], 0
        with open(arguments.input, "rb") as file:
            for name, entry, data in cut(file, layers, kv_heads):
                if name is None:
                    header = {"__metadata__": entry, **header}
                elif name in header:
                    raise ValueError(f"{name} is taken twice")
                else:
                    header[name] = {**entry, "data_offsets": [begin, begin + len(data)]}
                    parts.append(data)
                    begin += len(data)
        text = json.dumps(header).encode("utf-8")
        text += b" " * (-len(text) % 8)  # data starts on 8 bytes, for readers that map the file
        with open(arguments.output, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for data in parts:
                file.write(data)
    except (OSError, ValueError) as error:
        sys.exit(f"cut_capture.py: {arguments.input}: {error}")


if __name__ == "__main__":
    main()
