#!/usr/bin/env python3
"""The long run, which tests/run.sh --long builds for and begins: the suites that draw, with far more draws than usual,
then mutants. Its result goes to tests/long_run.json, which is committed.

    bash tests/run.sh --long                                nine times the usual draws, 400 mutants: some hours on two cores
    bash tests/run.sh --long --minutes 60                   an hour, a third of it for draws
    bash tests/run.sh --long --draws 70000 --mutants 0       draws alone
    bash tests/run.sh --long --draws 0 --mutants 1000        mutants alone, beside the draws of the last result

Every suite gets the same multiple of its usual number of draws (QUOKA_TIMES); their seeds are 0, 1, 2 and so on. Each
is run as usual first: if --minutes is too short for --draws, the time of that run decides how many are drawn. Mutants
are drawn by --seed (mutants/run.py). The exit status is 1 if a draw fails or the mutants cannot be run. A mutant that
no test notices is in the result, and does not fail the run.
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

# A suite's file, its program, and how many cases it usually draws.
SUITES = [
    ("attention_suite_test", "attention_tests", 3700),
    ("merge_test", "attention_tests", 120),
    ("diagnostics_test", "attention_tests", 100),
    ("panel_arithmetics_test", "kernels_tests", 50),
    ("softmax_mass_test", "kernels_tests", 260),
    ("softmax_state_test", "kernels_tests", 300),
    ("selection_fuzz_test", "select_tests", 2406),
    ("key_checksums_test", "select_tests", 200),
    ("quoka_selector_test", "select_tests", 10),
    ("mass_rule_test", "select_tests", 80),
    ("top_k_test", "select_tests", 600),
    ("prefill_suite_test", "layer_tests", 430),
    ("ragged_test", "layer_tests", 2384),
    ("allocation_test", "layer_tests", 116),
    ("cache_sketch_test", "layer_tests", 40),
    ("kv_cache_test", "layer_tests", 100),
    ("mask_segments_test", "engine_tests", 250),
    ("masked_attention_test", "engine_tests", 114),
    ("known_cells_test", "engine_tests", 30),
    ("c_door_test", "c_tests", 258),
    ("evicting_methods_test", "methods_tests", 100),
    ("block_methods_test", "methods_tests", 180),
    ("scored_methods_test", "methods_tests", 120),
    ("loki_test", "methods_tests", 72),
    ("less_is_more_test", "methods_tests", 52),
    ("tidal_decode_test", "methods_tests", 60),
    ("indexer_test", "methods_tests", 80),
    ("sample_attention_test", "methods_tests", 36),
    ("controls_test", "methods_tests", 100),
    ("layouts_test", "rows_tests", 300),
    ("stages_test", "select_tests", 240),
    ("selection_test", "rows_tests", 120),
    ("paged_test", "rows_tests", 520),
    ("inverse_norm_test", "rows_tests", 18000),
    ("view_test", "rows_tests", 3000),
]
USUAL = sum(usual for *_, usual in SUITES)


def run_suite(build, suite, times):
    """What a suite with this many times its usual draws did."""
    file, program, usual = suite
    began = time.time()
    done = subprocess.run([build / "tests" / program, f"--file={file}"], env=dict(os.environ, QUOKA_TIMES=str(times)),
                          capture_output=True, text=True)
    failed = sorted(set(re.findall(r"\[  FAILED  \] (\w[\w/]*\.\w+)", done.stdout)))
    if done.returncode and not failed:
        failed = [f"ended with {done.returncode}"]
    if failed:
        print(done.stdout[-20000:], done.stderr[-2000:], flush=True)
    result = {"draws": usual * times, "seconds": round(time.time() - began), "failed": failed}
    print(f"{file:24}{result['draws']:7} draws{result['seconds']:7} s  {' '.join(failed)}", flush=True)
    return file, result


def draws(args):
    """Suite to what it did."""
    jobs = min(args.jobs, len(SUITES))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        run = lambda times: dict(pool.map(lambda suite: run_suite(args.build, suite, times), SUITES))
        began = time.time()
        usual = run(1)
        took = time.time() - began
        times = round(args.draws / USUAL)
        if args.minutes:
            times = min(times, int((20 * args.minutes - took) / took))
        return usual if times <= 1 or any(x["failed"] for x in usual.values()) else run(times)


def mutants(args, minutes):
    """What mutants/run.py found."""
    command = [sys.executable, HERE / "mutants" / "run.py", "--seed", str(args.seed), "--draw", str(args.mutants), "--jobs", str(args.jobs)]
    if minutes:
        command += ["--minutes", str(minutes)]
    if subprocess.run(command).returncode not in (0, 3):  # 3: some are alive
        sys.exit("the mutants did not run; tests/long_run.json has the draws")
    found = json.loads((TREE / "build" / "mutants" / "results.json").read_text())
    states = [mutant["state"] for mutant in found["mutants"].values()]
    named = {state: [name for name, mutant in found["mutants"].items() if mutant["state"] == state]
             for state in ("alive", "not finished", "unreached")}
    return {"commit": found["commit"], "seed": found["seed"], "drawn": len(states),
            "states": {state: states.count(state) for state in sorted(set(states))}, **named}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=TREE / "build")
    parser.add_argument("--draws", type=int, default=9 * USUAL, help="the nearest multiple of the usual number; 0: those of the last result")
    parser.add_argument("--mutants", type=int, default=400, help="how many; 0: none")
    parser.add_argument("--minutes", type=float, help="of draws and mutants, with what mutants build")
    parser.add_argument("--seed", type=int, default=1, help="of the mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()

    file = HERE / "long_run.json"
    if args.draws:
        git = lambda *words: subprocess.run(["git", "-C", TREE, *words], capture_output=True, text=True).stdout.strip()
        result = {"commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else ""),
                  "date": datetime.date.today().isoformat(),
                  "machine": next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
                                  platform.machine()) if os.path.exists("/proc/cpuinfo") else platform.machine(),
                  "draws": draws(args)}
    else:
        result = json.loads(file.read_text())
    total = sum(suite["draws"] for suite in result["draws"].values())
    print(f"{total} draws", flush=True)
    failed = args.draws and any(suite["failed"] for suite in result["draws"].values())
    write = lambda: file.write_text(json.dumps(result, indent=1) + "\n")
    write()  # the draws of some hours, whatever becomes of the mutants
    if args.mutants and not failed:
        result["mutants"] = mutants(args, args.minutes and args.minutes * (2 / 3 if args.draws else 1))
        write()
    print(f"tests/long_run.json: {total} draws, {'some fail' if failed else 'none fails'}; "
          f"mutants: {result.get('mutants', {}).get('states', 'none')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
