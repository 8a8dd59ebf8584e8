"""What `decoder ruler` stored in accuracy_*.json, a file per model: means over tasks, and their bootstrap intervals.

A cell is a selector with a budget on a task at a length: an outcome (0 or 1) per sample. Where several models hold a task it
counts once, as their mean. Samples are resampled within each cell (a stratified bootstrap), paired for differences; the sum of a
cell's resampled -1, 0 and 1 is trinomial, so sums are drawn and not samples.
Python's standard library is all it needs.
"""

import collections
import functools
import itertools
import json
import math
import random

TASKS = ["single", "multi_key", "haystack", "multi_value", "multi_query", "vt", "cwe", "fwe"]
RETRIEVAL = TASKS[:6]
RESAMPLES = 10000


def frontier(folder):
    """How many times as fast as dense a prefill is, by (share of the prompt, selector): frontier_*.json. And its tokens.

    Budgets are counts there, shares of the prompt in the results of answers.
    """
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("frontier_*.json"))]
    speeds = {(int(file["budget"]) / e["tokens"], e["selector"]): e["speedup"] for file in files for e in file["results"]}
    return speeds, files[0]["results"][0]["tokens"] if files else None


class Results:
    def __init__(self, folder, pattern="accuracy_*.json"):
        self.files = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
        self.cells = collections.defaultdict(list)  # (selector, budget, task, length): an entry per model
        for file in self.files:
            for entry in file["results"]:
                key = entry["selector"], entry["budget"], entry["task"], entry["length"]
                self.cells[key].append({**entry, "model": file["model"]})

    def values(self, place):
        """The distinct selectors (0), budgets (1), tasks (2) or lengths (3), in the order of the files."""
        return list(dict.fromkeys(key[place] for key in self.cells))

    def selectors(self):
        return self.values(0)

    def budgets(self):
        """The shares of the prompt, ascending; dense has none."""
        return sorted({key[1] for key in self.cells if key[0] != "dense"}, key=float)

    def tasks(self):
        return [task for task in TASKS if task in self.values(2)]

    def lengths(self):
        return sorted(self.values(3))

    def length_of_budgets(self):
        """The length at which the most budgets were run."""
        return max(self.lengths(), key=lambda length: len({key[1] for key in self.cells if key[3] == length}))

    def samples(self):
        counts = {len(entry["exact"]) for entries in self.cells.values() for entry in entries}
        return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"

    def cell(self, selector, budget, task, length):
        return self.cells.get((selector, "1.0" if selector == "dense" else budget, task, length), [])

    def holds(self, selector, budget, tasks, length):
        """Was it asked all of the tasks?"""
        return all(self.cell(selector, budget, task, length) for task in tasks)

    def averaged_tasks(self):
        """The tasks of retrieval that dense attention answers at 95 % or more, all lengths together: what means are over."""
        def answered(task):
            share = self.share("dense", None, [task], [n for n in self.lengths() if self.cell("dense", None, task, n)])
            return share is not None and share >= 0.95
        return [task for task in self.tasks() if task in RETRIEVAL and answered(task)]

    def share(self, selector, budget, tasks, lengths):
        """The mean exact match over tasks and lengths alone, without an interval; None where a cell is missing."""
        cells = [self.cell(selector, budget, task, length) for task, length in itertools.product(tasks, lengths)]
        if not cells or not all(cells):
            return None
        shares = [sum(entry["exact"].count("1") / len(entry["exact"]) for entry in entries) / len(entries) for entries in cells]
        return sum(shares) / len(shares)

    def mean(self, selector, budget, tasks, lengths, minus=None):
        """(mean exact match over tasks and lengths, its interval's ends), less that of the selector `minus`; None where a cell is missing."""
        return self.mean_of(selector, budget, list(itertools.product(tasks, lengths)), minus)

    def mean_of(self, selector, budget, places, minus=None):
        """The same over any (task, length)."""
        strata = self.strata(selector, budget, places, minus)
        return stratified_bootstrap(strata) if strata else None

    def strata(self, selector, budget, places, minus=None):
        """(weight, outcomes) of each cell, less those of `minus` on the same samples; None where a cell is missing."""
        strata = []
        for task, length in places:
            entries = self.cell(selector, budget, task, length)
            if not entries:
                return None
            others = {entry["model"]: entry for entry in self.cell(minus, budget, task, length)} if minus else {}
            for entry in entries:
                outcomes = [int(digit) for digit in entry["exact"]]
                if minus:
                    if entry["model"] not in others:
                        return None
                    outcomes = [a - int(b) for a, b in zip(outcomes, others[entry["model"]]["exact"])]
                strata.append((1.0 / (len(places) * len(entries)), outcomes))
        return strata


@functools.cache
def trinomial(count, plus, minus):
    """Cumulative probabilities of -count .. count: the sum of `count` draws from outcomes, plus / count of which are 1 and minus / count -1."""
    logs = [math.lgamma(k + 1) for k in range(count + 1)]

    def terms(drawn):
        """log of share ** k / k! for k = 0 .. count."""
        share = math.log(drawn / count) if drawn else -math.inf
        return [k * share - logs[k] if k else 0.0 for k in range(count + 1)]

    ups, downs, sames = terms(plus), terms(minus), terms(count - plus - minus)
    probability = [0.0] * (2 * count + 1)
    for up in range(count + 1 if plus else 1):
        base = logs[count] + ups[up]
        for down in range(count + 1 - up if minus else 1):
            probability[count + up - down] += math.exp(base + downs[down] + sames[count - up - down])
    return list(itertools.accumulate(probability))


def stratified_bootstrap(strata, resamples=RESAMPLES):
    """strata: (weight, outcomes of -1, 0 and 1). (weighted mean, 2.5th and 97.5th percentile of its resamples)."""
    rng = random.Random(1)
    total, means = 0.0, [0.0] * resamples
    for weight, outcomes in strata:
        n, plus, minus = len(outcomes), outcomes.count(1), outcomes.count(-1)
        total += weight * (plus - minus) / n
        if plus == n or minus == n or plus + minus == 0:
            means = [mean + weight * (plus - minus) / n for mean in means]
        else:
            sums = rng.choices(range(-n, n + 1), cum_weights=trinomial(n, plus, minus), k=resamples)
            means = [mean + weight * drawn / n for mean, drawn in zip(means, sums)]
    means.sort()
    return total, means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]


def difference(strata, less):
    """The mean of one set of cells less that of another, with its interval: samples are drawn in both."""
    return stratified_bootstrap(strata + [(weight, [-outcome for outcome in outcomes]) for weight, outcomes in less])
