"""Runs a Python program with attn_implementation="quoka" registered in transformers:

    python -m quoka PROGRAM ...

as python -m PROGRAM ... does. Settings: QUOKA_CONFIG and the other variables of quoka.transformers. For llama.cpp:

    python -m quoka plugin      the path of its backend, which wheels carry: quoka/plugin.py
    python -m quoka check MODEL.gguf      what it gains and loses on a model: quoka/check.py
"""
import importlib.util
import runpy
import sys

if len(sys.argv) < 2:
    sys.exit(__doc__)
if sys.argv[1] == "plugin":
    import quoka.plugin

    sys.exit(quoka.plugin.main(sys.argv[2:]))
if sys.argv[1] == "check":
    import quoka.check

    sys.exit(quoka.check.main(sys.argv[2:]))

if sys.argv[1].startswith("-") or importlib.util.find_spec(sys.argv[1].partition(".")[0]) is None:
    sys.exit(f"quoka: there is no Python program {sys.argv[1]}\n\n{__doc__}")
import quoka.transformers  # noqa: E402, F401

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
