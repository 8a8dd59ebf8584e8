"""One layer's attention as every contender gets it: sizes, numbers, and the expected output."""

import dataclasses
import math

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A chunk of `queries` tokens that attends to `past` keys and causally to itself; `batch` sequences of one length."""

    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int
    past: int
    sinks: bool = False
    batch: int = 1

    def __str__(self):
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"

    @property
    def keys(self):
        return self.past + self.queries

    @property
    def flops(self):
        """FLOPs of the pairs that causality leaves; a multiply-add counts 2."""
        pairs = self.queries * self.past + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.q_heads * self.head_dim * pairs


class Layer:
    """Normal numbers: logits of standard deviation 1.

    q: [batch, q_heads, queries, head_dim]; k, v: [batch, kv_heads, past + queries, head_dim], the chunk's own last; sinks: [q_heads] or None.
    Each contender copies them into the layout and type that it is fastest with, before it is timed.
    """

    def __init__(self, shape, seed=1):
        rng = np.random.default_rng(seed)
        self.shape = shape
        self.q = rng.standard_normal((shape.batch, shape.q_heads, shape.queries, shape.head_dim), dtype=np.float32)
        self.k, self.v = (rng.standard_normal((shape.batch, shape.kv_heads, shape.keys, shape.head_dim), dtype=np.float32) for _ in "kv")
        self.sinks = rng.standard_normal(shape.q_heads).astype(np.float32) if shape.sinks else None
        self.scale = 1 / math.sqrt(shape.head_dim)
        extent = (shape.batch, shape.q_heads, shape.queries)
        self.sampled = list(dict.fromkeys(tuple(int(rng.integers(n)) for n in extent) for _ in range(12)))
        self.expected = {place: self.in_double(*place) for place in self.sampled}

    def in_double(self, sequence, head, query):
        """One query's output, [head_dim]."""
        kv_head, seen = head // (self.shape.q_heads // self.shape.kv_heads), self.shape.past + query + 1
        logits = self.k[sequence, kv_head, :seen].astype(np.float64) @ self.q[sequence, head, query] * self.scale
        top = logits.max()
        weights = np.exp(logits - top)
        rest = math.exp(float(self.sinks[head]) - top) if self.sinks is not None else 0.0
        return weights / (weights.sum() + rest) @ self.v[sequence, kv_head, :seen].astype(np.float64)

    def error(self, out):
        """Root mean square of the difference of sampled rows, by that of what they should be. out: [batch, q_heads, queries, head_dim]."""
        off = sum(float(np.sum((np.asarray(out[place], np.float64) - want) ** 2)) for place, want in self.expected.items())
        return math.sqrt(off / sum(float(np.sum(want**2)) for want in self.expected.values()))

    def rows(self, what, dtype):
        """[batch, heads, len, dim] in that type."""
        return np.ascontiguousarray(what.astype(DTYPES[dtype]))

    def tokens(self, what, dtype):
        """[batch, len, heads * dim]: token by token."""
        return np.ascontiguousarray(what.transpose(0, 2, 1, 3).reshape(what.shape[0], what.shape[2], -1).astype(DTYPES[dtype]))

    def by_heads(self, out):
        """[batch, q_heads, queries, head_dim] of rows token by token, as tokens() has them, of the batch after each other."""
        shape = self.shape
        return out.reshape(shape.batch, shape.queries, shape.q_heads, shape.head_dim).transpose(0, 2, 1, 3)
