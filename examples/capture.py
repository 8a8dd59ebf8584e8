#!/usr/bin/env python3
"""Captures the queries, keys and values that attention layers of a Hugging Face model receive, for prefill and evaluate.

    pip install torch safetensors "transformers>=4.53"
    python3 examples/capture.py TinyLlama/TinyLlama-1.1B-Chat-v1.0 prompt.txt capture.safetensors --layers 2,11

For Llama, Qwen, Mistral, and all models that call attention by the registry of transformers. The file holds NAME.q [q_heads, len,
head_dim], NAME.k [kv_heads, len, head_dim] and NAME.v [kv_heads, len, v_dim] for each layer, after RoPE, and the scale of softmax
in its metadata. The whole prompt runs at once, with its own attention. Layers with a sliding window, sinks or a soft-cap attend
differently from what prefill and evaluate compute.
"""

import argparse
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a name or a folder")
parser.add_argument("prompt", type=pathlib.Path, help="a text file")
parser.add_argument("result", type=pathlib.Path)
parser.add_argument("--layers", required=True, type=lambda text: {int(n) for n in text.split(",")}, help="numbers from 0, with commas")
args = parser.parse_args()

tensors, metadata = {}, {"model": args.model, "rope": "applied"}


def capture(module, query, key, value, attention_mask, **kwargs):
    if module.layer_idx in args.layers:  # [1, q_heads, len, head_dim]; key, value [1, kv_heads, len, ...]
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            tensors[f"layer{module.layer_idx}.{name}"] = tensor[0].detach().cpu().clone().contiguous()
        metadata["softmax_scale"] = str(kwargs.get("scaling") or query.shape[-1] ** -0.5)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("capture", capture)
AttentionMaskInterface.register("capture", sdpa_mask)
model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="capture")
missing = sorted(n for n in args.layers if not 0 <= n < model.config.num_hidden_layers)
if missing:
    parser.error(f"--layers has {missing}, the model has layers 0 to {model.config.num_hidden_layers - 1}")
ids = AutoTokenizer.from_pretrained(args.model)(args.prompt.read_text(encoding="utf-8"), return_tensors="pt").input_ids
with torch.no_grad():
    model(ids, use_cache=False)
save_file(tensors, args.result, metadata=metadata)
print(f"{args.result}: {ids.shape[1]} tokens, layers {', '.join(map(str, sorted(args.layers)))}")
