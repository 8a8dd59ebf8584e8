#!/usr/bin/env python3
"""Trains the small retrieval models of this folder on the tasks of tasks.py, on one CPU core or a GPU.

    train.py train NAME [--seed N] [--out DIR] ...   writes NAME.gguf, NAME.log, NAME.golden.json
    train.py evaluate NAME.gguf [--samples N] ...    dense accuracy per task and length, of the weights in the file

Needs numpy and PyTorch (1.13 does). The model is SmolLM3's architecture in small: pre-norm decoder, RMSNorm, grouped
queries, SwiGLU, tied embeddings, RoPE on adjacent channels in every layer but each second, which has none. Only the
logits of answers are ever needed, so the last layer is computed at the asked positions alone; that is what makes
thousands of tokens affordable. The file's matrices are F16, its norms F32; whatever is reported is measured on those.
"""

import argparse
import collections
import itertools
import json
import math
import multiprocessing
import os
import struct
import time

import numpy as np
import torch

import tasks

CONFIG = dict(layers=2, d_model=128, heads=8, kv_heads=2, head_dim=32, ffn=256, context=8192, rms_epsilon=1e-5,
              rope_base=10000.0, no_rope_interval=2)
HEAD_NORM_START = 1.5  # of --qk-norm: a logit is at most its square times sqrt(head_dim)


# ---- the model --------------------------------------------------------------------------------------------------------


class CausalAttention(torch.autograd.Function):
    """q [batch, kv_heads, group, length, head_dim]; k, v [batch, kv_heads, length, head_dim]; by blocks of queries.

    Nothing of size length^2 is kept: the backward pass computes the probabilities of a block again.
    """

    BLOCK = 128

    @staticmethod
    def probabilities(q, k, first, scale):
        """q [n, group, rows, head_dim] from position `first`, k [n, first + rows, head_dim] -> [n, group * rows, keys]."""
        n, group, rows, dim = q.shape
        scores = torch.bmm((q * scale).reshape(n, group * rows, dim), k.transpose(1, 2))
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores.view(n, group, rows, -1)[..., first:].masked_fill_(future, -math.inf)
        return torch.softmax(scores, dim=-1)

    @staticmethod
    def forward(ctx, q, k, v, scale):
        batch, kv_heads, group, length, dim = q.shape
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out = torch.empty_like(q)
        for i in range(0, length, CausalAttention.BLOCK):
            j = min(i + CausalAttention.BLOCK, length)
            p = CausalAttention.probabilities(q[:, :, i:j], k[:, :j], i, scale)
            out[:, :, i:j] = torch.bmm(p, v[:, :j]).view(-1, group, j - i, dim)
        ctx.save_for_backward(q, k, v, out)
        ctx.scale = scale
        return out.view(batch, kv_heads, group, length, dim)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out = ctx.saved_tensors
        batch, kv_heads = grad.shape[:2]
        n, group, length, dim = q.shape
        grad = grad.reshape(n, group, length, dim)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        row_sums = (grad * out).sum(-1)
        for i in range(0, length, CausalAttention.BLOCK):
            j = min(i + CausalAttention.BLOCK, length)
            rows = group * (j - i)
            p = CausalAttention.probabilities(q[:, :, i:j], k[:, :j], i, ctx.scale)
            g = grad[:, :, i:j].reshape(n, rows, dim)
            dv[:, :j] += torch.bmm(p.transpose(1, 2), g)
            ds = torch.bmm(g, v[:, :j].transpose(1, 2)).sub_(row_sums[:, :, i:j].reshape(n, rows, 1)).mul_(p)
            dq[:, :, i:j] = (torch.bmm(ds, k[:, :j]) * ctx.scale).view(n, group, j - i, dim)
            dk[:, :j] += torch.bmm(ds.transpose(1, 2), q[:, :, i:j].reshape(n, rows, dim)) * ctx.scale
        shape = (batch, kv_heads)
        return dq.view(*shape, group, length, dim), dk.view(*shape, length, dim), dv.view(*shape, length, dim), None


def fused_attention(q, k, v, scale):
    """CausalAttention by the kernels that PyTorch has for a GPU: in bfloat16 while it learns, else in float32."""
    kind = torch.bfloat16 if torch.is_grad_enabled() else torch.float32
    k, v = (x[:, :, None].expand(-1, -1, q.shape[2], -1, -1).flatten(1, 2).to(kind) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.flatten(1, 2).to(kind), k, v, is_causal=True, scale=scale)
    return out.to(q.dtype).view(q.shape)


def matrix_shapes(c):
    q, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    return dict(attn_q=(q, c["d_model"]), attn_k=(kv, c["d_model"]), attn_v=(kv, c["d_model"]),
                attn_output=(c["d_model"], q), ffn_gate=(c["ffn"], c["d_model"]), ffn_up=(c["ffn"], c["d_model"]),
                ffn_down=(c["d_model"], c["ffn"]))


def initial_weights(c, seed, qk_norm=False):
    """{GGUF tensor name: parameter}, in the order of the file. qk_norm: queries and keys normalised per head."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, scale=1.0):
        return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

    weights = {"token_embd.weight": matrix(tasks.VOCABULARY, c["d_model"])}
    shapes = matrix_shapes(c)
    for layer in range(c["layers"]):
        for norm, parts in (("attn_norm", ("attn_q", "attn_k", "attn_v", "attn_output")),
                            ("ffn_norm", ("ffn_gate", "ffn_up", "ffn_down"))):
            weights[f"blk.{layer}.{norm}.weight"] = torch.ones(c["d_model"])
            for part in parts:
                scale = 1 / math.sqrt(2 * c["layers"]) if part in ("attn_output", "ffn_down") else 1.0
                weights[f"blk.{layer}.{part}.weight"] = matrix(*shapes[part], scale)
        if qk_norm:
            for part in ("attn_q_norm", "attn_k_norm"):
                weights[f"blk.{layer}.{part}.weight"] = torch.full((c["head_dim"],), HEAD_NORM_START)
    weights["output_norm.weight"] = torch.ones(c["d_model"])
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


class Transformer:
    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        self.scale = config["head_dim"] ** -0.5
        self.device = next(iter(weights.values())).device
        self.angles = {}

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_epsilon"]) * self.weights[name]

    def rope(self, x):
        """x [..., length, head_dim]: channels 2i and 2i + 1 turn by position * base^(-2i / head_dim)."""
        length, dim = x.shape[-2:]
        if length not in self.angles:
            frequencies = self.config["rope_base"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
            self.angles[length] = angles.cos().float().to(self.device), angles.sin().float().to(self.device)
        cos, sin = self.angles[length]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def attention(self, x, layer, positions):
        """x [batch, length, d_model], normalised. positions None: of every token; else [batch, asked]: of those."""
        c, w, block = self.config, self.weights, f"blk.{layer}."
        batch, length, _ = x.shape
        group = c["heads"] // c["kv_heads"]
        asked = x if positions is None else rows_at(x, positions)
        q = (asked @ w[block + "attn_q.weight"].T).view(batch, -1, c["kv_heads"], group, c["head_dim"]).permute(0, 2, 3, 1, 4)
        k, v = ((x @ w[f"{block}attn_{part}.weight"].T).view(batch, length, c["kv_heads"], -1).transpose(1, 2)
                for part in "kv")
        if block + "attn_q_norm.weight" in w:
            q, k = self.norm(q, block + "attn_q_norm.weight"), self.norm(k, block + "attn_k_norm.weight")
        has_rope = (layer + 1) % c["no_rope_interval"] != 0
        if positions is None:
            if has_rope:
                q, k = self.rope(q), self.rope(k)
            attend = CausalAttention.apply if self.device.type == "cpu" else fused_attention
            out = attend(q.contiguous(), k.contiguous(), v.contiguous(), self.scale)
        else:
            if has_rope:
                raise ValueError(f"layer {layer} has RoPE, which is not done for single positions")
            scores = torch.einsum("bkgqd,bktd->bkgqt", q * self.scale, k)
            future = torch.arange(length, device=self.device) > positions[:, :, None]
            out = torch.einsum("bkgqt,bktd->bkgqd", scores.masked_fill(future[:, None, None], -math.inf).softmax(-1), v)
        return out.permute(0, 3, 1, 2, 4).flatten(2) @ w[block + "attn_output.weight"].T

    def logits(self, tokens, positions):
        """tokens [batch, length], positions [batch, asked] -> [batch, asked, vocabulary]."""
        w = self.weights
        x = w["token_embd.weight"][tokens]
        for layer in range(self.config["layers"]):
            block = f"blk.{layer}."
            at = positions if layer == self.config["layers"] - 1 else None
            y = self.attention(self.norm(x, block + "attn_norm.weight"), layer, at)
            x = (x if at is None else rows_at(x, at)) + y
            y = self.norm(x, block + "ffn_norm.weight")
            gate = torch.nn.functional.silu(y @ w[block + "ffn_gate.weight"].T)
            x = x + (gate * (y @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
        return self.norm(x, "output_norm.weight") @ w["token_embd.weight"].T


def rows_at(x, positions):
    return x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))


def rounded_to_file(weights):
    """The weights as the file holds them."""
    return {name: (w.half().float() if w.dim() == 2 else w).detach() for name, w in weights.items()}


# ---- GGUF -------------------------------------------------------------------------------------------------------------

U32, F32_VALUE, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
GGML_F32, GGML_F16 = 0, 1
ALIGNMENT = 32


def packed_string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def packed_value(kind, value):
    if kind == STRING:
        return packed_string(value)
    return struct.pack({U32: "<I", I32: "<i", F32_VALUE: "<f", BOOL: "<?"}[kind], value)


def metadata(c, name, description):
    """Yields (key, type, value); an array is ((element type), [values])."""
    prefix = "smollm3."
    yield "general.architecture", STRING, "smollm3"
    yield "general.name", STRING, name
    yield "general.description", STRING, description
    yield "general.file_type", U32, 1
    yield "general.quantization_version", U32, 2
    for key, value in (("block_count", c["layers"]), ("context_length", c["context"]),
                       ("embedding_length", c["d_model"]), ("feed_forward_length", c["ffn"]),
                       ("attention.head_count", c["heads"]), ("attention.head_count_kv", c["kv_heads"]),
                       ("attention.key_length", c["head_dim"]), ("attention.value_length", c["head_dim"]),
                       ("rope.dimension_count", c["head_dim"]), ("vocab_size", tasks.VOCABULARY),
                       ("no_rope_layer_interval", c["no_rope_interval"])):
        yield prefix + key, U32, value
    yield prefix + "attention.layer_norm_rms_epsilon", F32_VALUE, c["rms_epsilon"]
    yield prefix + "rope.freq_base", F32_VALUE, c["rope_base"]
    size = tasks.VOCABULARY  # no text ever reaches the model; the tokens are named by their ids
    yield "tokenizer.ggml.model", STRING, "llama"
    yield "tokenizer.ggml.pre", STRING, "default"
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, [f"<{i}>" for i in range(size)])
    yield "tokenizer.ggml.scores", ARRAY, (F32_VALUE, [-float(i) for i in range(size)])
    yield "tokenizer.ggml.token_type", ARRAY, (I32, [2, 3, 3] + [1] * (size - 3))
    yield "tokenizer.ggml.bos_token_id", U32, tasks.BOS
    yield "tokenizer.ggml.eos_token_id", U32, 2
    yield "tokenizer.ggml.unknown_token_id", U32, 0
    yield "tokenizer.ggml.add_bos_token", BOOL, True
    yield "tokenizer.ggml.add_eos_token", BOOL, False


def write_gguf(path, config, weights, name, description):
    keys = []
    for key, kind, value in metadata(config, name, description):
        if kind == ARRAY:
            element, values = value
            body = struct.pack("<IQ", element, len(values)) + b"".join(packed_value(element, v) for v in values)
        else:
            body = packed_value(kind, value)
        keys.append(packed_string(key) + struct.pack("<I", kind) + body)
    infos, data = [], b""
    for tensor_name, tensor in weights.items():
        array = tensor.detach().cpu().numpy()
        raw = array.astype("<f2" if array.ndim == 2 else "<f4").tobytes()
        infos.append(packed_string(tensor_name) + struct.pack("<I", array.ndim)
                     + struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
                     + struct.pack("<IQ", GGML_F16 if array.ndim == 2 else GGML_F32, len(data)))
        data += raw + bytes(-len(raw) % ALIGNMENT)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    with open(path + ".part", "wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT) + data)
    os.replace(path + ".part", path)


def read_gguf(path):
    """(config, weights) of a file that write_gguf has written; other files of the format may hold
    more than this reads."""
    raw = open(path, "rb").read()
    at = 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return values if len(values) > 1 else values[0]

    def string():
        nonlocal at
        length = take("Q")
        at += length
        return raw[at - length:at].decode()

    def value(kind):
        if kind == STRING:
            return string()
        if kind == ARRAY:
            element, count = take("IQ")
            return [value(element) for _ in range(count)]
        return take({U32: "I", I32: "i", F32_VALUE: "f", BOOL: "?"}[kind])

    if take("4s") != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    _, tensor_count, key_count = take("IQQ")
    keys = {}
    for _ in range(key_count):
        key = string()
        keys[key] = value(take("I"))
    infos = []
    for _ in range(tensor_count):
        name, rank = string(), take("I")
        shape = [take("Q") for _ in range(rank)]
        infos.append((name, shape[::-1], *take("IQ")))
    start = at + -at % ALIGNMENT
    weights = {}
    for name, shape, kind, offset in infos:
        array = np.frombuffer(raw, "<f2" if kind == GGML_F16 else "<f4", math.prod(shape), start + offset)
        weights[name] = torch.from_numpy(array.astype(np.float32).reshape(shape))
    names = dict(layers="block_count", d_model="embedding_length", heads="attention.head_count",
                 kv_heads="attention.head_count_kv", head_dim="attention.key_length", ffn="feed_forward_length",
                 context="context_length", rms_epsilon="attention.layer_norm_rms_epsilon", rope_base="rope.freq_base",
                 no_rope_interval="no_rope_layer_interval")
    return {ours: keys["smollm3." + theirs] for ours, theirs in names.items()}, weights


# ---- training ---------------------------------------------------------------------------------------------------------

# Each stage: shares of the tasks, the needles of a prompt at each length, and when it ends: the mean of the last 15 batches
# of every task at every length at `accuracy`, or after `steps`. 2.0 is never reached: the last stage runs to its end.
# Key and value needles do not train from random weights: induction must come first.
MIXTURES = {
    "needles": dict(needles=0.25, haystack=0.2, multi_value=0.3, vt=0.25),
    "retrieval": dict(needles=0.35, haystack=0.3, vt=0.35),  # without the slow one
    "words": dict(cwe=0.6, fwe=0.4),
}


def long_lengths(args):
    return [n for n in (4096, 8192, 16384) if vars(args)[f"steps_{n}"]]


def stages(args):
    mixture = MIXTURES[args.tasks]
    if args.tasks != "words":
        yield dict(name="induction", mixture=dict(induction=1.0), lengths={64: 0}, accuracy=0.9, steps=3000)
        for length, size in ((48, 4), (64, 6), (128, 12), (256, 24), (512, 40)):
            yield dict(name=f"needles {length}", mixture=dict(needles=1.0), lengths={length: size}, accuracy=0.98, steps=3000)
    yield dict(name="mixture 128-512", mixture=mixture, lengths={128: 12, 256: 24, 512: 40}, accuracy=0.98, steps=args.steps_512)
    yield dict(name="mixture 512-1024", mixture=mixture, lengths={512: 40, 1024: 40}, accuracy=0.99, steps=args.steps_1024)
    yield dict(name="mixture 512-2048", mixture=mixture, lengths={512: 40, 1024: 40, 2048: 40}, accuracy=0.995,
               steps=args.steps_2048)
    for length in long_lengths(args):
        yield dict(name=f"mixture {length // 8}-{length}", mixture=mixture, steps=vars(args)[f"steps_{length}"], accuracy=2.0,
                   lengths={n: 40 for n in (length // 8, length // 4, length // 2, length)},
                   decay=length == long_lengths(args)[-1])


def make_batch(task, length, size, rng, tokens_a_step):
    """rng: a generator, or a seed for one."""
    rng, count = np.random.default_rng(rng), max(1, (tokens_a_step if length < 256 else 2 * tokens_a_step) // length)
    samples = [tasks.training_sample(task, rng, length, size) for _ in range(count)]
    return tuple(np.stack(part) for part in zip(*samples))


def on(device, arrays):
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def right(logits, answers):
    """[batch, asked]: share of the right tokens among the largest logits."""
    size = answers.shape[2]
    best = logits.topk(size, dim=-1).indices
    return (best[..., :, None] == answers[..., None, :]).any(-1).float().mean(-1)


class Log:
    def __init__(self, path):
        self.file, self.start = open(path, "w"), time.time()

    def __call__(self, text):
        line = f"{time.time() - self.start:7.0f} s  {text}"
        print(line, file=self.file, flush=True)
        print(line, flush=True)


class Trainer:
    def __init__(self, config, args, log):
        self.args, self.log, self.config = args, log, config
        # Before the GPU is touched: a process that has does not survive a fork.
        self.pool = multiprocessing.get_context("fork").Pool(args.workers) if args.workers else None
        weights = read_gguf(args.start)[1] if args.start else initial_weights(config, args.seed, args.qk_norm)
        self.weights = {name: w.detach().to(args.device).requires_grad_() for name, w in weights.items()}
        self.model = Transformer(config, self.weights)
        self.rng = np.random.default_rng(args.seed)
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0

    def batches(self, stage, ahead=24):
        """(task, length, batch) of every step. Workers draw them ahead, each batch from a seed of its own."""
        names, shares = zip(*stage["mixture"].items())
        shares = np.array(shares) / sum(shares)
        waiting = collections.deque()
        for step in range(self.step, self.step + stage["steps"]):
            task = names[self.rng.choice(len(names), p=shares)]
            length = int(self.rng.choice(list(stage["lengths"])))
            what = task, length, stage["lengths"][length]
            if not self.pool:
                yield task, length, make_batch(*what, self.rng, self.args.tokens_a_step)
                continue
            seed = [self.args.seed, step]
            waiting.append((task, length, self.pool.apply_async(make_batch, (*what, seed, self.args.tokens_a_step))))
            if len(waiting) > ahead:
                task, length, batch = waiting.popleft()
                yield task, length, batch.get()
        for task, length, batch in waiting:
            yield task, length, batch.get()

    def one_step(self, batch, rate):
        tokens, positions, answers = on(self.args.device, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / 200)
        logits = self.model.logits(tokens, positions)
        loss = -logits.log_softmax(-1).gather(-1, answers).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item(), right(logits.detach(), answers).mean().item()

    def gone(self, stage, i, begin):
        """Share of a stage that is over, by steps or by the clock."""
        by_clock = (time.time() - begin) / max(1e-3, self.log.start + self.args.seconds - begin) if self.args.seconds else 0.0
        return max(i / stage["steps"], by_clock)

    def run_stage(self, stage, rate, window=15):
        recent, begin, last_report = {}, time.time(), time.time()
        for i, (task, length, batch) in enumerate(self.batches(stage)):
            decay = 1.0 - 0.95 * self.gone(stage, i, begin) if stage.get("decay") else 1.0
            loss, accuracy = self.one_step(batch, rate * decay)
            recent.setdefault((task, length), []).append((loss, accuracy))
            means = {cell: np.mean(values[-window:], axis=0) for cell, values in recent.items()}
            enough = len(means) == len(stage["mixture"]) * len(stage["lengths"]) and all(len(v) >= window for v in recent.values())
            done = enough and min(m[1] for m in means.values()) >= stage["accuracy"]
            over = self.gone(stage, i + 1, begin) >= 1.0
            if done or over or time.time() - last_report > 30:
                last_report = time.time()
                cells = "  ".join(f"{t} {n}: {m[0]:.3f} {100 * m[1]:.1f}%" for (t, n), m in sorted(means.items()))
                self.log(f"step {self.step}  {stage['name']}  {cells}")
                self.save()
            if done or over:
                return done
        return False

    def save(self):
        write_gguf(self.args.base + ".gguf", self.config, self.weights, self.args.name, self.args.description)


def evaluate(model, names, lengths, samples, seed, log):
    """Dense exact match per task and length; (task, length) -> percentage."""
    result = {}
    for length in lengths:
        for task in names:
            rng = np.random.default_rng([seed, length, tasks.TASKS.index(task)])
            exact, recall, count = 0, 0.0, max(1, (4096 if model.device.type == "cpu" else 65536) // length)
            for first in range(0, samples, count):
                drawn = [tasks.make(task, rng, length, (i % tasks.DEPTHS) / (tasks.DEPTHS - 1))
                         for i in range(first, min(first + count, samples))]
                tokens, positions, answers = on(model.device, (np.stack(part) for part in zip(*drawn)))
                with torch.no_grad():
                    shares = right(model.logits(tokens, positions), answers)
                exact += (shares == 1).all(-1).sum().item()
                recall += shares.mean(-1).sum().item()
            result[task, length] = 100 * exact / samples
            log(f"dense  {task:11s} {length:6d} tokens  exact {100 * exact / samples:6.2f} %  "
                f"recall {100 * recall / samples:6.2f} %  of {samples}")
    return result


def write_goldens(path, model, names, lengths=(256, 256, 1024)):
    """Prompts with what the model of the file answers, for a check that another program runs the same model."""
    goldens = []
    for task in names:
        rng = np.random.default_rng([7, tasks.TASKS.index(task)])
        for i, length in enumerate(lengths):
            tokens, positions, answers = tasks.make(task, rng, length, (i + 0.5) / len(lengths))
            with torch.no_grad():
                logits = model.logits(*on(model.device, (tokens[None], positions[None])))[0].cpu()
            best = logits.topk(answers.shape[1], dim=-1)
            goldens.append(dict(task=task, tokens=tokens.tolist(), positions=positions.tolist(), answers=answers.tolist(),
                                best=best.indices.tolist(), best_logits=best.values.double().numpy().round(4).tolist()))
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(g, separators=(",", ":")) for g in goldens) + "\n]\n")


def loaded(path, device):
    config, weights = read_gguf(path)
    return Transformer(config, {name: w.to(device) for name, w in weights.items()})


def train(args):
    config = {**CONFIG, "layers": args.layers, "rope_base": args.rope_base}
    if args.start:
        config = read_gguf(args.start)[0]
    longest = max(long_lengths(args), default=2048)
    config["context"] = max(8192, 2 * longest)
    settings = " ".join(f"{key}={value}" for key, value in vars(args).items() if key not in ("command", "out"))
    args.base = os.path.join(args.out, args.name)
    args.description = "Trained on the tasks of tasks.py by train.py: " + settings
    log = Log(args.base + ".log")
    log(settings)
    trainer = Trainer(config, args, log)
    names = tasks.WORD_TASKS if args.tasks == "words" else tasks.NEEDLE_TASKS
    if args.tasks == "retrieval":
        names = tuple(name for name in names if name != "multi_value")
    log(f"{sum(w.numel() for w in trainer.weights.values())} parameters, {config}")
    for stage in itertools.islice(stages(args), args.skip_stages, None):
        done = trainer.run_stage(stage, args.rate if max(stage["lengths"]) <= 512 else args.long_rate)
        log(f"stage {stage['name']} {'reached' if done else 'ended'} at step {trainer.step}")
        if not done and not stage["name"].startswith("mixture"):
            log("does not learn: stopped")
            return
        trainer.save()
        if stage["name"].startswith("mixture"):
            evaluate(Transformer(config, rounded_to_file(trainer.weights)), names, (512, max(4096, longest)), 16, 3, log)
    model = loaded(args.base + ".gguf", args.device)
    write_goldens(args.base + ".golden.json", model, names)
    evaluate(model, names, [n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= max(4096, longest)], args.samples, 1, log)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("name")
    one.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    one.add_argument("--start", metavar="GGUF", help="begin with these weights instead of random ones")
    one.add_argument("--skip-stages", type=int, default=0, help="leave out the first stages")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--layers", type=int, default=2)
    one.add_argument("--qk-norm", action="store_true", help="RMSNorm on every head of the queries and keys, as Qwen3 has it")
    one.add_argument("--rope-base", type=float, default=10000.0)
    one.add_argument("--rate", type=float, default=2e-3)
    one.add_argument("--long-rate", type=float, default=1e-3)
    one.add_argument("--tokens-a-step", type=int, default=2048)
    one.add_argument("--tasks", choices=MIXTURES, default="needles", help="needles and variables, or word counts")
    one.add_argument("--steps-512", type=int, default=2500)
    one.add_argument("--steps-1024", type=int, default=800)
    one.add_argument("--steps-2048", type=int, default=600)
    one.add_argument("--steps-4096", type=int, default=600)
    one.add_argument("--steps-8192", type=int, default=0)
    one.add_argument("--steps-16384", type=int, default=0)
    one.add_argument("--seconds", type=float, default=0, help="the last stage ends then, if its steps are not over; 0: never")
    one.add_argument("--device", default="cpu", help="cuda: a GPU, with PyTorch 2")
    one.add_argument("--workers", type=int, default=0, help="processes that draw prompts ahead")
    one.add_argument("--samples", type=int, default=200, help="prompts of a task and length, in the evaluation at the end")
    two = commands.add_parser("evaluate")
    two.add_argument("model")
    two.add_argument("--tasks", nargs="+", default=tasks.TASKS)
    two.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    two.add_argument("--samples", type=int, default=200)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "train":
        train(args)
    else:
        evaluate(loaded(args.model, args.device), args.tasks, args.lengths, args.samples, args.seed, print)


if __name__ == "__main__":
    main()
