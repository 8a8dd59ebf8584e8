#!/usr/bin/env python3
"""Draws which keys of its past each chunk of a prompt chose.

    chosen_keys.py MODEL [--text FILE ...] [--tokens 4096] [--layers 2,10,20] [--mode recommended] [--budget 256] [--out chosen.png]

MODEL is what transformers' from_pretrained() takes, or a GGUF file. A row is a chunk of 128 queries, a column a key of the
past, and the colour says how many of the layer's heads chose it: KV heads, or query heads where each has a list. Right of each picture: the part of attention's weight
that exact attention of these queries puts on the keys that were chosen, beside the part that as many of the latest keys
have. Needs matplotlib.
"""
import argparse
import pathlib

import matplotlib
import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface

import quoka.transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--text", nargs="+", default=[str(pathlib.Path(__file__).parents[3] / "include/quoka/README.md")])
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--layers", default="2,10,20")
parser.add_argument("--mode", default="recommended")
parser.add_argument("--budget", type=int, default=256)
parser.add_argument("--out", default="chosen.png")
args = parser.parse_args()
layers = [int(n) for n in args.layers.split(",")]


# ---- what was chosen ---------------------------------------------------------------------------------

kept = {}  # (layer, first token of the chunk): parts of the weight, on the chosen keys and on the latest


def weighed(module, query, key, value, mask, scaling=None, **named):
    """attention_forward(), and the weights of a few queries of each chunk in the layers that are drawn."""
    with quoka.transformers.watched() as chosen:
        result = quoka.transformers.attention_forward(module, query, key, value, mask, scaling=scaling, **named)
    all_chosen.extend(chosen)
    for one in chosen:
        if one.layer not in layers or one.selection is None:
            continue
        rows = range(one.first, one.last, 16)
        group = query.shape[1] // key.shape[1]
        parts = []
        for head in range(query.shape[1]):
            logits = query[0, head, rows] @ key[0, head // group, :one.last].T * scaling
            future = torch.arange(one.last)[None] > torch.tensor(rows)[:, None]
            weights = logits.masked_fill(future, -torch.inf).softmax(1)[:, :one.first]
            positions = torch.from_numpy(one.selection.positions(0, head * one.selection.heads // query.shape[1])).long()
            past = weights.sum().clamp(min=1e-9)
            parts.append((weights[:, positions].sum() / past, weights[:, -len(positions):].sum() / past))
        kept[one.layer, one.first] = np.mean(parts, 0)
    return result


all_chosen = []
AttentionInterface.register("weighed", weighed)
AttentionMaskInterface.register("weighed", quoka.transformers._mask)
file = pathlib.Path(args.model)
where = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
name = str(file.parent) if where else args.model
tokenizer = AutoTokenizer.from_pretrained(name, **where)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="weighed", **where).eval()
text = "\n".join(pathlib.Path(path).read_text(encoding="utf-8") for path in args.text)
tokens = tokenizer(text, return_tensors="pt").input_ids[:, :args.tokens]
model.config.quoka = {"mode": args.mode, "budget": args.budget, "dense_layers": 1}
with torch.inference_mode():
    model(tokens, logits_to_keep=1)


# ---- the picture ---------------------------------------------------------------------------------------

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

figure, axes = pyplot.subplots(len(layers), 2, figsize=(11, 2.9 * len(layers)), width_ratios=(5, 1), squeeze=False,
                               layout="constrained")
length = tokens.shape[1]
for (picture, share), layer in zip(axes, layers):
    chunks = [one for one in all_chosen if one.layer == layer]
    count = np.full((len(chunks), length), np.nan)
    heads = max((one.selection.heads for one in chunks if one.selection is not None), default=1)
    for row, one in zip(count, chunks):
        row[:one.first] = 0
        if one.selection is None:
            row[:one.first] = heads
            continue
        for head in range(one.selection.heads):  # a list of a KV head, as all keys are, serves several
            row[one.selection.positions(0, head)] += heads // one.selection.heads
    # Neighbouring keys share a pixel: the most that one of them has.
    step = max(1, length // 512)
    wide = count[:, :length // step * step].reshape(len(chunks), -1, step)
    image = picture.imshow(np.where(np.isnan(wide).all(2), np.nan, np.nan_to_num(wide).max(2)), aspect="auto", cmap="magma_r",
                           vmin=0, vmax=heads, extent=(0, length, len(chunks) - 0.5, -0.5), interpolation="nearest")
    figure.colorbar(image, ax=picture, label="heads", ticks=range(heads + 1), pad=0.01)
    picture.set(ylabel=f"layer {layer}\nchunk of 128", facecolor="0.93")
    firsts = [one.first for one in chunks if (layer, one.first) in kept]
    parts = np.array([kept[layer, first] for first in firsts])
    rows = [first / 128 for first in firsts]
    share.plot(parts[:, 0], rows, color="C3", label="chosen")
    share.plot(parts[:, 1], rows, color="0.6", label="latest")
    share.set(xlim=(0, 1.02), ylim=picture.get_ylim())
axes[-1][0].set_xlabel("key of the past")
axes[-1][1].set_xlabel("part of the past's weight")
axes[0][0].set_title(f"{args.mode}, {args.budget} keys of a head, on average")
axes[0][1].legend(loc="center", bbox_to_anchor=(0.6, 0.5), fontsize="small")
figure.savefig(args.out, dpi=75)
for layer in layers:
    parts = [value for (of, _), value in kept.items() if of == layer]
    print(f"layer {layer}: chosen keys have {100 * np.mean([p[0] for p in parts]):.0f} % of the past's weight, "
          f"as many of the latest {100 * np.mean([p[1] for p in parts]):.0f} %")
print(args.out)
