#!/usr/bin/env python3
"""One layer's attention by every library that is installed, in one process, in turns.

    operators.py --out FILE [--quick] [--quiet] [--seconds 6] [--only TEXT] [--again] [--entries NAME;...] [--peaks PROGRAM] [--smoke]

A row is a model's heads, a number of queries, of cached keys, of sequences and of threads, and whether a pool of ONNX Runtime spins beside. Every contender computes it once, and its output is
compared with attention in double; then all take turns until the row's seconds are used, three
rounds at least. With one thread the process's CPU time counts, so that other work on the machine
changes little; with several, wall time. A turn is as many calls as take 30 ms. --quiet: turns have
a real-time priority, if this user may; between turns others run. Rows that FILE has are not
measured again, unless --again. --only: rows with this in their name. --entries: these contenders
alone, in the rows that FILE has. --peaks: build/bench/arithmetic_rates. --smoke: one tiny row, for
tests.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import contenders
from layer import Layer, Shape
from record import Record, commit, quartiles
from turns import Quiet

MODELS = {  # query heads, KV heads, channels, sinks
    "Llama-3.1-8B, Qwen3-4B": (32, 8, 128, False),
    "Gemma 3 4B": (8, 4, 256, False),
    "GPT-OSS-20B": (64, 8, 64, True),
    "SmolLM2-135M": (9, 3, 64, False),
    "Phi-3 mini": (32, 32, 96, False),
    "Phi-2": (32, 32, 80, False),
}
LLAMA, GEMMA, OSS, SMOL, PHI3, PHI2 = MODELS
SPINNING = "a spinning pool of ONNX Runtime"


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    queries: int
    past: int
    threads: int = 1
    batch: int = 1
    beside: str = ""  # or SPINNING

    @property
    def shape(self):
        q_heads, kv_heads, head_dim, sinks = MODELS[self.model]
        return Shape(q_heads, kv_heads, head_dim, self.queries, self.past, sinks, self.batch)

    @property
    def key(self):
        return {"model": self.model, "shape": str(self.shape), **{name: getattr(self, name) for name in ("queries", "past", "threads", "batch", "beside")}}

    def __str__(self):
        return (f"{self.model}, {self.shape}, {self.queries} queries over {self.past:,} keys, {self.threads} thread(s)"
                + (f", {self.batch} sequences" if self.batch > 1 else "") + (f", beside {self.beside}" if self.beside else ""))


QUICK = [Row(LLAMA, n, 8192) for n in (128, 1, 16, 32, 512)] + [Row(LLAMA, 128, 2048), Row(LLAMA, 128, 32768)]
QUICK += [Row(name, n, 8192) for name in (GEMMA, OSS, SMOL) for n in (128, 1)] + [Row(LLAMA, n, 8192, 2) for n in (128, 1)]
FULL = QUICK + [Row(name, n, 8192) for name in (LLAMA, GEMMA, OSS, SMOL) for n in (16, 32, 512)]
FULL += [Row(name, n, 8192, 2) for name in (GEMMA, OSS, SMOL) for n in (128, 1)]
FULL += [Row(name, n, past) for past in (2048, 32768) for name in (LLAMA, GEMMA, OSS, SMOL) for n in (1, 16, 128)]
FULL += [Row(name, n, 2048) for name in (PHI3, PHI2) for n in (1, 16, 128)]
FULL += [Row(name, n, 2048, batch=8) for name in (LLAMA, SMOL) for n in (1, 16)]
FULL += [Row(LLAMA, n, 2048, 2, beside=SPINNING) for n in (1, 16, 128)] + [Row(LLAMA, n, 65536) for n in (1, 128)]
SMOKE = [Row(SMOL, 8, 64)]


class Spinning:
    """A session of ONNX Runtime with two threads that spin when they have nothing to do, as they do by default: run, they keep a core busy while the next call begins."""

    def __init__(self):
        import numpy as np
        import onnx
        import onnxruntime as ort

        n = 512
        info = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [n, n])  # noqa: E731
        graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [info("a"), info("b")], [info("c")])
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 2, 3
        model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.of = {name: np.ones((n, n), np.float32) for name in "ab"}

    def __call__(self):
        self.session.run(None, self.of)


def timed(work, calls, quiet, spin=None):
    """(wall, CPU) seconds of a call, each right after spin()."""
    wall, cpu = [], []
    with quiet:
        for _ in range(calls):
            work.before()
            if spin:
                spin()
            wall.append(-time.perf_counter())
            cpu.append(-time.process_time())
            work()
            wall[-1] += time.perf_counter()
            cpu[-1] += time.process_time()
    return sum(wall) / calls, sum(cpu) / calls


def measure(row, classes, flags, quiet):
    shape, threads = row.shape, row.threads
    layer, spin = Layer(shape), Spinning() if row.beside else None
    ready, data = {}, {}
    for entry in contenders.ENTRIES:
        if entry.of not in classes or (flags.entries and entry.name not in flags.entries) or (entry.kind == "products" and (threads > 1 or shape.queries == 1)):
            continue
        if entry.kind == "selection" and shape.past <= 1024:
            continue
        if entry.cache == "q8_0" and shape.head_dim % 32:
            data[entry.name] = {"absent": f"q8_0 has blocks of 32 channels, which do not divide {shape.head_dim}"}
            continue
        if shape.flops / 1e9 > entry.most_gflop:
            data[entry.name] = {"absent": f"left out above {entry.most_gflop} GFLOP: it is slow"}
            continue
        try:
            work = entry.of(layer, entry.cache, entry.precision, threads)
            work()
        except Exception as error:  # of someone else's code: any kind
            data[entry.name] = {"absent": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            if entry.kind == "exact":
                raise
            continue
        out = work.output()
        found = {} if out is None or entry.kind == "selection" else {"error": float(f"{layer.error(out):.2g}")}  # random keys: no sparse ones among them
        without_sinks = shape.sinks and not entry.sinks
        if without_sinks:
            found["note"] = "without sinks, which it does not know"
        elif entry.kind in ("other", "exact") and not found["error"] < contenders.largest_error(entry):
            sys.exit(f"{entry.name}, {shape}, {shape.queries} queries over {shape.past}: an error of {found['error']}, where rounding makes "
                     f"{contenders.largest_error(entry)} at most: it computes something else")
        wall, cpu = timed(work, 1, quiet, spin)
        ready[entry.name] = (entry, work, max(1, round(0.03 / max(wall, 1e-6))), [])
        data[entry.name] = found
    begin, rounds, order = time.monotonic(), 0, list(ready.values())
    while rounds < 3 or (time.monotonic() - begin < flags.seconds and rounds < 25):
        random.Random(rounds).shuffle(order)
        for _, work, calls, times in order:
            if rounds >= 3 and sum(pair[0] for pair in times) > flags.seconds / 3:
                continue  # the slowest have had their turns
            time.sleep(0.02)  # pools that spin come to rest
            times.append(timed(work, calls, quiet, spin))
        rounds += 1
    which = 1 if threads == 1 else 0
    taken = {name: [pair[which] for pair in times] for name, (_, _, _, times) in ready.items()}
    for name, (entry, work, _, times) in ready.items():
        data[name]["ms"] = quartiles([1e3 * x for x in taken[name]])
        data[name]["wall_ms"] = quartiles([1e3 * pair[0] for pair in times])[1]
        if entry.like in taken:
            data[name]["of_ours"] = quartiles([theirs / ours for theirs, ours in zip(taken[name], taken[entry.like])])
        work.close()
    return {"rounds": rounds, "entries": data}


def peaks(program):
    """GFLOP/s of one thread by instruction, as bench/arithmetic_rates has it: products held in registers."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        subprocess.run([program, "--kv-len", "256", "--chunk", "32", "--rounds", "1", "--emulated-kv-len", "64", "--json", out], check=True, stdout=subprocess.DEVNULL)
        return {one["instruction"]: round(one["gflops"], 1) for one in json.loads(out.read_text())["peaks"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peaks")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--entries", type=lambda text: text.split(";"), default=[])
    for name in ("quick", "quiet", "again", "smoke"):
        parser.add_argument(f"--{name}", action="store_true")
    flags = parser.parse_args()
    record, quiet, loud = Record(flags.out), Quiet(flags.quiet), Quiet(False)
    classes, absent = contenders.installed()
    if contenders.Exact not in classes:
        sys.exit(f"this library's Python package is missing: {absent[contenders.Exact]}")
    record.part("versions", {}).update({of.__name__: version for of, version in classes.items()})
    record.content["settings"] = {entry.name: f"{entry.of.how}; {entry.cache} cache, {entry.precision}" for entry in contenders.ENTRIES if entry.of in classes}
    record.content["like"] = {entry.name: entry.like for entry in contenders.ENTRIES if entry.like}
    record.content["kinds"] = {entry.name: entry.kind for entry in contenders.ENTRIES}
    record.content["command"] = "bash bench/side_by_side.sh layers" + "".join(f" --{name}" for name in ("quick", "quiet") if getattr(flags, name))
    import quoka

    record.content["instructions"] = {"isa": quoka.isa(), **{name: quoka.arithmetic_used(name) for name in ("bf16", "int8")}}
    unknown = [name for name in flags.entries if name not in record.content["kinds"]]
    if unknown:
        sys.exit(f"--entries: {unknown} is none of {list(record.content['kinds'])}")
    for of, why in absent.items():
        print(f"without {of.__name__}: {why}", file=sys.stderr)
    if flags.peaks:
        with quiet:
            record.content["peaks_gflops"] = peaks(flags.peaks)
    record.save()
    for row in dict.fromkeys(SMOKE if flags.smoke else QUICK if flags.quick else FULL):
        old = record.find("operators", row.key)
        if flags.only not in str(row) or row.threads > os.cpu_count() or (not old if flags.entries else old and not flags.again):
            continue
        if row.beside and contenders.OnnxRuntime not in classes:
            continue
        print(row, file=sys.stderr, flush=True)
        priority = loud if row.beside else quiet  # who spins at a real-time priority lets nobody else run
        found = {"gflop": round(row.shape.flops / 1e9, 3), "load": round(os.getloadavg()[0], 1), "quiet": priority.possible, "commit": commit(),
                 **measure(row, classes, flags, priority)}
        record.put("operators", row.key, {**old, "entries": old["entries"] | found["entries"]} if flags.entries else found)
        for entry, data in sorted(found["entries"].items(), key=lambda item: item[1].get("ms", [0, 0])[1]):
            if "ms" in data:
                print("   {:30s} {:9.2f} ms ({:.2f} to {:.2f})  error {}  {}".format(
                    entry, data["ms"][1], data["ms"][0], data["ms"][2], data.get("error", "-"), data.get("of_ours", ["", ""])[1]), file=sys.stderr, flush=True)
            else:
                print(f"   {entry}: {data['absent']}", file=sys.stderr, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
