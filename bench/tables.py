#!/usr/bin/env python3
"""Writes the tables of bench/results/evaluate.md from evaluate's JSON files.

    python3 bench/tables.py [RESULTS_DIRECTORY]

What stands in the file between <!-- FILE.json --> and <!-- end --> is replaced; the rest is left as it is. Of generated
layers one budget, the middle one, is shown.
Python's standard library is all it needs.
"""

import json
import pathlib
import re
import sys


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


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "results")
    path = folder / "evaluate.md"

    def fill(match):
        return f"{match[1]}{document(json.loads((folder / match[2]).read_text()))}{match[3]}"

    text = re.sub(r"(<!-- (\S+\.json) -->\n)(?:.*?)(<!-- end -->)", fill, path.read_text(), flags=re.DOTALL)
    path.write_text(text)
    print(path)


if __name__ == "__main__":
    main()
