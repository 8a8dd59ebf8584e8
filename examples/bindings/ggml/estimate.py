"""An estimate of the gain from a model's file alone: how much of a prefill in llama.cpp is
attention, by length.

    estimate.py MODEL.gguf [--budget 1024]      # or 0.25: a share of the past
    estimate.py MODEL.gguf --weights      # one line where llama.cpp multiplies slowly by its weights, else nothing

Only attention becomes faster, so its share is the most that can be gained. It depends on the layers that see everything
(a sliding window's cost does not grow), on heads and their size against the model's weights, on how the weights are
stored, and on the length. Multiply-adds are counted from the file; the rates below turn them into shares of time.
"""

import argparse
import math
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import budget as budgets  # noqa: E402

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536, 131072]

# Multiply-adds with weights of a type in the time of one of llama.cpp's attention, and those of exact attention here: by
# bench/results/data/estimate_rates.json. Other types are taken for as slow as the slowest of these.
RATES = {"F16": 1.2, "Q4_0": 3.9, "Q4_1": 0.85, "Q4_K": 3.1, "Q8_0": 2.1}
EXACT = 3.4

WORTH_SELECTING = 1.1  # times as fast as exact attention: a smaller gain is not worth the risk to answers

# How long llama.cpp takes to multiply by weights of a type, by that of the fastest: "weights" of the same file.
TIMES = {"Q4_0": 1.0, "Q4_K": 1.3, "Q8_0": 1.9, "Q5_0": 2.5, "Q6_K": 2.9, "F16": 3.2, "Q4_1": 4.4}

TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
         14: "Q6_K", 15: "Q8_K", 30: "BF16"}  # others: by their number
# Architectures in which every n-th layer has full attention and the others a sliding window, if the file does not say
# so.
EACH_SEES_ALL = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "llama4": 4, "olmo2": 4}


MOST_LAYERS = 10_000


class Bad(Exception):
    """The fault of the file, in one line."""


class Gguf:
    """Key-values and tensors [(name, sizes, type)] of a GGUF file; no data is read."""

    FORMATS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}

    def __init__(self, path):
        with open(path, "rb") as self.file:
            try:
                if self.file.read(4) != b"GGUF":
                    raise Bad("it does not begin with GGUF")
                version, tensors, keys = self.numbers("IQQ")
                if version not in (2, 3):
                    raise Bad(f"its version is {version}, read are 2 and 3")
                self.keys = {self.text(): self.value(self.numbers("I")[0]) for _ in range(keys)}
                self.tensors = []
                for _ in range(tensors):
                    name, (dims,) = self.text(), self.numbers("I")
                    if dims > 8:
                        raise Bad(f"tensor {name} has {dims} dimensions")
                    sizes = self.numbers(f"{dims}Q")
                    self.tensors.append((name, sizes, self.numbers("IQ")[0]))
            except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
                raise Bad("it ends, or is damaged, before its list of tensors does") from error

    def numbers(self, formats):
        return struct.unpack("<" + formats, self.file.read(struct.calcsize("<" + formats)))

    def text(self):
        (size,) = self.numbers("Q")
        if size > 1 << 26:
            raise Bad(f"a text in it has {size} bytes")
        return self.numbers(f"{size}s")[0].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            (inner,), (count,) = self.numbers("I"), self.numbers("Q")
            if count > 1 << 27:
                raise Bad(f"a list in it has {count} members")
            if inner in self.FORMATS:
                return list(self.numbers(f"{count}{self.FORMATS[inner]}"))
            if inner == 9:
                raise Bad("a list in it is of lists")
            return [self.value(inner) for _ in range(count)]
        if kind not in self.FORMATS:
            raise Bad(f"a value in it is of kind {kind}")
        return self.numbers(self.FORMATS[kind])[0]


class Model:
    """The sizes of a file that count."""

    def __init__(self, path):
        self.keys = (file := Gguf(path)).keys
        parts = self.whole("split.count", 1, most=MOST_LAYERS)
        if parts > 1 and "-00001-of-" not in path.name:
            raise Bad(f"it is the first of {parts} files, and there is no -00001-of- in its name to find the others by")
        for part in range(2, parts + 1):
            file.tensors += Gguf(path.with_name(path.name.replace("-00001-of-", f"-{part:05}-of-"))).tensors
        self.arch = arch = str(self.keys.get("general.architecture", ""))
        get = lambda key, otherwise=0: self.whole(f"{arch}.{key}", otherwise)  # noqa: E731
        self.layers = self.whole(f"{arch}.block_count", 0, most=MOST_LAYERS)
        each = lambda key, otherwise: self.wholes(f"{arch}.{key}", otherwise)  # noqa: E731
        self.q_heads = each("attention.head_count", 0)
        if not self.layers or not any(self.q_heads):
            raise Bad(f"it names no {arch or 'architecture'}.block_count and attention.head_count")
        self.kv_heads = each("attention.head_count_kv", self.q_heads)
        width = get("embedding_length")
        self.k_dim = get("attention.key_length") or width // max(self.q_heads)
        self.v_dim = get("attention.value_length") or self.k_dim
        self.context = get("context_length")
        self.window = get("attention.sliding_window")
        self.sees_all = self.kinds(self.keys.get(f"{arch}.attention.sliding_window_pattern"))
        self.weights = self.products(file, get("expert_count"), get("expert_used_count"))

    def whole(self, key, otherwise, most=2**32 - 1):
        value = self.keys.get(key, otherwise)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise Bad(f"its {key} is {str(value):.40}, but must be a whole number from 0 to {most}")
        return value

    def wholes(self, key, otherwise):
        """A number of each layer; a file may have one for all."""
        value = self.keys.get(key, otherwise)
        if not isinstance(value, list):
            return [self.whole(key, otherwise)] * self.layers
        if len(value) < self.layers or not all(isinstance(x, int) and x >= 0 for x in value):
            raise Bad(f"its {key} is {str(value):.40}, but must be {self.layers} whole numbers, or one")
        return value[:self.layers]

    def kinds(self, pattern):
        """Does each layer see everything? The window of an architecture that is not listed is taken
        for unused, as
        llama.cpp takes most."""
        each = pattern if isinstance(pattern, int) and pattern > 1 else EACH_SEES_ALL.get(self.arch)
        if isinstance(pattern, list):
            return [not windowed for windowed in pattern][:self.layers]
        if not self.window or not each:
            self.window = 0
            return [True] * self.layers
        return [i % each == each - 1 for i in range(self.layers)]

    def products(self, file, experts, used):
        """{type: multiply-adds of a token}: of matrices in layers; the embedding is looked up, logits are of one token."""
        found = {}
        for name, sizes, kind in file.tensors:
            if not name.startswith("blk.") or len(sizes) < 2:
                continue
            share = used / experts if experts and len(sizes) == 3 and "exps" in name else 1
            label = TYPES.get(kind, f"type {kind}")
            found[label] = found.get(label, 0) + share * math.prod(sizes)
        if not any(found.values()):
            raise Bad("no layer in it has a matrix")
        return found

    def of_weights(self, length):
        slowest = min(RATES.values())
        return length * sum(count / RATES.get(label, slowest) for label, count in self.weights.items())

    def of_attention(self, length, everything):
        """Multiply-adds of a prefill's attention, of layers that see everything or of those with a window."""
        sees = length / 2
        if not everything:
            sees = min(sees, self.window) if length <= 2 * self.window else self.window * (1 - self.window / (2 * length))
        total = 0
        for heads, kv_heads, sees_all in zip(self.q_heads, self.kv_heads, self.sees_all):
            if kv_heads and sees_all == everything:
                total += length * sees * heads * (self.k_dim + self.v_dim)
        return total


def estimate(model, length, budget):
    """(attention's share of llama.cpp's time, exact, selection, the most): times as fast as llama.cpp."""
    weights = model.of_weights(length)
    everything, windows = model.of_attention(length, True), model.of_attention(length, False)
    before = weights + everything + windows
    exact = weights + (everything + windows) / EXACT
    # If the past is longer than the budget, only the budget is read, and all of it by 8-bit products for a quarter of
    # the rows' logits.
    if isinstance(budget, float):  # a share of every past
        read = budget + (1 / 16 if budget < 1 else 0)
    else:
        full = min(1.0, budget / length)
        read = full * (2 - full) + (1 - full) ** 2 / 16
    selecting = weights + (everything * read + windows) / EXACT
    most = weights + windows / EXACT
    return everything / before, (everything + windows) / before, before / exact, before / min(selecting, exact), before / most


def slow_weights(model):
    """A sentence on a model whose weights are of types that llama.cpp multiplies slowly, or None."""
    measured = {label: count for label, count in model.weights.items() if label in TIMES}
    total = sum(measured.values())
    if total < 0.5 * sum(model.weights.values()):
        return None  # what most of it would gain was not measured
    fastest, times = min(TIMES, key=TIMES.get), sum(count * TIMES[label] for label, count in measured.items()) / total
    if times < 1.5:
        return None
    most = max(measured, key=measured.get)
    return (f"Its weights are {most} for the most part. llama.cpp takes {times:.1f} times as long to multiply by them as by {fastest}. Made again from the original in that\n"
            f"type, or by `requantize` (which rounds a second time), the model would reach its first token sooner, with this library or without.")


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("model", type=pathlib.Path, help="a GGUF file; of a model in parts, the first")
    parse.add_argument("--budget", default="1024", help="past keys that selection keeps for each KV head, or with a point a share of the past")
    parse.add_argument("--weights", action="store_true", help="only whether its weights are of a slow type")
    flags = parse.parse_args()
    try:
        flags.budget = budgets.read(flags.budget)
    except ValueError as error:
        sys.exit(f"estimate.py: --budget: {error}")
    try:
        model = Model(flags.model)
    except OSError as error:
        sys.exit(f"estimate.py: cannot read {flags.model}: {error.strerror}")
    except Bad as error:
        sys.exit(f"estimate.py: {flags.model}: {error}")
    slow = slow_weights(model)
    if flags.weights:
        if slow:
            print(slow)
        return
    count = sum(1 for heads, all_of_it in zip(model.kv_heads, model.sees_all) if heads and all_of_it)
    print(f"{flags.model.name}: {model.layers} layers, {count} of them see the whole text"
          + (f", others {model.window} tokens" if model.window else "")
          + f"; {max(model.q_heads)} query heads, {max(model.kv_heads)} KV heads of {model.k_dim}; context {model.context:,}")
    rows = [("tokens", "attention", "that grows", "exact", f"selecting {flags.budget:,}", "at most")]
    exact_up_to = 0  # selection gains little there
    for length in [length for length in LENGTHS if not model.context or length <= model.context] or [model.context]:
        grows, share, exact, selecting, most = estimate(model, length, flags.budget)
        if selecting < WORTH_SELECTING * exact:
            exact_up_to = length
        rows.append((f"{length:,}", f"{100 * share:.0f} %", f"{100 * grows:.0f} %", f"{exact:.2f}x", f"{selecting:.2f}x", f"{most:.2f}x"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    print("attention: its share of llama.cpp's time; that grows: of layers that see the whole text. Then times as fast to the\n"
          "first token: this library's exact attention, selection, and attention of those layers for nothing. Estimated from\n"
          "rates of one machine; check.sh without --estimate measures yours.")
    if exact_up_to:
        print(f"Up to {exact_up_to:,} tokens selection is less than a tenth faster than exact attention: take exact mode there, which loses nothing.")
    if slow:
        print(slow)


if __name__ == "__main__":
    main()
