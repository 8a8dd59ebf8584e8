"""Writes data/torch_port.txt: the keys that another implementation of QuoKA selects from the
committed capture.

    torch_port.py CompactAttention/compact_attn/modules/quoka_prefill.py > data/torch_port.txt

That is github.com/jiwonsong-dev/CompactAttention, written in PyTorch by others, at de2c14c. It is run as it is, in
single precision on a CPU; a value's first channel holds its position, so the gathered values say what was selected.

It averages the heads of a group slot by slot and takes the slots in whatever order topk(sorted=False) leaves them;
Algorithm 1 and this library rank them. So each case is run twice: as it is, and with topk set to
sort.
"""

import importlib.util
import itertools
import json
import pathlib
import struct
import sys
import types

import torch

capture = pathlib.Path(__file__).parents[2] / "examples/data/tinyllama_passkey_2046_layer11.safetensors"
# Tokens of the past, of the chunk; queries that score and keys that are kept, as shares of these.
cases = [(128, 64, 0.25, 0.5), (777, 100, 0.07, 0.1), (1024, 128, 0.125, 0.0625), (1918, 128, 0.125, 0.03125),
         (1918, 128, 0.25, 0.25), (2040, 6, 0.5, 0.02)]


def port_of(path):
    dense = types.ModuleType("compact_attn.modules.dense_prefill")  # is imported, and not called here
    dense.dense_prefill_full_kv = None
    for name in ("compact_attn", "compact_attn.modules"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[dense.__name__] = dense
    spec = importlib.util.spec_from_file_location("quoka_prefill", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(path):  # [heads, len, head_dim], float32
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bytes_of = bytearray(raw[8 + size + begin : 8 + size + end])
            found[name[-1]] = torch.frombuffer(bytes_of, dtype=torch.float16).reshape(entry["shape"]).float()
    return found


topk = torch.topk


def sorting_topk(*arguments, **options):
    return topk(*arguments, **(options | {"sorted": True}))


def main():
    port = port_of(sys.argv[1])
    x = tensors(capture)
    print("# Written by tests/programs/torch_port.py: topk, past, chunk, share of queries, share of keys, KV head, keys.")
    for order, (past, chunk, queries, keys) in itertools.product(("sorted", "as_it_is"), cases):
        torch.topk = topk if order == "as_it_is" else sorting_topk
        end = past + chunk
        k = x["k"][:, :end].permute(1, 0, 2).unsqueeze(0)
        v = torch.zeros_like(k)
        v[..., 0] = torch.arange(end).reshape(1, end, 1)
        _, selected, _ = port.select_quoka_past_key_value(
            x["q"][:, past:end].permute(1, 0, 2).unsqueeze(0), k, v, query_ratio=queries, kv_budget_ratio=keys,
            num_key_value_groups=x["q"].shape[0] // x["k"].shape[0])
        for head in range(k.shape[2]):
            print(order, past, chunk, queries, keys, head, *(int(i) for i in selected[0, :, head, 0]))


main()
