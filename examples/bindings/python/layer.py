#!/usr/bin/env python3
"""Attention's part of a large model's prefill: one layer of random weights in the shape of
Llama-3.1-8B, a prompt in one call.

    layer.py [--tokens 8192] [--dtype bfloat16] [--ways sdpa,exact,...] [--no-weights] [--out FILE.json]

32 query heads and 8 KV heads of 128 channels, hidden 4,096, 14,336 in between. The layer runs once with no attention at all,
which is what its weights take, and each attention alone on the layer's own queries, keys and values: CPU seconds of one
thread. A whole layer is the sum; its cache's copies and the head of the model are left out.
"""
import argparse
import json
import sys
import time

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import quoka
import quoka.transformers

WAYS = {"sdpa": None, "exact": {}, "bf16": {"arithmetic": "bf16"}, "int8": {"arithmetic": "int8"},
        "balanced": {"mode": "balanced", "budget": 0.125, "dense_layers": 0},
        "balanced+int8": {"mode": "balanced", "budget": 0.125, "dense_layers": 0, "arithmetic": "int8"}}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--ways", default="sdpa,exact,bf16,int8,balanced")
parser.add_argument("--no-weights", action="store_true", help="of 256 tokens alone, for their queries")
parser.add_argument("--out", default="")
args = parser.parse_args()
torch.set_num_threads(1)
quoka.set_threads(1)
seen = []


def none(module, query, key, value, mask, scaling=None, **named):
    seen[:] = module, query, key, value, scaling
    return query.transpose(1, 2), None


AttentionInterface.register("none", none)
AttentionMaskInterface.register("none", quoka.transformers._mask)
torch.manual_seed(1)
config = LlamaConfig(vocab_size=8192, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
                     num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=True)
model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype), attn_implementation="none").eval()
result = {"command": " ".join(["examples/bindings/python/layer.py", *sys.argv[1:]]), "tokens": args.tokens, "dtype": args.dtype,
          "isa": quoka.isa(), "torch": torch.__version__, "attention": {}}
with torch.inference_mode():
    tokens = torch.randint(2, 8000, (1, args.tokens))
    if args.no_weights:
        layer = model.model.layers[0].self_attn
        q, k, v = (0.2 * torch.randn(1, heads, args.tokens, 128, dtype=model.dtype) for heads in (32, 8, 8))
        seen[:] = layer, q, k, v, layer.scaling
    else:
        begin = time.process_time()
        model(tokens, logits_to_keep=1, use_cache=False)
        result["weights"] = time.process_time() - begin
        print(f"weights     {result['weights']:7.2f} s", flush=True)
    module, query, key, value, scaling = seen
    for way in args.ways.split(","):
        begin = time.process_time()
        if WAYS[way] is None:
            sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)
        else:
            with quoka.transformers.settings(WAYS[way]):
                quoka.transformers.attention_forward(module, query, key, value, None, scaling=scaling)
        result["attention"][way] = time.process_time() - begin
        print(f"{way:18s} {result['attention'][way]:7.2f} s", flush=True)
if args.out:
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
