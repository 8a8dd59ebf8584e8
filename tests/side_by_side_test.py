"""bench/side_by_side where no other engine is installed: layers are measured, nothing twice, and no two machines in one file."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / "bench" / "side_by_side"
sys.path.insert(0, str(HERE))


def operators(out, *flags, fails=False):
    environment = os.environ | {"GGML_DIR": "/no/such/folder"}
    done = subprocess.run([sys.executable, "-B", HERE / "operators.py", "--out", out, "--smoke", "--seconds", "0", *flags], env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr


def measures_what_is_there(folder):
    out = folder / "results.json"
    data = operators(out)
    assert "without LlamaCpp: no libggml-base" in data, data
    content = json.loads(out.read_text())
    (row,) = content["operators"]
    assert (row["shape"], row["queries"], row["past"], row["threads"], row["batch"]) == ("9/3/64", 8, 64, 1, 1), row
    exact = {name: of for name, of in row["entries"].items() if content["kinds"][name] == "exact"}
    assert len(exact) == 6, exact.keys()
    for name, of in exact.items():
        first, median, third = of["ms"]
        assert 0 < first <= median <= third, (name, of)
    assert exact["exact float"]["error"] < 1e-5 < exact["exact int8"]["error"] < 2e-2, exact
    assert content["versions"]["Exact"].startswith("quoka "), content["versions"]
    assert content["machine"]["cpu"] and "commit" in row

    assert "queries over" not in operators(out), "a row that is there was measured again"
    assert json.loads(out.read_text())["operators"] == [row]
    operators(out, "--entries", "exact float")
    again = json.loads(out.read_text())["operators"][0]["entries"]
    assert again["exact int8"] == row["entries"]["exact int8"] and again.keys() == row["entries"].keys()
    assert "'nobody'" in operators(out, "--entries", "nobody", fails=True)

    content["machine"]["cpu"] = "another"
    out.write_text(json.dumps(content))
    assert "is of another machine: another" in operators(out, fails=True)
    assert json.loads(out.read_text()) == content, "a refused file was changed"


def batches_are_apart():
    """One sequence's rows do not count for another's: rows are compared in all of their places."""
    import numpy as np
    from layer import Layer, Shape

    layer = Layer(Shape(4, 2, 8, 3, 16, batch=3))
    right = np.zeros_like(layer.q)
    for place in np.ndindex(right.shape[:3]):
        right[place] = layer.in_double(*place)
    assert layer.error(right) < 1e-6
    for axis in range(3):
        assert layer.error(np.roll(right, 1, axis)) > 0.1, axis
    by_token = right.transpose(0, 2, 1, 3).reshape(-1)
    assert np.array_equal(layer.by_heads(by_token), right)


def ik_llama(folder):
    """llama-sweep-bench's lines are added up to prompts; what is no build, or does not measure all, is said."""
    import types

    from models import by_ik_llama, named

    flags = types.SimpleNamespace(ik_llama=folder / "ik", threads=3, quiet=False)
    (folder / "ik/build/bin").mkdir(parents=True)
    program = folder / "ik/build/bin/llama-sweep-bench"
    try:
        by_ik_llama(flags, "model.gguf", "ik_llama.cpp:bf16")
        raise AssertionError("a folder without the program was taken")
    except OSError as error:
        assert "no llama-sweep-bench in" in str(error), error
    # Its CPU time is far above the clock's resolution.
    program.write_text(f"#!{sys.executable}\nimport sys, time\nwhile time.process_time() < 0.3: pass\n"
                       "print('a word before', file=sys.stderr)\nassert sys.argv[sys.argv.index('-ctk') + 1] == 'bf16' and sys.argv[sys.argv.index('-t') + 1] == '3'\n"
                       "until = int(sys.argv[sys.argv.index('-c') + 1])\n"
                       "for at in range(0, until, 512):\n"
                       "    print('{\"n_kv_max\": %d, \"n_kv\": %d, \"t_pp\": %f, \"t_tg\": 0.5 }' % (until, at, 1 + at / 512), file=sys.stderr)\n")
    program.chmod(0o755)
    (name, found), = by_ik_llama(flags, "model.gguf", "ik_llama.cpp:bf16").items()
    assert name == named("ik_llama.cpp:bf16") == "ik_llama.cpp bf16"
    assert {n: s for n, (s, _) in found.items()} == {2048: 1 + 2 + 3 + 4, 8192: 136}, found
    assert found[2048][1] > 0.015 and abs(found[8192][1] / found[2048][1] / 13.6 - 1) < 0.1, found
    program.write_text(program.read_text().replace("range(0, until", "range(512, until"))
    try:
        by_ik_llama(flags, "model.gguf", "ik_llama.cpp:bf16")
        raise AssertionError("a ubatch is missing, and nobody says so")
    except RuntimeError as error:
        assert "measured 15 ubatches" in str(error), error


def summaries():
    from models import change, share_of_square
    from record import quartiles

    assert quartiles([3.0, 1.0, 2.0]) == [1.5, 2.0, 2.5] and quartiles([4.0]) == [4.0, 4.0, 4.0]
    assert share_of_square((2048, 3 * 2048 + 2 * 2048**2), (8192, 3 * 8192 + 2 * 8192**2)) == 1.0
    assert change([1.0, 2.0], [1.0, 2.0]) == [0.0, 0.0, 0.0] and change([1.1] * 3, [1.0] * 3) == [10.52, 10.52, 10.52]
    mean, low, high = change([1.0, 3.0] * 50, [1.0, 1.0] * 50)
    assert mean == 171.83 and low < mean < high, (low, high)
    assert share_of_square((2, 2 * 6 + 4), (4, 4 * 6 + 16)) == 0.4
    assert share_of_square((2048, 1.0), (8192, 4.0)) == 0.0


with tempfile.TemporaryDirectory() as folder:
    measures_what_is_there(pathlib.Path(folder))
    ik_llama(pathlib.Path(folder))
batches_are_apart()
summaries()
