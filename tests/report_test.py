"""bench/report.py's page, read back as a browser shows it: every number, every line of the chart, at a phone's width.

    report_test.py CHROMIUM

Chromium runs without a window and without a network; what a script at the page's end sees is compared with the JSON.
"""

import html
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))
import report  # noqa: E402

PROBE = """<script>
const text = cells => Array.from(cells, cell => cell.innerText.trim());
const box = x => { const r = x.getBoundingClientRect(); return [r.width, r.height]; };
const seen = {
  rows: Array.from(document.querySelectorAll('tr'), row => text(row.children)),
  headings: text(document.querySelectorAll('h2')), body: document.body.innerText,
  lines: Array.from(document.querySelectorAll('polyline'), box), bars: Array.from(document.querySelectorAll('.bar i'), box),
  width: document.documentElement.scrollWidth, window: window.innerWidth, requests: performance.getEntriesByType('resource').length,
};
const pre = document.createElement('pre');
pre.id = 'probe';
pre.textContent = JSON.stringify(seen);
document.body.append(pre);
</script>"""

TOKENS = [2048, 8192, 32768]


def made_up():
    """A report in which no number is there twice."""
    speeds = {"quoka": [1.11, 4.22, 13.3], "quoka.balanced": [1.14, 4.44, 12.6], "sparq": [0.71, 2.88, 6.99]}
    prefill = [{"selector": "dense", "tokens": x, "speedup": 1.0, "prefill_seconds": 2.0 * x / 2048} for x in TOKENS]
    prefill += [{"selector": name, "tokens": x, "speedup": y, "prefill_seconds": x / 2048 / y}
                for name, ys in speeds.items() for x, y in zip(TOKENS, ys)]
    two = [{**one, "prefill_seconds": one["prefill_seconds"] / (1.5 + 0.1 * i)} for i, one in enumerate(prefill[:6])]
    return {
        "cpu": "A <made up> CPU & more", "cores": 6, "build": "g++ 99.1, 16 lanes", "fma_peak": "123.4 GFLOP/s per core",
        "read_bandwidth": "56.7 GB/s per core", "caches": ["L1 data 48 KiB", "L2 unified 777 KiB"], "load": 0.3, "date": "2026-01-02",
        "prefill": {"1": prefill, "6": two},
        "groups": [
            {"heading": "Attention", "note": "one core", "rows": [
                {"label": "dense chunk", "name": "a", "ms": 161.616, "peak": 0.87, "bandwidth": 0.02},
                {"label": "token", "name": "b", "ms": 9.0909, "peak": 0.11, "bandwidth": 0.76},
                {"label": "sketch", "name": "c", "ms": 0.030303, "peak": 2.61}]},
            {"heading": "Selection", "note": "all", "rows": [{"label": "quest", "name": "d", "ms": 5151.51}]},
        ],
    }


def browse(chromium, page, width):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "page.html"
        path.write_text(page.replace("</body>", PROBE + "</body>"))
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
             f"--window-size={width},900", "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found, f"no probe in {done.stdout[-500:]!r}, {done.stderr[-2000:]!r}"
    return json.loads(html.unescape(found[1]))


def main():
    measured = made_up()
    page = report.page(measured)
    assert not re.search(r"https?:|src=|href=|url\(", page), "the page asks for another file"
    for width in (1200, 500):  # no window of headless Chromium is narrower than 500
        seen = browse(sys.argv[1], page, width)
        rows = {row[0]: row[1:] for row in seen["rows"]}
        assert [row[0] for row in seen["rows"]].count("quoka") == 2, rows
        first = {row[0]: row[1:] for row in reversed(seen["rows"])}  # of one thread
        for name, ys in {"quoka": [1.11, 4.22, 13.3], "quoka.balanced": [1.14, 4.44, 12.6], "sparq": [0.71, 2.88, 6.99]}.items():
            assert [float(cell.rstrip("x")) for cell in first[name]] == ys, (name, first[name])
        assert rows["dense"] == ["1.50x", "1.60x", "1.70x"], rows["dense"]
        assert rows["quoka"] == ["1.80x", "1.90x", "2.00x"], rows["quoka"]
        assert rows["dense chunk"][0] == "162" and "87" in rows["dense chunk"][1] and "multiply-adds" in rows["dense chunk"][1], rows
        assert rows["token"][0] == "9.09" and "76" in rows["token"][1] and "reading" in rows["token"][1], rows
        assert rows["sketch"][0] == "0.0303" and "261" in rows["sketch"][1], rows
        assert rows["quest"] == ["5,152"], rows
        for words in ("A <made up> CPU & more", "6 cores", "L2 unified 777 KiB", "13.3 times", "12.6 times", "123.4 GFLOP/s of",
                      "56.7 GB/s read", "load 0.3", "With 6 threads"):
            assert words in seen["body"], (words, seen["body"][:600])
        drawn = 3 + len([1 for _, points in report.records() if any(TOKENS[0] <= x <= TOKENS[-1] for x in points)])
        assert len(seen["lines"]) == drawn and all(w > 100 for w, _ in seen["lines"]), seen["lines"]
        assert len(seen["bars"]) == 3 and seen["bars"][1][0] < seen["bars"][0][0] < seen["bars"][2][0], seen["bars"]
        assert seen["width"] <= seen["window"], f"{seen['width']} wide in a window of {seen['window']}"
        assert seen["requests"] == 0, seen["requests"]


if __name__ == "__main__":
    main()
