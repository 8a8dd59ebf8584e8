"""RULER's tasks over essays, with a book in place of the essays, which lm-eval would fetch from a network.

Needles, questions, prompts and scores are lm-eval's own. `metadata` names the book, and says how many samples are drawn:
{"haystack": "emma.txt", "samples": 40}. Where a sentence
ends is found by a rule in place of nltk's trained splitter, which is fetched, too: it only says where needles may stand.
"""

import functools
import pathlib
import re

from lm_eval.tasks.ruler import niah_utils, prepare_niah
from lm_eval.tasks.ruler.common_utils import get_tokenizer, process_results, aggregate_metrics, resolve_tokenizer_name

__all__ = ["process_results", "aggregate_metrics", "single_2", "single_3", "multikey_1", "multivalue", "multiquery"]


@functools.cache
def sentences(text):
    return re.split(r"(?<=[.!?])\s+", text)


def words_of(path):
    return pathlib.Path(path).read_text(encoding="utf-8").split()


def task(value="numbers", **needles):
    def dataset(max_seq_lengths, haystack, samples, **model):
        prepare_niah.cached_sent_tokenize = sentences
        tokenizer = get_tokenizer(resolve_tokenizer_name(model))
        return niah_utils.download_dataset(
            prepare_niah.generate_samples(words_of(haystack), max_seq_length=length, template=niah_utils.TEMPLATE, type_haystack="essay",
                                          type_needle_k="words", type_needle_v=value, num_samples=samples, TOKENIZER=tokenizer, **needles)
            for length in max_seq_lengths)
    return dataset


single_2 = task()
single_3 = task("uuids")
multikey_1 = task(num_needle_k=4)
multivalue = task(num_needle_v=4)
multiquery = task(num_needle_q=4)
