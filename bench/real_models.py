#!/usr/bin/env python3
"""Runs `check` on models with real weights, and writes bench/results/data/real_models.json from its
results. real_models.sh calls it.

    real_models.py --check PROGRAM --text emma.txt --work FOLDER --out FILE MODEL=model.gguf ... [--quick] [--no-times]

A reading is a stretch of the text with facts in it that a seed draws. All settings read it side by side, so that they are
compared sample by sample: positions of the second half of the prompt, and questions at its end. Intervals of 95 % are of
2,000 resamples of these. Which settings are tried is written here; none was chosen by this text.
"""

import argparse
import json
import math
import pathlib
import random
import subprocess
import sys
import zlib

FIRST_SEED = 4801  # of the facts of a length's first reading
SHARES = (4, 8, 16)

# Readings by the length of the prompt.
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct Q4_0", {2048: 1, 4096: 1, 8000: 1}),
    "gemma3-270m": ("Gemma 3 270M Q4_K_M", {2048: 1, 4096: 1, 8192: 1}),
    "tinyllama": ("TinyLlama-1.1B-Chat Q8_0", {1952: 1}),  # with a question 2,048, its context
}
OWN = "own"  # in place of a budget: a preset as it is called without one
MORE = ["recommended:dense_layers=0", "balanced:dense_layers=0"]  # tried beside the presets, of all models
ASKED = 12  # questions, at least, for a share of right answers to be reported
STRETCH = 40_000  # characters of the text from one reading to the next


def budgets(length, quick):
    """The presets' own, and counts of keys: a quarter of the prompt and so on, rounded to 64."""
    return [OWN] + [max(64, (length // share + 32) // 64 * 64) for share in (SHARES[:2] if quick else SHARES)]


def told_as(label):
    """balanced:chunk=32 512 and balanced:chunk=32:budget=512 are: balanced, chunks of 32 512."""
    mode, _, budget = label.partition(" ")
    mode, *settings = mode.split(":")
    of = {"queries": "{} queries", "chunk": "chunks of {}", "dense_layers": "the first {} dense"}
    for one in settings:
        key, _, value = one.partition("=")
        if key == "budget":
            budget = value
        else:
            how = "layers {} dense" if value.startswith("[") else "no layer dense" if (key, value) == ("dense_layers", "0") else of[key]
            mode += ", " + how.format(value.strip("[]").replace(",", " "))
    return f"{mode} {budget}".rstrip()


def read(flags, name, length, reading):
    """One call of `check`, or its results of the last time."""
    place = FIRST_SEED + reading
    folder = flags.work / f"{name}_{length}_{place}"
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    whole = flags.text.read_text()
    begin = whole.index("\n", reading * STRETCH) + 1 if reading else 0
    text.write_text(whole[begin:begin + 8 * length + 4000])
    sets = [(["exact"], None, ["float", "bf16", "int8"], flags.questions),
            (["paper", "balanced", "recommended"], budgets(length, flags.quick), ["float"], flags.questions),
            (MORE, budgets(length, flags.quick)[:3], ["float"], 1)]
    if flags.modes:
        sets = [(flags.modes.split(","), [OWN] if flags.own else budgets(length, quick=False), ["float"], flags.questions)]
    found = {}
    for i, (modes, counts, arithmetics, questions) in enumerate(sets):
        out = folder / (f"of_{zlib.crc32(flags.modes.encode()):08x}" if flags.modes else f"part{i}")
        command = [flags.check, flags.models[name], text, "--measure-only", "--out", out, "--lengths", f"{length // 2},{length}",
                   "--samples", flags.samples, "--questions", questions, "--threads", flags.threads, "--seed", place,
                   "--modes", ",".join(modes), "--arithmetics", ",".join(arithmetics)]
        if counts:
            command += ["--budgets", ",".join(map(str, counts))]
        subprocess.run([str(x) for x in command], check=True, stdout=subprocess.DEVNULL)
        measured = json.loads((out / "check.json").read_text())
        for one in measured["steps"].values():
            for outcome in one["longest"]:
                label = outcome["name"]
                if label == "exact" and flags.modes:
                    label = "exact float"
                twice = counts and label == "exact"  # it is in the other part
                if twice or label in found:
                    continue
                label = told_as(label)
                found[label] = (one, outcome)
        found["cpu"] = measured["cpu"]
    return found


def interval(values, resamples=2000):
    """Mean and the ends of its interval of 95 %, by resamples."""
    mean = sum(values) / len(values)
    draw = random.Random(1)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    return [mean, means[resamples // 40], means[-1 - resamples // 40]]


def rounded(values, digits):
    return [round(x, digits) for x in values]


def rows_of(readings, label, length, times):
    """One set of settings at one length, over all readings."""
    kl, less, loss, agrees, speed, right = [], [], [], [], [], {}
    for found in readings:
        one, outcome = found[label]
        at = [i for i, position in enumerate(one["sampled_at"]) if position >= length // 2]
        agrees.append(outcome["agrees"])
        speed.append(outcome["speedup"])
        base = one["loss_of_samples"]["llama.cpp"]
        loss += [one["loss_of_samples"][outcome["name"]][i] - base[i] for i in at]
        if label != "llama.cpp":
            own = one["kl_of_samples"][outcome["name"]]
            kl += [own[i] for i in at]
            # Where not all fit side by side, exact mode was in another group.
            exact = next(kls[name] for kls in (one["kl_of_samples"], found["exact float"][0]["kl_of_samples"]) for name in ("exact float", "exact") if name in kls)
            less += [own[i] - exact[i] for i in at]
        mine = [x for x in one["needles"] if x["name"] == outcome["name"] and x["length"] == length]
        its = [x for x in one["needles"] if x["name"] == "llama.cpp" and x["length"] == length]
        for a, b in zip(mine, its):
            right.setdefault(a["kind"], []).append((a["right"], b["right"]))
    change = interval(loss)
    row = {"samples": len(loss), "perplexity": rounded([100 * math.expm1(x) for x in change], 3)}
    if kl:
        row |= {"kl": rounded(interval(kl), 5), "agrees": round(sum(agrees) / len(agrees), 4)}
    if any(less):
        row["kl_less_exact"] = rounded(interval(less), 5)
    if sum(len(pairs) for pairs in right.values()) < ASKED:
        right = {}
    row["needles"] = {kind: {"questions": len(pairs), "right": round(100 * sum(a for a, _ in pairs) / len(pairs), 1),
                             "change": rounded(interval([100 * (a - b) for a, b in pairs]), 1)} for kind, pairs in right.items()}
    if times:
        row["speedup"] = round(sum(speed) / len(speed), 3)
    return row


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("models", nargs="+", help="NAME=FILE, of " + ", ".join(MODELS))
    parse.add_argument("--check", type=pathlib.Path, required=True)
    parse.add_argument("--text", type=pathlib.Path, required=True)
    parse.add_argument("--work", type=pathlib.Path, required=True, help="where a stopped run is gone on with")
    parse.add_argument("--out", type=pathlib.Path, required=True)
    parse.add_argument("--samples", type=int, default=1024, help="positions of a reading")
    parse.add_argument("--questions", type=int, default=24, help="of a reading")
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--quick", action="store_true", help="the shortest length, one reading, two budgets")
    parse.add_argument("--lengths", help="these alone, with commas")
    parse.add_argument("--modes", help="these alone beside llama.cpp and exact mode, with commas: balanced:chunk=32")
    parse.add_argument("--own", action="store_true", help="and without a budget beside those that --modes has: recommended,recommended:budget=512")
    parse.add_argument("--no-times", action="store_true", help="of a machine that has other work: no seconds to the first token are reported")
    parse.add_argument("--add", action="store_true", help="what --out has of other models, lengths and settings stays, and with --no-times what it has with times")
    flags = parse.parse_args()
    flags.models = dict(one.split("=", 1) for one in flags.models)
    if unknown := set(flags.models) - set(MODELS):
        sys.exit(f"real_models.py: {', '.join(unknown)}: known are {', '.join(MODELS)}")
    results, cpu = [], ""
    labels = [label for label, _ in MODELS.values()]
    before = json.loads(flags.out.read_text()) if flags.add and flags.out.exists() else None
    for name in flags.models:
        label, lengths = MODELS[name]
        for length, count in lengths.items():
            if flags.quick and length != min(lengths) or flags.lengths and str(length) not in flags.lengths.split(","):
                continue
            readings = [read(flags, name, length, i) for i in range(1 if flags.quick else count)]
            cpu = readings[0].pop("cpu")
            for other in readings[1:]:
                other.pop("cpu")
            for settings in readings[0]:
                results.append({"model": label, "length": length, "settings": settings, "readings": len(readings),
                                "seeds": [FIRST_SEED + i for i in range(len(readings))], **rows_of(readings, settings, length, not flags.no_times)})
            key = lambda r: (r["model"], r["length"], r["settings"])
            timed = {key(r) for r in before["results"] if "speedup" in r} if before and flags.no_times else set()
            results = [r for r in results if key(r) not in timed]  # nothing is put in the place of more
            found = {key(r): r for r in (before["results"] if before else []) + results}  # anew in its old place
            rows = sorted(found.values(), key=lambda r: (labels.index(r["model"]), r["length"]))  # of a length what was there first
            measured = {"machine": cpu, "threads": flags.threads, "text": flags.text.name, "results": rows}
            flags.out.write_text(json.dumps(measured, indent=1) + "\n")
            print(f"{label}, {length} tokens: {len(readings)} readings", file=sys.stderr)


if __name__ == "__main__":
    main()
