#!/usr/bin/env python3
"""RULER's tasks, by lm-eval, of models in llama-server with this library and without. ruler.sh calls it.

    ruler.py --server llama-server --backend libggml-quoka.so --book emma.txt --work FOLDER --out FILE MODEL=model.gguf ... [--choose]

Prompts, needles and scores are lm-eval's. A task's samples are drawn with the seed that is written down; all settings answer
the same ones. The first of them (CHOOSING) say, with --choose, which tasks exact attention answers well enough that a loss can show;
others (REPORTED) are what is reported. Each answer is kept as it comes, so a stopped run can be
continued.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import json
import logging
import math
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from real_models import interval, rounded

HERE = pathlib.Path(__file__).resolve().parent
SEED = 4802
CHOOSING, REPORTED = range(0, 4), range(4, 36)

SIMPLE = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]
BOOK = ["niah_single_2_book", "niah_single_3_book", "niah_multikey_1_book", "niah_multivalue_book", "niah_multiquery_book"]

# How a model is asked: by its chat template, or as a text that goes on. Then tasks by length of the
# prompt, those of which --choose said that exact attention has half of the points or more.
Asked = collections.namedtuple("Asked", "label chat tasks")
MODELS = {
    "smollm2": Asked("SmolLM2-135M-Instruct Q4_0", True, {2048: ["niah_single_1", "niah_single_2_book", "niah_multikey_1_book", "niah_multivalue_book"], 4096: []}),
    "gemma3-270m": Asked("Gemma 3 270M Q4_K_M", False, {2048: ["niah_single_1", "niah_single_2_book", "niah_single_3_book", "niah_multikey_1_book", "niah_multivalue_book", "ruler_fwe"],
                                                                      4096: ["niah_single_1", "niah_single_2_book", "niah_multikey_1_book"]}),
}


def settings_of(length):
    """None: llama.cpp's own."""
    chosen = {"llama.cpp": None, "exact": {"QUOKA_MODE": "exact"}}
    for mode, shares in (("recommended", (None, 8)), ("balanced", (None, 8)), ("paper", (8,))):
        for share in shares:  # of the prompt; without one the preset as it is called
            chosen[mode if share is None else f"{mode}, 1/{share}"] = {"QUOKA_MODE": mode} | ({} if share is None else {"QUOKA_BUDGET": str(length // share)})
    return chosen


def tokenizer_of(model, work):
    """A folder as transformers wants it, made from the GGUF file."""
    folder = work / "tokenizer" / model.stem
    if not (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer  # takes torch along, for its reader of GGUF files
        AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name).save_pretrained(str(folder))
    return folder


@contextlib.contextmanager
def serving(flags, model, length, settings, log):
    """llama-server with these settings; gives the URL that completes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QUOKA_", "GGML_BACKEND"))}
    if settings is not None:
        environment |= {"GGML_BACKEND_PATH": str(flags.backend), **settings}
    command = [str(flags.server), "-m", str(model), "-c", str(length + 512), "-np", "1", "-fa", "on", "-ub", "256", "--no-warmup", "-t", str(flags.threads),
               "--no-cache-prompt", "--cache-ram", "0", "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            if server.poll() is not None:
                sys.exit(f"ruler.py: llama-server ended with {server.returncode}: {log}")
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    break
            time.sleep(0.1)
        said = pathlib.Path(log).read_text()
        if settings is None and "quoka: version" in said:
            sys.exit(f"ruler.py: llama.cpp was to compute alone: {log}")
        if settings is not None and ("quoka: version" not in said or (settings["QUOKA_MODE"] != "exact") != ("selects keys by" in said)):
            sys.exit(f"ruler.py: the backend ignores its settings, {settings}: {log}")
        yield f"http://127.0.0.1:{port}/v1/completions", server.pid
    finally:
        server.terminate()
        server.wait()


def cpu_seconds(process):
    """CPU seconds that a process has used."""
    of = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(of[11]) + int(of[12])) / os.sysconf("SC_CLK_TCK")


def task_of(name, length, tokenizer, flags):
    """With its samples: the same ones for the same name, length, seed and tokenizer, whatever was drawn before."""
    import numpy
    from lm_eval.tasks import TaskManager, get_task_dict

    metadata = {"max_seq_lengths": [length], "tokenizer": str(tokenizer)}
    if name in BOOK:
        metadata |= {"haystack": str(flags.book), "samples": REPORTED.stop}
    random.seed(SEED), numpy.random.seed(SEED)
    manager = TaskManager(include_path=str(HERE / "ruler"), metadata=metadata)
    return get_task_dict([name], manager)[name]


class Answers:
    """Answers to one task by one setting, kept in a file as they come."""

    def __init__(self, path):
        self.path = path
        self.of = {int(i): one for i, one in json.loads(path.read_text()).items()} if path.exists() else {}

    def add(self, i, answer):
        self.of[i] = answer
        self.path.write_text(json.dumps(self.of, indent=1) + "\n")


def ask(flags, name, length, tasks, contenders, wanted, report_found):
    """{task: {settings: Answers}}: all settings answer a task's sample before the next one is asked, so that a run that is
    stopped has asked all of them the same; they answer at once, each with a server of its own. report_found(found) is called after each."""
    model, chat = flags.models[name], MODELS[name].chat
    tokenizer = None if flags.report else tokenizer_of(model, flags.work)
    folder = flags.work / f"{name}_{length}"
    folder.mkdir(parents=True, exist_ok=True)
    found = {task: {label: Answers(folder / f"{task}_{label.replace(', 1/', '_')}.json") for label in contenders} for task in tasks}
    drawn, clients = {}, {}

    if not flags.report:  # answers are reported without lm-eval
        from lm_eval.evaluator import evaluate
        from lm_eval.models.openai_completions import LocalCompletionsAPI

    def answer(i, task, label):
        client, server = clients[label]
        begun = cpu_seconds(server)
        own = copy.copy(drawn[task])  # what is asked is noted in it
        sample, = evaluate(client, {task: own}, samples={task: [i]}, apply_chat_template=chat, bootstrap_iters=0)["samples"][task]
        found[task][label].add(i, {"points": sample[str(length)], "prompt": sample["doc_hash"], "answer": sample["filtered_resps"][0],
                                   "cpu_s": round(cpu_seconds(server) - begun, 2)})

    with contextlib.ExitStack() as servers, concurrent.futures.ThreadPoolExecutor(flags.at_once or len(contenders)) as at_once:
        for i in [] if flags.report else wanted:
            for task, by_label in found.items():
                missing = [label for label, answers in by_label.items() if i not in answers.of and label in (flags.settings or contenders)]
                if missing and task not in drawn:
                    drawn[task] = task_of(task, length, tokenizer, flags)
                for label in missing:
                    if label in clients:
                        continue
                    log = folder / f"server_{label.replace(', 1/', '_')}.log"
                    url, server = servers.enter_context(serving(flags, model, length, contenders[label], log))
                    clients[label] = LocalCompletionsAPI(
                        model=name, base_url=url, tokenizer_backend="huggingface", tokenizer=str(tokenizer), tokenized_requests=chat,
                        max_length=length + 512, timeout=1800, max_retries=1), server
                list(at_once.map(lambda label: answer(i, task, label), missing))
                if len({answers.of[i]["prompt"] for answers in by_label.values() if i in answers.of}) > 1:
                    sys.exit(f"ruler.py: sample {i} of {task} is not the same one for all settings: remove {folder}/{task}_*.json")
            report_found(found)
    return found


def pairs(by_label, label, wanted):
    """[(points, exact mode's points)] of the samples that both have answered."""
    own, exact = by_label[label].of, by_label["exact"].of
    return [(100 * own[i]["points"], 100 * exact[i]["points"]) for i in wanted if i in own and i in exact]


def say(name, length, found, wanted):
    for task, by_label in found.items():
        labels = []
        for label in by_label:
            if both := pairs(by_label, label, wanted):
                labels.append(f"{label} {math.fsum(own for own, _ in both) / len(both):.1f} % of {len(both)}")
        print(f"{name}, {length} tokens, {task}: {'; '.join(labels)}", file=sys.stderr, flush=True)


def rows_of(label_of_model, length, found, wanted):
    """One row for each task and setting, and for all tasks together where a setting has answered all that exact mode has."""
    rows, whole = [], {}

    def add(task, label, both):
        rows.append({"model": label_of_model, "length": length, "task": task, "settings": label, "samples": len(both),
                     "right": round(math.fsum(own for own, _ in both) / len(both), 2), "change": rounded(interval([own - exact for own, exact in both], 10_000), 2)})

    for task, by_label in found.items():
        for label in by_label:
            if both := pairs(by_label, label, wanted):
                add(task, label, both)
                whole.setdefault(label, []).extend(both)
    if len(found) > 1:
        for label, both in whole.items():
            if len(both) == len(whole["exact"]):  # of other samples a mean says something else
                add("all", label, both)
    return rows


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("models", nargs="+", help="NAME=FILE, of " + ", ".join(MODELS))
    for name in ("--server", "--backend", "--book", "--work"):
        parse.add_argument(name, type=pathlib.Path, required=True)
    parse.add_argument("--out", type=pathlib.Path, help="what is reported")
    parse.add_argument("--choose", action="store_true", help="asks exact mode the first samples of every task, and reports nothing")
    parse.add_argument("--samples", type=int, default=len(REPORTED), help="of each task")
    parse.add_argument("--tasks", help="these alone, with commas")
    parse.add_argument("--settings", type=lambda text: text.split(";"), help="ask these alone, with semicolons")
    parse.add_argument("--report", action="store_true", help="asks nothing: what was answered so far")
    parse.add_argument("--lengths", help="with commas")
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--at-once", type=int, help="how many servers compute at a time; all by default")
    flags = parse.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ruler.py: stopped"))  # and its servers
    logging.disable(logging.WARNING)
    flags.models = {name: pathlib.Path(file).resolve() for name, file in (one.split("=", 1) for one in flags.models)}
    if unknown := set(flags.models) - set(MODELS):
        sys.exit(f"ruler.py: {', '.join(unknown)}: known are {', '.join(MODELS)}")
    results = []
    for name in flags.models:
        for length, known in MODELS[name].tasks.items():
            if flags.lengths and str(length) not in flags.lengths.split(","):
                continue
            contenders = settings_of(length)
            if flags.choose:
                tasks = flags.tasks.split(",") if flags.tasks else SIMPLE + BOOK
                found = ask(flags, name, length, tasks, {"exact": contenders["exact"]}, CHOOSING, lambda _: None)
                say(name, length, found, CHOOSING)
                continue
            wanted, rows = REPORTED[:flags.samples], []

            def report_found(found):
                rows[:] = rows_of(MODELS[name].label, length, found, wanted)
                whole = {"seed": SEED, "first_sample": REPORTED.start, "book": flags.book.name, "results": results + rows}
                if flags.out:
                    flags.out.write_text(json.dumps(whole, indent=1) + "\n")
                say(name, length, found, wanted)

            tasks = [task for task in known if not flags.tasks or task in flags.tasks.split(",")]
            if tasks:
                report_found(ask(flags, name, length, tasks, contenders, wanted, report_found))
            results += rows


if __name__ == "__main__":
    main()
