#!/usr/bin/env python3
"""Converts a GGUF file to another type of weights by a prebuilt llama.cpp.

    llama_quantize.py IN OUT --type q8_0 [--library DIR]

The library is the one in the npm package @node-llama-cpp/linux-x64@3.22.1 (get_tinyllama.sh unpacks it), which is llama.cpp
v0.5.0; its `include/llama.h` is where the struct below comes from. Python's standard library is all it needs.
"""

import argparse
import ctypes as c
import os
import pathlib
import sys

VERSION = "0.5.0"
# llama_ftype by the name of the type that most matrices get.
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32}
LOG_LEVEL_ERROR = 4


class QuantizeParams(c.Structure):
    _fields_ = [("nthread", c.c_int32), ("ftype", c.c_int), ("output_tensor_type", c.c_int),
                ("token_embedding_type", c.c_int), ("allow_requantize", c.c_bool),
                ("quantize_output_tensor", c.c_bool), ("only_copy", c.c_bool), ("pure", c.c_bool),
                ("keep_split", c.c_bool), ("dry_run", c.c_bool), ("imatrix", c.c_void_p), ("kv_overrides", c.c_void_p),
                ("tt_overrides", c.c_void_p), ("prune_layers", c.c_void_p), ("max_buf_size", c.c_size_t)]


# The library's documented defaults: a struct layout that does not fit is found before it does harm.
KNOWN_DEFAULTS = {"nthread": 0, "ftype": 7, "output_tensor_type": 43, "token_embedding_type": 43, "allow_requantize": False,
                  "quantize_output_tensor": True, "pure": False, "imatrix": None, "max_buf_size": 8 << 30}
LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


def quantize(folder, source, to, kind):
    path = folder / f"libllama.v{VERSION}.so"
    if not path.is_file():
        raise ValueError(f"no {path.name} in {folder}; get_tinyllama.sh unpacks one, or say --library")
    llama, ggml = c.CDLL(str(path)), c.CDLL(str(folder / f"libggml.v{VERSION}.so"))
    llama.llama_version.restype = c.c_char_p
    version = llama.llama_version().decode()
    if version.split("-")[0] != VERSION:
        raise ValueError(f"this is llama.cpp {version}; the struct here is that of {VERSION}")
    llama.llama_model_quantize_default_params.restype = QuantizeParams
    llama.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(QuantizeParams)]
    llama.llama_model_quantize.restype = c.c_uint32
    llama.llama_log_set.argtypes = [LogCallback, c.c_void_p]
    params = llama.llama_model_quantize_default_params()
    for field, value in KNOWN_DEFAULTS.items():
        if getattr(params, field) != value:
            raise ValueError(f"llama_model_quantize_default_params().{field} is {getattr(params, field)} instead of {value}")
    log = LogCallback(lambda level, text, _: sys.stderr.write(text.decode(errors="replace")) if level == LOG_LEVEL_ERROR else None)
    llama.llama_log_set(log, None)
    ggml.ggml_backend_load_all_from_path.argtypes = [c.c_char_p]
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    llama.llama_backend_init()
    params.ftype, params.nthread = FILE_TYPES[kind], len(os.sched_getaffinity(0))
    params.allow_requantize = True  # what comes in may be of any type
    if llama.llama_model_quantize(os.fsencode(source), os.fsencode(to), c.byref(params)):
        raise ValueError(f"llama.cpp cannot convert {source} to {kind}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN")
    parser.add_argument("to", metavar="OUT")
    parser.add_argument("--type", choices=FILE_TYPES, required=True)
    parser.add_argument("--library", metavar="DIR", type=pathlib.Path, help=f"default: llama.cpp-v{VERSION} beside IN")
    flags = parser.parse_args()
    folder = flags.library or pathlib.Path(flags.source).resolve().parent / f"llama.cpp-v{VERSION}"
    try:
        quantize(folder.resolve(), flags.source, flags.to, flags.type)
    except (OSError, ValueError) as error:
        sys.exit(f"llama_quantize.py: {error}")


if __name__ == "__main__":
    main()
