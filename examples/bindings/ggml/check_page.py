"""One page of the measurements of `check`, and one that compares several models or machines.

    check_page.py check.json [--out page.html]
    check_page.py a/check.json b/check.json --out comparison.html

Pages need no network and no other file.
"""

import argparse
import html
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench"))
import report  # noqa: E402

COLOURS = ["var(--past)", "var(--other)", "var(--mark)", "#c98a1b", "#5a8f3c", "#8a63c9", "#3aa6a0", "#b0567f", "#7a7f2a", "#2f6f4f", "#a0522d"]
STYLE = report.STYLE + """
pre { background: var(--rule); padding: .6rem; overflow-x: auto } .verdict { border-left: .3rem solid var(--other); padding-left: .8rem }
.verdict.nothing { border-color: var(--mark) }
"""
VERDICTS = {"selection": "Use it", "exact": "Use exact mode", "nothing": "Do not use it here"}


def wrap(title, body):
    return ("<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>" + "\n".join(body) + "\n</body></html>\n")


def passes(data, kind):
    """The parts of a pass: contenders that did not fit in memory together were measured in turns, each with llama.cpp."""
    return [one for name, one in data.get("steps", {}).items() if name.partition(" ")[0] == kind]


def outcomes(data, kind):
    """{name: {length: outcome}}"""
    found = {}
    for part in passes(data, kind):
        for one in part["by_length"]:
            found.setdefault(one["name"], {}).setdefault(one["length"], one)
    return found


def colours(names):
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def losses(found, colour):
    """Change of perplexity by length, with intervals."""
    lengths = sorted({x for points in found.values() for x in points})
    shown = {name: points for name, points in found.items() if name != "llama.cpp"}
    ends = [end for points in shown.values() for one in points.values() for end in one["perplexity"][1:]] or [0]
    low, high = min(0, *ends) - 0.2, max(0, *ends) + 0.2
    left, right, width, height = 56, 190, 720, 300
    step = (width - left - right) / max(1, len(lengths) - 1)
    y = lambda percent: 16 + (height - 50) * (high - percent) / (high - low)
    parts = []
    tick = next(t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 1e9) if (high - low) / t <= 8)
    for i in range(int(low / tick) - 1, int(high / tick) + 2):
        if low <= i * tick <= high:
            parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(i * tick):.1f}" y2="{y(i * tick):.1f}" stroke="var(--rule)"/>'
                         f'<text x="{left - 8}" y="{y(i * tick) + 4:.1f}" text-anchor="end">{i * tick:+g} %</text>')
    for i, length in enumerate(lengths):
        parts.append(f'<text x="{left + i * step:.1f}" y="{height - 8}" text-anchor="middle">{length:,}</text>')
    taken = []
    for k, (name, points) in enumerate(shown.items()):
        shift = 4 * (k - len(shown) / 2)
        at = [(left + lengths.index(x) * step + shift, one["perplexity"]) for x, one in sorted(points.items())]
        parts.append(f'<polyline points="{" ".join(f"{w:.1f},{y(e[0]):.1f}" for w, e in at)}" fill="none" stroke="{colour[name]}" stroke-width="1.6"/>')
        for w, e in at:
            parts.append(f'<line x1="{w:.1f}" x2="{w:.1f}" y1="{y(e[1]):.1f}" y2="{y(e[2]):.1f}" stroke="{colour[name]}"/>'
                         f'<circle cx="{w:.1f}" cy="{y(e[0]):.1f}" r="3" fill="{colour[name]}"/>')
        h = y(at[-1][1][0])
        while any(abs(h - other) < 14 for other in taken):
            h += 3
        taken.append(h)
        parts.append(f'<text x="{width - right + 14}" y="{h + 4:.1f}" style="fill:{colour[name]}">{html.escape(name)}</text>')
    return (f'<div class="scroll"><svg viewBox="0 0 {width} {max(height, int(max(taken, default=0)) + 20)}" role="img" '
            f'aria-label="change of perplexity by tokens">{"".join(parts)}</svg></div>')


def needle_map(parts):
    """A row for each contender and kind, a square for each question: filled as far as it was answered rightly."""
    needles = [one for part in parts for one in part["needles"]]
    names = list(dict.fromkeys(one["name"] for one in needles))
    lengths = sorted({one["length"] for one in needles})
    width, line, left = 720, 15, 150
    block = (width - left) / max(1, len(lengths))
    parts, top = [], 34
    for i, length in enumerate(lengths):
        parts.append(f'<text x="{left + i * block:.0f}" y="12">{length:,} tokens</text>')
        parts.append(f'<text x="{left + i * block:.0f}" y="27" style="fill:var(--soft);font-size:10px">begin</text>'
                     f'<text x="{left + (i + 0.93) * block:.0f}" y="27" text-anchor="end" style="fill:var(--soft);font-size:10px">end</text>')
    for name in names:
        for kind in ("key", "values", "chain"):
            cells = {(one["length"], one["depth"]): one["right"] for one in needles if one["name"] == name and one["kind"] == kind}
            if not cells:
                continue
            parts.append(f'<text x="0" y="{top + 11}">{html.escape(name if kind == "key" else "")}</text>'
                         f'<text x="{left - 6}" y="{top + 11}" text-anchor="end" style="fill:var(--soft)">{kind}</text>')
            for (length, depth), right in cells.items():
                x = left + (lengths.index(length) + 0.9 * depth) * block
                parts.append(f'<rect class="needle" x="{x:.1f}" y="{top + 1}" width="11" height="11" fill="var(--other)" fill-opacity="{right:.2f}" '
                             f'stroke="{"var(--other)" if right == 1 else "var(--mark)"}"><title>{html.escape(name)}, {kind}, {length} tokens, '
                             f'depth {depth:.2f}: {100 * right:.0f} % right</title></rect>')
            top += line
        top += 6
    return f'<div class="scroll"><svg viewBox="0 0 {width} {top}" role="img" aria-label="needles by length and depth">{"".join(parts)}</svg></div>'


def details(found):
    rows = []
    for name, points in found.items():
        for length, one in sorted(points.items()):
            low, high = one["perplexity"][1:]
            rows.append([html.escape(name), f"{length:,}", f"{report.figure(one['seconds'])} s", f"{report.figure(one['speedup'])}x",
                         f"{one['perplexity'][0]:+.2f} % ({low:+.2f} to {high:+.2f})", f"{one['kl']:.4f}", f"{100 * one['agrees']:.1f} %",
                         f"{100 * one['right']:.0f} %"])
    return report.table(["settings", "tokens", "to first token", "speed", "perplexity", "KL", "top-1 agrees", "needles right"], rows)


def speeds(found, colour):
    return report.chart([(name, {x: one["speedup"] for x, one in points.items()}, colour[name]) for name, points in found.items()])


def page(data):
    asked, advice, model = data["asked"], data["advice"], data["asked"]["model"]
    found = outcomes(data, "measure")
    colour = colours(found)
    body = [
        f"<h1>QuoKA on {html.escape(model['file'])}</h1>",
        f'<p class="soft">{html.escape(model["description"])}: {model["layers"]} layers, {model["q_heads"]} query heads, {model["kv_heads"]} KV heads '
        f'of {model["head_dim"]}. {html.escape(data["cpu"])}, {asked["threads"]} threads; {html.escape(data["build"])}.</p>',
        f'<div class="verdict {advice["use"]}"><p class="big"><b>{VERDICTS[advice["use"]]}</b>: {html.escape(advice["contender"])}</p>'
        f'<p>{html.escape(advice["why"])}.</p>',
        f'<p>On the other half of the text: {html.escape(advice["verified"])}.</p>' if "verified" in advice else "",
        f'<p>{html.escape(advice["unsteady"])}.</p>' if "unsteady" in advice else "",
        f"<pre>{html.escape(json.dumps(advice['settings'], indent=1))}</pre>" if advice["use"] != "nothing" else "", "</div>",
        "<h2>Gain: time to first token</h2>",
        '<p class="soft">Times as fast as unmodified llama.cpp, by tokens of the prompt; ubatches of all settings took turns.</p>', speeds(found, colour),
        "<h2>Loss: perplexity</h2>",
        '<p class="soft">Change from unmodified llama.cpp up to that many tokens, from the length before; bars hold 95 % of resamples.</p>',
        losses(found, colour),
        "<h2>Needles</h2>",
        '<p class="soft">Facts in the text, by where they stand, asked for at its end. Filled: right. key: one of many alike; values: three in their order; '
        "chain: a variable that is set to another.</p>", needle_map(passes(data, "measure")),
        "<h2>All numbers</h2>", details(found),
    ]
    for kind, heading in (("refine", "With the layers that hurt left dense and more queries"), ("verify", "On the other half of the text")):
        if more := outcomes(data, kind):
            body += [f"<h2>{heading}</h2>", details(more)]
    for layers in passes(data, "layers"):
        worst = max(one["kl"] for one in layers["layers"]) or 1
        body += ["<h2>Layers</h2>", f'<p class="soft">{html.escape(layers["settings"])}: one layer selects, all others are dense. KL divergence of the logits.</p>',
                 report.table(["layer", "KL", ""], [[one["layer"], f"{one['kl']:.5f}", '<span class="bar"><i style="width:'
                              f'{100 * one["kl"] / worst:.0f}%"></i></span>'] for one in layers["layers"]])]
    body.append(f'<p class="soft">Run: {asked["ubatch"]} tokens a ubatch, {asked["cache"]} cache, {asked["samples"]} positions and '
                f'{asked["questions"]} questions at most at each length; text: {html.escape(", ".join(data["texts"]))}. Limits: {asked["limits"]["perplexity"]:g} % of '
                f'perplexity, {asked["limits"]["kl"]:g} nats of divergence, {asked["limits"]["needles"]:g} points of needles; at least {asked["limits"]["gain"]:g} times as fast as exact mode.</p>')
    return wrap(f"QuoKA on {model['file']}", body)


def comparison(all_data):
    rows, lines = [], []
    for i, data in enumerate(all_data):
        asked, advice = data["asked"], data["advice"]
        kept = outcomes(data, "verify") or outcomes(data, "measure")
        name = list(kept)[-1] if advice["use"] == "nothing" else advice["contender"]
        points = kept.get(name, {})
        label = f"{asked['model']['file']}, {data['cpu']}"
        lines.append((f"{i + 1}", {x: one["speedup"] for x, one in points.items()}, COLOURS[(i + 1) % len(COLOURS)]))
        last = points[max(points)] if points else None
        rows.append([f"{i + 1}. {html.escape(label)}", VERDICTS[advice["use"]], html.escape(name),
                     f"{max(points):,}" if points else "", f"{report.figure(last['speedup'])}x" if last else "",
                     f"{last['perplexity'][0]:+.2f} %" if last else "", f"{100 * last['right']:.0f} %" if last else ""])
    body = ["<h1>QuoKA, model by model</h1>",
            '<p class="soft">The recommended settings of each, on text that they were not chosen by, beside unmodified llama.cpp.</p>',
            report.chart([line for line in lines if line[1]]) if any(line[1] for line in lines) else "",
            report.table(["model and machine", "verdict", "settings", "tokens", "speed", "perplexity", "needles right"], rows)]
    return wrap("QuoKA, model by model", body)


def read(path):
    """The results of `check`. Ends the program with one line that names what is wrong."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        sys.exit(f"check_page.py: cannot read {path}: {error.strerror}. A result is a folder that check.sh wrote to")
    except ValueError:
        sys.exit(f"check_page.py: {path} is not JSON, so nothing that check.sh wrote")
    if not isinstance(data, dict) or "asked" not in data:
        sys.exit(f"check_page.py: {path} is nothing that check.sh wrote")
    if "advice" not in data:
        sys.exit(f"check_page.py: {path}: the check did not come to its end; start it again with the same --out, and it goes on")
    return data


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("files", nargs="+", type=pathlib.Path, help="check.json of each model or machine")
    parse.add_argument("--out", type=pathlib.Path, help="the page; by default check.html beside the first file")
    flags = parse.parse_args()
    data = [read(path) for path in flags.files]
    out = flags.out or flags.files[0].with_name("check.html" if len(data) == 1 else "comparison.html")
    text = page(data[0]) if len(data) == 1 else comparison(data)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        sys.exit(f"check_page.py: cannot write {out}: {error.strerror}")
    print(out)


if __name__ == "__main__":
    main()
