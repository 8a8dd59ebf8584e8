"""Runs a Python program in which transformers know attn_implementation="quoka":

    python -m quoka PROGRAM ...

as python -m PROGRAM ... does. Settings: QUOKA_CONFIG and the other variables of quoka.transformers.
"""
import runpy
import sys

import quoka.transformers  # noqa: F401

if len(sys.argv) < 2:
    sys.exit(__doc__)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
