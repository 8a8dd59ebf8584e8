#!/usr/bin/env python3
"""Calls a prebuilt llama.cpp: to convert a model, and to have a reference for logits and times.

    llama_cpp.py tensors      MODEL
    llama_cpp.py quantize     IN OUT --type q8_0
    llama_cpp.py tokenize     MODEL --text TEXT | --file FILE
    llama_cpp.py logits       MODEL --tokens TOKENS.json --out LOGITS.npy
    llama_cpp.py prefill-time MODEL --length 2040 --threads 2
    llama_cpp.py generate     MODEL --text TEXT | --file FILE

The library is the one in the npm package @node-llama-cpp/linux-x64@3.22.1 (get_tinyllama.sh unpacks it), which is
llama.cpp v0.5.0; its `include/llama.h` is where the structs below come from. Every command prints one JSON object.
Python's standard library is all it needs.
"""

import argparse
import array
import ctypes as c
import json
import os
import pathlib
import random
import re
import statistics
import struct
import sys
import time

VERSION = "0.5.0"
GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_COUNT = 0, 1, 43
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# llama_ftype by the name of the type that most matrices get.
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_m": 12,
              "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32}


class ModelParams(c.Structure):
    _fields_ = [("devices", c.c_void_p), ("tensor_buft_overrides", c.c_void_p), ("n_gpu_layers", c.c_int32),
                ("split_mode", c.c_int), ("load_mode", c.c_int), ("lazy_mode", c.c_int), ("main_gpu", c.c_int32),
                ("tensor_split", c.c_void_p), ("progress_callback", c.c_void_p),
                ("progress_callback_user_data", c.c_void_p), ("kv_overrides", c.c_void_p), ("vocab_only", c.c_bool),
                ("check_tensors", c.c_bool), ("use_extra_bufts", c.c_bool), ("no_host", c.c_bool),
                ("no_alloc", c.c_bool), ("load_mtp", c.c_bool)]


class ContextParams(c.Structure):
    _fields_ = [("n_ctx", c.c_uint32), ("n_batch", c.c_uint32), ("n_ubatch", c.c_uint32), ("n_seq_max", c.c_uint32),
                ("n_rs_seq", c.c_uint32), ("n_outputs_max", c.c_uint32), ("n_outputs_max_per_seq", c.c_uint32),
                ("n_threads", c.c_int32), ("n_threads_batch", c.c_int32), ("ctx_type", c.c_int),
                ("rope_scaling_type", c.c_int), ("pooling_type", c.c_int), ("attention_type", c.c_int),
                ("flash_attn_type", c.c_int), ("rope_freq_base", c.c_float), ("rope_freq_scale", c.c_float),
                ("yarn_ext_factor", c.c_float), ("yarn_attn_factor", c.c_float), ("yarn_beta_fast", c.c_float),
                ("yarn_beta_slow", c.c_float), ("yarn_orig_ctx", c.c_uint32), ("defrag_thold", c.c_float),
                ("cb_eval", c.c_void_p), ("cb_eval_user_data", c.c_void_p), ("type_k", c.c_int), ("type_v", c.c_int),
                ("abort_callback", c.c_void_p), ("abort_callback_data", c.c_void_p), ("embeddings", c.c_bool),
                ("offload_kqv", c.c_bool), ("no_perf", c.c_bool), ("op_offload", c.c_bool), ("swa_full", c.c_bool),
                ("kv_unified", c.c_bool), ("samplers", c.c_void_p), ("n_samplers", c.c_size_t),
                ("ctx_other", c.c_void_p)]


class QuantizeParams(c.Structure):
    _fields_ = [("nthread", c.c_int32), ("ftype", c.c_int), ("output_tensor_type", c.c_int),
                ("token_embedding_type", c.c_int), ("allow_requantize", c.c_bool),
                ("quantize_output_tensor", c.c_bool), ("only_copy", c.c_bool), ("pure", c.c_bool),
                ("keep_split", c.c_bool), ("dry_run", c.c_bool), ("imatrix", c.c_void_p), ("kv_overrides", c.c_void_p),
                ("tt_overrides", c.c_void_p), ("prune_layers", c.c_void_p), ("max_buf_size", c.c_size_t)]


class Batch(c.Structure):
    _fields_ = [("n_tokens", c.c_int32), ("token", c.POINTER(c.c_int32)), ("embd", c.c_void_p), ("pos", c.c_void_p),
                ("n_seq_id", c.c_void_p), ("seq_id", c.c_void_p), ("logits", c.POINTER(c.c_int8))]


class GgufInitParams(c.Structure):
    _fields_ = [("no_alloc", c.c_bool), ("ctx", c.c_void_p)]


# What the library's defaults are known to be: they sit at both ends and in the middle of each struct, so a layout
# that does not fit is found before it does harm.
KNOWN_DEFAULTS = {
    "llama_model_default_params": {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0,
                                   "vocab_only": False, "use_extra_bufts": True, "load_mtp": False},
    "llama_context_default_params": {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_outputs_max_per_seq": 1,
                                     "n_threads": 4, "flash_attn_type": -1, "yarn_beta_slow": -1.0,
                                     "defrag_thold": -1.0, "type_k": 1, "type_v": 1, "offload_kqv": True,
                                     "no_perf": True, "kv_unified": False, "n_samplers": 0, "ctx_other": None},
    "llama_model_quantize_default_params": {"nthread": 0, "ftype": 7, "output_tensor_type": GGML_TYPE_COUNT,
                                            "token_embedding_type": GGML_TYPE_COUNT, "allow_requantize": False,
                                            "quantize_output_tensor": True, "pure": False, "imatrix": None,
                                            "max_buf_size": 8 << 30},
}

LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
LOG_LEVEL_ERROR = 4

# name: (result, arguments); a handle is a void pointer.
LLAMA_FUNCTIONS = {
    "llama_version": (c.c_char_p, []),
    "llama_print_system_info": (c.c_char_p, []),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c.c_void_p]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_quantize_default_params": (QuantizeParams, []),
    "llama_model_quantize": (c.c_uint32, [c.c_char_p, c.c_char_p, c.POINTER(QuantizeParams)]),
    "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, ModelParams]),
    "llama_init_from_model": (c.c_void_p, [c.c_void_p, ContextParams]),
    "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
    "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
    "llama_vocab_is_eog": (c.c_bool, [c.c_void_p, c.c_int32]),
    "llama_tokenize": (c.c_int32, [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool,
                                   c.c_bool]),
    "llama_detokenize": (c.c_int32, [c.c_void_p, c.POINTER(c.c_int32), c.c_int32, c.c_char_p, c.c_int32, c.c_bool,
                                     c.c_bool]),
    "llama_get_memory": (c.c_void_p, [c.c_void_p]),
    "llama_memory_clear": (None, [c.c_void_p, c.c_bool]),
    "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
    "llama_synchronize": (None, [c.c_void_p]),
    "llama_get_logits_ith": (c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
}
GGML_FUNCTIONS = {
    "ggml_backend_load": (c.c_void_p, [c.c_char_p]),
    "ggml_backend_load_all_from_path": (None, [c.c_char_p]),
    "ggml_type_name": (c.c_char_p, [c.c_int]),
    "gguf_init_from_file": (c.c_void_p, [c.c_char_p, GgufInitParams]),
    "gguf_get_n_tensors": (c.c_int64, [c.c_void_p]),
    "gguf_get_tensor_type": (c.c_int, [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_offset": (c.c_size_t, [c.c_void_p, c.c_int64]),
    "gguf_get_tensor_size": (c.c_size_t, [c.c_void_p, c.c_int64]),
    "gguf_get_data_offset": (c.c_size_t, [c.c_void_p]),
}


def declare(library, functions):
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class LlamaCpp:
    """The loaded library: `llama` and `ggml` are its two halves. `cpu` names a libggml-cpu-*.so; None is the best."""

    def __init__(self, folder, cpu=None, verbose=False):
        folder = pathlib.Path(folder).resolve()
        if not (folder / f"libllama.v{VERSION}.so").is_file():
            raise ValueError(f"no libllama.v{VERSION}.so in {folder}; get_tinyllama.sh unpacks one, or say --library")
        self.llama = c.CDLL(str(folder / f"libllama.v{VERSION}.so"))
        self.ggml = c.CDLL(str(folder / f"libggml.v{VERSION}.so"))  # brings libggml-base, where gguf_* are
        declare(self.llama, LLAMA_FUNCTIONS)
        declare(self.ggml, GGML_FUNCTIONS)
        self.check_layout()
        # Kept as a member: the library holds the pointer.
        self.log = LogCallback(lambda level, text, _: sys.stderr.write(text.decode(errors="replace"))
                               if verbose or level == LOG_LEVEL_ERROR else None)
        self.llama.llama_log_set(self.log, None)
        if cpu is None:
            self.ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
        elif not self.ggml.ggml_backend_load(os.fsencode(folder / f"libggml-cpu-{cpu}.so")):
            raise ValueError(f"libggml-cpu-{cpu}.so is not in {folder}, or this processor cannot run it")
        self.llama.llama_backend_init()

    def check_layout(self):
        version = self.llama.llama_version().decode()
        if version.split("-")[0] != VERSION:
            raise ValueError(f"this is llama.cpp {version}; the structs here are those of {VERSION}")
        for function, expected in KNOWN_DEFAULTS.items():
            params = getattr(self.llama, function)()
            for field, value in expected.items():
                if getattr(params, field) != value:
                    raise ValueError(f"{function}().{field} is {getattr(params, field)} instead of {value}")

    def cpu_library(self):
        """Which of the CPU libraries was loaded, for instance "zen4"."""
        return re.search(r"libggml-cpu-(\w+)\.so", pathlib.Path("/proc/self/maps").read_text()).group(1)

    def machine(self):
        return {"cpu_library": self.cpu_library(), "system_info": self.llama.llama_print_system_info().decode().strip()}


class Model:
    """A model and, after `open_context`, one context with one sequence. All of it lives until the program ends."""

    def __init__(self, library, path, repack=True, vocab_only=False):
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}")
        self.llama = library.llama
        params = self.llama.llama_model_default_params()
        params.use_extra_bufts, params.vocab_only = repack, vocab_only
        self.handle = self.llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocab = self.llama.llama_model_get_vocab(self.handle)
        self.vocab_size = self.llama.llama_vocab_n_tokens(self.vocab)
        self.context = None

    def open_context(self, length, threads, batch=512, kv_type=GGML_TYPE_F16, flash_attention="auto"):
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_ubatch, params.n_batch = length, batch, max(2048, batch)
        params.n_outputs_max_per_seq = 0  # 0: as many as there are tokens
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kv_type
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        self.n_batch = params.n_batch
        self.context = self.llama.llama_init_from_model(self.handle, params)
        if not self.context:
            raise ValueError(f"llama.cpp cannot make a context of {length} tokens")

    def tokenize(self, text, special=True, parse_special=False):
        data = text.encode()
        capacity = len(data) + 8  # a token stands for at least one byte, but for those of begin and end
        tokens = (c.c_int32 * capacity)()
        count = self.llama.llama_tokenize(self.vocab, data, len(data), tokens, capacity, special, parse_special)
        if count < 0:
            raise ValueError(f"llama_tokenize wants {-count} places, {capacity} were given")
        return list(tokens[:count])

    def detokenize(self, tokens):
        capacity = 64 * len(tokens) + 64
        text = c.create_string_buffer(capacity)
        ids = (c.c_int32 * len(tokens))(*tokens)
        count = self.llama.llama_detokenize(self.vocab, ids, len(tokens), text, capacity, False, True)
        if count < 0:
            raise ValueError(f"llama_detokenize wants {-count} bytes, {capacity} were given")
        return text.raw[:count].decode(errors="replace")

    def clear(self):
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def decode(self, tokens, first_wanted):
        """Appends the tokens; yields float* [vocabulary] for each from `first_wanted` on, good until the next one."""
        for begin in range(0, len(tokens), self.n_batch):
            part = tokens[begin:begin + self.n_batch]
            ids = (c.c_int32 * len(part))(*part)
            wanted = (c.c_int8 * len(part))(*(begin + i >= first_wanted for i in range(len(part))))
            status = self.llama.llama_decode(self.context, Batch(n_tokens=len(part), token=ids, logits=wanted))
            if status != 0:
                raise RuntimeError(f"llama_decode answers {status} at tokens {begin} to {begin + len(part)}")
            self.llama.llama_synchronize(self.context)
            for i in range(len(part)):
                if wanted[i]:
                    yield self.llama.llama_get_logits_ith(self.context, i)

    def next_token(self, tokens):
        """Appends the tokens; returns the most probable one after them."""
        (row,) = self.decode(tokens, len(tokens) - 1)
        values = row[:self.vocab_size]
        return values.index(max(values))


def file_header(suffix, shape):
    """What stands in front of the float32 values of a file of that kind."""
    count = 4 * shape[0] * shape[1]
    if suffix == ".f32":
        return b""
    if suffix == ".npy":
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
        text += " " * (-(len(text) + 11) % 64) + "\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
    if suffix == ".safetensors":
        text = json.dumps({"logits": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, count]}})
        text += " " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text.encode()
    raise ValueError(f"{suffix!r} is none of .npy, .safetensors and .f32 (values only)")


def text_of(options):
    return options.text if options.text is not None else pathlib.Path(options.file).read_text(encoding="utf-8")


def read_tokens(path):
    try:
        tokens = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if isinstance(tokens, dict):
        tokens = tokens.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError(f"{path} holds no list of token numbers")
    return tokens


def run_tensors(library, options):
    """How many tensors and bytes of each type; an error where the file is shorter or longer than they say."""
    ggml = library.ggml
    file = ggml.gguf_init_from_file(os.fsencode(options.model), GgufInitParams(no_alloc=True, ctx=None))
    if not file:
        raise ValueError(f"{options.model} is not a sound GGUF file")
    types, end = {}, 0
    for i in range(ggml.gguf_get_n_tensors(file)):
        entry = types.setdefault(ggml.ggml_type_name(ggml.gguf_get_tensor_type(file, i)).decode(),
                                 {"tensors": 0, "bytes": 0})
        size = ggml.gguf_get_tensor_size(file, i)
        entry["tensors"] += 1
        entry["bytes"] += size
        end = max(end, ggml.gguf_get_data_offset(file) + ggml.gguf_get_tensor_offset(file, i) + size)
    # A file may be filled up to the next multiple of the alignment, 32 bytes unless it says otherwise.
    size = os.path.getsize(options.model)
    if not end <= size < end + 32:
        raise ValueError(f"{options.model} has {size} bytes, its tensors end at {end}")
    return {"bytes": size, "types": types}


def run_quantize(library, options):
    params = library.llama.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[options.type], options.threads
    params.allow_requantize = True  # what comes in may be of any type
    started = time.perf_counter()
    if library.llama.llama_model_quantize(os.fsencode(options.model), os.fsencode(options.out), c.byref(params)):
        raise ValueError(f"llama.cpp cannot convert {options.model} to {options.type}")
    return {"seconds": round(time.perf_counter() - started, 1), "bytes": os.path.getsize(options.out)}


def run_tokenize(library, options):
    model = Model(library, options.model, vocab_only=True)
    return {"tokens": model.tokenize(text_of(options), not options.no_special, options.parse_special)}


def run_logits(library, options):
    """[positions, vocabulary] of the last positions, as exact as this library computes them.

    Weights are not repacked, the KV cache is float32 and flash attention is off, so attention is all float32. Products
    with a quantised or F16 weight still round the activations, to 8-bit blocks or F16. For logits without that error,
    convert the very same model to f32 first, which loses nothing: on TinyLlama the largest difference to a float64
    computation is then 1e-4, but 0.9 from the Q8_0 file and 0.02 from the F16 file (300 positions, logits of RMS 4.5).
    --as-users-run-it takes the library's defaults instead.
    """
    tokens = read_tokens(options.tokens)
    model = Model(library, options.model, repack=options.as_users_run_it)
    wrong = [token for token in tokens if not 0 <= token < model.vocab_size]
    if wrong:
        raise ValueError(f"{options.tokens}: of {len(tokens)} tokens, not in 0 to {model.vocab_size - 1}: {wrong[:5]}")
    exact = {} if options.as_users_run_it else {"kv_type": GGML_TYPE_F32, "flash_attention": "off"}
    model.open_context(len(tokens), options.threads, **exact)
    shape = (min(options.last or len(tokens), len(tokens)), model.vocab_size)
    out = pathlib.Path(options.out)
    header = file_header(out.suffix, shape)
    best = []
    with open(out, "wb") as file:
        file.write(header)
        for row in model.decode(tokens, len(tokens) - shape[0]):
            values = array.array("f", row[:model.vocab_size])
            best.append(values.index(max(values)))
            file.write(values.tobytes())
    return {"shape": shape, "argmax": best, **library.machine()}


def run_prefill_time(library, options):
    """Seconds from the first token to the last one's logits, with the settings that llama.cpp's own programs take.

    The tokens are random with a fixed seed. One prefill is not counted: it reads the weights from disk.
    "processors" is how many this process had on average: below --threads, others ran too and the time is too long.
    """
    model = Model(library, options.model)
    model.open_context(options.length, options.threads, options.batch, flash_attention=options.flash_attention)
    source = random.Random(1)
    tokens = [source.randrange(model.vocab_size) for _ in range(options.length)]
    seconds, processors = [], []
    for _ in range(options.repeat + 1):
        model.clear()
        started, busy = time.perf_counter(), time.process_time()
        for _ in model.decode(tokens, len(tokens) - 1):
            pass
        seconds.append(time.perf_counter() - started)
        processors.append((time.process_time() - busy) / seconds[-1])
    median = statistics.median(seconds[1:])
    return {"length": options.length, "threads": options.threads, "batch": options.batch,
            "seconds": [round(value, 3) for value in seconds[1:]],
            "processors": [round(value, 2) for value in processors[1:]],
            "median_seconds": round(median, 3), "tokens_per_second": round(options.length / median, 1),
            **library.machine()}


def run_generate(library, options):
    """Greedy: the most probable token each time, until the end token or --max-tokens."""
    model = Model(library, options.model)
    prompt = model.tokenize(text_of(options), not options.no_special, options.parse_special)
    model.open_context(len(prompt) + options.max_tokens, options.threads)
    started = time.perf_counter()
    token = model.next_token(prompt)
    prefill = time.perf_counter() - started
    answer = []
    while len(answer) < options.max_tokens and not model.llama.llama_vocab_is_eog(model.vocab, token):
        answer.append(token)
        if len(answer) < options.max_tokens:
            token = model.next_token([token])
    return {"prompt_length": len(prompt), "first_token_seconds": round(prefill, 3), "tokens": answer,
            "text": model.detokenize(answer)}


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse_options():
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("model", metavar="MODEL", help="a GGUF file")
    shared.add_argument("--library", metavar="DIR",
                        help=f"the prebuilt libraries; default: llama.cpp-v{VERSION} beside the model")
    shared.add_argument("--cpu", metavar="NAME", help="take libggml-cpu-NAME.so, not the best for this processor")
    shared.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N")
    shared.add_argument("--verbose", action="store_true", help="let llama.cpp say all that it says")
    text = argparse.ArgumentParser(add_help=False)
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--text")
    source.add_argument("--file", help="UTF-8 text")
    text.add_argument("--no-special", action="store_true", help="no begin token")
    text.add_argument("--parse-special", action="store_true", help="names such as </s> are those tokens, not text")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, parents):
        added = commands.add_parser(name, parents=parents, description=run.__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
        added.set_defaults(run=run)
        return added

    command("tensors", run_tensors, [shared])
    quantize = command("quantize", run_quantize, [shared])
    quantize.add_argument("out", metavar="OUT")
    quantize.add_argument("--type", choices=FILE_TYPES, required=True)
    command("tokenize", run_tokenize, [shared, text])
    logits = command("logits", run_logits, [shared])
    logits.add_argument("--tokens", required=True, metavar="FILE", help="a JSON list, or what `tokenize` printed")
    logits.add_argument("--out", required=True, metavar="FILE", help="ends in .npy, .safetensors or .f32 (values only)")
    logits.add_argument("--last", type=positive, metavar="N", help="positions; default: all")
    logits.add_argument("--as-users-run-it", action="store_true", help="repacking, F16 cache, flash attention auto")
    prefill = command("prefill-time", run_prefill_time, [shared])
    prefill.add_argument("--length", type=positive, default=2040, metavar="N", help="tokens; default: 2040")
    prefill.add_argument("--batch", type=positive, default=512, metavar="N", help="tokens per pass; default: 512")
    prefill.add_argument("--repeat", type=positive, default=3, metavar="N")
    prefill.add_argument("--flash-attention", choices=FLASH_ATTENTION, default="auto")
    generate = command("generate", run_generate, [shared, text])
    generate.add_argument("--max-tokens", type=positive, default=32, metavar="N")
    return parser.parse_args()


def main():
    options = parse_options()
    folder = options.library or pathlib.Path(options.model).resolve().parent / f"llama.cpp-v{VERSION}"
    try:
        print(json.dumps(options.run(LlamaCpp(folder, options.cpu, options.verbose), options)))
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        sys.exit(f"llama_cpp.py: {error}")


if __name__ == "__main__":
    main()
