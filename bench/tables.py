#!/usr/bin/env python3
"""Writes the tables of the Markdown pages from the JSON files in bench/results/, and checks the pages.

    python3 bench/tables.py --write            # every table of every page, and the picture of README.md
    python3 bench/tables.py --write FOLDER     # the pages in FOLDER alone, from the JSON files in it
    python3 bench/tables.py --check            # fails if a table is not what the JSON files give, or a page breaks a rule of pages.py

A table stands between <!-- table: NAME --> and <!-- end -->. NAME is that of a function below. A table whose JSON files are not in
FOLDER is left as it is. Python's standard library is all it needs.
"""

import argparse
import json
import math
import pathlib
import re
import sys

import overview
import pages
import ruler_results

RESULTS = pathlib.Path(__file__).parent / "results"
EIGHTH = "0.125"
TABLES = {}


def named(function):
    TABLES[function.__name__.replace("_", "-")] = function
    return function


class Folder:
    """The JSON files of one folder, each read once."""

    def __init__(self, path):
        self.path, self.files, self.answers_of = path, {}, {}

    def load(self, name):
        if name not in self.files:
            self.files[name] = json.loads((self.path / f"{name}.json").read_text())
        return self.files[name]

    def rows(self, name, **equal):
        return [row for row in self.load(name)["results"] if all(row[key] == value for key, value in equal.items())]

    def row(self, name, **equal):
        return self.rows(name, **equal)[0]

    def answers(self, pattern="accuracy_*.json"):
        if pattern not in self.answers_of:
            results = ruler_results.Results(self.path, pattern)
            if not results.files:
                raise FileNotFoundError(self.path / pattern)
            self.answers_of[pattern] = results
        return self.answers_of[pattern]


# ---- cells ------------------------------------------------------------------------------------------------------------


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(header))) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def code(name):
    return f"`{name}`"


def percent(share, decimals=1):
    return "-" if share is None else f"{100.0 * share:.{decimals}f}"


def times(ratio, decimals=1):
    return "-" if ratio is None else f"{ratio:.{decimals}f}x"


def seconds(value):
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def interval(mean):
    """A mean of answers with the ends of its interval, in per cent."""
    return "-" if mean is None else "{:.1f} [{:.1f}, {:.1f}]".format(*(round(100 * end, 1) + 0.0 for end in mean))


def part(budget):
    """0.125 as 1/8."""
    return f"1/{1 / float(budget):.0f}"


# ---- README.md --------------------------------------------------------------------------------------------------------


def needles_found(folder, file, selector, budget):
    asked = [e for e in folder.load(file)["results"] if e["selector"] == selector and e["budget"] == budget]
    return f"{sum(e['exact'] for e in asked)} of {len(asked)}"


@named
def glance(folder):
    speed = {n: {r["selector"]: r for r in folder.rows(file, tokens=n)} for n, file in (
        (32768, "speedup_qwen3-4b_1_thread"), (131072, "speedup_131072"))}
    rows = [[f"prefill of one layer, {n:,} tokens", seconds(of["dense"]["prefill_seconds"]),
             *(f"{times(of[name]['speedup'])} as fast" for name in ("quoka", "quoka.recommended"))] for n, of in speed.items()]
    prompt = next(p for p in folder.load("ggml_first_token_zen4")["runs"][0]["prompts"] if p["tokens"] == 16384)
    rows.append(["first token in llama.cpp, 16,384 tokens", seconds(prompt["llama.cpp"]["s"]),
                 *(f"{times(prompt['llama.cpp']['s'] / prompt[mode]['s'])} as soon" for mode in ("quoka", "recommended"))])
    answers = folder.answers()
    rows.append(["right answers, six tasks of RULER", *(
        percent(answers.share(name, EIGHTH, answers.averaged_tasks(), answers.lengths())) + " %"
        for name in ("dense", "quoka", "quoka.recommended"))])
    rows.append(["needles found by TinyLlama", needles_found(folder, "needle_tinyllama", "dense", "1.0"),
                 needles_found(folder, "needle_tinyllama", "quoka", EIGHTH), needles_found(folder, "needle_tinyllama_recommended", "quoka.recommended", EIGHTH)])
    rows.append(["perplexity of TinyLlama on a novel", *(
        f"{math.exp(folder.row('decoder_perplexity_tinyllama', selector=name)['losses'][-1]['loss_nat']):.1f}"
        for name in ("dense", "quoka", "quoka.recommended"))])
    return table(["", "dense", "the paper's defaults", "`recommended`"], rows)


# ---- time -------------------------------------------------------------------------------------------------------------


@named
def prefill(folder):
    rows = []
    for file in ("speedup_qwen3-4b_1_thread", "speedup_131072"):
        for tokens in dict.fromkeys(r["tokens"] for r in folder.load(file)["results"]):
            of = {r["selector"]: r for r in folder.rows(file, tokens=tokens)}
            row = [f"{tokens:,}", seconds(of["dense"]["prefill_seconds"])]
            for name in ("quoka", "quoka.recommended"):
                r = of[name]
                row += [seconds(r["prefill_seconds"]), times(r["speedup"]), times(r["last_chunk_speedup"]), f"{r['scratch_mib']:.1f} + {r['kept_mib']:.0f}"]
            rows.append(row)
    each = ["whole", "last chunk", "MiB"]
    return table(["prompt", "dense", "QuoKA", *each, "`recommended`", *each], rows)


@named
def other_prefills(folder):
    rows = []
    for label, file, tokens, selector in (
        ("two threads", "speedup_qwen3-4b_2_threads", 32768, "quoka"),
        ("Llama-3.2-3B, 24/8 heads", "speedup_llama-3.2-3b_1_thread", 32768, "quoka"),
        ("`quoka.float`: no 8-bit sketch", "speedup_131072", 131072, "quoka.float"),
        ("AVX2", "speedup_x86-64-v3", 32768, "quoka"),
        ("AVX2", "speedup_x86-64-v3", 32768, "quoka.recommended"),
        ("Cascade Lake", "presets_cascade_lake", 32768, "quoka"),
        ("Cascade Lake", "presets_cascade_lake", 32768, "quoka.robust"),
    ):
        r = folder.row(file, tokens=tokens, selector=selector)
        rows.append([label, code(selector), f"{tokens:,}", times(r["speedup"]), times(r["last_chunk_speedup"])])
    return table(["", "selector", "prompt", "whole", "last chunk"], rows)


@named
def methods(folder):
    rows = sorted(folder.rows("speedup_all", tokens=32768), key=lambda r: -r["speedup"])
    return table(["selector", "prefill", "last chunk, ms", "scratch, MiB", "kept, MiB"], [
        [code(r["selector"]), times(r["speedup"]), f"{1e3 * r['last_chunk_seconds']:.0f}", f"{r['scratch_mib']:.0f}", f"{r['kept_mib']:.0f}"] for r in rows])


@named
def decode(folder):
    rows = []
    for file, lengths in (("decode_all", (32768,)), ("decode_long", (131072, 524288))):
        for tokens in lengths:
            dense, quoka, plain = (folder.row(file, tokens=tokens, selector=name) for name in ("dense", "quoka", "quoka.float"))
            rows.append([f"{tokens:,}", *(f"{1e3 * r['last_chunk_seconds']:.1f}" for r in (dense, quoka)),
                         *(times(r["last_chunk_speedup"]) for r in (quoka, plain))])
    return table(["keys", "dense, ms", "QuoKA, ms", "faster", "in float"], rows)


def medians(folder, file):
    return {b["name"].removesuffix("_median").removesuffix("/real_time"): b for b in folder.load(file)["benchmarks"] if b.get("aggregate_name") == "median"}


@named
def dense_peak(folder):
    both = [medians(folder, file) for file in ("quoka_bench_avx512", "quoka_bench_x86-64-v3")]
    return table(["head_dim, group, keys", "AVX-512", "AVX2"], [
        [label, *(f"{of[f'attention/dense/{name}/threads:1']['peak']:.2f}" for of in both)] for label, name in (
            ("128, 4, 8,192", "kv_len:8192/head_dim:128/group:4"), ("128, 4, 32,768", "kv_len:32768/head_dim:128/group:4"),
            ("128, 7, 8,192", "kv_len:8192/head_dim:128/group:7"), ("80, 4, 8,192", "kv_len:8192/head_dim:80/group:4"),
            ("64, 4, 8,192", "kv_len:8192/head_dim:64/group:4"))])


@named
def parts(folder):
    """Benchmarks of record beside their plain twins."""
    of, rows = medians(folder, "quoka_bench_avx512"), []
    for name, twin in (
        ("attention/dense/kv_len:8192/head_dim:128/group:4/threads:1", None),
        ("attention/dense/kv_len:1024/head_dim:128/group:4/threads:1", "attention/plain/kv_len:1024/head_dim:128/group:4/threads:1"),
        ("attention/selected/kv_len:32768/budget:1024", None),
        ("attention/token/kv_len:32768/q_heads:32/kv_heads:8", None),
        ("attention/token/half/kv_len:32768/q_heads:32/kv_heads:8", None),
        ("subselect_queries/q_len:128", "subselect_queries/plain/q_len:128"),
        ("score_keys/kv_len:32768", "score_keys/plain/kv_len:32768"),
        ("top_k/kv_len:32768/k:1024", "top_k/nth_element/kv_len:32768/k:1024"),
        ("top_k_of_scores/float/normal/kv_len:32768/rows:16", None),
        ("top_k_of_scores/sketch/normal/kv_len:32768/rows:16", None),
        ("gather/kv_len:32768/budget:1024", "gather/plain/kv_len:32768/budget:1024"),
        ("kv_cache_append/q_len:128", "kv_cache_append/plain/q_len:128"),
        ("chunk/quoka/kv_len:8192", "chunk/plain/quoka/kv_len:8192"),
        ("chunk/dense/kv_len:32768", None), ("chunk/quoka/kv_len:32768", None),
        ("decode/dense/kv_len:32768", None), ("decode/quoka/kv_len:32768", None),
    ):
        b, unit = of[name], {"ms": 1.0, "us": 1e-3}
        number = lambda b, key: f"{b[key]:.2f}" if key in b else ""  # noqa: E731
        rows.append([code(name), f"{b['cpu_time'] * unit[b['time_unit']]:.3g}", number(b, "peak"), number(b, "bandwidth"),
                     f"{of[twin]['cpu_time'] * unit[of[twin]['time_unit']]:.3g}" if twin else ""])
    return table(["benchmark", "ms", "of peak", "of bandwidth", "plain twin, ms"], rows)


@named
def layouts(folder):
    of = medians(folder, "layouts")
    cell = lambda what, name, n: of[f"layout/{what}/{name}/kv_len:{n}"]["cpu_time"] / of[f"layout/{what}/contiguous/kv_len:{n}"]["cpu_time"]  # noqa: E731
    return table(["layout", "dense chunk, 8,192 keys", "QuoKA chunk, 32,768", "dense token, 32,768"], [
        [name, *(f"{cell(what, name, n):.2f}" for what, n in (("dense", 8192), ("quoka", 32768), ("decode", 32768)))]
        for name in ("len_major", "unaligned", "pages")])


@named
def engines(folder):
    zen, lake = folder.load("engines")["results"], folder.load("engines_cascade_lake")["results"]
    return table(["work", "ways", "Zen 4", "Cascade Lake"], [
        [a["what"], f"{a['second']} / {a['first']}", f"{a['ratio']:.2f}", f"{b['ratio']:.2f}"] for a, b in zip(zen, lake)])


@named
def threads(folder):
    lake, zen = folder.load("threads")["results"], folder.load("threads_zen4")["results"]
    return table(["path, keys", "Cascade Lake: shared", "of apart", "Zen 4: shared", "of apart"], [
        [f"{a['path']}, {a['kv_len']:,}", *(text for r in (a, b) for text in (times(r["shared"], 2), f"{r['shared_of_apart']:.2f}"))]
        for a, b in zip(lake, zen)])


@named
def cores(folder):
    """Efficiency of simulated workers, before the work was split for many of them and now."""
    def of(name):
        return {(r["chunk"], r["kv_len"], r["method"], r["workers"]): r["efficiency"] for r in folder.load(name)["results"]}
    runs = [of(name) for name in ("cores_before", "cores", "cores_amx")]
    return table(["chunk, keys", "method"] + [f"{workers} {name}" for workers in (64, 128) for name in ("before", "AVX-512", "AMX")], [
        [f"{chunk}, {kv_len:,}", method] + [
            f"{percent(run[key], 0)} %" if key in run else "" for workers in (64, 128) for key in ((chunk, kv_len, method, workers),) for run in runs]
        for chunk, kv_len, method, workers in runs[1] if workers == 64 and method != "quoka.robust" and (chunk > 1 or kv_len > 8192)])


@named
def fixed_point(folder):
    errors, groups = folder.load("fixed_point")["errors"], {}
    for e in errors:
        kind = "normal numbers, 1,024 to 32,768 keys" if e["data"].startswith("normal") else f"TinyLlama, {e['data'].split(',')[0]}"
        groups.setdefault(kind, []).append(e)
    return table(["data", "largest error", "worst head", "relative"], [
        [kind, *(f"{1e3 * max(e[key] for e in of):.2f}e-3" for key in ("largest_error", "largest_error_of_a_head", "relative_error"))]
        for kind, of in groups.items()])


@named
def fixed_point_speed(folder):
    return table(["keys", "kept", "head_dim", "float, ms", "fixed16, ms", "faster"], [
        [f"{r['kv_len']:,}", f"{r['budget']:,}" if r["budget"] else "all", r["head_dim"], f"{r['single_ms']:.0f}", f"{r['fixed16_ms']:.0f}", times(r["ratio"], 2)]
        for r in folder.load("fixed_point")["speed"]])


# ---- mass -------------------------------------------------------------------------------------------------------------

EVALUATED = [
    "quoka", "quoka.recommended", "quoka.robust", "sample_attention", "sample_attention.logit", "sparq", "loki", "tidal_decode", "less_is_more", "snapkv", "keydiff", "quest", "xattention",
    "flash_prefill", "random", "first_recent", "oracle",
]


def of_all_layers(folder, file):
    return {(r["data"], str(r["budget"]), r["selector"]): r for r in folder.load(file)["results"] if r["layer"] == "all" and r["keep_first"] in (0, 4)
            and (r["keep_first"] == 0 or r["selector"] in ("first_recent", "less_is_more"))}


@named
def kept_by_tinyllama(folder):
    data = folder.load("evaluate_tinyllama")
    of, name = of_all_layers(folder, "evaluate_tinyllama"), data["data"][0]["name"]
    rows = []
    for selector in EVALUATED:
        at = {budget: of[name, budget, selector] for budget in ("128", "256", "512")}
        middle = at["256"]
        rows.append([code(selector), *(percent(r["mass_kept"]) for r in at.values()), f"{middle['output_error']:.3f}", percent(middle["worst_percent_mass"]),
                     percent(middle["scoring_flops"] / middle["dense_flops"], 2), f"{1e3 * middle['scoring_seconds']:.2f}"])
    return table(["selector", "mass, %: 128 keys", "256", "512", "error, 256", "worst 1 %, 256", "FLOPs, %", "ms"], rows)


@named
def kept_of_generated(folder):
    data = folder.load("evaluate_generated")
    of, names = of_all_layers(folder, "evaluate_generated"), [source["name"] for source in data["data"]]
    rows = []
    for selector in (*EVALUATED[:3], "quoka.per_head", "quoka.dot", *EVALUATED[3:]):
        row = [code(selector)]
        for name in names:
            r = of[name, "256", selector]
            row.append(percent(r["mass_kept"], 0) + ("" if r["targets_kept"] is None else f" / {percent(r['targets_kept'], 0)}"))
        rows.append(row)
    return table(["mass / targets, %", *(code(name.removeprefix("generated: ")) for name in names)], rows)


@named
def block_methods(folder):
    of = of_all_layers(folder, "block_methods_tinyllama")
    rows = []
    for selector in dict.fromkeys(key[2] for key in of):
        r = [next(value for key, value in of.items() if key[1:] == (budget, selector)) for budget in ("128", "256", "512")]
        rows.append([code(selector), *(f"{percent(x['mass_kept'])} / {x['output_error']:.3f}" for x in r), percent(r[1]["worst_percent_mass"]),
                     percent(r[1]["scoring_flops"] / r[1]["dense_flops"])])
    return table(["mass, % / error", "128 keys", "256", "512", "worst 1 %, 256", "FLOPs, %"], rows)


@named
def ablations_of_mass(folder):
    results = folder.load("ablations")["results"]
    names = list(dict.fromkeys(r["data"] for r in results))
    recorded, shown = names[0], ["paper", "heads", "isotropic", "norms", "outliers"]
    of = {(r["data"].removeprefix("generated: "), r["ablation"], r["value"]): r for r in results}
    rows = []
    for name, ablation, value in of:
        r = of[name, ablation, value]
        if name != recorded or (ablation, value) in (("budget", "256"), ("other methods", "random"), ("other methods", "sample_attention.logit")):
            continue
        label = " ".join(filter(None, (ablation.replace(", n_queries a quarter of it", "").replace("other methods", ""), value)))
        other = [of.get((data, ablation, value)) for data in shown]
        rows.append([label, percent(r["mass_kept"]), f"{r['output_error']:.3f}", times(r["speedup"]), *("-" if o is None else percent(o["mass_kept"], 0) for o in other)])
    return table(["", "TinyLlama: mass, %", "error", "speed", *map(code, shown)], rows)


# ---- answers ----------------------------------------------------------------------------------------------------------


def asked_everywhere(results, budget, lengths):
    return [name for name in results.selectors() if all(results.holds(name, budget, results.averaged_tasks(), n) for n in lengths)]


def logit(name):
    """A form that does not come near dense with any budget: one table has it, the JSON files the rest."""
    return name.endswith(".logit")


@named
def answers(folder):
    """By length at an eighth, all lengths together with an interval, and less dense."""
    results = folder.answers()
    tasks, lengths = results.averaged_tasks(), results.lengths()
    rows = []
    for name in asked_everywhere(results, EIGHTH, lengths):
        minus = None if name == "dense" else results.mean(name, EIGHTH, tasks, lengths, "dense")
        rows.append([code(name), *(percent(results.share(name, EIGHTH, tasks, [n])) for n in lengths), interval(results.mean(name, EIGHTH, tasks, lengths)), interval(minus)])
    return table(["selector", *(f"{n:,}" for n in lengths), "all", "less dense"], rows)


@named
def answers_by_budget(folder):
    results = folder.answers()
    tasks, length, budgets = results.averaged_tasks(), results.length_of_budgets(), results.budgets()
    names = [n for n in asked_everywhere(results, EIGHTH, [length]) if n != "dense" and not logit(n) and all(results.holds(n, b, tasks, length) for b in budgets)]
    return table(["selector", *map(part, budgets)], [
        [code(name), *(interval(results.mean(name, b, tasks, [length], "dense")) for b in budgets)] for name in names])


@named
def answers_by_task(folder):
    results = folder.answers()
    tasks, lengths = results.tasks(), results.lengths()
    return table(["selector", *tasks], [
        [code(name), *(percent(results.share(name, EIGHTH, [task], lengths)) for task in tasks)]
        for name in asked_everywhere(results, EIGHTH, lengths) if not logit(name)])


RIVALS = [
    "sample_attention.logit", "sparq.logit", "loki.logit", "less_is_more", "sample_attention", "sparq", "loki", "xattention", "flash_prefill", "oracle",
]


def verdict(difference):
    return "beats" if difference[1] > 0 else "loses" if difference[2] < 0 else "neither"


@named
def rivals(folder):
    """`quoka` and the robust preset less each rival over all lengths, the recommended one over the two that it was not tuned on."""
    results = folder.answers()
    tasks, lengths, held_out = results.averaged_tasks(), results.lengths(), [2048, 4096]
    rows = []
    for rival in RIVALS:
        row = [code(rival)]
        for name, at in (("quoka", lengths), ("quoka.robust", lengths), ("quoka.recommended", held_out)):
            difference = results.mean(name, EIGHTH, tasks, at, rival)
            row.append(f"{interval(difference)} {verdict(difference)}")
        rows.append(row)
    return table(["less the rival, points", "`quoka`", "`quoka.robust`", "`quoka.recommended`"], rows)


@named
def ablations_of_answers(folder):
    results = folder.answers()
    tasks, length, budget = results.averaged_tasks(), results.length_of_budgets(), "0.0625"
    between = ("quoka.robust.window3", "quoka.window7", "quoka.queries4", "quoka.mixed.softmax.mean.per_head.queries4")
    names = [n for n in results.selectors() if (n.startswith("quoka") or n == "random") and n not in between and results.holds(n, budget, tasks, length)]
    names.sort(key=lambda name: -results.share(name, budget, tasks, [length]))
    shown = tasks[2:]  # the first two are easy
    return table(["selector", *shown, "mean of six"], [
        [code(name), *(percent(results.share(name, budget, [task], [length]), 0) for task in shown), interval(results.mean(name, budget, tasks, [length]))]
        for name in names])


def thresholds(folder, file, selectors, shown=lambda selector, budget: True):  # noqa: ARG005
    entries, cells = folder.load(file)["results"], {}
    for entry in entries:
        own = entry["selector"].split(".")[-1] in ("threshold", "compact")
        cells.setdefault((entry["selector"], "own" if own else entry["budget"]), {}).setdefault(entry["length"], []).append(entry)
    lengths = sorted({length for of in cells.values() for length in of})
    mean = lambda of, key: sum(e[key] for e in of) / len(of)  # noqa: E731
    order = sorted((key for key in cells if key[0] in selectors and shown(*key)), key=lambda key: -mean(cells[key][lengths[0]], "kept"))
    rows = []
    for key in order:
        row = [code(key[0]), "-" if key[0] == "dense" else key[1]]
        for n in lengths:
            of = cells[key].get(n)
            row += [f"{mean(of, 'kept'):,.0f}", percent(mean(of, "exact_mean"))] if of else ["-", "-"]
        rows.append(row)
    return table(["selector", "budget", *(text for n in lengths for text in (f"{n:,} tokens: keys", "answers, %"))], rows)


@named
def thresholds_of_needles(folder):
    names = ("dense", "quoka.recommended", "xattention", "flash_prefill", "xattention.threshold", "flash_prefill.threshold", "flash_prefill.compact")
    # Smaller shares of the block methods stand in `answers-by-budget`.
    return thresholds(folder, "kept_needles", names, lambda selector, budget: budget == "0.5" or (budget != "0.25" and selector not in ("xattention", "flash_prefill")))


@named
def thresholds_of_words(folder):
    return thresholds(folder, "kept_words", ("dense", "quoka.recommended", "quoka.robust"))


@named
def deep_model(folder):
    """Cells (task and length) that dense answers at 90 % or more."""
    results, own = folder.answers("deep_model.json"), "quoka.recommended"
    places = [(task, n) for task in results.tasks() for n in results.lengths() if (results.share("dense", None, [task], [n]) or 0) >= 0.9]
    names = [n for n in results.selectors() if results.mean_of(n, EIGHTH, places)]
    names.sort(key=lambda name: (name != "dense", name != own, -results.mean_of(name, EIGHTH, places)[0]))
    return table(["selector", "answers, 1/8", "less dense"], [
        [code(name), interval(results.mean_of(name, EIGHTH, places)), "" if name == "dense" else interval(results.mean_of(name, EIGHTH, places, "dense"))]
        for name in names])


@named
def long_answers(folder):
    """The two lengths that the models of 16,384 tokens were trained for, with the time of a prefill on their shape."""
    results, lengths, shares = folder.answers("long_*.json"), [8192, 16384], ["0.125", "0.0625", "0.03125"]
    speeds = [{r["selector"]: r["dense_over_it"] for r in folder.rows(f"prefill_16384_{n}")} for n in (8, 16, 32)]
    at_shares = lambda name, tasks, n: "/".join(percent(results.share(name, b, tasks, [n])) for b in shares)  # noqa: E731
    rows = []
    for name in ("quoka.recommended", "quoka.robust", "quoka", "sample_attention", "xattention", "flash_prefill", "oracle"):
        row = [code(name)]
        for n in lengths:
            row += [at_shares(name, ruler_results.RETRIEVAL, n), interval(results.mean(name, shares[-1], ruler_results.RETRIEVAL, [n], "dense")), at_shares(name, ["cwe"], n)]
        rows.append([*row, "/".join(f"{of[name]:.1f}" for of in speeds) + "x"])
    return table(["1/8, 1/16, 1/32", *(text for n in lengths for text in (f"{n:,} tokens", "1/32 less dense", "`cwe`")), "prefill of 16,384"], rows)


@named
def answers_by_length(folder):
    """Less dense at fixed shares, counts and masses, by length; and how much more is lost at the longest than at the shortest."""
    results, rules = folder.answers("long_*.json"), {
        "512 keys": lambda n: f"{512 / n}", "1/32": lambda n: "0.03125", "1/8": lambda n: EIGHTH}  # noqa: ARG005
    lengths, rows = results.lengths(), []
    for name, budgets in (("quoka.recommended", ["128 keys", *rules, "mass:0.9"]), ("quoka.robust", ["512 keys", "1/32"]),
                          ("quoka", ["512 keys", "1/32"]), ("sample_attention", ["512 keys", "1/32"])):
        for label in budgets:
            budget = rules.get(label, lambda n: label.removesuffix(" keys"))  # noqa: ARG005, B023
            less = lambda tasks, n: results.strata(name, budget(n), [(task, n) for task in tasks], "dense")  # noqa: E731, B023
            mean = lambda tasks, n: percent(sum(w * sum(of) / len(of) for w, of in less(tasks, n)))  # noqa: E731, B023
            more = ruler_results.difference(less(ruler_results.RETRIEVAL, lengths[-1]), less(ruler_results.RETRIEVAL, lengths[0]))
            rows.append([code(name), label, *(mean(ruler_results.RETRIEVAL, n) + "/" + mean(["cwe"], n) for n in lengths), interval(more)])
    return table(["retrieval/`cwe`", "budget", *(f"{n:,}" for n in lengths), "16,384 less 1,024"], rows)


@named
def cascade_answers(folder):
    results, both = folder.answers("cascade.json"), [2048, 4096]
    with_it, without = "quoka.recommended", "quoka.recommended.cascade0"
    rows = []
    for budget in ("0.0625", "0.03125"):
        mean = lambda name: percent(results.share(name, budget, results.tasks(), both))  # noqa: E731, B023
        rows.append([part(budget), mean("dense"), mean(without), mean(with_it), interval(results.mean(with_it, budget, results.tasks(), both, without))])
    return table(["budget", "dense", "without", "with", "difference"], rows)


@named
def cascade_speed(folder):
    rows = []
    for label, file, tokens in (("AVX-512 with VNNI", "presets_32768", 32768), ("AVX-512 with VNNI", "presets_131072", 131072), ("AVX2", "speedup_x86-64-v3", 32768)):
        of = {r["selector"]: r["speedup"] for r in folder.rows(file, tokens=tokens)}
        names = ("quoka", "quoka.recommended", "quoka.recommended.cascade0", "quoka.recommended.blocks32")
        rows.append([label, f"{tokens:,}", *(times(of.get(name)) for name in names)])
    return table(["build", "prompt", "`quoka`", "preset", "without the cascade", "blocks first"], rows)


# ---- TinyLlama --------------------------------------------------------------------------------------------------------


FIND_NOTHING = ("keydiff", "quest", "snapkv", "tidal_decode")


@named
def needles(folder):
    """A row per selector and budget: needles found by prompt length, and the mean log-probability of the key at 2,040 tokens."""
    lengths, rows = (512, 1024, 2040), []
    for file, note in (("needle_tinyllama", ""), ("needle_tinyllama_recommended", ""), ("needle_tinyllama_dense_1", ", first layer dense")):
        results = folder.load(file)["results"]
        for selector, budget in dict.fromkeys((e["selector"], e["budget"]) for e in results):
            own = selector.startswith("quoka")
            if (selector == "dense" and file != "needle_tinyllama") or (budget == "0.25" and not own) or selector in FIND_NOTHING:
                continue
            at = {n: [e for e in results if (e["selector"], e["budget"], e["length"]) == (selector, budget, n)] for n in lengths}
            of = at[2040]
            rows.append([code(selector) + note, "-" if selector == "dense" else part(budget),
                         *(f"{sum(e['exact'] for e in here)}" if here else "-" for here in at.values()), f"{sum(e['log_prob'] for e in of) / len(of):.2f}"])
    rows.sort(key=lambda row: (row[0] != "`dense`", row[1], not row[0].startswith("`quoka")))
    return table(["selector", "budget", "512 tokens", "1,024", "2,040", "log-probability, 2,040"], rows)


@named
def presets(folder):
    """A row per method: answers by budget, needles, perplexity, speed, and what it takes to come within 2 points of dense."""
    results = folder.answers()
    speeds, _ = ruler_results.frontier(folder.path)
    found = {}
    for file in ("needle_tinyllama", "needle_tinyllama_recommended"):
        for e in folder.load(file)["results"]:
            if e["length"] == 2040 and e["budget"] in (EIGHTH, "1.0"):
                found.setdefault(e["selector"], {})[e["depth"]] = e["exact"]
    losses = {e["selector"]: e["losses"] for e in folder.load("decoder_perplexity_tinyllama")["results"]}
    length, tasks, budgets = results.length_of_budgets(), results.averaged_tasks(), ["0.125", "0.0625", "0.03125"]

    def enough(name):
        """The smallest budget within 2 points of dense, and the speed there."""
        for budget in results.budgets():
            share = results.share(name, budget, tasks, [length])
            if share is not None and share >= results.share("dense", None, tasks, [length]) - 0.02:
                return f"{part(budget)}, {times(speeds.get((float(budget), name)))}"
        return "none"

    rows = []
    for name in ("dense", "quoka", "quoka.recommended", "quoka.robust", "sample_attention", "sparq", "loki", "less_is_more", "xattention", "flash_prefill", "oracle"):
        dense = name == "dense"
        shares = [results.share(name, b, tasks, [length]) for b in budgets]
        rows.append([
            code(name), *([percent(shares[0]), "-", "-"] if dense else map(percent, shares)), f"{sum(found[name].values())}",
            f"{math.exp(losses[name][-1]['loss_nat']):.1f}" if name in losses else "-",
            *("1.0x" if dense else times(speeds.get((share, name))) for share in (0.03125, 0.125)), "" if dense else enough(name)])
    return table(["", "answers, 1/8", "1/16", "1/32", "needles of 10", "perplexity", "prefill, 1/32", "1/8", "enough"], rows)


# ---- llama.cpp and the decoder ----------------------------------------------------------------------------------------


@named
def ggml_operation(folder):
    rows = []
    of_amx = [{**r, "cache": r["cache"] + ", AMX"} for r in folder.load("ggml_amx")["operation"]["rows"]]
    for r in [*folder.load("ggml")["operation"]["rows"], *of_amx]:
        q_heads, kv_heads, dim, queries, cached = r["shape"].split("/")
        if int(cached) <= 256 or r["shape"] in ("32/8/128/512/7680", "32/8/128/16/1024"):
            continue  # in the files alone
        rows.append([r["cache"], f"{q_heads}/{kv_heads}/{dim}", queries, f"{int(cached):,}", f"{r['ggml_ms']:,.0f}" if r["ggml_ms"] >= 100 else f"{r['ggml_ms']:.3g}", *(f"{r[mode]:.3g}" for mode in ("exact", "quoka", "robust"))])
    return table(["cache", "heads/KV heads/channels", "queries", "cached", "ggml, ms", "exact", "QuoKA", "robust"], rows)


def prompts(run, tokens):
    of = next((p for p in run["prompts"] if p["tokens"] == tokens), None)
    return [f"{of['llama.cpp']['s'] / of[mode]['s']:.1f}" if of else "-" for mode in ("exact", "quoka", "recommended")]


@named
def first_token(folder):
    runs = [*(folder.load(name)["runs"][0] for name in ("ggml_amx", "ggml_first_token_zen4")),
            *folder.load("ggml_first_token")["runs"][:3]]
    rows = [[f"{n:,}", *(" / ".join(prompts(run, n)) for run in runs)] for n in (2048, 4096, 8192, 16384, 32768)]
    return table(["prompt", "TinyLlama, AMX", "TinyLlama, Zen 4", "TinyLlama", "Qwen2.5-1.5B", "Llama-3.1-8B"], rows)


@named
def decoder_first_token(folder):
    results = folder.load("decoder_ttft_qwen3-4b")["results"]
    at = {(r["length"], r["selector"]): r for r in results}
    cell = lambda r: f"{r['seconds']:,.0f} s, {times(r['dense_over_it'], 2)}"  # noqa: E731
    return table(["prompt", "dense", "`quoka`", "`quoka.robust`"], [
        [f"{n:,}", f"{at[n, 'dense']['seconds']:,.0f} s", *(cell(at[n, name]) for name in ("quoka", "quoka.robust"))] for n in sorted({n for n, _ in at})])


@named
def decoder_compare(folder):
    rows = []
    for file, note in (("decoder_compare_tinyllama", ""), ("decoder_compare_tinyllama_window3", ""), ("decoder_compare_tinyllama_dense_1", ", first layer dense")):
        for r in folder.load(file)["results"]:
            if float(r["budget"]) == 0.25 and r["selector"] in ("quoka", "quoka.robust", "quoka.robust.window3", "sample_attention", "oracle"):
                rows.append([code(r["selector"]) + note, f"{percent(r['agreement'])} %", f"{r['kl_nat']:.3f}", f"{r['layer_error'][0]:.3f}", f"{r['layer_error'][-1]:.3f}"])
    return table(["a quarter of the past", "next token agrees", "KL, nat", "error, layer 0", "error, last layer"], rows)


@named
def check_model(folder):
    """What examples/ggml/check.sh found of TinyLlama: at the longest length, then what it recommends on other text."""
    steps, rows = folder.load("check_tinyllama")["steps"], []
    for step, note in (("measure", ""), ("verify", ", other text")):
        for x in steps[step]["by_length"]:
            if x["name"] != "llama.cpp" and x["length"] > 1024:
                low, high = x["perplexity"][1:]
                rows.append([x["name"] + note, times(x["speedup"], 2), f"{x['perplexity'][0]:+.1f} % ({low:+.1f} to {high:+.1f})",
                             f"{x['kl']:.4f}", f"{percent(x['agrees'])} %", f"{100 * x['right']:.0f} %"])
    return table(["settings", "speed", "perplexity", "KL, nat", "top-1 agrees", "needles"], rows)


@named
def capture(folder):
    return table(["budget", "KV pairs, of dense", "mass kept", "output error", "speedup"], [
        [r["budget"], f"{percent(r['kv_pairs_share'])} %", f"{percent(r['mass_kept'])} %", f"{r['output_error']:.3f}", times(r["speedup"])]
        for r in folder.load("prefill_tinyllama_layer11")["capture"]])


# ---- pages ------------------------------------------------------------------------------------------------------------


def filled(text, folder, place):
    """The page with each of its tables as the JSON files give it."""
    def replace(match):
        if match[2] not in TABLES:
            sys.exit(f"{place}: no table is called {match[2]}")
        try:
            return match[1] + "\n" + "\n".join(TABLES[match[2]](folder)) + "\n\n" + match[3]
        except FileNotFoundError:
            return match[0]
    return re.sub(r"(<!-- table: (\S+) -->\n)(?:.*?)(<!-- end -->)", replace, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if options.write == options.check:
        parser.error("--write or --check?")
    ours = options.folder.resolve() == RESULTS.resolve()
    folder, wrong = Folder(options.folder), []
    texts = {page: filled(page.read_text(), folder, page) for page in (pages.all_pages() if ours else sorted(options.folder.glob("*.md")))}
    if ours:
        texts[RESULTS / "overview.svg"] = overview.draw(folder)
    for path, text in texts.items():
        if path.exists() and path.read_text() == text:
            continue
        if options.write:
            path.write_text(text)
            print(path)
        else:
            wrong.append(f"{path}: not what the JSON files give; run python3 bench/tables.py --write")
    if options.check and ours:
        wrong += pages.faults(texts, RESULTS, TABLES)
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
