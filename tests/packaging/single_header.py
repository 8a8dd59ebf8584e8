#!/usr/bin/env python3
"""single_header.py WORK EIGEN CXX [FLAG...]: examples/packaging/amalgamate.py, tried in the folder WORK.

The first example compiles and runs from the one header and Eigen, with no other include directory. After preprocessing,
for each instruction set that the compiler has, the one header holds the lines that the library's headers hold; with
QUOKA_TEST_SLOW=OFF in the environment, for two of them, and the example does not run.
"""
import collections
import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = SOURCE / "examples/packaging/amalgamate.py"
MORE = ["select/stages.hpp", "methods/all.hpp", "attention/diagnostics.hpp"]
LEVELS = {  # -m flags, and what every run has: the compiler's default, and the code without packets
    "x86_64": ["-march=x86-64-v2", "-march=x86-64-v3", "-march=x86-64-v3 -mavxvnni",
               "-march=x86-64-v4", "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8"],
    "aarch64": ["-march=armv8.2-a+dotprod", "-march=armv8.6-a"],
}

work, eigen, cxx, *flags = sys.argv[1:]
work = pathlib.Path(work)
compiler = [cxx, *flags, "-isystem", eigen]
failures = []


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=work, **options)


def check(holds, what):
    if not holds:
        failures.append(what)


def refused(says, *command):
    result = run(*command)
    said = result.stdout + result.stderr
    check(result.returncode != 0 and says in said, f"{command[-1]}: not refused by \"{says}\" but: {result.returncode}\n{said[-2000:]}")


def amalgamate(name, *headers):
    result = run(sys.executable, SCRIPT, "-o", work / name, *headers)
    if result.returncode != 0:
        sys.exit(f"{SCRIPT.name}: {result.stderr}")
    return (work / name).read_text(encoding="utf-8")


def lines_of(text, level, *include):
    """The lines of `text` without comments, as a multiset. Other headers, Eigen's and the compiler's, are empty files."""
    result = run(*compiler, *level.split(), *include, "-nostdinc", f"-I{work}/empty", "-DNDEBUG", "-E", "-P", "-x", "c++", "-", input=text)
    if result.returncode != 0:
        return result.stderr[-2000:]
    return collections.Counter(line.strip() for line in result.stdout.splitlines() if line.strip())


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
single = amalgamate("quoka.hpp")
check(single == amalgamate("again.hpp", "quoka.hpp"), "two runs differ")
check(single.count("#pragma once") == 1, "#pragma once is not there once")
check("#include <quoka/" not in single, "an include of the library is left")
refused("no header", sys.executable, SCRIPT, "select/none.hpp")

# The user's program, with that header beside it.
example = (SOURCE / "examples/01_first_screen.cpp").read_text(encoding="utf-8")
program = example.replace("#include <quoka/quoka.hpp>\n", '#include "quoka.hpp"\n')
check(program != example, "examples/01_first_screen.cpp no longer begins with the include")
(work / "program.cpp").write_text(program, encoding="utf-8")
# Not optimised, a third of the time: its lines are those of the library's headers, as is seen below, and tests optimise these.
few = os.environ.get("QUOKA_TEST_SLOW") == "OFF"
built = run(*compiler, "-O0", "-DQUOKA_ALLOW_UNOPTIMIZED", "-Wall", "-Wextra", "program.cpp", "-pthread",
            *(["-fsyntax-only"] if few else ["-o", "program"]))
check(built.returncode == 0 and not built.stderr, f"program.cpp does not compile without a word:\n{built.stderr[-4000:]}")
if built.returncode == 0 and not few:
    ran = run(work / "program")
    check(ran.returncode == 0 and ran.stdout == "a query head attended to 1024 of 3968 cached keys on average\n",
          f"program returned {ran.returncode} and said: {ran.stdout}{ran.stderr}")

(work / "twice.cpp").write_text('#include <quoka/base/version.hpp>\n#include "quoka.hpp"\n')
refused("quoka is here twice", *compiler, f"-I{SOURCE}/include", "-fsyntax-only", "-Wfatal-errors", "twice.cpp")
refused("header-only", *compiler, "-DQUOKA_COMPILED", "-fsyntax-only", "-Wfatal-errors", "program.cpp")

# The same code, whatever the flags.
everything = amalgamate("quoka_everything.hpp", *MORE)
check(len(everything) > len(single), "more headers are not more text")
headers = "".join(f"#include <quoka/{name}>\n" for name in ["quoka.hpp", "rows/tensor.hpp", *MORE])
for name in re.findall(r"^ *# *include <(?!quoka/)(.+)>", everything, re.MULTILINE):
    (work / "empty" / name).parent.mkdir(parents=True, exist_ok=True)
    (work / "empty" / name).touch()
levels = [""] + ["-DEIGEN_DONT_VECTORIZE", *LEVELS.get(platform.machine(), [])]
if few:
    levels = levels[:1] + levels[-1:]
compared = 0
for level in levels:
    if level.startswith("-m") and run(*compiler, *level.split(), "-E", "-x", "c++", "-", input="").returncode != 0:
        continue  # an older compiler
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, many = pool.map(lambda of: lines_of(of[0], level, of[1]), [
            ('#include "quoka_everything.hpp"\n', f"-I{work}"), (headers, f"-I{SOURCE}/include")])
    if isinstance(one, str) or isinstance(many, str):
        failures.append(f"{level}: the preprocessor says {one if isinstance(one, str) else many}")
        continue
    check(sum(many.values()) > 5000, f"{level}: only {sum(many.values())} lines were compared")
    differ = [f"  {count} too many: {line}" for line, count in (one - many).items()]
    differ += [f"  {count} too few: {line}" for line, count in (many - one).items()]
    check(not differ, "\n".join([f"{level}: {len(differ)} lines differ, such as", *differ[:10]]))
    compared += 1
check(compared >= 2, f"only {compared} instruction sets were compared")

if failures:
    sys.exit("\n".join(failures))
print(f"one header of {len(single.splitlines())} lines; the same code for {compared} sets of flags")
