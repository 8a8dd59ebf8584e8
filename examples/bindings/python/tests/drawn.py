"""Tests of cases that hypothesis draws: the same ones each time, and fewer than it would take by itself.

    QUOKA_PYTHON_SEED=17 QUOKA_PYTHON_CASES=5000 python3 tests/test_arrays.py     other ones, and more

QUOKA_TIMES=9 gives every test nine times its usual number. A failing case is shrunk and printed.
"""
import math
import os

import hypothesis
from hypothesis import strategies as st  # noqa: F401: for those who import it from here
import numpy as np


def drawn(cases, **strategies):
    """A test over this many cases, whose arguments are these strategies."""
    seed = os.environ.get("QUOKA_PYTHON_SEED")
    cases = int(os.environ.get("QUOKA_PYTHON_CASES", math.ceil(cases * float(os.environ.get("QUOKA_TIMES", 1)))))

    def of(test):
        test = hypothesis.given(**strategies)(test)
        test = hypothesis.settings(max_examples=cases, derandomize=seed is None, deadline=None, database=None,
                                   suppress_health_check=list(hypothesis.HealthCheck))(test)
        return test if seed is None else hypothesis.seed(int(seed))(test)

    return of


# Where the numbers of arrays come from: arrays are not drawn number by number.
generators = st.builds(np.random.default_rng, st.integers(0, 2**32 - 1))
