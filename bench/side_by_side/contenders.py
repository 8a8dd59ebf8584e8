"""The contenders that compute a layer's attention: one class each, made to be as fast as its
interface allows.

A contender is made from a Layer, a type of cache, a precision and a number of threads. All copies into its own layout are made
then. Called, it computes the chunk; output() is [batch, q_heads, queries, head_dim], or None where it has none.
"""

import dataclasses
import importlib
import importlib.metadata

import ml_dtypes
import numpy as np

import ggml_operator


def folded(layer):
    """[batch, kv_heads, group * queries, head_dim]: the heads of a group as rows of one matrix, so that its keys are read once."""
    shape = layer.shape
    return layer.q.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)


def hidden(shape):
    """[queries, keys]: what causality hides."""
    return np.arange(shape.keys)[None, :] > shape.past + np.arange(shape.queries)[:, None]


class Contender:
    def __init__(self, layer, cache, precision, threads):
        self.layer, self.cache, self.precision, self.threads = layer, cache, precision, threads
        self.prepare()

    def before(self):
        """Preparation before each call, not timed."""

    def close(self):
        pass


class Torch(Contender):
    """scaled_dot_product_attention, its flash kernel, with a group's heads as rows of one: faster than enable_gqa=True and than repeated keys."""

    how = "scaled_dot_product_attention, flash kernel; group of heads as rows; a mask of the queries' type made before, none for one query; torch.set_num_threads"

    def prepare(self):
        import torch

        shape, of = self.layer.shape, {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self.cache]
        torch.set_num_threads(self.threads)
        self.q, self.k, self.v = (torch.from_numpy(x).to(of) for x in (folded(self.layer), self.layer.k, self.layer.v))
        self.mask = None
        if shape.queries > 1:
            mask = torch.zeros(shape.queries, shape.keys, dtype=of).masked_fill_(torch.from_numpy(hidden(shape)), float("-inf"))
            self.mask = mask.repeat(shape.q_heads // shape.kv_heads, 1)
        self.attend, self.kernel = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.SDPBackend.FLASH_ATTENTION

    def __call__(self):
        import torch

        with torch.inference_mode(), torch.nn.attention.sdpa_kernel(self.kernel):
            self.out = self.attend(self.q, self.k, self.v, attn_mask=self.mask, scale=self.layer.scale)

    def output(self):
        return self.out.float().reshape(self.layer.q.shape).numpy()


class OnnxRuntime(Contender):
    """GroupQueryAttention with the cache's buffers as its past and its present, so that only the chunk is written."""

    how = "GroupQueryAttention, past and present the same buffers (IO binding); intra_op_num_threads, spinning between runs off"

    def prepare(self):
        import onnx
        import onnxruntime as ort

        layer, shape = self.layer, self.layer.shape
        if shape.batch > 1 and shape.queries > 1:
            raise NotImplementedError("GroupQueryAttention takes one sequence where several tokens follow a past")
        of = {"f32": onnx.TensorProto.FLOAT, "f16": onnx.TensorProto.FLOAT16}[self.cache]
        sizes = {"query": [shape.batch, shape.queries, shape.q_heads * shape.head_dim]}
        sizes |= {name: [shape.batch, shape.queries, shape.kv_heads * shape.head_dim] for name in ("key", "value")}
        sizes |= {name: [shape.batch, shape.kv_heads, shape.keys, shape.head_dim] for name in ("past_key", "past_value", "present_key", "present_value")}
        sizes["output"] = sizes["query"]
        inputs = [onnx.helper.make_tensor_value_info(name, of, sizes[name]) for name in ("query", "key", "value", "past_key", "past_value")]
        inputs += [onnx.helper.make_tensor_value_info("seqlens_k", onnx.TensorProto.INT32, [shape.batch]),
                   onnx.helper.make_tensor_value_info("total_sequence_length", onnx.TensorProto.INT32, [1])]
        names = [one.name for one in inputs]
        if shape.sinks:
            inputs.append(onnx.helper.make_tensor_value_info("head_sink", of, [shape.q_heads]))
            names += ["", "", "", "", "head_sink"]
        outputs = [onnx.helper.make_tensor_value_info(name, of, sizes[name]) for name in ("output", "present_key", "present_value")]
        node = onnx.helper.make_node("GroupQueryAttention", names, [one.name for one in outputs], domain="com.microsoft", num_heads=shape.q_heads,
                                     kv_num_heads=shape.kv_heads, scale=layer.scale)
        model = onnx.helper.make_model(onnx.helper.make_graph([node], "layer", inputs, outputs), ir_version=10,
                                       opset_imports=[onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)])
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = {"query": layer.tokens(layer.q, self.cache), "key": layer.tokens(layer.k[:, :, shape.past:], self.cache),
                  "value": layer.tokens(layer.v[:, :, shape.past:], self.cache),
                  "seqlens_k": np.full(shape.batch, shape.keys - 1, np.int32), "total_sequence_length": np.array([shape.keys], np.int32)}
        if shape.sinks:
            values["head_sink"] = layer.sinks.astype(values["query"].dtype)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in values.items()}
        self.result = np.zeros(sizes["output"], layer.rows(layer.q[:, :, :1], self.cache).dtype)
        self.binding = self.session.io_binding()
        for name, value in values.items():
            self.binding.bind_ortvalue_input(name, value)
        self.caches = {what: ort.OrtValue.ortvalue_from_numpy(layer.rows(rows, self.cache)) for what, rows in (("key", layer.k), ("value", layer.v))}
        for what, value in self.caches.items():
            self.binding.bind_ortvalue_input("past_" + what, value)
            self.binding.bind_ortvalue_output("present_" + what, value)
        self.out = ort.OrtValue.ortvalue_from_numpy(self.result)
        self.binding.bind_ortvalue_output("output", self.out)
        self.values = values

    def __call__(self):
        self.session.run_with_iobinding(self.binding)

    def output(self):
        return self.layer.by_heads(self.out.numpy().astype(np.float32))


class OpenVinoPaged(Contender):
    """PagedAttention, what OpenVINO GenAI runs: the cache in blocks of 32 tokens, filled by the operator itself. Sequences of a batch are
    requests one after the other: the node leaves its output empty for several at once, as it is driven here."""

    how = "PagedAttentionExtension in a model of one node, a request for each sequence; KV_CACHE_PRECISION, INFERENCE_PRECISION_HINT, INFERENCE_NUM_THREADS"
    block, filled_at_once = 32, 256

    def prepare(self):
        import openvino as ov
        from openvino import opset13 as op
        from openvino.op import _PagedAttentionExtension

        shape = self.layer.shape
        real, integer = ov.Type.f32, ov.Type.i32

        def parameter(name, extent, type_):
            node = op.parameter(extent, type_, name)
            node.output(0).set_names({name})
            return node

        def constant(value, type_):
            return op.constant(np.array(value, type_))

        none = {type_: np.zeros(0, type_) for type_ in (np.float32, np.int32, np.uint8)}
        taken = [parameter("q", [-1, shape.q_heads * shape.head_dim], real), parameter("k", [-1, shape.kv_heads * shape.head_dim], real),
                 parameter("v", [-1, shape.kv_heads * shape.head_dim], real)]
        taken += [parameter(name, ov.PartialShape.dynamic(4), ov.Type.dynamic) for name in ("key_cache", "value_cache")]
        taken += [parameter(name, [-1], integer) for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")]
        length = parameter("max_context_len", [], integer)
        sinks = constant(self.layer.sinks.reshape(1, -1, 1, 1) if shape.sinks else none[np.float32], np.float32)
        i32, f32 = (lambda value: constant(value, np.int32)), (lambda value: constant(value, np.float32))
        empty = none[np.int32]
        # scale, window, ALiBi; length; scores' window, rotation (3); XAttention (3); sinks; Adaptive RKV (4), token types, bias (2)
        rest = [f32(self.layer.scale), i32(0), f32(none[np.float32]), length, i32(0), i32(empty), i32(empty), f32(none[np.float32]),
                f32(none[np.float32]), i32(128), i32(16), sinks, i32(0), i32(empty), i32(empty), i32(empty), i32(empty),
                constant(none[np.uint8], np.uint8), i32(empty)]
        node = _PagedAttentionExtension([one.output(0) for one in taken + rest])
        for key, value in {"num_k_heads": shape.kv_heads, "num_v_heads": shape.kv_heads, "k_head_size": shape.head_dim, "v_head_size": shape.head_dim}.items():
            node.get_rt_info()[key] = value
        model = ov.Model([op.result(node.output(0))], [*taken, length], "layer")
        compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": self.threads, "INFERENCE_PRECISION_HINT": self.precision,
                                                          "KV_CACHE_PRECISION": self.cache})
        self.tensor = ov.Tensor
        self.requests = [self._sequence(compiled, i) for i in range(shape.batch)]

    def _sequence(self, compiled, i):
        """A request that computes the i-th sequence's chunk over a cache that it has filled."""
        shape, request = self.layer.shape, compiled.create_infer_request()
        blocks = -(-shape.keys // self.block)
        for name in ("key_cache", "value_cache"):
            extent = compiled.input(name).partial_shape
            room = self.tensor(compiled.input(name).element_type, [blocks, *(extent[d].get_length() for d in (1, 2, 3))])
            request.set_tensor(name, room)
        q, k, v = (self.layer.tokens(rows[i:i + 1], "f32")[0] for rows in (self.layer.q, self.layer.k, self.layer.v))

        def give(q, k, v, past, blocks):
            values = {"q": q, "k": k, "v": v, "past_lens": [past], "subsequence_begins": [0, len(q)], "block_indices": blocks,
                      "block_indices_begins": [0, len(blocks)], "max_context_len": past + len(q)}
            for name, value in values.items():
                request.set_tensor(name, self.tensor(np.ascontiguousarray(value) if name in "qkv" else np.array(value, np.int32)))

        for first in range(0, shape.past, self.filled_at_once):  # as if each were a sequence: attention among a few
            here = slice(first, min(first + self.filled_at_once, shape.past))
            give(np.zeros((here.stop - here.start, q.shape[1]), np.float32), k[here], v[here], 0, np.arange(here.start // self.block, -(-here.stop // self.block)))
            request.infer()
        give(q, k[shape.past:], v[shape.past:], shape.past, np.arange(blocks))
        return request

    def __call__(self):
        for request in self.requests:
            request.infer()

    def output(self):
        return self.layer.by_heads(np.stack([request.get_output_tensor(0).data for request in self.requests]))


class OpenVinoSdpa(Contender):
    """ScaledDotProductAttention over contiguous keys and values; it has no groups: the heads of a
    group are rows of a matrix."""

    how = "ScaledDotProductAttention with a mask; group of heads as rows; INFERENCE_PRECISION_HINT, INFERENCE_NUM_THREADS"

    def prepare(self):
        import openvino as ov
        from openvino import opset13 as op

        shape = self.layer.shape
        group = shape.q_heads // shape.kv_heads
        values = [folded(self.layer), self.layer.k, self.layer.v]
        of = ov.Type.bf16 if self.precision == "bf16" else ov.Type.f32
        mask = np.where(hidden(shape), -np.inf, 0).astype(np.float32)
        values.append(np.tile(mask, (group, 1))[None, None])
        taken = [op.parameter(list(value.shape), of) for value in values]
        node = op.scaled_dot_product_attention(*taken, op.constant(np.array(self.layer.scale, np.float32)) if of == ov.Type.f32 else
                                               op.convert(op.constant(np.array(self.layer.scale, np.float32)), "bf16"), causal=False)
        compiled = ov.Core().compile_model(ov.Model([op.result(node)], taken, "layer"), "CPU",
                                           {"INFERENCE_NUM_THREADS": self.threads, "INFERENCE_PRECISION_HINT": self.precision})
        self.request = compiled.create_infer_request()
        for i, value in enumerate(values):
            tensor = ov.Tensor(of, ov.Shape(list(value.shape)))
            tensor.data[...] = value.astype(ml_dtypes.bfloat16).view(tensor.data.dtype) if of == ov.Type.bf16 else value
            self.request.set_input_tensor(i, tensor)

    def __call__(self):
        self.request.infer()

    def output(self):
        data = self.request.get_output_tensor(0).data
        return (data.view(ml_dtypes.bfloat16) if data.dtype != np.float32 else data).astype(np.float32).reshape(self.layer.q.shape)


class LlamaCpp(Contender):
    """FLASH_ATTN_EXT of ggml's CPU backend; the C interface is ggml_operator.py's."""

    how = "FLASH_ATTN_EXT, CPU backend, cache token by token; n_threads"

    def prepare(self):
        self.node = ggml_operator.Attention(self.layer, self.cache, self.threads)

    def __call__(self):
        self.node()

    def output(self):
        return self.node.output()

    def close(self):
        self.node.close()


class NumKong(Contender):
    """The two products of an attention, packed beforehand: no softmax, no causality, no packing."""

    how = "dots_packed twice for each KV head, keys and values packed beforehand; no attention, its products alone"

    def prepare(self):
        import numkong

        shape, self.multiply, self.work = self.layer.shape, numkong.dots_packed, []
        of, size = {"f32": (np.float32, 1), "bf16": (ml_dtypes.bfloat16, 1), "i8": (np.int8, 40)}[self.cache]
        tensor = lambda x: np.ascontiguousarray((size * x).astype(of))  # noqa: E731
        rows = folded(self.layer)
        weights = tensor(np.ones((rows.shape[2], shape.keys), np.float32))
        for head in np.ndindex(shape.batch, shape.kv_heads):
            self.work.append((tensor(rows[head]), numkong.dots_pack(tensor(self.layer.k[head]))))
            self.work.append((weights, numkong.dots_pack(tensor(self.layer.v[head].T))))

    def __call__(self):
        for left, right in self.work:
            self.multiply(left, right)

    def output(self):
        return None


class Exact(Contender):
    """quoka.attention, every key."""

    how = "quoka.attention on numpy arrays, queries float; threads="

    def prepare(self):
        import quoka

        self.quoka, layer, shape = quoka, self.layer, self.layer.shape
        self.q, self.out = layer.q, np.zeros_like(layer.q)
        kept = self.cache if self.cache in ("q8_0", "u8") else None
        k, v = (layer.rows(rows, "f32" if kept else self.cache) for rows in (layer.k, layer.v))
        self.k, self.v = k[:, :, shape.past:], v[:, :, shape.past:]
        if kept:
            past = quoka.Cache(shape.batch, shape.kv_heads, shape.head_dim, dtype=kept, capacity=shape.past)
            past.append(k[:, :, :shape.past], v[:, :, :shape.past])
            self.past = {"past": past}
        else:
            self.past = {"past_k": k[:, :, :shape.past], "past_v": v[:, :, :shape.past]}
        self.options = {"scale": layer.scale, "sinks": layer.sinks, "arithmetic": self.precision, "out": self.out, "threads": self.threads}

    def __call__(self):
        self.quoka.attention(self.q, self.k, self.v, **self.past, **self.options)

    def output(self):
        return self.out


class Selected(Exact):
    """quoka.select, then quoka.attention: 1,024 keys; selection's codes have yet to add as many
    keys as there are queries, as in a prefill."""

    how = "quoka.select with a State, and quoka.attention, a budget of 1,024 keys"
    preset = "balanced"

    def prepare(self):
        super().prepare()
        self.before()

    def before(self):
        self.state = self.quoka.State(1024, preset=self.preset)
        self.state.appended(self.past["past_k"][:, :, :self.layer.shape.past - self.layer.shape.queries])

    def __call__(self):
        keep = self.quoka.select(self.q, self.past["past_k"], state=self.state, scale=self.layer.scale, threads=self.threads)
        self.quoka.attention(self.q, self.k, self.v, selection=keep, **self.past, **self.options)


class Paper(Selected):
    preset = "paper"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender with its settings. `like`: the exact attention of this library that is compared with it, of no lower precision."""

    name: str
    of: type
    cache: str
    precision: str
    like: str = ""
    kind: str = "other"  # or "exact", "selection", "products"
    sinks: bool = True
    most_gflop: float = 1e9  # larger layers are left out: seconds for each call


# The largest error that rounding explains, of a cache's type and of an arithmetic; more is another
# computation. A single missed key among 8,192 makes an error of 0.01. llama.cpp rounds queries and
# sums to half below 64 queries, 0.027 over 32,768 keys: "half sums".
ROUNDING = {"f32": 1e-4, "float": 1e-4, "f16": 2e-3, "bf16": 1e-2, "u8": 1.5e-2, "q8_0": 1.5e-2, "half sums": 4e-2, "int8": 2e-2, "8 bits": 1.5e-2}


def largest_error(entry):
    return max(ROUNDING[entry.cache], ROUNDING[entry.precision])


ENTRIES = [
    Entry("torch f32", Torch, "f32", "f32", "exact float", sinks=False),
    Entry("torch f16", Torch, "f16", "f16", "exact float, f16 cache", sinks=False),
    Entry("torch bf16", Torch, "bf16", "bf16", "exact bf16", sinks=False),
    Entry("ONNX Runtime f32", OnnxRuntime, "f32", "f32", "exact float"),
    Entry("ONNX Runtime f16", OnnxRuntime, "f16", "f16", "exact float, f16 cache"),
    Entry("OpenVINO SDPA f32", OpenVinoSdpa, "f32", "f32", "exact float", sinks=False),
    Entry("OpenVINO SDPA bf16", OpenVinoSdpa, "bf16", "bf16", "exact bf16", sinks=False),
    Entry("OpenVINO paged f32", OpenVinoPaged, "f32", "f32", "exact float"),
    Entry("OpenVINO paged bf16", OpenVinoPaged, "bf16", "bf16", "exact bf16"),
    Entry("OpenVINO paged bf16, u8 cache", OpenVinoPaged, "u8", "bf16", "exact bf16, u8 cache"),
    Entry("llama.cpp, f16 cache", LlamaCpp, "f16", "half sums", "exact float, f16 cache"),
    Entry("llama.cpp, q8_0 cache", LlamaCpp, "q8_0", "8 bits", "exact bf16, q8_0 cache", most_gflop=20),
    Entry("NumKong f32", NumKong, "f32", "f32", "exact float", "products", most_gflop=20),
    Entry("NumKong bf16", NumKong, "bf16", "bf16", "exact bf16", "products"),
    Entry("NumKong i8", NumKong, "i8", "i8", "exact int8", "products"),
    Entry("exact float", Exact, "f32", "float", kind="exact"),
    Entry("exact float, f16 cache", Exact, "f16", "float", kind="exact"),
    Entry("exact bf16", Exact, "bf16", "bf16", kind="exact"),
    Entry("exact bf16, u8 cache", Exact, "u8", "bf16", kind="exact"),
    Entry("exact bf16, q8_0 cache", Exact, "q8_0", "bf16", kind="exact"),
    Entry("exact int8", Exact, "bf16", "int8", kind="exact"),
    Entry("balanced, 1,024 keys", Selected, "bf16", "bf16", kind="selection"),
    Entry("paper, 1,024 keys", Paper, "bf16", "bf16", kind="selection"),
]
PACKAGES = {Torch: ["torch"], OnnxRuntime: ["onnxruntime", "onnx"], OpenVinoPaged: ["openvino"], OpenVinoSdpa: ["openvino"], NumKong: ["numkong"], Exact: ["quoka"]}


def installed():
    """({class: version}, {class: why not}) of the contenders' classes."""
    versions, absent = {}, {}
    for of in dict.fromkeys(entry.of for entry in ENTRIES):
        try:
            if of is LlamaCpp:
                versions[of] = ggml_operator.version()
                ggml_operator.libraries()
            else:
                packages = PACKAGES.get(of) or PACKAGES[Exact]
                modules = [importlib.import_module(package) for package in packages]
                versions[of] = f"{packages[0]} {getattr(modules[0], '__version__', None) or importlib.metadata.version(packages[0])}"
        except (ImportError, OSError, AttributeError, importlib.metadata.PackageNotFoundError) as error:
            versions.pop(of, None)
            absent[of] = str(error)
    return versions, absent
