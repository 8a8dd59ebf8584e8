"""examples/bindings/ggml/check_page.py's pages, read back as a browser shows them.

    check_page_test.py CHROMIUM

Every number of the JSON is on the page, needles are filled as they were answered, nothing asks for another file.
"""

import pathlib
import re
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "bindings" / "ggml")]
import check_page  # noqa: E402
import report_test  # noqa: E402

PROBE = report_test.PROBE.replace("const pre =", """seen.needles = Array.from(document.querySelectorAll('.needle'),
  x => [x.querySelector('title').textContent, x.getAttribute('fill-opacity'), ...box(x)]);
seen.verdict = document.querySelector('.verdict')?.innerText; seen.code = document.querySelector('pre')?.innerText;
const pre =""")


def one(name, length, i):
    return {"name": name, "length": length, "seconds": 1.5 + i, "speedup": 1.01 + i, "perplexity": [0.11 + i, -0.22 - i, 0.33 + i],
            "needles": [-1, -2, 0], "kl": 0.0011 * (i + 1), "agrees": 0.901 + i / 100, "right": 0.51 + i / 10}


def made_up(model, use="selection"):
    names = ["llama.cpp", "exact", "paper <64>"]
    by_length = [one(name, length, i + k / 2) for i, name in enumerate(names) for k, length in enumerate((512, 2000))]
    needles = [{"name": name, "length": 2000, "kind": kind, "depth": 0.25 + k / 4, "right": round((i + k) / 5, 2)}
               for i, name in enumerate(names) for k, kind in enumerate(("key", "values", "chain"))]
    verify = [one(name, 2000, 0.7 + i) for i, name in enumerate(("llama.cpp", "paper <64>"))]
    return {
        "asked": {"model": {"file": model, "description": "a model & more", "layers": 3, "q_heads": 8, "kv_heads": 2, "head_dim": 77},
                  "threads": 5, "ubatch": 256, "cache": "f16", "samples": 99, "questions": 12, "limits": {"perplexity": 1, "kl": 0.05, "needles": 5, "gain": 1.05}},
        "cpu": "A <made up> CPU", "build": "g++ 99", "texts": ["a.txt", "b.txt"],
        "steps": {"measure": {"by_length": by_length, "needles": needles},
                  "layers": {"settings": "paper <64>", "layers": [{"layer": i, "kl": 0.01 * (i + 1)} for i in range(3)]},
                  "verify": {"by_length": verify, "needles": []}},
        "advice": {"use": use, "why": "because <so>", "contender": "paper <64>", "settings": {"mode": "paper", "budget": 64}, "verified": "kept"},
    }


def main():
    report_test.PROBE = PROBE
    measured = made_up("tiny.gguf")
    page = check_page.page(measured)
    assert not re.search(r"https?:|src=|href=|url\(", page), "the page asks for another file"
    for width in (1200, 500):
        seen = report_test.browse(sys.argv[1], page, width)
        rows = seen["rows"]
        for x in measured["steps"]["measure"]["by_length"] + measured["steps"]["verify"]["by_length"]:
            low, high = x["perplexity"][1:]
            cells = [x["name"], f"{x['length']:,}", f"{x['seconds']:.2f} s", f"{x['speedup']:.2f}x",
                     f"{x['perplexity'][0]:+.2f} % ({low:+.2f} to {high:+.2f})", f"{x['kl']:.4f}", f"{100 * x['agrees']:.1f} %", f"{100 * x['right']:.0f} %"]
            assert cells in rows, (cells, rows)
        assert ["2", "0.03000", ""] in rows and [w for w, _ in seen["bars"]] == sorted(w for w, _ in seen["bars"]), (rows, seen["bars"])
        assert len(seen["lines"]) == 3 + 2, "speed of three, loss of two"
        needles = {title: fill for title, fill, *_ in seen["needles"]}
        assert len(needles) == 9 and all(w > 4 and h > 4 for *_, w, h in seen["needles"]), seen["needles"]
        for x in measured["steps"]["measure"]["needles"]:
            title = f"{x['name']}, {x['kind']}, 2000 tokens, depth {x['depth']:.2f}: {100 * x['right']:.0f} % right"
            assert needles[title] == f"{x['right']:.2f}", (title, needles)
        assert "Use it: paper <64>" in seen["verdict"] and "because <so>" in seen["verdict"] and "kept" in seen["verdict"], seen["verdict"]
        assert '"budget": 64' in seen["code"], seen["code"]
        for words in ("tiny.gguf", "A <made up> CPU", "a model & more", "5 threads", "a.txt, b.txt", "95 %"):
            assert words in seen["body"], (words, seen["body"][:600])
        assert seen["width"] <= seen["window"] and seen["requests"] == 0, seen
    refused = check_page.page(made_up("tiny.gguf", "nothing"))
    assert "Do not use it here" in refused and "<pre>" not in refused, "no settings where none are recommended"

    several = check_page.comparison([measured, made_up("other.gguf", "exact"), made_up("third.gguf", "nothing")])
    seen = report_test.browse(sys.argv[1], several, 1200)
    assert [row[1] for row in seen["rows"][1:]] == ["Use it", "Use exact mode", "Do not use it here"], seen["rows"]
    assert seen["rows"][1] == ["1. tiny.gguf, A <made up> CPU", "Use it", "paper <64>", "2,000", "2.71x", "+1.81 %", "68 %"], seen["rows"][1]

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "check.json"
        for text, says in (('{"asked": {}}', "goes on"), ("{", "is not JSON"), ("[1]", "nothing that check.sh wrote"),
                           ("{}", "nothing that check.sh wrote"), (None, "No such file")):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
            try:
                check_page.read(path)
                raise AssertionError(f"{text} has no page")
            except SystemExit as refused:
                assert says in str(refused) and str(path) in str(refused), refused


if __name__ == "__main__":
    main()
