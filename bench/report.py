#!/usr/bin/env python3
"""One page on how this library runs on one machine.

    python3 bench/report.py --programs build/bench            # measures: ten minutes, 4 GB
    python3 bench/report.py --from build/report.json          # draws the page again

Writes the measurements to report.json, and report.html, which needs no other file and no network.
Python's own library is enough. The figures are medians; shares are of the two limits of one core
that the same run measured.
"""

import argparse
import html
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
RECORDS = ["speedup_qwen3-4b_1_thread.json", "speedup_all.json"]  # of machines of record, in bench/results/data
LENGTHS = [2048, 8192, 32768]
SELECTORS = ["quoka", "quoka.balanced", "flash_prefill", "xattention", "sample_attention", "sparq"]

# The measurements of quoka_bench for the page: heading, text, benchmarks by name.
GROUPS = [
    ("Attention", "one core, against its limits", [
        ("dense chunk, 8,192 keys", "attention/dense/kv_len:8192/head_dim:128/group:4/threads:1"),
        ("chunk over 1,024 of 32,768 keys", "attention/selected/kv_len:32768/budget:1024"),
        ("token over 32,768 keys", "attention/token/kv_len:32768/q_heads:32/kv_heads:8"),
        ("token over 32,768 half keys", "attention/token/half/kv_len:32768/q_heads:32/kv_heads:8"),
    ]),
    ("A whole step of a layer", "one core: select, attend, append", [
        ("dense chunk, 32,768 keys", "chunk/dense/kv_len:32768"),
        ("QuoKA chunk, 32,768 keys", "chunk/quoka/kv_len:32768"),
        ("dense token, 32,768 keys", "decode/dense/kv_len:32768"),
        ("QuoKA token, 32,768 keys", "decode/quoka/kv_len:32768"),
    ]),
    ("From queries to the best keys", "16 queries, 32,768 keys, one core", [
        ("in float", "top_k_of_scores/float/normal/kv_len:32768/rows:16"),
        ("by the 8-bit sketch, same keys", "top_k_of_scores/sketch/normal/kv_len:32768/rows:16"),
    ]),
    ("Selection of a chunk", "32,768 keys, one core", [
        (name, f"select/{name}/kv_len:32768")
        for name in [*SELECTORS, "loki", "quest"]
    ]),
    ("Caches as engines have them", "contiguous and in pages of 16, one core", [
        (f"{step} over {keys:,} keys, {layout}, {form}", f"engine/{layout}/{form}/{step}/kv_len:{keys}")
        for step, keys in [("token", 32768), ("chunk", 8192)]
        for layout in ["contiguous", "pages"]
        for form in ["half", "q8_0"]
    ]),
]


# ---- measuring ------------------------------------------------------------------------------------------------------


class Progress:
    """A line on stderr: how far, what is measured, how long it has taken."""

    def __init__(self, steps):
        self.steps, self.done, self.begin = steps, 0, time.monotonic()

    def show(self, what):
        width, minutes, seconds = 24, *divmod(int(time.monotonic() - self.begin), 60)
        full = width * self.done // self.steps
        line = f"[{'#' * full}{'.' * (width - full)}] {self.done}/{self.steps}  {minutes}:{seconds:02}  {what}"
        end = "\r" if sys.stderr.isatty() and self.done < self.steps else "\n"
        print(f"{line:<78}", end=end, file=sys.stderr, flush=True)

    def step(self, what, work):
        self.show(what)
        result = work()
        self.done += 1
        return result


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def bench(program, names):
    """Medians of the benchmarks that are there: {name: {"ms", "peak", "bandwidth"}}, and the program's context."""
    pattern = "^(" + "|".join(re.escape(name) for name in names) + ")$"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        run([program, f"--benchmark_filter={pattern}", "--benchmark_repetitions=5", "--benchmark_min_time=0.2",
             "--benchmark_report_aggregates_only=true", f"--benchmark_out={out}", "--benchmark_out_format=json"])
        data = json.loads(out.read_text())
    unit = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
    found = {}
    for one in data["benchmarks"]:
        if one.get("error_occurred"):
            sys.exit(f"{one['name']}: {one.get('error_message')}")
        if one.get("aggregate_name") == "median":
            figures = {"ms": one["cpu_time"] * unit[one["time_unit"]]}
            figures.update({key: one[key] for key in ("peak", "bandwidth", "GFLOP/s", "GB/s") if key in one})
            found[one["run_name"]] = figures
    return found, data["context"]


def speedup(program, threads, selectors):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        run([program, "--lengths", ",".join(map(str, LENGTHS)), "--selectors", ",".join(selectors), "--rounds", "3",
             "--positions", "2", "--threads", str(threads), "--json", out])
        data = json.loads(out.read_text())
    return [{key: one[key] for key in ("selector", "tokens", "speedup", "prefill_seconds")} for one in data["results"]]


def measure(programs, threads):
    known = set(run([programs / "quoka_bench", "--benchmark_list_tests"]).split())
    progress = Progress(len(GROUPS) + (2 if threads > 1 else 1))
    groups, context = [], {}
    for heading, note, rows in GROUPS:
        there = [(label, name) for label, name in rows if name in known]
        if len(there) < len(rows):
            missing = [name for _, name in rows if name not in known]
            sys.exit(f"quoka_bench has no {missing}")
        found, context = progress.step(heading, lambda: bench(programs / "quoka_bench", [name for _, name in there]))
        groups.append({"heading": heading, "note": note,
                       "rows": [{"label": label, "name": name, **found[name]} for label, name in there]})
    prefill = {"1": progress.step("Prefill against dense", lambda: speedup(programs / "speedup", 1, SELECTORS))}
    if threads > 1:
        prefill[str(threads)] = progress.step(
            f"Prefill, {threads} threads", lambda: speedup(programs / "speedup", threads, SELECTORS[:2]))
    progress.show("done")
    return {
        "cpu": context["cpu"], "cores": os.cpu_count(), "build": context["build"],
        "fma_peak": context["fma_peak"], "read_bandwidth": context["read_bandwidth"],
        "caches": [f"L{c['level']} {c['type'].lower()} {c['size'] // 1024} KiB" for c in context["caches"]],
        "load": context["load_avg"][0], "date": context["date"][:10],
        "groups": groups, "prefill": prefill,
    }


# ---- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root { --ink: #1c2330; --soft: #5b6575; --rule: #d9dee6; --paper: #fff; --mark: #c2334d; --other: #2f6f8f; --past: #a9b3c1 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf2; --soft: #9aa5b5; --rule: #333c4a; --paper: #12161d;
  --mark: #ff6b81; --other: #6cb6d9; --past: #566274 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.2rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem }
p { margin: .3rem 0 .8rem } .soft { color: var(--soft) } .big { font-size: 1.15rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal } th { font-weight: 600; color: var(--soft) }
svg { width: 100%; min-width: 36rem; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.bar { background: var(--rule); height: .55rem; width: 7rem; display: inline-block; vertical-align: middle }
.bar i { background: var(--other); height: 100%; display: block }
@media (max-width: 34rem) { .bar { width: 3.5rem } th, td { padding-right: .4rem; font-size: .9rem } }
@media print { body { max-width: none; color: #000; background: #fff } h2 { break-after: avoid } table, svg { break-inside: avoid }
  svg { min-width: 0 } .bar { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""


def figure(x):
    """Three significant digits, thousands apart."""
    if x == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    return f"{x:,.{digits}f}"


def table(head, rows):
    cells = lambda tag, row: "".join(f"<{tag}>{cell}</{tag}>" for cell in row)
    return (f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>'
            + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</tbody></table></div>")


def share(row):
    """How near to its limit: the nearer of the two that apply. 8-bit products may pass the peak of float's."""
    limits = [(row[key], name) for key, name in (("peak", "multiply-adds"), ("bandwidth", "reading")) if key in row]
    if not limits:
        return ""
    part, name = max(limits)
    width = min(100, round(100 * part))
    return f'<span class="bar"><i style="width:{width}%"></i></span> {100 * part:.0f}&#8239;% of {name}'


def records():
    """Speed against length on machines of record: [(label, {tokens: speedup of quoka})]."""
    found = []
    for name in RECORDS:
        data = json.loads((HERE / "results" / "data" / name).read_text())
        points = {one["tokens"]: one["speedup"] for one in data["results"] if one["selector"] == "quoka"}
        cpu = re.sub(r"\((R|TM)\)|Processor|CPU|@.*", "", data["cpu"])
        found.append((f"quoka on {' '.join(cpu.split())}", points))
    return found


def chart(lines, aria="speed of prefill against dense, by tokens", unit="x", ticks=None, x_ticks=None, x_unit=""):
    """Lines of points, both axes logarithmic: [(label, {x: y}, colour)]. ticks: y is linear and has these.
    The legend beside the lines is in the order of their last points."""
    lines = [(label, dict(sorted(points.items())), colour) for label, points, colour in lines if points]
    xs, ys = (sorted({point[i] for _, points, _ in lines for point in points.items()}) for i in (0, 1))
    left, right, width, height = 46, 170, 720, 330
    if ticks:
        rise = lambda y: (y - ticks[0]) / (ticks[-1] - ticks[0])
    else:
        top, bottom = ys[-1] * 1.1, min(0.9, ys[0])
        rise = lambda y: math.log(y / bottom) / math.log(top / bottom)
        scale = [0.5, 1, 2, 4, 8, 16, 32, 64, 128] if top / bottom > 4.4 else [0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3]
        ticks = [y for y in scale if bottom <= y <= top]
    at = lambda x, y: (left + (width - left - right) * math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0),
                       24 + (height - 58) * (1 - rise(y)))
    parts = []
    for y in ticks:
        _, h = at(xs[0], y)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{h:.1f}" y2="{h:.1f}" stroke="var(--rule)"/>'
                     f'<text x="{left - 8}" y="{h + 4:.1f}" text-anchor="end">{y}{unit}</text>')
    for x in x_ticks or xs:
        w, _ = at(x, ticks[0])
        parts.append(f'<text x="{w:.1f}" y="{height - 12}" text-anchor="middle">{x:,}{x_unit}</text>')
    for place, (label, points, colour) in enumerate(sorted(lines, key=lambda line: -line[1][max(line[1])])):
        corners = [at(x, y) for x, y in points.items()]
        path = " ".join(f"{w:.1f},{h:.1f}" for w, h in corners)
        thick = 3 if label in ("quoka", "paper") else 1.6
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        parts += [f'<circle cx="{w:.1f}" cy="{h:.1f}" r="3" fill="{colour}"/>' for w, h in corners]
        parts.append(f'<circle cx="{width - right + 18}" cy="{30 + 18 * place}" r="4" fill="{colour}"/>'
                     f'<text x="{width - right + 28}" y="{34 + 18 * place}">{html.escape(label)}</text>')
    return (f'<div class="scroll"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{aria}">'
            + "".join(parts) + "</svg></div>")


def page(data):
    prefill = data["prefill"]["1"]
    names = list(dict.fromkeys(one["selector"] for one in prefill if one["selector"] != "dense"))
    tokens = sorted({one["tokens"] for one in prefill})
    speeds = {name: {one["tokens"]: one["speedup"] for one in prefill if one["selector"] == name} for name in names}
    longest = tokens[-1]
    others = records()
    grey = [(label, {x: y for x, y in points.items() if tokens[0] <= x <= longest}, "var(--past)") for label, points in others]
    limit = lambda key: html.escape(data[key].replace(" per core", ""))
    colour = lambda name: "var(--mark)" if name.startswith("quoka") else "var(--other)"
    body = [
        f"<h1>Prefill with QuoKA on {html.escape(data['cpu'])}</h1>",
        f'<p class="soft">{data["cores"]} cores; {html.escape(", ".join(data["caches"]))}. {html.escape(data["build"])}. '
        f'{data["date"]}, load {data["load"]:.1f} at the start.</p>',
        f'<p class="big">A prompt of {longest:,} tokens: <b>{figure(speeds["quoka"][longest])} times</b> as fast as dense attention '
        f'of the same library, {figure(speeds.get("quoka.balanced", speeds["quoka"])[longest])} times with the balanced preset.</p>',
        f'<p>The limits of one core, in the same run: {limit("fma_peak")} of multiply-adds in float, '
        f'{limit("read_bandwidth")} read from memory.</p>',
        "<h2>Speed of a whole prefill against its length</h2>",
        '<p class="soft">Times as fast as dense: one layer of Qwen3-4B (32 query heads, 8 KV heads of 128), chunks of 128, budget 1,024, '
        "one thread; each method in turn with dense, medians. Grey: QuoKA on machines of record.</p>",
        chart([(name, speeds[name], colour(name)) for name in names] + grey),
        table(["method"] + [f"{x:,} tokens" for x in tokens],
              [[html.escape(name)] + [figure(speeds[name][x]) + "x" for x in tokens] for name in names]
              + [[html.escape(label)] + [figure(points[x]) + "x" if x in points else "" for x in tokens] for label, points in others]),
    ]
    for threads, results in data["prefill"].items():
        if threads == "1":
            continue
        one = {(r["selector"], r["tokens"]): r["prefill_seconds"] for r in prefill}
        body += [f"<h2>With {threads} threads</h2>",
                 '<p class="soft">Times as fast as the same prefill on one thread, measured one after the other.</p>',
                 table(["method"] + [f"{x:,} tokens" for x in tokens],
                       [[html.escape(name)] + [figure(one[name, x] / next(r["prefill_seconds"] for r in results
                                                                         if r["selector"] == name and r["tokens"] == x)) + "x"
                                               for x in tokens]
                        for name in dict.fromkeys(r["selector"] for r in results)])]
    for group in data["groups"]:
        limits = any("peak" in row or "bandwidth" in row for row in group["rows"])
        body += [f"<h2>{html.escape(group['heading'])}</h2>", f'<p class="soft">{html.escape(group["note"])}; medians of five.</p>',
                 table(["", "ms"] + (["share of the limit"] if limits else []),
                       [[html.escape(row["label"]), figure(row["ms"])] + ([share(row)] if limits else []) for row in group["rows"]])]
    body.append('<p class="soft">Of the 8-bit sketch, products of bytes count as multiply-adds: more than 100&#8239;% of float\'s limit is not a mistake. '
                "How each figure is taken: bench/README.md.</p>")
    return ("<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>QuoKA on {html.escape(data['cpu'])}</title><style>{STYLE}</style></head><body>" + "\n".join(body)
            + "\n</body></html>\n")


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("--programs", type=pathlib.Path, help="folder of quoka_bench and speedup")
    parse.add_argument("--from", dest="source", type=pathlib.Path, help="a report.json, whose page is drawn again")
    parse.add_argument("--threads", type=int, default=os.cpu_count(), help="of the second prefill; 1: none")
    parse.add_argument("--out", type=pathlib.Path, default=HERE.parent / "build", help="folder of the two files")
    flags = parse.parse_args()
    if (flags.programs is None) == (flags.source is None):
        parse.error("give --programs or --from")
    if flags.threads < 1:
        parse.error(f"--threads {flags.threads}: at least 1")
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.source:
        data = json.loads(flags.source.read_text())
    else:
        data = measure(flags.programs, flags.threads)
        (flags.out / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    (flags.out / "report.html").write_text(page(data))
    print(flags.out / "report.html")


if __name__ == "__main__":
    main()
