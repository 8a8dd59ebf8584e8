#!/usr/bin/env python3
"""How many wrong operators would the tests let pass?

    mutants.py BUILD [N [SEED]]    N mutants (40) drawn by SEED (1): each is one small mistake in a copy of the sources, built as BUILD builds
    mutants.py --list [N [SEED]]

BUILD: a build folder of CMake's that has built the target onnxruntime-quoka with Ninja. tests/mutants/generate.py makes the
mutants. One is killed if a test fails. EQUAL has those that no test can tell from the original, with the reason.
Wants what test.sh installs; half a minute a mutant.
"""
import os
import pathlib
import random
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent
sys.path.insert(0, str(HERE.parents[3] / "tests" / "mutants"))
import generate  # noqa: E402

EQUAL = {}  # key: why


def build(folder, source_folder, compile_, link):
    """The library of these sources, or None if they do not compile."""
    words = [*shlex.split(compile_)[:-1], "-O0", f"{source_folder}/operator.cpp"]  # it compiles in half the time
    output = words[words.index("-o") + 1]
    words[words.index("-o") + 1] = f"{source_folder}/operator.o"
    if subprocess.run(words, cwd=folder, capture_output=True).returncode:
        return None
    library = f"{source_folder}/mutant.so"
    linked = link.replace(output, f"{source_folder}/operator.o")
    linked = linked.replace("examples/bindings/onnxruntime/libonnxruntime-quoka.so", library)
    linked = linked.replace(" libonnxruntime-quoka.so", f" {library}")
    subprocess.run(linked, shell=True, cwd=folder, check=True)
    return library


def passes(library):
    try:
        done = subprocess.run([sys.executable, "-B", str(HERE / "test_operator.py"), "--failfast"], capture_output=True,
                              timeout=600, env=os.environ | {"QUOKA_ONNXRUNTIME_LIBRARY": library})
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main():
    listed = "--list" in sys.argv
    arguments = [x for x in sys.argv[1:] if x != "--list"]
    folder = None if listed else pathlib.Path(arguments.pop(0))
    count, seed = [int(x) for x in arguments] + [40, 1][len(arguments):]
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(SOURCE.glob("*.[hc]pp"))}
    possible = [m for name, text in texts.items() for m in generate.of_header(name, text) if m.kind != "returned"]
    drawn = random.Random(seed).sample(possible, min(count, len(possible)))
    print(f"{len(drawn)} of {len(possible)} mutants", flush=True)
    if listed:
        for m in drawn:
            print(f"{m.key} {m.header}:{m.line} {m.operator}\n    - {generate.squeeze(m.old)}\n    + {generate.squeeze(m.new)}")
        return
    commands = subprocess.run(["ninja", "-C", folder, "-t", "commands", "onnxruntime-quoka"], check=True,
                              capture_output=True, text=True).stdout.splitlines()
    compile_, link = ([one for one in commands if word in one][-1] for word in ("operator.cpp.o -c", "libonnxruntime-quoka.so"))
    states = {}
    for m in [None, *drawn]:
        if m is not None and m.key in EQUAL:
            continue
        with tempfile.TemporaryDirectory() as copy:
            for name, text in texts.items():
                if m is not None and name == m.header:
                    text = generate.replaced(text, m)
                pathlib.Path(copy, name).write_text(text, encoding="utf-8")
            library = build(folder, copy, compile_, link)
            state = "no C++" if library is None else "alive" if passes(library) else "killed"
        if m is None:
            if state != "alive":
                sys.exit(f"without a mutant the tests fail or do not compile: {state}")
            continue
        states[m.key] = state
        print(f"{state:7s} {m.key} {m.header}:{m.line} {m.operator}", flush=True)
        if state == "alive":
            print(f"    - {generate.squeeze(m.old)}\n    + {generate.squeeze(m.new)}", flush=True)
    alive = list(states.values()).count("alive")
    sys.exit(f"{alive} of {len(drawn)} are alive" if alive else 0)


if __name__ == "__main__":
    main()
