#!/usr/bin/env python3
"""How many wrong libraries would pass the tests?

A mutant is the library with one small mistake: a bound too small, < in place of <=, a statement that is left out.
generate.py makes them of the headers (21,500 for all); a seed draws some. The drawn ones are all compiled in at once, each
behind a switch that an environment variable sets (mutant schemata), in a copy of include/; so the library and the
tests are built once, and a mutant costs one run of the tests that reach its line. A mutant is killed if one of them
fails, crashes or hangs. A survivor is equal to the original in all that is promised (equal.txt says
why), or shows that a test is missing.

    python3 tests/mutants/run.py                               200 mutants of all headers, this machine's instructions
    python3 tests/mutants/run.py --draw 40 --seed 7            others
    python3 tests/mutants/run.py --headers 'rows/*' --draw 0   all of some headers that fit beside each other
    python3 tests/mutants/run.py --changed origin/main         of lines that differ from there
    python3 tests/mutants/run.py --only KEY...                 these, drawn before
    python3 tests/mutants/run.py --list ...                    prints what would be drawn

Each operator is drawn as often as the others, then one of its mutants. If mutants share a part of
the source, one of them is taken. Those that do not compile are named and left out.

It copies include/ to build/mutants/tree and links the rest of the checkout beside it, writes
the switches and checks the syntax. It builds the tests of the headers' rooms and of later ones
(GoogleTest alone, float storage, no ggml), or those that --tests names. It runs each once and notes
which tests reach which mutants (trace/). Then, for each mutant, it runs the tests that reach it,
the quickest programs first, until one fails. Tests beyond --budget seconds a mutant are left out,
and mutants that are said to be equal not run; a mutant that outlives what was run is alive, with what
was left out beside it. Results are printed and written to build/mutants/results.json. The exit
status is 3 if a mutant is alive or unreached, and 1 where they could not be run.

On two cores building takes 10 to 20 minutes; then a mutant that dies takes a few seconds. It is not
a part of ctest. It needs cmake, ninja, GoogleTest and nlohmann_json; ccache is used where there is one.

equal.txt has a line for each mutant that no test can tell from the original: its key, its header, and why. A key is made
of the mutant's own text and function, so it stays where lines move, and is void once the statement changes.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time

import generate

HERE = pathlib.Path(__file__).resolve().parent

# Test programs that do not test the library's own code.
SKIPPED = r"^(programs|ggml)_tests$|^(odr|levels|consumer)"
FILTER = "-LongContext.*"  # of GoogleTest

# Rooms in the order in which they include each other. A room's tests reach earlier ones.
ROOMS = ["base", "simd", "runtime", "rows", "kernels", "select", "attention", "layer", "methods", "engine", "c"]


def all_mutants(include):
    """The mutants of every source of the library that this machine compiles."""
    other = r"simd/isa/neon" if platform.machine() == "x86_64" else r"simd/isa/(avx|sse)"
    library = include / "quoka"
    found = []
    for path in sorted(library.rglob("*.hpp")) + [library / "c.cpp"]:
        name = str(path.relative_to(library))
        if not re.search(other, name):
            found += generate.of_header(name, path.read_text())
    return found


def read_equal(path):
    """Key to the reason why no test can tell."""
    lines = [line.split(None, 2) for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 3:
            sys.exit(f"{path}: a key, a header and a reason belong on a line, not {' '.join(line)}")
    return {key: reason for key, _, reason in lines}


def changed_lines(tree, base):
    """Header to the lines that differ from the commit `base`."""
    text = subprocess.run(["git", "-C", tree, "diff", "-U0", base, "--", "include"], capture_output=True, text=True,
                          check=True).stdout
    lines, header = collections.defaultdict(set), ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            header = line.removeprefix("+++ b/include/quoka/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines[header].update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return lines


def lines_of(mutant):
    return range(mutant.line, mutant.line + mutant.old.count("\n") + 1)


def draw(mutants, count, seed):
    """`count` mutants that can be compiled in together: any operator, then any of its mutants. If
    `count` is 0, as many as can be."""
    generator = random.Random(seed)
    by_operator = collections.defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    for of_one in by_operator.values():
        generator.shuffle(of_one)
    taken, spans = [], collections.defaultdict(list)
    while by_operator and (count == 0 or len(taken) < count):
        operator = generator.choice(sorted(by_operator))
        mutant = by_operator[operator].pop()
        if not by_operator[operator]:
            del by_operator[operator]
        here = (mutant.begin, mutant.end)
        if all(here == other or here[1] <= other[0] or other[1] <= here[0] for other in spans[mutant.header]):
            # Beside each other on a place, or apart. A statement's switch is not an expression's.
            if here not in spans[mutant.header] or all(
                    m.kind != "statement" and mutant.kind != "statement" or m.kind == mutant.kind
                    for m in taken if m.header == mutant.header and (m.begin, m.end) == here):
                taken.append(mutant)
                spans[mutant.header].append(here)
    taken.sort(key=lambda m: (m.header, m.begin, m.key))
    if len(taken) > MOST:
        sys.exit(f"{len(taken)} mutants do not fit into one program: {MOST} at most")
    for number, mutant in enumerate(taken):
        mutant.number = number
    return taken


def tests_of(headers, tree):
    """A regex on the test files of these headers' rooms and of those that are built on them. Tests that look inside
    select/ are in kernels/."""
    rooms = [header.split("/")[0].replace("select", "kernels") for header in headers]
    first = min((ROOMS.index(room) for room in rooms if room in ROOMS), default=len(ROOMS) - 1)
    files = [path.stem for room in ROOMS[first:] for path in sorted((tree / "tests" / room).glob("*_test.cpp"))]
    return f"^({'|'.join(files)})$"


MOST = int(re.search(r"most = (\d+)", (HERE / "runtime.hpp").read_text()).group(1))


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_tree(tree, copy, mutants, keep_time=False):
    """The checkout with mutants in its headers. With `keep_time` what was compiled with a header's former text stays."""
    copy.mkdir(parents=True, exist_ok=True)
    for item in tree.iterdir():
        if item.name in ("include", "build", ".git"):
            continue
        link = copy / item.name
        if not link.is_symlink():
            link.symlink_to(item)
    of_header = collections.defaultdict(list)
    for mutant in mutants:
        of_header[mutant.header].append(mutant)
    include = tree / "include"
    wanted = set()
    for path in include.rglob("*"):
        if not path.is_file():
            continue
        target = copy / "include" / path.relative_to(include)
        name = str(path.relative_to(include / "quoka"))
        text = path.read_text()
        if name in of_header:  # by the header itself: before it nothing may be read, or no precompiled header is used
            text = f'#include "{HERE}/runtime.hpp"\n#line 1\n' + generate.switched(text, of_header[name])
        before = target.stat() if keep_time else None
        write_if_changed(target, text)
        if before:
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        wanted.add(target)
    for path in (copy / "include").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def blamed(output, copy, mutants):
    """The mutants on lines that the compiler names: where an error is, or else where what it is about comes from."""
    place = re.compile(re.escape(f"{copy.name}/include/quoka") + r"/([\w./]+):(\d+)")  # ccache may make paths relative
    bad = set()
    for block in re.split(r"(?=^In file included|^\S+: In )", output, flags=re.M):
        if "error:" not in block:
            continue
        at_error = [line for line in block.splitlines() if "error:" in line]
        for lines in (at_error, block.splitlines()):
            named = {(m[1], int(m[2])) for line in lines for m in place.finditer(line)}
            here = {m for m in mutants if any((m.header, line) in named for line in lines_of(m))}
            if here:
                bad |= here
                break
    return bad


def compiling(args, tree, copy, mutants, results):
    """Those with which the library compiles. The others are results."""
    while mutants:
        make_tree(tree, copy, mutants)
        include = copy / "include"
        all_headers = copy / "all.cpp"
        all_headers.write_text("".join(
            f"#include <{path.relative_to(include)}>\n" for path in sorted(include.rglob("*.hpp"))
            if "simd/isa/" not in str(path)))  # included where there are these
        output = ""
        for source, flags in ((all_headers, []), (include / "quoka/compiled.cpp", ["-DQUOKA_COMPILED"]),
                              (include / "quoka/c.cpp", ["-DQUOKA_COMPILED"])):
            command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-march=native", "-fsyntax-only", "-w",
                       "-fmax-errors=0", "-I", include,
                       "-isystem", "/usr/include/eigen3", *flags, source]
            output += subprocess.run(command, capture_output=True, text=True).stderr
        if "error:" not in output:
            break
        mutants = without(blamed(output, copy, mutants), mutants, results, output)
    return mutants


def without(bad, mutants, results, output):
    if not bad:
        sys.exit(f"does not compile, and no mutant is to blame:\n{output[-4000:]}")
    for mutant in bad:
        results[mutant.name()] = {"state": "does not compile", "header": mutant.header, "line": mutant.line}
        print(f"{'no C++':10}{mutant.name()}", flush=True)
    return [m for m in mutants if m not in bad]


def run_or_exit(command, **kwargs):
    print("+", " ".join(map(str, command)), flush=True)
    done = subprocess.run(command, **kwargs)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return done


# A mutant that does not compile in some unit of the tests is taken out of its header, whose time stays: the units that
# did compile have it behind a switch that nobody turns on. Only the others are compiled again, and read the text of the
# headers, since what is precompiled has the mutant: no compiler uses that after another file.
LAUNCHER = """#!/bin/sh
compiler=$1
shift
[ ! -e "{mended}" ] || set -- -include "{runtime}" "$@"
exec {ccache} "$compiler" "$@"
"""


def build(args, files, tree, work):
    """The test programs, name to path; or what the compiler says."""
    copy, folder = work / "tree", work / "build"
    folder.mkdir(parents=True, exist_ok=True)
    inject, launcher, mended = folder / "mutants.cmake", folder / "launcher", folder / "mended"
    write_if_changed(inject, f"link_libraries({folder}/libmutants_runtime.a)\n")
    write_if_changed(launcher, LAUNCHER.format(mended=mended, runtime=HERE / "runtime.hpp", ccache=shutil.which("ccache") or ""))
    launcher.chmod(0o755)
    run_or_exit(["cmake", "-S", copy, "-B", folder, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}",
                 "-DQUOKA_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release",
                 "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DQUOKA_TEST_OPTIMIZATION=-O1", "-DQUOKA_WARNINGS=OFF",
                 "-DQUOKA_KERNELS_APART=ON", "-DQUOKA_BUILD_TESTS=ON", f"-DQUOKA_TEST_FILTER={files}", "-DQUOKA_TEST_STORAGE=float", "-DQUOKA_INSTALL=OFF",
                 f"-DQUOKA_SHARED_DATA={tree.parent / 'shared' / 'data'}",
                 f"-DCMAKE_PROJECT_quoka_INCLUDE={inject}"], stdout=subprocess.DEVNULL)
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.M).group(1)
    archive, source = folder / "libmutants_runtime.a", HERE / "runtime.cpp"
    if not archive.exists() or archive.stat().st_mtime < source.stat().st_mtime:
        run_or_exit([compiler, "-std=c++20", "-O2", "-c", source, "-o", folder / "mutants_runtime.o"])
        run_or_exit(["ar", "rcs", archive, folder / "mutants_runtime.o"])
    listed = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], capture_output=True, text=True).stdout
    programs = {}
    for target in re.findall(r"^(\S+): CXX_EXECUTABLE_LINKER", listed, re.M):
        name = target.rsplit("/", 1)[-1]
        if re.search(SKIPPED, name):
            continue
        link = subprocess.run(["ninja", "-C", folder, "-t", "commands", "-s", target], capture_output=True, text=True)
        if "gtest" in link.stdout:
            programs[name] = target
    print(f"building {len(programs)} test programs", flush=True)
    made = subprocess.run(["ninja", "-C", folder, f"-j{args.jobs}", "-k0", "--quiet", *programs.values()],
                          capture_output=True, text=True)
    if made.returncode and re.search(r"^FAILED: .*\.o\b", made.stdout, re.M):  # not what is precompiled itself
        mended.touch()
    return {name: folder / target for name, target in programs.items()}, made.stdout if made.returncode else ""


Test = collections.namedtuple("Test", "program name seconds")


def trace(args, programs, work):
    """Mutant to the tests that reach it. Traces are kept until a program changes."""
    folder = work / "trace"
    folder.mkdir(exist_ok=True)

    def run_one(item):
        name, path = item
        out = folder / f"{name}.txt"
        if out.exists() and out.stat().st_mtime > path.stat().st_mtime:
            return name, out
        part = folder / f"{name}.part"
        environment = dict(os.environ, QUOKA_MUTANT_TRACE=str(part), GTEST_FILTER=FILTER)
        subprocess.run([path], env=environment, cwd=path.parent, stdout=subprocess.DEVNULL,
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
        sys.exit(f"without any mutant these fail: {' '.join(failed)}")
    print(f"{tests} tests of {len(programs)} programs, {total:.0f} s in all", flush=True)
    return reach


START = 0.05  # seconds until a program runs its first test


def rounds_of(mutant, tests):
    """[(program, names, seconds)], in the order in which to try them: each program's quick tests, the quickest and the
    room's own first; then the slow ones."""
    rounds = []
    room = mutant.header.split("/")[0]
    for slow in (False, True):
        programs = collections.defaultdict(list)
        for test in tests:
            if (test.seconds > 0.5) == slow:
                programs[test.program].append(test)
        some = [(name, [t.name for t in of], START + sum(t.seconds for t in of)) for name, of in programs.items()]
        rounds += sorted(some, key=lambda r: r[2] * (0.1 if r[0].startswith(room) else 1.0))
    return rounds


def limit_memory():
    """A size gone wrong must not take the machine's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def kill(args, mutant, tests, programs):
    """The mutant's outcome."""
    began = time.time()
    if not tests:
        return {"state": "unreached"}
    spent, run, left = 0.0, 0, 0
    for program, names, seconds in rounds_of(mutant, tests):
        if spent + seconds > args.budget and spent > 0:
            left += len(names)
            continue
        spent += seconds
        run += len(names)
        chosen = ":".join(names)
        if len(chosen) > 100_000:
            chosen = FILTER
        environment = dict(os.environ, QUOKA_MUTANT=str(mutant.number), QUOKA_REPLACED="0", GTEST_FILTER=chosen,
                           GTEST_FAIL_FAST="1", GTEST_BRIEF="0")
        path = programs[program]
        limit = 60 + 20 * seconds  # others may use the machine, too
        try:
            done = subprocess.run([path], env=environment, cwd=path.parent, capture_output=True, timeout=limit, preexec_fn=limit_memory)
        except subprocess.TimeoutExpired as hung:
            last = re.findall(rb"\[ RUN      \] (\S+)", hung.stdout or b"")
            return {"state": "killed", "how": "hangs", "program": program, "test": last[-1].decode() if last else "",
                    "seconds": round(time.time() - began, 1)}
        if done.returncode != 0:
            failed = re.findall(rb"\[  FAILED  \] ([^\s,]+)", done.stdout)
            last = failed[:1] or re.findall(rb"\[ RUN      \] (\S+)", done.stdout)[-1:]
            return {"state": "killed", "how": "fails" if failed else "crashes", "program": program,
                    "test": last[0].decode() if last else "", "seconds": round(time.time() - began, 1)}
    return {"state": "alive", "tests": run, "left_out": left, "seconds": round(time.time() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", type=int, default=200, metavar="N", help="how many; 0: all that can be compiled in together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--headers", nargs="+", default=["*"], metavar="GLOB", help="below include/quoka")
    parser.add_argument("--changed", metavar="BASE", help="lines that differ from this commit alone")
    parser.add_argument("--only", nargs="+", metavar="KEY", help="these alone")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and no more")
    parser.add_argument("--tests", help="regex on test files; those of the headers' rooms and of later ones")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests a mutant (60)")
    parser.add_argument("--minutes", type=float, help="those that are not begun by then are not run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    began = time.time()

    tree = HERE.parent.parent
    equal = read_equal(HERE / "equal.txt")
    possible = [m for m in all_mutants(tree / "include") if any(fnmatch.fnmatch(m.header, glob) for glob in args.headers)]
    if args.changed:
        changed = changed_lines(tree, args.changed)
        possible = [m for m in possible if any(line in changed[m.header] for line in lines_of(m))]
    if args.only:
        possible = [m for m in possible if m.key in args.only]
    chosen = draw(possible, args.draw, args.seed)
    print(f"{len(chosen)} of {len(possible)} mutants", flush=True)
    if args.list:
        for m in chosen:
            new = generate.squeeze(m.new) or ("(another value)" if m.kind == "returned" else "(nothing)")
            print(f"{m.key}  {m.header}:{m.line}  {m.operator}\n    {generate.squeeze(m.old)}\n    {new}")
        return 0
    if not chosen:
        return 0

    work = tree / "build" / "mutants"
    work.mkdir(parents=True, exist_ok=True)
    results, lock = {}, threading.Lock()

    files = args.tests or tests_of({m.header for m in chosen}, tree)
    chosen = compiling(args, tree, work / "tree", chosen, results)
    (work / "build" / "mended").unlink(missing_ok=True)
    while True:
        programs, output = build(args, files, tree, work)
        if not output:
            break
        chosen = without(blamed(output, work / "tree", chosen), chosen, results, output)
        make_tree(tree, work / "tree", chosen, keep_time=True)
    reach = trace(args, programs, work)

    def one(mutant):
        if mutant.key in equal:
            result = {"state": "equal", "why": equal[mutant.key], "tests": 0, "left_out": len(reach[mutant.number])}
        elif args.minutes and time.time() - began > 60 * args.minutes:
            result = {"state": "not run"}
        else:
            result = kill(args, mutant, reach[mutant.number], programs)
        result.update(header=mutant.header, line=mutant.line)
        with lock:
            results[mutant.name()] = result
            by = f"{result.get('program', '')} {result.get('test', '')} {result.get('how', '')}".strip()
            if result["state"] in ("alive", "equal"):
                by = f"{result['tests']} tests, {result['left_out']} left out"
            print(f"{result['state']:10}{mutant.name():50}{result.get('seconds', 0):6.1f} s  {by}", flush=True)
            commit = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
            (work / "results.json").write_text(json.dumps(
                {"commit": commit.stdout.strip(), "seed": args.seed,
                 "mutants": {name: results[name] for name in sorted(results)}}, indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, random.Random(args.seed).sample(chosen, len(chosen))))  # any, if time ends
    states = [result["state"] for result in results.values()]
    print(", ".join(f"{states.count(s)} {s}" for s in ("killed", "alive", "unreached", "equal", "does not compile", "not run")))
    for m in chosen:  # what to look at
        if results[m.name()]["state"] in ("alive", "unreached"):
            new = generate.squeeze(m.new) or ("(another value)" if m.kind == "returned" else "(nothing)")
            print(f"\n{results[m.name()]['state']} {m.key}  include/quoka/{m.header}:{m.line}: {m.operator}\n"
                  f"  - {generate.squeeze(m.old)}\n  + {new}")
    return 3 if "alive" in states or "unreached" in states else 0


if __name__ == "__main__":
    sys.exit(main())
