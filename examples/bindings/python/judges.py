#!/usr/bin/env python3
"""Other people's judges, unchanged, on a model with quoka's attention: numbers that are hidden in a text, and asked for.

    judges.py lm_eval MODEL [--questions 40] [--tokens 1800] [--parts 0.25 0.125]     EleutherAI's lm-evaluation-harness
    judges.py kvpress MODEL [the same options]                                        NVIDIA's kvpress: its presses beside selection

--out FILE keeps what is printed as JSON.

MODEL is a folder, or what transformers' from_pretrained() takes. lm_eval runs by its own command line, over sdpa, over
quoka's exact attention and over selections, on a task that it reads from a folder. kvpress runs its
own pipeline: a press cuts the cache of a text once it was read, before the question comes;
selection keeps the cache, and each chunk, the question too, reads a part of it. Answers of one
token at a time see the whole cache in both.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = ("include/quoka/README.md", "examples/README.md", "bench/README.md", "README.md")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "purple", "orange", "grey")


def questions(count, tokens, tokenizer):
    """(text with three numbers in it, question, how the answer begins, number); the text has about `tokens` tokens."""
    rng = random.Random(7)
    words = " ".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    words = re.sub(r"\s+", " ", re.sub(r"[`*|#\[\]()<>_]", "", words)).split(" ")
    per_word = len(tokenizer(" ".join(words)).input_ids) / len(words)
    length = int(tokens / per_word)
    for _ in range(count):
        begin = rng.randrange(len(words) - length)
        text = words[begin:begin + length]
        colours = rng.sample(COLOURS, 3)
        numbers = [str(rng.randrange(10000, 99999)) for _ in colours]
        for colour, number in zip(colours, numbers):
            text.insert(rng.randrange(len(text)), f"The code of the {colour} door is {number}.")
        yield (" ".join(text), f"\n\nQuestion: What is the code of the {colours[0]} door?",
               f"Answer: The code of the {colours[0]} door is", numbers[0])


def settings(args):
    """Name, and what the environment says."""
    yield "sdpa", "sdpa", {}
    yield "quoka, exact", "quoka", {}
    for part in args.parts:
        for mode in args.modes:
            yield f"quoka, {mode}, {part}", "quoka", {"QUOKA_MODE": mode, "QUOKA_BUDGET": str(part)}


def cpu_of_children():
    times = os.times()
    return times.children_user + times.children_system


def said(results, name, right, seconds, unit):
    print(f"{name:36s} {100 * right:5.1f} % right   {seconds:7.2f} {unit} each", flush=True)
    results.append({"way": name, "right": round(right, 4), unit: round(seconds, 2)})


def lm_eval(args):
    from transformers import AutoTokenizer

    results = []
    with tempfile.TemporaryDirectory() as folder:
        asked = pathlib.Path(folder, "asked.jsonl")
        asked.write_text("".join(json.dumps({"text": f"{text}{question}\n{begun}", "answer": answer}) + "\n"
                                 for text, question, begun, answer
                                 in questions(args.questions, args.tokens, AutoTokenizer.from_pretrained(args.model))))
        pathlib.Path(folder, "doors.yaml").write_text(
            f"task: doors\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {asked}}}}}\ntest_split: test\n"
            'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
            'generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}\n'
            "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
            'filter_list: [{name: number, filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]}]\n')
        for name, implementation, variables in settings(args):
            begin, out = cpu_of_children(), pathlib.Path(folder, "out")
            subprocess.run([sys.executable, "-m", "quoka", "lm_eval", "--model", "hf", "--model_args",
                            f"pretrained={args.model},attn_implementation={implementation},dtype=float32,max_length=8192",
                            "--tasks", "doors", "--include_path", folder, "--device", "cpu", "--batch_size", "1",
                            "--output_path", str(out)],
                           check=True, stdout=subprocess.DEVNULL, stderr=None if args.verbose else subprocess.DEVNULL,
                           env={**os.environ, **variables, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": folder, "HF_HOME": folder})
            file = max(out.rglob("results_*.json"), key=os.path.getmtime)
            score = json.loads(file.read_text())["results"]["doors"]["exact_match,number"]
            said(results, name, score, (cpu_of_children() - begin) / args.questions, "CPU s")
    return results


def kvpress(args):
    import torch
    import kvpress as presses
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    import quoka.transformers

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked, results = list(questions(args.questions, args.tokens, tokenizer)), []
    tokenizer.chat_template = None  # a continuation is asked for
    ways = [("sdpa, all", "sdpa", None, None), ("quoka, exact, all", "quoka", None, None)]
    for part in args.parts:
        for press in ("SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress"):
            ways.append((f"{press}, keeps {part}", "sdpa", getattr(presses, press)(compression_ratio=1 - part), None))
        for mode in args.modes:
            ways.append((f"quoka, {mode}, {part}", "quoka", None, {"mode": mode, "budget": part}))
    for name, implementation, press, chosen in ways:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=implementation).eval()
        model.config.quoka = chosen or {}
        pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
        begin, right = time.process_time(), 0
        with torch.inference_mode():
            for text, question, begun, answer in asked:
                got = pipe(text, question=question, answer_prefix=begun, press=press, max_new_tokens=8)["answer"]
                right += (re.findall("[0-9]+", got) or [""])[0] == answer
        said(results, name, right / len(asked), (time.process_time() - begin) / len(asked), "CPU s")
    return results


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("judge", choices=("lm_eval", "kvpress"))
parser.add_argument("model")
parser.add_argument("--questions", type=int, default=40)
parser.add_argument("--tokens", type=int, default=1800)
parser.add_argument("--parts", type=float, nargs="+", default=[0.25, 0.125], help="of the past, kept or read")
parser.add_argument("--modes", nargs="+", default=["balanced", "paper"])
parser.add_argument("--out")
parser.add_argument("--verbose", action="store_true")
args = parser.parse_args()
measured = {"lm_eval": lm_eval, "kvpress": kvpress}[args.judge](args)
if args.out:
    named = [args.judge, pathlib.Path(args.model).name, f"--questions {args.questions} --tokens {args.tokens}",
             "--parts " + " ".join(map(str, args.parts)), "--modes " + " ".join(args.modes)]
    versions = {name: metadata.version(name) for name in ("transformers", "torch", args.judge)}
    pathlib.Path(args.out).write_text(json.dumps({
        "command": "examples/bindings/python/judges.py " + " ".join(named), "questions": args.questions, "tokens": args.tokens,
        "versions": versions, "results": measured}, indent=1) + "\n", encoding="utf-8")
