#!/usr/bin/env python3
"""The long run, which tests/run.sh --long builds for and begins: the suites that draw, with far more draws than usual,
then mutants. Its result goes to tests/long_run.json, which stands in the repository.

    bash tests/run.sh --long                                50,000 draws and 400 mutants: some hours on two cores
    bash tests/run.sh --long --minutes 60                   an hour, a third of it for draws
    bash tests/run.sh --long --draws 5000 --mutants 0       draws alone
    bash tests/run.sh --long --mutants all                  every mutant of the library, room by room: a day or more

Every suite gets the same multiple of its usual number of draws; their seeds are 0, 1, 2 and so on. Each is run as usual
first: where --minutes do not suffice for --draws, that says how many do. Mutants are drawn by --seed (mutants/run.py).
The exit status is 1 if a draw fails. A mutant that no test notices is in the result, and does not fail the run.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent

# A suite's file, program and variable; the variable's usual value; how often a value's cases are drawn: by each test
# that draws, or for each selector.
SUITES = [
    ("attention_suite_test", "attention_tests", "QUOKA_ATTENTION_CASES", 300, 12),
    ("panel_arithmetics_test", "kernels_tests", "QUOKA_ATTENTION_CASES", 150, 1 / 3),
    ("selection_fuzz_test", "select_tests", "QUOKA_FUZZ_CASES", 24, 17),
    ("prefill_suite_test", "layer_tests", "QUOKA_PREFILL_CASES", 20, 18),
    ("ragged_test", "layer_tests", "QUOKA_RAGGED_CASES", 24, 16),
    ("evicting_methods_test", "methods_tests", "QUOKA_METHODS_CASES", 50, 2),
    ("block_methods_test", "methods_tests", "QUOKA_METHODS_CASES", 90, 2),
    ("scored_methods_test", "methods_tests", "QUOKA_METHODS_CASES", 40, 3),
    ("stages_test", "select_tests", "QUOKA_STAGES_CASES", 80, 3),
]
USUAL = sum(value * times for *_, value, times in SUITES)


def run_suite(build, suite, factor):
    """What a suite with `factor` times its usual draws did."""
    file, program, variable, value, times = suite
    cases = round(value * factor)
    began = time.time()
    done = subprocess.run([build / "tests" / program, f"--file={file}"], env=dict(os.environ, **{variable: str(cases)}),
                          capture_output=True, text=True)
    failed = sorted(set(re.findall(r"\[  FAILED  \] (\w[\w/]*\.\w+)", done.stdout)))
    if done.returncode and not failed:
        failed = [f"ended with {done.returncode}"]
    if failed:
        print(done.stdout[-20000:], done.stderr[-2000:], flush=True)
    result = {"cases": cases, "draws": round(cases * times), "seconds": round(time.time() - began), "failed": failed}
    print(f"{file:24}{result['draws']:7} draws{result['seconds']:7} s  {' '.join(failed)}", flush=True)
    return file, result


def draws(args):
    """Suite to what it did."""
    jobs = min(args.jobs, len(SUITES))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        run = lambda factor: dict(pool.map(lambda suite: run_suite(args.build, suite, factor), SUITES))
        began = time.time()
        usual = run(1)
        took = time.time() - began
        factor = args.draws / USUAL
        if args.minutes:
            factor = min(factor, (20 * args.minutes - took) / took)
        return usual if factor <= 1 or any(x["failed"] for x in usual.values()) else run(factor)


def mutants(args, minutes):
    """What mutants/run.py found."""
    rooms = ["*"]
    if args.mutants == "all":
        rooms = [f"{path.name}/*" for path in sorted((TREE / "include" / "quoka").iterdir()) if path.is_dir()]
    total = {"seed": args.seed, "drawn": 0, "states": {}, "alive": []}
    end = time.time() + 60 * minutes if minutes else None
    for room in rooms:
        command = [sys.executable, HERE / "mutants" / "run.py", "--headers", room, "--seed", str(args.seed),
                   "--draw", "0" if args.mutants == "all" else args.mutants, "--jobs", str(args.jobs)]
        if end:
            command += ["--minutes", str(max(1, round((end - time.time()) / 60)))]
        print("+", " ".join(map(str, command)), flush=True)
        if subprocess.run(command).returncode not in (0, 1):  # 1: some are alive
            sys.exit("the mutants did not build, or tests fail without any")
        found = json.loads((TREE / "build" / "mutants" / "results.json").read_text())["mutants"]
        total["drawn"] += len(found)
        for name, mutant in found.items():
            state = mutant["state"]
            total["states"][state] = total["states"].get(state, 0) + 1
            if state in ("alive", "unreached"):
                total["alive"].append(name)
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=TREE / "build")
    parser.add_argument("--draws", type=int, default=50000)
    parser.add_argument("--mutants", default="400", help="how many, or all; 0: none")
    parser.add_argument("--minutes", type=float, help="of draws and mutants, with what mutants build")
    parser.add_argument("--seed", type=int, default=1, help="of the mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()

    git = lambda *words: subprocess.run(["git", "-C", TREE, *words], capture_output=True, text=True).stdout.strip()
    result = {"commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else ""),
              "date": datetime.date.today().isoformat(),
              "machine": next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
                              platform.machine()) if os.path.exists("/proc/cpuinfo") else platform.machine()}
    result["draws"] = draws(args)
    total = sum(suite["draws"] for suite in result["draws"].values())
    print(f"{total} draws", flush=True)
    failed = any(suite["failed"] for suite in result["draws"].values())
    if args.mutants != "0" and not failed:
        result["mutants"] = mutants(args, args.minutes and args.minutes * 2 / 3)
    (HERE / "long_run.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"tests/long_run.json: {total} draws, {'some fail' if failed else 'none fails'}; "
          f"mutants: {result.get('mutants', {}).get('states', 'none')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
