#!/usr/bin/env python3
"""Makes transformer.json: tiny random transformers and the logits they must give.

    transformer.py [OUT]          (OUT: transformer.json beside this script; needs numpy and PyTorch)

The oracle of the decoder's transformer. It follows the published definitions, Hugging Face transformers'
modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py, modeling_smollm3.py and modeling_rope_utils.py, in double
precision on the weights as they are stored, and shares nothing with the C++: RoPE turns half against half as there,
on weights whose rows are put back into that order where llama.cpp's converter had permuted them for its adjacent pairs.
llama.cpp v0.5.0 itself, given the files of tiny_models.hpp with the matrices as F32, gives these logits within 2e-5;
a wrong pairing, base, factor, bias, norm, epsilon or head moves some by 4e-4 at least, mostly by 1 or more.

A weight is a function of its model, its tensor's name and its place, so that tiny_models.hpp can make the same one:
u = 2 * uniform - 1 from splitmix64(fnv1a64("model/tensor") + place), 24 bits; a matrix holds 3 u / sqrt(columns),
a norm 1 + u / 8, a bias u / 2. `weights_hash`, the fnv1a64 of all stored bytes in the order of the file, says whether
both made the same. `weighted_sums` are, for each position, the mean over the vocabulary of (token + 1) * logit.
"""

import itertools
import json
import math
import os
import sys

import numpy as np
import torch

POSITIONS = 37
LOGITS_OF_LAST = 8  # positions whose logits are given in full; the others have the first place and the sum
TOP1_MARGIN = 0.02  # between the first and the second logit, at every position: float arithmetic finds the same first

# GGUF's names for the architectures and types; sizes as Hugging Face's configurations state them. Every model is
# small, yet sensitive to each number here within 37 positions: hence the original context of 64 where Llama 3 has 8192.
DEFAULTS = dict(layers=4, d_model=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocabulary=97, context=128,
                rms_epsilon=1e-5, rope_base=10000.0, rope_linear_factor=1.0, tied=False, matrices="F32")
MODELS = {
    "llama": dict(architecture="llama"),
    "llama3": dict(architecture="llama", d_model=48, heads=6, ffn=80, rope_base=500000.0, tied=True, matrices="F16",
                   llama3=dict(factor=8.0, low=1.0, high=4.0, original_context=64)),
    "llama_linear": dict(architecture="llama", rope_linear_factor=4.0, rms_epsilon=0.01, matrices="BF16"),
    "llama_q8_0": dict(architecture="llama", heads=6, layers=5, matrices="Q8_0"),
    "qwen2": dict(architecture="qwen2", rope_base=1e6, rms_epsilon=1e-6, tied=True, matrices="F16"),
    "qwen3": dict(architecture="qwen3", d_model=48, head_dim=24, ffn=80, rope_base=1e6, rms_epsilon=1e-6,
                  matrices="BF16"),
    "smollm3": dict(architecture="smollm3", layers=5, rope_base=5e6, rms_epsilon=1e-6, tied=True, matrices="F16"),
}


# ---- weights ----------------------------------------------------------------------------------------------------


def fnv1a64(data, value=0xCBF29CE484222325):
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def splitmix64(states):
    """The generator's output for each state, a numpy array of uint64."""
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_bits(key, count):
    return splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(fnv1a64(key.encode())))


def uniform(key, count):
    """float64 [count] in [-1, 1), of 24 bits each: exact in float32 too."""
    return (random_bits(key, count) >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0


def round_half_away(x):
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def store_q8_0(values):
    """(bytes, values): ggml's Q8_0, 32 values with d = max|value| / 127 as a half and q = round(value * (1 / d))."""
    blocks = values.astype(np.float32).reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    q = round_half_away(blocks * inverse).astype(np.int8)
    d = d.astype(np.float16)
    raw = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1).tobytes()
    return raw, (d.astype(np.float64) * q).reshape(values.shape)


def store(values, kind):
    """(bytes as they are in the file, the values those bytes mean as float64)."""
    single = values.astype(np.float32)
    if kind == "F32":
        stored = single
    elif kind == "F16":
        stored = single.astype(np.float16)
    elif kind == "BF16":
        rounded = torch.from_numpy(single).to(torch.bfloat16).to(torch.float32).numpy()
        return (rounded.view(np.uint32) >> 16).astype(np.uint16).tobytes(), rounded.astype(np.float64)
    elif kind == "Q8_0":
        return store_q8_0(values)
    return stored.tobytes(), stored.astype(np.float64)


def tensors_of(model):
    """Yields (name, shape, outermost first) in the order of the file, as llama.cpp's converter names them."""
    d_model, ffn = model["d_model"], model["ffn"]
    q_rows, kv_rows = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    yield "token_embd.weight", (model["vocabulary"], d_model)
    for layer in range(model["layers"]):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (d_model,)
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield block + f"attn_{part}.weight", (rows, d_model)
            if model["architecture"] == "qwen2":
                yield block + f"attn_{part}.bias", (rows,)
            if model["architecture"] == "qwen3" and part != "v":
                yield block + f"attn_{part}_norm.weight", (model["head_dim"],)
        yield block + "attn_output.weight", (d_model, q_rows)
        yield block + "ffn_norm.weight", (d_model,)
        yield block + "ffn_gate.weight", (ffn, d_model)
        yield block + "ffn_up.weight", (ffn, d_model)
        yield block + "ffn_down.weight", (d_model, ffn)
    if "llama3" in model:
        yield "rope_freqs.weight", (model["head_dim"] // 2,)
    yield "output_norm.weight", (d_model,)
    if not model["tied"]:
        yield "output.weight", (model["vocabulary"], d_model)


def make_weights(model_name, model):
    """({tensor name: float64 tensor}, hash of the stored bytes)."""
    weights, hashed = {}, fnv1a64(b"")
    for name, shape in tensors_of(model):
        u = uniform(f"{model_name}/{name}", math.prod(shape)).reshape(shape)
        if name == "rope_freqs.weight":
            values, kind = np.array(model["rope_factors"]), "F32"
        elif name.endswith(".bias"):
            values, kind = 0.5 * u, "F32"
        elif name.endswith("norm.weight"):
            values, kind = 1.0 + 0.125 * u, "F32"
        else:
            values, kind = 3.0 / math.sqrt(shape[1]) * u, model["matrices"]
        raw, stored = store(values, kind)
        hashed = fnv1a64(raw, hashed)
        weights[name] = torch.from_numpy(stored)
    return weights, hashed


# ---- the transformer --------------------------------------------------------------------------------------------


def inverse_frequencies(model):
    """float64 [head_dim / 2] of plain RoPE."""
    exponents = torch.arange(0, model["head_dim"], 2, dtype=torch.float64) / model["head_dim"]
    return 1.0 / model["rope_base"] ** exponents


def llama3_frequencies(frequencies, factor, low, high, original_context):
    """transformers' _compute_llama3_parameters: long waves slowed by the factor, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    ramp = (original_context / wavelengths - low) / (high - low)
    scaled = torch.where(wavelengths > original_context / low, frequencies / factor, frequencies)
    between = (wavelengths <= original_context / low) & (wavelengths >= original_context / high)
    return torch.where(between, (1 - ramp) * frequencies / factor + ramp * frequencies, scaled)


def rope_frequencies(model):
    frequencies = inverse_frequencies(model) / model["rope_linear_factor"]
    if "rope_factors" in model:  # what the file says, rounded to F32, as llama.cpp divides by it
        frequencies = frequencies / torch.tensor(model["rope_factors"], dtype=torch.float64)
    return frequencies


def rms_norm(x, weight, epsilon):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rope(x, frequencies):
    """x [heads, positions, head_dim], turned by its positions 0, 1, ..."""
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


def published_order(rows, model, heads):
    """Undoes the converter's permute(): rows of a head 0, h, 1, h + 1, ... of the file are 0, 1, ..., h, h + 1, ...

    The converter applies it to Q and K of the architectures of the Llama family (SmolLM3's class is derived from it).
    """
    if model["architecture"] not in ("llama", "smollm3"):
        return rows
    split = rows.reshape(heads, model["head_dim"] // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def attention(model, layer, weights, x):
    """x [positions, d_model], normalised; returns the same shape."""
    heads, kv_heads, head_dim = model["heads"], model["kv_heads"], model["head_dim"]
    positions = x.shape[0]

    def project(part, count):
        rows = weights[f"blk.{layer}.attn_{part}.weight"]
        bias = weights.get(f"blk.{layer}.attn_{part}.bias")
        if part != "v":
            rows = published_order(rows, model, count)
        y = x @ rows.T if bias is None else x @ rows.T + bias
        y = y.reshape(positions, count, head_dim).transpose(0, 1)
        norm = weights.get(f"blk.{layer}.attn_{part}_norm.weight")
        return y if norm is None else rms_norm(y, norm, model["rms_epsilon"])

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    # SmolLM3Config: no_rope_layers[i] = int((i + 1) % no_rope_layer_interval != 0), with an interval of 4.
    if model["architecture"] != "smollm3" or (layer + 1) % 4 != 0:
        frequencies = rope_frequencies(model)
        q, k = rope(q, frequencies), rope(k, frequencies)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * head_dim**-0.5
    future = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
    return out.transpose(0, 1).reshape(positions, heads * head_dim) @ weights[f"blk.{layer}.attn_output.weight"].T


def logits_of(model, weights, tokens):
    """float64 [positions, vocabulary]."""
    epsilon = model["rms_epsilon"]
    x = weights["token_embd.weight"][tokens]
    for layer in range(model["layers"]):
        block = f"blk.{layer}."
        x = x + attention(model, layer, weights, rms_norm(x, weights[block + "attn_norm.weight"], epsilon))
        y = rms_norm(x, weights[block + "ffn_norm.weight"], epsilon)
        gate = torch.nn.functional.silu(y @ weights[block + "ffn_gate.weight"].T)
        x = x + (gate * (y @ weights[block + "ffn_up.weight"].T)) @ weights[block + "ffn_down.weight"].T
    output = weights["token_embd.weight" if model["tied"] else "output.weight"]
    return rms_norm(x, weights["output_norm.weight"], epsilon) @ output.T


# ---- the file ---------------------------------------------------------------------------------------------------


def digits(values):
    return [float(f"{value:.9g}") for value in values]


def complete(settings):
    """The model's settings with the defaults and, for Llama 3, the factors its file carries in rope_freqs.weight."""
    model = {**DEFAULTS, **settings}
    model["rms_epsilon"] = float(np.float32(model["rms_epsilon"]))  # GGUF holds it as F32
    if "llama3" in model:
        plain = inverse_frequencies(model)
        factors = plain / llama3_frequencies(plain, **model["llama3"])
        model["rope_factors"] = factors.to(torch.float32).tolist()
    return model


def draw_tokens(name, model, weights):
    """(tokens, logits) of the first draw in which every position has a clear first place."""
    for draw in itertools.count():
        tokens = (random_bits(f"{name}/tokens/{draw}", POSITIONS) % np.uint64(model["vocabulary"])).astype(int).tolist()
        logits = logits_of(model, weights, tokens)
        best = logits.topk(2, dim=1).values
        if (best[:, 0] - best[:, 1]).min() > TOP1_MARGIN:
            return tokens, logits


def golden(name, settings):
    model = complete(settings)
    weights, hashed = make_weights(name, model)
    tokens, logits = draw_tokens(name, model, weights)
    places = torch.arange(1, model["vocabulary"] + 1, dtype=torch.float64)
    return {
        "model": {key: value for key, value in model.items() if key != "llama3"},
        "weights_hash": f"{hashed:016x}",
        "tokens": tokens,
        "top1": logits.argmax(dim=1).tolist(),
        "weighted_sums": digits((logits * places).mean(dim=1).tolist()),
        "first_position": POSITIONS - LOGITS_OF_LAST,
        "logits": [digits(row) for row in logits[-LOGITS_OF_LAST:].tolist()],
    }


def to_text(goldens):
    """JSON with a line for each entry of a model and each position's logits."""
    models = []
    for name, entries in goldens.items():
        lines = []
        for key, value in entries.items():
            text = json.dumps(value)
            if key == "logits":
                text = "[\n   " + ",\n   ".join(json.dumps(row) for row in value) + "]"
            lines.append(f'  "{key}": {text}')
        models.append(f' "{name}": {{\n' + ",\n".join(lines) + "}")
    return "{\n" + ",\n".join(models) + "}\n"


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "transformer.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_text({name: golden(name, settings) for name, settings in MODELS.items()}))


if __name__ == "__main__":
    main()
