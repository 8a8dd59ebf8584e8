#!/usr/bin/env python3
"""Writes the tables of bench/results/ from its JSON files: evaluate.md from evaluate's, accuracy.md from decoder ruler's, needle.md
from decoder needle's.

    python3 bench/tables.py [RESULTS_DIRECTORY]

In evaluate.md and needle.md what stands between <!-- FILE.json --> and <!-- end --> is replaced, in accuracy.md what stands between
<!-- tasks --> (or lengths, budgets, kept) and <!-- end -->; the rest is left as it is. Of generated layers one budget, the middle
one, is shown. A page whose files are not there is left as it is.
Python's standard library is all it needs.
"""

import itertools
import json
import math
import pathlib
import re
import sys

import ruler_results


def percent(share, decimals=1):
    return "-" if share is None else f"{100.0 * share:.{decimals}f}"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(header))) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def by_setting(results):
    """{(selector, keep_first): entry} in the order of the file."""
    return {(entry["selector"], entry["keep_first"]): entry for entry in results}


def with_both(entries, selector, show):
    """The figure without and, behind a slash, with forced first keys."""
    settings = sorted(first for name, first in entries if name == selector)
    return " / ".join(show(entries[selector, first]) for first in settings)


def overall(results, targets):
    """One budget, all layers together."""
    entries = by_setting(results)
    header = [
        "selector", "mass kept, %", "of oracle, %", "worst row, %", "worst 1 %, %", "output error", "overlap, %", "MFLOP",
        "of dense, %", "ms",
    ]
    if targets:
        header.insert(7, "targets kept, %")
    rows = []
    for selector in dict.fromkeys(name for name, _ in entries):
        both = lambda show: with_both(entries, selector, show)  # noqa: E731
        plain = entries[selector, min(first for name, first in entries if name == selector)]
        row = [
            f"`{selector}`",
            both(lambda e: percent(e["mass_kept"])),
            both(lambda e: percent(e["mass_of_oracle"])),
            both(lambda e: percent(e["worst_mass"], 2)),
            both(lambda e: percent(e["worst_percent_mass"])),
            both(lambda e: f"{e['output_error']:.3f}"),
            both(lambda e: percent(e["overlap"])),
            f"{1e-6 * plain['scoring_flops']:.2f}",
            percent(plain["scoring_flops"] / plain["dense_flops"], 2),
            f"{1e3 * plain['scoring_seconds']:.2f}",
        ]
        if targets:
            row.insert(7, both(lambda e: percent(e["targets_kept"])))
        rows.append(row)
    return table(header, rows)


def by_layer(results, layers):
    entries = {}
    for entry in results:
        if entry["keep_first"] == 0:
            entries.setdefault(entry["selector"], {})[entry["layer"]] = entry
    rows = [
        [f"`{name}`"] + [f"{percent(of[layer]['mass_kept'])} / {of[layer]['output_error']:.3f}" for layer in layers]
        for name, of in entries.items()
    ]
    return table(["mass kept, % / error", *layers], rows)


def middle(budgets):
    return budgets[len(budgets) // 2]


def across(data):
    """Several sets of layers at the middle budget: mass kept without / with forced first keys, and targets kept."""
    names = [source["name"] for source in data["data"]]
    budget = middle(list(dict.fromkeys(entry["budget"] for entry in data["results"])))
    entries = {
        (entry["selector"], entry["data"], entry["keep_first"]): entry
        for entry in data["results"]
        if entry["layer"] == "all" and entry["budget"] == budget
    }
    rows = []
    for selector in dict.fromkeys(name for name, _, _ in entries):
        row = [f"`{selector}`"]
        for name in names:
            of = {(s, first): e for (s, n, first), e in entries.items() if n == name}
            kept = of[selector, 0]["targets_kept"]
            cell = with_both(of, selector, lambda e: percent(e["mass_kept"]))
            row.append(cell + ("" if kept is None else f"; **{100.0 * kept:.0f}**"))
        rows.append(row)
    short = [name.removeprefix("generated: ") for name in names]
    return ["", f"### All of them, budget {budget}", "", *table(["selector", *short], rows)]


def document(data):
    lines = across(data) if len(data["data"]) > 1 else []
    for source in data["data"]:
        results = [entry for entry in data["results"] if entry["data"] == source["name"]]
        targets = any(entry["targets_kept"] is not None for entry in results)
        generated = source["name"].startswith("generated")
        budgets = list(dict.fromkeys(entry["budget"] for entry in results))
        for budget in [middle(budgets)] if generated else budgets:
            here = [entry for entry in results if entry["budget"] == budget]
            together = [entry for entry in here if entry["layer"] == "all"]
            lines += [
                "", f"### {source['name']}, budget {budget}", "",
                f"{len(source['layers'])} layers, {source['tokens']:,} tokens, {source['q_heads']} query and "
                f"{source['kv_heads']} KV heads of {source['head_dim']}; {together[0]['chunks']} chunks, "
                f"{together[0]['rows']:,} rows measured.", "",
            ]
            lines += overall(together, targets)
            if len(source["layers"]) > 1 and not generated:
                lines += ["", *by_layer(here, source["layers"])]
    return "\n".join(lines) + "\n\n"


# ---- accuracy.md ------------------------------------------------------------------------------------------------------

SHOWN_BUDGET = "0.125"


def interval(low, high):
    return f"[{100.0 * low:.1f}, {100.0 * high:.1f}]"


def mean_cell(mean):
    return "-" if mean is None else f"{100.0 * mean[0]:.1f} {interval(*mean[1:])}"


def heading(results, text):
    models = ", ".join(f"`{file['model']}`" for file in results.files)
    return ["", f"### {text}", "", f"{models}; {results.samples()} samples of each task and length, chunk {results.files[0]['chunk']}.", ""]


def table_of_means(results, header, cells):
    """A row per selector that has any figure; cells(selector) -> means or None."""
    rows = [(selector, cells(selector)) for selector in results.selectors()]
    return table(["selector", *header], [[f"`{name}`", *map(mean_cell, row)] for name, row in rows if any(row)])


def compared(results, selector, budget, tasks, lengths):
    """The mean, and less dense's and `quoka`'s."""
    versus = [None, *(name if name != selector else "" for name in ("dense", "quoka"))]
    return [None if name == "" else results.mean(selector, budget, tasks, lengths, name) for name in versus]


def verdict(difference):
    return "" if difference is None else "beats" if difference[1] > 0 else "loses" if difference[2] < 0 else "neither"


def registered(results):
    """`quoka` less each of its rivals, and the robust preset less them: all lengths at 1/8, then the other budgets at one length."""
    tasks, lines = results.averaged_tasks(), []
    for budget in [SHOWN_BUDGET, *(b for b in results.budgets() if b != SHOWN_BUDGET)]:
        has = lambda selector, length: results.holds(selector, budget, tasks, length)  # noqa: E731
        lengths = [n for n in results.lengths() if has("quoka", n) and has("quoka.robust", n)]
        rivals = [name for name in RIVALS if lengths and all(has(name, n) for n in lengths)]
        if not rivals:
            continue
        rows = []
        for rival in rivals:
            difference = results.mean("quoka", budget, tasks, lengths, rival)
            robust = results.mean("quoka.robust", budget, tasks, lengths, rival)
            rows.append([
                f"`{rival}`", mean_cell(results.mean(rival, budget, tasks, lengths)), mean_cell(difference), verdict(difference),
                mean_cell(robust), verdict(robust),
            ])
        own = [mean_cell(results.mean(name, budget, tasks, lengths)) for name in ("dense", "quoka", "quoka.robust")]
        shown = ", ".join(f"{n:,}" for n in lengths)
        lines += heading(results, f"Budget {budget} of the prompt, {shown} tokens, mean over {', '.join(tasks)}")
        lines += [f"Dense {own[0]}, `quoka` {own[1]}, `quoka.robust` {own[2]}.", ""]
        lines += table(["rival", "its mean", "`quoka` - it", "`quoka`", "`quoka.robust` - it", "`quoka.robust`"], rows)
    return lines


def recommended(results):
    """The recommended preset less each rival: where it was not tuned, at 1/8; then by budgets at one length, with what dense keeps of a lead."""
    own, tasks, lines = "quoka.recommended", results.averaged_tasks(), []
    has = lambda name, budget, length: results.holds(name, budget, tasks, length)  # noqa: E731
    held_out = [n for n in (2048, 4096) if has(own, SHOWN_BUDGET, n)]
    if not held_out:
        return ["", "Not run yet."]
    rivals = [name for name in ("quoka", "quoka.robust", *RIVALS) if all(has(name, SHOWN_BUDGET, n) for n in held_out)]
    shown = ", ".join(f"{n:,}" for n in held_out)
    lines += heading(results, f"Budget {SHOWN_BUDGET} of the prompt, {shown} tokens, mean over {', '.join(tasks)}")
    rows = [[f"`{own}`", mean_cell(results.mean(own, SHOWN_BUDGET, tasks, held_out)), "", ""]]
    for rival in ("dense", *rivals):
        difference = results.mean(own, SHOWN_BUDGET, tasks, held_out, rival)
        rows.append([f"`{rival}`", mean_cell(results.mean(rival, SHOWN_BUDGET, tasks, held_out)), mean_cell(difference), verdict(difference)])
    lines += table(["selector", "its mean", f"`{own}` - it", ""], rows)
    lines += ["", f"Task by task, `{own}` less dense:", ""]
    lines += table(["tokens", *tasks], [
        [f"{n:,}", *(mean_cell(results.mean(own, SHOWN_BUDGET, [task], [n], "dense")) for task in tasks)] for n in held_out])
    length = results.length_of_budgets()
    budgets = [b for b in results.budgets() if has(own, b, length)]
    names = [name for name in (own, *rivals) if any(has(name, b, length) for b in budgets)]
    lines += ["", f"{length:,} tokens, less dense, by budget:", ""]
    lines += table(["selector", *budgets], [
        [f"`{name}`", *(mean_cell(results.mean(name, b, tasks, [length], "dense")) if has(name, b, length) else "-" for b in budgets)]
        for name in names])
    return lines


def by_task(results, length):
    """Selectors x tasks at one budget and length; the mean is over the retrieval tasks."""
    tasks, averaged = results.tasks(), results.averaged_tasks()
    cells = lambda selector: [  # noqa: E731
        *(results.mean(selector, SHOWN_BUDGET, [task], [length]) for task in tasks),
        *compared(results, selector, SHOWN_BUDGET, averaged, [length]),
    ]
    lines = heading(results, f"{length:,} tokens, budget {SHOWN_BUDGET} of the prompt")
    return lines + table_of_means(results, [*tasks, "mean", "mean - dense", "mean - `quoka`"], cells)


def by_length(results):
    """Selectors x lengths, mean over tasks at one budget."""
    lengths, tasks = results.lengths(), results.averaged_tasks()
    cells = lambda selector: [results.mean(selector, SHOWN_BUDGET, tasks, [length]) for length in lengths]  # noqa: E731
    lines = heading(results, f"Mean over tasks by length, budget {SHOWN_BUDGET} of the prompt")
    return lines + table_of_means(results, [f"{length:,}" for length in lengths], cells)


def by_budget(results, length):
    """Selectors that were run with every budget, mean over tasks at one length."""
    budgets, tasks = results.budgets(), results.averaged_tasks()

    def cells(selector):
        means = [results.mean(selector, budget, tasks, [length]) for budget in budgets]
        return [means[0]] + [None] * (len(budgets) - 1) if selector == "dense" else means if all(means) else []

    return heading(results, f"Mean over tasks by budget, {length:,} tokens") + table_of_means(results, budgets, cells)


def ablations(results):
    """Every selector at the budget and length where the most of them were run."""
    if not any(name.startswith("quoka.") and name != "quoka.robust" for name in results.selectors()):
        return ["", "Not run yet."]
    tasks = results.averaged_tasks()
    run = lambda budget, length: sum(  # noqa: E731
        results.holds(name, budget, tasks, length) for name in results.selectors())
    budget, length = max(itertools.product(results.budgets(), results.lengths()), key=lambda at: run(*at))
    header = [*tasks, "mean", "mean - dense", "mean - `quoka`"]
    cells = lambda selector: [  # noqa: E731
        *(results.mean(selector, budget, [task], [length]) for task in tasks), *compared(results, selector, budget, tasks, [length])]
    return heading(results, f"{length:,} tokens, budget {budget} of the prompt") + table_of_means(results, header, cells)


RIVALS = [
    "sample_attention.logit", "sparq.logit", "loki.logit", "less_is_more", "sample_attention", "sparq", "loki", "snapkv", "keydiff",
    "xattention", "flash_prefill", "oracle",
]


def kept_keys(folder):
    """Answers beside the keys that were attended to, thresholds and budgets alike: kept_*.json, a table per model."""
    lines = []
    for source in sorted(folder.glob("kept_*.json")):
        data = json.loads(source.read_text())
        cells = {}  # (selector, budget), length: the tasks' entries
        for entry in data["results"]:
            budget = "own" if "." in entry["selector"] and entry["selector"].split(".")[1] in ("threshold", "compact") else entry["budget"]
            cells.setdefault((entry["selector"], budget), {}).setdefault(entry["length"], []).append(entry)
        lengths = sorted({length for of in cells.values() for length in of})
        mean = lambda entries, key: sum(entry[key] for entry in entries) / len(entries)  # noqa: E731
        show = lambda entries: [f"{mean(entries, 'kept'):,.0f}", percent(mean(entries, "exact_mean"))] if entries else ["-", "-"]  # noqa: E731
        order = sorted(cells, key=lambda name: (-mean(cells[name][min(cells[name])], "kept"), name))
        rows = [[f"`{name[0]}`", "-" if name[0] == "dense" else name[1], *itertools.chain(*(show(cells[name].get(n)) for n in lengths))] for name in order]
        header = ["selector", "budget", *itertools.chain(*((f"{n:,} tokens: keys", "answers, %") for n in lengths))]
        counts = {len(entry["exact"]) for entry in data["results"]}
        samples = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        tasks = ", ".join(dict.fromkeys(entry["task"] for entry in data["results"]))
        lines += ["", f"### `{data['model']}`: {tasks}; {samples} samples a cell", "", *table(header, rows)]
    return lines


ACCURACY_BLOCKS = {
    "registered": registered,
    "recommended": recommended,
    "tasks": lambda results: [line for length in results.lengths() for line in by_task(results, length)],
    "lengths": by_length,
    "budgets": lambda results: by_budget(results, results.length_of_budgets()),
    "ablations": ablations,
}


# ---- needle.md --------------------------------------------------------------------------------------------------------


def found(points):
    return f"{sum(point['exact'] for point in points)} of {len(points)}" if points else "-"


def mean_log_prob(points):
    return f"{sum(point['log_prob'] for point in points) / len(points):.2f}" if points else "-"


def needle(data):
    """A row per selector and budget: needles found and the mean log-probability of the key, by prompt length.

    All: the mean over the lengths, however many needles each has.
    """
    results = data["results"]
    lengths = sorted({point["length"] for point in results})
    rows = []
    for selector, budget in dict.fromkeys((point["selector"], point["budget"]) for point in results):
        points = [point for point in results if (point["selector"], point["budget"]) == (selector, budget)]
        by_length = [[point for point in points if point["length"] == length] for length in lengths]
        shares = [sum(point["exact"] for point in asked) / len(asked) for asked in by_length if asked]
        share = f"{percent(sum(shares) / len(shares), 0)} %" if all(by_length) else "-"
        rows.append(
            [f"`{selector}`", "-" if selector == "dense" else budget, *map(found, by_length), share, *map(mean_log_prob, by_length)]
        )
    rows.sort(key=lambda row: (row[0] != "`dense`", row[1], not row[0].startswith("`quoka"), row[0].strip("`")))
    header = ["selector", "budget", *(f"{n:,} tokens" for n in lengths), "all", *(f"log-probability, {n:,}" for n in lengths)]
    return "\n".join(["", *table(header, rows)]) + "\n\n"


# ---- which_preset.md --------------------------------------------------------------------------------------------------

CHOICES = [
    "quoka", "quoka.recommended", "quoka.robust", "sample_attention", "sparq", "loki", "less_is_more", "xattention", "flash_prefill", "oracle",
]


def presets(results, folder):
    """A row per method: answers by budget, needles, perplexity, speed, and what it takes to come within 2 points of dense."""
    load = lambda pattern: [json.loads(source.read_text()) for source in sorted(folder.glob(pattern))]  # noqa: E731
    speeds, _ = ruler_results.frontier(folder)
    needles = {}
    for file in load("needle_tinyllama.json") + load("needle_tinyllama_recommended.json"):
        for e in file["results"]:
            if e["length"] == 2040 and e["budget"] in ("0.125", "1.0"):
                needles.setdefault(e["selector"], {})[e["depth"]] = e["exact"]
    losses = {e["selector"]: e["losses"] for file in load("decoder_perplexity_*.json") for e in file["results"]}
    length, tasks, budgets = results.length_of_budgets(), results.averaged_tasks(), ["0.125", "0.0625", "0.03125"]
    text = lambda value, how: "-" if value is None else how(value)  # noqa: E731

    def mean(name, budget):
        return results.mean(name, budget, tasks, [length])

    def enough(name):
        """The smallest budget within 2 points of dense, and the speed there."""
        for budget in results.budgets():
            lead = results.mean(name, budget, tasks, [length], "dense")
            if lead is not None and lead[0] >= -0.02:
                return f"1/{1 / float(budget):.0f}, {text(speeds.get((float(budget), name)), lambda x: f'{x:.1f}x')}"
        return "none"

    rows = []
    for name in ("dense", *CHOICES):
        dense = name == "dense"
        found_by = needles.get(name)
        loss = losses.get(name)
        shown = [mean(name, "1.0")] + [None, None] if dense else [mean(name, budget) for budget in budgets]
        rows.append([
            f"`{name}`", *(text(m, lambda m: f"{100 * m[0]:.1f}") for m in shown),
            text(found_by, lambda f: f"{sum(f.values())} of {len(f)}"),
            text(loss, lambda x: f"{math.exp(x[-1]['loss_nat']):.2f}"),
            "1.0x" if dense else text(speeds.get((0.03125, name)), lambda x: f"{x:.1f}x"),
            "1.0x" if dense else text(speeds.get((0.125, name)), lambda x: f"{x:.1f}x"),
            "" if dense else enough(name),
        ])
    header = ["", "answers, 1/8", "1/16", "1/32", "needles, 1/8", "perplexity, 1/8", "prefill, 1/32", "prefill, 1/8", "within 2 points of dense"]
    return ["", *table(header, rows), ""]


# ---- pages ------------------------------------------------------------------------------------------------------------


def fill(path, blocks, document):
    """Replaces what stands in the page between <!-- BLOCK --> and <!-- end -->, for BLOCKs that match the regex."""
    pattern = rf"(<!-- ({blocks}) -->\n)(?:.*?)(<!-- end -->)"
    path.write_text(re.sub(pattern, lambda match: match[1] + document(match[2]) + match[3], path.read_text(), flags=re.DOTALL))
    print(path)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "results")
    if list(folder.glob("evaluate_*.json")):
        fill(folder / "evaluate.md", r"\S+\.json", lambda name: document(json.loads((folder / name).read_text())))
    needles = {source.name: needle(json.loads(source.read_text())) for source in folder.glob("needle_*.json")}
    if needles:
        fill(folder / "needle.md", "|".join(map(re.escape, needles)), needles.get)
    results = ruler_results.Results(folder)
    if results.files:
        lines = {name: "\n".join(block(results)) + "\n\n" for name, block in ACCURACY_BLOCKS.items()}
        lines["kept"] = "\n".join(kept_keys(folder)) + "\n\n"
        fill(folder / "accuracy.md", "|".join(lines), lines.get)
        if (folder / "which_preset.md").exists():
            fill(folder / "which_preset.md", "presets", lambda _: "\n".join(presets(results, folder)) + "\n")


if __name__ == "__main__":
    main()
