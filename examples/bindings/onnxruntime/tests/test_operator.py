#!/usr/bin/env python3
"""quoka's GroupQueryAttention beside com.microsoft's, which is the reference: the same model, once as it is and once rewritten.

    QUOKA_ONNXRUNTIME_LIBRARY=.../libonnxruntime-quoka.so python3 tests/test_operator.py

Sizes are small and odd. Errors are of the largest value.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parents[2] / "python" / "tests")]
import rewrite  # noqa: E402
from drawn import drawn, generators, st  # noqa: E402

LIBRARY = os.environ["QUOKA_ONNXRUNTIME_LIBRARY"]
RNG = np.random.default_rng(11)
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, np.int32: TensorProto.INT32, np.int64: TensorProto.INT64}
LARGEST_ERROR = {np.float32: 2e-6, np.float16: 2e-3}
PRESENT = ("present_key", "present_value")


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def i32(*values):
    return np.array(values, np.int32)


def onnx_type(array):
    return TYPES[array.dtype.type]


def node_model(feeds, outputs=("output", *PRESENT), dtype=np.float32, **attributes):
    """A model of one node of com.microsoft's; feeds: {input: array}."""
    last = max(i for i, name in enumerate(rewrite.INPUTS) if name in feeds)
    node = helper.make_node("GroupQueryAttention", [name if name in feeds else "" for name in rewrite.INPUTS[:last + 1]], outputs,
                            domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "node", [helper.make_tensor_value_info(name, onnx_type(array), None) for name, array in feeds.items()],
                              [helper.make_tensor_value_info(name, TYPES[dtype], None) for name in outputs if name])
    return as_model(graph)


def as_model(graph):
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)])


def session(model, threads=2):
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    options.register_custom_ops_library(LIBRARY)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def rewritten(model, **own):
    """By float, unless own attributes say otherwise: `automatic` may split floats into bfloat16 numbers, and bounds are float's."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    own = {"arithmetic": "float"} | own
    replaced, left = rewrite.rewrite(copy, **{name: value for name, value in own.items() if value is not None})
    assert replaced and not left, left
    return copy


HEADS = {"num_heads": 6, "kv_num_heads": 2}


def one_node(feeds, outputs=("output", *PRESENT), dtype=np.float32, own=None, **attributes):
    """A session of such a node, rewritten with these attributes of its own: feeds to outputs."""
    model = rewritten(node_model(feeds, outputs, dtype, **HEADS | attributes), **(own or {}))
    one = session(model)
    return lambda feeds: one.run(None, feeds)


def attended(feeds, **named):
    """The output of such a node."""
    return one_node(feeds, **named)(feeds)[0]


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(1.0, np.abs(b).max())


def angles(positions, half, dtype):
    angle = np.arange(positions)[:, None] * 0.7 ** np.arange(half)[None]
    return {"cos_cache": np.cos(angle).astype(dtype), "sin_cache": np.sin(angle).astype(dtype)}


class Call:
    """One node's inputs, attributes and outputs, drawn: every kind of call that both operators take."""

    def __init__(self, draw):
        rng, sampled = draw(generators), lambda *of: draw(st.sampled_from(of))
        self.dtype, self.dim, way = sampled(np.float32, np.float16), sampled(24, 32), sampled("prompt", "chunk", "token", "padded", "parts", "borrowed")
        batch = sampled(1, 2, 3) if way in ("token", "padded", "parts") else 1
        queries = {"prompt": sampled(1, 9, 37), "chunk": sampled(2, 5, 23), "token": 1, "padded": 11, "parts": sampled(1, 5), "borrowed": sampled(1, 3, 20)}[way]
        own = rng.integers(0, queries + 1, batch) if way == "parts" else np.full(batch, queries)  # queries of each sequence
        own[0] = queries
        lens = own + (0 if way in ("prompt", "padded") else rng.integers(way == "chunk", sampled(2, 50), batch))
        if way == "padded":  # on the right
            lens[1:] = rng.integers(1, queries + 1, batch - 1)
        lens = np.maximum(lens, 1)
        rows = max(lens) - (0 if way == "borrowed" else queries) + sampled(0, queries + 9)
        if way in ("prompt", "padded", "parts"):
            rows = sampled(max(lens) + 9, *([0, None] if way == "prompt" else [None] if way == "padded" else []))

        def normal(*shape):
            return rng.standard_normal(shape).astype(self.dtype)

        heads, kv_heads = 6, 2
        q, k, v = normal(batch, queries, heads * self.dim), *(normal(batch, queries, kv_heads * self.dim) for _ in "kv")
        if way == "borrowed":  # the past holds all, as another layer wrote it
            k, v = k[:, :0], v[:, :0]
        self.feeds = {"query": np.concatenate([q, k, v], 2)} if way != "borrowed" and sampled(True, False) else {"query": q, "key": k, "value": v}
        if rows is not None:
            self.feeds |= {name: normal(batch, kv_heads, rows, self.dim) for name in ("past_key", "past_value")}
            if way == "chunk" and (past := lens[0] - queries) >= queries and sampled(True, False):  # a text says the same twice
                for name, x in (("past_key", k), ("past_value", v)):
                    self.feeds[name][:, :, past - queries:past] = x.reshape(1, queries, kv_heads, self.dim).transpose(0, 2, 1, 3)
        self.feeds |= {"seqlens_k": (lens - 1).astype(np.int32), "total_sequence_length": i32(max(lens))}
        if way == "parts":
            self.feeds["query_seqlens"] = own.astype(np.int32)
        self.attributes = draw(st.fixed_dictionaries({}, optional={
            "scale": st.just(0.31), "softcap": st.just(1.5), "local_window_size": st.sampled_from([-2, 0, 1, 7]), "causal": st.just(0)}))
        if "local_window_size" in self.attributes or way == "parts":
            self.attributes.pop("causal", None)
        window = self.attributes.get("local_window_size", 0) > 0
        sink = sampled(None, "smooth_softmax", "head_sink")
        if sink == "smooth_softmax":
            self.attributes[sink] = 1
        elif sink:
            self.feeds[sink] = 2 * normal(heads)
        if self.dim == 32 and sampled(True, False):
            self.attributes |= {"do_rotary": 1, "rotary_interleaved": sampled(0, 1)}
            self.feeds |= angles(80, sampled(8, 16), self.dtype)
            if way in ("prompt", "chunk") and sampled(True, False):  # a first prompt begins at the first of them
                self.feeds["position_ids"] = rng.integers(0, 64 - queries, (1, queries))
        if (batch == 1 or way == "token") and way != "borrowed" and sampled(True, False):
            self.feeds["attention_bias"] = normal(sampled(1, batch), sampled(1, heads), queries, max(lens))
            if min(lens) > queries and not window:  # so that each row sees another key
                self.feeds["attention_bias"][..., 0] = -60000 if self.dtype == np.float16 else np.finfo(np.float32).min
        # What shows keys otherwise than causally is attended to as it is, and so are windows and few queries.
        self.own = {"preset": "paper", "budget": 16, "chunk": 4} if "attention_bias" in self.feeds or window or queries == 1 else {}
        self.outputs = sampled(("output", *PRESENT), ("output",))

    def __repr__(self):
        shapes = {name: array.shape for name, array in self.feeds.items()}
        return f"Call({self.dtype.__name__}, {shapes}, seqlens_k={self.feeds['seqlens_k']}, {self.attributes}, {self.own}, {self.outputs})"


calls = st.composite(lambda draw: Call(draw))()


class Node(unittest.TestCase):
    """One node, every attribute and input."""

    q_heads, kv_heads, dim = 6, 2, 24

    def feeds(self, batch, queries, lens, past_rows, dtype=np.float32, packed=False, total=None):
        q, kv = self.q_heads * self.dim, self.kv_heads * self.dim
        if packed:
            feeds = {"query": normal(batch, queries, q + 2 * kv, dtype=dtype)}
        else:
            feeds = {"query": normal(batch, queries, q, dtype=dtype), "key": normal(batch, queries, kv, dtype=dtype),
                     "value": normal(batch, queries, kv, dtype=dtype)}
        if past_rows is not None:
            for name in ("past_key", "past_value"):
                feeds[name] = normal(batch, self.kv_heads, past_rows, self.dim, dtype=dtype)
        return feeds | {"seqlens_k": i32(*lens) - 1, "total_sequence_length": np.array([total or max(lens)], np.int32)}

    def compare(self, feeds, dtype=np.float32, own=None, bound=None, outputs=("output", *PRESENT), **attributes):
        """Each sequence's rows without padding."""
        wanted = session(node_model(feeds, dtype=dtype, **HEADS | attributes)).run(None, feeds)  # which wants a present beside a past
        got = one_node(feeds, outputs, dtype, own, **attributes)(feeds)
        self.assertEqual([one.shape for one in got], [one.shape for one in wanted[:len(got)]])
        queries = feeds["query"].shape[1]
        for b, last in enumerate(feeds["seqlens_k"]):
            own_queries = feeds["query_seqlens"][b] if "query_seqlens" in feeds else min(queries, last + 1)
            if own_queries:
                self.assertLess(error(got[0][b, :own_queries], wanted[0][b, :own_queries]), bound or LARGEST_ERROR[dtype], f"sequence {b}")
            for one, other in zip(got[1:], wanted[1:]):
                self.assertLess(error(one[b, :, :last + 1], other[b, :, :last + 1]), 1e-6 if dtype == np.float32 else 1e-3, f"cache, sequence {b}")
        return got

    @drawn(120, of=calls)
    def test_is_com_microsofts(self, of):
        self.dim = of.dim
        self.compare(of.feeds, of.dtype, of.own, outputs=of.outputs, **of.attributes)

    def test_padding_is_zeros(self):
        got = self.compare(self.feeds(3, 11, [11, 4, 1], 20))
        self.assertTrue((got[0][1, 4:] == 0).all() and (got[1][1, :, 4:] == 0).all())

    def test_chunks_of_a_batch_are_those_of_its_sequences(self):
        # com.microsoft's has no such call without query_seqlens.
        feeds = self.feeds(2, 3, [40, 9], 50)
        got = attended(feeds)
        for b in range(2):
            alone = {name: array[b:b + 1] for name, array in feeds.items() if name != "total_sequence_length"}
            alone["total_sequence_length"] = feeds["seqlens_k"][b:b + 1] + 1
            self.assertLess(error(got[b], session(node_model(alone, **HEADS)).run(None, alone)[0][0]), 2e-6)

    def test_chunks_end_at_multiples(self):
        # Wherever the caller cuts: from key 32 on the same queries select together.
        feeds = self.feeds(1, 96, [96], 0)
        for preset in ("paper", "recommended"):
            one = one_node(feeds, own={"preset": preset, "budget": 16, "chunk": 16})
            wanted = one(feeds)[0]
            for cuts in ((0, 32, 64, 96), (0, 20, 96)):
                cache, got = {name: feeds[name] for name in ("past_key", "past_value")}, []
                for begin, end in zip(cuts, cuts[1:]):
                    part = {name: feeds[name][:, begin:end] for name in ("query", "key", "value")}
                    output, *present = one(part | cache | {"seqlens_k": i32(end - 1), "total_sequence_length": i32(end)})
                    cache = dict(zip(cache, present))
                    got.append(output)
                got, same = np.concatenate(got, 1), slice(32 if 20 in cuts else 0, None)
                with self.subTest(preset, cuts=cuts):
                    self.assertLess(error(got[:, same], wanted[:, same]), 2e-6)
                    if 20 in cuts:
                        self.assertGreater(error(got[:, 16:32], wanted[:, 16:32]), 1e-3)

    def test_output_size(self):
        # Known before a run where the model says the queries' size and keys lie apart.
        graph = helper.make_graph([helper.make_node("GroupQueryAttention", ["query", "key", "value", "", "", "seqlens_k", "total_sequence_length"],
                                                    ["output"], domain="com.microsoft", num_heads=4, kv_num_heads=2), helper.make_node("Relu", ["output"], ["y"])],
                                  "sizes", [*(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", size])
                                              for name, size in (("query", 64), ("key", 32), ("value", 32))),
                                            *(helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in ("seqlens_k", "total_sequence_length"))],
                                  [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
        self.assertEqual(session(rewritten(as_model(graph))).get_outputs()[0].shape, ["batch", "tokens", 64])

    def test_empty(self):
        self.assertEqual(attended(self.feeds(1, 0, [1], 50)).shape, (1, 0, 144))

    def test_no_tokens_keep_the_past(self):
        # Presents of their own get a copy of the past, though no token comes; other calls' numbers lie in that memory.
        for outputs in (("output", *PRESENT), ("output", "present_key"), ("output", "", "present_value")):
            for dtype in (np.float32, np.float16):
                feeds = self.feeds(2, 0, [300, 7], 310, dtype)
                full = self.feeds(2, 8, [310, 308], 310, dtype)
                one = one_node(feeds, outputs, dtype)
                for _ in range(3):
                    one(full)
                got = dict(zip([name for name in outputs if name], one(feeds)))
                for name in got.keys() & set(PRESENT):
                    for b, length in enumerate((300, 7)):
                        np.testing.assert_array_equal(got[name][b, :, :length], feeds["past" + name[7:]][b, :, :length])
                        self.assertFalse(got[name][b, :, length:].any())
        # A past without rows, and no sequence at all.
        feeds = self.feeds(1, 3, [3], 0)
        self.compare(feeds)
        none = {name: array[:0] for name, array in feeds.items() if name != "total_sequence_length"} | {"total_sequence_length": i32(3)}
        self.assertEqual([one.shape for one in one_node(none)(none)], [(0, 3, 144), (0, 2, 3, 24), (0, 2, 3, 24)])

    def test_a_chunk_selects_among_borrowed_keys(self):
        feeds = self.feeds(1, 64, [200], 200)
        whole = dict(feeds)
        for name in ("key", "value"):
            whole[name] = feeds["past_" + name][:, :, 136:].transpose(0, 2, 1, 3).reshape(1, 64, -1)
            feeds[name] = feeds[name][:, :0]
        own = {"preset": "paper", "budget": 16}
        got, wanted, exact = attended(feeds, own=own), attended(whole, own=own), attended(whole)
        np.testing.assert_array_equal(got, wanted)
        self.assertGreater(error(got, exact), 1e-3)

    def test_masks_that_are_not_causal(self):
        # Keys behind a query that a bias shows count unless causality hides them; keys that it hides do not count.
        queries, length = 12, 40
        past = length - queries
        behind = np.arange(length)[None] > past + np.arange(queries)[:, None]  # [queries, keys]
        prefix, image, padded = behind.copy(), behind.copy(), behind.copy()
        prefix[:, :past + 6] = False                # a prefix that all see
        image[3:8, past + 3:past + 8] = False       # tokens of an image see each other
        padded[:, :9] = True                        # padding on the left
        both = np.zeros_like(behind)
        both[:, :9] = True                          # all see all but padding
        for dtype in (np.float32, np.float16):
            for hides in (-65504.0, np.finfo(dtype).min, -np.inf, -60000.0):
                for hidden in (prefix, image, padded, both):
                    bias = np.where(hidden, hides, 0).astype(dtype)[None, None]
                    feeds = self.feeds(1, queries, [length], past, dtype) | {"attention_bias": bias}
                    for causal in (0, 1):
                        self.compare(feeds, dtype, causal=causal, own={"preset": "paper", "budget": 16, "chunk": 4})
                    # Keys that a row does not see have no influence on it, whatever they are.
                    values = feeds["value"].copy()
                    values[:, -1] = np.nan
                    row = ~np.isnan(attended(feeds | {"value": values}, causal=0, dtype=dtype)[0]).any(-1)
                    np.testing.assert_array_equal(row, hidden[:, -1])

    def test_what_a_bias_hides(self):
        # Minus infinity, and -60,000 and below; all keys hidden: zeros. Above that it is a bias.
        for dtype in (np.float32, np.float16):
            feeds = self.feeds(1, 1, [5], 4, dtype)
            for hides in (-np.inf, -65504.0, -60000.0):
                self.assertFalse(attended(feeds | {"attention_bias": np.full((1, 1, 1, 5), hides, dtype)}, dtype=dtype).any(), hides)
            self.compare(feeds | {"attention_bias": np.full((1, 1, 1, 5), -59968.0, dtype)}, dtype, bound=2e-2)  # logits beside it are rounded

    def test_another_conversation_of_the_same_length(self):
        # The caller puts other keys in the past, of as many rows, on the same session: those remembered are not taken for them. Differing from the first
        # row on, and in the last rows alone; then the first conversation again.
        queries, past = 64, 200
        first, other = self.feeds(1, queries, [past + queries], past), self.feeds(1, queries, [past + queries], past)
        tail = {name: array.copy() for name, array in first.items()}
        for name in ("past_key", "past_value"):
            tail[name][:, :, 140:] = other[name][:, :, 140:]
        for preset in ("paper", "recommended", "balanced"):
            own = {"preset": preset, "budget": 16}
            alone, one = [attended(feeds, own=own) for feeds in (first, other, tail)], one_node(first, own=own)
            for i in (0, 1, 0, 2, 1, 2, 0):
                np.testing.assert_array_equal(one((first, other, tail)[i])[0], alone[i], f"{preset}, conversation {i}")

    def test_few_queries_attend_as_single_ones(self):
        # The draft that speculative decoding verifies; fewer than 64 queries, or than a chunk.
        for queries, chunk, selects in ((2, 128, False), (63, 128, False), (64, 128, True), (15, 16, False), (16, 16, True), (65, 128, True)):
            feeds = self.feeds(1, queries, [200 + queries], 200)
            own = {"preset": "paper", "budget": 16, "chunk": chunk}
            exact, got, asked = attended(feeds), attended(feeds, own=own), attended(feeds, own=own | {"decode": 1})
            with self.subTest(queries=queries, chunk=chunk):
                self.assertEqual(error(got, exact) > 1e-3, selects)
                self.assertGreater(error(asked, exact), 1e-3)
        # Counted for each sequence, without padding.
        feeds = self.feeds(2, 64, [264, 210], 200) | {"query_seqlens": i32(64, 10)}
        exact, got = attended(feeds), attended(feeds, own={"preset": "paper", "budget": 16})
        self.assertGreater(error(got[0], exact[0]), 1e-3)
        self.assertLess(error(got[1], exact[1]), 2e-6)

    def test_arithmetic(self):
        feeds = self.feeds(1, 40, [90], 50)
        for arithmetic, bound in (("float", 2e-6), ("bf16", 2e-2), ("automatic", 1e-4), ("int8", 5e-2)):
            self.compare(feeds, own={"arithmetic": arithmetic}, bound=bound)

    def said_of(self, nodes, severity=2, **environment):
        """The log, from this severity on, of a program that makes a session of each node: its name, attributes of its own."""
        program = f"""
import onnxruntime as ort
import test_operator as t
feeds = t.Node().feeds(1, 40, [90], 50)
for name, own in {nodes}:
    options = ort.SessionOptions()
    options.log_severity_level = {severity}
    options.register_custom_ops_library(t.LIBRARY)
    model = t.rewritten(t.node_model(feeds, **t.HEADS), arithmetic=None)
    model.graph.node[0].name = name
    model.graph.node[0].attribute.extend(t.helper.make_attribute(*one) for one in own.items())
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                              env=os.environ | environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def test_arithmetic_that_is_no_faster_is_said_once(self):
        said = self.said_of([("", {"arithmetic": name}) for name in ("bf16", "int8", "bf16", "float", "automatic")], QUOKA_ISA="x86-64-v3")
        found = re.findall(r"arithmetic (\w+) is no faster than (\w+) on this processor \((\w+)", said)
        if "QUOKA_ISA" in said or any(not isa.startswith("avx2") for _, _, isa in found):
            self.skipTest("no level x86-64-v3 here")
        self.assertEqual([one[:2] for one in found], [("bf16", "float"), ("int8", "float")], said)

    def test_the_log_says_which_nodes_select(self):
        nodes = [("one", {"preset": "paper", "budget": 0.25}), ("two", {"preset": "recommended", "chunk": 64}), ("three", {}),
                 ("four", {"preset": "paper", "local_window_size": 9})]
        exact = "quoka: four has the preset paper, but is exact: it has a window"
        all_of_it, warnings = self.said_of(nodes, 1), self.said_of(nodes)  # 2: the runtime's own level
        for line in ("quoka: one selects keys: preset paper, budget 0.25, chunk 128, min_past 0, decode 0",
                     "quoka: two selects keys: preset recommended, budget the preset's, chunk 64, min_past 0, decode 0", exact):
            self.assertEqual(all_of_it.count(line), 1, all_of_it)
        self.assertNotIn("quoka: three", all_of_it)
        self.assertIn(exact, warnings)
        self.assertNotIn("selects keys", warnings)

    def test_threads(self):
        feeds = self.feeds(1, 40, [90], 50)
        model = node_model(feeds, **HEADS)
        bits = {session(rewritten(model, threads=own), threads).run(None, feeds)[0].tobytes() for own in (0, 1, 2, 7) for threads in (1, 2, 3)}
        self.assertEqual(len(bits), 1)

    def test_one_session_in_many_threads(self):
        feeds = [self.feeds(1, 40, [90], 50) for _ in range(4)]
        for own in ({}, {"preset": "recommended", "budget": 16, "chunk": 16}):
            one = one_node(feeds[0], own=own)
            wanted = [one(each)[0] for each in feeds]
            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                equal = list(threads.map(lambda i: np.array_equal(one(feeds[i % 4])[0], wanted[i % 4]), range(80)))  # noqa: B023
            self.assertEqual(equal, [True] * 80)


class Buffers(unittest.TestCase):
    """Past and present in one buffer: only the chunk's rows are written."""

    def test_shared(self):
        rows, dim = 64, 32
        feeds = {"query": normal(2, 1, 4 * dim), "key": normal(2, 1, 2 * dim), "value": normal(2, 1, 2 * dim), "seqlens_k": i32(40, 9),
                 "total_sequence_length": i32(41)}
        cache = {name: normal(2, 2, rows, dim) for name in ("key", "value")}
        for array in cache.values():
            array[0, :, 41:], array[1, :, 10:] = np.nan, np.nan  # a row that is read makes NaN
        model = node_model(feeds | {"past_" + name: array for name, array in cache.items()}, num_heads=4, kv_num_heads=2)
        binding_session = session(rewritten(model))
        binding = binding_session.io_binding()
        binding.bind_output("output")
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in cache.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input("past_" + name, value)
            binding.bind_ortvalue_output("present_" + name, value)
        binding_session.run_with_iobinding(binding)
        output = binding.get_outputs()[0].numpy()
        clean = {"past_" + name: np.nan_to_num(array) for name, array in cache.items()}
        wanted = session(model).run(None, feeds | clean)
        self.assertLess(error(output, wanted[0]), 2e-6)
        for name in cache:
            written = values[name].numpy()
            expected = cache[name].copy()
            expected[0, :, 40], expected[1, :, 9] = feeds[name][0].reshape(2, dim), feeds[name][1].reshape(2, dim)
            np.testing.assert_array_equal(written, expected)

    def test_inside_a_model(self):
        # The past is a result of the model's, which nobody else reads: the present may take its buffer.
        feeds = {"query": normal(1, 1, 64), "key": normal(1, 1, 32), "value": normal(1, 1, 32), "seqlens_k": i32(9), "total_sequence_length": i32(10),
                 "key_before": normal(1, 2, 16, 16), "value_before": normal(1, 2, 16, 16)}
        nodes = [helper.make_node("Neg", [name + "_before"], ["past_" + name]) for name in ("key", "value")]
        nodes.append(helper.make_node("GroupQueryAttention", rewrite.INPUTS[:7], ["output", *PRESENT], domain="com.microsoft", num_heads=4, kv_num_heads=2))
        nodes += [helper.make_node("Neg", ["present_" + name], [name + "_after"]) for name in ("key", "value")]
        cache = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 16, 16]) for name in (*rewrite.INPUTS[3:5], *PRESENT)]
        graph = helper.make_graph(nodes, "inside", [helper.make_tensor_value_info(name, onnx_type(array), array.shape) for name, array in feeds.items()],
                                  [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("output", "key_after", "value_after")],
                                  value_info=cache)
        model = as_model(graph)
        wanted, got = (session(one).run(None, feeds) for one in (model, rewritten(model)))
        self.assertLess(error(got[0], wanted[0]), 2e-6)
        for one, other, name in zip(got[1:], wanted[1:], ("key", "value")):
            np.testing.assert_array_equal(one[:, :, :10], other[:, :, :10])
            # A buffer of its own would have zeros there.
            np.testing.assert_array_equal(one[:, :, 10:], feeds[name + "_before"][:, :, 10:])


def decoder(layers=3, hidden=48, q_heads=4, kv_heads=2, dim=16, vocabulary=53, positions=128):
    """A small language model: ids [batch, queries] to logits, rotary, packed and apart by turns."""
    rng = np.random.default_rng(5)
    weights, nodes, inputs, outputs = [], [], [], []

    def weight(name, *shape, size=None):
        values = rng.standard_normal(shape) * (shape[0] ** -0.5 if size is None else size)
        weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    for name, array in angles(positions, dim // 2, np.float32).items():
        weights.append(numpy_helper.from_array(array, name))
    nodes.append(helper.make_node("Gather", [weight("embedding", vocabulary, hidden, size=1), "ids"], ["x0"]))
    for layer in range(layers):
        def at(name):
            return f"{name}{layer}"

        nodes.append(helper.make_node("LayerNormalization", [at("x"), weight(at("norm"), hidden, size=1)], [at("n")]))
        q, kv = q_heads * dim, kv_heads * dim
        if layer % 2:
            nodes.append(helper.make_node("MatMul", [at("n"), weight(at("qkv"), hidden, q + 2 * kv)], [at("query")]))
            taken = [at("query"), "", ""]
        else:
            taken = [at("query"), at("key"), at("value")]
            for name, size in zip(taken, (q, kv, kv)):
                nodes.append(helper.make_node("MatMul", [at("n"), weight(name + "_weight", hidden, size)], [name]))
        cache = [f"{what}_{layer}" for what in ("past_key", "past_value", *PRESENT)]
        nodes.append(helper.make_node("GroupQueryAttention", [*taken, *cache[:2], "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"],
                                      [at("attended"), *cache[2:]], name=at("attention"), domain="com.microsoft", num_heads=q_heads,
                                      kv_num_heads=kv_heads, do_rotary=1))
        nodes.append(helper.make_node("MatMul", [at("attended"), weight(at("out"), q, hidden)], [at("o")]))
        nodes.append(helper.make_node("Add", [at("x"), at("o")], [f"x{layer + 1}"]))
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", kv_heads, "rows", dim]) for name in cache[:2]]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", kv_heads, "all", dim]) for name in cache[2:]]
    nodes.append(helper.make_node("MatMul", [f"x{layers}", weight("head", hidden, vocabulary)], ["logits"]))
    given = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "queries"]),
             helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch"]),
             helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1])]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "queries", vocabulary])
    return as_model(helper.make_graph(nodes, "decoder", given + inputs, [logits, *outputs], weights))


class Run:
    """A session with caches of its own, as a program has it."""

    def __init__(self, model_session, batch=1):
        self.session, self.layers = model_session, sum(one.name.startswith("past_key") for one in model_session.get_inputs())
        self.batch, self.len = batch, np.zeros(batch, np.int32)
        self.cache = {f"past_{what}_{layer}": np.zeros((batch, 2, 0, 16), np.float32) for layer in range(self.layers) for what in ("key", "value")}

    def __call__(self, ids, lens=None):
        """Logits [batch, queries, vocabulary] of tokens that come; lens: how many of a prompt's are
        not padding."""
        self.len = self.len + ids.shape[1] if lens is None else np.array(lens, np.int32)
        feeds = {"ids": ids, "seqlens_k": (self.len - 1).astype(np.int32), "total_sequence_length": i32(self.len.max())}
        logits, *cache = self.session.run(None, feeds | self.cache)
        self.cache = {f"past_{what}_{i // 2}": cache[i + j] for i in range(0, 2 * self.layers, 2) for j, what in enumerate(("key", "value"))}
        return logits


class Model(unittest.TestCase):
    """Three layers: prompts, chunks, single tokens, by the file that rewrite.py writes."""

    @classmethod
    def setUpClass(cls):
        cls.model = decoder()
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name) / "model.onnx"
        onnx.save(cls.model, cls.path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        cls.model = onnx.load(cls.path)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def copy(self):
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return model

    def rewrite(self, *arguments, of="model.onnx", to="new.onnx", works=True, noted=False):
        folder = self.path.parent
        command = [sys.executable, rewrite.__file__, str(folder / of), str(folder / to), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode == 0, works, done.stderr + done.stdout)
        self.assertNotIn("Traceback", done.stderr)
        return done.stdout if works and not noted else done.stderr

    def written(self, *arguments, threads=2):
        self.assertIn("3 of 3 nodes replaced", self.rewrite("--arithmetic", "float", *arguments))
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, threads
        options.register_custom_ops_library(LIBRARY)
        return ort.InferenceSession(str(self.path.with_name("new.onnx")), options, providers=["CPUExecutionProvider"])

    def test_exact(self):
        """A prompt, padded in a batch, a chunk where there is one sequence, and tokens that com.microsoft's finds best."""
        ids = RNG.integers(0, 53, (3, 53))
        for batch, lens in ((1, None), (3, [40, 7, 19])):
            runs = [Run(session(self.model), batch), Run(self.written(), batch)]
            wanted, got = (run(ids[:batch, :40], lens) for run in runs)
            for b, length in enumerate(lens or [40]):
                self.assertLess(error(got[b, :length], wanted[b, :length]), 1e-5)
            parts = [ids[:1, 40:53]] if lens is None else []
            for _ in range(40):
                part = parts.pop() if parts else wanted[:, -1:].argmax(-1)
                wanted, got = (run(part) for run in runs)
                self.assertLess(error(got, wanted), 1e-5)
                np.testing.assert_array_equal(got[:, -1].argmax(-1), wanted[:, -1].argmax(-1))
            for name, array in runs[0].cache.items() if lens is None else ():
                self.assertLess(error(runs[1].cache[name], array), 1e-5)

    def logits(self, ids, *arguments):
        return Run(self.written(*arguments))(ids)

    def test_selection_of_all_is_exact(self):
        ids = RNG.integers(0, 53, (1, 90))
        select = ["--preset", "paper", "--chunk", "16", "--budget"]
        exact, all_kept, some = self.logits(ids), self.logits(ids, *select, "90"), self.logits(ids, *select, "16")
        # Cut into chunks, sums are in another order.
        self.assertLess(error(all_kept, exact), 1e-5)
        self.assertGreater(error(some, exact), 1e-3)
        self.assertLess(error(some[:, :16], exact[:, :16]), 1e-5)  # the first chunk has no past

    def test_budget_as_a_share(self):
        ids = RNG.integers(0, 53, (1, 128))
        select = ["--preset", "paper", "--chunk", "32", "--dense-layers", "0", "--budget"]
        share, keys = self.logits(ids, *select, "0.5"), self.logits(ids, *select, "16")
        np.testing.assert_array_equal(share[:, :64], keys[:, :64])  # the second chunk's past is 32 keys
        self.assertGreater(error(share[:, 64:], keys[:, 64:]), 1e-3)

    def test_a_budget_with_a_point_is_a_share(self):
        # 1.0 is all of the past, for the command, for rewrite() and for the operator; 1 is neither.
        ids = RNG.integers(0, 53, (1, 128))
        select = ["--preset", "paper", "--chunk", "32", "--dense-layers", "0"]
        self.assertLess(error(self.logits(ids, *select, "--budget", "1.0"), self.logits(ids)), 1e-5)
        np.testing.assert_array_equal(self.logits(ids, *select, "--budget", ".25"), self.logits(ids, *select, "--budget", "0.25"))
        for budget in ("1", "0", "15", "-3", "1.5", "1024.0", "1_024", "0.25 ", "nan", "x"):
            self.assertIn(f"--budget: {budget} is not a budget: give a count of keys from 16", self.rewrite(*select, f"--budget={budget}", works=False))
            self.assertFalse((self.path.parent / "none.onnx").exists())
        for budget in (1, 15, 1.5, 1024.0, True, "64"):
            with self.assertRaisesRegex(ValueError, "is not a budget: give a count of keys from 16"):
                rewritten(self.model, preset="paper", budget=budget)

    def test_dense_layers(self):
        ids = RNG.integers(0, 53, (1, 90))
        select = ["--preset", "paper", "--budget", "16", "--chunk", "16", "--dense-layers"]
        exact = self.logits(ids)
        np.testing.assert_array_equal(self.logits(ids, *select, "3"), exact)
        self.assertGreater(error(self.logits(ids, *select, "1"), exact), 1e-3)

    def test_sequences_that_share_a_session(self):
        # Kept codes of one sequence's keys must not serve another's: tokens in common, then others.
        first = RNG.integers(0, 53, (1, 96))
        second = np.concatenate([first[:, :32], RNG.integers(0, 53, (1, 64))], 1)
        arguments = ["--preset", "recommended", "--budget", "16", "--chunk", "16", "--dense-layers", "0"]
        alone = []
        for ids in (first, second):
            run = Run(self.written(*arguments))
            alone.append([run(ids[:, i:i + 32]) for i in (0, 32, 64)])
        shared = self.written(*arguments)
        runs = [Run(shared), Run(shared)]
        for i, begin in enumerate((0, 32, 64)):
            for j, ids in enumerate((first, second)):
                np.testing.assert_array_equal(runs[j](ids[:, begin:begin + 32]), alone[j][i], f"sequence {j}, part {i}")

    def test_decode_and_min_past(self):
        ids = RNG.integers(0, 53, (1, 60))
        base = ["--preset", "paper", "--budget", "16", "--chunk", "16", "--dense-layers", "0"]

        def last(*arguments):
            run = Run(self.written(*arguments))
            run(ids[:, :16])  # without a past: exact in any case
            return [run(ids[:, i:i + 1]) for i in range(16, 40)][-1]

        exact = last()
        self.assertLess(error(last(*base), exact), 1e-5)
        self.assertGreater(error(last(*base, "--decode"), exact), 1e-3)
        self.assertLess(error(last(*base, "--decode", "--min-past", "100"), exact), 1e-5)

    def test_window_stays_exact(self):
        model = self.copy()
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                node.attribute.append(helper.make_attribute("local_window_size", 9))
        ids = RNG.integers(0, 53, (1, 90))
        wanted = Run(session(model))(ids)
        new = rewritten(model, preset="paper", budget=16, chunk=16)
        self.assertLess(error(Run(session(new))(ids), wanted), 1e-5)
        for node in new.graph.node:  # rewrite.py gives such a node no preset; another program may
            if node.domain == "quoka":
                node.attribute.extend(helper.make_attribute(name, value) for name, value in (("preset", "paper"), ("budget", 16), ("chunk", 16)))
        self.assertLess(error(Run(session(new))(ids), wanted), 1e-5)

    def test_refused_by_rewrite(self):
        model = self.copy()
        nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
        nodes[0].attribute.append(helper.make_attribute("sliding_window_cache", 1))
        nodes[1].input.extend(["", "", "", "k_scale"])
        nodes[2].output.append("qk")
        replaced, left = rewrite.rewrite(model)
        self.assertEqual(replaced, [])
        self.assertEqual([name for name, _ in left], ["attention0", "attention1", "attention2"])
        for (_, why), word in zip(left, ("sliding_window_cache is 1, but must be 0", "k_scale", "output_qk")):
            self.assertIn(word, why)
        self.assertFalse(any(one.domain == "quoka" for one in model.opset_import))

    def test_dense_layers_are_those_that_could_select(self):
        # As in a model with windows (Gemma 3): two windows, all keys, a window, all keys; a bias and no presents forbid it, too.
        def nodes(*windows, **other):
            feeds = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
            made = [helper.make_node("GroupQueryAttention", feeds, ["output", *PRESENT], name=str(i), domain="com.microsoft", num_heads=4, kv_num_heads=2,
                                     local_window_size=window) for i, window in enumerate(windows)]
            for i, change in other.items():
                change(made[int(i[1:])])
            return as_model(helper.make_graph(made, "layers", [], []))

        def selecting(model, **own):
            rewrite.rewrite(model, preset="recommended", **own)
            return [node.name for node in model.graph.node if any(one.name == "preset" for one in node.attribute)]

        self.assertEqual(selecting(nodes(512, 512, -1, 512, -1), dense_layers=1), ["4"])
        self.assertEqual(selecting(nodes(512, 512, -1, 512, -1), dense_layers=0), ["2", "4"])
        self.assertEqual(selecting(nodes(512, 512, -1, 512, -1), dense_layers=2), [])
        self.assertEqual(selecting(nodes(-1, -1, -1), dense_layers=1), ["1", "2"])
        self.assertEqual(selecting(nodes(-1, -1, -1, n0=lambda node: node.input.extend(["", "", "", "attention_bias"])), dense_layers=1), ["2"])
        self.assertEqual(selecting(nodes(-1, -1, -1, n0=lambda node: node.output.pop()), dense_layers=1), ["2"])
        self.assertEqual(selecting(nodes(-1, -1, -1, n0=lambda node: node.attribute.append(helper.make_attribute("causal", 0))), dense_layers=1), ["2"])

    def test_arguments_that_no_attribute_takes(self):
        for own, words in (({"dense_layers": -5}, "dense_layers is -5"), ({"dense_layers": 1.5}, "dense_layers is 1.5"),
                           ({"dense_layers": True}, "dense_layers is True"), ({"min_queries": 4}, "min_queries: no attribute"),
                           ({"presett": "paper"}, "presett: no attribute")):
            model = self.copy()
            with self.assertRaisesRegex(ValueError, words):
                rewrite.rewrite(model, **own)
            self.assertEqual(model, self.model)
        select = ["--preset", "paper"]
        for option, value in (("--dense-layers", "-5"), ("--dense-layers", "1.5"), ("--chunk", "0"), ("--min-past", "-1"), ("--threads", "-1"),
                              ("--budget", "0"), ("--budget", "1.5"), ("--budget", "nan"), ("--budget", "inf"), ("--preset", "fast"), ("--arithmetic", "fp8")):
            message = self.rewrite(*select, f"{option}={value}", works=False)
            self.assertIn(option, message)
            self.assertIn(f"{value} is n", message)
        message = self.rewrite("--preset", "fast", "--budget", "1.5", "--chunk", "0", works=False)
        for part in ("--preset: fast is none of recommended, balanced, paper", "--budget: 1.5 is not a budget", "--chunk: 0 is not a whole number from 1 on"):
            self.assertIn(part, message)
        self.assertIn("2 of them select", self.rewrite(*select))
        self.assertNotIn("no layer selects", self.rewrite(*select, "--dense-layers", "2", noted=True))
        for layers in (3, 9):
            self.assertIn("0 of them select", self.rewrite(*select, "--dense-layers", str(layers)))
            self.assertIn(f"no layer selects: --dense-layers is {layers}, and 3 of them could", self.rewrite(*select, "--dense-layers", str(layers), noted=True))

    def test_a_file_that_was_rewritten_before(self):
        self.written()
        self.assertIn("3 of its nodes are quoka's: rewrite the original", self.rewrite(of="new.onnx", to="again.onnx", works=False))
        self.assertFalse(self.path.with_name("again.onnx").exists())

    def test_files_that_are_not_there(self):
        self.assertIn("there is no folder", self.rewrite(to="nowhere/new.onnx", works=False))
        self.assertIn("is a folder, but must be a file", self.rewrite(to=".", works=False))
        (self.path.parent / "text").write_text("no model")
        for model, words in (("nothing.onnx", "there is no file"), (".", "there is no file"), ("text", "is not an ONNX model")):
            self.assertIn(words, self.rewrite(of=model, works=False))

    def test_refused_by_the_command(self):
        self.assertIn("--dense-layers without --preset", self.rewrite("--dense-layers", "1", works=False))
        self.assertIn("--budget without --preset", self.rewrite("--budget", "90", works=False))
        self.assertIn("stays as it is", self.rewrite(to="model.onnx", works=False))
        other = pathlib.Path(self.folder.name) / "elsewhere"
        other.mkdir()
        self.assertIn("write there, too", self.rewrite(to="elsewhere/new.onnx", works=False))
        self.assertFalse(list(other.iterdir()))

    def test_inside_a_branch(self):
        branch = helper.make_graph([helper.make_node("GroupQueryAttention", ["q", "", "", "", "", "s", "t"], ["y"], domain="com.microsoft",
                                                     num_heads=2, kv_num_heads=1)], "branch", [], [helper.make_tensor_value_info("y", 1, None)])
        node = helper.make_node("If", ["c"], ["out"], then_branch=branch, else_branch=branch)
        model = as_model(helper.make_graph([node], "outer", [helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_tensor_value_info("q", 1, [1, 5, 32]),
                                                             *(helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in "st")],
                                           [helper.make_tensor_value_info("out", 1, None)]))
        feeds = {"c": np.array(True), "q": normal(1, 5, 32), "s": i32(4), "t": i32(5)}
        wanted, got = (session(one).run(None, feeds)[0] for one in (model, rewritten(model)))
        self.assertLess(error(got, wanted), 2e-6)


class Errors(unittest.TestCase):
    """Sizes that do not fit are refused with both numbers, and nothing of the cache is written."""

    def feeds(self, **other):
        feeds = {"query": normal(2, 1, 64), "key": normal(2, 1, 32), "value": normal(2, 1, 32), "past_key": normal(2, 2, 20, 16),
                 "past_value": normal(2, 2, 20, 16), "seqlens_k": i32(12, 4), "total_sequence_length": i32(13)} | other
        return {name: array for name, array in feeds.items() if array is not None}

    def refused(self, *words, attributes=None, own=None, by_hand=None, also_theirs=False, **other):
        """Attributes of com.microsoft's operator; our own; and those that rewrite.py would not write, which are refused as a session is
        made. also_theirs: com.microsoft's operator refuses it, too."""
        feeds = self.feeds(**other)
        plain = node_model(feeds, **{"num_heads": 4, "kv_num_heads": 2} | (attributes or {}))
        model = rewritten(plain, **(own or {} if by_hand is None else {"arithmetic": None}))
        model.graph.node[0].attribute.extend(helper.make_attribute(*one) for one in (by_hand or {}).items())
        if also_theirs:
            with self.assertRaises(Exception):
                session(plain).run(None, feeds)
        with self.assertRaises(Exception) as raised:
            one = session(model)
            if by_hand is None:
                one.run(None, feeds)
        for word in words:
            self.assertIn(word, str(raised.exception))

    def test_shapes(self):
        self.refused("query's last size is 66", "num_heads, which is 4", query=normal(2, 1, 66))
        self.refused("size 2 of key is 40", "must equal 32", key=normal(2, 1, 40))
        self.refused("size 1 of value is 2", "must equal 1", value=normal(2, 2, 32))
        self.refused("there is an input key, but no value", value=None)
        self.refused("there is an input past_value, but no past_key", past_key=None)
        self.refused("size 2 of past_value is 21", "must equal 20", past_value=normal(2, 2, 21, 16))
        self.refused("size 1 of past_key is 3", "must equal 2", past_key=normal(2, 3, 20, 16))
        self.refused("size 3 of past_key is 24", "must equal 16", past_key=normal(2, 2, 20, 24))
        self.refused("the rank of past_key is 3", "must equal 4", past_key=normal(2, 2, 20))
        self.refused("the number of elements of seqlens_k is 3", "must equal 2", seqlens_k=i32(1, 2, 3))
        self.refused("the number of elements of total_sequence_length is 2", "must equal 1", total_sequence_length=i32(13, 13))
        self.refused("size 0 of head_sink is 3", "must equal 4", head_sink=normal(3))

    def test_lengths(self):
        self.refused("seqlens_k + 1 of sequence 1 is 0", "at least 1", seqlens_k=i32(12, -1))
        self.refused("seqlens_k + 1 of sequence 0 is 14", "total_sequence_length, which is 13", seqlens_k=i32(13, 4))
        self.refused("the past's length of sequence 0 is 21", "past_key's rows, which is 20", seqlens_k=i32(20, 4), total_sequence_length=i32(21),
                     query_seqlens=i32(0, 1))
        # Borrowed keys: the past holds the chunk's, too.
        self.refused("total_sequence_length is 21", "past_key's rows, 20", key=normal(2, 0, 32), value=normal(2, 0, 32),
                     seqlens_k=i32(20, 4), total_sequence_length=i32(21))
        # Refused as by com.microsoft's operator: a total that neither buffer can hold, and a chunk
        # over a past of fewer tokens than it has.
        for total in (22, 31, 99):
            self.refused(f"total_sequence_length is {total}", "past_key's rows, 20", "which is 21", also_theirs=True, seqlens_k=i32(12, 4), total_sequence_length=i32(total))
        chunk = {"query": normal(2, 4, 64), "key": normal(2, 4, 32), "value": normal(2, 4, 32)}
        self.refused("seqlens_k + 1 of sequence 1 is 2", "query's tokens, which is 4", also_theirs=True, seqlens_k=i32(13, 1), total_sequence_length=i32(14), **chunk)
        self.refused("size 1 of value is 1", "must equal 0", key=normal(2, 0, 32))
        self.refused("query_seqlens of sequence 1 is 2", "which is 1", query_seqlens=i32(1, 2))
        self.refused("query_seqlens of sequence 0 is -1", "at least 0", query_seqlens=i32(-1, 1))
        self.refused("total_sequence_length is 0", "at least 1", total_sequence_length=i32(0))

    def test_rotary(self):
        half = angles(8, 8, np.float32)
        self.refused("do_rotary is 1, but there is no cos_cache", attributes={"do_rotary": 1})
        self.refused("a position is 12", "cos_cache's rows, which is 8", attributes={"do_rotary": 1}, **half)
        self.refused("twice size 1 of cos_cache is 18", "head_size, which is 16", attributes={"do_rotary": 1}, **angles(64, 9, np.float32))
        self.refused("size 1 of sin_cache is 4", "must equal 8", attributes={"do_rotary": 1}, **angles(64, 8, np.float32) | {"sin_cache": normal(64, 4)})
        self.refused("a position is -3", "at least 0", attributes={"do_rotary": 1}, position_ids=np.array([[5], [-3]]), **angles(64, 8, np.float32))
        self.refused("the number of position_ids is 1", "at least 2", attributes={"do_rotary": 1}, position_ids=np.array([[5]]), **angles(64, 8, np.float32))

    def test_bias(self):
        self.refused("size 0 of attention_bias is 3", "which is 2", attention_bias=normal(3, 1, 1, 13))
        self.refused("size 1 of attention_bias is 2", "which is 4", attention_bias=normal(1, 2, 1, 13))
        self.refused("size 2 of attention_bias is 2", "which is 1", attention_bias=normal(1, 1, 2, 13))
        self.refused("size 3 of attention_bias is 12", "at least 13", attention_bias=normal(1, 1, 1, 12))

    def test_attributes(self):
        self.refused("num_heads is 4", "kv_num_heads, which is 3", attributes={"kv_num_heads": 3})
        self.refused("local_window_size is 5", "causal, which is 0", attributes={"causal": 0, "local_window_size": 5})
        self.refused("softcap is -1", attributes={"softcap": -1.0}, by_hand={})  # before a run
        self.refused("do_rotary is 2", "[0, 1]", attributes={"do_rotary": 2})
        self.refused('the preset is "best"', own={"preset": "best"})
        self.refused("chunk is 0", own={"preset": "paper", "chunk": 0})
        self.refused('arithmetic is "double"', own={"arithmetic": "double"})
        self.refused("threads is -1", own={"threads": -1})
        self.refused("min_past is -1", own={"preset": "paper", "min_past": -1})
        for budget, shown in ((0, "0"), (1, "1"), (15, "15"), (-3, "-3"), (1.5, "1.5"), (1024.0, "1024.0"), (float("nan"), "nan"), ([16, 16], "no number")):
            self.refused(f"budget is {shown}, but must be a count of keys from 16", by_hand={"preset": "paper", "budget": budget})
        # All at once.
        self.refused('the preset is "best"', "budget is 1.5", "chunk is 0", 'arithmetic is "double"', "threads is -1",
                     by_hand={"preset": "best", "budget": 1.5, "chunk": 0, "arithmetic": "double", "threads": -1})
        # Attributes of another kind, or without the one that they belong to, are refused: never the
        # default in silence.
        self.refused("chunk is not a number", own={"preset": "paper", "chunk": "16"})
        self.refused("preset is not a text", own={"preset": 1})
        self.refused("arithmetic is not a text", own={"arithmetic": 8})
        for name, value in (("budget", 16), ("chunk", 16), ("min_past", 4), ("decode", 1)):
            self.refused(f"an attribute {name}, but no preset", by_hand={name: value})

    def test_other_operators(self):
        # Nodes, written by hand, that rewrite.py would have left alone.
        for name, value, words in (("sliding_window_cache", 1, "sliding_window_cache is 1"), ("kv_cache_bit_width", 8, "kv_cache_bit_width is 8"),
                                   ("qk_output", 1, "qk_output is 1"), ("k_quant_type", "PER_TENSOR", 'k_quant_type is "PER_TENSOR"')):
            self.refused(words, by_hand={name: value})
        feeds = self.feeds(q_norm_weight=normal(16), k_norm_weight=normal(16))
        model = node_model(feeds, num_heads=4, kv_num_heads=2)
        model.graph.node[0].domain = "quoka"
        model.opset_import.append(helper.make_opsetid("quoka", 1))
        with self.assertRaisesRegex(Exception, "an input q_norm_weight"):
            session(model).run(None, feeds)


if __name__ == "__main__":
    unittest.main()
