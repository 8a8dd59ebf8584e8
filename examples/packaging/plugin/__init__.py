"""Attention for llama-cpp-python by QuoKA in C++: load() before a Llama is made.

    import ggml_quoka; ggml_quoka.load()                            # exact: what llama.cpp gives, to rounding
    llm = llama_cpp.Llama("model.gguf", flash_attn=True)            # without flash_attn nothing comes here

    ggml_quoka.load(mode="recommended", budget=0.25)      # selects; all settings: the package's page
"""

import ctypes
import json
import os
import pathlib

__all__ = ["load", "path"]

#: The backend's file: GGML_BACKEND_PATH for programs that ask for it.
path = str(pathlib.Path(__file__).resolve().parent / "libggml-quoka.so")


def load(ggml=None, **settings):
    """Registers the backend with a ggml, by default llama-cpp-python's: contexts made later compute attention by it.

    ggml: a ctypes library with ggml_backend_load, or its path. Settings by their keys; QUOKA_* variables count as well,
    and are overruled. Settings are read once: a later call does nothing, and with settings it is refused. Raises
    RuntimeError then, and where ggml does not load the file.
    """
    if ggml is None:
        from llama_cpp import _ggml

        ggml = _ggml.libggml
    elif not isinstance(ggml, ctypes.CDLL):
        ggml = ctypes.CDLL(str(ggml))
    if _of(ggml, "ggml_backend_dev_by_name", b"QuoKA"):
        if settings:
            raise RuntimeError(f"ggml_quoka is loaded, and has read its settings: {', '.join(settings)} came too late")
        return
    for key, value in settings.items():
        os.environ["QUOKA_" + key.upper()] = value if isinstance(value, str) else json.dumps(value)
    if not _of(ggml, "ggml_backend_load", path.encode()):
        raise RuntimeError(f"ggml does not load {path}")


def _of(ggml, function, text):
    call = getattr(ggml, function)
    call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return call(text)
