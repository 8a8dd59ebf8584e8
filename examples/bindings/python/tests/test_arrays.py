#!/usr/bin/env python3
"""The package quoka on arrays of numpy, and of ml_dtypes where it is installed; torch has tests of its own. Without arguments
all of them:

    python3 tests/test_arrays.py

The reference is softmax in double by numpy. Sizes are small and odd.
"""
import ast
import inspect
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest
import warnings

import numpy as np

import quoka

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

RNG = np.random.default_rng(7)


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


class Case(unittest.TestCase):
    def assert_close(self, got, expected, tolerance=3e-6):
        self.assertEqual(got.shape, expected.shape)
        self.assertLess(np.abs(np.asarray(got, np.float64) - expected).max(), tolerance)

    def assert_refused(self, call, *words):
        with self.assertRaises(ValueError) as caught:
            call()
        for word in words:
            self.assertIn(str(word), str(caught.exception))

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

    def call(self, **options):
        arrays = {"past_k": self.past_k, "past_v": self.past_v}
        got, lse = quoka.attention(self.q, self.k, self.v, **arrays, **options, return_lse=True, threads=2)
        expected, expected_lse = reference(self.q, self.k, self.v, **arrays, **options)
        self.assert_close(got, expected)
        seen = np.isfinite(expected_lse)
        self.assertTrue((np.isneginf(lse) == ~seen).all())
        self.assert_close(lse[seen], expected_lse[seen], 1e-5)
        return got

    def test_is_exact(self):
        self.call()
        self.assert_close(quoka.attention(self.q, self.k, self.v), reference(self.q, self.k, self.v)[0])

    def test_options(self):
        for options in ({"scale": 0.3}, {"scale": 0.0}, {"softcap": 2.0}, {"window": 13}, {"sinks": normal(6)},
                        {"sinks": [0.5, -1, 2, 0, 0, 3]}, {"causal": False},
                        {"alibi_slopes": quoka.alibi_slopes(6)}, {"alibi_slopes": np.linspace(0.1, 0.6, 6)}):
            with self.subTest(options):
                plain = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v)
                self.assertGreater(np.abs(self.call(**options) - plain).max(), 1e-3)

    def test_masks(self):
        seen = RNG.random((2, 6, 9, 59)) < 0.7
        seen[1, 2, 3] = False  # a row that sees nothing
        for mask in (seen, seen[:1], seen[:, :1], seen[0, 0], seen[0], np.where(seen, 0, -np.inf).astype(np.float32),
                     normal(1, 6, 9, 59), normal(9, 59, dtype=np.float16), seen[:, :, ::-1], seen.astype(np.uint8)):
            with self.subTest(f"{mask.dtype} {mask.shape}"):
                got = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, mask=mask)
                expected = reference(self.q, self.k, self.v, self.past_k, self.past_v,
                                     mask=mask.astype(bool) if mask.dtype == np.uint8 else mask)[0]
                self.assert_close(got, expected)

    def test_masks_that_broadcast(self):
        seen = RNG.random((2, 6, 9, 59)) < 0.7
        added = normal(2, 6, 9, 59, dtype=np.float16)
        spread = np.zeros((2, 6, 9, 118), np.float32)
        spread[..., ::2] = added
        for mask in (seen[:, :, :1], seen[:1, :1, :1], seen[0, 0, :1], added[:, :, :1], added[..., :1], seen[..., 2:3],
                     np.ones((1, 1, 1, 1), bool), np.broadcast_to(seen[:, :1, :1], seen.shape), spread[..., ::2],
                     np.broadcast_to(added[..., :1], added.shape), np.broadcast_to(seen[0, 0, :, :1], (9, 59)),
                     seen.swapaxes(2, 3).copy().swapaxes(2, 3)):
            with self.subTest(f"{mask.dtype} {mask.shape} {mask.strides}"):
                self.assertLess(0, np.broadcast_to(mask, seen.shape).size)
                got = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, mask=mask)
                whole = np.ascontiguousarray(np.broadcast_to(mask, seen.shape))
                np.testing.assert_array_equal(got, quoka.attention(self.q, self.k, self.v, past_k=self.past_k,
                                                                   past_v=self.past_v, mask=whole))
                self.assert_close(got, reference(self.q, self.k, self.v, self.past_k, self.past_v, mask=whole)[0])

    def test_a_number_that_hides(self):
        hidden = RNG.random((9, 59)) < 0.5
        hidden[3] = True
        for dtype, number in ((np.float32, -np.inf), (np.float16, -65504), (np.float32, -60000), (np.float32, -1e9)):
            mask = np.where(hidden, number, 0).astype(dtype)
            self.call(mask=~hidden)
            np.testing.assert_array_equal(
                quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, mask=mask),
                quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, mask=~hidden))

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

    def test_refusals_say_what_is_wrong(self):
        q, k, v = self.q, self.k, self.v
        odd = np.ndarray((2, 6, 9, 24), np.float32, bytearray(2 * 6 * 9 * 98), 0, (6 * 9 * 98, 9 * 98, 98, 4))
        for call, words in ((lambda: quoka.attention(q.astype(">f4"), k, v), ("q ", ">f4", "other order", "newbyteorder")),
                            (lambda: quoka.attention(odd, k, v), ("q ", "98", "4")),
                            (lambda: quoka.attention(q, k.astype(np.longdouble), v), ("k ", np.dtype(np.longdouble), "float32")),
                            (lambda: quoka.attention(q, k, v, mask=np.ones((9, 9), ">f4")), ("mask ", ">f4", "other order")),
                            (lambda: quoka.attention(q[:, :, :1], k, v), ("past_k", 9, 1)),
                            (lambda: quoka.attention(q, k[:, :, :4], v[:, :, :4], past_k=k, past_v=v), ("past_k", 4, 9))):
            self.assert_refused(call, *words)
        for name, call in (("attention", lambda: quoka.attention(q, k, v, causl=True)), ("select", lambda: quoka.select(q, k, causl=1)),
                           ("index_keys", lambda: quoka.index_keys(q, k[:, :1], causl=1)), ("Cache", lambda: quoka.Cache(1, 2, 3, causl=1)),
                           ("State", lambda: quoka.State(causl=1)), ("Prefill", lambda: quoka.Prefill(2, 2, 3, causl=1))):
            with self.assertRaisesRegex(TypeError, name + r"\(\) has no option causl$"):
                call()

    def test_lists(self):
        # Unordered, with a key twice, entries of -1, and counts that cut lists short; keys 50 to 58 are the chunk's.
        lists = RNG.integers(-1, 59, (2, 2, 9, 14)).astype(np.int32)
        counts = RNG.integers(0, 15, (2, 2, 9)).astype(np.int32)
        spread = np.repeat(lists, 2, 3)[..., ::2]
        turned = np.ascontiguousarray(lists.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)

        def seen(lists, counts=None, block=1):
            mask = np.zeros((2, 6, 9, 59), bool)
            for b, head, i in np.ndindex(2, 6, 9):
                at = tuple(min(x, n - 1) for x, n in zip((b, head // 3, i), lists.shape[:3]))
                for entry in lists[at][:None if counts is None else counts[at]]:
                    if entry >= 0:
                        mask[b, head, i, block * entry:block * (entry + 1)] = True
            return mask

        for given, of, extent, block in ((lists, lists, None, 1), (lists, lists, counts, 1), (spread, lists, counts, 1),
                                         (turned, lists, counts, 1), (lists.astype(np.int64), lists, counts.astype(np.int64), 1),
                                         (np.minimum(lists, 5), np.minimum(lists, 5), counts, 10),
                                         (lists[:1, :1], lists[:1, :1], counts[:1, :1], 1), (lists[:, :1], lists[:, :1], None, 1)):
            with self.subTest(f"{given.dtype} {given.shape} {given.strides} {block}"):
                got = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, lists=given,
                                      counts=extent, block=block, threads=2)
                self.assert_close(got, reference(self.q, self.k, self.v, self.past_k, self.past_v,
                                                 mask=seen(of, extent, block))[0])
        for axes in (0, (0, 0)):  # without batch, without heads
            got = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v, lists=lists[axes],
                                  counts=counts[axes])
            whole = (lists[:1], counts[:1]) if axes == 0 else (lists[:1, :1], counts[:1, :1])
            self.assert_close(got, reference(self.q, self.k, self.v, self.past_k, self.past_v, mask=seen(*whole))[0])

    def test_lists_are_refused(self):
        out = np.full((2, 6, 9, 20), 5, np.float32)
        lists = np.zeros((9, 3), np.int32)
        for options, *words in (({"lists": lists[:8]}, 8, 9), ({"lists": lists[None, None, None]}, "rank of lists", 5, 4),
                                ({"lists": lists[0]}, "rank of lists", 1, 4), ({"lists": lists.astype(np.float32)}, "float32"),
                                ({"lists": lists + 59}, 59), ({"lists": lists - 2}, -2, -1),
                                ({"lists": lists.astype(np.int64) + 2**31}, 2**31, 2**31 - 1),
                                ({"lists": lists, "counts": np.full(9, 4, np.int32)}, 4, 3),
                                ({"lists": lists, "counts": np.full(8, 1, np.int32)}, 8, 9),
                                ({"lists": lists, "counts": np.full((1, 9), 1, np.int32)}, "rank of counts", 2, 1),
                                ({"lists": lists[None], "counts": np.full((1, 1, 1, 9), 1, np.int32)}, "rank of counts", 4, 3),
                                ({"lists": lists, "block": 0}, "block", 0, 1),
                                ({"lists": lists + 6, "block": 10}, 6, "blocks"),
                                ({"counts": np.zeros(9, np.int32)}, "no lists"), ({"block": 4}, "no lists")):
            self.assert_refused(lambda: quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v,
                                                        out=out, **options), *words)
        self.assertTrue((out == 5).all())

    def test_strides_change_no_bit(self):
        expected = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v)

        def by_token(x):  # [batch, tokens, heads, channels] in memory
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

        def by_channel(x):
            return np.ascontiguousarray(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)

        def spread(x):  # every second channel of something larger
            return np.repeat(x, 2, 3)[..., ::2]

        def backwards(x):
            return np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1]

        def read_only(x):
            x = x.copy()
            x.flags.writeable = False
            return x

        for change in (by_token, by_channel, spread, backwards, read_only, memoryview):
            with self.subTest(change.__name__):
                got = quoka.attention(*(change(x) for x in (self.q, self.k, self.v)), past_k=change(self.past_k),
                                      past_v=change(self.past_v))
                np.testing.assert_array_equal(got, expected)
        out = np.full((2, 9, 6, 20), np.nan, np.float32)
        returned = quoka.attention(self.q, self.k, self.v, past_k=self.past_k, past_v=self.past_v,
                                   out=out.transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), expected)
        self.assertIs(returned.base, out)

    def test_a_chunk_that_equals_the_end_of_the_past(self):
        past_k, past_v = (np.concatenate([p, x], 2) for p, x in ((self.past_k, self.k), (self.past_v, self.v)))
        got = quoka.attention(self.q, self.k, self.v, past_k=past_k, past_v=past_v)
        self.assert_close(got, reference(self.q, self.k, self.v, past_k, past_v)[0])

    def test_rank_3(self):
        got, lse = quoka.attention(self.q[0], self.k[0], self.v[0], return_lse=True)
        self.assertEqual((got.shape, lse.shape), ((6, 9, 20), (6, 9)))
        np.testing.assert_array_equal(got, quoka.attention(self.q[:1], self.k[:1], self.v[:1])[0])

    def test_element_types(self):
        types = [np.float16] + ([ml_dtypes.bfloat16] if ml_dtypes else [])
        for dtype in types:
            with self.subTest(str(np.dtype(dtype))):
                arrays = [x.astype(dtype) for x in (self.q, self.k, self.v, self.past_k, self.past_v)]
                got = quoka.attention(*arrays[:3], past_k=arrays[3], past_v=arrays[4], arithmetic="float")
                self.assertEqual(got.dtype, np.float32)
                expected = reference(*arrays)[0]
                self.assert_close(got, expected)
                out = np.zeros(got.shape, dtype)
                quoka.attention(*arrays[:3], past_k=arrays[3], past_v=arrays[4], arithmetic="float", out=out)
                np.testing.assert_array_equal(out, got.astype(dtype))
        self.assert_refused(lambda: quoka.attention(self.q.astype(np.float64), self.k, self.v), "q", "float64")
        self.assert_refused(lambda: quoka.attention(self.q, self.k.astype(np.int32), self.v), "k", "int32")

    def test_is_refused(self):
        q, k, v = self.q, self.k, self.v
        out = np.full((2, 6, 9, 20), 5, np.float32)
        frozen = out.copy()
        frozen.flags.writeable = False
        for call, *words in (
                (lambda: quoka.attention(q, k[:, :, :8], v, out=out), 8, 9),
                (lambda: quoka.attention(q, k, v[..., :19], out=out), 19, 20),
                (lambda: quoka.attention(q[:, :5], k, v), 5, 2),
                (lambda: quoka.attention(q[0, 0], k, v), "q's rank", 2, 4),
                (lambda: quoka.attention([1, 2], k, v), "q is of type list"),
                (lambda: quoka.attention(q, k, v, out=frozen), "out is read-only"),
                (lambda: quoka.attention(q, k, v, out=q[..., :20]), "memory"),
                (lambda: quoka.attention(q, k, v, out=np.zeros((2, 6, 9, 40), np.float32)[..., ::2]), "channels", 2, 1),
                (lambda: quoka.attention(q, k[..., ::-1], v), "channels", -1, 1),
                (lambda: quoka.attention(q, k, v, out=out, mask=np.ones((9, 8), bool)), 8, 9),
                (lambda: quoka.attention(q, k, v, out=out, mask=np.ones(9, bool)), "rank", 1, 4),
                (lambda: quoka.attention(q, k, v, out=out, mask=np.ones((9, 9), np.int32)), "mask", "int32"),
                (lambda: quoka.attention(q, k, v, out=out, sinks=[1.0]), 1, 6),
                (lambda: quoka.attention(q, k, v, out=out, sinks="six"), "sinks", "str"),
                (lambda: quoka.attention(q, k, v, out=out, softcap=-1.0), "softcap", -1),
                (lambda: quoka.attention(q, k, v, out=out, scale=float("nan")), "scale", "nan"),
                (lambda: quoka.attention(q, k, v, out=out, window=-3), -3, 0),
                (lambda: quoka.attention(q, k, v, out=out, arithmetic="float8"), "float8", "must be automatic, float, bf16 or int8"),
                (lambda: quoka.attention(q, k, v, out=out, arithmetic="bfloat16_x3"), "bfloat16_x3", "which is gone: take automatic"),
                (lambda: quoka.attention(q, k, v, out=out, arithmetic="single"), "single", "which is called float"),
                (lambda: quoka.attention(q, k, v, out=out, threads=-1), "threads", -1, 1),
                (lambda: quoka.attention(q), "neither"),
                (lambda: quoka.attention(q, past_k=k, past_v=v, past=quoka.Cache(2, 2, 24)), "twice"),
                (lambda: quoka.attention(q, past=7), "Cache")):
            self.assert_refused(call, *words)
        self.assertTrue((out == 5).all())
        with self.assertRaises(TypeError):
            quoka.attention(q, k, v, sliding_window=3)
        with self.assertRaises(TypeError):
            quoka.attention(None, k, v)


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

    def test_the_best_keys(self):
        whole = lambda *shape: RNG.integers(-3, 4, shape).astype(np.float32)  # noqa: E731
        q, k, weights = whole(2, 6, 9, 8), whole(2, 1, 70, 8), whole(2, 6, 9)
        for given, options in ((weights, {"top_k": 12}), (None, {"top_k": 12}), (weights, {"top_k": 3, "block": 16, "keep_last": 1}),
                               (None, {"top_k": 100}), (weights, {"top_k": 7, "causal": False}),
                               (weights, {"top_k": 9, "mask": RNG.random((2, 1, 9, 70)) < 0.5})):
            with self.subTest(options):
                got = quoka.index_keys(q, k, given, **options, threads=2)
                self.assertEqual(got.dtype, np.int32)
                np.testing.assert_array_equal(got, self.expected(q, k, given, **options))
        got = quoka.index_keys(q, k.repeat(3, 1), weights, top_k=5, lists_heads=3)
        np.testing.assert_array_equal(got, self.expected(q, k.repeat(3, 1), weights, 5, groups=3))
        # As models have them: [batch, tokens, heads], halves, and without batch.
        turned = np.ascontiguousarray(weights.transpose(0, 2, 1)).transpose(0, 2, 1)
        np.testing.assert_array_equal(quoka.index_keys(q, k.astype(np.float16), turned, top_k=4), self.expected(q, k, weights, 4))
        np.testing.assert_array_equal(quoka.index_keys(q[0], k[0], weights[0], top_k=4), self.expected(q, k, weights, 4)[0])

    def test_attention_takes_them(self):
        q, k, v = normal(1, 4, 9, 24), normal(1, 2, 9, 24), normal(1, 2, 9, 24)
        past_k, past_v = normal(1, 2, 50, 24), normal(1, 2, 50, 24)
        lists = quoka.index_keys(normal(1, 3, 9, 16), normal(1, 1, 59, 16), normal(1, 3, 9), top_k=2, block=8, keep_last=1)
        mask = np.zeros((1, 1, 9, 64), bool)
        for i in range(9):
            for entry in lists[0, 0, i]:
                mask[0, 0, i, 8 * entry:8 * entry + 8] |= entry >= 0
        got = quoka.attention(q, k, v, past_k=past_k, past_v=past_v, lists=lists, block=8)
        self.assert_close(got, reference(q, k, v, past_k, past_v, mask=mask[..., :59])[0])

    def test_refusals(self):
        q, k, weights = normal(1, 4, 9, 8), normal(1, 1, 59, 8), normal(1, 4, 9)
        self.assert_refused(lambda: quoka.index_keys(q, k, weights, top_k=0), "top_k", 0, 1)
        self.assert_refused(lambda: quoka.index_keys(q, k[:, :, :5], weights), "q_len", 9, 5)
        self.assert_refused(lambda: quoka.index_keys(q, k, weights[:, :3]), "weights", 3, 4)
        self.assert_refused(lambda: quoka.index_keys(q, k, weights[0, 0]), "rank of weights", 1, 3)
        self.assert_refused(lambda: quoka.index_keys(q, k, weights.astype(np.float64)), "weights", "float64")
        self.assert_refused(lambda: quoka.index_keys(q, k, weights, lists_heads=3), "index_heads", 4, 3)


def mean_count(keep):  # of recommended and balanced each query head has a list, and they share the budget
    return sum(keep.count(0, head) for head in range(keep.heads)) / keep.heads


class Select(Case):
    def setUp(self):
        self.q, self.k = normal(1, 8, 30, 64), normal(1, 2, 400, 64)

    def test_budgets_and_presets(self):
        for preset in ("recommended", "balanced", "paper"):
            for budget, count in ((40, 40), (0.1, 40), (1.0, 400), (1000, 400)):
                keep = quoka.select(self.q, self.k, budget=budget, preset=preset, threads=2)
                heads = 2 if preset == "paper" or keep.is_all else 8
                self.assertEqual((mean_count(keep), keep.kv_len, keep.heads, keep.batch), (count, 400, heads, 1))
                positions = keep.positions(0, 0)
                self.assertEqual((positions.dtype, len(positions)), (np.int32, keep.count(0, 0)))
                self.assertTrue((np.diff(positions) > 0).all())
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
        keep = quoka.select(self.q, self.k, budget=20, keep_first=3, keep_last=4)
        self.assertEqual([*keep.positions(0, 0)[:3], *keep.positions(0, 0)[-4:]], [0, 1, 2, 396, 397, 398, 399])

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

    def test_attention_heeds_it(self):
        q, k, v, past_v = self.q, normal(1, 2, 30, 64), normal(1, 2, 30, 64), normal(1, 2, 400, 64)
        keep = quoka.select(q, self.k, budget=25)
        mask = np.zeros((1, 8, 30, 430), bool)
        mask[..., 400:] = True
        for head in range(8):
            mask[0, head, :, keep.positions(0, head)] = True
        got = quoka.attention(q, k, v, past_k=self.k, past_v=past_v, selection=keep)
        self.assert_close(got, reference(q, k, v, self.k, past_v, mask=mask)[0])
        lists = [[list(map(int, keep.positions(0, h))) for h in range(8)]]
        self.assertEqual(quoka.Selection(lists, 400), keep)
        np.testing.assert_array_equal(
            quoka.attention(q, k, v, past_k=self.k, past_v=past_v, selection=quoka.Selection(lists, 400)), got)

    def test_masks_hide(self):
        mask = np.ones((30, 430), bool)
        mask[:, :350] = False
        keep = quoka.select(self.q, self.k, budget=20, mask=mask)
        self.assertEqual(mean_count(keep), 20)
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

    def test_a_share_may_be_numpys(self):
        self.assertEqual(quoka.select(self.q, self.k, budget=np.float32(0.25)), quoka.select(self.q, self.k, budget=0.25))

    def test_is_refused(self):
        for call, *words in (
                (lambda: quoka.select(self.q, self.k, budget=1.5), 1.5, "(0, 1]"),
                (lambda: quoka.attention(self.q, past_k=self.k), "there is past_k, and there is no past_v"),
                (lambda: quoka.attention(self.q, past_v=self.k), "there is past_v, and there is no past_k"),
                (lambda: quoka.attention(self.q, past_k=self.k, past_v=self.k, window=-1), "quoka: window is -1"),
                (lambda: quoka.select(self.q, self.k, budget=-2), "budget is -2", "a count of keys", "1.0 for all of it"),
                (lambda: quoka.select(self.q, self.k, budget=0), "budget is 0", "a count of keys"),
                (lambda: quoka.select(self.q, self.k, budget=np.float32(1.5)), 1.5, "a share"),
                (lambda: quoka.select(self.q, self.k, budget=True), "budget is True", "a count of keys"),
                (lambda: quoka.select(self.q, self.k, budget="many"), "budget is 'many'", "a count of keys"),
                (lambda: quoka.select(self.q, self.k, preset="best"), "best", "recommended"),
                (lambda: quoka.select(self.q, self.k[..., :63]), 63, 64),
                (lambda: quoka.select(self.q, self.k, budget=9, alibi_slopes=quoka.alibi_slopes(8)), "alibi_slopes"),
                (lambda: quoka.Selection([[[3, 3]]], 5), 3),
                (lambda: quoka.Selection([[[5]]], 5), 5, 4),
                (lambda: quoka.Selection([[[1]], [[1], [2]]], 5), 2, 1),
                (lambda: quoka.Selection([[[1]]], 5).positions(1, 0), 1, 0),
                (lambda: quoka.Selection([[[1]]], 5).count(0, -1), -1, 0),
                (lambda: quoka.State(0.0), "(0, 1]"),
                (lambda: quoka.select(self.q, self.k, budget=9, chunk_k=self.k[:, :, :29]), "chunk_k", 29, 30),
                (lambda: quoka.select(self.q, self.k, budget=9, chunk_k=self.k[:, :, :30], mask=np.ones((30, 430), bool)), "mask", "chunk_k"),
                (lambda: quoka.select(self.q, self.k, budget=9, queries=-1), "queries", -1, 0),
                (lambda: quoka.select(self.q, self.k, state=quoka.State(9), queries=7), "state", 7),
                (lambda: quoka.State(9, queries=-1), "queries", -1, 0),
                (lambda: quoka.Prefill(8, 2, 64, budget=9, queries=-1), "queries", -1, 0),
                (lambda: quoka.State(9).truncate(-1), -1, 0)):
            self.assert_refused(call, *words)


class Pages(Case):
    """Against the same keys side by side: to the last bit."""

    def setUp(self):
        self.lengths = [37, 0, 64, 5]
        self.k, self.v = normal(4, 2, 64, 24), normal(4, 2, 64, 20)  # what the pages hold
        self.q, self.own_k, self.own_v = normal(4, 6, 9, 24), normal(4, 2, 9, 24), normal(4, 2, 9, 20)
        self.pools, self.table = self.paged(7)

    def paged(self, page_size, dtype=np.float32, strange=-1):
        """Pools of keys and values, full of NaN where no token is, and the table, with strange entries behind the used ones."""
        most = -(-64 // page_size) + 1
        order = RNG.permutation(4 * most + 3).astype(np.int32)
        table = np.full((4, most), strange, np.int32)
        pools = [np.full((len(order), page_size, 2, x.shape[-1]), np.nan, dtype) for x in (self.k, self.v)]
        for b, length in enumerate(self.lengths):
            for i in range(-(-length // page_size)):
                table[b, i] = order[b * most + i]
                part = slice(i * page_size, min(length, (i + 1) * page_size))
                for pool, x in zip(pools, (self.k, self.v)):
                    pool[table[b, i], :part.stop - part.start] = x[b, :, part].transpose(1, 0, 2)
        return pools, table

    def alone(self, b, selection=None, chunk=True, **options):
        """Sequence b in a call of its own, over keys side by side."""
        length = self.lengths[b]
        if chunk:
            own, past = (self.own_k[b:b + 1], self.own_v[b:b + 1]), length
        else:
            own, past = (self.k[b:b + 1, :, length - 9:length], self.v[b:b + 1, :, length - 9:length]), length - 9
        of = {"past_k": self.k[b:b + 1, :, :past], "past_v": self.v[b:b + 1, :, :past]} if past else {}
        return quoka.attention(self.q[b:b + 1], *own, **of, selection=selection, return_lse=True, **options)

    def call(self, pools=None, table=None, lengths=None, **options):
        pools = self.pools if pools is None else pools
        return quoka.attention(self.q, self.own_k, self.own_v, k_pages=pools[0], v_pages=pools[1],
                               block_table=self.table if table is None else table,
                               lengths=self.lengths if lengths is None else lengths, threads=2, **options)

    def assert_same(self, got, each=None, **options):
        for b in range(4):
            for x, y in zip(got, self.alone(b, **({} if each is None else each(b)), **options)):
                np.testing.assert_array_equal(x[b], y[0], f"sequence {b}")

    def test_the_same_bits(self):
        for page_size in (1, 7, 16, 64, 100):
            pools, table = self.paged(page_size)
            with self.subTest(page_size):
                for options in ({}, {"window": 13, "softcap": 3.0}, {"sinks": normal(6), "scale": 0.2},
                                {"alibi_slopes": quoka.alibi_slopes(6)}, {"causal": False}):
                    self.assert_same(self.call(pools, table, return_lse=True, **options), **options)

    def test_where_pages_lie(self):
        head_major = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in self.pools]
        both = np.concatenate(head_major, 3)  # a token's key, then its value
        by_channel = [np.ascontiguousarray(x.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1) for x in self.pools]
        turned = [np.ascontiguousarray(x[::-1])[::-1] for x in self.pools]
        for pools in (head_major, (both[..., :24], both[..., 24:]), by_channel, turned):
            self.assert_same(self.call(pools, return_lse=True))
        wide = np.repeat(self.table, 2, 1)
        for table in (self.table.astype(np.int64), wide[:, ::2], np.asfortranarray(self.table), np.repeat(self.table, 2, 0)[::2]):
            self.assert_same(self.call(table=table, return_lse=True))
        strange = np.where(self.table < 0, np.int64(2)**40, self.table.astype(np.int64))
        for lengths in (np.array(self.lengths), np.array(self.lengths, np.int32), tuple(self.lengths), np.repeat(self.lengths, 3)[::3]):
            self.assert_same(self.call(table=strange, lengths=lengths, return_lse=True))
        for dtype in [np.float16] + ([ml_dtypes.bfloat16] if ml_dtypes else []):
            pools, table = self.paged(7, dtype)
            self.k, self.v = self.k.astype(dtype), self.v.astype(dtype)
            self.assert_same(self.call(pools, table, return_lse=True))

    def test_pages_are_shared(self):
        self.table[3], self.k[3], self.v[3], self.lengths[3] = self.table[2], self.k[2], self.v[2], 30
        self.assert_same(self.call(return_lse=True))

    def test_nothing_is_copied(self):
        pools = [np.broadcast_to(x[:1, :1], (2**22, 2**8, *x.shape[2:])) for x in (normal(1, 1, 2, 24), normal(1, 1, 2, 20))]  # 200 GB
        got = quoka.attention(self.q, k_pages=pools[0], v_pages=pools[1], block_table=np.full((4, 1), 2**22 - 1), lengths=[9] * 4)
        np.testing.assert_allclose(got[:, :3], np.broadcast_to(pools[1][0, 0, 0], got[:, :3].shape), atol=1e-6)

    def test_the_chunk_lies_in_the_pages(self):
        self.lengths[1], self.lengths[3] = 9, 10
        pools, table = self.paged(7)
        got = quoka.attention(self.q, k_pages=pools[0], v_pages=pools[1], block_table=table, lengths=self.lengths, return_lse=True)
        self.assert_same(got, chunk=False)
        self.assert_refused(lambda: quoka.attention(self.q, k_pages=pools[0], v_pages=pools[1], block_table=table,
                                                    lengths=[9, 9, 8, 9]), 9, 8)

    def test_one_sequence(self):
        for b in (0, 2):
            got = quoka.attention(self.q[b], self.own_k[b], self.own_v[b], k_pages=self.pools[0], v_pages=self.pools[1],
                                  block_table=self.table[b], lengths=self.lengths[b])
            np.testing.assert_array_equal(got, self.alone(b)[0][0])

    def test_masks_and_lists(self):
        mask = RNG.random((4, 6, 9, 73)) < 0.6  # 64 + 9 keys, of the longest
        added = np.where(mask, normal(4, 6, 9, 73), -np.inf).astype(np.float32)
        for given in (mask, added, mask[:1], added[:, :1]):
            which = lambda b: min(b, len(given) - 1)  # noqa: E731, B023
            self.assert_same(self.call(mask=given, return_lse=True),
                             lambda b: {"mask": given[which(b):which(b) + 1, ..., :self.lengths[b] + 9]})  # noqa: B023
        lists = RNG.integers(-1, 9, (4, 2, 9, 5)).astype(np.int32)
        counts = RNG.integers(0, 6, (4, 2, 9)).astype(np.int32)
        self.assert_same(self.call(lists=lists, counts=counts, return_lse=True),
                         lambda b: {"lists": lists[b:b + 1], "counts": counts[b:b + 1]})

    def test_selections(self):
        keep = [quoka.select(self.q[b:b + 1], k_pages=self.pools[0], block_table=self.table[b], lengths=self.lengths[b], budget=4)
                if self.lengths[b] else None for b in range(4)]
        for b in (0, 2, 3):
            self.assertEqual(keep[b], quoka.select(self.q[b:b + 1], self.k[b:b + 1, :, :self.lengths[b]], budget=4))
        self.assertEqual((mean_count(keep[0]), keep[0].kv_len), (4, 37))
        got = self.call(selection=keep, return_lse=True)
        self.assert_same(got, lambda b: {"selection": keep[b]})
        self.assertGreater(np.abs(got[0][0] - self.call()[0]).max(), 1e-3)
        paged = {"k_pages": self.pools[0], "block_table": self.table[:1], "lengths": [37]}
        of = self.k[:1, :, :37]
        state, told = quoka.State(4), quoka.State(4)
        for length in (20, 37):
            paged["lengths"] = length
            self.assertEqual(quoka.select(self.q[:1], **paged, state=state),
                             quoka.select(self.q[:1], of[:, :, :length], state=told))
        self.assertEqual(state.kept_bytes, told.kept_bytes)
        self.assert_codes(state, 2 * 37 * 24)

    def test_is_refused(self):
        out = np.full((4, 6, 9, 20), 5, np.float32)
        pages, (k_pages, v_pages) = len(self.pools[0]), self.pools

        def at(b, i, entry, dtype=np.int32):
            table = self.table.astype(dtype)
            table[b, i] = entry
            return {"table": table}

        for options, *words in (
                (at(0, 5, pages), "sequence 0", pages, "number of pages"), (at(2, 0, -1), "sequence 2", -1, 0),
                (at(2, 9, 2**31 - 1), "sequence 2", 2**31 - 1, pages), (at(2, 9, 2**31, np.int64), 2**31, 2**31 - 1),
                (at(2, 9, -2**40, np.int64), -2**40), (at(3, 0, pages, np.int64), "sequence 3", pages),
                ({"lengths": [37, 0, 78, 5]}, "sequence 2", "entries", 11, 12),
                ({"table": self.table[:, :3]}, "sequence 0", 3, 6), ({"table": self.table.astype(np.int64)[:, :3]}, "sequence 0", 3, 6),
                ({"lengths": [37, 0, -1, 5]}, "length", -1, 0), ({"lengths": [37, 0, 2**62, 5]}, "length"),
                ({"lengths": [37, 0, 64]}, "lengths", 3, 4), ({"lengths": 37}, "lengths", 1, 4),
                ({"table": self.table[:3], "lengths": [37, 0, 64]}, "block_table", 3, 4),
                ({"table": self.table.astype(np.float32)}, "block_table", "float32", "int64"),
                ({"table": self.table.astype(np.uint32)}, "block_table", "uint32"),
                ({"table": self.table[None]}, "rank of block_table", 3, 2), ({"table": [[1]] * 4}, "block_table", "list"),
                ({"lengths": np.array(self.lengths, np.float32)}, "lengths", "float32"),
                ({"lengths": [37, 0, 64.5, 5]}, "lengths", "float"), ({"lengths": np.array([self.lengths])}, "rank of lengths", 2, 1),
                ({"pools": (k_pages[0], v_pages)}, "k_pages's rank", 3, 4), ({"pools": (k_pages, v_pages[:-1])}, pages - 1, pages),
                ({"pools": (k_pages, v_pages[:, :6])}, "page", 6, 7), ({"pools": (k_pages[:, :0], v_pages[:, :0])}, "page", 0, 1),
                ({"pools": (k_pages.astype(np.float64), v_pages)}, "k_pages", "float64"),
                ({"pools": (k_pages[..., :23], v_pages)}, 23, 24), ({"pools": (k_pages[:, :, :1], v_pages[:, :, :1])}, 1, 2),
                ({"mask": np.ones((9, 72), bool)}, "longest", 72, 73), ({"mask": np.ones((3, 1, 9, 73), bool)}, "mask's batch", 3, 4),
                ({"lists": np.zeros((3, 1, 9, 2), np.int32)}, "lists' batch", 3, 4),
                ({"lists": np.full((9, 2), 9, np.int32)}, "sequence 1", 9),
                ({"selection": [None] * 3}, "selections", 3, 4), ({"selection": [7] * 4}, "quoka.Selection"),
                ({"selection": quoka.Selection([[[1], [1]]], 37)}, "list of them", 4, 1),
                ({"selection": [quoka.Selection([[[1], [1]]], 36), None, None, None]}, "sequence 0", 36, 37),
                ({"past_k": self.k}, "twice"), ({"past": quoka.Cache(4, 2, 24)}, "twice")):
            with self.subTest(words):
                self.assert_refused(lambda: self.call(out=out, **options), *words)  # noqa: B023
        whole = {"k_pages": k_pages, "v_pages": v_pages, "block_table": self.table, "lengths": self.lengths}
        for name in whole:
            some = {key: x for key, x in whole.items() if key != name}
            self.assert_refused(lambda: quoka.attention(self.q, self.own_k, self.own_v, **some, out=out), f"no {name}")  # noqa: B023
        self.assert_refused(lambda: quoka.attention(self.q, self.own_k, **whole), "no v")
        self.assert_refused(lambda: quoka.attention(self.q[:3], self.own_k, self.own_v, **whole), 4, 3)
        self.assert_refused(lambda: quoka.attention(self.q, self.own_k[:3], self.own_v[:3], **whole), 3, 4)
        self.assert_refused(lambda: quoka.attention(self.q, self.own_k, self.own_v, **whole, out=out[:3]), 3, 4)
        del whole["v_pages"]
        self.assert_refused(lambda: quoka.select(self.q, **whole), "sequences", 4, 1)
        self.assert_refused(lambda: quoka.select(self.q, self.k, **whole), "past_k")
        self.assert_refused(lambda: quoka.select(self.q), "no past_k")
        self.assertTrue((out == 5).all())


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
        self.assert_close(lse, reference(q, k, v, softcap=9.0)[1][:, :, 60:], 1e-5)
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
            results = []
            readers = [threading.Thread(target=lambda: results.append(quoka.attention(q, past=cache, causal=False))) for _ in range(3)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            self.assertEqual(len(results), 3)

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

    def test_threads_give_the_same_bits(self):
        q, k, v = normal(1, 4, 40, 32), normal(1, 2, 40, 32), normal(1, 2, 40, 32)
        expected = quoka.attention(q, k, v, threads=1)
        for threads in (2, 3, 0):
            np.testing.assert_array_equal(quoka.attention(q, k, v, threads=threads), expected)
        quoka.set_threads(2)
        np.testing.assert_array_equal(quoka.attention(q, k, v), expected)
        quoka.set_threads(0)
        self.assert_refused(lambda: quoka.set_threads(-1), -1, 0)
        self.assert_refused(lambda: quoka.attention(q, k, v, threads=10**6), 1000000, 1024)

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


class Settings(unittest.TestCase):
    def test_those_of_the_backend_are_known_to_transformers(self):
        """Read from the sources, so that torch is not needed."""
        examples = pathlib.Path(__file__).parents[2]
        body = ast.parse((examples / "python/src/quoka/transformers.py").read_text(encoding="utf-8")).body
        settings, = (one for one in body if isinstance(one, ast.ClassDef) and one.name == "Settings")
        known = {one.target.id for one in settings.body if isinstance(one, ast.AnnAssign)}
        known |= ast.literal_eval(next(one.value for one in body if isinstance(one, ast.Assign) and one.targets[0].id == "OF_OTHERS"))
        for file, pattern in (("settings.cpp", r"variables\{([^}]*)\}"), ("settings.cpp", r"of_the_file\{([^}]*)\}"),
                              ("check.cpp", r"settings_names\{([^}]*)\}")):
            keys = set(re.findall(r'"(\w+)"', re.search(pattern, (examples / "ggml" / file).read_text(encoding="utf-8"))[1])) - {"config"}
            self.assertGreater(len(keys), 1)
            self.assertLessEqual(keys, known)


if __name__ == "__main__":
    unittest.main()
