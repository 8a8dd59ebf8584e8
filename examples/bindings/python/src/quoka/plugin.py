"""llama.cpp's attention by the library that this package carries, a ggml backend, without a compiler:

    GGML_BACKEND_PATH=$(python -m quoka plugin) llama-server -m model.gguf -fa on
    python -m quoka plugin LIBRARY ...      # does it fit these libraries of a ggml (libggml-cpu*.so)?

Prints the file's path; says on stderr for which ggml it was built. Settings: QUOKA_* variables (examples/bindings/ggml/README.md).
"""
import ctypes
import pathlib
import re
import sys

LIBRARY = pathlib.Path(__file__).resolve().parent / "libggml-quoka.so"
BUILT_FOR = re.compile(rb"built for version (\d+) of ggml's backend interface")


def path():
    """The backend's path, for GGML_BACKEND_PATH. Raises FileNotFoundError where this package was
    built without."""
    if not LIBRARY.is_file():
        raise FileNotFoundError(f"this package carries no ggml backend: {LIBRARY} is not there. wheel.sh --plugin makes a wheel that has it, examples/bindings/ggml/install.sh builds it alone")
    return str(LIBRARY)


def built_for():
    """The version of ggml's backend interface that the library has: ggml loads no other."""
    found = BUILT_FOR.search(pathlib.Path(path()).read_bytes())
    if found is None:
        raise ValueError(f"{LIBRARY} does not say for which ggml it was built")
    return int(found[1])


def version_of(library):
    """That of another backend's library, such as libggml-cpu.so. Raises ValueError where the file is none."""
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


def main(libraries):
    if libraries and libraries[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        where, version = path(), built_for()
        wrong = [f"{library} has version {other} of ggml's backend interface, this backend was built for {version}: that ggml does not load it"
                 for library in libraries if (other := version_of(library)) != version]
    except (FileNotFoundError, ValueError) as error:
        print(f"quoka: {error}", file=sys.stderr)
        return 1
    print(f"quoka: {where} was built for version {version} of ggml's backend interface", file=sys.stderr)
    for line in wrong:
        print(f"quoka: {line}", file=sys.stderr)
    if not wrong:
        print(where)
    return int(bool(wrong))
