"""Budgets as text, by the rules of budget_text.hpp: one reading for all scripts.

    1024      a count of keys, at least 16
    0.25      with a point: a share of the past, above 0 and at most 1; 1.0 is all of it
"""

LEAST_KEYS, MOST_KEYS = 16, 1_000_000_000
RULES = f"a count of keys from {LEAST_KEYS} to {MOST_KEYS}, or with a point a share of the past, above 0 and at most 1, such as 0.25, or 1.0 for all of it"


def read(text):
    """A count as an int, a share as a float. Raises ValueError, which quotes the text."""
    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        value = None
    if "_" in text or text != text.strip():  # which Python's numbers may have
        value = None
    return checked(value, text)


def checked(value, shown=None):
    """The number itself: an int is a count, a float a share."""
    shown = repr(value) if shown is None else shown
    if isinstance(value, float) and 0 < value <= 1 or isinstance(value, int) and not isinstance(value, bool) and LEAST_KEYS <= value <= MOST_KEYS:
        return value
    raise ValueError(f"{shown} is not a budget: give {RULES}")
