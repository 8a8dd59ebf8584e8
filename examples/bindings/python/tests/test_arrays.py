#!/usr/bin/env python3
"""The package quoka on arrays of numpy, and of ml_dtypes where it is installed; torch has tests of its own. Without arguments
all of them:

    python3 tests/test_arrays.py

The reference is softmax in double by numpy. A case is drawn (drawn.py): shapes, element types, how arrays lie in memory,
options, a mask or lists. Sizes are small and odd.
"""
import ast
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from drawn import drawn, generators, st

import quoka

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

RNG = np.random.default_rng(7)
HALVES = [np.float16] + ([ml_dtypes.bfloat16] if ml_dtypes else [])
# Largest errors by `float`, and by `automatic`, which may split floats into bfloat16 numbers: of outputs, of the log-sum-exp.
FLOAT = (3e-6, 1e-5)
AUTOMATIC = FLOAT if quoka.arithmetic_used() == "float" else (1e-4, 1e-4)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def reference(q, k, v, past_k=None, past_v=None, scale=None, causal=True, window=0, sinks=None, softcap=0.0,
              alibi_slopes=None, mask=None):
    """Rank 4, double: the output and the log-sum-exp."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    past = 0 if past_k is None else past_k.shape[2]
    if past:
        k, v = (np.concatenate([np.asarray(p, np.float64), x], 2) for p, x in ((past_k, k), (past_v, v)))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    logits = np.einsum("bhqc,bhkc->bhqk", q, k) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    distance = past + np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])[None]
    if alibi_slopes is not None:
        logits = logits - np.asarray(alibi_slopes, np.float64)[None, :, None, None] * distance
    if mask is not None:
        mask = np.asarray(mask)
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask.astype(np.float64)
    if causal:
        logits = np.where(distance >= 0, logits, -np.inf)
    if window:
        logits = np.where(distance < window, logits, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None, None], (*logits.shape[:3], 1))
        logits = np.concatenate([logits, sink], 3)
    top = logits.max(3, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(logits - top)
    total = weights.sum(3, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = (np.log(total) + top)[..., 0]
        weights = np.where(total > 0, weights / total, 0)
    return np.einsum("bhqk,bhkc->bhqc", weights[..., :k.shape[2]], v), lse


# ---- drawn calls ------------------------------------------------------------------------------------------------------------


def axes_lie(*order):
    """The same numbers, with the axes of rank 4 in this order in memory."""
    def of(x):
        return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    of.__name__ = f"axes_lie{order}"
    return of


def spread(x):  # every second number of something larger
    return np.repeat(x, 2, -1)[..., ::2]


def backwards(x):  # all but the last axis
    turned = (slice(None, None, -1),) * (x.ndim - 1)
    return np.ascontiguousarray(x[turned])[turned]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def view(x):
    return memoryview(x) if x.dtype.kind == "f" else x  # bfloat16 has no letter in the buffer protocol


# By token: [batch, tokens, heads, channels]; by channel: [batch, heads, channels, tokens].
LAYOUTS = [np.array, axes_lie(0, 2, 1, 3), axes_lie(0, 1, 3, 2), axes_lie(3, 2, 1, 0), spread, backwards, read_only, view]
layouts = st.sampled_from(LAYOUTS)
outputs = st.sampled_from([axes_lie(0, 2, 1, 3), axes_lie(2, 1, 0, 3), backwards])  # whose channels lie side by side


@st.composite
def options_of(draw, heads):
    """Options of attention for this many query heads; they say the same to reference()."""
    slopes = st.sampled_from([quoka.alibi_slopes(heads), np.linspace(0.1, 0.6, heads), np.linspace(0.1, 0.6, heads, dtype=np.float32)])
    sinks = st.sampled_from([[0.5, -1, 2, 0, 0, 3] * 2, np.linspace(-2, 2, 12, dtype=np.float32)]).map(lambda x: x[:heads])
    chosen = draw(st.fixed_dictionaries({}, optional={
        "scale": st.sampled_from([0.0, 0.3]), "softcap": st.just(2.0), "window": st.sampled_from([1, 13]), "sinks": sinks,
        "causal": st.just(False), "alibi_slopes": slopes}))
    if "causal" in chosen:  # a window, and ALiBi, are of causal attention
        chosen.pop("window", None), chosen.pop("alibi_slopes", None)
    return chosen


@st.composite
def masks_of(draw, shape):
    """(mask, what reference() takes): of this shape [batch, q_heads, q_len, keys] or one that broadcasts to it."""
    rng = draw(generators)
    whole = shape[-draw(st.integers(2, 4)):]
    shape = [n if draw(st.booleans()) else 1 for n in whole]
    seen = rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    kind = draw(st.sampled_from(["bool", "uint8", "added", "hides"]))
    if kind == "added":
        given = taken = rng.standard_normal(shape).astype(draw(st.sampled_from([np.float32, *HALVES])))
        if draw(st.booleans()):
            given = taken = np.where(seen, taken, -np.inf).astype(taken.dtype)
    elif kind == "hides":  # which is what -inf does
        dtype, number = draw(st.sampled_from([(np.float32, -np.inf), (np.float16, -65504), (np.float32, -60000), (np.float32, -1e9)]))
        given, taken = np.where(seen, 0, number).astype(dtype), seen
    else:
        given, taken = seen.astype(kind), seen
    def expanded(x):
        return np.broadcast_to(x, whole)

    lie = draw(st.sampled_from([np.array, spread, backwards, expanded, np.asfortranarray]))
    return lie(given), taken


@st.composite
def lists_of(draw, batch, heads, q_len, keys):
    """(lists and what goes with them, how they lie in memory; the same side by side, the mask that says the same)."""
    rng, block = draw(generators), draw(st.sampled_from([1, 1, 7]))
    shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), q_len)
    lists = rng.integers(-1, -(-keys // block), (*shape, draw(st.sampled_from([1, 14])))).astype(np.int32)  # unordered, some twice
    counts = rng.integers(0, lists.shape[3] + 1, shape).astype(np.int32) if draw(st.booleans()) else None
    used = lists >= 0
    if counts is not None:
        used &= np.arange(lists.shape[3]) < counts[..., None]
    seen = ((np.arange(keys) // block == lists[..., None]) & used[..., None]).any(3)
    plain = {"lists": lists, "block": block} | ({} if counts is None else {"counts": counts})
    lie, dtype = draw(st.sampled_from([np.array, spread, axes_lie(2, 0, 1, 3)])), draw(st.sampled_from([np.int32, np.int64]))
    given = {name: x if name == "block" else x.astype(dtype) for name, x in plain.items()} | {"lists": lie(lists.astype(dtype))}
    without = {3: 0, 2: (0, 0)}.get(draw(st.sampled_from([4] + [3] * (shape[0] == 1) + [2] * (shape[:2] == (1, 1)))), ...)
    return {name: x if name == "block" else x[without] for name, x in given.items()}, plain, seen


class Drawn:
    """A call of attention: how it is given, the same call with everything side by side, and what reference() is asked."""

    def __init__(self, draw):
        rng, batch, kv_heads, group = draw(generators), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        q_len, past, dim, v_dim = (draw(st.sampled_from(sizes)) for sizes in ((1, 9, 40), (0, 1, 50), (8, 24, 33), (8, 20)))
        dtype, heads, keys = draw(st.sampled_from([np.float32, np.float32, *HALVES])), kv_heads * group, past + q_len
        def array(*shape):
            return rng.standard_normal(shape).astype(dtype)

        q, k, v = array(batch, heads, q_len, dim), array(batch, kv_heads, q_len, dim), array(batch, kv_heads, q_len, v_dim)
        arrays = {"q": q, "k": k, "v": v}
        if past:
            arrays |= {"past_k": array(batch, kv_heads, past, dim), "past_v": array(batch, kv_heads, past, v_dim)}
            if past >= q_len and draw(st.booleans()):  # a text may say the same twice
                arrays["past_k"][:, :, past - q_len:], arrays["past_v"][:, :, past - q_len:] = k, v
        self.options, asked = draw(options_of(heads)), {}
        self.plain, self.given = arrays | self.options, {name: draw(layouts)(x) for name, x in arrays.items()} | self.options
        if draw(st.booleans()):
            mask, asked["mask"] = draw(masks_of((batch, heads, q_len, keys)))
            self.given["mask"] = mask
            # One mask of all heads, and one of each, are attended to in other orders.
            of_heads = mask.shape[-3] if mask.ndim > 2 else 1
            self.plain["mask"] = np.ascontiguousarray(np.broadcast_to(asked["mask"], (batch, of_heads, q_len, keys)))
        elif draw(st.booleans()):
            lists, plain, seen = draw(lists_of(batch, kv_heads, q_len, keys))
            self.given |= lists
            self.plain |= plain
            asked["mask"] = np.broadcast_to(seen, (batch, kv_heads, q_len, keys)).repeat(group, 1)
        self.bounds = AUTOMATIC
        if dtype != np.float32 or draw(st.booleans()):
            self.given["arithmetic"] = self.plain["arithmetic"] = "float"
            self.bounds = FLOAT
        self.asked, self.dtype, self.shape = arrays | self.options | asked, dtype, (batch, heads, q_len, v_dim)

    def __repr__(self):
        return "Drawn(" + ", ".join(f"{name}={x.dtype} {x.shape} {x.strides}" if isinstance(x, np.ndarray) else f"{name}={x}"
                                    for name, x in self.given.items()) + ")"


calls = st.composite(lambda draw: Drawn(draw))()


class Case(unittest.TestCase):
    def assert_close(self, got, expected, tolerance=AUTOMATIC[0]):
        self.assertEqual(got.shape, expected.shape)
        self.assertLess(np.abs(np.asarray(got, np.float64) - expected).max(initial=0), tolerance)

    def assert_refused(self, call, *words):
        with self.assertRaises(ValueError) as caught:
            call()
        for word in words:
            self.assertIn(str(word), str(caught.exception))

    def assert_each_refused(self, function, whole, rows, kept=None):
        """Each row, (changes of the whole call's arguments, words of the message), is refused, and `kept` stays as it is."""
        before = None if kept is None else kept.copy()
        for changes, *words in rows:
            with self.subTest(words):
                arguments = {name: x for name, x in (whole | changes).items() if x is not None}
                self.assert_refused(lambda: function(**arguments), *words)  # noqa: B023
        if kept is not None:
            np.testing.assert_array_equal(kept, before)

    def assert_codes(self, state, least):
        """The State keeps at least this many bytes of codes, or none if no instruction multiplies
        codes faster than floats."""
        if quoka.isa().startswith(("avx2", "avx512")) or "dot" in quoka.isa().split("_"):
            self.assertGreater(state.kept_bytes, least)
        else:
            self.assertEqual(state.kept_bytes, 0)


class Attention(Case):
    def setUp(self):
        self.q = normal(2, 6, 9, 24)
        self.k, self.v = normal(2, 2, 9, 24), normal(2, 2, 9, 20)
        self.past_k, self.past_v = normal(2, 2, 50, 24), normal(2, 2, 50, 20)

    @drawn(300, of=calls, threads=st.sampled_from([0, 1, 2, 3]), out=st.none() | outputs)
    def test_is_exact_in_any_layout(self, of, threads, out):
        got, lse = quoka.attention(**of.given, return_lse=True, threads=threads)
        expected, expected_lse = reference(**of.asked)
        self.assertEqual((got.dtype, lse.dtype), (np.float32, np.float32))
        self.assert_close(got, expected, of.bounds[0])
        seen = np.isfinite(expected_lse)
        self.assertTrue((np.isneginf(lse) == ~seen).all())
        self.assert_close(lse[seen], expected_lse[seen], of.bounds[1])
        # The same bits by other threads, of arrays that lie side by side.
        same, same_lse = quoka.attention(**of.plain, return_lse=True, threads=1)
        np.testing.assert_array_equal(got, same)
        np.testing.assert_array_equal(lse, same_lse)
        if out is not None:
            for dtype in {np.float32, of.dtype}:
                given = out(np.full(of.shape, 7, dtype))
                self.assertIs(quoka.attention(**of.given, out=given, threads=threads), given)
                np.testing.assert_array_equal(given, got.astype(dtype))

    def test_rank_3_is_a_batch_of_one(self):
        got, lse = quoka.attention(self.q[0], self.k[0], self.v[0], return_lse=True)
        self.assertEqual((got.shape, lse.shape), ((6, 9, 20), (6, 9)))
        np.testing.assert_array_equal(got, quoka.attention(self.q[:1], self.k[:1], self.v[:1])[0])

    def test_a_loop_begins_with_nothing(self):
        q, k, v = self.q, self.k, self.v
        expected = quoka.attention(q, k, v)
        for empty in (np.empty((2, 2, 0, 24), np.float32), np.zeros((2, 2, 0, 24), np.float16), self.past_k[:, :, :0]):
            np.testing.assert_array_equal(quoka.attention(q, k, v, past_k=empty, past_v=empty[..., :20]), expected)
            cache, state = quoka.Cache(2, 2, 24, v_dim=20), quoka.State(5)
            cache.append(empty, empty[..., :20])
            state.appended(empty)
            self.assertEqual((len(cache), state.kept_bytes), (0, 0))
            np.testing.assert_array_equal(quoka.attention(q, k, v, past=cache), expected)
            for of in ({}, {"state": state}):
                self.assertTrue(quoka.select(q, empty, **({} if of else {"budget": 5}), **of).is_all)
        layer = quoka.Prefill(6, 2, 24, v_dim=20, batch=2)
        layer.append(np.empty((2, 2, 0, 24), np.float32), np.empty((2, 2, 0, 20), np.float32))
        np.testing.assert_array_equal(layer.forward(q, k, v), expected)

    def test_is_refused(self):
        q, k, v, past_k, past_v = self.q, self.k, self.v, self.past_k, self.past_v
        out = np.full((2, 6, 9, 20), 5, np.float32)
        odd = np.ndarray((2, 6, 9, 24), np.float32, bytearray(2 * 6 * 9 * 98), 0, (6 * 9 * 98, 9 * 98, 98, 4))
        alone = {"k": None, "v": None}
        self.assert_each_refused(quoka.attention, {"q": q, "k": k, "v": v, "out": out}, (
            ({"k": k[:, :, :8]}, 8, 9), ({"v": v[..., :19]}, 19, 20), ({"q": q[:, :5], "out": None}, 5, 2),
            ({"q": q[0, 0]}, "q's rank", 2, 4), ({"q": [1, 2]}, "q is of type list"),
            ({"q": q.astype(">f4")}, "q ", ">f4", "other order", "newbyteorder"), ({"q": odd}, "q ", 98, 4),
            ({"q": q.astype(np.float64)}, "q", "float64"), ({"k": k.astype(np.int32)}, "k", "int32"),
            ({"k": k.astype(np.longdouble)}, "k ", np.dtype(np.longdouble), "float32"), ({"k": k[..., ::-1]}, "channels", -1, 1),
            ({"q": q[:, :, :1], "out": None}, "past_k", 9, 1),
            ({"k": k[:, :, :4], "v": v[:, :, :4], "past_k": k, "past_v": v}, "past_k", 4, 9),
            ({"out": read_only(out)}, "out is read-only"), ({"out": q[..., :20]}, "memory"),
            ({"out": np.zeros((2, 6, 9, 40), np.float32)[..., ::2]}, "channels", 2, 1),
            ({"mask": np.ones((9, 9), ">f4")}, "mask ", ">f4", "other order"), ({"mask": np.ones((9, 8), bool)}, 8, 9),
            ({"mask": np.ones(9, bool)}, "rank", 1, 4), ({"mask": np.ones((9, 9), np.int32)}, "mask", "int32"),
            ({"sinks": [1.0]}, 1, 6), ({"sinks": "six"}, "sinks", "str"), ({"softcap": -1.0}, "softcap", -1),
            ({"scale": float("nan")}, "scale", "nan"), ({"window": -3}, "quoka: window is -3", 0), ({"threads": -1}, "threads", -1, 1),
            ({"threads": 10**6}, 1000000, 1024),
            ({"arithmetic": "float8"}, "float8", "must be automatic, float, bf16 or int8"),
            ({"arithmetic": "bfloat16_x3"}, "bfloat16_x3", "which is gone: take automatic"),
            ({"arithmetic": "single"}, "single", "which is called float"),
            ({**alone}, "neither"), ({**alone, "past": 7}, "Cache"),
            ({**alone, "past_k": k, "past_v": v, "past": quoka.Cache(2, 2, 24)}, "twice"), ({"past_k": k, "past": quoka.Cache(2, 2, 24)}, "twice"),
            ({"past_k": k}, "there is past_k, and there is no past_v"), ({"past_v": v}, "there is past_v, and there is no past_k")), out)
        lists = np.zeros((9, 3), np.int32)
        self.assert_each_refused(quoka.attention, {"q": q, "k": k, "v": v, "past_k": past_k, "past_v": past_v, "out": out, "lists": lists}, (
            ({"lists": lists[:8]}, 8, 9), ({"lists": lists[None, None, None]}, "rank of lists", 5, 4),
            ({"lists": lists[0]}, "rank of lists", 1, 4), ({"lists": lists.astype(np.float32)}, "float32"),
            ({"lists": lists + 59}, 59), ({"lists": lists - 2}, -2, -1),
            ({"lists": lists.astype(np.int64) + 2**31}, 2**31, 2**31 - 1),
            ({"counts": np.full(9, 4, np.int32)}, 4, 3), ({"counts": np.full(8, 1, np.int32)}, 8, 9),
            ({"counts": np.full((1, 9), 1, np.int32)}, "rank of counts", 2, 1),
            ({"lists": lists[None], "counts": np.full((1, 1, 1, 9), 1, np.int32)}, "rank of counts", 4, 3),
            ({"block": 0}, "block", 0, 1), ({"lists": lists + 6, "block": 10}, 6, "blocks"),
            ({"lists": None, "counts": np.zeros(9, np.int32)}, "no lists"), ({"lists": None, "block": 4}, "no lists")), out)
        with self.assertRaises(TypeError):
            quoka.attention(None, k, v)
        for name, call in (("attention", lambda: quoka.attention(q, k, v, causl=True)), ("select", lambda: quoka.select(q, k, causl=1)),
                           ("index_keys", lambda: quoka.index_keys(q, k[:, :1], causl=1)), ("Cache", lambda: quoka.Cache(1, 2, 3, causl=1)),
                           ("State", lambda: quoka.State(causl=1)), ("Prefill", lambda: quoka.Prefill(2, 2, 3, causl=1))):
            with self.assertRaisesRegex(TypeError, name + r"\(\) has no option causl$"):
                call()


class IndexKeys(Case):
    """Against numpy, on whole numbers, whose sums are exact."""

    def expected(self, q, k, weights, top_k, block=1, keep_last=0, groups=1, causal=True, mask=None):
        products = np.einsum("bhqc,bgkc->bhqk" if k.shape[1] == 1 else "bhqc,bhkc->bhqk", q, k.repeat(q.shape[1] // k.shape[1], 1)
                             if k.shape[1] > 1 else k)
        shape = (q.shape[0], groups, q.shape[1] // groups, *products.shape[2:])
        if weights is None:
            scores = products.reshape(shape).max(2)
        else:
            scores = (np.maximum(products, 0) * weights[..., None]).reshape(shape).sum(2)
        kv_len, q_len = k.shape[2], q.shape[2]
        seen = np.broadcast_to(True if mask is None else mask, scores.shape).copy()
        if causal:
            seen &= np.tri(q_len, kv_len, kv_len - q_len, dtype=bool)
        entries = -(-kv_len // block)
        scores = np.where(seen, scores, -np.inf)
        scores = np.pad(scores, ((0, 0),) * 3 + ((0, entries * block - kv_len),), constant_values=-np.inf)
        scores = scores.reshape(*scores.shape[:3], entries, block).max(-1)
        lists = np.full((*scores.shape[:3], min(top_k, entries)), -1, np.int32)
        for at in np.ndindex(*scores.shape[:3]):
            row = scores[at]
            shown = np.flatnonzero(row > -np.inf)
            if keep_last:
                row[shown[-keep_last:]] = np.inf
            best = np.sort(np.argsort(-row, kind="stable")[:min(top_k, len(shown))])
            lists[at][:len(best)] = best
        return lists

    @drawn(150, rng=generators, batch=st.integers(1, 2), group=st.integers(1, 3), k_heads=st.sampled_from([1, 3]), q_len=st.integers(1, 9),
           past=st.sampled_from([0, 3, 61]), options=st.fixed_dictionaries({"top_k": st.sampled_from([1, 3, 12, 100])}, optional={
               "block": st.sampled_from([2, 16]), "keep_last": st.just(1), "causal": st.just(False)}),
           weighed=st.booleans(), masked=st.booleans(), grouped=st.booleans(), dtype=st.sampled_from([np.float32, np.float16]), lie=layouts)
    def test_the_best_keys(self, rng, batch, group, k_heads, q_len, past, options, weighed, masked, grouped, dtype, lie):
        def whole(*shape):
            return rng.integers(-3, 4, shape).astype(np.float32)

        q, k = whole(batch, 3 * group, q_len, 8), whole(batch, k_heads, past + q_len, 8)
        weights = whole(batch, 3 * group, q_len) if weighed else None
        groups = 3 if grouped or k_heads > 1 else 1
        mask = {"mask": rng.random((batch, 1, q_len, past + q_len)) < 0.5} if masked else {}
        got = quoka.index_keys(q, lie(k.astype(dtype)), None if weights is None else np.asfortranarray(weights), **options, **mask,
                               **({"lists_heads": 3} if groups > 1 else {}), threads=2)
        expected = self.expected(q, k, weights, **options, **mask, groups=groups)
        self.assertEqual(got.dtype, np.int32)
        np.testing.assert_array_equal(got, expected)
        if not masked:
            np.testing.assert_array_equal(quoka.index_keys(q[0], k[0], None if weights is None else weights[0], **options,
                                                           lists_heads=groups), expected[0])

    def test_is_refused(self):
        q, k, weights = normal(1, 4, 9, 8), normal(1, 1, 59, 8), normal(1, 4, 9)
        self.assert_each_refused(quoka.index_keys, {"q": q, "k": k, "weights": weights}, (
            ({"top_k": 0}, "top_k", 0, 1), ({"k": k[:, :, :5]}, "q_len", 9, 5), ({"weights": weights[:, :3]}, "weights", 3, 4),
            ({"weights": weights[0, 0]}, "rank of weights", 1, 3), ({"weights": weights.astype(np.float64)}, "weights", "float64"),
            ({"lists_heads": 3}, "index_heads", 4, 3)))


def mean_count(keep, b=0):  # of recommended and balanced each query head has a list, and they share the budget
    return sum(keep.count(b, head) for head in range(keep.heads)) / keep.heads


presets = st.sampled_from(["recommended", "balanced", "paper"])


class Select(Case):
    OTHER_OPTIONS = ("preset", "paper"), ("queries", 7), ("keep_first", 4), ("keep_last", 3)  # than the defaults

    def setUp(self):
        self.q, self.k = normal(1, 8, 30, 64), normal(1, 2, 400, 64)

    @drawn(60, rng=generators, preset=presets, batch=st.integers(1, 2), kv_heads=st.integers(1, 2), group=st.sampled_from([1, 4]),
           q_len=st.sampled_from([1, 30, 70]), kv_len=st.sampled_from([40, 400]),
           budget=st.sampled_from([20, 39, 0.5, np.float32(0.5), 1.0, 1000]), first=st.integers(0, 5), last=st.integers(0, 5),
           lies=st.tuples(layouts, layouts))
    def test_attention_heeds_what_is_chosen(self, rng, preset, batch, kv_heads, group, q_len, kv_len, budget, first, last, lies):
        heads = kv_heads * group
        q, own_k, own_v, past_k, past_v = (rng.standard_normal((batch, n, tokens, 64), np.float32) for n, tokens in (
            (heads, q_len), (kv_heads, q_len), (kv_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
        how = {"budget": budget, "preset": preset, "keep_first": first, "keep_last": last}
        keep = quoka.select(lies[0](q), lies[1](past_k), **how, threads=2)
        self.assertEqual(keep, quoka.select(q, past_k, **how, threads=1))
        count = min(kv_len, budget if isinstance(budget, int) else round(budget * kv_len))
        self.assertEqual((keep.kv_len, keep.batch, keep.is_all), (kv_len, batch, count == kv_len))
        self.assertEqual(keep.heads, kv_heads if preset == "paper" or keep.is_all or q_len == 1 else heads)
        mask = np.zeros((batch, heads, q_len, kv_len + q_len), bool)
        mask[..., kv_len:] = True
        lists = []
        for b in range(batch):
            self.assertEqual(mean_count(keep, b), count)
            lists.append([keep.positions(b, head) for head in range(keep.heads)])
            for head, positions in enumerate(lists[b]):
                self.assertEqual((positions.dtype, len(positions)), (np.int32, keep.count(b, head)))
                self.assertTrue((np.diff(positions) > 0).all())
                self.assertTrue(set(range(first)) | set(range(kv_len - last, kv_len)) <= set(positions.tolist()))
                mask[b, head * heads // keep.heads:(head + 1) * heads // keep.heads, :, positions] = True
        arrays = {"q": q, "k": own_k, "v": own_v, "past_k": past_k, "past_v": past_v}
        got = quoka.attention(**arrays, selection=keep)
        self.assert_close(got, reference(**arrays, mask=mask)[0])
        if not keep.is_all:
            by_hand = quoka.Selection([[list(map(int, one)) for one in each] for each in lists], kv_len)
            self.assertEqual(by_hand, keep)
            np.testing.assert_array_equal(quoka.attention(**arrays, selection=by_hand), got)

    def test_defaults_and_warnings(self):
        for preset in ("recommended", "balanced", "paper"):  # a short past is kept whole
            self.assertTrue(quoka.select(self.q, self.k, preset=preset).is_all)
        self.assertEqual(quoka.select(self.q, self.k, budget=40), quoka.select(self.q, self.k, budget=40, preset="recommended"))
        # 1 may be meant for all: a warning, as for any count that a chunk can do nothing with.
        for budget, warned in ((1, True), (15, True), (16, False), (1.0, False), (0.01, False)):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                quoka.select(self.q, self.k, budget=budget)
            said = [str(one.message) for one in seen]
            self.assertEqual([f"budget is {budget} key" in one and "1.0 is all of it" in one for one in said], [True] if warned else [], said)

    def test_queries(self):
        for preset, of_preset in (("recommended", 256), ("balanced", 128), ("paper", 16)):  # of a KV head; paper: of each query head
            alone = quoka.select(self.q, self.k, budget=40, preset=preset)
            self.assertEqual(quoka.select(self.q, self.k, budget=40, preset=preset, queries=of_preset), alone)
            more = quoka.select(self.q, self.k, budget=40, preset=preset, queries=100)
            self.assertNotEqual(more, alone)
            self.assertEqual(quoka.select(self.q, self.k, state=quoka.State(40, preset=preset, queries=100)).kv_len, 400)
            layer = quoka.Prefill(8, 2, 64, budget=40, preset=preset, queries=100)
            layer.append(self.k, self.k)
            layer.forward(self.q, self.k[:, :, :30], self.k[:, :, :30])
            by_codes = quoka.State(40, preset=preset, queries=100)
            by_codes.appended(self.k)
            self.assertEqual(mean_count(layer.selection), 40)
            for state in (by_codes, quoka.State(40, preset=preset, queries=100)):  # as a layer, which has the chunk's keys
                self.assertEqual(layer.selection, quoka.select(self.q, self.k, chunk_k=self.k[:, :, :30], state=state))
            if preset != "paper":
                self.assertNotEqual(layer.selection, quoka.select(self.q, self.k, state=by_codes))

    def test_kept_shares(self):
        chunk_k = normal(1, 2, 30, 64)
        for preset in ("recommended", "balanced"):
            shares = [quoka.select(self.q, self.k, budget=budget, preset=preset, queries=240, chunk_k=chunk_k).kept_shares
                      for budget in (20, 80, 320)]
            self.assertEqual([(x.shape, x.dtype) for x in shares], [((1, 8), np.float32)] * 3)
            means = [float(x.mean()) for x in shares]
            self.assertTrue(0 < means[0] < means[1] < means[2] < 1, means)
        keep = quoka.select(self.q, self.k, budget=80, queries=240, chunk_k=chunk_k)  # all queries choose
        logits = np.concatenate([self.q @ x.repeat(4, 1).swapaxes(2, 3) for x in (self.k, chunk_k)], 3) / 8
        logits[..., 400:][..., np.triu(np.ones((30, 30), bool), 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = [(weights[0, head][:, keep.positions(0, head)].sum(-1) + weights[0, head, :, 400:].sum(-1)).mean() for head in range(8)]
        np.testing.assert_allclose(keep.kept_shares[0], expected, atol=2e-3)
        np.testing.assert_array_equal(quoka.select(self.q, self.k, budget=1.0).kept_shares, np.ones((1, 2), np.float32))
        self.assertIsNone(quoka.select(self.q, self.k, budget=20, preset="paper").kept_shares)
        self.assertIsNone(quoka.Selection([[[1]]], 5).kept_shares)

    def test_masks_hide(self):
        mask = np.ones((30, 430), bool)
        mask[:, :350] = False
        keep = quoka.select(self.q, self.k, budget=20, mask=mask)
        self.assertEqual(mean_count(keep), 20)
        self.assertEqual(*(quoka.select(self.q, self.k, budget=20, mask=np.ones((30, keys), bool)) for keys in (1, 430)))
        self.assertTrue(all((keep.positions(0, head) >= 350).all() for head in range(keep.heads)))

    def test_a_state_selects_the_same(self):
        state = quoka.State(30, preset="paper")
        state.appended(self.k[:, :, :200], capacity=400)
        state.appended(self.k)
        self.assert_codes(state, 2 * 400 * 64)
        self.assertEqual(quoka.select(self.q, self.k, state=state), quoka.select(self.q, self.k, budget=30, preset="paper"))
        self.assert_refused(lambda: quoka.select(self.q, self.k[:, :, :100], state=state), 400, 100)
        state.truncate(100)
        quoka.select(self.q, self.k[:, :, :100], state=state)
        self.assert_refused(lambda: quoka.select(self.q, self.k, state=state, budget=5), "state")

    def test_a_state_is_told_of_keys_by_select(self):
        told, cache = quoka.State(30), quoka.Cache(1, 2, 64, capacity=500)
        state = quoka.State(30)
        self.assert_refused(lambda: quoka.select(self.q[..., :63], self.k, state=state), 63, 64)
        self.assertEqual(state.kept_bytes, 0)  # as it was
        for end in (200, 400):
            k = self.k[:, :, :end]
            told.appended(k, capacity=500)
            cache.append(k[:, :, len(cache):], k[:, :, len(cache):])
            for past in (cache, k):
                self.assertEqual(quoka.select(self.q, past, state=state), quoka.select(self.q, k, state=told))
            self.assertEqual(state.kept_bytes, told.kept_bytes)
        capped = quoka.State(30)  # scores under a soft-cap are float's: nothing is kept for them
        self.assertEqual(quoka.select(self.q, self.k, state=capped, softcap=5.0), quoka.select(self.q, self.k, budget=30, softcap=5.0))
        self.assertEqual(capped.kept_bytes, 0)
        masked = quoka.State(30)
        quoka.select(self.q, self.k, state=masked, mask=np.ones((30, 430), bool))
        self.assertEqual(masked.kept_bytes, 0)

    def test_is_refused(self):
        q, k, one = self.q, self.k, quoka.Selection([[[1]]], 5)
        self.assert_each_refused(quoka.select, {"q": q, "past_k": k, "budget": 9}, (
            ({"budget": 1.5}, 1.5, "(0, 1]"), ({"budget": -2}, "budget is -2", "a count of keys", "1.0 for all of it"),
            ({"budget": 0}, "budget is 0", "a count of keys"), ({"budget": np.float32(1.5)}, 1.5, "a share"),
            ({"budget": True}, "budget is True", "a count of keys"), ({"budget": "many"}, "budget is 'many'", "a count of keys"),
            ({"preset": "best"}, "best", "recommended"), ({"past_k": k[..., :63]}, 63, 64),
            ({"alibi_slopes": quoka.alibi_slopes(8)}, "alibi_slopes"), ({"chunk_k": k[:, :, :29]}, "chunk_k", 29, 30),
            ({"chunk_k": k[:, :, :30], "mask": np.ones((30, 430), bool)}, "mask", "chunk_k"), ({"queries": -1}, "queries", -1, 0),
            ({"state": quoka.State(9), "budget": 5}, "state"),
            *(({"budget": None, "state": quoka.State(9), name: value}, "state", name, value) for name, value in self.OTHER_OPTIONS),
            ({"past_k": None}, "no past_k")))
        for call, *words in (
                (lambda: quoka.Selection([[[3, 3]]], 5), 3), (lambda: quoka.Selection([[[5]]], 5), 5, 4),
                (lambda: quoka.Selection([[[1]], [[1], [2]]], 5), 2, 1), (lambda: one.positions(1, 0), 1, 0), (lambda: one.count(0, -1), -1, 0),
                (lambda: quoka.State(0.0), "(0, 1]"), (lambda: quoka.State(9, queries=-1), "queries", -1, 0),
                (lambda: quoka.Prefill(8, 2, 64, budget=9, queries=-1), "queries", -1, 0),
                *((lambda given={name: value}: quoka.Prefill(8, 2, 64, **given), "no budget", name, value) for name, value in self.OTHER_OPTIONS),
                (lambda: quoka.State(9).truncate(-1), -1, 0), (lambda: quoka.State(9).appended(k, capacity=-1), "capacity", -1, 0),
                (lambda: quoka.State(9).appended(k, capacity=2**40), "capacity", 2**40)):
            self.assert_refused(call, *words)
        self.assertEqual(one, quoka.Selection([[[1]]], 5))
        with self.assertRaises(TypeError):
            hash(one)


class Paged:
    """Sequences in pages, drawn; and each as a call of its own over keys side by side."""

    def __init__(self, draw, lengths=None, page_size=None):
        rng, dtype = draw(generators), draw(st.sampled_from([np.float32, np.float32, *HALVES]))
        self.lengths = lengths or draw(st.lists(st.sampled_from([0, 1, 5, 37, 64]), min_size=1, max_size=4))
        self.page_size = page_size or draw(st.sampled_from([1, 7, 16, 64, 100]))
        self.inside = lengths is None and draw(st.booleans())  # the chunk is the end of what lies in the pages
        if self.inside:
            self.lengths = [max(length, 9) for length in self.lengths]
        n, most = len(self.lengths), -(-64 // self.page_size) + 1
        self.k, self.v = (rng.standard_normal((n, 2, 64, dim)).astype(dtype) for dim in (24, 20))
        self.q, self.own_k, self.own_v = (rng.standard_normal((n, heads, 9, dim), np.float32) for heads, dim in ((6, 24), (2, 24), (2, 20)))
        # Entries behind the used ones are anything, and tokens behind the used ones are NaN.
        table_type = draw(st.sampled_from([np.int32, np.int64]))
        order = rng.permutation(n * most + 3)
        self.table = np.full((n, most), -1 if table_type == np.int32 else 2**40, table_type)
        self.pools = [np.full((len(order), self.page_size, 2, x.shape[-1]), np.nan, dtype) for x in (self.k, self.v)]
        for b, length in enumerate(self.lengths):
            for i in range(-(-length // self.page_size)):
                self.table[b, i] = order[b * most + i]
                part = slice(i * self.page_size, min(length, (i + 1) * self.page_size))
                for pool, x in zip(self.pools, (self.k, self.v)):
                    pool[self.table[b, i], :part.stop - part.start] = x[b, :, part].transpose(1, 0, 2)
        if n > 1 and draw(st.booleans()):  # pages are shared
            self.table[1], self.k[1], self.v[1] = self.table[0], self.k[0], self.v[0]
            self.lengths[1] = min(self.lengths[:2])
        of_all, self.of_each = draw(options_of(6)), [{}] * n
        keys = max(self.lengths) + (0 if self.inside else 9)
        if draw(st.booleans()):
            mask = rng.random((draw(st.sampled_from([1, n])), draw(st.sampled_from([1, 6])), 9, keys)) < 0.6
            if draw(st.booleans()):
                mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
            of_all["mask"] = mask
            self.of_each = [{"mask": mask[b % len(mask)][None, ..., :length + keys - max(self.lengths)]} for b, length in enumerate(self.lengths)]
        elif draw(st.booleans()):
            lists, counts = rng.integers(-1, 9, (n, 2, 9, 5)).astype(np.int32), rng.integers(0, 6, (n, 2, 9)).astype(np.int32)
            of_all |= {"lists": lists, "counts": counts}
            self.of_each = [{"lists": lists[b:b + 1], "counts": counts[b:b + 1]} for b in range(n)]
        self.options = {name: x for name, x in of_all.items() if name not in ("mask", "lists", "counts")}
        lie = draw(st.sampled_from([axes_lie(0, 1, 2, 3), axes_lie(0, 2, 1, 3), axes_lie(0, 3, 2, 1), backwards, None]))
        both = np.concatenate(self.pools, 3)  # a token's key, then its value
        k_pages, v_pages = map(lie, self.pools) if lie else (both[..., :24], both[..., 24:])
        lengths_as = st.sampled_from([list, tuple, np.array, lambda x: np.array(x, np.int32), lambda x: np.repeat(x, 3)[::3]])
        self.given = {"q": self.q, "k_pages": k_pages, "v_pages": v_pages, "lengths": draw(lengths_as)(self.lengths),
                      "block_table": draw(st.sampled_from([np.array, spread, np.asfortranarray, backwards]))(self.table), **of_all}
        if not self.inside:
            self.given |= {"k": self.own_k, "v": self.own_v}

    def alone(self, b, **options):
        length, one = self.lengths[b], slice(b, b + 1)
        past = length - 9 if self.inside else length
        own = (self.k[one, :, past:length], self.v[one, :, past:length]) if self.inside else (self.own_k[one], self.own_v[one])
        of = {"past_k": self.k[one, :, :past], "past_v": self.v[one, :, :past]} if past else {}
        return quoka.attention(self.q[one], *own, **of, **self.options, **self.of_each[b], **options, return_lse=True)


class Pages(Case):
    """Against the same keys side by side: to the last bit."""

    @drawn(150, of=st.composite(lambda draw: Paged(draw))())
    def test_the_same_bits(self, of):
        got = quoka.attention(**of.given, return_lse=True, threads=2)
        for b in range(len(of.lengths)):
            for x, y in zip(got, of.alone(b)):
                np.testing.assert_array_equal(x[b], y[0], f"sequence {b}")
        if not of.of_each[0]:  # without batch
            one = {name: x if name.endswith("_pages") else x[0] for name, x in of.given.items() if name not in of.options}
            np.testing.assert_array_equal(quoka.attention(**one, **of.options), got[0][0])

    def test_nothing_is_copied(self):
        pools = [np.broadcast_to(x[:1, :1], (2**22, 2**8, *x.shape[2:])) for x in (normal(1, 1, 2, 24), normal(1, 1, 2, 20))]  # 200 GB
        got = quoka.attention(normal(4, 6, 9, 24), k_pages=pools[0], v_pages=pools[1], block_table=np.full((4, 1), 2**22 - 1), lengths=[9] * 4,
                              arithmetic="float")
        np.testing.assert_allclose(got[:, :3], np.broadcast_to(pools[1][0, 0, 0], got[:, :3].shape), atol=1e-6)

    @drawn(10, of=st.composite(lambda draw: Paged(draw, [37, 0, 64, 5], 7))())
    def test_selections(self, of):
        pages = {name: of.given[name] for name in ("k_pages", "v_pages", "block_table", "lengths")}
        keep = [quoka.select(of.q[b:b + 1], k_pages=of.given["k_pages"], block_table=of.table[b], lengths=of.lengths[b], budget=4)
                if of.lengths[b] else None for b in range(4)]
        for b in (0, 2, 3):
            self.assertEqual(keep[b], quoka.select(of.q[b:b + 1], of.k[b:b + 1, :, :of.lengths[b]], budget=4))
        self.assertEqual((mean_count(keep[0]), keep[0].kv_len), (4, 37))
        of.options, of.of_each = {}, [{}] * 4
        got = quoka.attention(of.q, of.own_k, of.own_v, **pages, selection=keep, return_lse=True)
        for b in range(4):
            for x, y in zip(got, of.alone(b, selection=keep[b])):
                np.testing.assert_array_equal(x[b], y[0], f"sequence {b}")

        class Made(list):  # nobody but the call holds what it gives
            def __getitem__(self, b):
                return super().__getitem__(b) and quoka.Selection([[keep[b].positions(0, head) for head in range(2)]], keep[b].kv_len)

        np.testing.assert_array_equal(quoka.attention(of.q, of.own_k, of.own_v, **pages, selection=Made(keep)), got[0])
        self.assertGreater(np.abs(got[0][0] - quoka.attention(of.q, of.own_k, of.own_v, **pages)[0]).max(), 1e-3)
        state, told = quoka.State(4), quoka.State(4)
        for length in (20, 37):
            self.assertEqual(quoka.select(of.q[:1], k_pages=of.given["k_pages"], block_table=of.table[:1], lengths=length, state=state),
                             quoka.select(of.q[:1], of.k[:1, :, :length], state=told))
        self.assertEqual(state.kept_bytes, told.kept_bytes)
        self.assert_codes(state, 2 * 37 * 24)

    def test_is_refused(self):
        lengths, k_pages, v_pages = [37, 0, 64, 5], normal(47, 7, 2, 24), normal(47, 7, 2, 20)
        table = np.full((4, 11), -1, np.int32)
        for b, length in enumerate(lengths):
            table[b, :-(-length // 7)] = np.arange(-(-length // 7)) + 11 * b
        q, k, v, out = normal(4, 6, 9, 24), normal(4, 2, 9, 24), normal(4, 2, 9, 20), np.full((4, 6, 9, 20), 5, np.float32)
        shared = np.zeros_like(out)
        whole = {"q": q, "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "block_table": table, "lengths": lengths, "out": out}

        def at(b, i, entry, dtype=np.int32):
            changed = table.astype(dtype)
            changed[b, i] = entry
            return {"block_table": changed}

        self.assert_each_refused(quoka.attention, whole, (
            (at(0, 5, 47), "sequence 0", 47, "number of pages"), (at(2, 0, -1), "sequence 2", -1, 0),
            (at(2, 9, 2**31 - 1), "sequence 2", 2**31 - 1, 47), (at(2, 9, 2**31, np.int64), 2**31, 2**31 - 1),
            (at(2, 9, -2**40, np.int64), -2**40), (at(3, 0, 47, np.int64), "sequence 3", 47),
            ({"lengths": [37, 0, 78, 5]}, "sequence 2", "entries", 11, 12),
            ({"out": shared, "block_table": shared.view(np.int32).reshape(-1)[:44].reshape(4, 11)}, "shares memory", "block table"),
            ({"block_table": table[:, :3]}, "sequence 0", 3, 6), ({"block_table": table.astype(np.int64)[:, :3]}, "sequence 0", 3, 6),
            ({"lengths": [37, 0, -1, 5]}, "length", -1, 0), ({"lengths": [37, 0, 2**62, 5]}, "length"),
            ({"lengths": [37, 0, 64]}, "lengths", 3, 4), ({"lengths": 37}, "lengths", 1, 4),
            ({"block_table": table[:3], "lengths": [37, 0, 64]}, "block_table", 3, 4),
            ({"block_table": table.astype(np.float32)}, "block_table", "float32", "int64"),
            ({"block_table": table.astype(np.uint32)}, "block_table", "uint32"),
            ({"block_table": table[None]}, "rank of block_table", 3, 2), ({"block_table": [[1]] * 4}, "block_table", "list"),
            ({"lengths": np.array(lengths, np.float32)}, "lengths", "float32"),
            ({"lengths": [37, 0, 64.5, 5]}, "lengths", "float"), ({"lengths": np.array([lengths])}, "rank of lengths", 2, 1),
            ({"k_pages": k_pages[0]}, "k_pages's rank", 3, 4), ({"v_pages": v_pages[:-1]}, 46, 47),
            ({"v_pages": v_pages[:, :6]}, "page", 6, 7), ({"k_pages": k_pages[:, :0], "v_pages": v_pages[:, :0]}, "page", 0, 1),
            ({"k_pages": k_pages.astype(np.float64)}, "k_pages", "float64"), ({"k_pages": k_pages[..., :23]}, 23, 24),
            ({"k_pages": k_pages[:, :, :1], "v_pages": v_pages[:, :, :1]}, 1, 2),
            ({"mask": np.ones((9, 72), bool)}, "longest", 72, 73), ({"mask": np.ones((3, 1, 9, 73), bool)}, "mask's batch", 3, 4),
            ({"lists": np.zeros((3, 1, 9, 2), np.int32)}, "lists' batch", 3, 4), ({"lists": np.full((9, 2), 9, np.int32)}, "sequence 1", 9),
            ({"selection": [None] * 3}, "selections", 3, 4), ({"selection": [7] * 4}, "quoka.Selection"),
            ({"selection": quoka.Selection([[[1], [1]]], 37)}, "list of them", 4, 1),
            ({"selection": [quoka.Selection([[[1], [1]]], 36), None, None, None]}, "sequence 0", 36, 37),
            ({"past_k": k}, "twice"), ({"past": quoka.Cache(4, 2, 24)}, "twice"),
            *(({name: None}, f"no {name}") for name in ("k_pages", "v_pages", "block_table", "lengths")), ({"v": None}, "no v"),
            ({"q": q[:3], "out": None}, 4, 3), ({"k": k[:3], "v": v[:3]}, 3, 4), ({"out": out[:3]}, 3, 4),
            ({"k": None, "v": None, "block_table": np.maximum(table, 0), "lengths": [9, 9, 8, 9]}, 9, 8)), out)
        self.assert_each_refused(quoka.select, {"q": q, "k_pages": k_pages, "block_table": table, "lengths": lengths}, (
            ({}, "sequences", 4, 1), ({"past_k": k}, "past_k")))


class Caches(Case):
    def test_a_cache_is_a_past(self):
        k, v, q = normal(2, 2, 60, 24), normal(2, 2, 60, 20), normal(2, 4, 5, 24)
        own_k, own_v = normal(2, 2, 5, 24), normal(2, 2, 5, 20)
        cache = quoka.Cache(2, 2, 24, v_dim=20, capacity=100)
        nbytes = cache.nbytes
        cache.append(k[:, :, :40], v[:, :, :40])
        cache.append(k[:, :, 40:], v[:, :, 40:], threads=2)
        self.assertEqual((len(cache), cache.nbytes, cache.dtype), (60, nbytes, "float32"))
        np.testing.assert_array_equal(cache.k, k)
        np.testing.assert_array_equal(cache.v, v)
        expected = quoka.attention(q, own_k, own_v, past_k=k, past_v=v)
        np.testing.assert_array_equal(quoka.attention(q, own_k, own_v, past=cache), expected)
        self.assertEqual(quoka.select(q, cache, budget=9), quoka.select(q, k, budget=9))
        cache.truncate(10)
        self.assertEqual(len(cache), 10)
        self.assert_refused(lambda: cache.truncate(11), 11, 10)
        self.assert_refused(lambda: cache.append(k, v[:, :, 1:]), 59, 60)
        self.assertEqual(len(cache), 10)

    def test_dtypes(self):
        k = normal(1, 2, 30, 64)
        for dtype, error in (("float16", 2e-3), ("bfloat16", 2e-2), ("q8_0", 2e-2), ("u8", 2e-2)):
            cache = quoka.Cache(1, 2, 64, dtype=dtype)
            cache.append(k, k)
            self.assert_close(cache.k, k.astype(np.float64), error)
            self.assertGreater(np.abs(cache.k - k).max(), 1e-5)
        self.assert_refused(lambda: quoka.Cache(1, 2, 64, dtype="float64"), "float64", "q8_0")
        self.assert_refused(lambda: quoka.Cache(1, 0, 64), "kv_heads", 0, 1)
        self.assert_refused(lambda: quoka.Cache(1, 1, 64, capacity=-1), -1, 0)

    def test_prefill(self):
        q, k, v = normal(1, 4, 90, 32), normal(1, 2, 90, 32), normal(1, 2, 90, 32)
        layer = quoka.Prefill(4, 2, 32, capacity=90, softcap=9.0)
        parts = [layer.forward(*(x[:, :, i:i + 30] for x in (q, k, v)), threads=2) for i in (0, 30, 60)]
        self.assert_close(np.concatenate(parts, 2), reference(q, k, v, softcap=9.0)[0])
        self.assertEqual((len(layer), layer.selection.is_all, layer.selection.kv_len), (90, True, 60))
        layer.truncate(60)
        out, lse = layer.forward(*(x[:, :, 60:] for x in (q, k, v)), return_lse=True)
        self.assert_close(out, parts[2].astype(np.float64))
        self.assert_close(lse, reference(q, k, v, softcap=9.0)[1][:, :, 60:], AUTOMATIC[1])
        self.assert_refused(lambda: layer.forward(q[:, :, :2], k[:, :, :3], v[:, :, :3]), 2, 3)
        self.assertEqual(len(layer), 90)
        chosen = quoka.Prefill(4, 2, 32, budget=0.25, preset="paper", dtype="q8_0")
        chosen.append(k[:, :, :60], v[:, :, :60])
        chosen.forward(*(x[:, :, 60:] for x in (q, k, v)))
        self.assertEqual((chosen.selection.max_count, len(chosen)), (15, 90))
        self.assert_refused(lambda: quoka.Prefill(5, 2, 32), 5, 2)


class Calls(Case):
    def test_the_gil_is_released(self):
        q, k = normal(1, 16, 256, 128), normal(1, 16, 20000, 128)
        counted = [0]
        done = threading.Event()

        def count():
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.001)

        other = threading.Thread(target=count)
        other.start()
        before = counted[0]
        quoka.attention(q, causal=False, past_k=k, past_v=k, threads=1)
        during = counted[0] - before
        done.set()
        other.join()
        self.assertGreater(during, 5)

    def test_ctrl_c(self):
        # A shell may start programs in the background with SIGINT ignored.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        q, k = normal(1, 32, 512, 128), normal(1, 32, 20000, 128)
        cache = quoka.Prefill(32, 32, 128, budget=1000)
        cache.append(k, k)
        for call in (lambda: quoka.attention(q, causal=False, past_k=k, past_v=k, threads=2),
                     lambda: cache.forward(q, k[:, :, :512], k[:, :, :512], threads=2)):
            begin = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
                timer.start()
                try:
                    while time.monotonic() - begin < 60:
                        call()
                        if len(cache) > 20000:
                            cache.truncate(20000)
                finally:
                    timer.join()
            self.assertIn(len(cache), (20000, 20512))

    def test_a_handler_may_call(self):
        q, k, small, index = normal(1, 8, 256, 64), normal(1, 4, 20000, 64), normal(1, 4, 33, 32), normal(1, 1, 20000, 64)
        cache = quoka.Cache(1, 4, 64)
        cache.append(k, k)
        for call, inner in ((lambda: quoka.attention(q, past=cache, causal=False, threads=2),
                             lambda: quoka.attention(small, small, small, threads=2)),
                            (lambda: quoka.index_keys(q, index, top_k=64), lambda: quoka.index_keys(small, small[:, :1], top_k=5))):
            wanted, within, got, refused = call(), inner(), [], []

            def handle(*_):
                got.append(inner())
                try:
                    cache.truncate(0)
                except RuntimeError as error:
                    refused.append(str(error))

            self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handle))
            begin = time.monotonic()
            while not got or time.monotonic() - begin < 1:
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                result = call()
                signal.setitimer(signal.ITIMER_REAL, 0)
                np.testing.assert_array_equal(result, wanted)
                if "Cache" in "".join(refused) or len(cache) == 0:
                    break
            for result in got:
                np.testing.assert_array_equal(result, within)
            cache.truncate(0)
            cache.append(k, k)

    def test_an_object_is_one_calls(self):
        q, k = normal(1, 8, 128, 64), normal(1, 4, 30000, 64)
        cache, state, layer = quoka.Cache(1, 4, 64), quoka.State(256, preset="paper"), quoka.Prefill(8, 4, 64)
        cache.append(k, k)
        layer.append(k, k)
        for name, call, others in (
                ("Cache", lambda: quoka.attention(q, past=cache, causal=False, threads=1),
                 (lambda: cache.append(q[:, :4], q[:, :4]), lambda: cache.truncate(5), lambda: cache.reserve(90000))),
                ("State", lambda: quoka.select(q, k, state=state, threads=1),
                 (lambda: quoka.select(q, k, state=state), lambda: state.truncate(0), lambda: state.appended(k),
                  lambda: state.kept_bytes)),
                ("Prefill", lambda: layer.forward(q, q[:, :4], q[:, :4], threads=1),
                 (lambda: layer.forward(q, q[:, :4], q[:, :4]), lambda: layer.append(k, k), lambda: layer.truncate(0),
                  lambda: layer.reserve(90000), lambda: len(layer), lambda: layer.selection))):
            stop = threading.Event()

            def loop():
                while not stop.is_set():
                    try:
                        call()
                    except RuntimeError:  # one of the others was first
                        pass
                    if name == "State":
                        state.truncate(0)
                    if name == "Prefill":
                        layer.truncate(30000)

            worker = threading.Thread(target=loop)
            worker.start()
            try:
                for other in others:
                    for _ in range(2000):  # it may come between two calls
                        try:
                            other()
                        except RuntimeError as error:
                            self.assertIn(f"this {name} is ", str(error))
                            break
                        except ValueError:
                            pass
                        if name == "Cache" and len(cache) < 30000:
                            cache.append(k, k)
                        time.sleep(0.001)
                    else:
                        self.fail(f"{name}: no call was refused")
            finally:
                stop.set()
                worker.join()
        for _ in range(2):  # several calls may read
            cache.truncate(0)
            cache.append(k, k)
            with ThreadPoolExecutor(3) as readers:
                results = list(readers.map(lambda _: quoka.attention(q, past=cache, causal=False), range(3)))
            for result in results:
                np.testing.assert_array_equal(result, results[0])

    def test_first_calls_of_several_threads(self):
        program = """if True:
            import threading, quoka
            x, begin = memoryview(bytearray(4 * 2 * 3 * 8)).cast("f", (1, 2, 3, 8)), threading.Barrier(8)  # nobody has imported numpy
            threads = [threading.Thread(target=lambda: (begin.wait(), quoka.attention(x, x, x))) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            """
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    def test_a_daemon_thread_at_the_end(self):
        program = """if True:
            import threading, time, numpy, quoka
            q, k = numpy.ones((1, 8, 64, 64), numpy.float32), numpy.ones((1, 8, {keys}, 64), numpy.float32)
            def loop():
                while True:
                    quoka.attention(q, past_k=k, past_v=k, causal=False)
            threading.Thread(target=loop, daemon=True).start()
            time.sleep(0.1)
            print(quoka.attention(q, q, q).sum())
            """
        for keys in (8, 3000, 20000) * 3:
            done = subprocess.run([sys.executable, "-c", program.format(keys=keys)], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (0, ""), keys)

    def test_an_arithmetic_that_is_no_faster_says_so(self):
        program = """if True:
            import warnings, numpy, quoka
            q = numpy.ones((1, 2, 64, 64), numpy.float32)
            for name in ("automatic", "float", "bf16", "int8"):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    quoka.attention(q, q, q, arithmetic=name), quoka.attention(q, q, q, arithmetic=name)
                print(repr((quoka.isa(), name, quoka.arithmetic_used(name), [str(one.message) for one in seen])))
            """
        for variables in ({}, {"QUOKA_ISA": "x86-64-v3"}):  # a library of one level is of that one
            done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
            for level, name, used, said in map(ast.literal_eval, done.stdout.splitlines()):
                slow = name in ("bf16", "int8") and used == "float"
                self.assertEqual([name in one and level in one for one in said], [True] if slow else [], done.stdout)
                self.assertTrue(slow or name != "bf16" or not level.startswith("avx2"), done.stdout)

    def test_set_threads(self):
        q, k, v = normal(1, 4, 40, 32), normal(1, 2, 40, 32), normal(1, 2, 40, 32)
        expected = quoka.attention(q, k, v, threads=1)
        quoka.set_threads(2)
        np.testing.assert_array_equal(quoka.attention(q, k, v), expected)
        quoka.set_threads(0)
        self.assert_refused(lambda: quoka.set_threads(-1), -1, 1)
        self.assert_refused(lambda: quoka.set_threads(10**6), 10**6, 1024)

    def test_names(self):
        self.assertRegex(quoka.__version__, r"^\d+\.\d+\.\d+$")
        self.assertGreater(len(quoka.isa()), 3)
        self.assertEqual(quoka.arithmetic_used("float"), "float")
        self.assertIn(quoka.arithmetic_used("automatic", "bfloat16"), ("automatic", "float"))
        self.assertEqual(quoka.arithmetic_used("float", "bfloat16", rows=5), "float")
        self.assertIn(quoka.arithmetic_used("int8", rows=5), ("bf16", "float"), "few rows")
        self.assertEqual(quoka.arithmetic_used("int8", rows=4096), quoka.arithmetic_used("int8"))
        self.assert_refused(lambda: quoka.arithmetic_used("double"), "double")
        self.assert_refused(lambda: quoka.arithmetic_used("int8", rows=0), "rows is 0")


class Stubs(unittest.TestCase):
    """_core.pyi agrees with the module: names, and the parameters of each function and which of
    them have defaults."""

    def test_stub(self):
        stub = ast.parse((pathlib.Path(quoka.__file__).parent / "_core.pyi").read_text())

        def parameters(of):
            return ([a.arg for a in of.args.args if a.arg != "self"], [a.arg for a in of.args.kwonlyargs])

        def signature_of(function):
            text = function.__nb_signature__[0][0]
            text = re.sub(r"\\\d+", "0", text)
            made = ast.parse(text + ": ...").body[0]
            return parameters(made)

        def compare(body, of, where):
            said = set()
            for node in body:
                if isinstance(node, ast.FunctionDef):
                    said.add(node.name)
                    there = inspect.getattr_static(of, node.name)
                    if hasattr(there, "__nb_signature__") and node.name not in ("__init__", "__len__"):
                        self.assertEqual(parameters(node), signature_of(there), f"{where}{node.name}")
            return said

        said = compare(stub.body, quoka._core, "")
        for node in stub.body:
            if isinstance(node, ast.ClassDef) and node.name != "SupportsDLPack":
                said.add(node.name)
                of = getattr(quoka, node.name)
                members = compare(node.body, of, node.name + ".")
                there = {name for name in vars(of) if not name.startswith("_")}
                self.assertEqual({name for name in members if not name.startswith("_")}, there, node.name)
        there = {name for name in dir(quoka._core) if not name.startswith("_")}
        self.assertEqual(said, there)
        self.assertEqual(set(quoka.__all__) - {"__version__"}, there)


if __name__ == "__main__":
    unittest.main()
