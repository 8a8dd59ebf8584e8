#!/usr/bin/env python3
"""Runs a model of onnxruntime-genai's builder as it is, rewritten, and rewritten to select: does it say the same?

    real_model.py FOLDER LIBRARY [--text FILE] [--prompt 2000] [--generate 64] [--preset recommended] [--budget 0.25]

FOLDER is the builder's; the script writes model.quoka.onnx and model.selecting.onnx there and copies the library to it.
Prints for each model how many greedy tokens agree with the model as it is before the first that differs, the divergence of
the first token in nats, and the seconds that the prompt took. Fails if exact attention says something else at a token that
is no near tie, or if selection leaves nothing out. Needs onnxruntime-genai and onnx.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
NEAR_TIE = 0.05  # rounding can swap two logits that are closer than this
ROUNDING = 0.01  # nats: int4 models round activations to 8 bits, which turns a difference in the last bit into 0.003


def run(folder, file, library, prompt, count):
    """(tokens, log probabilities behind the prompt, distance of the two best logits at each token, seconds of the prompt)."""
    import numpy as np
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    if library:
        config.overlay(json.dumps({"model": {"decoder": {"filename": file, "session_options": {"custom_ops_library": library}}}}))
    model = genai.Model(config)
    tokens = genai.Tokenizer(model).encode(prompt["text"])[:prompt["tokens"]]
    if len(tokens) < prompt["tokens"]:
        sys.exit(f"real_model.py: the text has {len(tokens)} tokens, --prompt {prompt['tokens']} asks for more")
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=len(tokens) + count, min_length=len(tokens) + count)
    generator = genai.Generator(model, parameters)
    began = time.perf_counter()
    generator.append_tokens(tokens)
    said, distances, behind = [], [], None
    while len(said) < count:
        logits = np.array(generator.get_logits(), np.float64).reshape(-1)
        if behind is None:
            seconds = time.perf_counter() - began
            behind = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        two = np.partition(logits, -2)[-2:]
        distances.append(two[1] - two[0])
        generator.generate_next_token()
        said.append(int(generator.get_next_tokens()[0]))
    return said, behind, distances, seconds


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("folder", type=pathlib.Path)
    parse.add_argument("library", type=pathlib.Path)
    parse.add_argument("--text", type=pathlib.Path, default=HERE.parents[1] / "data" / "pride_and_prejudice.txt")
    parse.add_argument("--prompt", type=int, default=2000)
    parse.add_argument("--generate", type=int, default=64)
    parse.add_argument("--preset", default="recommended")
    parse.add_argument("--budget", default="0.25")
    flags = parse.parse_args()
    for path in (flags.folder / "genai_config.json", flags.library, flags.text):
        if not path.is_file():
            parse.error(f"there is no file {path}")
    if min(flags.prompt, flags.generate) < 1:
        parse.error(f"--prompt is {flags.prompt} and --generate {flags.generate}, but both must be at least 1")
    import numpy as np

    shutil.copy(flags.library, flags.folder / flags.library.name)
    for file, options in (("model.quoka.onnx", []), ("model.selecting.onnx", ["--preset", flags.preset, "--budget", flags.budget])):
        subprocess.run([sys.executable, HERE / "rewrite.py", flags.folder / "model.onnx", flags.folder / file, *options], check=True, stdout=subprocess.DEVNULL)
    prompt = {"text": flags.text.read_text(), "tokens": flags.prompt}
    found = {}
    for name, file in (("as it is", None), ("exact", "model.quoka.onnx"), (f"{flags.preset} {flags.budget}", "model.selecting.onnx")):
        found[name] = run(flags.folder, file, flags.library.name if file else None, prompt, flags.generate)
        tokens, behind, _, seconds = found[name]
        (base, expected, distances, _), wrong = found["as it is"], None
        same = next((i for i, (ours, theirs) in enumerate(zip(tokens, base)) if ours != theirs), len(base))
        divergence = float((np.exp(expected) * (expected - behind)).sum())
        print(f"{name:20} {same:4} of {len(base)} tokens the same   {divergence:.6f} nats   prompt {seconds:.2f} s", flush=True)
        if name == "exact" and (divergence > ROUNDING or (same < len(base) and distances[same] > NEAR_TIE)):
            wrong = f"exact attention says something else at token {same}, where the two best logits are {distances[min(same, len(base) - 1)]:.3f} apart"
        if file == "model.selecting.onnx" and divergence == 0:
            wrong = f"nothing was left out: is the prompt of {flags.prompt} tokens too short for {flags.preset}?"
        if wrong:
            sys.exit(f"real_model.py: {wrong}")


if __name__ == "__main__":
    main()
