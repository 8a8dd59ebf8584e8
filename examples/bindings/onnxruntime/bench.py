#!/usr/bin/env python3
"""One layer's attention by ONNX Runtime's GroupQueryAttention and by quoka's, in one process in turns.

    bench.py LIBRARY [--out FILE.json] [--rounds 9] [--threads 1 2] [--queries 128 512 1] [--keys 8192 32768] [--types float32 float16]

LIBRARY: libonnxruntime-quoka.so. Shape of Llama-3.1-8B: 32/8 heads of 128 channels. Past and present are one buffer for each,
so that only the chunk's keys and values are written. Before each timed call of a selection comes an
untimed one over q_len fewer keys, so that the timed call adds codes of that many keys, as in a
prefill. Milliseconds, quartiles; as root each turn has real-time priority. "product": what the
runtime's MatMul of 1024 x 1024 x 1024 floats reaches in the same turns, GFLOP/s. Needs onnx and
onnxruntime.
"""
import argparse
import pathlib
import sys
import time

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "bench" / "side_by_side")]
import record  # noqa: E402
import rewrite  # noqa: E402
import turns  # noqa: E402

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
WAYS = {"ONNX Runtime": None, "exact": {}, "int8": {"arithmetic": "int8"}, "balanced": {"preset": "balanced", "budget": 1024},
        "paper": {"preset": "paper", "budget": 1024}}


def session(graph, library, threads):
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(name, version) for name, version in
                                                                   (("", 20), ("com.microsoft", 1), ("quoka", 1))])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # once a call is over: the next one is another session's
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Way:
    """A node with its buffers, over data that all ways share."""

    def __init__(self, own, data, library, threads):
        queries, self.keys = data["query"].shape[1], data["past_key"].shape[2]
        of = TensorProto.FLOAT if data["query"].dtype == np.float32 else TensorProto.FLOAT16
        names = rewrite.INPUTS[:7]
        node = helper.make_node("GroupQueryAttention", names, ["output", "present_key", "present_value"],
                                domain="com.microsoft" if own is None else "quoka", num_heads=Q_HEADS, kv_num_heads=KV_HEADS, **(own or {}))
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT32 if i >= 5 else of, None) for i, name in enumerate(names)]
        outputs = [helper.make_tensor_value_info(name, of, None) for name in node.output]
        self.session = session(helper.make_graph([node], "layer", inputs, outputs), library, threads)
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in data.items()}
        self.values["output"] = ort.OrtValue.ortvalue_from_numpy(np.zeros_like(data["query"]))
        self.whole, self.before = (self._binding(keys) for keys in (self.keys, self.keys - queries))
        self.selects = bool(own) and "preset" in own

    def _binding(self, keys):
        lens = [ort.OrtValue.ortvalue_from_numpy(np.array([value], np.int32)) for value in (keys - 1, keys)]
        binding = self.session.io_binding()
        for name, value in zip(("seqlens_k", "total_sequence_length"), lens):
            binding.bind_ortvalue_input(name, value)
        for name, value in self.values.items():
            if name == "output":
                binding.bind_ortvalue_output(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
                if name.startswith("past_"):
                    binding.bind_ortvalue_output(name.replace("past", "present"), value)
        return binding, lens

    def prepare(self):
        if self.selects:
            self.session.run_with_iobinding(self.before[0])

    def __call__(self):
        self.session.run_with_iobinding(self.whole[0])


class Product:
    def __init__(self, library, threads, size=1024):
        of = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in "abc"]
        self.session = session(helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", of[:2], of[2:]), library, threads)
        self.feeds, self.gflop = {name: np.ones((size, size), np.float32) for name in "ab"}, 2 * size**3 * 1e-9

    def prepare(self):
        pass

    def __call__(self):
        self.session.run(None, self.feeds)


def measure(shape, args, rng):
    queries, keys, dtype, threads = (shape[name] for name in ("queries", "keys", "type", "threads"))

    def normal(*size):
        return rng.standard_normal(size, np.float32).astype(dtype)

    data = {"query": normal(1, queries, Q_HEADS * DIM)} | {name: normal(1, queries, KV_HEADS * DIM) for name in ("key", "value")}
    data |= {"past_" + name: normal(1, KV_HEADS, keys, DIM) for name in ("key", "value")}
    ways = {name: Way(own, data, args.library, threads) for name, own in WAYS.items() if not (queries == 1 and (name == "int8" or "preset" in (own or {})))}
    product = Product(args.library, threads)
    taken, quiet = {name: [] for name in [*ways, "product"]}, turns.Quiet(True)
    for turn in range(args.rounds + 1):
        for name, way in [*ways.items(), ("product", product)]:
            with quiet:
                way.prepare()
                began = time.perf_counter()
                way()
                if turn:
                    taken[name].append(1e3 * (time.perf_counter() - began))
    reference = ways["ONNX Runtime"].values["output"].numpy().astype(np.float32)
    error = float(np.abs(ways["exact"].values["output"].numpy() - reference).max() / np.abs(reference).max())
    bound = 1e-4 if dtype == "float32" else 2e-3
    if not error < bound:
        sys.exit(f"{shape}: exact is {error:.2g} off ONNX Runtime's, which rounding does not explain ({bound})")
    gflop = 4e-9 * Q_HEADS * DIM * queries * (keys - (queries - 1) / 2)
    return {"milliseconds": {name: record.quartiles(values) for name, values in taken.items() if name != "product"}, "error": float(f"{error:.2g}"), "gflop": round(gflop, 3),
            "product": round(1e3 * product.gflop / record.quartiles(taken["product"])[1], 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--out", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--queries", type=int, nargs="+", default=[128, 512, 1])
    parser.add_argument("--keys", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--types", nargs="+", default=["float32", "float16"], choices=["float32", "float16"])
    args = parser.parse_args()
    kept = record.Record(args.out) if args.out else None
    if kept:
        kept.content["command"] = "examples/bindings/onnxruntime/bench.py LIBRARY --out FILE.json"
        kept.content["versions"] = {"onnxruntime": ort.__version__, "onnx": onnx.__version__}
    rng = np.random.default_rng(3)
    for dtype in args.types:
        for threads in args.threads:
            for keys in args.keys:
                for queries in args.queries:
                    shape = {"type": dtype, "threads": threads, "keys": keys, "queries": queries}
                    if kept and kept.find("results", shape):
                        continue
                    row = {"rounds": args.rounds} | measure(shape, args, rng)
                    times = "  ".join(f"{name} {values[1]:.4g}" for name, values in row["milliseconds"].items())
                    print(f"{dtype}, {threads} threads, {queries} queries, {keys} keys: {times} ms; off by {row['error']}; product {row['product']} GFLOP/s", flush=True)
                    if kept:
                        kept.put("results", shape, row)


if __name__ == "__main__":
    main()
