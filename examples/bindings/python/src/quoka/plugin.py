"""llama.cpp's attention by the library beside this file, a ggml backend, without a compiler:

    GGML_BACKEND_PATH=$(python -m quoka plugin) llama-server -m model.gguf -fa on
    python -m quoka plugin LIBRARY ...      # does it fit these libraries of a ggml (libggml-cpu*.so)?

The first prints the file's path, and on stderr for which ggml it was built. llama-cpp-python reads no GGML_BACKEND_PATH:

    import quoka.plugin; quoka.plugin.load()                        # exact: what llama.cpp gives, to rounding
    llm = llama_cpp.Llama("model.gguf", flash_attn=True)            # without flash_attn nothing comes here

    quoka.plugin.load(mode="recommended", budget=0.25)              # selects

Settings: examples/bindings/ggml/README.md. The package ggml_quoka is this module alone: ggml_quoka.load().
"""
import ctypes
import json
import os
import pathlib
import re
import sys

__all__ = ["built_for", "load", "path", "version_of"]

#: The backend's file: GGML_BACKEND_PATH for programs that ask for it.
path = str(pathlib.Path(__file__).resolve().parent / "libggml-quoka.so")
BUILT_FOR = re.compile(rb"built for version (\d+) of ggml's backend interface")


def there():
    """The path. Raises FileNotFoundError where this package was built without the file."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"this package carries no ggml backend: {path} is not there. wheel.sh --llama-cpp makes a wheel that has it, examples/bindings/ggml/install.sh builds it alone")
    return path


def built_for():
    """The version of ggml's backend interface that the library has: ggml loads no other."""
    found = BUILT_FOR.search(pathlib.Path(there()).read_bytes())
    if found is None:
        raise ValueError(f"{path} does not say for which ggml it was built")
    return int(found[1])


def version_of(library):
    """That of another backend's library, such as libggml-cpu.so. Raises ValueError for another
    file."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise ValueError(f"{library} cannot be loaded: {error}") from None
    for name in ("ggml_backend_init", "ggml_backend_cpu_reg"):
        if hasattr(loaded, name):
            make = getattr(loaded, name)
            make.restype, make.argtypes = ctypes.c_void_p, []
            if registry := make():
                return ctypes.c_int.from_address(registry).value  # ggml_backend_reg.api_version
    raise ValueError(f"{library} is not a backend of ggml's: give libggml-cpu.so, or one of libggml-cpu-*.so")


def refusal(library):
    """Why the ggml of that backend's library does not load this one, or None. Raises as version_of() does."""
    own, other = built_for(), version_of(library)
    return None if other == own else f"{library} has version {other} of ggml's backend interface, this backend was built for {own}: that ggml does not load it"


def load(ggml=None, **settings):
    """Registers the backend with a ggml, by default llama-cpp-python's: contexts made later compute attention by it.

    ggml: a ctypes library with ggml_backend_load, or its path. Settings by their keys; QUOKA_* variables count as well,
    and are overruled. Settings are read once: a later call does nothing, and with settings it is refused. Raises
    RuntimeError then, and where ggml does not load the file; FileNotFoundError where this package has none.
    """
    if ggml is None:
        from llama_cpp import _ggml

        ggml = _ggml.libggml
    elif not isinstance(ggml, ctypes.CDLL):
        ggml = ctypes.CDLL(str(ggml))
    if _of(ggml, "ggml_backend_dev_by_name", b"QuoKA"):
        if settings:
            raise RuntimeError(f"the backend is loaded, and has read its settings: {', '.join(settings)} came too late")
        return
    there()
    for key, value in settings.items():
        os.environ["QUOKA_" + key.upper()] = value if isinstance(value, str) else json.dumps(value)
    if not _of(ggml, "ggml_backend_load", path.encode()):
        raise RuntimeError(f"ggml does not load {path}, which was built for version {built_for()} of its backend interface")


def _of(ggml, function, text):
    call = getattr(ggml, function)
    call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return call(text)


def main(libraries):
    if libraries and libraries[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        version = built_for()
        wrong = [reason for library in libraries if (reason := refusal(library))]
    except (FileNotFoundError, ValueError) as error:
        print(f"quoka: {error}", file=sys.stderr)
        return 1
    print(f"quoka: {path} was built for version {version} of ggml's backend interface", file=sys.stderr)
    for line in wrong:
        print(f"quoka: {line}", file=sys.stderr)
    if not wrong:
        print(path)
    return int(bool(wrong))
