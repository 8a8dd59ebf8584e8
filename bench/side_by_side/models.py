#!/usr/bin/env python3
"""Whole models: seconds to the first token by every engine that is installed, processes in turns,
and each one's loss.

    models.py --out FILE --text emma.txt --programs build/examples/bindings/ggml [--rounds 3] [--threads 2] [--quick] [--quiet] [--again] [--loss-alone] NAME=MODEL.gguf ...

llama.cpp with and without the plug-in: one process of `first_token`, one ubatch of random tokens at each of four depths, added up
to a prompt. With --ik-llama FOLDER, ik_llama.cpp, a build of it in that folder: its llama-sweep-bench, all ubatches of random tokens, over each type of
cache. The others compute the prompt as it is, the text's first tokens. Attention's time is
the part that grows with the square of the length, from two lengths, or from two depths. The loss of
OpenVINO and transformers is the likelihood of the text's tokens beside transformers' sdpa with
weights in float; real_models.sh measures that of llama.cpp. --quick: one round, without
transformers and losses.
"""

import argparse
import importlib.metadata
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from record import Record, commit, quartiles

HERE = pathlib.Path(__file__).resolve().parent
LENGTHS, DEPTHS, UBATCH = (2048, 8192), "0,2048,4096,7680", 512
MODES = [f"{mode}:arithmetic={arithmetic}" for mode in ("exact", "balanced") for arithmetic in ("float", "bf16", "int8")]
MODES.append("balanced:budget=0.125:arithmetic=int8")
OTHERS = ["openvino", "openvino:xattention=0.8", "openvino:precision=f32"]
TRANSFORMERS = ["transformers:sdpa", "transformers:exact", "transformers:exact:arithmetic=int8", "transformers:balanced:budget=0.125:arithmetic=int8"]


IK_LLAMA = [f"ik_llama.cpp:{cache}" for cache in ("f16", "bf16", "q8_0")]


def named(engine):
    """As pages call it."""
    mode, *settings = engine.split(":")
    return " ".join([mode, *(x.removeprefix("arithmetic=") for x in settings)])


def share_of_square(short, long):
    """The second part of t(n) = a n + b n^2 at the longer of two measured lengths. Each is (length,
    seconds)."""
    (n, t), (m, u) = short, long
    square = (u / m - t / n) / (m - n)
    return round(max(0.0, square * m * m / u), 3)


def by_llama_cpp(flags, model):
    """{engine: {tokens: (seconds, CPU seconds)}, ...} and {engine: share of attention}."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command = [flags.programs / "first_token", model, "--depths", DEPTHS, "--ubatch", UBATCH, "--threads", flags.threads, "--rounds", 1,
                   "--budget", 1024, "--modes", flags.modes, "--out", out]
        if flags.quiet:
            command = ["chrt", "-f", "50", *command]
        subprocess.run([str(x) for x in command], check=True, stdout=subprocess.DEVNULL, env=os.environ | {"QUOKA_DENSE_LAYERS": "1"})
        measured = json.loads(out.read_text())
    found = {}
    for prompt in measured["prompts"]:
        for engine, of in prompt.items():
            if engine != "tokens" and prompt["tokens"] in LENGTHS:
                name = engine if engine == "llama.cpp" else "llama.cpp + quoka, " + named(engine)
                found.setdefault(name, {})[prompt["tokens"]] = (of["s"], of["cpu_s"])
    return found


def ik_llama_program(folder):
    """llama-sweep-bench of a build in the folder, or of its install. Raises OSError where there is none."""
    for inner in ("bin", "build/bin", "."):
        if os.access(program := folder / inner / "llama-sweep-bench", os.X_OK):
            return program.resolve()
    raise OSError(f"no llama-sweep-bench in {folder}: build ik_llama.cpp's target of that name")


def by_ik_llama(flags, model, engine):
    """Seconds are those of the ubatches alone; CPU seconds the process's, of which they have their part."""
    cache = engine.partition(":")[2]
    command = [ik_llama_program(flags.ik_llama), "-m", pathlib.Path(model).resolve(), "-c", LENGTHS[-1], "-b", UBATCH, "-ub", UBATCH, "-t", flags.threads,
               "-n", 1, "-wb", "-ctk", cache, "-ctv", cache, "--output-format", "jsonl"]
    if flags.quiet:
        command = ["chrt", "-f", "50", *command]
    with tempfile.TemporaryDirectory() as folder:  # it may leave a log where it is
        before = os.times()
        done = subprocess.run([str(x) for x in command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        after = os.times()
    ubatches = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
    if done.returncode != 0 or [one["n_kv"] for one in ubatches] != list(range(0, LENGTHS[-1], UBATCH)):
        raise RuntimeError(f"llama-sweep-bench returned {done.returncode} and measured {len(ubatches)} ubatches: {done.stdout.strip()[-200:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    cpu /= sum(one["t_pp"] + one["t_tg"] for one in ubatches)
    seconds = {n: sum(one["t_pp"] for one in ubatches if one["n_kv"] < n) for n in LENGTHS}
    return {named(engine): {n: (round(s, 4), round(cpu * s, 4)) for n, s in seconds.items()}}


def by_others(flags, model, engine):
    command = [sys.executable, HERE / "first_token.py", engine, model, "--text", flags.text, "--tokens", ",".join(map(str, LENGTHS)), "--threads", flags.threads]
    done = subprocess.run([str(x) for x in command + ["--quiet"] * flags.quiet], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return {named(engine): {one["tokens"]: (one["s"], one["cpu_s"]) for one in json.loads(done.stdout.splitlines()[-1])}}


def loss_of(flags, model, engine):
    """Negative log-likelihoods of the longest prompt's second half, token by token."""
    command = [sys.executable, HERE / "loss.py", engine, model, "--text", flags.text, "--tokens", LENGTHS[-1], "--threads", flags.threads]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def change(losses, base, resamples=2000):
    """The change of the perplexity in percent, and its 95 % interval by resamples of tokens."""
    differences, draw = [a - b for a, b in zip(losses, base, strict=True)], random.Random(1)
    means = sorted(math.fsum(draw.choices(differences, k=len(differences))) / len(differences) for _ in range(resamples))
    return [round(100 * math.expm1(x), 2) for x in (math.fsum(differences) / len(differences), means[resamples // 40], means[-1 - resamples // 40])]


def lose(flags, model, row, put):
    """row["loss"]: {engine: its perplexity and its change}, all beside the first one."""
    base = None
    for engine in [TRANSFORMERS[0], *OTHERS, *TRANSFORMERS[1:]]:
        if named(engine) in row.setdefault("loss", {}) or engine in row["absent"]:
            continue
        print(f"   loss: {engine}", file=sys.stderr, flush=True)
        try:
            base = base or loss_of(flags, model, TRANSFORMERS[0])
            found = base if engine == TRANSFORMERS[0] else loss_of(flags, model, engine)
        except (OSError, RuntimeError) as error:
            print(f"   {error}", file=sys.stderr)
            if base is None:
                return  # nothing to compare with
            continue
        row["loss"][named(engine)] = {"tokens": len(found), "perplexity": round(math.exp(math.fsum(found) / len(found)), 3), "change": change(found, base)}
        put()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--ik-llama", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--skip", default="", help="engines with this in their name")
    parser.add_argument("--modes", default=",".join(MODES), help="of the plug-in")
    for name in ("quick", "quiet", "again", "loss-alone"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("models", nargs="+")
    flags = parser.parse_args()
    record = Record(flags.out)
    record.content["model_settings"] = {
        "text": pathlib.Path(flags.text).name, "ubatch": UBATCH, "depths": DEPTHS, "cache": "f16; OpenVINO: its default; transformers: float",
        "weights": "as the file has them; transformers: float", "commands": {"llama.cpp": f"first_token MODEL --depths {DEPTHS} --ubatch {UBATCH} --threads {flags.threads} --budget 1024 --modes MODE,...", "others": "bench/side_by_side/first_token.py ENGINE MODEL"}}
    for package in ("openvino-genai", "transformers", "torch", "quoka"):
        try:
            record.part("model_versions", {})[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    engines = OTHERS + TRANSFORMERS * (not flags.quick)
    if flags.ik_llama:
        said = subprocess.run([ik_llama_program(flags.ik_llama), "--version"], capture_output=True, text=True)
        found = re.search(r"version: (.+)", said.stdout + said.stderr)
        record.part("model_versions", {})["ik_llama.cpp"] = found[1] if found else "unknown"
        record.content["model_settings"]["commands"]["ik_llama.cpp"] = f"llama-sweep-bench -m MODEL -c {LENGTHS[-1]} -b {UBATCH} -ub {UBATCH} -t {flags.threads} -n 1 -wb -ctk CACHE -ctv CACHE"
        engines = IK_LLAMA + engines
    record.content["models_command"] = "bash bench/side_by_side.sh models" + "".join(f" --{name}" for name in ("quick", "quiet") if getattr(flags, name))
    others = [engine for engine in engines if not flags.skip or flags.skip not in engine]
    for given in flags.models:
        name, _, model = given.partition("=")
        key = {"model": name, "threads": flags.threads}
        old = record.find("models", key)
        row = old if old and not flags.again else {"runs": {}, "absent": {}, "load": [], "commit": commit()}

        def put(key=key, row=row):
            record.put("models", key, {k: v for k, v in row.items() if k not in key})

        for done in range(0 if flags.loss_alone else 1 if flags.quick else flags.rounds):
            for engine in ["llama.cpp", *others]:
                if engine in row["absent"] or len(next(iter(row["runs"].get(named(engine), {}).values()), [])) > done:
                    continue
                print(f"{name}, round {done + 1}: {engine}", file=sys.stderr, flush=True)
                row["load"].append(round(os.getloadavg()[0], 1))
                try:
                    by = by_ik_llama if engine in IK_LLAMA else by_others
                    found = by_llama_cpp(flags, model) if engine == "llama.cpp" else by(flags, model, engine)
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    found, row["absent"][engine] = {}, str(error)[-200:]
                    print(f"   {error}", file=sys.stderr)
                for who, times in found.items():
                    print("   {}: {}".format(who, ", ".join(f"{n:,} tokens {s:.2f} s (CPU {cpu:.2f})" for n, (s, cpu) in times.items())), file=sys.stderr, flush=True)
                    for n, (s, cpu) in times.items():
                        row["runs"].setdefault(who, {}).setdefault(str(n), []).append([s, cpu])
                row["engines"] = {who: summary(of) for who, of in row["runs"].items()}
                put()
        if not flags.quick:
            lose(flags, model, row, put)


def summary(times):
    """From [seconds, CPU seconds] by length: quartiles of both, and attention's share at the
    longest."""
    measured = {n: {"s": quartiles([s for s, _ in of]), "cpu_s": quartiles([cpu for _, cpu in of])} for n, of in times.items()}
    short, long = (next(((int(n), measured[n]["cpu_s"][1]) for n in measured if int(n) == length), None) for length in LENGTHS)
    if short and long:
        measured["attention"] = share_of_square(short, long)
    return measured


if __name__ == "__main__":
    main()
