#!/usr/bin/env python3
"""Time to the first token in transformers: quoka beside sdpa, a prompt in one call, and its chunks.

    prefill.py [--tokens 4096] [--rounds 3] [--chunk 512] [--threads 1]

A model of random weights in the shape of SmolLM2-135M, float32: 30 layers, 9 query heads and 3 KV heads of 64 channels. What
is measured is CPU time of all threads, in turns, so that a loaded machine changes little; medians of the ratios to sdpa in
one call, and the part of it that attention takes. Torch's waiting threads count as busy: one thread unless you know better.
"""
import argparse
import sys
import time

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import quoka
import quoka.transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("tokens", 4096), ("rounds", 3), ("chunk", 512), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
torch.set_num_threads(args.threads)
quoka.set_threads(args.threads)

in_attention = 0.0


def timed(attention):
    def call(*arguments, **named):
        global in_attention
        begin = time.process_time()
        result = attention(*arguments, **named)
        in_attention += time.process_time() - begin
        return result
    return call


AttentionInterface.register("timed_sdpa", timed(sdpa_attention_forward))
AttentionMaskInterface.register("timed_sdpa", sdpa_mask)
AttentionInterface.register("timed_quoka", timed(quoka.transformers.attention_forward))
AttentionMaskInterface.register("timed_quoka", quoka.transformers._mask)

torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=100000.0)).eval()
tokens = torch.randint(2, 49000, (1, args.tokens))
whole, chunks = (args.tokens,), (args.chunk,)
WAYS = [("sdpa, one call", "timed_sdpa", whole, DynamicCache, {}),
        (f"sdpa, chunks of {args.chunk}", "timed_sdpa", chunks, DynamicCache, {}),
        ("quoka, exact", "timed_quoka", whole, quoka.transformers.Cache, {}),
        ("quoka, exact, int8", "timed_quoka", whole, quoka.transformers.Cache, {"arithmetic": "int8"}),
        ("quoka, recommended, 1/8", "timed_quoka", whole, quoka.transformers.Cache, {"mode": "recommended", "budget": 0.125})]
times = {way[0]: [] for way in WAYS}
with torch.inference_mode():
    model(tokens[:, :64])
    for _ in range(args.rounds):
        for name, implementation, (chunk,), cache_of, settings in WAYS:
            model.set_attn_implementation(implementation)
            model.config.quoka = settings
            in_attention, cache, begin = 0.0, cache_of(config=model.config), time.process_time()
            for part in tokens.split(chunk, 1):
                model(part, past_key_values=cache, logits_to_keep=1)
            times[name].append((time.process_time() - begin, in_attention))
            print(f"{name}: {times[name][-1][0]:.1f}", file=sys.stderr, flush=True)
print(f"{args.tokens} tokens, {args.threads} thread(s), {quoka.isa()}, torch {torch.__version__}; int8 is "
      f"{quoka.arithmetic_used('int8')} here")
print(f"{'':28s} seconds  in attention  times as fast as sdpa in one call")
middle = args.rounds // 2
for name, measured in times.items():
    ratios = sorted(base[0] / own[0] for base, own in zip(times[WAYS[0][0]], measured))
    seconds, inside = (sorted(x)[middle] for x in zip(*measured))
    print(f"{name:28s} {seconds:7.1f}  {inside:7.1f} ({100 * inside / seconds:2.0f} %)  {ratios[middle]:6.2f}")
