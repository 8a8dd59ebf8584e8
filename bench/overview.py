"""The picture of README.md, written as SVG without any library: speed by prompt length, and right answers."""

WIDTH, HEIGHT = 820, 330
DENSE, PAPER, RECOMMENDED, INK = "#8a8a8a", "#d0475a", "#1f6f54", "#222222"


def text(x, y, words, size=12, color=INK, anchor="start", weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def line(x1, y1, x2, y2, color="#dddddd", width=1.0):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def speeds(folder):
    """{selector: [(tokens, times as fast as dense)]}"""
    rows = [r for file in ("speedup_qwen3-4b_1_thread", "speedup_131072") for r in folder.load(file)["results"]]
    return {name: sorted((r["tokens"], r["speedup"]) for r in rows if r["selector"] == name) for name in ("quoka", "quoka.recommended")}


def draw(folder):
    answers = folder.answers()
    tasks, lengths = answers.averaged_tasks(), answers.lengths()
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']

    left, right, top, bottom = 50.0, 400.0, 64.0, 285.0
    out.append(text(left, 26, "How fast is prefill?", 16, weight="bold"))
    out.append(text(left, 45, "one layer, one core, 1,024 keys selected; dense attention = 1", 11.5))
    of = speeds(folder)
    lengths_shown, most = [n for n, _ in of["quoka"]], 50.0
    y = lambda value: bottom - (bottom - top) * value / most  # noqa: E731
    step = (right - left) / len(lengths_shown)
    for value in range(0, 51, 10):
        out += [line(left, y(value), right, y(value)), text(left - 6, y(value) + 4, f"{value}x", 11, anchor="end")]
    for i, n in enumerate(lengths_shown):
        middle = left + step * (i + 0.5)
        out.append(text(middle, bottom + 18, f"{n:,}", 11, anchor="middle"))
        for name, color, at in (("quoka", PAPER, middle - 34), ("quoka.recommended", RECOMMENDED, middle + 1)):
            speed = dict(of[name])[n]
            out.append(f'<rect x="{at:.1f}" y="{y(speed):.1f}" width="33" height="{bottom - y(speed):.1f}" fill="{color}"/>')
            out.append(text(at + 16.5, y(speed) - 5, f"{speed:.1f}x", 11, color, "middle", "bold"))
    out.append(text((left + right) / 2, bottom + 36, "prompt, tokens", 11, anchor="middle"))
    out.append(line(left, y(1), right, y(1), DENSE, 2))

    left = 470.0
    out.append(text(left, 26, "Are the answers still right?", 16, weight="bold"))
    out.append(text(left, 45, "six retrieval tasks of RULER, 1/8 of the past selected", 11.5))
    bars = (("dense attention", "dense", DENSE), ("the paper's defaults", "quoka", PAPER), ("recommended", "quoka.recommended", RECOMMENDED))
    for i, (label, name, color) in enumerate(bars):
        share, at = answers.share(name, "0.125", tasks, lengths), 84 + 68 * i
        out.append(text(left, at, label, 13, color, weight="bold"))
        out.append(f'<rect x="{left}" y="{at + 8}" width="270" height="24" fill="#f0f0f0"/>')
        out.append(f'<rect x="{left}" y="{at + 8}" width="{270 * share:.1f}" height="24" fill="{color}"/>')
        out.append(text(left + 278, at + 25, f"{100 * share:.1f} %", 13, color, weight="bold"))
    out.append(text(left, bottom + 18, f"small models trained for the tasks, {min(lengths):,} to {max(lengths):,} tokens", 11))
    return "\n".join([*out, "</svg>"]) + "\n"
