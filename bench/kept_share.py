#!/usr/bin/env python3
"""How well does the kept share, which selection reports at no extra cost, predict a model's loss?

    kept_share.py NAME=MODEL.gguf ... --text emma.txt --out kept_share.json [--tokens 4096] [--last 512] [--texts 1]

A prompt without its last tokens is read with all keys, once. Then the last ones are read by each
setting, in chunks of 128, and their logits compared with those that exact attention gives (KL,
nat). Beside it the kept share: how much of their attention the queries that choose keep
(quoka.Selection.kept_shares), the mean over heads and layers. For the presets as they are called it
also writes the keys that each query head keeps, by layer. Weights are the file's, as floats; an
interval of 95 % is of 2,000 resamples of the chunks' positions.
"""
import argparse
import copy
import json
import pathlib
import platform
import random
import re
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quoka
import quoka.transformers

CHUNK = 128


def settings(tokens, layers, queries):
    """(name, settings): presets as they are called, with other numbers of voters and by parts of the prompt, and single layers."""
    for mode in ("recommended", "balanced"):
        yield mode, {"mode": mode, "dense_layers": 0}
        for voters in queries:
            yield f"{mode}, {voters} queries", {"mode": mode, "dense_layers": 0, "queries": voters}
        yield f"{mode}, the first layer dense", {"mode": mode, "dense_layers": 1}
        for part in (4, 8, 16):
            yield f"{mode}, 1/{part}", {"mode": mode, "budget": tokens // part, "dense_layers": 0}
    for part in (8, 16):
        yield f"recommended, 1/{part}, the first layer dense", {"mode": "recommended", "budget": tokens // part, "dense_layers": 1}
    yield "paper, 1/8", {"mode": "paper", "budget": tokens // 8, "dense_layers": 0}
    for layer in layers:
        yield f"layer {layer}, 1/16", {"mode": "recommended", "budget": tokens // 16, "dense_layers": [n for n in layers if n != layer]}


def interval(values):
    draw = random.Random(1)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(2000))
    return [round(x, 5) for x in (sum(values) / len(values), means[50], means[-51])]


def model_of(path):
    file = pathlib.Path(path)
    load = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **load)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, attn_implementation="quoka", **load).eval()
    return tokenizer, model


def logits_of(model, ids, cache, given):
    """Log-probabilities after each token, and what each chunk chose."""
    model.config.quoka = given
    with torch.inference_mode(), quoka.transformers.watched() as chosen:
        logits = model(ids, past_key_values=cache).logits[0]
    return torch.log_softmax(logits.float(), -1), chosen


def measure(name, path, args):
    tokenizer, model = model_of(path)
    whole = tokenizer(pathlib.Path(args.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    layers = [n for n in range(model.config.get_text_config().num_hidden_layers) if kinds is None or kinds[n] == "full_attention"]
    found = {}
    for text in range(args.texts):
        ids = whole[:, text * args.tokens:(text + 1) * args.tokens]
        first, target = ids.shape[1] - args.last, ids[0, ids.shape[1] - args.last + 1:]
        model.config.quoka = {"mode": "exact"}
        cache = quoka.transformers.Cache()
        with torch.inference_mode():
            model(ids[:, :first], past_key_values=cache, logits_to_keep=1)
        exact, _ = logits_of(model, ids[:, first:], copy.deepcopy(cache), {"mode": "exact"})
        for setting, given in settings(args.tokens, layers if args.layers else [], args.queries):
            if not re.search(args.settings, setting):
                continue
            begin = time.time()
            ours, chosen = logits_of(model, ids[:, first:], copy.deepcopy(cache), given)
            kl = (exact.exp() * (exact - ours)).sum(-1)
            loss = (exact - ours)[:-1].gather(1, target[:, None])[:, 0]
            of = found.setdefault(setting, {"kl": [], "loss": [], "kept": {}, "keys": {}, "agrees": [], "chunks": []})
            of["kl"] += kl.tolist()
            of["loss"] += loss.tolist()
            of["agrees"] += (exact.argmax(-1) == ours.argmax(-1)).float().tolist()
            for one in chosen:
                heads = model.config.get_text_config().num_attention_heads
                keys = np.full(heads, one.first) if one.selection is None else np.array(
                    [one.selection.count(0, h * one.selection.heads // heads) for h in range(heads)])
                of["keys"].setdefault(one.layer, []).append(keys / one.first)
                if one.kept_share is not None:
                    of["kept"].setdefault(one.layer, []).append((one.first, one.kept_share))
            for i in range(0, args.last, CHUNK):
                shares = [share for rows in of["kept"].values() for at, share in rows[-(args.last // CHUNK):] if at == first + i]
                if shares:
                    of["chunks"].append([round(float(np.mean(shares)), 5), round(float(kl[i:i + CHUNK].mean()), 6)])
            print(f"{name}, text {text}: {setting}: KL {float(kl.mean()):.5f}, {time.time() - begin:.0f} s", file=sys.stderr)
    rows = []
    for setting, of in found.items():
        shares = [share for kept in of["kept"].values() for _, share in kept]
        keys = {layer: np.mean(rows, 0) for layer, rows in of["keys"].items()}
        row = {"model": name, "tokens": args.tokens, "settings": setting, "samples": len(of["kl"]), "kl": interval(of["kl"]),
               "perplexity": [round(100 * float(np.expm1(x)), 3) for x in interval(of["loss"])], "agrees": round(float(np.mean(of["agrees"])), 4),
               "keys": round(float(np.mean(list(keys.values()))), 4) if keys else 1.0,
               "kept_share": round(float(np.mean(shares)), 5) if shares else None, "chunks": of["chunks"]}
        if setting in ("recommended", "balanced"):
            row["keys_by_layer_and_head"] = {layer: [round(float(x), 4) for x in of_heads] for layer, of_heads in keys.items()}
        rows.append(row)
    return rows


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("models", nargs="+")
    parse.add_argument("--text", required=True)
    parse.add_argument("--out", required=True, help="rows of other models and lengths stay")
    parse.add_argument("--tokens", type=int, default=4096)
    parse.add_argument("--last", type=int, default=512)
    parse.add_argument("--texts", type=int, default=1)
    parse.add_argument("--layers", action="store_true", help="single layers, too")
    parse.add_argument("--queries", type=int, nargs="*", default=[], help="the presets as they are called, with these numbers of voters")
    parse.add_argument("--settings", default="", help="those whose name has this expression")
    parse.add_argument("--threads", type=int, default=1)
    args = parse.parse_args()
    torch.set_num_threads(args.threads)
    quoka.set_threads(args.threads)
    out = pathlib.Path(args.out)
    for one in args.models:
        name, _, path = one.partition("=")
        rows = measure(name, path, args)
        before = json.loads(out.read_text())["results"] if out.exists() else []
        same = {(r["model"], r["tokens"], r["settings"]) for r in rows}
        kept = [r for r in before if (r["model"], r["tokens"], r["settings"]) not in same]
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
        out.write_text(json.dumps({"command": "bench/kept_share.py", "machine": cpu, "isa": quoka.isa(), "text": pathlib.Path(args.text).name,
                                   "last": args.last, "results": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
