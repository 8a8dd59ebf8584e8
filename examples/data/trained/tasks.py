"""The retrieval tasks of the small trained models: RULER's, on token ids instead of text.

After RULER (Hsieh et al. 2024, scripts/synthetic.yaml); the deviations are listed at the end. A sample is a prompt of
exactly `length` tokens, the positions whose logits are the answers, and for each of them the set of right tokens.

VOCABULARY of 512 ids
    1 BOS   3 MARK   4 ASK   5 SET   6 TRACE   7 COMMON   8 FREQUENT      (0, 2 and 9..15 never occur)
    16..207 keys (192; also the variables of "vt")   208..335 values (128)   336..511 noise (176; 336..399 also the 64 words)

PROMPT   BOS context question. The question is the end of the prompt: 1 to 8 tokens, so it lies in the last chunk.

    task         context                                               question                    answers
    single       1 needle  MARK k v                                    ASK k                       at k: {v}
    multi_key    4 needles, 4 keys                                     ASK k                       at k: {v}
    haystack     nothing but needles                                   ASK k                       at k: {v}
    multi_value  4 needles MARK k v1 .. MARK k v4, all of one key      ASK k                       at k: {v1 .. v4}
    multi_query  4 needles, 4 keys                                     ASK k1 ASK k2 ASK k3 ASK k4 at each k: {its v}
    vt           2 chains SET x1 u, SET x2 x1, ..., SET x5 x4          TRACE u x1 x2 x3 x4         at u: {x1}, at x1: {x2}, ...
    cwe          10 common words, each 10 times as often as 40 rare    COMMON                      at COMMON: the 10 words
    fwe          50 words, the r-th in proportion to 1 / r^2           FREQUENT                    at FREQUENT: the first 3

SCORE   For an answer set of size s the model's answer is the s largest logits over the whole vocabulary at that
position: right if that is the set, whatever the order. A sample is exact if all its answers are right; its recall is
the share of right tokens among all its answers. The prompt of "vt" holds the right answers x1 .. x4 already, so one
prefill scores all five: a greedy decoder is exact on just those samples, since it goes wrong at the first wrong one.

DRAWS   All uniform and independent unless said otherwise.
  noise      id 336 + r with probability proportional to 1 / (r + 1), r = 0 .. 175 (Zipf).
  keys, values, variables of a sample: distinct, without replacement (except in "haystack").
  placement  of n needles or statements, 3 tokens each, in a context of C tokens: n different numbers p from
             0 .. C - 2n - 1, sorted; the j-th (from 0) starts at context token p_j + 2j; all else is noise. Every
             placement without overlap is equally likely.
  depth      a number in [0, 1] for the asked needle (multi_query: the first asked, multi_value: the first): its p is
             floor(depth * (C - 2n - 1) + 0.5), the others are drawn from the remaining numbers. Without a depth: uniform.
  haystack   C mod 3 noise tokens, then m = floor(C / 3) needles. The asked key stands once, in needle
             floor(depth * (m - 1) + 0.5); every other needle has a key drawn with replacement from the other 191, and
             every value is drawn with replacement from all 128.
  vt         10 distinct variables, 2 distinct values, 10 statements placed as above. The statements of a chain keep
             their order; which of the 10 places belong to the first chain is a uniform choice of 5. It is the first
             chain that is asked.
  cwe        50 distinct words; each of the first 10 floor(C / 14) times, of the others floor(R / 40) times where R
             tokens remain, and the first R mod 40 of them once more; then the context is shuffled.
  fwe        50 distinct words w_1 .. w_50; w_r floor(C / (r^2 z)) times where z = sum of 1 / r^2 over r = 1 .. 50;
             the tokens still missing one each to w_50, w_49, ..., w_4, again from w_50 if needed; shuffled.
  Depths of sample i of an evaluation: (i mod 40) / 39.

DEVIATIONS from RULER: keys and values are single tokens; the text around is independent Zipf noise in which neither
keys nor values occur; "haystack" is niah_multikey_2 with repeated distractor keys; "vt" has a second chain as a
distractor; where several answers have no order (multi_value, cwe, fwe) they are read as a set at one position instead
of being generated one by one; in "cwe" the share of the words is fixed, not their count, so that all lengths are alike.
"""

import numpy as np

VOCABULARY = 512
BOS, MARK, ASK, SET, TRACE, COMMON, FREQUENT = 1, 3, 4, 5, 6, 7, 8
KEYS = np.arange(16, 208)
VALUES = np.arange(208, 336)
NOISE = np.arange(336, 512)
WORDS = NOISE[:64]
CONTENT = np.arange(16, 512)
NOISE_CUMULATIVE = np.cumsum(1.0 / np.arange(1, len(NOISE) + 1))
DEPTHS = 40

NEEDLE_TASKS = ("single", "multi_key", "haystack", "multi_value", "multi_query", "vt")
WORD_TASKS = ("cwe", "fwe")
TASKS = NEEDLE_TASKS + WORD_TASKS


def noise(rng, count):
    draws = rng.random(count) * NOISE_CUMULATIVE[-1]
    return NOISE[np.searchsorted(NOISE_CUMULATIVE, draws, side="right").clip(max=len(NOISE) - 1)]


def rounded(depth, last):
    return int(depth * last + 0.5)


def places(rng, context, count, depth=None):
    """(starts of `count` triples in a context, ascending, and which of them is the one at `depth`)."""
    room = context - 2 * count
    if room < count:
        raise ValueError(f"{count} needles of 3 tokens do not fit into {context} tokens")
    asked = int(rng.integers(room)) if depth is None else rounded(depth, room - 1)
    others = rng.choice(room - 1, count - 1, replace=False)
    others += others >= asked
    compressed = np.sort(np.append(others, asked))
    return compressed + 2 * np.arange(count), int(np.searchsorted(compressed, asked))


def with_triples(rng, context, starts, triples):
    tokens = noise(rng, context)
    for offset in range(3):
        tokens[starts + offset] = triples[:, offset]
    return tokens


def prompt(context, question):
    return np.concatenate([[BOS], context, question]).astype(np.int64)


def ask_all(keys):
    return np.stack([np.full(len(keys), ASK), keys], axis=1).reshape(-1)


def needles(rng, length, keys, asks, values_each=1, depth=None):
    """`keys` keys with `values_each` needles each in noise; `asks` of them asked.

    Returns (tokens, positions [asks], answers [asks, values_each])."""
    count, context = keys * values_each, length - 1 - 2 * asks
    names = np.repeat(rng.choice(KEYS, keys, replace=False), values_each)
    values = rng.choice(VALUES, count, replace=False) if count <= len(VALUES) else rng.choice(VALUES, count)
    starts, asked_place = places(rng, context, count, depth)
    others = rng.permutation(np.delete(np.arange(count), asked_place))
    starts = starts[np.append(asked_place, others)]  # needle 0 stands at the depth
    triples = np.stack([np.full(count, MARK), names, values], axis=1)
    tokens = prompt(with_triples(rng, context, starts, triples), ask_all(names[::values_each][:asks]))
    return tokens, length - 1 - 2 * np.arange(asks)[::-1], values.reshape(keys, values_each)[:asks]


def haystack(rng, length, asks=1, depth=None):
    context = length - 1 - 2 * asks
    count = context // 3
    shuffled = rng.permutation(KEYS)
    asked, others = shuffled[:asks], shuffled[asks:]
    names, values = rng.choice(others, count), rng.choice(VALUES, count)
    first = int(rng.integers(count)) if depth is None else rounded(depth, count - 1)
    rest = rng.choice(count - 1, asks - 1, replace=False)
    where = np.append(first, rest + (rest >= first)).astype(np.int64)
    names[where] = asked
    triples = np.stack([np.full(count, MARK), names, values], axis=1).reshape(-1)
    tokens = prompt(np.concatenate([noise(rng, context % 3), triples]), ask_all(asked))
    return tokens, length - 1 - 2 * np.arange(asks)[::-1], values[where][:, None]


def variable_tracking(rng, length, chains=2, hops=4):
    links = hops + 1
    count, context = chains * links, length - 1 - 1 - links
    variables = rng.choice(KEYS, count, replace=False).reshape(chains, links)
    values = rng.choice(VALUES, chains, replace=False)
    starts, _ = places(rng, context, count)
    chain_of_place = rng.permutation(np.repeat(np.arange(chains), links))
    order = np.argsort(chain_of_place, kind="stable")  # the places of chain 0, ascending, then of chain 1, ...
    sources = np.concatenate([values[:, None], variables[:, :-1]], axis=1)
    triples = np.stack([np.full(count, SET), variables.reshape(-1), sources.reshape(-1)], axis=1)
    question = np.concatenate([[TRACE], sources[0]])
    tokens = prompt(with_triples(rng, context, starts[order], triples), question)
    return tokens, length - links + np.arange(links), variables[0][:, None]


def common_words(rng, length):
    context, common, rare = length - 2, 10, 40
    words = rng.choice(WORDS, common + rare, replace=False)
    counts = np.full(common + rare, context // (common + rare // 10))
    remaining = context - common * (context // (common + rare // 10))
    counts[common:] = remaining // rare + (np.arange(rare) < remaining % rare)
    return prompt(rng.permutation(np.repeat(words, counts)), [COMMON]), np.array([length - 1]), words[None, :common]


def frequent_words(rng, length):
    context, count = length - 2, 50
    words = rng.choice(WORDS, count, replace=False)
    weights = 1.0 / np.arange(1, count + 1) ** 2
    counts = np.floor(context * weights / weights.sum()).astype(np.int64)
    for i in range(context - counts.sum()):
        counts[count - 1 - i % (count - 3)] += 1
    return prompt(rng.permutation(np.repeat(words, counts)), [FREQUENT]), np.array([length - 1]), words[None, :3]


def make(task, rng, length, depth=None):
    """(tokens int64 [length], positions [answers], right tokens [answers, size of each set])"""
    if task == "single":
        return needles(rng, length, 1, 1, depth=depth)
    if task == "multi_key":
        return needles(rng, length, 4, 1, depth=depth)
    if task == "haystack":
        return haystack(rng, length, depth=depth)
    if task == "multi_value":
        return needles(rng, length, 1, 1, values_each=4, depth=depth)
    if task == "multi_query":
        return needles(rng, length, 4, 4, depth=depth)
    if task == "vt":
        return variable_tracking(rng, length)
    if task == "cwe":
        return common_words(rng, length)
    if task == "fwe":
        return frequent_words(rng, length)
    raise ValueError(f"there is no task {task}; there are {', '.join(TASKS)}")


# ---- packed variants, for training: many questions a prompt -----------------------------------------------------------


def induction(rng, length=64, segment=20):
    """A random segment that comes twice, amid other tokens; every token of the repeat but its first is asked.

    The distance between the two varies: were it fixed, a head with RoPE would find the answer by its distance alone.
    """
    drawn = rng.choice(CONTENT, length - 1 - segment, replace=False)
    part, rest = drawn[:segment], drawn[segment:]
    first, second = np.sort(rng.integers(0, len(rest) + 1, 2))
    tokens = np.concatenate([[BOS], rest[:first], part, rest[first:second], part, rest[second:]]).astype(np.int64)
    return tokens, 1 + second + segment + np.arange(segment - 1), part[1:, None]


def training_sample(task, rng, length, size):
    """The task with up to `size` needles and questions; "needles" mixes single, multi_key and multi_query."""
    if task == "induction":
        return induction(rng, length)
    if task == "needles":
        return needles(rng, length, size, max(1, size // 2))
    if task == "multi_value":
        return needles(rng, length, max(1, size // 4), max(1, size // 8), values_each=4)
    if task == "haystack":
        return haystack(rng, length, max(1, size // 2))
    return make(task, rng, length)
