#!/usr/bin/env python3
"""Seconds to the first token of a GGUF model by one engine, each prompt once after a short one: JSON on stdout. models.py calls it.

    first_token.py ENGINE MODEL.gguf --text FILE --tokens 2048,8192 [--threads 2] [--chunk 512]

ENGINE: openvino, openvino:xattention=0.8, transformers:sdpa, transformers:exact, transformers:exact:arithmetic=int8,
transformers:balanced:budget=0.125:arithmetic=int8
"""

import argparse
import json
import pathlib
import sys
import time

from turns import Quiet


def settings_of(text):
    return dict(pair.split("=", 1) for pair in text)


def engine_arguments(what, tokens):
    """A parser of the arguments that the programs share; `tokens`: the default of --tokens."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("model")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=type(tokens), default=tokens)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512)
    return parser


def of_engine(flags, openvino, transformers):
    """The engine's form of the model, with the settings in the engine's name."""
    name, *parts = flags.engine.split(":")
    if name == "openvino":
        return openvino(flags.model, settings_of(parts), flags)
    if name == "transformers" and parts:
        return transformers(flags.model, {"mode": parts[0]} | settings_of(parts[1:]), flags)
    sys.exit(f"{flags.engine} is none of openvino, transformers:MODE")


def token_ids(model, text):
    """Tokens of a text's beginning, by transformers' tokenizer of a GGUF file."""
    import transformers as t

    path = pathlib.Path(model)
    return t.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)(text.read_text()[:400_000]).input_ids


def openvino(model, options, flags):
    import numpy as np
    import openvino
    import openvino_genai as genai

    schedule = genai.SchedulerConfig()
    schedule.max_num_batched_tokens, schedule.enable_prefix_caching, schedule.cache_size = flags.chunk, False, 2
    if "xattention" in options:
        sparse = genai.SparseAttentionConfig()
        sparse.mode, sparse.xattention_threshold = genai.SparseAttentionMode.XATTENTION, float(options["xattention"])
        schedule.use_sparse_attention, schedule.sparse_attention_config = True, sparse
    hint = {"INFERENCE_PRECISION_HINT": options["precision"]} if "precision" in options else {}
    pipe = genai.LLMPipeline(model, "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=flags.threads, **hint)
    generation = genai.GenerationConfig()
    generation.max_new_tokens = 1
    ids = np.array(pipe.get_tokenizer().encode(flags.text.read_text()).input_ids.data).reshape(1, -1).astype(np.int64)

    def first_token(count):
        if ids.shape[1] < count:
            sys.exit(f"{flags.text} has {ids.shape[1]} tokens, {count} are asked for")
        prompt = np.ascontiguousarray(ids[:, :count])
        return pipe.generate(genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt))), generation)

    return first_token


def transformers_network(model, options, threads):
    """(network, a function that makes a new cache), the weights in float. options: the mode, sdpa or one of this library's, and its settings."""
    import torch
    import transformers as t

    torch.set_num_threads(threads)
    mode = options.pop("mode")
    path = pathlib.Path(model)
    ours = mode != "sdpa"
    if ours:
        import quoka
        import quoka.transformers

        quoka.set_threads(threads)
    network = t.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="quoka" if ours else "sdpa").eval()
    if ours:
        network.config.quoka = {"mode": mode} | {key: float(x) if x.replace(".", "").isdigit() else x for key, x in options.items()}
    made = quoka.transformers.Cache if ours else t.DynamicCache
    return network, lambda: made(config=network.config)


def transformers(model, options, flags):
    import torch

    network, cache = transformers_network(model, options, flags.threads)
    ids = torch.tensor([token_ids(model, flags.text)])

    def first_token(count):
        with torch.inference_mode():
            return network(ids[:, :count], past_key_values=cache(), logits_to_keep=1).logits.argmax()

    return first_token


def main():
    parser = engine_arguments(__doc__, "2048,8192")
    parser.add_argument("--quiet", action="store_true", help="at a real-time priority while a prompt is computed")
    flags = parser.parse_args()
    first_token = of_engine(flags, openvino, transformers)
    measured, quiet = [], Quiet(flags.quiet)
    with quiet:
        first_token(256)
    for count in map(int, flags.tokens.split(",")):
        with quiet:
            wall, cpu = time.perf_counter(), time.process_time()
            first_token(count)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        measured.append({"tokens": count, "s": round(wall, 4), "cpu_s": round(cpu, 4)})
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
