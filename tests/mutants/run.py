#!/usr/bin/env python3
"""How many wrong libraries would the tests let pass?

A mutant is the library with one small mistake: a bound too small, < in place of <=, a tail that is left
out. table.txt lists them. All are compiled in at once, each behind a switch that an environment variable
sets (mutant schemata), in a copy of include/; so the library and the tests are built once, and a mutant
costs one run of the tests that reach its line. A mutant is killed if one of them fails, crashes or hangs.
What survives is equal to the original in all that is promised (the table says why), or shows a test that is
missing.

    python3 tests/mutants/run.py                          all mutants, this machine's instructions
    python3 tests/mutants/run.py --leg aarch64            those of NEON, by the tests of CI's aarch64 leg, emulated
    python3 tests/mutants/run.py --tree PATH              another checkout's headers and tests
    python3 tests/mutants/run.py --list
    python3 tests/mutants/run.py --only topk.ties attention.*
    python3 tests/mutants/run.py --check                  does every mutant still fit its source line, and compile?

What it does: copies include/ to build/mutants/LEG/tree and links the rest of the checkout beside it; writes the
switches; configures and builds the test programs (GoogleTest alone, float storage, no ggml); runs
each once and notes which tests reach which mutants (trace/); then, for each mutant, runs the tests that
reach it, the quickest programs first, until one fails. Tests beyond --budget seconds a mutant are left out, and
mutants that are said to be equal not run, unless --thorough is given; a mutant that outlives what was run is "survived", with what was left out beside it.
Results are printed and written to build/mutants/LEG/results.json. A later run begins with the test that killed
last time.

First run: 10 to 20 minutes for building on two cores; then a few seconds for a mutant that dies. It is
no part of ctest. It wants cmake, ninja, GoogleTest and nlohmann_json; --leg aarch64 wants
g++-aarch64-linux-gnu, qemu-user and googletest as well. ccache is used where there is one.

table.txt, a block for each mutant (# begins a comment):

    topk.ties  top_k.hpp          its name; the header, wherever it lies in include/, or else any
      = Index ties = k - above;        a piece of source that occurs once in it, where the next line does not
      - k - above                      what is there
      + k - above + 1                  what is there instead; without this line: nothing
      @ aarch64                        legs, if not those of the header: neon* aarch64, all others native
      ~ the later ones go anyway       why it is equal to the original: it may survive

Spaces and line breaks are of no matter. A mutant is an expression, or a whole statement with its semicolon.
Only code that is not constexpr can be switched at run time.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent

# Test programs that say nothing of the library's own code.
SKIPPED = r"^(programs|ggml)_tests$|^(odr|levels|consumer)"


def aarch64_leg():
    """The test files of .ci/run's leg aarch64, and its filter."""
    run = (HERE.parent.parent / ".ci" / "run").read_text()
    files = re.search(r'^\s*compile aarch64 "\^\((.*)\)_test\$', run, re.M).group(1)
    arithmetic = re.search(r"^arithmetic='(.*)'$", run, re.M).group(1)
    filter_ = re.search(r"^\s*GTEST_FILTER='(.*)' check aarch64", run, re.M).group(1)
    return f"^({files.replace('$arithmetic', arithmetic)})_test$", filter_


AARCH64_FILES, AARCH64_FILTER = aarch64_leg()

LEGS = {
    "native": {
        "cmake": ["-DQUOKA_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release"],
        "emulator": [],
        "gtest": [],
        "files": "",
        "filter": "-LongContext.*",
    },
    "aarch64": {
        "cmake": ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
                  "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
                  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"],
        "emulator": ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
        "gtest": ["-I/usr/src/googletest/googletest/include"],
        "files": AARCH64_FILES,
        "filter": AARCH64_FILTER,
    },
}


class Mutant:
    def __init__(self, number, name, header):
        self.number, self.name, self.header = number, name, header
        self.place = self.old = self.new = ""
        self.equal = ""  # why no test can tell
        self.legs = ["aarch64"] if header.startswith("neon") else ["native"]

    def switched(self):
        """The source that has both."""
        on = f"QUOKA_MUTANT({self.number})"
        if self.new.endswith(";"):
            return f"{{ if ({on}) {{ {self.new} }} else {{ {self.old} }} }}"
        if self.new:
            return f"({on} ? ({self.new}) : ({self.old}))"
        return f"{{ if (!{on}) {{ {self.old} }} }}"


def read_table(path):
    mutants = []
    for at, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not line.startswith(" "):
            name, header = text.split()
            mutants.append(Mutant(len(mutants), name, header))
            continue
        mutant, kind, rest = mutants[-1], text[0], text[1:].strip()
        if kind == "=":
            mutant.place = rest
        elif kind == "-":
            mutant.old = rest
        elif kind == "+":
            mutant.new = rest
        elif kind == "@":
            mutant.legs = rest.split()
        elif kind == "~":
            mutant.equal = rest
        else:
            sys.exit(f"{path}:{at}: what is this? {line}")
    names = [m.name for m in mutants]
    for name in names:
        if names.count(name) > 1:
            sys.exit(f"{path}: {name} is there twice")
    return mutants


def pattern(source):
    """A regex for a piece of source, wherever its lines are broken."""
    return r"\s+".join(re.escape(word) for word in source.split())


def places(mutant, headers, anywhere):
    """All (header, begin, end) that the mutant's lines may mean, in its header or in any."""
    found = []
    for path, text in headers.items():
        if path.name != mutant.header and not anywhere:
            continue
        if mutant.place:
            outer = [m.span() for m in re.finditer(pattern(mutant.place), text)]
        else:
            outer = [(0, len(text))]
        for begin, end in outer:
            inner = list(re.finditer(pattern(mutant.old), text[begin:end]))
            found += [(path, begin + m.start(), begin + m.end()) for m in inner]
    return found


def find_all(mutants, include):
    """Mutant to its place; those that do not fit are named."""
    headers = {path: path.read_text() for path in sorted(include.rglob("*.hpp")) + [include / "quoka/c.cpp"]}
    at, bad = {}, []
    for mutant in mutants:
        found = places(mutant, headers, False) or places(mutant, headers, True)
        if len(found) != 1:
            bad.append(f"{mutant.name}: its source is in {mutant.header} {len(found)} times: {mutant.place or mutant.old}")
        else:
            at[mutant.number] = found[0]
    # Several mutants may share a place, but not a part of one.
    names = {mutant.number: mutant.name for mutant in mutants}
    in_order = sorted(at.items(), key=lambda item: (item[1][0], item[1][1], -item[1][2]))
    for (number, (path, _, end)), (later, (later_path, later_begin, later_end)) in zip(in_order, in_order[1:]):
        if path == later_path and later_begin < end and at[number] != at[later]:
            bad.append(f"{names[later]}: its source overlaps that of {names[number]}")
    return at, bad


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_tree(tree, copy, mutants, at):
    """The checkout with mutants in its headers."""
    copy.mkdir(parents=True, exist_ok=True)
    for item in tree.iterdir():
        if item.name in ("include", "build", ".git"):
            continue
        link = copy / item.name
        if not link.is_symlink():
            link.symlink_to(item)
    changes = collections.defaultdict(list)
    for mutant in mutants:
        if mutant.number in at:
            path, begin, end = at[mutant.number]
            changes[path].append((begin, end, mutant))
    include = tree / "include"
    wanted = set()
    for path in include.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_text()
        if path in changes:
            # From the end on. Several in one place are nested.
            spots = collections.defaultdict(list)
            for begin, end, mutant in changes[path]:
                spots[begin, end].append(mutant)
            last = len(text)
            for (begin, end), here in sorted(spots.items(), reverse=True):
                assert end <= last  # find_all() has named those that overlap
                last = begin
                source = text[begin:end]
                for mutant in here:
                    mutant.old = source
                    source = mutant.switched()
                text = text[:begin] + source + text[end:]
            runtime = f'#include "{HERE}/runtime.hpp"\n'
            text = runtime + text if path.suffix == ".cpp" else text.replace("#pragma once\n", "#pragma once\n" + runtime, 1)
        target = copy / "include" / path.relative_to(include)
        wanted.add(target)
        write_if_changed(target, text)
    for path in (copy / "include").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def compiles(tree, mutants, at):
    """Does the library with all switches compile? Its parts that this machine's compiler reads."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        make_tree(tree, copy, mutants, at)
        include = copy / "include"
        all_headers = copy / "all.cpp"
        other_machines = re.compile(r"simd/isa/")  # included where there are these
        all_headers.write_text("".join(
            f"#include <{path.relative_to(include)}>\n" for path in sorted(include.rglob("*.hpp"))
            if not other_machines.search(str(path))))
        good = True
        for source, flags in ((all_headers, []), (include / "quoka/compiled.cpp", ["-DQUOKA_COMPILED"]),
                              (include / "quoka/c.cpp", ["-DQUOKA_COMPILED"])):
            command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-march=native", "-fsyntax-only", "-w",
                       "-I", include, "-isystem", "/usr/include/eigen3", *flags, source]
            good &= subprocess.run(command).returncode == 0
        return good


def run_or_exit(command, **kwargs):
    print("+", " ".join(map(str, command)), flush=True)
    done = subprocess.run(command, **kwargs)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return done


def build(args, leg, tree, work):
    """The test programs: name to path."""
    copy, folder = work / "tree", work / "build"
    folder.mkdir(parents=True, exist_ok=True)
    inject = folder / "mutants.cmake"
    write_if_changed(inject, f"link_libraries({folder}/libmutants_runtime.a)\n")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run_or_exit(["cmake", "-S", copy, "-B", folder, "-G", "Ninja", *leg["cmake"], *launcher,
                 "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG", "-DQUOKA_TEST_OPTIMIZATION=-O1", "-DQUOKA_WARNINGS=OFF",
                 "-DQUOKA_BUILD_TESTS=ON", f"-DQUOKA_TEST_FILTER={leg['files']}", "-DQUOKA_TEST_STORAGE=float", "-DQUOKA_INSTALL=OFF",
                 f"-DQUOKA_SHARED_DATA={tree.parent / 'shared' / 'data'}",
                 f"-DCMAKE_PROJECT_quoka_INCLUDE={inject}"], stdout=subprocess.DEVNULL)
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.M).group(1)
    archive, source = folder / "libmutants_runtime.a", HERE / "runtime.cpp"
    if not archive.exists() or archive.stat().st_mtime < source.stat().st_mtime:
        run_or_exit([compiler, "-std=c++20", "-O2", *leg["gtest"], "-c", source, "-o", folder / "mutants_runtime.o"])
        run_or_exit(["ar", "rcs", archive, folder / "mutants_runtime.o"])
    listed = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], capture_output=True, text=True).stdout
    programs = {}
    for target in re.findall(r"^(\S+): CXX_EXECUTABLE_LINKER", listed, re.M):
        name = target.rsplit("/", 1)[-1]
        if re.search(SKIPPED, name) or not re.search(args.tests, name):
            continue
        link = subprocess.run(["ninja", "-C", folder, "-t", "commands", "-s", target], capture_output=True, text=True)
        if "gtest" in link.stdout:
            programs[name] = target
    print(f"building {len(programs)} test programs", flush=True)
    made = subprocess.run(["ninja", "-C", folder, f"-j{args.jobs}", "-k0", "--quiet", *programs.values()])

    def is_new(target):
        if made.returncode == 0:
            return True
        dry = subprocess.run(["ninja", "-C", folder, "-n", target], capture_output=True, text=True)
        return "no work to do" in dry.stdout

    built = {name: folder / target for name, target in programs.items() if is_new(target)}
    for name in programs.keys() - built.keys():
        print(f"{name} was not built: left out", flush=True)
    return built


Test = collections.namedtuple("Test", "program name seconds")


def trace(args, leg, programs, work):
    """Mutant to the tests that reach it. Traces are kept until a program changes."""
    folder = work / "trace"
    folder.mkdir(exist_ok=True)

    def run_one(item):
        name, path = item
        out = folder / f"{name}.txt"
        if out.exists() and out.stat().st_mtime > path.stat().st_mtime:
            return name, out
        part = folder / f"{name}.part"
        environment = dict(os.environ, QUOKA_MUTANT_TRACE=str(part), GTEST_FILTER=leg["filter"])
        subprocess.run([*leg["emulator"], path], env=environment, cwd=path.parent, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=3600)
        if part.exists():
            part.rename(out)
        return name, out

    reach = collections.defaultdict(list)
    total = tests = 0
    failed = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for name, out in pool.map(run_one, programs.items()):
            if not out.exists():
                print(f"{name} wrote no trace: left out", flush=True)
                continue
            for line in out.read_text().splitlines():
                test, passed, milliseconds, *numbers = line.split()
                if passed != "1":
                    failed.append(test)
                    continue
                total, tests = total + int(milliseconds) / 1000, tests + 1
                for number in numbers:
                    reach[int(number)].append(Test(name, test, int(milliseconds) / 1000))
    if failed:
        sys.exit(f"without any mutant these fail; is what a mutant replaces a whole expression? {' '.join(failed)}")
    print(f"{tests} tests of {len(programs)} programs, {total:.0f} s in all", flush=True)
    return reach


START = {"native": 0.05, "aarch64": 0.5}  # seconds until a program runs its first test


def rounds_of(mutant, tests, start, killer):
    """[(program, names, seconds)], in the order in which to try them: what killed last time; then each program's
    quick tests, the quickest and the header's own first; then the slow ones."""
    rounds, known = [], set()
    for test in tests:
        if killer and (test.program, test.name) == tuple(killer):
            rounds.append((test.program, [test.name], test.seconds))
            known.add(test)
    stem = re.sub(r"(_impl)?\.hpp$", "", mutant.header)
    for slow in (False, True):
        programs = collections.defaultdict(list)
        for test in tests:
            if test not in known and (test.seconds > 0.5) == slow:
                programs[test.program].append(test)
        some = [(name, [t.name for t in of], start + sum(t.seconds for t in of)) for name, of in programs.items()]
        rounds += sorted(some, key=lambda r: r[2] * (0.1 if stem in r[0] else 1.0))
    return rounds


def kill(args, leg_name, mutant, tests, programs, killer):
    """What became of it."""
    leg, began = LEGS[leg_name], time.time()
    if not tests:
        return {"state": "unreached"}
    spent, run, left = 0.0, 0, 0
    for program, names, seconds in rounds_of(mutant, tests, START[leg_name], killer):
        if spent + seconds > args.budget and not args.thorough and spent > 0:
            left += len(names)
            continue
        spent += seconds
        run += len(names)
        chosen = ":".join(names)
        if len(chosen) > 100_000:
            chosen = leg["filter"]
        environment = dict(os.environ, QUOKA_MUTANT=str(mutant.number), GTEST_FILTER=chosen,
                           GTEST_FAIL_FAST="1", GTEST_BRIEF="0")
        path = programs[program]
        limit = 60 + 20 * seconds  # others may use the machine, too
        try:
            done = subprocess.run([*leg["emulator"], path], env=environment, cwd=path.parent, capture_output=True,
                                  timeout=limit)
        except subprocess.TimeoutExpired as hung:
            last = re.findall(rb"\[ RUN      \] (\S+)", hung.stdout or b"")
            return {"state": "killed", "how": "hangs", "program": program, "test": last[-1].decode() if last else "",
                    "seconds": round(time.time() - began, 1)}
        if done.returncode != 0:
            failed = re.findall(rb"\[  FAILED  \] ([^\s,]+)", done.stdout)
            last = failed[:1] or re.findall(rb"\[ RUN      \] (\S+)", done.stdout)[-1:]
            return {"state": "killed", "how": "fails" if failed else "crashes", "program": program,
                    "test": last[0].decode() if last else "", "seconds": round(time.time() - began, 1)}
    return {"state": "survived", "tests": run, "left_out": left, "seconds": round(time.time() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=pathlib.Path, default=HERE.parent.parent, help="the checkout")
    parser.add_argument("--table", type=pathlib.Path, default=HERE / "table.txt")
    parser.add_argument("--work", type=pathlib.Path, help="where to build; build/mutants of this checkout")
    parser.add_argument("--leg", choices=LEGS, default="native")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names, * as in the shell")
    parser.add_argument("--list", action="store_true", help="print the table")
    parser.add_argument("--check", action="store_true", help="find the source lines and compile the headers, and no more")
    parser.add_argument("--tests", default="", help="regex on test programs; else all")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests a mutant (60)")
    parser.add_argument("--thorough", action="store_true", help="no budget, and equal ones too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=pathlib.Path, help="where results go; WORK/LEG/results.json")
    args = parser.parse_args()

    mutants = read_table(args.table)
    chosen = [m for m in mutants if args.leg in m.legs and any(fnmatch.fnmatch(m.name, p) for p in args.only)]
    if args.list:
        for m in mutants:
            print(f"{m.name:32}{m.header:26}{' '.join(m.legs):16}{m.old}  =>  {m.new or '(nothing)'}")
        print(f"{len(mutants)} mutants")
        return 0
    tree = args.tree.resolve()
    at, bad = find_all(mutants, tree / "include")
    for line in bad:
        print(line)
    if args.check:
        print(f"{len(at)} of {len(mutants)} mutants fit")
        return 1 if bad or not compiles(tree, mutants, at) else 0

    own = HERE.parent.parent
    of_tree = own / "build" / "mutants" if tree == own else own / "build" / f"mutants_of_{tree.name}"
    work = (args.work or of_tree).resolve() / args.leg
    work.mkdir(parents=True, exist_ok=True)
    results_path = args.json or work / "results.json"
    before = json.loads(results_path.read_text())["mutants"] if results_path.exists() else {}
    make_tree(tree, work / "tree", mutants, at)
    programs = build(args, LEGS[args.leg], tree, work)
    reach = trace(args, LEGS[args.leg], programs, work)

    results, lock = dict(before), threading.Lock()

    def one(mutant):
        if mutant.number not in at:
            result = {"state": "stale"}
        elif mutant.equal and not args.thorough:
            result = {"state": "equal", "why": mutant.equal, "tests": 0, "left_out": len(reach[mutant.number])}
        else:
            last = before.get(mutant.name, {})
            killer = (last["program"], last["test"]) if last.get("state") == "killed" else None
            result = kill(args, args.leg, mutant, reach[mutant.number], programs, killer)
        result["header"] = mutant.header
        with lock:
            results[mutant.name] = result
            by = f"{result.get('program', '')} {result.get('test', '')} {result.get('how', '')}".strip()
            if result["state"] == "survived" and mutant.equal:
                result.update(state="equal", why=mutant.equal)
            if result["state"] in ("survived", "equal"):
                by = f"{result['tests']} tests, {result['left_out']} left out"
            print(f"{result['state']:10}{mutant.name:32}{result.get('seconds', 0):6.1f} s  {by}", flush=True)
            write_results()
        return result["state"]

    def write_results():
        known = {m.name for m in mutants if args.leg in m.legs}
        kept = {name: results[name] for name in sorted(results) if name in known}
        results_path.write_text(json.dumps({"leg": args.leg, "mutants": kept}, indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        states = list(pool.map(one, chosen))
    print(", ".join(f"{states.count(s)} {s}" for s in ("killed", "equal", "survived", "unreached", "stale")))
    return 0 if all(s in ("killed", "equal") for s in states) else 1


if __name__ == "__main__":
    sys.exit(main())
