"""llama.cpp's operator FLASH_ATTN_EXT by its CPU backend, called through ggml's C interface."""

import ctypes
import os
import pathlib

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # enum ggml_type


class InitParams(ctypes.Structure):  # struct ggml_init_params
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def _loaded(folder):
    base, everything = (ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL) for name in ("libggml-base*.so*", "libggml.*so*"))
    pointer, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    for function, result, *arguments in (
        (base.ggml_init, pointer, InitParams), (base.ggml_free, None, pointer),
        (base.ggml_new_tensor_1d, pointer, pointer, ctypes.c_int, i64), (base.ggml_new_tensor_2d, pointer, pointer, ctypes.c_int, i64, i64),
        (base.ggml_view_4d, pointer, pointer, pointer, i64, i64, i64, i64, size, size, size, size), (base.ggml_permute, pointer, pointer, pointer, *[ctypes.c_int] * 4),
        (base.ggml_row_size, size, ctypes.c_int, i64), (base.ggml_nbytes, size, pointer), (base.ggml_version, ctypes.c_char_p),
        (base.ggml_flash_attn_ext, pointer, *[pointer] * 5, *[ctypes.c_float] * 3), (base.ggml_flash_attn_ext_add_sinks, None, pointer, pointer),
        (base.ggml_new_graph, pointer, pointer), (base.ggml_build_forward_expand, None, pointer, pointer),
        (base.ggml_quantize_chunk, size, ctypes.c_int, pointer, pointer, i64, i64, i64, pointer),
        (base.ggml_backend_alloc_ctx_tensors, pointer, pointer, pointer), (base.ggml_backend_buffer_free, None, pointer),
        (base.ggml_backend_tensor_set, None, pointer, pointer, size, size), (base.ggml_backend_tensor_get, None, pointer, pointer, size, size),
        (base.ggml_backend_graph_compute, ctypes.c_int, pointer, pointer), (base.ggml_backend_dev_init, pointer, pointer, ctypes.c_char_p),
        (base.ggml_backend_dev_backend_reg, pointer, pointer), (base.ggml_backend_reg_get_proc_address, pointer, pointer, ctypes.c_char_p),
        (base.ggml_backend_free, None, pointer),
        (everything.ggml_backend_dev_by_type, pointer, ctypes.c_int), (everything.ggml_backend_load_all_from_path, None, ctypes.c_char_p),
    ):
        function.restype, function.argtypes = result, arguments
    everything.ggml_backend_load_all_from_path(str(folder).encode())
    return base, everything


def folder():
    """The folder of its libraries: GGML_DIR, or the one that
    examples/bindings/ggml/get_llama_cpp.sh made."""
    root = pathlib.Path(os.environ.get("GGML_DIR", pathlib.Path(__file__).resolve().parents[2] / "build" / "llama.cpp"))
    found = next((place for place in (root / "lib", root) if list(place.glob("libggml-base*.so*"))), None)
    if found is None:
        raise ImportError(f"no libggml-base in {root}: bash examples/bindings/ggml/get_llama_cpp.sh")
    return found


_libraries = None


def libraries():
    global _libraries
    _libraries = _libraries or _loaded(folder())
    return _libraries


def version():
    return "llama.cpp " + next(folder().glob("libggml.*so*")).name.removeprefix("libggml.").removesuffix(".so").strip(".")


class Attention:
    """A graph of one node. The cache lies token by token, as llama.cpp has it, in cells that 256 divides, and a mask of halves says who sees whom."""

    def __init__(self, layer, cache, threads):
        shape, self.layer = layer.shape, layer
        self.base, everything = libraries()
        base, type_ = self.base, TYPES[cache]
        device = everything.ggml_backend_dev_by_type(0)  # the CPU
        self.backend = base.ggml_backend_dev_init(device, None)
        set_threads = base.ggml_backend_reg_get_proc_address(base.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(self.backend, threads)
        c = self.context = base.ggml_init(InitParams(1 << 20, None, True))
        cells = (shape.keys + 255) // 256 * 256

        def heads(tensor, of_type, count, length):
            row = base.ggml_row_size(of_type, shape.head_dim)
            view = base.ggml_view_4d(c, tensor, shape.head_dim, count, length, shape.batch, row, row * count, row * count * length, 0)
            return base.ggml_permute(c, view, 0, 2, 1, 3)

        q = base.ggml_new_tensor_2d(c, TYPES["f32"], shape.head_dim * shape.q_heads, shape.queries * shape.batch)
        k, v = (base.ggml_new_tensor_2d(c, type_, shape.head_dim * shape.kv_heads, cells * shape.batch) for _ in "kv")
        mask = base.ggml_new_tensor_2d(c, TYPES["f16"], cells, shape.queries)
        self.out = base.ggml_flash_attn_ext(c, heads(q, TYPES["f32"], shape.q_heads, shape.queries), heads(k, type_, shape.kv_heads, cells),
                                            heads(v, type_, shape.kv_heads, cells), mask, layer.scale, 0.0, 0.0)
        if shape.sinks:
            sinks = base.ggml_new_tensor_1d(c, TYPES["f32"], shape.q_heads)
            base.ggml_flash_attn_ext_add_sinks(self.out, sinks)
        self.graph = base.ggml_new_graph(c)
        base.ggml_build_forward_expand(self.graph, self.out)
        self.buffer = base.ggml_backend_alloc_ctx_tensors(c, self.backend)
        self._write(q, layer.tokens(layer.q, "f32"))
        for tensor, rows in ((k, layer.k), (v, layer.v)):
            padded = np.zeros((shape.batch, cells, shape.kv_heads * shape.head_dim), np.float32)
            padded[:, :shape.keys] = layer.tokens(rows, "f32")
            measured = np.zeros(base.ggml_nbytes(tensor), np.uint8)
            base.ggml_quantize_chunk(type_, padded.ctypes.data, measured.ctypes.data, 0, cells * shape.batch, padded.shape[2], None)
            self._write(tensor, measured)
        hidden = np.arange(cells)[None, :] > shape.past + np.arange(shape.queries)[:, None]
        self._write(mask, np.where(hidden, -np.inf, 0).astype(np.float16))
        if shape.sinks:
            self._write(sinks, layer.sinks)

    def _write(self, tensor, array):
        assert array.nbytes == self.base.ggml_nbytes(tensor), (array.nbytes, self.base.ggml_nbytes(tensor))
        self.base.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def __call__(self):
        if self.base.ggml_backend_graph_compute(self.backend, self.graph) != 0:
            raise RuntimeError("ggml's CPU backend failed")

    def output(self):
        """[batch, q_heads, queries, head_dim]."""
        out = np.zeros(self.layer.q.size, np.float32)
        self.base.ggml_backend_tensor_get(self.out, out.ctypes.data, 0, out.nbytes)
        return self.layer.by_heads(out)

    def close(self):
        self.base.ggml_backend_buffer_free(self.buffer)
        self.base.ggml_free(self.context)
        self.base.ggml_backend_free(self.backend)
