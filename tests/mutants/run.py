#!/usr/bin/env python3
"""How many wrong libraries would pass the tests?

A mutant is the library with one small mistake: a bound too small, < in place of <=, a statement that is left out.
generate.py makes them of the headers (some 20,800); a seed draws some. The drawn ones are all compiled in at once, each
behind a switch that an environment variable sets (mutant schemata), in a copy of include/. So the library and the
tests are built once, and a mutant costs a run of the tests that reach its line. It is killed if one of them fails,
crashes or hangs. A survivor is equal to the original in all that is promised (equal.txt says why), or shows that a test
is missing.

    python3 tests/mutants/run.py                               200 mutants of all headers, this machine's instructions
    python3 tests/mutants/run.py --draw 40 --seed 7            others
    python3 tests/mutants/run.py --headers 'rows/*' --draw 0   all of some headers
    python3 tests/mutants/run.py --changed origin/main         of lines that differ from there
    python3 tests/mutants/run.py --only KEY...                 these, drawn before
    python3 tests/mutants/run.py --list ...                    prints what would be drawn

Each operator is drawn as often as the others, then one of its mutants. Those that do not compile are named and left
out, and so are those of other machines' instructions, which the preprocessor takes out here.

It copies include/ to build/mutants/tree, with the switches, and links the rest of the checkout beside it. It builds
the tests of the headers' rooms and of later ones (GoogleTest alone, float storage, no ggml), or those that --tests
names, and runs each program once to note which tests reach which mutants (trace/). Then all mutants are tried by the
tests that take less than 20 ms, those that outlive these by slower ones, and so on (ROUNDS). Mutants that are said to
be equal are not run. With --minutes a mutant that has outlived the tests that were run by then is "not finished".
Results are printed and written to build/mutants/results.json; `QUOKA_MUTANT=number PROGRAM` runs a program of
build/mutants/build/tests with that mutant. The exit status is 3 if a mutant is alive or unreached, and 1 where they
could not be run.

On two cores building takes 10 minutes; then a mutant takes a second. It is not a part of ctest. It needs cmake, ninja,
GoogleTest and nlohmann_json; ccache is used where there is one.

equal.txt has a line for each mutant that no test can tell from the original: its key, its header, and why. A key is made
of the mutant's own text and function, so it stays where lines move, and is void once the statement changes.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import math
import os
import pathlib
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import time

import generate

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent.parent
WORK = TREE / "build" / "mutants"
COPY, BUILD, TRACES = WORK / "tree", WORK / "build", WORK / "trace"


def sources():
    """The library's headers and c.cpp, below include/quoka."""
    library = TREE / "include" / "quoka"
    return [str(path.relative_to(library)) for path in [*sorted(library.rglob("*.hpp")), library / "c.cpp"]]


def all_mutants():
    """The mutants of every source of the library that this kind of machine compiles."""
    other = r"simd/isa/neon" if platform.machine() == "x86_64" else r"simd/isa/(avx|sse)"
    return [m for name in sources() if not re.search(other, name)
            for m in generate.of_header(name, (TREE / "include" / "quoka" / name).read_text())]


def compiled_here():
    """The numbers of the mutants that the preprocessor leaves in: others are of other instructions."""
    unit = "".join(f"#include <quoka/{name}>\n" for name in sources() if not name.startswith("simd/isa/"))
    text = subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-march=native", "-E", "-P", "-I", COPY / "include",
                           "-isystem", "/usr/include/eigen3", "-x", "c++", "-"], input=unit, capture_output=True, text=True,
                          check=True).stdout
    return set(map(int, re.findall(r"quoka_mutants::on\[(\d+)\]", text)))


def read_equal(path):
    """Key to the reason why no test can tell."""
    lines = [line.split(None, 2) for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 3:
            sys.exit(f"{path}: a key, a header and a reason belong on a line, not {' '.join(line)}")
    return {key: reason for key, _, reason in lines}


def changed_lines(base):
    """Header to the lines that differ from the commit `base`."""
    unknown = subprocess.run(["git", "-C", TREE, "ls-files", "--others", "--exclude-standard", "--", "include"],
                             capture_output=True, text=True, check=True).stdout.split()
    if unknown:
        sys.exit("git does not compare new files that it does not know: git add " + " ".join(unknown))
    text = subprocess.run(["git", "-C", TREE, "diff", "-U0", base, "--", "include"], capture_output=True, text=True,
                          check=True).stdout
    lines, header = collections.defaultdict(set), ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            header = line.removeprefix("+++ b/include/quoka/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines[header].update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return lines


def draw(mutants, count, seed):
    """`count` mutants, or all if it is 0: any operator, then any of its mutants."""
    generator = random.Random(seed)
    by_operator = collections.defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    for of_one in by_operator.values():
        generator.shuffle(of_one)
    taken = []
    while by_operator and (count == 0 or len(taken) < count):
        operator = generator.choice(sorted(by_operator))
        taken.append(by_operator[operator].pop())
        if not by_operator[operator]:
            del by_operator[operator]
    taken.sort(key=lambda m: (m.header, m.begin, m.key))
    for number, mutant in enumerate(taken):
        mutant.number = number
    return taken


def tests_of(headers):
    """A regex on the test files of these headers' rooms and of those that are built on them. Tests that look inside
    select/ are in kernels/."""
    rooms = [*re.findall(r"^  (\w+)", (TREE / ".cmake" / "rooms.cmake").read_text(), re.M), "c"]
    of_headers = {header.split("/")[0].replace("select", "kernels") for header in headers}
    first = min((rooms.index(room) for room in of_headers.intersection(rooms)), default=len(rooms) - 1)
    files = [path.stem for room in rooms[first:] for path in sorted((TREE / "tests" / room).glob("*_test.cpp"))]
    return f"^({'|'.join(files)})$"


def make_tree(mutants, keep_time=False):
    """The checkout with mutants in its headers. With `keep_time` what was compiled with a header's former text stays."""
    COPY.mkdir(parents=True, exist_ok=True)
    for item in TREE.iterdir():
        if item.name not in ("include", "build", ".git") and not (COPY / item.name).is_symlink():
            (COPY / item.name).symlink_to(item)
    of_header = collections.defaultdict(list)
    for mutant in mutants:
        of_header[mutant.header].append(mutant)
    wanted = set()
    for path in filter(pathlib.Path.is_file, (TREE / "include").rglob("*")):
        target, name = COPY / path.relative_to(TREE), str(path.relative_to(TREE / "include" / "quoka"))
        wanted.add(target)
        text = path.read_text()
        if name in of_header:  # by the header itself: before it nothing may be read, or no precompiled header is used
            text = f'#include "{HERE}/runtime.hpp"\n#line 1\n' + generate.switched(text, of_header[name])
        if not target.exists() or target.read_text() != text:
            before = target.stat() if keep_time else None
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            if before:
                os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    for path in filter(pathlib.Path.is_file, (COPY / "include").rglob("*")):
        if path not in wanted:
            path.unlink()


def blamed(output, mutants):
    """The mutants on lines that the compiler names: where an error is, or else where what it is about comes from."""
    place = re.compile(re.escape(f"{COPY.name}/include/quoka") + r"/([\w./]+):(\d+)")  # ccache may make paths relative
    bad = set()
    for block in re.split(r"(?=^In file included|^\S+: In )", output, flags=re.M):
        if "error:" not in block:
            continue
        at_error = [line for line in block.splitlines() if "error:" in line]
        for lines in (at_error, block.splitlines()):
            named = {(m[1], int(m[2])) for line in lines for m in place.finditer(line)}
            here = {m for m in mutants if any((m.header, line) in named for line in m.lines())}
            if here:
                bad |= here
                break
    if not bad:
        sys.exit(f"does not build, and no mutant is to blame:\n{output[-4000:]}")
    return bad


# Every program is linked with what says which mutant is alive.
INJECTED = """add_library(quoka_mutants STATIC EXCLUDE_FROM_ALL {here}/runtime.cpp)
target_compile_features(quoka_mutants PRIVATE cxx_std_20)
target_compile_definitions(quoka_mutants PRIVATE QUOKA_MUTANTS={count})
link_libraries(quoka_mutants)
"""

# A mutant that does not compile in some unit of the tests is taken out of its header, whose time stays: the units that
# did compile have it behind a switch that nobody turns on. Only the others are compiled again, and read the text of the
# headers, since what is precompiled has the mutant: no compiler uses that after another file.
LAUNCHER = """#!/bin/sh
compiler=$1
shift
[ ! -e "{mended}" ] || set -- -include "{runtime}" "$@"
exec {ccache} "$compiler" "$@"
"""


def build(args, mutants):
    """The paths of the test programs, and the mutants that do not compile."""
    BUILD.mkdir(parents=True, exist_ok=True)
    injected, launcher, mended = BUILD / "mutants.cmake", BUILD / "launcher", BUILD / "mended"
    mended.unlink(missing_ok=True)
    injected.write_text(INJECTED.format(here=HERE, count=len(mutants)))
    launcher.write_text(LAUNCHER.format(mended=mended, runtime=HERE / "runtime.hpp", ccache=shutil.which("ccache") or ""))
    launcher.chmod(0o755)
    make_tree(mutants)
    files = args.tests or tests_of({m.header for m in mutants})
    subprocess.run(["cmake", "-S", COPY, "-B", BUILD, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}",
                    "-DQUOKA_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
                    "-DQUOKA_TEST_OPTIMIZATION=-O1", "-DQUOKA_WARNINGS=OFF", "-DQUOKA_KERNELS_APART=ON",
                    "-DQUOKA_BUILD_TESTS=ON", f"-DQUOKA_TEST_FILTER={files}", "-DQUOKA_TEST_STORAGE=float",
                    "-DQUOKA_INSTALL=OFF", f"-DQUOKA_SHARED_DATA={TREE.parent / 'shared' / 'data'}",
                    f"-DCMAKE_PROJECT_quoka_INCLUDE={injected}"], stdout=subprocess.DEVNULL, check=True)

    def ninja(*arguments):
        return subprocess.run(["ninja", "-C", BUILD, *arguments], capture_output=True, text=True)

    programs = re.findall(r"^(tests/\w+_tests?): CXX_EXECUTABLE_LINKER", ninja("-t", "targets", "all").stdout, re.M)
    precompiled = [line for line in ninja("-t", "inputs", *programs).stdout.splitlines() if line.endswith(".gch")]
    bad = set()
    print(f"building {len(programs)} test programs", flush=True)
    for targets, keep_time in ((precompiled, False), (programs, True)):
        while (made := ninja(f"-j{args.jobs}", "-k0", "--quiet", *targets)).returncode:
            bad |= blamed(made.stdout, [m for m in mutants if m not in bad])
            make_tree([m for m in mutants if m not in bad], keep_time)
            if keep_time:
                mended.touch()
    return [BUILD / program for program in programs], bad


Test = collections.namedtuple("Test", "program name seconds")


def trace(args, programs):
    """Mutant to the tests that reach it. Traces are kept until a program changes."""
    TRACES.mkdir(exist_ok=True)

    def run_one(program):
        out, part = TRACES / f"{program.name}.txt", TRACES / f"{program.name}.part"
        if not out.exists() or out.stat().st_mtime < program.stat().st_mtime:
            subprocess.run([program], env=dict(os.environ, QUOKA_MUTANT_TRACE=str(part), GTEST_FILTER="-LongContext.*"),
                           cwd=program.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=3600)
            part.rename(out)
        return [(program, *line.split()) for line in out.read_text().splitlines()]

    reach = collections.defaultdict(list)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        tests = [test for of_one in pool.map(run_one, programs) for test in of_one]
    failed = [name for _, name, passed, *_ in tests if passed != "1"]
    if failed:
        sys.exit(f"without any mutant these fail: {' '.join(failed)}")
    for program, name, _, milliseconds, *numbers in tests:
        for number in numbers:
            reach[int(number)].append(Test(program, name, int(milliseconds) / 1000))
    print(f"{len(tests)} tests of {len(programs)} programs, {sum(int(test[3]) for test in tests) / 1000:.0f} s in all", flush=True)
    return reach


def killed_by(mutant, program, tests, settings):
    """How these tests of a program kill the mutant, or None. `settings`: of the environment."""
    seconds = sum(test.seconds for test in tests)

    def limit():
        """A size gone wrong must not take the machine's memory, nor an endless loop its time."""
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, 2 * (math.ceil(4 + 10 * seconds),))

    environment = dict(os.environ, **settings, QUOKA_MUTANT=str(mutant.number), QUOKA_REPLACED="0", GTEST_FAIL_FAST="1",
                       GTEST_BRIEF="0", GTEST_FILTER=":".join(test.name for test in tests))
    try:  # others may use the machine, too: much more time than processor time
        done = subprocess.run([program], env=environment, cwd=program.parent, capture_output=True, preexec_fn=limit,
                              timeout=60 + 20 * seconds)
        output, how = done.stdout, "hangs" if done.returncode in (-9, -24) else "crashes"
        if done.returncode == 0:
            return None
    except subprocess.TimeoutExpired as hung:
        output, how = hung.stdout or b"", "hangs"
    failed = re.findall(rb"\[  FAILED  \] ([^\s,]+)", output)
    last = failed[:1] or re.findall(rb"\[ RUN      \] (\S+)", output)[-1:]
    return f"{program.name} {last[0].decode() if last else ''} {'fails' if failed else how}"


# From and up to how many seconds of a test, and whether a property is tried by a few of its draws: most die by these.
FEW = {"QUOKA_TIMES": ".05"}
ROUNDS = ((0, 0.02, {}), (0.02, 0.2, {}), (0.2, math.inf, FEW), (0.2, 2, {}), (2, math.inf, {}))


def try_all(args, mutants, reach, end, note):
    """Calls note(mutant, state, by) for each mutant: quick tests first, and the room's own."""
    alive = mutants
    for above, limit, settings in ROUNDS:

        def outlives(mutant):
            programs = collections.defaultdict(list)
            for test in reach[mutant.number]:
                if above <= test.seconds < limit:
                    programs[test.program].append(test)
            room = mutant.header.split("/")[0]
            for program, tests in sorted(programs.items(), key=lambda item: (
                    not item[0].name.startswith(room), sum(test.seconds for test in item[1]))):
                if time.time() > end:
                    note(mutant, "not finished", f"tests of {above} s and more are left out")
                elif by := killed_by(mutant, program, tests, settings):
                    note(mutant, "killed", by)
                else:
                    continue
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            alive = [m for m, still in zip(alive, pool.map(outlives, alive)) if still]
        print(f"{len(alive)} outlive the tests of {above} to {limit} s{' by a few draws' if settings else ''}", flush=True)
    for mutant in alive:
        note(mutant, "alive", f"{len(reach[mutant.number])} tests")


def show(mutant):
    new = generate.squeeze(mutant.new) or ("(another value)" if mutant.kind == "returned" else "(nothing)")
    return f"{mutant.key}  include/quoka/{mutant.header}:{mutant.line}: {mutant.operator}\n  - {generate.squeeze(mutant.old)}\n  + {new}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", type=int, default=200, metavar="N", help="how many; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--headers", nargs="+", default=["*"], metavar="GLOB", help="below include/quoka")
    parser.add_argument("--changed", metavar="BASE", help="lines that differ from this commit alone")
    parser.add_argument("--only", nargs="+", metavar="KEY", help="these alone")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and no more")
    parser.add_argument("--tests", help="regex on test files; those of the headers' rooms and of later ones")
    parser.add_argument("--minutes", type=float, default=math.inf, help="with what it builds; no test begins after that")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    end = time.time() + 60 * args.minutes

    equal = read_equal(HERE / "equal.txt")
    possible = [m for m in all_mutants() if any(fnmatch.fnmatch(m.header, glob) for glob in args.headers)]
    if args.changed:
        changed = changed_lines(args.changed)
        possible = [m for m in possible if changed[m.header].intersection(m.lines())]
    if args.only:
        possible = [m for m in possible if m.key in args.only]
    chosen = draw(possible, 0 if args.only else args.draw, args.seed)
    print(f"{len(chosen)} of {len(possible)} mutants", flush=True)
    if args.list:
        print(*map(show, chosen), sep="\n")
    if args.list or not chosen:
        return 0

    commit = subprocess.run(["git", "-C", TREE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    results = {}

    def note(mutant, state, by=""):
        results[mutant.name()] = {"state": state, "by": by, "number": mutant.number, "header": mutant.header, "line": mutant.line}
        print(f"{state:18}{mutant.name():60}{by}", flush=True)

    programs, bad = build(args, chosen)
    here = compiled_here()
    reach = trace(args, programs)
    to_try = []
    for mutant in random.Random(args.seed).sample(chosen, len(chosen)):  # any, if time ends
        if mutant in bad:
            note(mutant, "does not compile")
        elif mutant.number not in here:
            note(mutant, "other machines")
        elif mutant.key in equal:
            note(mutant, "equal", equal[mutant.key])
        elif not reach[mutant.number]:
            note(mutant, "unreached")
        else:
            to_try.append(mutant)
    try:
        try_all(args, to_try, reach, end, note)
    finally:
        (WORK / "results.json").write_text(json.dumps({"commit": commit, "seed": args.seed, "mutants": results},
                                                      indent=1, sort_keys=True) + "\n")
    states = collections.Counter(result["state"] for result in results.values())
    for m in chosen:  # what to look at
        if results[m.name()]["state"] in ("alive", "unreached"):
            print(f"\n{results[m.name()]['state']} {show(m)}")
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    return 3 if states["alive"] or states["unreached"] else 0


if __name__ == "__main__":
    sys.exit(main())
