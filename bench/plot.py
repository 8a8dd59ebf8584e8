#!/usr/bin/env python3
"""Draws the figures of bench/results/ from its JSON files.

    python3 bench/plot.py [RESULTS_DIRECTORY]

    prefill_speedup.png   whole prefill of one layer, relative to dense, against prompt length   speedup_all.json
    decode_latency.png    one token against cache length                                         decode_all.json
    chunk_parts.png       what a QuoKA chunk spends its time on                                  quoka_parts.json
    cores.png             speedup of simulated workers                                         cores.json
    scaling.png           selection time and scratch against kv_len, n_queries, q_heads          scaling.json
    needle_*.png          needle in a haystack: exact match per prompt length and depth          needle_*.json
    evaluate_*.png        mass kept and output error against budget, by method                   evaluate_*.json
    accuracy_budget.png   RULER's tasks: exact match against budget, by method                   accuracy_*.json
    accuracy_length.png   the same against prompt length                                         accuracy_*.json
    context_parallel.png  a prefill over several ranks, and what they send                       context_parallel_*.json
    ggml_first_token*.png time to first token in llama.cpp, with and without the backend         ggml_first_token*.json
    which_preset.png      answers against the speed of a prefill, by method and budget           accuracy_*.json, frontier_*.json

Needs matplotlib (Debian: python3-matplotlib). A figure whose file is not there is left out.
"""

import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

import ruler_results

# One colour per method, everywhere; variants of a method share it and are dashed.
COLOURS = {
    "dense": "#555555",
    "quoka": "#d1495b",
    "sample_attention": "#00798c",
    "sparq": "#edae49",
    "loki": "#66a182",
    "tidal_decode": "#8d6a9f",
    "less_is_more": "#b28dc6",
    "snapkv": "#2e4057",
    "keydiff": "#7a8ca3",
    "quest": "#c97b3d",
    "xattention": "#1d70b8",
    "flash_prefill": "#5b8c5a",
    "oracle": "#9aa0a6",
    "random": "#cfcfcf",
    "first_recent": "#b7c4b1",
}


def style(method):
    base = method.split(".")[0]
    return {
        "color": COLOURS.get(base, "black"),
        "linestyle": "--" if "." in method else "-",
        "linewidth": 2.6 if method == "quoka" else 1.3,
        "marker": "o",
        "markersize": 3.5,
        "zorder": 3 if method == "quoka" else 2,
    }


def power_of_two_axis(axis, values):
    axis.set_xscale("log", base=2)
    axis.set_xticks(values)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{int(x):,}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize=8)


def plain_log_axis(axis):
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def label_ends(axis, ends):
    """Names at the right ends of lines, moved apart where they would overlap; ends: (x, y, name)."""
    low, high = axis.get_ylim()
    log = axis.get_yscale() == "log"
    import math

    place = (lambda y: math.log(y / low) / math.log(high / low)) if log else (lambda y: (y - low) / (high - low))
    gap = 0.036
    ends = sorted(ends, key=lambda end: end[1])
    places = []
    for _, y, _ in ends:
        places.append(max(place(y), places[-1] + gap if places else -1.0))
    above = 1.0 + gap
    for i in reversed(range(len(places))):
        places[i] = above = min(places[i], above - gap)
    for at, (_, _, name) in zip(places, ends):
        axis.annotate(
            name, (1.01, at), xycoords="axes fraction", fontsize=8, va="center", color=style(name)["color"],
            fontweight="bold" if name == "quoka" else "normal", annotation_clip=False,
        )


def lines(results, x, y):
    series = {}
    for entry in results:
        series.setdefault(entry["selector"], []).append((entry[x], entry[y]))
    return {name: sorted(points) for name, points in series.items()}


def prefill_speedup(data, path):
    series = lines(data["results"], "tokens", "speedup")
    figure, axis = plt.subplots(figsize=(8, 4.8))
    for name, points in series.items():
        axis.plot(*zip(*points), **style(name))
    power_of_two_axis(axis, sorted({entry["tokens"] for entry in data["results"]}))
    plain_log_axis(axis)
    label_ends(axis, [(points[-1][0], points[-1][1], name) for name, points in series.items()])
    axis.set_yticks([1, 2, 4, 8, 16])
    axis.grid(True, which="major", alpha=0.25)
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("speed of the whole prefill, dense = 1")
    axis.set_title(
        f"One layer, {data['q_heads']}/{data['kv_heads']} heads of {data['head_dim']}, chunk {data['chunk']}, "
        f"budget {data['budget']}, {data['threads']} thread",
        fontsize=10,
    )
    save(figure, path)


def decode_latency(data, path):
    series = lines(data["results"], "tokens", "last_chunk_seconds")
    figure, axis = plt.subplots(figsize=(8, 4.8))
    for name, points in series.items():
        axis.plot([x for x, _ in points], [1e3 * y for _, y in points], **style(name))
    power_of_two_axis(axis, sorted({entry["tokens"] for entry in data["results"]}))
    plain_log_axis(axis)
    label_ends(axis, [(points[-1][0], 1e3 * points[-1][1], name) for name, points in series.items()])
    axis.set_yticks([2, 5, 10, 20, 50])
    axis.grid(True, which="major", alpha=0.25)
    axis.set_xlabel("cached tokens")
    axis.set_ylabel("one token, ms")
    axis.set_title(
        f"Decode step of one layer, {data['q_heads']}/{data['kv_heads']} heads of {data['head_dim']}, "
        f"budget {data['budget']}, {data['threads']} thread",
        fontsize=10,
    )
    save(figure, path)


PARTS = [  # benchmark of quoka_bench, label, colour
    ("attention/selected/kv_len:{}/budget:1024", "attention over the selected keys and the chunk", "#d1495b"),
    ("select/quoka/kv_len:{}", "scores by the 8-bit sketch, the best keys in float, top-k", "#00798c"),
    ("subselect_queries/q_len:128", "subselect_queries, pre_aggregate", "#edae49"),
    ("kv_cache_append/q_len:128", "append to cache and sketch", "#66a182"),
]


def chunk_parts(data, path):
    times = {}
    for entry in data["benchmarks"]:
        if entry.get("aggregate_name", "median") == "median":
            name = re.sub("_median$", "", entry["name"])
            times[name] = entry["real_time"] * {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}[entry["time_unit"]]
    lengths = sorted(
        int(match[1]) for match in (re.fullmatch(r"select/quoka/kv_len:(\d+)", name) for name in times) if match
    )
    lengths = [n for n in lengths if all(part.format(n) in times for part, _, _ in PARTS)]
    figure, axis = plt.subplots(figsize=(8, 3.8))
    left = [0.0] * len(lengths)
    for part, label, colour in PARTS:
        width = [times[part.format(n)] for n in lengths]
        of_queries = times["pre_aggregate/n_queries:16/group:4"]
        if part.startswith("subselect"):
            width = [w + of_queries for w in width]
        if part.startswith("kv_cache_append"):
            width = [w + times["key_sketch_append/q_len:128"] for w in width]
        if part.startswith("select/quoka"):  # the whole selection, less its other parts
            width = [w - times["subselect_queries/q_len:128"] - of_queries for w in width]
        axis.barh([f"{n:,}" for n in lengths], width, left=left, label=label, color=colour, height=0.6)
        left = [a + b for a, b in zip(left, width)]
    for i, total in enumerate(left):
        dense = times.get(f"chunk/dense/kv_len:{lengths[i]}")
        text = f"{total:.1f} ms" + (f"  (dense {dense:.0f} ms)" if dense else "")
        axis.annotate(text, (total, i), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_xlim(0, max(left) * 1.3)
    axis.set_xlabel("ms per chunk of 128 tokens")
    axis.set_ylabel("cached tokens")
    axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.16), ncol=2)
    axis.set_title("The parts of a QuoKA chunk: 32/8 heads of 128, budget 1024, 16 queries, 1 thread", fontsize=10)
    save(figure, path)


def cores(data, path):
    """Speedup over one simulated worker: a panel for each chunk and length."""
    shapes = sorted({(-r["chunk"], r["kv_len"]) for r in data["results"]})
    figure, axes = plt.subplots(1, len(shapes), figsize=(3.6 * len(shapes), 3.6), sharey=True, squeeze=False)
    for axis, (chunk, kv_len) in zip(axes[0], shapes):
        points = [r for r in data["results"] if (-r["chunk"], r["kv_len"]) == (chunk, kv_len)]
        for method in dict.fromkeys(r["method"] for r in points):
            series = [(r["workers"], r["speedup"]) for r in points if r["method"] == method]
            axis.plot([x for x, _ in series], [y for _, y in series], label=method, **style(method))
        workers = sorted({r["workers"] for r in points})
        axis.plot(workers, workers, color="gray", linewidth=0.8, linestyle=":")
        power_of_two_axis(axis, workers)
        axis.set_yscale("log", base=2)
        axis.grid(True, which="major", alpha=0.25)
        axis.set_xlabel("workers")
        axis.set_title(f"chunk of {-chunk}, {kv_len:,} keys", fontsize=9)
    axes[0][0].set_ylabel("speedup over one worker")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"Simulated workers, a barrier of {data['barrier_us']:g} us", fontsize=10)
    save(figure, path)


def scaling(data, path):
    axes_names = ["kv_len", "n_queries", "q_heads"]
    figure, axes = plt.subplots(2, 3, figsize=(11, 7.2), sharey="row")
    fits = {(e["selector"], e["axis"]): e for e in data["exponents"]}
    for column, name in enumerate(axes_names):
        points = [p for p in data["points"] if p["axis"] == name]
        for row, (key, factor) in enumerate((("seconds", 1e3), ("scratch_mib", 1.0))):
            axis = axes[row][column]
            for method, series in lines(points, "value", key).items():
                fit = fits[method, name]
                label = f"{method}: {fit['time']:.2f} ({fit['formula']:.0f})" if row == 0 else method
                axis.plot([x for x, _ in series], [factor * y for _, y in series], label=label, **style(method))
            power_of_two_axis(axis, sorted({p["value"] for p in points}))
            plain_log_axis(axis)
            axis.grid(True, which="major", alpha=0.25)
            if row == 0:
                axis.legend(
                    fontsize=7, frameon=False, title="fitted exponent (formula)", title_fontsize=7,
                    loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2,
                )
            if row == 1:
                axis.set_xlabel(name)
    axes[0][0].set_ylabel("selection, ms")
    axes[1][0].set_ylabel("scratch and state, MiB")
    figure.suptitle("Selection alone: 32/8 heads of 128, chunk 128, 8,192 cached keys unless varied, 1 thread", fontsize=10)
    save(figure, path)


def needle(data, path):
    """A heat map for each selector and budget: prompt length across, depth downwards, share of needles found."""
    results = data["results"]
    lengths = sorted({r["length"] for r in results})
    depths = sorted({r["depth"] for r in results})
    panels = sorted(
        {(r["selector"] != "dense", r["budget"], r["selector"]) for r in results},
        key=lambda panel: (*panel[:2], not panel[2].startswith("quoka"), panel[2]),
    )
    budgets = sorted({budget for sparse, budget, _ in panels if sparse})
    by_budget = [[panel for panel in panels if panel[:2] == (True, budget)] for budget in budgets]
    by_budget[0] = [panel for panel in panels if not panel[0]] + by_budget[0]  # dense comes first
    columns = min(7, max(map(len, by_budget)))
    rows = [row[i : i + columns] for row in by_budget for i in range(0, len(row), columns)]
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(0.8 + 1.6 * columns, 0.6 + 2.3 * len(rows)), squeeze=False, layout="constrained"
    )
    image = None
    for row, panels_in_row in enumerate(rows):
        for axis in axes[row][len(panels_in_row) :]:
            axis.axis("off")
        for axis, (sparse, budget, selector) in zip(axes[row], panels_in_row):
            chosen = [r for r in results if (r["selector"], r["budget"]) == (selector, budget)]
            grid = [
                [share(r["exact"] for r in chosen if (r["length"], r["depth"]) == (length, depth)) for length in lengths]
                for depth in depths
            ]
            image = axis.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            name = selector.replace("dissimilar_and_last", "dis. + last").replace(".", "\n.", 1)
            found = f"{sum(r['exact'] for r in chosen)} of {len(chosen)}"
            axis.set_title(f"{name}\nbudget {budget}: {found}" if sparse else f"{name}\n{found}", fontsize=7)
            axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=6, rotation=60)
            shown = range(0, len(depths), max(1, (len(depths) - 1) // 3))
            axis.set_yticks(list(shown), [f"{100 * depths[i]:.0f} %" for i in shown], fontsize=6)
    axes[0][0].set_ylabel("depth of the needle", fontsize=7)
    figure.colorbar(image, ax=axes, fraction=0.015, pad=0.01).ax.tick_params(labelsize=6)
    layers = {0: "", 1: "; first layer dense"}.get(data["dense_layers"], f"; first {data['dense_layers']} layers dense")
    figure.suptitle("Needle in a haystack: exact match per prompt length (tokens) and depth" + layers, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def share(hits):
    hits = list(hits)
    return sum(hits) / len(hits) if hits else float("nan")


# What the evaluation's figures show of its many methods; QuoKA's option sets by colours of their own.
EVALUATED = [
    "oracle", "quoka", "quoka.recommended", "quoka.robust", "quoka.uniform", "quoka.dissimilar_and_last", "quoka.dissimilar_and_last.per_head.window7",
    "sample_attention", "sample_attention.logit", "sparq", "loki", "quest", "xattention", "flash_prefill",
    "snapkv", "keydiff", "first_recent",
]
OPTION_SETS = {
    "quoka.recommended": "#111111",
    "quoka.robust": "#0b6e4f",
    "quoka.uniform": "#e58f65",
    "quoka.last": "#f2a7b5",
    "quoka.dissimilar_and_last": "#8c1c3a",
    "quoka.dissimilar_and_last.per_head.window7": "#7b2cbf",
}


def evaluated_style(name):
    return {**style(name), "color": OPTION_SETS.get(name, style(name)["color"]), "linewidth": 2.4 if name == "quoka" else 1.3}


def evaluation(data, path):
    """One row of axes per set of layers: mass kept, worst 1 % of rows, output error, targets kept where there are any."""
    sets = [entry["name"] for entry in data["data"]]
    measures = [
        ("mass_kept", "attention mass kept, %", 100.0), ("worst_percent_mass", "mass kept, worst 1 % of rows, %", 100.0),
        ("output_error", "relative output error", 1.0), ("targets_kept", "retrieved keys that were kept, %", 100.0),
    ]
    if all(entry["targets_kept"] is None for entry in data["results"]):
        measures.pop()
    figure, axes = plt.subplots(len(sets), len(measures), figsize=(4.2 * len(measures), 3.3 * len(sets) + 0.9), squeeze=False)
    for row, name in zip(axes, sets):
        results = [
            entry for entry in data["results"]
            if entry["data"] == name and entry["layer"] == "all" and entry["keep_first"] == 0 and entry["chunks"] > 0
        ]
        for axis, (measure, label, factor) in zip(row, measures):
            for method in EVALUATED:
                of_method = [e for e in results if e["selector"] == method and e[measure] is not None]
                points = sorted((int(e["budget"]), factor * e[measure]) for e in of_method)
                if points:
                    axis.plot(*zip(*points), label=method, **evaluated_style(method))
            axis.set_visible(bool(axis.lines))
            power_of_two_axis(axis, sorted({int(entry["budget"]) for entry in results}))
            axis.grid(True, which="major", alpha=0.25)
            axis.set_ylabel(label, fontsize=9)
            axis.set_ylim(bottom=0.0) if measure == "output_error" else None
            axis.tick_params(axis="y", labelsize=8)
        row[0].set_title(name, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("budget, keys per KV head", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 1.0))
    save(figure, path, dpi=130 if len(sets) == 1 else 80)


ANSWERING = ["dense", *EVALUATED, "sparq.logit", "loki.logit", "quoka.last", "less_is_more", "tidal_decode"]  # shown in the figures of answers


def accuracy(results, path, against):
    """A panel for the mean over the tasks and one per task: against the budgets at one length, or against lengths.

    Behind QuoKA's means their 95 % intervals."""
    tasks, lengths, budgets = results.tasks(), results.lengths(), results.budgets()
    if against == "budget":
        length = results.length_of_budgets()
        points = [(budget, length) for budget in budgets]
        x, title = [float(budget) for budget in budgets], f"{length:,} tokens"
    else:
        shown = min(budgets, key=lambda budget: abs(float(budget) - 0.125))
        points, x, title = [(shown, length) for length in lengths], lengths, f"budget {shown} of the prompt"
    panels = [("mean", results.averaged_tasks())] + [(task, [task]) for task in tasks]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows + 0.9), squeeze=False, sharey=True)
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    for axis, (name, of) in zip(axes.flat, panels):
        for selector in (name for name in ANSWERING if name in results.selectors()):
            means = [results.mean(selector, budget, of, [length]) for budget, length in points]
            if any(mean is None for mean in means):
                continue
            look = evaluated_style(selector)
            axis.plot(x, [100.0 * mean[0] for mean in means], label=selector, **look)
            if name == "mean" and selector.startswith("quoka"):
                low, high = ([100.0 * mean[i] for mean in means] for i in (1, 2))
                axis.fill_between(x, low, high, color=look["color"], alpha=0.1, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(x)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1/{1 / value:.0f}" if value < 1 else f"{value:,.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(labelsize=8)
        axis.grid(True, which="major", alpha=0.25)
        axis.set_ylim(-3, 103)
        axis.set_visible(len(axis.lines) > 1)  # more than dense attention was run
        axis.set_title(name, fontsize=9, fontweight="bold" if name == "mean" else "normal")
    for row in axes:
        row[0].set_ylabel("exact match, %", fontsize=9)
    for axis in axes.flat[max(0, len(panels) - columns):len(panels)]:
        axis.set_xlabel("budget, share of the prompt" if against == "budget" else "prompt, tokens", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(f"RULER's tasks on small trained models, {title}", fontsize=10)
    figure.legend(handles, labels, loc="upper center", ncol=5, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 0.0))
    save(figure, path)


# What the figure of answers against time shows.
FRONTIER = ["quoka", "quoka.recommended", "quoka.robust", "sample_attention", "sparq", "loki", "less_is_more", "xattention", "flash_prefill"]


def frontier(results, speeds, tokens, path):
    """A line per method: for each budget, how fast a prefill is and how many answers are right; and the best of all of them."""
    length, tasks = results.length_of_budgets(), results.averaged_tasks()
    figure, axis = plt.subplots(figsize=(7.4, 5.0))
    everything = []
    for method in FRONTIER:
        means = {budget: results.mean(method, budget, tasks, [length]) for budget in results.budgets()}
        points = [
            (speeds[float(budget), method], 100.0 * means[budget][0], budget) for budget in means
            if means[budget] is not None and (float(budget), method) in speeds
        ]
        if not points:
            continue
        look = {**evaluated_style(method), "linestyle": "-", "markersize": 5, "linewidth": 2.4 if method == "quoka.recommended" else 1.2}
        axis.plot([p[0] for p in points], [p[1] for p in points], label=method, **look)
        if method == "quoka.recommended":
            for x, y, budget in points:
                axis.annotate(f"1/{1 / float(budget):.0f}", (x, y), textcoords="offset points", xytext=(4, -13), fontsize=8)
        everything += points
    best, edge = -1.0, []
    for x, y, _ in sorted(everything, reverse=True):
        if y > best:
            best = y
            edge.append((x, y))
    axis.step([x for x, _ in edge], [y for _, y in edge], where="pre", color="#999999", linewidth=5, alpha=0.35, zorder=1, label="best of all")
    dense = results.mean("dense", "1.0", tasks, [length])
    axis.axhline(100.0 * dense[0], color=COLOURS["dense"], linewidth=1, linestyle=":")
    axis.annotate("dense attention", (axis.get_xlim()[0], 100.0 * dense[0]), textcoords="offset points", xytext=(4, 3), fontsize=8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(f"prefill of {tokens:,} tokens, times as fast as dense attention", fontsize=9)
    axis.set_ylabel(f"right answers, %, six retrieval tasks of {length:,} tokens", fontsize=9)
    axis.set_ylim(top=103)
    axis.grid(True, which="major", alpha=0.25)
    axis.legend(fontsize=8, frameon=False, loc="lower left")
    axis.set_title("Keys attended to: 1/4, 1/8, 1/16 and 1/32 of the past", fontsize=10)
    save(figure, path)


def context_parallel(records, path):
    """The cost model's curves of one process's record; what the others measured on one machine."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.3))
    model = min(records, key=lambda r: r["processes"])
    networks = list(dict.fromkeys(p["network"] for p in model["predicted"]))
    for network, dashes in zip(networks, ("-", "--")):
        points = [p for p in model["predicted"] if p["network"] == network]
        left.plot([p["ranks"] for p in points], [p["ratio"] for p in points], dashes, color=COLOURS["quoka"],
                  label=f"model, a machine a rank, {network}")
    here = sorted((r["processes"], r["ratio"], r["predicted_alone"] / r["predicted_together"]) for r in records)
    left.plot([n for n, _, _ in here], [y for _, y, _ in here], "o", color="black",
              label="measured, processes of one machine")
    left.plot([n for n, _, _ in here], [y for _, _, y in here], "o", mfc="none", ms=10, color="black",
              label="the model's for these (cores shared as measured)")
    left.plot([1, 8], [1, 8], ":", color=COLOURS["oracle"], lw=1)
    left.set_ylim(0.5, 64)
    points = [p for p in model["predicted"] if p["network"] == networks[0]]
    ranks = [p["ranks"] for p in points]
    right.plot(ranks, [p["bytes_per_chunk"] / 2**20 for p in points], color=COLOURS["quoka"], marker="o",
               label="sharded, any past")
    right.plot(ranks[1:], [p["ring_bytes_per_chunk"] / 2**20 for p in points[1:]], color=COLOURS["dense"], marker="o",
               label=f"all keys and values by a ring, past {model['len']:,}")
    for axis, text in ((left, "times as fast as one process"), (right, "MiB that a rank sends for a chunk")):
        power_of_two_axis(axis, ranks)
        axis.set_yscale("log", base=2 if axis is left else 10)
        plain = FuncFormatter(lambda y, _: f"{y:g}")
        axis.yaxis.set_major_formatter(plain)
        axis.set_xlabel("ranks")
        axis.set_ylabel(text)
        axis.grid(True, which="major", alpha=0.25)
        axis.legend(fontsize=7.5, frameon=False, loc="upper left" if axis is left else "center right")
    figure.suptitle(f"QuoKA over several ranks: prefill of {model['len']:,} tokens, chunk {model['chunk']}, "
                    f"budget {model['budget']:,}, 32/8 heads of 128", fontsize=10)
    save(figure, path)


def first_token(data, path):
    """How many times as soon as llama.cpp alone, against the prompt: a row for each number of threads, a column for each ubatch."""
    threads, ubatches = (sorted({run[key] for run in data["runs"]}) for key in ("threads", "ubatch"))
    figure, axes = plt.subplots(len(threads), len(ubatches), figsize=(5.2 * len(ubatches), 3.8 * len(threads)),
                                sharex=True, sharey=True, squeeze=False)
    models = list(dict.fromkeys(run["model"] for run in data["runs"]))
    colours = dict(zip(models, ("#d1495b", "#00798c", "#edae49", "#66a182")))
    modes = {"exact": ":", "quoka": "-", "recommended": "--"}
    lengths = sorted({p["tokens"] for run in data["runs"] for p in run["prompts"]})
    for row, count in zip(axes, threads):
        for axis, ubatch in zip(row, ubatches):
            for run in (run for run in data["runs"] if (run["threads"], run["ubatch"]) == (count, ubatch)):
                for mode, dashes in modes.items():
                    points = [(p["tokens"], p["llama.cpp"]["s"] / p[mode]["s"]) for p in run["prompts"] if mode in p]
                    if points:
                        axis.plot(*zip(*points), dashes, color=colours[run["model"]], marker="o", markersize=3)
            power_of_two_axis(axis, lengths)
            axis.axhline(1, color=COLOURS["oracle"], linewidth=0.8)
            axis.grid(True, which="major", alpha=0.25)
            axis.set_title(f"ubatch {ubatch}, {count} thread{'s' if count > 1 else ''}", fontsize=10)
        row[0].set_ylabel("llama.cpp's time = 1")
    for axis in axes[-1]:
        axis.set_xlabel("prompt, tokens")
    handles = [Line2D([], [], color=colour, marker="o", markersize=3, label=model.replace(".Q8_0.gguf", "").replace(", random weights", ""))
               for model, colour in colours.items()]
    handles += [Line2D([], [], color="black", linestyle=dashes, label=mode) for mode, dashes in modes.items()]
    figure.legend(handles=handles, ncol=len(handles), fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    figure.suptitle("Time to first token in llama.cpp: times as short with the backend\nf16 cache, budget 1,024", fontsize=10)
    save(figure, path)


def save(figure, path, dpi=130):
    figure.tight_layout()
    figure.savefig(path, dpi=dpi, bbox_inches="tight")
    plt.close(figure)
    print(path)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "results")
    for source, draw, name in (
        ("speedup_all.json", prefill_speedup, "prefill_speedup.png"),
        ("decode_all.json", decode_latency, "decode_latency.png"),
        ("quoka_parts.json", chunk_parts, "chunk_parts.png"),
        ("scaling.json", scaling, "scaling.png"),
        ("cores.json", cores, "cores.png"),
        ("ggml_first_token.json", first_token, "ggml_first_token.png"),
        ("ggml_first_token_zen4.json", first_token, "ggml_first_token_zen4.png"),
        ("evaluate_tinyllama.json", evaluation, "evaluate_tinyllama.png"),
        ("evaluate_generated.json", evaluation, "evaluate_generated.png"),
    ):
        if (folder / source).exists():
            draw(json.loads((folder / source).read_text()), folder / name)
    for source in sorted(folder.glob("needle_*.json")):
        data = json.loads(source.read_text())
        if len({p["length"] for p in data["results"]}) > 1 and any(p["selector"] != "dense" for p in data["results"]):
            needle(data, source.with_suffix(".png"))
    records = [json.loads(source.read_text()) for source in sorted(folder.glob("context_parallel_*.json"))]
    if records:
        context_parallel(records, folder / "context_parallel.png")
    results = ruler_results.Results(folder)
    for against in ("budget", "length") if results.files else ():
        accuracy(results, folder / f"accuracy_{against}.png", against)
    speeds, tokens = ruler_results.frontier(folder)
    if speeds and results.files:
        frontier(results, speeds, tokens, folder / "which_preset.png")


if __name__ == "__main__":
    main()
