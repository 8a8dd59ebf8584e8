"""examples/bindings/ggml/estimate.py on files made here: its numbers, and its sentences on weights that llama.cpp
multiplies slowly."""

import contextlib
import io
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
ESTIMATE = ROOT / "examples" / "bindings" / "ggml" / "estimate.py"
Q4_0, Q4_1, Q5_1, Q8_0 = 2, 3, 7, 8
KEYS = {"general.architecture": "llama", "llama.block_count": 2, "llama.attention.head_count": 4, "llama.embedding_length": 64, "llama.context_length": 4096}


def gguf(path, tensors, given=KEYS):
    """A header alone: tensors [(name, sizes, type)]."""
    text = lambda x: struct.pack("<Q", len(x)) + x.encode()  # noqa: E731
    word = lambda x: struct.pack("<IIQ", 9, 4, len(x)) + struct.pack(f"<{len(x)}I", *x) if isinstance(x, list) else struct.pack("<II", 4, x)  # noqa: E731
    keys = b"".join(text(key) + (struct.pack("<I", 8) + text(x) if isinstance(x, str) else x if isinstance(x, bytes) else word(x)) for key, x in given.items())
    listed = b"".join(text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, 0) for name, sizes, kind in tensors)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(given)) + keys + listed)
    return path


def said(model, *flags):
    done = subprocess.run([sys.executable, ESTIMATE, model, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(model, *flags):
    done = subprocess.run([sys.executable, ESTIMATE, model, *flags], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def refusal_here(model):
    """The same in this process, which is sooner. Empty: it is not refused."""
    sys.path.insert(0, str(ESTIMATE.parent))
    import estimate
    with unittest.mock.patch.object(sys, "argv", ["", str(model)]), contextlib.redirect_stdout(io.StringIO()):
        try:
            estimate.main()
        except SystemExit as end:
            return end.code
    return ""


def main():
    with tempfile.TemporaryDirectory() as folder:
        def model(*parts):
            return gguf(pathlib.Path(folder) / "model.gguf", [(f"blk.0.part{i}.weight", (64, columns), kind) for i, (columns, kind) in enumerate(parts)])

        slow = said(model((100, Q4_1)), "--weights")
        assert "weights are Q4_1" in slow and "4.4 times as long" in slow and "Q4_0" in slow, slow
        assert slow in said(model((100, Q4_1)))  # the whole estimate ends with it
        assert said(model((100, Q4_0)), "--weights") == ""
        assert said(model((95, Q4_0), (5, Q4_1)), "--weights") == ""  # 1.17 times as long
        mixed = said(model((40, Q4_0), (60, Q8_0)), "--weights")  # 0.4 + 0.6 * 1.9
        assert "weights are Q8_0" in mixed and "1.5 times as long" in mixed, mixed
        assert said(model((40, Q4_1), (60, Q5_1)), "--weights") == ""  # of most of it no rate is known
        assert said(model((60, Q4_1), (40, Q5_1)), "--weights") != ""
        everything = said(model((100, Q4_0)))
        assert "4,096" in everything and "Its weights" not in everything, everything
        assert "exact mode" not in everything, everything  # nearly all of the time is attention
        exact = "Up to 4,096 tokens selection is less than a tenth faster than exact attention"
        assert exact in said(model((100_000, Q4_0)))  # nearly none of it is
        assert exact in said(model((100, Q4_0)), "--budget", "4096")
        longer = said(model((100, Q4_0)), "--budget", "2048")
        assert "Up to 2,048 tokens selection" in longer, longer
        # Of 4,096 tokens: attention's share, that of layers that see everything, then times as fast.
        def row(file, *flags):
            line = next(line.split() for line in said(file, *flags).splitlines() if line.split()[0] == "4,096")
            return [float(cell.rstrip("x")) for cell in line[1:] if cell != "%"]

        # A token's multiply-adds with weights of a rate of 3.9, and those of attention at half of the length.
        weights, attention = 20_000 * 64 / 3.9, 2048 * 2 * 4 * 32
        share, grows, dense, selects, most = row(model((20_000, Q4_0)))
        assert abs(share - 100 * attention / (weights + attention)) < 0.51 and grows == share, (share, grows)
        assert abs(most - (weights + attention) / weights) < 0.006 and dense < selects < most, (dense, selects, most)
        gemma = gguf(pathlib.Path(folder) / "gemma.gguf", [("blk.0.part.weight", (64, 20_000), Q4_0)],
                     {key.replace("llama", "gemma2"): "gemma2" if x == "llama" else x for key, x in KEYS.items()} | {"gemma2.attention.sliding_window": 64})
        assert "2 layers, 1 of them see the whole text, others 64 tokens;" in said(gemma)
        share, grows, *_, most = row(gemma)
        assert grows < share and abs(grows - share * 2048 / (2048 + 63.5)) < 2, (share, grows)  # windows of 64 cost little
        windows = 63.5 * 4 * 32
        assert abs(most - (weights + attention / 2 + windows) / (weights + windows / 3.4)) < 0.006, most
        # A share is of every past: at 4,096 tokens a quarter is less than 1,024 keys, which is all of the first quarter.
        def selecting(budget):
            return row(model((100, Q4_0)), "--budget", budget)[3]

        assert selecting("0.25") == selecting(".25") > selecting("1024") > selecting("4096") >= selecting("1.0")
        assert exact in said(model((100, Q4_0)), "--budget", "1.0")
        # A file is not trusted: any value of any key is read, or refused in one line.
        path = pathlib.Path(folder) / "model.gguf"
        in_lists = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000
        for key in [*KEYS, *(f"llama.attention.{name}" for name in ("head_count_kv", "key_length", "value_length", "sliding_window", "sliding_window_pattern")),
                    "llama.expert_count", "llama.expert_used_count", "split.count"]:
            for value in ("text", 0, 1, 2**32 - 1, [], [0, 0], [3], [4, 4], in_lists):
                gguf(path, [("blk.0.part.weight", (64, 100), Q4_0)], KEYS | {key: value})
                line = refusal_here(path)
                assert isinstance(line, str) and "\n" not in line, (key, value, line)
        assert "has a matrix" in refused(gguf(path, [("blk.0.part.weight", (64, 0), Q4_0)]))
        assert "a list in it is of lists" in refused(gguf(path, [], KEYS | {"x": in_lists}))
        assert "first of 2 files" in refused(gguf(path, [("blk.0.part.weight", (64, 100), Q4_0)], KEYS | {"split.count": 2}))
        for budget in ("1", "15", "0", "1.5", "-3", "x"):
            assert f"--budget: {budget} is not a budget: give a count of keys from 16" in refused(model((100, Q4_0)), f"--budget={budget}")


if __name__ == "__main__":
    main()
