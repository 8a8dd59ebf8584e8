#!/usr/bin/env python3
"""The gain by the codes that quoka.transformers.Cache keeps for selection: a prompt in chunks, then
single tokens.

    kept_codes.py [--tokens 8000] [--steps 32] [--chunk 128] [--layers 4] [--rounds 3] [--threads 1]

A model of random weights in the shape of SmolLM2-135M with fewer layers, float32; all but the first select, an eighth of the
past by `balanced`, single tokens too. Codes are kept, or made again in each call; exact attention
beside them. CPU time of all threads, in turns, medians. The logits of both are compared, bit for
bit.
"""
import argparse
import statistics
import time

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface

import quoka
import quoka.transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("tokens", 8000), ("steps", 32), ("chunk", 128), ("layers", 4), ("rounds", 3), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
torch.set_num_threads(args.threads)
quoka.set_threads(args.threads)

in_attention = 0.0


def timed(*arguments, **named):
    global in_attention
    begin = time.process_time()
    result = quoka.transformers.attention_forward(*arguments, **named)
    in_attention += time.process_time() - begin
    return result


class Anew(quoka.transformers.Cache):
    """Attention does not find in other tensors than the cache's own what is kept beside these."""

    def update(self, *arguments, **named):
        return tuple(x[:] for x in super().update(*arguments, **named))


AttentionInterface.register("timed", timed)
AttentionMaskInterface.register("timed", quoka.transformers._mask)
torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=args.layers, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=100000.0),
    attn_implementation="timed").eval()
prompt, more = torch.randint(2, 49000, (1, args.tokens + args.steps)).split([args.tokens, args.steps], 1)
WAYS = {"exact": ("exact", quoka.transformers.Cache), "balanced, codes made again": ("balanced", Anew),
        "balanced, codes kept": ("balanced", quoka.transformers.Cache)}
times, logits = {way: [] for way in WAYS}, {}
with torch.inference_mode():
    model(prompt[:, :64])
    for _ in range(args.rounds):
        for way, (mode, cache_of) in WAYS.items():
            model.config.quoka = {"mode": mode, "budget": 0.125, "decode": True, "chunk": args.chunk}
            cache, measured = cache_of(config=model.config), []
            for parts in (prompt.split(args.chunk, 1), more.split(1, 1)):
                in_attention, begin = 0.0, time.process_time()
                for part in parts:
                    logits[way] = model(part, past_key_values=cache, logits_to_keep=1).logits
                measured += [time.process_time() - begin, in_attention]
            times[way].append(measured)
assert torch.equal(logits["balanced, codes kept"], logits["balanced, codes made again"])
print(f"{args.tokens} tokens in chunks of {args.chunk}, {args.threads} thread(s), {quoka.isa()}, torch {torch.__version__}")
print(f"{'':30s} prompt, s  attention  token, ms  attention")
for way, rows in times.items():
    whole, inside, step, step_inside = (statistics.median(x) for x in zip(*rows))
    print(f"{way:30s} {whole:9.2f}  {inside:9.2f}  {1e3 * step / args.steps:9.2f}  {1e3 * step_inside / args.steps:9.2f}")
