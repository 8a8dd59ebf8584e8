#!/usr/bin/env python3
"""Writes every table and figure of the Markdown pages from the JSON files in bench/results/data, and checks the pages.

    python3 bench/tables.py --write    # all tables of all pages, and the figures
    python3 bench/tables.py --check    # fails where a page or a figure is not what the results give, or breaks a rule

A table stands between <!-- table: NAME --> and <!-- end -->; NAME is that of a function below. The rules: a link leads to a file, and to
a heading where it names one; a page or a function below names every file of bench/results; a page shows every table;
a figure in prose (a time, a ratio, a loss, a percentage) is one of claims(), which take them from the results, stands in a table of
its page, or is listed in STATED, with what it is.
Python's standard library is all it needs.
"""

import argparse
import collections
import fnmatch
import functools
import itertools
import json
import math
import pathlib
import random
import re
import statistics
import sys

import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DATA = RESULTS / "data"

# ---- results ----------------------------------------------------------------------------------------------------------


@functools.cache
def load(name):
    return json.loads((DATA / f"{name}.json").read_text())


def rows(name, **equal):
    return [row for row in load(name)["results"] if all(row[key] == value for key, value in equal.items())]


def row(name, **equal):
    return rows(name, **equal)[0]


@functools.cache
def medians(name):
    """Google Benchmark's medians: {benchmark: record}."""
    return {one["run_name"].removesuffix("/real_time"): one for one in load(name)["benchmarks"] if one.get("aggregate_name") == "median"}


def milliseconds(benchmark):
    return benchmark["cpu_time"] * {"ns": 1e-6, "us": 1e-3, "ms": 1.0}[benchmark["time_unit"]]


# ---- cells ------------------------------------------------------------------------------------------------------------

TABLES = {}


def table(function):
    """A function that gives (header, rows)."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def markdown(header, body):
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(map(str, cells)) + " |" for cells in body])


def code(name):
    return f"`{name}`"


def preset(name):
    """As the library and the plug-in call it: the programs' `quoka` is the paper's rule, and their presets have it in front."""
    return "paper" if name == "quoka" else name.removeprefix("quoka.") if name in OURS else name.replace("quoka", "paper")


def percent(share, decimals=1):
    return "-" if share is None else f"{100.0 * share:.{decimals}f}"


def times(ratio, decimals=1):
    return "-" if ratio is None else f"{ratio:.{decimals}f}x"


def seconds(value):
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def interval(mean):
    """A mean of answers and the ends of its interval, in per cent."""
    return "-" if mean is None else "{:.1f} [{:.1f}, {:.1f}]".format(*(round(100 * end, 1) + 0.0 for end in mean))


def part(budget):
    """0.125 as 1/8."""
    return f"1/{1 / float(budget):.0f}"


# ---- answers: what accuracy.sh stored ------------------------------------------------------------------------------

TASKS = ["single", "multi_key", "haystack", "multi_value", "multi_query", "vt", "cwe"]
RETRIEVAL = TASKS[:6]
EIGHTH = "0.125"


class Answers:
    """Means over tasks and lengths, with bootstrap intervals.

    A cell is a selector with a budget on a task at a length: an outcome (0 or 1) for each sample. Samples are drawn again within each
    cell (a stratified bootstrap), in pairs for differences. The sum of a cell's drawn outcomes is trinomial, so sums are drawn.
    """

    def __init__(self, pattern):
        self.cells = {}
        for path in sorted(DATA.glob(pattern)):
            for one in json.loads(path.read_text())["results"]:
                key, outcomes = (one["selector"], one["budget"], one["task"], one["length"]), [int(digit) for digit in one["exact"]]
                if len(outcomes) > len(self.cells.get(key, [])):  # prompts are the same, and the first ones are there
                    self.cells[key] = outcomes
        self.tasks, self.lengths = (sorted({key[i] for key in self.cells}, key=order) for i, order in ((2, TASKS.index), (3, int)))

    def selectors(self):
        return list(dict.fromkeys(key[0] for key in self.cells))

    def strata(self, selector, budget, places, minus=None):
        """(weight, outcomes) of each cell, less those of `minus` on the same samples; None where a cell is missing."""
        cell = lambda name, place: self.cells.get((name, "1.0" if name == "dense" else budget, *place))  # noqa: E731
        found = [(cell(selector, place), cell(minus, place) if minus else None) for place in places]
        if any(own is None or (minus and other is None) for own, other in found):
            return None
        return [(1.0 / len(places), [a - b for a, b in zip(own, other)] if minus else own) for own, other in found]

    def share(self, selector, budget, tasks, lengths):
        """The mean without an interval."""
        strata = self.strata(selector, budget, list(itertools.product(tasks, lengths)))
        return None if strata is None else sum(sum(outcomes) / len(outcomes) for _, outcomes in strata) / len(strata)

    def mean(self, selector, budget, tasks, lengths, minus=None):
        strata = self.strata(selector, budget, list(itertools.product(tasks, lengths)), minus)
        return None if strata is None else bootstrap(strata)


@functools.cache
def answers(pattern="accuracy_*.json"):
    return Answers(pattern)


@functools.cache
def trinomial(count, plus, minus):
    """Cumulative probabilities of -count .. count: the sum of `count` draws, plus / count of which are 1 and minus / count -1."""
    logs = [math.lgamma(k + 1) for k in range(count + 1)]

    def terms(drawn):
        share = math.log(drawn / count) if drawn else -math.inf
        return [k * share - logs[k] if k else 0.0 for k in range(count + 1)]

    ups, downs, sames = terms(plus), terms(minus), terms(count - plus - minus)
    probability = [0.0] * (2 * count + 1)
    for up in range(count + 1 if plus else 1):
        for down in range(count + 1 - up if minus else 1):
            probability[count + up - down] += math.exp(logs[count] + ups[up] + downs[down] + sames[count - up - down])
    return list(itertools.accumulate(probability))


def bootstrap(strata, resamples=10000):
    """strata: (weight, outcomes of -1, 0 and 1). (weighted mean, 2.5th and 97.5th percentile of its resamples)."""
    rng, total, means = random.Random(1), 0.0, [0.0] * resamples
    for weight, outcomes in strata:
        n, plus, minus = len(outcomes), outcomes.count(1), outcomes.count(-1)
        total += weight * (plus - minus) / n
        if plus == n or minus == n or plus + minus == 0:
            means = [mean + weight * (plus - minus) / n for mean in means]
        else:
            sums = rng.choices(range(-n, n + 1), cum_weights=trinomial(n, plus, minus), k=resamples)
            means = [mean + weight * drawn / n for mean, drawn in zip(means, sums)]
    means.sort()
    return total, means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]


# ---- README.md --------------------------------------------------------------------------------------------------------

OURS = ("quoka", "quoka.recommended", "quoka.balanced")
AS_CALLED = {"quoka.recommended.threshold41.least1024": "recommended", "quoka.balanced.threshold82.least512": "balanced"}  # without a budget


def found(file, selector, budget):
    asked = [one["exact"] for one in rows(file, selector=selector, budget=budget)]
    return f"{sum(asked)} of {len(asked)}"


@table
def readme_exact():
    """One layer, exact attention against the fastest other at the same precision."""
    body = []
    for queries in (512, 128, 16, 1):
        r, cells = side_row(queries, 8192), []
        for like in ("exact float", "exact bf16"):
            name, theirs = fastest(r, like)
            cells += [f"{short_ms(theirs)} ({library(name)})", f"**{short_ms(r['entries'][load('side_by_side')['like'][name]]['ms'][1])}**"]
        body.append([queries, *cells, short_ms(r["entries"]["exact int8"]["ms"][1]), times(r["entries"]["llama.cpp, f16 cache"]["of_ours"][1])])
    return ["new tokens", "fastest other, float", "QuoKA, float", "fastest other, bf16", "QuoKA, bf16", "QuoKA, int8", "llama.cpp's time / QuoKA's, f16 cache"], body


def change(of):
    """A change of the loss, nat, as one of the perplexity."""
    return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * math.expm1(x) + 0.0 for x in of))


@table
def readme_selection():
    """The preset to take, as it is called and by an eighth of the keys: SmolLM2 at two lengths."""
    def real(tokens, budget):
        called = next(name for name, preset in AS_CALLED.items() if preset == "recommended")
        return row(f"loss_time_{tokens}", selector=called if budget == "own" else "quoka.recommended", budget=budget)

    body = []
    for tokens in (4096, 8064):
        for budget, name in (("own", "`recommended()`"), ("1/8", "`recommended`, an eighth")):
            r = real(tokens, budget)
            body.append([f"{tokens:,}", name, f"{percent(r['keys'], 0)} %", f"{r['of_exact'][0]:.2f}", "{:.4f} ({:.4f} to {:.4f})".format(*r["kl"]), change(r["loss"])])
    return ["tokens", "preset", "keys kept", "time of attention, exact = 1", "KL to exact attention, nat", "perplexity"], body


# ---- bench/README.md: time ---------------------------------------------------------------------------------------------


@table
def prefill():
    """By preset: so many keys, and a quarter of the past."""
    body = []
    for keys, file, lengths in (("1,024", "frontier_1024", (4096, 8192, 32768)), ("a quarter", "speedup_quarter", (8192, 32768))):
        for n in lengths:
            of = {r["selector"]: r for r in rows(file, tokens=n)}
            body.append([f"{n:,}", keys, seconds(of["dense"]["prefill_seconds"]), *(f"{times(of[name]['speedup'])}, {times(of[name]['last_chunk_speedup'])}"
                                                                                    for name in ("quoka.recommended", "quoka.balanced", "quoka"))])
    return ["prompt", "keys", "dense", "`recommended`: whole, last chunk", "`balanced`", "`paper`"], body


@table
def other_prefills():
    return ["", "selector", "prompt", "whole", "last chunk"], [
        [label, code(preset(selector)), f"{n:,}", times(r["speedup"]), times(r["last_chunk_speedup"])] for label, file, n, selector in (
            ("Zen 4", "speedup_qwen3-4b_1_thread", 32768, "quoka"),
            ("Zen 4, two threads", "speedup_qwen3-4b_2_threads", 32768, "quoka"),
            ("Zen 4, Llama-3.2-3B, 24/8 heads", "speedup_llama-3.2-3b_1_thread", 32768, "quoka"),
            ("Zen 4, AVX2", "speedup_x86-64-v3", 32768, "quoka"),
            ("Zen 4, without 8-bit codes", "speedup_131072", 131072, "quoka.float"),
            ("Cascade Lake", "presets_cascade_lake", 32768, "quoka"))
        for r in [row(file, tokens=n, selector=selector)]]


@table
def decode():
    body = []
    for label, file, n in (("", "decode_all", 32768), ("", "decode_long", 131072), (", AVX2", "decode_x86-64-v3", 32768)):
        dense, quoka, plain = (row(file, tokens=n, selector=name) for name in ("dense", "quoka", "quoka.float"))
        body.append([f"{n:,}{label}", *(f"{1e3 * r['last_chunk_seconds']:.1f}" for r in (dense, quoka)), *(times(r["last_chunk_speedup"]) for r in (quoka, plain))])
    return ["keys", "dense, ms", "paper's defaults, ms", "times as fast", "the same in float"], body


@table
def dense_peak():
    return ["head_dim, group, keys", "AVX-512", "AVX2"], [
        [label, *(f"{medians(file)[f'attention/dense/{name}/threads:1']['peak']:.2f}" for file in ("quoka_bench_avx512", "quoka_bench_x86-64-v3"))]
        for label, name in (
            ("128, 4, 8,192", "kv_len:8192/head_dim:128/group:4"), ("128, 4, 32,768", "kv_len:32768/head_dim:128/group:4"),
            ("128, 7, 8,192", "kv_len:8192/head_dim:128/group:7"), ("80, 4, 8,192", "kv_len:8192/head_dim:80/group:4"),
            ("64, 4, 8,192", "kv_len:8192/head_dim:64/group:4"))]


@table
def rates():
    """Speed of each arithmetic, float over a cache of floats being 1."""
    machines = {name: {(one["arithmetic"], one["cache"]): one for one in load(f"arithmetic_rates_{name}" if name else "arithmetic_rates")["kernels"]} for name in ("zen4", "zen5", "", "amx")}
    cell = lambda name, what, key: f"{machines[name][key][what]:.2f}" if key in machines[name] else "-"  # noqa: E731
    body = [[code(key[0].replace("bfloat16", "bf16")), key[1], *(cell(name, "speed", key) for name in ("zen4", "zen5", "", "amx")), f"{machines['amx'].get(key, one)['error']:.0e}"]
            for key, one in machines["zen5"].items() if not key[0].startswith("bfloat16_x")]
    return ["arithmetic", "cache", "Zen 4", "Zen 5", "Intel, no AMX", "AMX", "error"], body


@table
def lists():
    """Some of the rows: one thing changed at a time."""
    body = []
    for r in rows("lists"):
        shape = (r["q_heads"], r["kv_heads"], r["head_dim"])
        usual = shape == (32, 8, 128) and r["cache"] == "half" and r["block"] == 1
        if not (usual and (r["queries"], r["attended"]) in ((128, 512), (128, 2048), (128, 4096), (128, 7936), (512, 512), (1, 2048))
                or (r["kind"], r["attended"]) == ("each its own", 2048) and shape in ((16, 16, 128), (128, 1, 576))):
            continue
        keys = f"{r['attended']:,} of {r['keys']:,}"
        cache = "" if r["cache"] == "half" else f", {r['cache']}"
        body.append([f"{r['q_heads']}/{r['kv_heads']}/{r['head_dim']}{cache}", r["queries"], f"{keys}, {r['kind']}", f"{r['milliseconds']:.1f}", f"{r['of_bound']:.2f}",
                     times(r["of_mask"]), times(r["of_all"]), f"{r['of_selection']:.2f}" if "of_selection" in r else "-"])
    return ["heads, channels", "queries", "keys of a query", "ms", "of bound", "faster than by a mask", "than all keys", "a `Selection`'s time"], body


@table
def sparse_layer():
    body = [[f"{r['model']}, {r['q_heads']}/{r['kv_heads']}/{r['head_dim']}", r["queries"], f"{r['keys']:,}", f"{r['index_milliseconds']:.1f}",
             f"{r['lists_milliseconds']:.1f}", f"{r['all_milliseconds']:.0f}", times(r["faster"])] for r in rows("sparse_layer") if r["keys"] == 32768]
    return ["shaped as", "queries", "keys", "index, ms", "attend, ms", "every key, ms", "faster"], body


@table
def engines():
    of = medians("quoka_bench_engine")
    cell = lambda name, what: milliseconds(of[f"engine/{name}/{what}"]) / milliseconds(of[f"engine/contiguous/half/{what}"])  # noqa: E731
    return ["cache", "decode over 32,768 keys", "chunk over 8,192 keys"], [
        [label, *(f"{cell(name, what):.2f}" for what in ("token/kv_len:32768", "chunk/kv_len:8192"))] for label, name in (
            ("half, pages of 16", "pages/half"), ("half, slots in any order", "slots/half"), ("half, keys [dim, token] in pages", "transposed/half"),
            ("q8_0", "contiguous/q8_0"), ("q8_0, pages of 16", "pages/q8_0"), ("u8", "contiguous/u8"), ("i8", "contiguous/i8"),
            ("i8, a scale per channel", "contiguous/i8_channel"), ("fp8 e4m3", "contiguous/e4m3"))]


@table
def cores():
    of = {(r["chunk"], r["kv_len"], r["method"], r["workers"]): r for r in load("cores")["results"]}
    return ["tokens, keys", "method", "16 workers", "64", "128"], [
        [f"{chunk}, {kv_len:,}", code(preset(method)), *(f"{of[chunk, kv_len, method, n]['speedup']:.0f}x" for n in (16, 64, 128))]
        for chunk, kv_len, method, workers in of if workers == 64 and kv_len == 32768]


# ---- side by side with other engines -------------------------------------------------------------------------------------


def fastest(row, like, kind="other"):
    """(name, ms) of those that compare with an exact attention whose name begins so, or None.
    Libraries that leave out sinks do not count."""
    loaded, entries = load("side_by_side"), row["entries"]
    names = [name for name, of in entries.items() if loaded["kinds"][name] == kind and "ms" in of and "note" not in of
             and (loaded["like"].get(name, "") if kind == "other" else name).startswith(like)]
    return min(((name, entries[name]["ms"][1]) for name in names), key=lambda pair: pair[1], default=None)


def short_ms(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def library(name):
    return re.split(r" (?:paged|SDPA|b?f\d)|,", name)[0]


def side_rows():
    order = {name: i for i, name in enumerate(("Llama-3.1-8B, Qwen3-4B", "Gemma 3 4B", "GPT-OSS-20B", "SmolLM2-135M", "Phi-3 mini", "Phi-2"))}
    return sorted(load("side_by_side")["operators"], key=lambda r: (r["beside"], r["threads"], r["batch"], order[r["model"]], r["past"], r["queries"]))


def side_row(queries, past):
    """The row of 32/8/128, one sequence and one thread; None if it was not measured."""
    return next((r for r in side_rows() if (r["shape"], r["queries"], r["past"], r["threads"], r["batch"]) == ("32/8/128", queries, past, 1, 1)), None)


def side_name(row):
    return (f"{row['model'].partition(',')[0]}, {row['shape']}" + (f", {row['batch']} sequences" if row["batch"] > 1 else "") + (f", {row['threads']} threads" if row["threads"] > 1 else "")
            + (f" beside {row['beside']}" if row["beside"] else ""))


@table
def side_operators():
    """By row the fastest other in float and in 16 bits beside exact attention in the same, and int8. The JSON has more shapes."""
    body = []
    for r in side_rows():
        llama = r["shape"] == "32/8/128" and r["past"] < 65536 and (r["queries"] in (1, 128) or (r["queries"], r["past"]) in ((16, 8192), (512, 8192)))
        others = r["threads"] == 1 and (r["queries"] == 128 and r["past"] == 8192 or r["model"].startswith("Phi-3") and r["queries"] in (1, 128))
        if r["beside"] or not (llama or others):
            continue
        ms = lambda name: r["entries"][name]["ms"][1]  # noqa: E731, B023
        cells = []
        for like in ("exact float", "exact bf16"):
            name, theirs = fastest(r, like)
            ours = ms(load("side_by_side")["like"][name])
            cells += [f"{short_ms(theirs)} {library(name)}", short_ms(ours), times(theirs / ours)]
        body.append([side_name(r), r["queries"], f"{r['past']:,}", *cells, short_ms(ms("exact int8")) if "exact int8" in r["entries"] else "-"])
    return ["heads/KV heads/channels", "queries", "keys", "float: fastest other, ms", "QuoKA", "ratio", "bf16: fastest other", "QuoKA", "ratio", "`int8`"], body


@table
def side_behind():
    """Every other attention that is ahead of exact attention of the same precision."""
    body = []
    for r in side_rows():
        for name, of in r["entries"].items():
            if load("side_by_side")["kinds"][name] == "other" and of.get("of_ours", [1, 1, 1])[1] < 1:
                body.append([side_name(r), r["queries"], f"{r['past']:,}", name, short_ms(of["ms"][1]), "{:.2f} ({:.2f} to {:.2f})".format(*(of["of_ours"][i] for i in (1, 0, 2)))])
    return ["heads/KV heads/channels", "queries", "keys", "ahead", "ms", "its time / QuoKA's"], body


@table
def side_settings():
    loaded = load("side_by_side")
    versions = {"torch": "Torch", "ONNX": "OnnxRuntime", "OpenVINO SDPA": "OpenVinoSdpa", "OpenVINO paged": "OpenVinoPaged", "llama": "LlamaCpp", "NumKong": "NumKong", "exact": "Exact", "paper": "Paper"}
    version = lambda name: next(loaded["versions"].get(of, "-") for key, of in versions.items() if name.startswith(key))  # noqa: E731
    of = {}
    for name, how in loaded["settings"].items():
        if loaded["kinds"][name] != "products":
            of.setdefault((version(name), how.rpartition("; ")[0]), name)
    return ["", "version", "how"], [["QuoKA, selection" if "select" in how else "QuoKA, exact" if "quoka" in version else name if "SDPA" in name else name.removesuffix(" f32").partition(",")[0], version.partition("-")[0], how]
                                    for (version, how), name in of.items()]


def side_loss(model, engine):
    """The figures of real_models.json for the same settings at its longest prompt: (perplexity's
    change, tokens), or None."""
    settings = engine.removeprefix("llama.cpp + quoka, ")
    found = [r for r in load("real_models")["results"] if r["model"].replace("-Instruct", "") == model and settings.startswith("exact") and r["settings"] == settings]
    return max(((r["length"], r["perplexity"]) for r in found), default=None) if engine != settings else None


@table
def side_models():
    """Seconds to the first token, attention's share, and the measured loss; the JSON has more
    models and settings."""
    body = []
    losses = {(r["model"], name): of for r in load("side_by_side").get("models", []) for name, of in r.get("loss", {}).items()}
    for file, processor, model in (("side_by_side", "Zen 4", "SmolLM2-135M Q4_0"), ("side_by_side_xeon", "Xeon", "SmolLM2-135M Q4_0"),
                                   ("side_by_side", "Zen 4", "Gemma 3 270M Q4_K_M")):
        r = next(r for r in load(file)["models"] if r["model"] == model)
        body.append([f"**{model}, {processor}**", *[""] * 5])
        longest = lambda name: r["engines"][name]["8192"]["s"][1]  # noqa: E731, B023
        for name, of in sorted(r["engines"].items(), key=lambda item: item[1]["8192"]["s"][1]):
            if name.startswith("ik_llama.cpp bf16"):
                continue
            own, loss = losses.get((model, name)), side_loss(model, name)
            lost = "0" if name in ("llama.cpp", "transformers sdpa") else "{:+,.1f} % ({:+,.1f} to {:+,.1f})".format(*(own["change"] if own else loss[1])) if own or loss else "-"
            body.append([name, *(f"{of[n]['s'][1]:.2f}" for n in ("2048", "8192")), f"{percent(of['attention'], 0)} %", times(longest("llama.cpp") / longest(name), 2), lost])
    return ["", "2,048 tokens, s", "8,192 tokens, s", "attention", "times as fast as llama.cpp", "perplexity"], body


# ---- what selections keep, and answer -----------------------------------------------------------------------------------


@table
def presets():
    """A row for each method: what an eighth of the keys loses, answers by budget, speed, and the budget that it takes to come within 2 points of dense."""
    speeds, n = frontier(), 2048
    dense = answers().share("dense", None, RETRIEVAL, [n])
    lost = {r["selector"]: r["kl"][0] for r in rows("loss_time_4096", budget="1/8")}

    def enough(name):
        for budget in ("0.03125", "0.0625", EIGHTH, "0.25"):
            share = answers().share(name, budget, RETRIEVAL, [n])
            if share is not None and share >= dense - 0.02:
                return f"{part(budget)}, {times(speeds.get((float(budget), name)))}"
        return "none"

    body = [[code("dense"), "0", percent(dense), "-", "-", "1.0x", "1.0x", ""]]
    for name in (*OURS, "sample_attention", "sparq", "loki", "less_is_more", "xattention", "flash_prefill", "oracle"):
        body.append([code(preset(name)), f"{lost[name]:.4f}" if name in lost else "-", *(percent(answers().share(name, b, RETRIEVAL, [n])) for b in (EIGHTH, "0.0625", "0.03125")),
                     *(times(speeds.get((share, name))) for share in (0.03125, 0.125)), enough(name)])
    return ["", "KL, 1/8", "answers, 1/8", "1/16", "1/32", "prefill, 1/32", "1/8", "enough"], body


LOSS_TIME_PARTS = {"recommended": ("1/4", "1/8", "1/16"), "balanced": ("1/8",)}  # of the other methods 1/4 and 1/16


@table
def loss_time():
    """What methods lose and take at equal keys, on a model with real weights: time, then KL."""
    lengths, cells = (2048, 4096, 8064), {}
    for tokens in lengths:
        for r in load(f"loss_time_{tokens}")["results"]:
            short_name = r["selector"].removeprefix("quoka.")
            if r["selector"] in AS_CALLED:
                name = f"`{AS_CALLED[r['selector']]}` as called"
            elif r["selector"] != "dense" and r["budget"] in LOSS_TIME_PARTS.get(short_name, ("1/4", "1/16")):
                name = f"{code(short_name)}, {r['budget']}".replace("`quoka`", "`paper`")
            else:
                continue
            cells.setdefault(name, {})[tokens] = "{:.2f}, {:.4f} ({:.4f} to {:.4f})".format(r["of_exact"][0], *r["kl"])
    return ["", *(f"{tokens:,} tokens" for tokens in lengths)], [[name, *(of.get(tokens, "-") for tokens in lengths)] for name, of in cells.items()]


VOTERS = re.compile(r"quoka\.(?:recommended|balanced)(?:\.group(?P<group>\d+))?(?:\.threshold(?P<threshold>\d+)\.least(?P<least>\d+))?")


def voters_of(result):
    """Voters of a KV head, and which keys they keep."""
    of = VOTERS.fullmatch(result["selector"])
    group = int(of["group"] or (128 if "balanced" in result["selector"] else 256))
    keys = f"c = .{of['threshold']}, at least {int(of['least']):,}" if of["threshold"] else result["budget"]
    return group, keys


@table
def voters():
    """What other numbers of voters and keys lose and take."""
    columns, body = [64, 128, 256, "more"], []
    cells = {}
    for r in next(run for run in load("loss_voters")["runs"] if run["tokens"] == 4096)["results"]:
        group, keys = voters_of(r)
        cells.setdefault(keys, {})[group if group <= 256 else "more"] = "{:.4f}, {:.2f}".format(r["kl"][0], r["of_exact"][0])
    order = lambda keys: (1, int(keys[2:])) if keys.startswith("1/") else (0, keys.replace("1,024", "999"))  # noqa: E731
    for keys in sorted(cells, key=order):
        if len(cells[keys]) > 2:
            body.append([keys, *(cells[keys].get(column, "-") for column in columns)])
    return ["keys", "64 voters", "128", "256", "384"], body


@table
def voters_gemma():
    """The presets with other numbers of voters on Gemma 3."""
    body, lengths = [], sorted({r["tokens"] for r in rows("kept_share_gemma")})
    for settings in dict.fromkeys(r["settings"] for r in rows("kept_share_gemma")):
        if "64 voters" in settings or "balanced" in settings and "called" not in settings:
            continue  # the JSON has them
        found = [row("kept_share_gemma", tokens=n, settings=settings) for n in lengths]
        body.append([settings, *(f"{percent(r['keys'], 0)} %, {r['kl'][0]:.4f}" for r in found)])
    return ["", *(f"{n:,} tokens: keys, KL" for n in lengths)], body


def frontier():
    """{(share of the prompt, selector): times as fast as dense}; budgets are counts in the files."""
    files = [load(f"frontier_{budget}") for budget in (1024, 2048, 4096, 8192)]
    return {(int(file["budget"]) / one["tokens"], one["selector"]): one["speedup"] for file in files for one in file["results"]}


def sampled(of, name, budget, places):
    """The name, with the number of samples where that is not 200."""
    counts = {len(of.cells[name, "1.0" if name == "dense" else budget, *place]) for place in places}
    return code(preset(name)) + ("" if counts == {200} else f", n = {min(counts)}")


@table
def accuracy():
    """At an eighth of the prompt, all lengths together: by task, the six tasks of retrieval, and those less dense."""
    of, body = answers(), []
    for name in of.selectors():
        if name.endswith(".logit") or of.share(name, EIGHTH, RETRIEVAL, of.lengths) is None:
            continue
        share = lambda task: percent(of.share(name, EIGHTH, [task], of.lengths))  # noqa: E731, B023
        minus = None if name == "dense" else of.mean(name, EIGHTH, RETRIEVAL, of.lengths, "dense")
        shown = sampled(of, name, EIGHTH, itertools.product(RETRIEVAL, of.lengths))
        body.append([shown, *map(share, RETRIEVAL), percent(of.share(name, EIGHTH, RETRIEVAL, of.lengths)), interval(minus), share("cwe")])
    return ["selector", *RETRIEVAL, "mean", "less dense", "cwe"], body


@table
def rivals():
    """The paper's defaults less each rival, over all lengths."""
    body = []
    for rival in ("sample_attention.logit", "sparq.logit", "loki.logit", "less_is_more", "sample_attention", "sparq", "loki", "xattention", "flash_prefill"):
        difference = answers().mean("quoka", EIGHTH, RETRIEVAL, answers().lengths, rival)
        body.append([code(rival), interval(difference), "yes" if difference[1] > 0 else "no" if difference[2] < 0 else "neither"])
    return ["rival", "`paper` less the rival, points", "better"], body


@table
def as_called():
    """Presets without a budget and with parts of the prompt, 4,096 tokens: right answers by task."""
    cells = {}
    for name in ("needles", "words"):
        for r in load(f"accuracy_mass_{name}")["results"]:
            if r["length"] == 4096:
                cells.setdefault((r["selector"], r["budget"]), {})[r["task"]] = r
    body, n = [], min(len(r["exact"]) for of in cells.values() for r in of.values())  # the same prompts in all rows
    for (name, budget), of in cells.items():
        if set(TASKS) - set(of):
            continue
        right = {task: sum(map(int, r["exact"][:n])) for task, r in of.items()}
        shown = f"`{AS_CALLED[name]}` as called" if name in AS_CALLED else code("dense") if name == "dense" else f"{code(name.removeprefix('quoka.'))}, {part(budget)}"
        body.append([shown, *(right[task] for task in TASKS), n])
    return ["", *TASKS, "of"], body


@table
def ablations():
    names = {
        "quoka.last": "the chunk's last 16 queries", "quoka.softmax.mean": "softmax and mean over queries", "quoka.dot": "dot products, not cosines",
        "quoka.per_head": "a score for each head", "quoka.queries64": "64 queries", "quoka": "the paper's defaults"}
    of = answers()
    body = [[label, *(percent(of.share(name, "0.0625", [task], [2048]), 0) for task in RETRIEVAL[2:]), interval(of.mean(name, "0.0625", RETRIEVAL, [2048]))]
            for name, label in names.items()]
    return ["one choice changed", *RETRIEVAL[2:], "mean of six"], body


@table
def thresholds():
    cells = {}
    for one in load("kept_needles")["results"]:
        own = one["selector"].split(".")[-1] in ("threshold", "compact")
        cells.setdefault((one["selector"], "own" if own else one["budget"]), {}).setdefault(one["length"], []).append(one)
    mean = lambda of, key: sum(one[key] for one in of) / len(of)  # noqa: E731
    body = []
    for (name, budget), of in sorted(cells.items(), key=lambda item: -mean(item[1][2048], "kept")):
        shown = [text for n in (2048, 4096) for text in ((f"{mean(of[n], 'kept'):,.0f}", percent(mean(of[n], "exact_mean"))) if n in of else ("-", "-"))]
        body.append([code(name), "-" if name == "dense" else budget, *shown])
    return ["selector", "budget", *(text for n in (2048, 4096) for text in (f"{n:,} tokens: keys", "answers, %"))], body


@table
def kept_by_tinyllama():
    of = {(r["budget"], r["selector"]): r for r in load("evaluate_tinyllama")["results"]}
    body = []
    for name in dict.fromkeys(key[1] for key in of):
        if name not in ("quoka", "sample_attention", "sparq", "loki", "less_is_more", "quest", "first_recent", "oracle"):
            continue
        middle = of["256", name]
        body.append([code(preset(name)), *(percent(of[budget, name]["mass_kept"]) for budget in ("128", "256", "512")), f"{middle['output_error']:.3f}",
                     percent(middle["worst_percent_mass"]), percent(middle["scoring_flops"] / middle["dense_flops"], 2), f"{1e3 * middle['scoring_seconds']:.2f}"])
    return ["selector", "mass, %: 128 keys", "256", "512", "error, 256", "worst 1 %, 256", "FLOPs, %", "ms"], body


@table
def needles():
    """A row for each selector and budget: needles found by prompt length, and the mean log-probability of the key at 2,040 tokens."""
    body = []
    for file, note in (("needle_tinyllama", ""), ("needle_tinyllama_dense_1", ", first layer dense")):
        for name, budget in dict.fromkeys((one["selector"], one["budget"]) for one in load(file)["results"]):
            if name in ("keydiff", "tidal_decode"):
                continue
            at = {n: rows(file, selector=name, budget=budget, length=n) for n in (512, 1024, 2040)}
            body.append([code(preset(name)) + note, "-" if name == "dense" else part(budget), *(sum(one["exact"] for one in here) if here else "-" for here in at.values()),
                         f"{sum(one['log_prob'] for one in at[2040]) / len(at[2040]):.2f}"])
    body.sort(key=lambda cells: (cells[0] != "`dense`", cells[1], not cells[0].startswith("`paper")))
    return ["selector", "budget", "512 tokens", "1,024", "2,040", "log-probability, 2,040"], body


# ---- llama.cpp, the examples --------------------------------------------------------------------------------


@table
def ggml_operation():
    body = []
    for file, note in (("ggml", ""), ("ggml_amx", ", AMX")):
        for r in load(file)["operation"]["rows"]:
            q_heads, kv_heads, dim, queries, cached = r["shape"].split("/")
            if (q_heads, kv_heads) != ("32", "8") or cached in ("1024", "2048"):
                continue
            body.append([r["cache"] + note, f"{q_heads}/{kv_heads}/{dim}", queries, f"{int(cached):,}", f"{r['ggml_ms']:,.0f}" if r["ggml_ms"] >= 100 else f"{r['ggml_ms']:.3g}",
                         *(f"{r[mode]:.3g}" for mode in ("exact", "paper"))])
    return ["cache", "heads/KV heads/channels", "queries", "cached", "ggml, ms", "exact", "`paper`"], body


@table
def ggml_own():
    body = []
    for r in load("ggml_own")["results"]:
        q_heads, kv_heads, dim, queries, cached = r["shape"].split("/")
        if r["block"] == 1 and (queries == "1" or r["own"] == 2048 and int(queries) >= 32 or kv_heads == "8" and queries == "512"):
            body.append([f"{q_heads}/{kv_heads}/{dim}", queries, f"{r['own']:,} of {int(cached):,}", f"{r['ms']:.3g}", times(r["exact"])])
    return ["heads/KV heads/channels", "queries", "cells of a query", "ms", "times as fast as ggml"], body


@table
def first_token():
    runs = [*(load(name)["runs"][0] for name in ("ggml_amx", "ggml_first_token_zen4")), *load("ggml_first_token")["runs"]]

    def cell(run, n):
        of = next((p for p in run["prompts"] if p["tokens"] == n), None)
        return " / ".join(f"{of['llama.cpp']['s'] / of[mode]['s']:.1f}" if of else "-" for mode in ("exact", "paper"))

    return ["prompt", "TinyLlama, AMX", "TinyLlama, Zen 4", "TinyLlama", "Qwen2.5-1.5B", "Llama-3.1-8B"], [
        [f"{n:,}", *(cell(run, n) for run in runs)] for n in (2048, 4096, 8192, 16384, 32768)]


@table
def ggml_errors():
    """llama.cpp's error by type and number of queries, and what the plug-in's arithmetics have: the largest over the sizes of logits."""
    found = load("ggml_arithmetic")["errors"]

    def largest(by, cache, queries):
        sizes = [r[by] for r in found if r["cache"] == cache and (queries is None or r["shape"].split("/")[3] == queries)]
        return f"{max(sizes):.1e}" if sizes else "-"

    return ["cache", "llama.cpp, 1 query", "8", "512", "float", "bf16", "int8"], [
        [code(cache), *(largest("ggml", cache, n) for n in ("1", "8", "512")), largest("float", cache, None), largest("bf16", cache, None), largest("int8", cache, None)]
        for cache in ("f32", "f16", "bf16", "q8_0", "q4_0")]


@table
def ggml_arithmetic():
    of = load("ggml_arithmetic")
    body = [[f"{r['cache']} cache, {r['shape'].rsplit('/', 2)[0]}, 512 queries, {int(r['shape'].rsplit('/', 1)[1]):,} cached", *(f"{r[by]:.3g}" for by in ("float", "bf16", "int8"))]
            for r in of["ggml_over"]]
    return ["", "exact float", "exact bf16", "exact int8"], body


@table
def architectures():
    """Rows that are alike in what their layers are; examples/bindings/ggml/architectures.cpp says what exact means."""
    itself = {"a sliding window": "sliding windows", "keys": "the last layers share keys of earlier ones", "": "recurrent layers",
              "keys that the model chooses": "chooses keys", "ALiBi": "ALiBi", "no cache": "tokens see each other; no cache"}
    groups = collections.defaultdict(list)
    for one in rows("architectures"):
        kinds = [kind.split(" over layer ") for kind in one["kinds"]]
        assert one["selects"] == [i for i, kind in enumerate(kinds) if kind[0] == "full attention"], one
        groups[tuple(sorted({part for kind in kinds for part in (kind[0], "keys"[:4 * (len(kind) - 1)] or None)} - {None}))].append(one)

    def exact(one):
        return all(ours <= max(2 * own, 1e-5) for ours, own in (one["prompt"], one["steps"]))

    def cells(kinds, of):
        selects = "none" if "full attention" not in kinds else "all" if len(kinds) == 1 else "those of full attention"
        return [", ".join(sorted(one["architecture"] for one in of)), f"{sum(map(exact, of))} of {len(of)}", selects,
                "no attention, or (grok) no flash attention" if kinds == ("",) else
                "; ".join(itself[kind] for kind in kinds if kind != "full attention") or "-"]

    return ["architectures", "exact", "layers that select", "the model itself"], [
        cells(kinds, groups[kinds]) for kinds in sorted(groups, key=lambda kinds: -len(groups[kinds]))]


@table
def ggml_models():
    """Arithmetics by model: how far the logits are from llama.cpp's, beside how far its own are without flash attention."""
    names = ("llama.cpp without flash attention", "exact float", "exact bf16", "exact int8")
    found = {(r["model"], r["length"], r["name"]): r for r in load("ggml_arithmetic")["check"]}
    body = []
    for model, length in dict.fromkeys((model, length) for model, length, name in found if name in names):
        of = [found.get((model, length, name)) for name in names]
        body.append([f"{model}, {length:,} tokens", *("{:.4f}, {:+.1f} %".format(r["kl"], r["perplexity"][0]) if r else "-" for r in of)])
    return ["KL in nat, change of perplexity", *names], body


def real_settings(name, length):
    """As the page calls them: a budget by the part of the prompt that it is."""
    mode, _, budget = name.rpartition(" ")
    return f"{mode}, {part(round(int(budget) / length * 64) / 64)}" if budget.isdigit() else name


MODEL_NAMES = {"SmolLM2-135M-Instruct Q4_0": "SmolLM2", "Gemma 3 270M Q4_K_M": "Gemma 3", "TinyLlama-1.1B-Chat Q8_0": "TinyLlama"}


def by_model(name):
    """{(model, length): {settings as the page calls them: result}}"""
    found = {}
    for r in load(name)["results"]:
        found.setdefault((MODEL_NAMES[r["model"]], r["length"]), {})[real_settings(r["settings"], r["length"])] = r
    return found


@table
def real_models():
    """KL of exact attention and the paper's defaults in llama.cpp, and how fast the first token comes."""
    columns = ["exact float", "exact bf16", "exact int8", "paper, 1/4", "paper, 1/8"]
    cell = lambda r: "-" if r is None else f"{r['kl'][0]:.4f}" + (f", {times(r['speedup'], 2)}" if "speedup" in r else "")  # noqa: E731
    return ["", *columns], [[f"{model}, {length:,} tokens", *(cell(found.get(settings)) for settings in columns)] for (model, length), found in by_model("real_models").items()]


@table
def mass_rule():
    """The presets in llama.cpp: what is lost beyond exact attention."""
    found = by_model("mass_rule")
    settings = ["recommended", *(f"recommended, 1/{share}" for share in (4, 8, 16)), "balanced", "balanced, 1/8"]
    cell = lambda r: "-" if r is None else "{:.4f} ({:.4f} to {:.4f})".format(*r["kl_less_exact"])  # noqa: E731
    return ["", *settings], [[f"{model}, {length:,} tokens, n = {of['exact float']['samples']}", *(cell(of.get(name)) for name in settings)]
                             for (model, length), of in found.items()]


@table
def loss_parts():
    """What an eighth loses in llama.cpp, by weights, text and which chunks select."""
    cell = lambda values: "{:.4f} ({:.4f} to {:.4f})".format(*values) if values else "-"  # noqa: E731
    return ["weights", "exact mode", "the last 512 tokens select", "every chunk selects", "every chunk selects, second half"], [
        [r["weights"].replace(" as ", ", stored as "), *(cell(of.get(what)) for of, what in ((r, "exact"), (r, "last_512"), (r, "every_chunk"), (r["second_half"], "every_chunk")))]
        for r in load("mass_rule")["parts"]["results"]]


@table
def old_rule():
    """What budgets lost with one list for each KV head, and lose now; and what they were to lose at most."""
    body = []
    for r in rows("one_list"):
        model, tokens, keys = r["model"], r["tokens"], r["keys"]
        if tokens == 8064:
            now = row("loss_time_8064", selector="quoka.recommended", budget=keys)
        else:
            now = row("kept_share" if model == "SmolLM2" else "kept_share_gemma", tokens=tokens, settings=f"{'' if model == 'SmolLM2' else '`'}recommended{'' if model == 'SmolLM2' else '`'}, {keys}")
        number = lambda x: "-" if x is None else f"{x:.4f}"  # noqa: E731
        body.append([f"{model}, {tokens:,} tokens, {keys}", number(r["kl"]), number(r["goal"]), number(now["kl"][0])])
    return ["", "one list for each KV head", "goal, at most", "now"], body


@table
def kept_shares():
    """The last tokens of a prompt: keys kept, attention kept, and what is lost by it. The JSON has more settings."""
    return ["", "keys", "attention kept", "KL, nat"], [
        [settings, f"{percent(r['keys'])} %", f"{percent(r['kept_share'])} %", "{:.4f} ({:.4f} to {:.4f})".format(*r["kl"])]
        for settings in ("recommended", "recommended, 1/4", "recommended, 1/8", "recommended, 1/16", "balanced") for r in [row("kept_share", settings=settings)]]


@table
def selecting():
    """Selecting and attending, beside attention to all keys, ms: 128 queries over 8,192 keys."""
    body = []
    for name, shown in (("selecting", "AVX-512, VNNI"), ("selecting_x86-64-v3", "AVX2")):
        for r in rows(name, keys=8192, queries=128):
            for arithmetic in ("float", "int8") if shown != "AVX2" else ("float",):
                ms, part = r["ms"], r["part"]
                both = ms["select"] + ms[f"heads {arithmetic}"]
                body.append([shown, arithmetic, f"1/{part}", f"{ms[f'exact {arithmetic}']:.0f}", f"{ms['select']:.1f}", f"{ms[f'heads {arithmetic}']:.1f}", f"{both:.1f}", times(ms[f"exact {arithmetic}"] / both)])
    return ["", "attention in", "keys", "exact", "select", "attend", "together", "times as fast"], body


@table
def ruler():
    """Right answers of exact mode and of the presets as they are called, by task; of all tasks the change, in points, too."""
    found = {}
    for r in rows("ruler"):
        found.setdefault(r["task"], {})[r["settings"]] = r
    settings = list(next(iter(found.values())))

    def cell(r):
        change = ", {:+.1f} ({:+.1f} to {:+.1f})".format(*r["change"]) if r["task"] == "all" and r["settings"] != "exact" else ""
        return f"{r['right']:.1f} %{change}"

    return ["task", "samples", *settings], [
        ["all of these" if task == "all" else f"`{task}`", of["exact"]["samples"], *(cell(of[name]) for name in settings)] for task, of in found.items()]


@table
def estimate_rates():
    """Multiply-adds with weights and of attention, in one second of one thread, and how many of the first go into one of the second."""
    body = []
    for r in load("estimate_rates")["results"]:
        depth = r["depths"][1] - r["depths"][0]
        of_key = {name: (r[name][1] - r[name][0]) / depth for name in ("llama_cpp_cpu_s", "exact_cpu_s")}
        attention = {name: r["ubatch"] * r["attention_of_a_token_and_key"] / cost for name, cost in of_key.items()}
        weights = r["ubatch"] * r["weights_of_a_token"] / (r["exact_cpu_s"][0] - of_key["exact_cpu_s"] * r["ubatch"] / 2)
        body.append([r["weights"], r["model"], *(f"{x / 1e9:.0f}" for x in (weights, *attention.values()))])
    return ["weights", "model", "weights, G a second", "llama.cpp's attention", "exact"], body


@table
def ggml_weights():
    """Seconds of a ubatch by the type of weights."""
    found = load("estimate_rates")["weights"]
    return ["weights", "s", "times the fastest"], [
        [r["weights"], f"{r['cpu_s']:.2f}", times(r["cpu_s"] / min(one["cpu_s"] for one in found))] for r in sorted(found, key=lambda r: r["cpu_s"])]


@table
def python_threads():
    of = {(one["policy"], one["work"]): one["milliseconds"] for one in rows("python_threads")}
    body = []
    for work in dict.fromkeys(one["work"] for one in rows("python_threads")):
        cells = [f"{of[policy, work][way]:.2f}" for policy in ("unset", "active", "passive") for way in ("torch's threads", "its own")]
        body.append([work, *cells, f"{of['unset', work]['one thread']:.2f}"])
    return ["milliseconds", "unset: torch's threads", "its own", "active: torch's threads", "its own", "passive: torch's threads", "its own",
            "unset: one thread"], body


def layers_of_python(length):
    body = []
    measured = [load(f"python_layer{length}_{dtype}") for dtype in ("float32", "bfloat16")]
    for way in measured[0]["attention"]:
        cells = []
        for one in measured:
            attention, weights = one["attention"], one["weights"]
            whole = weights + attention[way]
            cells += [f"{attention[way]:.2f}", f"{percent(attention[way] / whole, 0)} %", times((weights + attention["sdpa"]) / whole, 2)]
        body.append([way, *cells])
    return ["", "float32: attention, s", "of the layer", "whole", "bfloat16: attention, s", "of the layer", "whole"], body


@table
def python_layer():
    return layers_of_python("")


@table
def python_layer_long():
    return layers_of_python("_32768")


@table
def python_prefill():
    """Medians of rounds; the ratios are of the same round."""
    loaded = {one["way"]: one for one in load("python_prefill")["results"]}
    bases, body = list(loaded.values())[:2], []
    for way, of in loaded.items():
        seconds, inside = (statistics.median(of[key]) for key in ("seconds", "in_attention"))
        body.append([way, f"{seconds:.1f}", f"{inside:.1f}", f"{percent(inside / seconds, 0)} %",
                     *(times(statistics.median(b / x for b, x in zip(base["seconds"], of["seconds"])), 2) for base in bases)])
    return ["8,000 tokens", "s", "attention, s", "of the whole", "as fast as sdpa in one call", "in chunks of 512"], body


@table
def window_as_mask():
    of, body = {one["run_name"]: one for one in load("quoka_bench_window")["benchmarks"] if one["aggregate_name"] == "median"}, []
    for label, kind in (("float", ""), ("`int8`", "int8/")):
        option, mask = (of[f"attention/window/{way}/{kind}q_len:4096/window:512"] for way in ("option", "mask"))
        body.append([label, f"{option['cpu_time']:.1f}", f"{option['GFLOP/s']:.0f}", f"{mask['cpu_time']:.1f}", times(mask["cpu_time"] / option["cpu_time"], 2)])
    return ["4,096 queries, window of 512, 4/1/256", "`sliding_window`, ms", "GFLOP/s", "as a mask of bytes, ms", "times as long"], body


@table
def onnxruntime():
    body = []
    for one in sorted(rows("onnxruntime", threads=2), key=lambda one: (one["type"], one["keys"], -one["queries"])):
        of = {name: values[1] for name, values in one["milliseconds"].items()}
        cells = [f"{of[name]:.4g}" if name in of else "" for name in ("int8", "paper")]
        body.append([f"{one['queries']} over {one['keys']:,}, {one['type']}", f"{of['ONNX Runtime']:.4g}", f"{of['exact']:.4g}",
                     times(of["ONNX Runtime"] / of["exact"], 2), *cells])
    return ["milliseconds", "ONNX Runtime's", "exact", "times as fast", "`int8`", "`paper`, 1,024 keys"], body


@table
def decoder_compare():
    return ["a quarter of the past", "next token agrees", "KL, nat", "error, layer 0", "error, last layer"], [
        [code(preset(r["selector"])) + note, f"{percent(r['agreement'])} %", f"{r['kl_nat']:.3f}", f"{r['layer_error'][0]:.3f}", f"{r['layer_error'][-1]:.3f}"]
        for file, note in (("decoder_compare_tinyllama", ""), ("decoder_compare_tinyllama_dense_1", ", first layer dense")) for r in load(file)["results"]]


@table
def capture():
    return ["budget", "KV pairs, of dense", "mass kept", "output error", "speedup"], [
        [r["budget"], f"{percent(r['kv_pairs_share'])} %", f"{percent(r['mass_kept'])} %", f"{r['output_error']:.3f}", times(r["speedup"])]
        for r in load("prefill_tinyllama_layer11")["capture"]]


@table
def chunk_length():
    records = load("chunk_length")["results"]
    return ["tokens in a chunk", *(f"{r['chunk']:,}" for r in records)], [
        ["seconds", *(f"{r['prefill_seconds']:.2f}" for r in records)], ["times as fast as dense", *(f"{r['speedup']:.1f}" for r in records)]]


# ---- figures ----------------------------------------------------------------------------------------------------------

GREY, PAPER, BALANCED = "#8a8a8a", "#d0475a", "#1f6f54"
COLOURS = {"quoka": PAPER, "quoka.recommended": BALANCED, "quoka.balanced": "#3aa37b", "sample_attention": "#00798c", "sparq": "#c98a1b", "loki": "#5f9a3c", "less_is_more": "#8a63c9",
           "xattention": "#1d70b8", "flash_prefill": "#7a5230", "oracle": GREY, "random": "#bbbbbb"}


def drawn(width, height, inside):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
            f'<rect width="{width}" height="{height}" fill="white"/>\n{inside}\n</svg>\n')


def text(x, y, words, size=12, color="#222222", anchor="start", weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def bar(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def lines(title, series, x_title, **options):
    """A chart of report.py as a file of its own."""
    inside = report.chart([(preset(name), points, COLOURS[name]) for name, points in series.items()], **options)
    inside = re.sub(r'^<div class="scroll"><svg[^>]*>|</svg></div>$', "", inside).replace("var(--rule)", "#dddddd")
    return drawn(720, 380, text(20, 22, title, 14, weight="bold") + f'<g transform="translate(0 24)">{inside}</g>' + text(300, 372, x_title, anchor="middle"))


def prefill_speedup():
    names = [name for name in COLOURS if name != "oracle" and rows("speedup_all", selector=name)]
    return lines("Prefill of one layer against its length: times as fast as dense", {name: {r["tokens"]: r["speedup"] for r in rows("speedup_all", selector=name)} for name in names},
                 "prompt, tokens; 1,024 keys, one core of an AMD EPYC (Zen 4)")


def which_preset():
    speeds, budgets = frontier(), ("0.25", EIGHTH, "0.0625", "0.03125")
    series = {name: {speeds[float(b), name]: 100 * answers().share(name, b, RETRIEVAL, [2048]) for b in budgets} for name in COLOURS
              if (0.25, name) in speeds and answers().share(name, "0.25", RETRIEVAL, [2048]) is not None}
    return lines("Right answers (%) against speed: 1/4, 1/8, 1/16 and 1/32 of the past selected", series, "prefill of 32,768 tokens, times as fast as dense; one core of an Intel Xeon",
                 ticks=range(0, 101, 20), x_ticks=(2, 4, 8, 12), unit="", x_unit="x")


def side_by_side():
    """Bars of exact attention by library, a group for each precision, and of what rounds or leaves out more."""
    r, loaded = side_row(128, 8192), load("side_by_side")
    groups = (("float", "exact float", ("exact float", "OpenVINO SDPA f32", "OpenVINO paged f32", "ONNX Runtime f32", "torch f32")),
              ("float over an f16 cache", "exact float, f16 cache", ("exact float, f16 cache", "ONNX Runtime f16", "torch f16", "llama.cpp, f16 cache")),
              ("bfloat16", "exact bf16", ("exact bf16", "OpenVINO paged bf16", "OpenVINO SDPA bf16", "torch bf16")),
              ("int8, which rounds more", None, ("exact int8",)))
    ours = {"exact float": "QuoKA", "exact float, f16 cache": "QuoKA", "exact bf16": "QuoKA", "exact int8": "QuoKA"}
    left, width, most, y = 210.0, 500.0, 450.0, 92.0
    out = [text(20, 26, "Attention of one layer, 128 new tokens over 8,192 cached keys, ms", 16, weight="bold"),
           text(20, 46, f"32 query heads, 8 KV heads of 128; one core of {loaded['machine']['cpu'].partition(',')[0]} (Zen 4, AVX-512). Shorter is faster", 11.5)]
    top = y
    for title, like, names in groups:
        out.append(text(20, y, title, 12, weight="bold"))
        for name in names:
            y += 18
            assert like is None or name == like or loaded["like"][name] == like, name
            ms, color = r["entries"][name]["ms"][1], BALANCED if name in ours else GREY
            out += [text(left - 8, y + 10, ours.get(name, name.rpartition(" ")[0] if like and "llama" not in name else name.partition(",")[0]), 11, color, "end", "bold" if name in ours else "normal"),
                    bar(left, y, width * ms / most, 13, color), text(left + width * ms / most + 5, y + 11, f"{ms:.0f}", 11, color)]
        y += 34
    axis = [part for value in range(0, 451, 100) for part in (bar(left + width * value / most, top - 14, 1, y - top - 8, "#dddddd"), text(left + width * value / most, y - 6, f"{value} ms", 11, anchor="middle"))]
    return drawn(left + width + 60, y + 8, "\n".join(axis + out))


def scatter(title, series, x_title, y_title, note="", joined=False):
    """Points on logarithmic axes, or lines through them: series are {name: (colour, [(x, y)])}."""
    left, top, width, height = 70, 50, 560, 330
    xs, ys = ([p[axis] for _, points in series.values() for p in points] for axis in (0, 1))
    low_x, high_x = math.floor(math.log10(min(xs)) * 4) / 4, math.ceil(math.log10(max(xs)) * 4) / 4
    low_y, high_y = math.floor(math.log10(min(ys)) * 4) / 4, math.ceil(math.log10(max(ys)) * 4) / 4
    at_x = lambda x: left + width * (math.log10(x) - low_x) / (high_x - low_x)  # noqa: E731
    at_y = lambda y: top + height * (high_y - math.log10(y)) / (high_y - low_y)  # noqa: E731
    out = [text(20, 24, title, 14, weight="bold")]
    for decade in range(-7, 4):
        for step in (1, 2, 5):
            value = step * 10.0 ** decade
            if low_x <= math.log10(value) <= high_x:
                out += [bar(at_x(value), top, 1, height, "#e4e4e4"), text(at_x(value), top + height + 16, f"{value:g}", 11, anchor="middle")]
            if low_y <= math.log10(value) <= high_y:
                out += [bar(left, at_y(value), width, 1, "#e4e4e4"), text(left - 6, at_y(value) + 4, f"{value:g}", 11, anchor="end")]
    for i, (name, (colour, points)) in enumerate(series.items()):
        out += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3.4" fill="{colour}" fill-opacity="0.75"/>' for x, y in points]
        if joined:
            path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out += [f'<circle cx="{left + width + 20}" cy="{top + 10 + 20 * i}" r="4" fill="{colour}"/>', text(left + width + 30, top + 14 + 20 * i, name, 11)]
    out += [text(left + width / 2, top + height + 36, x_title, anchor="middle"), text(20, 42, y_title, 11), text(20, top + height + 56, note, 11)]
    return drawn(left + width + 210, top + height + 66, "\n".join(out))


RULE_COLOURS = {"recommended": BALANCED, "balanced": "#c98a1b", "single layers": GREY, "paper": PAPER}


def loss_over_time():
    """What an eighth, a sixteenth and so on of the keys lose, over the time that they take; and the presets without a budget."""
    tokens, series = 4096, {}
    for name in ("quoka.recommended", "quoka.balanced", "quoka", "sample_attention", "xattention", "flash_prefill"):
        points = [(r["of_exact"][0], r["kl"][0]) for r in rows(f"loss_time_{tokens}", selector=name)]
        series[{"quoka": "paper"}.get(name, name.removeprefix("quoka."))] = (COLOURS[name], points)
    for name, shown in AS_CALLED.items():
        r = row(f"loss_time_{tokens}", selector=name)
        series[f"{shown}()"] = ("#222222" if shown == "recommended" else GREY, [(r["of_exact"][0], r["kl"][0])])
    return scatter(f"SmolLM2-135M, {tokens:,} tokens: what is lost, over the time of attention", series,
                   "selecting and attending, of exact attention's time", "KL to exact attention, nat", "Lines: 1/16, 1/8 and 1/4 of the keys, from left to right. Lower and further left is better.", joined=True)


def voters_over_time():
    """The loss over time by voters of a KV head, whatever chose the number of keys; and the presets without a budget."""
    colours = {64: "#bbbbbb", 128: "#3aa37b", 256: BALANCED, 384: "#1d70b8"}
    run = next(run for run in load("loss_voters")["runs"] if run["tokens"] == 4096)
    series = {str(voters): (colour, []) for voters, colour in colours.items()}
    called = {"recommended()": (256, "c = .41, at least 1,024"), "balanced()": (128, "c = .82, at least 512")}
    for name, shade in zip(called, ("#222222", GREY)):
        series[name] = (shade, [])
    for r in run["results"]:
        voters, keys = voters_of(r)
        name = next((name for name, of in called.items() if of == (voters, keys)), str(voters))
        if name in series:
            series[name][1].append((r["of_exact"][0], r["kl"][0]))
    return scatter(f"SmolLM2-135M, {run['tokens']:,} tokens: what is lost, over the time of attention, by voters of a KV head", series,
                   "selecting and attending, of exact attention's time", "KL to exact attention, nat", "Thresholds and budgets. Lower and further left is better.")


def kept_share():
    """The loss against the attention that is left out: a point for each chunk of 128 tokens and
    setting."""
    series = {}
    for r in load("kept_share")["results"]:
        kind = "single layers" if r["settings"].startswith("layer ") else r["settings"].partition(",")[0]
        model = r["model"].partition("-")[0].partition(" ")[0]
        name = f"{model}, {kind}" + (" of all" if kind == "single layers" else "")
        shade = RULE_COLOURS[kind] if model == "SmolLM2" else {"recommended": "#00798c", "balanced": "#8a63c9", "single layers": "#bbbbbb"}.get(kind, GREY)
        points = [(100 * (1 - share), kl) for share, kl in r["chunks"] if share < 1 and kl > 0]
        if points:
            series.setdefault(name, (shade, []))[1].extend(points)
    return scatter("What a chunk loses, against the attention that its voters do not keep", series, "attention that is not kept, mean over heads and selecting layers, %", "KL to exact attention, nat")


def kept_keys():
    """Keys that recommended keeps as it is called, by layer and query head."""
    models = [r for r in load("kept_share")["results"] if r["settings"] == "recommended" and "keys_by_layer_and_head" in r]
    out, top = [text(20, 24, "Keys that `recommended` keeps, % of the past, by layer and query head".replace("`", ""), 14, weight="bold")], 56
    for r in models:
        layers = list(r["keys_by_layer_and_head"].items())
        out += [text(54, top + 22, "layer", 10, anchor="end"), text(20, top + 42, "head", 10)]
        out.append(text(20, top, f"{r['model']}, {r['tokens']:,} tokens: {percent(r['keys'])} % of all", 12, weight="bold"))
        for column, (layer, shares) in enumerate(layers):
            x = 60 + 26 * column
            out.append(text(x + 13, top + 22, layer, 10, anchor="middle"))
            for head, share in enumerate(shares):
                y, dark = top + 28 + 20 * head, share ** 0.5
                shade = "#{:02x}{:02x}{:02x}".format(*(round(255 + (to - 255) * dark) for to in (0x1f, 0x6f, 0x54)))
                out += [bar(x, y, 25, 19, shade), text(x + 12.5, y + 13, f"{100 * share:.0f}", 9.5, "#ffffff" if dark > 0.6 else "#222222", "middle")]
        out += [text(54, top + 42 + 20 * head, str(head), 10, anchor="end") for head in range(len(layers[0][1]))]
        top += 60 + 20 * len(layers[0][1])
    widest = max(len(r["keys_by_layer_and_head"]) for r in models)
    return drawn(max(560, 80 + 26 * widest), top, "\n".join(out))


FIGURES = {"prefill_speedup.svg": prefill_speedup, "which_preset.svg": which_preset, "side_by_side.svg": side_by_side, "kept_share.svg": kept_share, "loss_over_time.svg": loss_over_time, "voters_over_time.svg": voters_over_time, "kept_keys.svg": kept_keys}

# ---- numbers in prose -------------------------------------------------------------------------------------------------


def claims():
    """(page, what it must say): numbers that stand in sentences, as the results give them."""
    loaded = load("side_by_side")
    behind = sum(any(loaded["kinds"][name] == "other" and of.get("of_ours", [1, 1, 1])[1] < 1 for name, of in r["entries"].items()) for r in loaded["operators"])
    settings = f"{len(loaded['operators']) - behind} of {len(loaded['operators'])}"
    model = next(r for r in loaded["models"] if r["model"].startswith("SmolLM2-135M Q4_0"))["engines"]
    first = {name: of["8192"]["s"][1] for name, of in model.items()}
    wide = medians("quoka_bench_avx512"), medians("quoka_bench_x86-64-v3")
    avx512, avx2 = (of["attention/dense/kv_len:8192/head_dim:128/group:4/threads:1"] for of in wide)
    runs = [run for name in ("ggml_first_token_zen4", "ggml_first_token") for run in load(name)["runs"]]

    def gain(tokens):
        ratios = [p["llama.cpp"]["s"] / p["exact"]["s"] for run in runs for p in run["prompts"] if p["tokens"] == tokens]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    quarter, fixed = (row(file, tokens=32768, selector="quoka.recommended")["speedup"] for file in ("speedup_quarter", "frontier_1024"))
    yield from (("README.md", words) for words in (
        settings, f"reads 8,192 tokens in {first['llama.cpp + quoka, exact float']:.0f} s instead of {first['llama.cpp']:.0f} s",
        f"128 tokens take {milliseconds(avx2):.0f} ms in float on this core, with AVX-512 {milliseconds(avx512):.0f} ms: {avx2['peak']:.2f} and {avx512['peak']:.2f} of its peak",
        f"{gain(2048)} times as fast at 2,048 tokens, {gain(8192)} at 8,192, {gain(32768)} at 32,768",
        f"takes {first['llama.cpp + quoka, exact float']:.1f} s in float, {first['llama.cpp + quoka, exact bf16']:.1f} s in bfloat16 and {first['llama.cpp + quoka, exact int8']:.1f} s in int8",
        f"OpenVINO GenAI takes {first['openvino precision=f32']:.1f} s in float and {first['openvino']:.1f} s in bfloat16",
        f"{fixed:.1f} times as fast with 1,024 keys and {quarter:.1f} times with a quarter of the past"))
    yield "bench/results/side_by_side.md", settings
    peaks = [medians("quoka_bench_avx512")[f"attention/dense/{name}/threads:1"]["peak"] for name in ("kv_len:8192/head_dim:64/group:4", "kv_len:32768/head_dim:128/group:4")]
    yield "bench/README.md", f"{100 * peaks[0]:.0f} to {100 * peaks[1]:.0f} % of the core's peak"
    alone = [r for r in rows("lists") if r["kind"] == "each its own" and 4 * r["attended"] <= r["keys"]]
    lists_gain = f"{min(r['of_mask'] for r in alone):.1f} to {max(r['of_mask'] for r in alone):.1f} times as fast as the same keys as a mask"
    yield "bench/README.md", lists_gain
    parts = [[percent(r[what], 0) for what in ("products", "exponentials", "adding")] for r in rows("selecting_parts")]
    yield "bench/README.md", ("products take {} % of selecting by 256 voters, exponentials {} %, adding the weights up {} %; by 128 voters {}, {} and {} %; on AVX2 {}, {} and {} %").format(*itertools.chain(*parts))
    attending = load("selecting_parts")["attention"]
    yield "bench/README.md", f"{percent(attending['rotating_keys'], 0)} % rotates keys, {percent(attending['waiting_for_rows'], 0)} % waits for their rows"
    whole = next(r for r in load("side_by_side_zen5")["models"] if r["model"].startswith("SmolLM2"))["engines"]
    sdpa = lambda way: [of["transformers sdpa"]["8192"]["s"][1] / of[f"transformers {way}"]["8192"]["s"][1] for of in (model, whole)]  # noqa: E731
    ik_llama = {name: of["8192"]["s"][1] for name, of in load("side_by_side_xeon")["models"][0]["engines"].items() if name.startswith("ik_llama")}
    yield "examples/bindings/ik_llama/README.md", "in {:.1f} s in place of {:.1f} over an f16 cache, in {:.1f} in place of {:.1f} over bf16, in {:.1f} in place of {:.1f} over q8_0".format(
        *(ik_llama[f"ik_llama.cpp {cache}{how}"] for cache in ("f16", "bf16", "q8_0") for how in (", patched", "")))
    quarters = next(r for r in loaded["models"] if r["model"].endswith("Q4_1"))["engines"]["llama.cpp"]["8192"]["s"][1]
    yield from (("bench/results/side_by_side.md", words) for words in (
        f"`int8` is {first['llama.cpp'] / first['llama.cpp + quoka, exact int8']:.1f} times as fast to the first token at 8,192 tokens, in float {first['llama.cpp'] / first['llama.cpp + quoka, exact float']:.1f} times",
        f"As Q4_1 the same model takes llama.cpp {quarters:.0f} s instead of {first['llama.cpp']:.0f}",
        "{:.1f} (Zen 4) to {:.1f} times (Zen 5) as fast in float, and {:.1f} to {:.1f} times with `int8`".format(*sdpa("exact"), *sdpa("exact int8"))))
    yield "examples/bindings/python/README.md", f"exact attention makes the prompt {sdpa('exact')[1]:.2f} times as fast as sdpa in one call, `int8` {sdpa('exact int8')[1]:.2f} times"
    amx_last, zen4_last = load("ggml_amx")["runs"][0]["prompts"][-1], runs[0]["prompts"][-1]
    by = {name: [r[name] for r in load("ggml_arithmetic")["float_over"]] for name in ("bf16", "int8")}
    yield from (("bench/results/ggml.md", words) for words in (
        f"With AMX llama.cpp takes {amx_last['llama.cpp']['s']:.0f} s for 16,384 tokens, exact mode {amx_last['exact']['s']:.0f} s and `paper` {amx_last['paper']['s']:.0f} s",
        f"On Zen 4 it takes {zen4_last['llama.cpp']['s']:,.0f} s for 32,768 tokens",
        f"bf16 is {min(by['bf16']):.1f} to {max(by['bf16']):.1f} times as fast as float here, int8 {min(by['int8']):.1f} to {max(by['int8']):.1f} times"))
    deep = answers("deep_model.json")
    places = [place for place in itertools.product(deep.tasks, deep.lengths) if (deep.share("dense", None, *([x] for x in place)) or 0) >= 0.9]
    yield "bench/results/accuracy.md", "QuoKA loses {:.1f} points there [{:.1f}, {:.1f}], LessIsMore {:.1f} [{:.1f}, {:.1f}]".format(
        *(-100 * end for name in ("quoka", "less_is_more") for mean in [bootstrap(deep.strata(name, EIGHTH, places, "dense"))] for end in (mean[0], mean[2], mean[1])))
    long = answers("long_*.json")
    lost = lambda name, n: -100 * long.mean(name, "0.03125", RETRIEVAL, [n], "dense")[0]  # noqa: E731
    yield "bench/results/accuracy.md", "QuoKA loses {:.1f} points at 8,192 tokens and {:.1f} at 16,384, SampleAttention {:.1f} and {:.1f}".format(
        *(lost(name, n) for name in ("quoka", "sample_attention") for n in (8192, 16384)))
    whole_prefill = next(p for p in load("ggml_first_token_q4_0")["prompts"] if p["tokens"] == 8192)
    yield "bench/results/ggml.md", "takes {:.1f} s to the first token of 8,192, with exact float {:.1f} s, bf16 {:.1f} s, int8 {:.1f} s".format(
        *(whole_prefill[name]["s"] for name in ("llama.cpp", "exact float", "exact bf16", "exact int8")))
    yield "bench/README.md", f"{load('context_parallel_2')['ratio']:.2f} times as fast as one"
    over = {(r["cache"], *r["shape"].rsplit("/", 2)[::2]): r for r in load("ggml_arithmetic")["ggml_over"]}["f16", "9/3/64", "7680"]
    yield "examples/bindings/ggml/README.md", f"{over['bf16']:.1f} times as fast as llama.cpp's in bf16, {over['float']:.1f} times in float"
    gemma = next(r for r in loaded["models"] if r["model"].startswith("Gemma"))["engines"]
    most = max(gemma["llama.cpp"]["8192"]["s"][1] / of["8192"]["s"][1] for name, of in gemma.items())
    yield from ((page, f"more than {most:.2f} times") for page in ("examples/bindings/ggml/README.md", "bench/results/side_by_side.md"))
    divergence = {(r["model"][:5], r["length"], r["name"]): r["kl"] for r in load("ggml_arithmetic")["check"]}
    more = [percent(divergence[model, n, "exact bf16"] / divergence[model, n, "exact float"] - 1, 0) for model, n in (("Gemma", 2048), ("Gemma", 8192), ("TinyL", 1952))]
    yield "bench/results/ggml.md", "bf16 adds {} to {} % to KL on Gemma and {} % on TinyLlama".format(*more)
    yield from real_model_claims()
    long = {of: load(f"python_layer_32768_{of}") for of in ("float32", "bfloat16")}
    yield "examples/bindings/python/README.md", "Weights take {:.0f} s in float32 and {:.1f} s in bfloat16, so without any attention the layer would be {:.2f} and {:.2f} times as fast".format(
        *(of["weights"] for of in long.values()), *(1 + of["attention"]["sdpa"] / of["weights"] for of in long.values()))
    targets = {kind: row("evaluate_generated", selector="quoka", data=f"generated: {kind}")["targets_kept"] for kind in ("paper", "heads", "adverse")}
    yield "bench/results/evaluate.md", f"QuoKA keeps {percent(targets['paper'], 0)} % of them where its premise holds, {percent(targets['heads'], 0)} % where the heads of a group disagree, and {percent(targets['adverse'], 0)} %, as random keys do"
    entries = side_row(128, 8192)["entries"]

    def errors(like):
        found = [of["error"] for name, of in entries.items() if "error" in of and "q8_0" not in name and "u8" not in name and loaded["like"].get(name, name) == like]
        return f"{min(found):.0e} to {max(found):.0e}" if len(found) > 1 else f"{found[0]:.0e}"

    yield "bench/results/side_by_side.md", "{} in float, {} in float over a cache of half, {} in bf16; {} for `int8`".format(
        *map(errors, ("exact float", "exact float, f16 cache", "exact bf16", "exact int8")))
    yield "bench/results/side_by_side.md", "llama.cpp takes {:,.0f} ms over a q8_0 cache, QuoKA {:.1f}".format(*(entries[name]["ms"][1] for name in ("llama.cpp, q8_0 cache", "exact bf16, q8_0 cache")))
    check = {x["name"]: x for x in load("check_tinyllama")["steps"]["measure"]["by_length"]}
    yield "bench/results/ggml.md", "exact mode is {:.2f} times as fast as llama.cpp and has a KL of {:.4f} nat, a quarter of the keys by `paper` {:.2f} times and {:.4f}".format(
        *(check[name][what] for name in ("exact", "paper 512") for what in ("speedup", "kl")))
    kept = {name: row("evaluate_tinyllama", selector=name, budget="256") for name in ("quoka", "oracle")}
    yield "bench/results/evaluate.md", f"QuoKA keeps {percent(kept['quoka']['mass_kept'] / kept['oracle']['mass_kept'], 0)} % of the oracle's mass"


def kept_share_fit(preset):
    """log KL as a line over the logarithm of the attention that is not kept: one point for each chunk and setting of the preset."""
    points = [(math.log(1 - share), math.log(kl)) for r in rows("kept_share") if r["settings"].partition(",")[0] == preset for share, kl in r["chunks"] if share < 1 and kl > 0]
    power, start = statistics.linear_regression(*zip(*points))
    at = lambda x: start + power * x  # noqa: E731
    return {"power": power, "correlation": statistics.correlation(*zip(*points)), "off": math.exp(max(abs(y - at(x)) for x, y in points)), "at": at}


def real_model_claims():
    page = "bench/results/real_models.md"
    short = lambda x, digits: f"{x:.{digits}f}".removeprefix("0")  # noqa: E731
    own = {"recommended": "quoka.recommended.threshold41.least1024", "balanced": "quoka.balanced.threshold82.least512"}

    def of(tokens, name, budget="own"):
        return row(f"loss_time_{tokens}", selector=own[name] if budget == "own" else name if name in ("quoka", "sample_attention", "flash_prefill") else f"quoka.{name}", budget=budget)

    def time_and_loss(tokens, name, budget="own"):
        return short(of(tokens, name, budget)["of_exact"][0], 2), short(of(tokens, name, budget)["kl"][0], 4)

    tokens = (2048, 4096, 8064)
    in_llama = {(r["model"], r["length"], r["settings"]): r["kl_less_exact"][0] for r in rows("mass_rule") if "kl_less_exact" in r}
    yield page, f"as it is called loses at most {short(max(kl for (_, _, name), kl in in_llama.items() if name == 'recommended'), 4)} nat**"
    of_before = [in_llama[r["model"], r["length"], r["settings"]] / r["kl_less_exact"][0] for r in load("mass_rule")["one_list"]["results"]]
    yield page, f"With the same keys it loses {percent(min(of_before), 0)} to {percent(max(of_before), 0)} % of what one list"
    smollm2 = "SmolLM2-135M-Instruct Q4_0"
    parts = {r["weights"]: r for r in load("mass_rule")["parts"]["results"]}
    rounded, whole = ([of["last_512"][0], of["every_chunk"][0], of["second_half"]["every_chunk"][0]] for of in (parts["Q4_0"], parts["F16"]))
    worse = [q / f for q, f in zip([*rounded, in_llama[smollm2, 4096, "recommended 512"]], [*whole, parts["F16, facts in the text"]["second_half"]["every_chunk"][0]])]
    yield page, f"lose {min(worse):.1f} to {max(worse):.1f} times as much as F16"
    beyond = [100 * (in_llama[smollm2, n, f"recommended {keys}"] / goal - 1) for n, keys, goal in ((4096, 512, 0.012), (8000, 1024, 0.006), (4096, 256, 0.03))]
    yield page, f"by {min(beyond):.0f} to {max(beyond):.0f} %, within their intervals"
    figures = [time_and_loss(4096, *of) for of in (("balanced",), ("sample_attention", "1/4"), ("flash_prefill", "1/4"), ("quoka", "1/4"))]
    yield page, ("at 4,096 tokens `balanced` as called takes {} of exact attention's time and loses {} nat, SampleAttention with a quarter of the keys {} and {}, "
                 "FlashPrefill {} and {}, the paper's rule {} and {}").format(*itertools.chain(*figures))
    sixteenths = [of(4096, name, "1/16") for name in ("quoka", "balanced")]
    yield page, "takes {} of exact attention's time at 4,096 tokens, `balanced` {}. It loses {} nat there, `balanced` {}".format(
        *(short(r["of_exact"][0], 2) for r in sixteenths), *(short(r["kl"][0], 3) for r in sixteenths))
    yield page, "{} % of 2,048 tokens, where 1,024 keys is the least, {} % of 4,096, {} % of 8,064".format(*(percent(of(n, "recommended")["keys"], 0) for n in tokens))
    parts = ("1/4", "1/8", "1/16")
    now, before = ([row("plain_rule_gemma", text="first tokens", rule=rule, voters=256, settings=part)["kl"][0] for part in parts] for rule in ("one threshold", "one list"))
    yield page, "written plainly in torch, with float keys and exact logits, the rule has a KL of {}, {} and {} nat".format(*(short(x, 4) for x in now))
    yield page, "one list for each KV head loses {}, {} and {} nat; the present rule loses {}, {} and {} % of that".format(
        *(short(x, 4) for x in before), *(percent(x / y, 0) for x, y in zip(now, before)))
    every_query = [row("plain_rule_gemma", text="first tokens", rule="one threshold", voters=512, settings=part)["kl"][0] for part in parts[1:]]
    yield page, "With all queries as voters it loses {} and {} nat with an eighth".format(*(short(x, 4) for x in every_query))
    elsewhere = [[r["kl"][0] for r in rows("plain_rule_gemma", rule=rule, voters=voters) if r["text"] != "first tokens"]
                 for rule, voters in (("one threshold", 256), ("one threshold", 512), ("one list", 256))]
    yield page, "other parts or layouts of the novel an eighth loses {} to {} nat, with all queries as voters {} to {}, and one list {} to {}".format(
        *(short(edge(losses), 4) for losses in elsewhere for edge in (min, max)))
    gains = {before: [edge(row("equal_loss", tokens=n, selector="quoka.recommended", before=before)["ratios"]) for n in (8192, 32768) for edge in (min, max)]
             for before in (0.25, 0.2)}
    yield page, "{:.2f} to {:.2f} times as fast as that at 8,192 tokens, {:.2f} to {:.2f} times at 32,768".format(*gains[0.25])
    yield page, "{:.2f} to {:.2f} and {:.2f} to {:.2f} times as fast as that. Selecting".format(*gains[0.2])
    select, both = (sum(row("selecting", keys=8192, queries=128, part=8)["ms"][what] for what in names) for names in (("select",), ("select", "heads float")))
    yield page, f"takes {select:.1f} of {both:.1f} ms with an eighth"
    shares = [r["keys"] for r in rows("kept_share")]
    yield page, f"Over settings from {percent(min(shares) - 0.005, 0)} to {percent(max(shares), 0)} % of the keys"
    fits = {preset: kept_share_fit(preset) for preset in ("recommended", "balanced")}
    yield page, ("KL grows as the {:.1f}th power of the attention that is not kept ({:.1f}th with `balanced`). The logarithms correlate by {:.2f} ({:.2f}), "
                 "and no chunk is off by more than {:.1f} times").format(*(fits[p][what] for what in ("power", "correlation") for p in fits), max(f["off"] for f in fits.values()))
    worse = fits["balanced"]["at"](math.log(0.05)) - fits["recommended"]["at"](math.log(0.05))
    yield page, f"Where 95 % are kept, `balanced` loses {math.exp(worse):.1f} times as much"
    by = {(r["length"], r["settings"]): r["kl"][0] for r in rows("real_models") if r["model"] == "SmolLM2-135M-Instruct Q4_0" and r.get("kl")}
    worse = [by[n, f"paper {n // 4}"] / by[n, "exact float"] for n in (2048, 4096)]
    yield page, f"has {min(worse):.0f} to {max(worse):.0f} times exact mode's KL with the paper's defaults; at 8,000 tokens {by[8000, 'paper 1984'] / by[8000, 'exact float']:.0f} times"
    pairs = [(of(n, "balanced", part), of(n, "recommended", part)) for n in tokens for part in ("1/4", "1/8", "1/16") if (n, part) != (8064, "1/4")]
    losses, times_taken = ([b[what][0] / r[what][0] for b, r in pairs] for what in ("kl", "of_exact"))
    yield page, f"loses {min(losses):.1f} to {max(losses):.1f} times as much and takes {short(min(times_taken), 2)} to {short(max(times_taken), 2)} of the time"
    called = {keys: [next(r["of_exact"][0] for r in run["results"] if voters_of(r) == (voters, keys)) for run in load("loss_voters")["runs"]]
              for voters, keys in ((256, "c = .41, at least 1,024"), (128, "c = .82, at least 512"))}
    ratios = [b / r for r, b in zip(*called.values())]
    yield page, f"`balanced` takes {short(min(ratios), 2)} to {short(max(ratios), 2)} of `recommended`'s time"
    at_4096 = {voters_of(r): (short(r["kl"][0], 4), short(r["of_exact"][0], 2)) for run in load("loss_voters")["runs"] if run["tokens"] == 4096 for r in run["results"]}
    yield page, ("a quarter with 128 voters loses {} nat in {} of exact attention's time, an eighth with 256 voters {} in {}; an eighth with 128 loses {} in {}, "
                 "a sixteenth with 256 {} in {}").format(*itertools.chain(*(at_4096[voters, part] for voters, part in ((128, "1/4"), (256, "1/8"), (128, "1/8"), (256, "1/16")))))
    eighths = [of(n, "recommended", "1/8")["kl"][0] / of(n, "recommended")["kl"][0] for n in (4096, 8064)]
    yield page, "{:.1f} times that loss at 4,096 tokens, {:.1f} times at 8,064".format(*eighths)
    yield page, "takes {} and {} of the time; it loses .009 nat at all three lengths".format(*(time_and_loss(n, "balanced")[0] for n in (4096, 8064)))


# Figures in prose that are no results: limits of rules and tests, arithmetic, other authors' figures, what a page's own command prints.
STATED = {
    "README.md": ["compiles in 10 to 14 s"],  # bench/compile_time.sh
    "bench/README.md": ["passes of 64 select 1.1 times as fast with VNNI",  # medians of CPU time in turns: 15.7 and 13.7 ms
                        "5 us for a barrier and 0.2 us between tasks"],  # assumed
    "bench/results/accuracy.md": ["One prompt of 20 is 5 points: an interval of 95 % reaches from 0 to 25 points", "at most 3 points of loss at 12.5 % of the cache"],
    "bench/results/needle.md": ["Ten needles say 90 % with an error of 10 points"],
    "bench/results/real_models.md": ["`ruler_fwe` (33 %)",  # of four samples, not reported
                                     "scoring takes 1.15 times as long"],  # an eighth of 4,096 keys, 9/3 heads of 64, in turns: 0.90 and 1.03 ms, of 9.2 ms
    "bench/results/which_preset.md": ["within 2 points of dense"],
    "examples/README.md": ["the first line took 290 s of CPU time, compilers and their download among them, and the last one 0.7 s"],  # by `time`
    "examples/bindings/ggml/README.md": ["the first line took 14 s, and the server answered 11 s after the second", "may add 0.01 nats to exact mode's KL, lose 5 points of needles, and 1 % of perplexity",
                                         "84 % of llama.cpp's time with SmolLM2-135M in Q4_0, 53 % in Q4_1, and 29 % with Gemma 3 270M", "27 % of an f16 cache"],  # by `time`; limits; --estimate
    "examples/bindings/onnxruntime/README.md": ["took 240 s of CPU time"],  # by `time`
    "examples/bindings/python/README.md": ["took 260 s of CPU time, and the example 2.2 s",  # by `time`
                                           "have 95, 91 and 87 % of the weight", "latest keys 26, 38 and 29 %",  # chosen_keys.py prints them
                                           "took vLLM 5.8 s by its own attention and 5.5 s by quoka"],  # vllm/try.py
    "examples/data/trained/README.md": ["answer 98 to 100 %; `deep_16k` has learned `vt` (98 and 78 %) and misses `haystack` (48 and 9 %)", "(65 to 73 %, because"],  # after training
    "tests/README.md": ["No entry of ctest lasts more than 20 s on two cores"],
}
FIGURE = r"(?<![\w.,/#-])(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
UNIT = r" ?(?:ms|s|us|%|times|x|nats?|points?)(?!\w)"


def figures(page, words):
    """Figures of a page's prose, each with the words around it, but those of the given words."""
    prose = " ".join(re.sub(r"^\|.*$|<!--.*?-->", "", without_code(page), flags=re.MULTILINE).split())
    for said in ("95 % intervals", *sorted(words, key=len, reverse=True)):
        prose = prose.replace(" ".join(said.split()), "")
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    in_tables = {one.lstrip("0") for one in re.findall(FIGURE, " ".join(re.findall(r"^\|.*$", page, flags=re.MULTILINE)))}
    for found in re.finditer(rf"({FIGURE})(?:(?:,| to| and| or) ({FIGURE}))*{UNIT}", prose):
        if any(one.lstrip("0") not in in_tables for one in re.findall(FIGURE, found[0])):
            yield prose[max(0, found.start() - 40):found.end() + 20]


# ---- pages ------------------------------------------------------------------------------------------------------------


def pages():
    skipped = ("build*", "models", ".git", "node_modules")
    return sorted(path for path in ROOT.rglob("*.md")
                  if not any(fnmatch.fnmatch(name, pattern) for name in path.relative_to(ROOT).parts[:-1] for pattern in skipped))


def filled(page):
    def replace(match):
        if match[2] not in TABLES:
            sys.exit(f"{page}: no table is called {match[2]}")
        return f"{match[1]}\n{markdown(*TABLES[match[2]]())}\n\n{match[3]}"
    return re.sub(r"(<!-- table: (\S+) -->\n)(?:.*?)(<!-- end -->)", replace, page.read_text(), flags=re.DOTALL)


def without_code(page):
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = collections.Counter()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(page), flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        yield f"{anchor}-{found[anchor]}" if found[anchor] else anchor
        found[anchor] += 1


def faults(texts):
    for page, content in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(content))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page}: no file {target}"
            elif anchor and file.suffix == ".md" and anchor not in anchors(texts.get(file) or file.read_text()):
                yield f"{page}: no heading {target}"
    everything = "\n".join([*texts.values(), pathlib.Path(__file__).read_text()])
    names = {name for name in re.findall(r"[\w.*\-]+", everything) if len(name.partition("*")[0]) > 4}
    for file in sorted([*RESULTS.glob("*.*"), *DATA.iterdir()]):
        if file.suffix != ".md" and not any(fnmatch.fnmatch(file.name, name) or fnmatch.fnmatch(file.stem, name) for name in names):
            yield f"{file}: no page and no table names it"
    shown = set(re.findall(r"<!-- table: (\S+) -->", everything))
    said = collections.defaultdict(list)
    for page, words in [*claims(), *((page, words) for page, all_words in STATED.items() for words in all_words)]:
        said[ROOT / page].append(words)
        if " ".join(words.split()) not in " ".join(texts[ROOT / page].split()):
            yield f"{page}: does not say what the results give: {words}"
    for page, content in texts.items():
        if page.name != "CHANGELOG.md":
            yield from (f"{page}: a figure that is neither of claims() nor STATED: {found}" for found in figures(content, said[page]))
    yield from (f"bench/tables.py: no page shows the table {name}" for name in TABLES if name not in shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    write = parser.parse_args().write
    texts, wrong = {page: filled(page) for page in pages()}, []
    for path, content in {**texts, **{RESULTS / name: draw() for name, draw in FIGURES.items()}}.items():
        if path.exists() and path.read_text() == content:
            continue
        if write:
            path.write_text(content)
            print(path)
        else:
            wrong.append(f"{path}: not what the results give; run python3 bench/tables.py --write")
    if not write:
        wrong += faults(texts)
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
