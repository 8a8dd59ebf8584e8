#!/usr/bin/env python3
"""Writes the tables of bench/results/ from its JSON files: evaluate.md from evaluate's, accuracy.md from decoder ruler's.

    python3 bench/tables.py [RESULTS_DIRECTORY]

In evaluate.md what stands between <!-- FILE.json --> and <!-- end --> is replaced, in accuracy.md what stands between
<!-- tasks --> (or lengths, or budgets) and <!-- end -->; the rest is left as it is. Of generated layers one budget, the middle
one, is shown. A page whose files are not there is left as it is.
Python's standard library is all it needs.
"""

import json
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


def task_cell(entries):
    """One model's figure with its interval, or the mean of several models."""
    if not entries:
        return "-"
    mean = sum(entry["exact_mean"] for entry in entries) / len(entries)
    return f"{100.0 * mean:.1f}" + (f" {interval(*entries[0]['exact_interval'])}" if len(entries) == 1 else "")


def heading(results, text):
    models = ", ".join(f"`{file['model']}`" for file in results.files)
    return ["", f"### {text}", "", f"{models}; {results.samples()} samples of each task and length, chunk {results.files[0]['chunk']}.", ""]


def by_task(results, length):
    """Selectors x tasks at one budget and length."""
    tasks, lines = results.tasks(), heading(results, f"{length:,} tokens, budget {SHOWN_BUDGET} of the prompt")
    rows = []
    for selector in results.selectors():
        mean = lambda minus=None: results.mean(selector, SHOWN_BUDGET, tasks, length, minus)  # noqa: E731
        row = [f"`{selector}`", *(task_cell(results.cell(selector, SHOWN_BUDGET, task, length)) for task in tasks)]
        row += [mean_cell(mean()), "" if selector == "dense" else mean_cell(mean("dense"))]
        rows.append(row + ["" if selector in ("dense", "quoka") else mean_cell(mean("quoka"))])
    return lines + table(["selector", *tasks, "mean", "mean - dense", "mean - `quoka`"], rows)


def by_length(results):
    """Selectors x lengths, mean over tasks at one budget."""
    lengths = results.lengths()
    rows = [
        [f"`{selector}`", *(mean_cell(results.mean(selector, SHOWN_BUDGET, results.tasks(), length)) for length in lengths)]
        for selector in results.selectors()
    ]
    lines = heading(results, f"Mean over tasks by length, budget {SHOWN_BUDGET} of the prompt")
    return lines + table(["selector", *(f"{length:,}" for length in lengths)], rows)


def by_budget(results, length):
    """Selectors x budgets, mean over tasks at one length."""
    budgets, rows = results.budgets(), []
    for selector in results.selectors():
        shown = budgets[:1] if selector == "dense" else budgets
        means = [mean_cell(results.mean(selector, budget, results.tasks(), length)) for budget in shown]
        rows.append([f"`{selector}`", *means, *[""] * (len(budgets) - len(shown))])
    lines = heading(results, f"Mean over tasks by budget, {length:,} tokens")
    return lines + table(["selector", *budgets], rows)


ACCURACY_BLOCKS = {
    "tasks": lambda results: [line for length in results.lengths() for line in by_task(results, length)],
    "lengths": by_length,
    "budgets": lambda results: [line for length in results.lengths() for line in by_budget(results, length)],
}


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
    results = ruler_results.Results(folder)
    if results.files:
        lines = {name: "\n".join(block(results)) + "\n\n" for name, block in ACCURACY_BLOCKS.items()}
        fill(folder / "accuracy.md", "|".join(lines), lines.get)


if __name__ == "__main__":
    main()
