#!/usr/bin/env python3
"""Time to the first token in transformers: quoka beside sdpa, a prompt in one call, and its chunks.

    prefill.py [--tokens 4096] [--rounds 3] [--chunk 512] [--threads 1] [--clock cpu] [--model MODEL --text FILE] [--out FILE]
    prefill.py --model SmolLM2.gguf --text long.txt --tokens 8000 --threads 2 --clock wall --out FILE    on an idle machine

Without --model, which is a folder, a GGUF file, or what from_pretrained() takes: a model of random weights in the shape of
SmolLM2-135M, float32: 30 layers, 9 query heads and 3 KV heads of 64 channels. Measures CPU time of
all threads, in turns, so that a loaded machine changes little; medians of the ratios to sdpa in one
call and in chunks, and the part of the time that attention takes. Torch's waiting threads count as
busy: one thread, or --clock wall where nothing else runs. --out keeps all rounds as JSON.
"""
import argparse
import json
import pathlib
import sys
import time

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import quoka
import quoka.transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("tokens", 4096), ("rounds", 3), ("chunk", 512), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
for name in ("model", "text", "out"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
if bool(args.model) != bool(args.text):
    parser.error("--model and --text come together")
clock = time.process_time if args.clock == "cpu" else time.perf_counter
torch.set_num_threads(args.threads)
quoka.set_threads(args.threads)

in_attention = 0.0


def timed(attention):
    def call(*arguments, **named):
        global in_attention
        begin = clock()
        result = attention(*arguments, **named)
        in_attention += clock() - begin
        return result
    return call


AttentionInterface.register("timed_sdpa", timed(sdpa_attention_forward))
AttentionMaskInterface.register("timed_sdpa", sdpa_mask)
AttentionInterface.register("timed_quoka", timed(quoka.transformers.attention_forward))
AttentionMaskInterface.register("timed_quoka", quoka.transformers._mask)

torch.manual_seed(1)
if args.model:
    file = pathlib.Path(args.model)
    where = (file.parent, file.name) if file.suffix == ".gguf" else (args.model, None)
    tokenizer = AutoTokenizer.from_pretrained(where[0], gguf_file=where[1])
    model = AutoModelForCausalLM.from_pretrained(where[0], gguf_file=where[1], dtype=torch.float32).eval()
    tokens = tokenizer(pathlib.Path(args.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :args.tokens]
    if tokens.shape[1] < args.tokens:
        parser.error(f"--text has {tokens.shape[1]} tokens, and --tokens is {args.tokens}")
else:
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=100000.0)).eval()
    tokens = torch.randint(2, 49000, (1, args.tokens))
whole, chunks = (args.tokens,), (args.chunk,)
WAYS = [("sdpa, one call", "timed_sdpa", whole, DynamicCache, {}),
        (f"sdpa, chunks of {args.chunk}", "timed_sdpa", chunks, DynamicCache, {}),
        ("quoka, exact", "timed_quoka", whole, quoka.transformers.Cache, {}),
        ("quoka, exact, int8", "timed_quoka", whole, quoka.transformers.Cache, {"arithmetic": "int8"}),
        ("quoka, balanced, 1/8", "timed_quoka", whole, quoka.transformers.Cache, {"mode": "balanced", "budget": 0.125}),
        ("quoka, balanced, 1/8, int8", "timed_quoka", whole, quoka.transformers.Cache,
         {"mode": "balanced", "budget": 0.125, "arithmetic": "int8"})]
times = {way[0]: [] for way in WAYS}
with torch.inference_mode():
    model(tokens[:, :64])
    for _ in range(args.rounds):
        for name, implementation, (chunk,), cache_of, settings in WAYS:
            model.set_attn_implementation(implementation)
            model.config.quoka = settings
            in_attention, cache, begin = 0.0, cache_of(config=model.config), clock()
            for part in tokens.split(chunk, 1):
                model(part, past_key_values=cache, logits_to_keep=1)
            times[name].append((clock() - begin, in_attention))
            print(f"{name}: {times[name][-1][0]:.1f}", file=sys.stderr, flush=True)
print(f"{args.tokens} tokens, {args.threads} thread(s), {quoka.isa()}, torch {torch.__version__}; int8 is "
      f"{quoka.arithmetic_used('int8')} here")
print(f"{'':30s} seconds  in attention  times as fast as sdpa in one call, in chunks")
middle = args.rounds // 2
for name, measured in times.items():
    to_whole, to_chunks = (sorted(base[0] / own[0] for base, own in zip(times[way[0]], measured))[middle] for way in WAYS[:2])
    seconds, inside = (sorted(x)[middle] for x in zip(*measured))
    print(f"{name:30s} {seconds:7.1f}  {inside:7.1f} ({100 * inside / seconds:2.0f} %)  {to_whole:6.2f}  {to_chunks:6.2f}")
if args.out:
    said = " ".join(f"--{name} {pathlib.Path(x).name if name in ('model', 'text') else x}"
                    for name, x in vars(args).items() if x is not None and name != "out")
    pathlib.Path(args.out).write_text(json.dumps({
        "command": f"examples/bindings/python/prefill.py {said}", "isa": quoka.isa(), "torch": torch.__version__,
        "transformers": transformers.__version__, "int8_is": quoka.arithmetic_used("int8"),
        "results": [{"way": name, "seconds": [round(x, 3) for x, _ in measured], "in_attention": [round(x, 3) for _, x in measured]}
                    for name, measured in times.items()]}, indent=1) + "\n", encoding="utf-8")
