"""quoka as the attention of Hugging Face transformers, 5 and later, on CPUs.

    import quoka.transformers
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="quoka")         # exact
    model.config.quoka = {"mode": "recommended", "budget": 0.125}                           # and selection
    with quoka.transformers.settings(mode="recommended", budget=1024): ...                  # for some calls
    with quoka.transformers.watched() as chosen: ...                                        # what each chunk chose

Give a prompt in one call: the weights then see all tokens at once, and attention cuts it by itself, 128 queries or so
selecting together. Calls that this attention does not support (gradients, dropout, other devices
and types, position biases) go to sdpa, with one warning for each reason.

Settings are the keys of the file that `check.sh` writes for llama.cpp, as far as they mean something here: mode (exact,
recommended, balanced, paper), budget (a count of keys, a share of the past), dense_layers, layer_budgets, min_past, chunk, decode,
min_queries, queries (how many of a chunk choose), arithmetic, threads. A model without settings of
its own has those of the environment: of the file that QUOKA_CONFIG names, and of QUOKA_MODE,
QUOKA_BUDGET and so on, which win.
"""
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import json
import numbers
import os
import threading
import warnings
import weakref

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from . import _core
from . import torch as _operator  # noqa: F401

__all__ = ["Cache", "Chosen", "Settings", "attention_forward", "settings", "watched"]


# ---- settings --------------------------------------------------------------------------------------

ARITHMETICS = ("automatic", "float", "bf16", "int8")
# The backend's; nothing to do here.
OF_OTHERS = {"stats", "quiet", "isa", "sketch", "model"}
# These have no effect without a mode.
OF_SELECTION = ("budget", "dense_layers", "layer_budgets", "chunk", "decode", "min_past", "queries")
# A call with a past and fewer queries, or fewer than `chunk`, is decoding, as single tokens are: speculative decoding
# verifies up to this many at once, and the end of a prompt that is given in parts gains little by selection.
FEW_QUERIES = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a model's attention. Raises ValueError for invalid ones."""
    mode: str = "exact"
    budget: object = None  # None: the preset's
    dense_layers: object = 1  # that many of the first layers that could select attend to everything, or a list of numbers
    layer_budgets: object = dataclasses.field(default_factory=dict)
    min_past: int = 0  # chunks with a shorter past are exact
    chunk: int = 128  # queries that select together
    queries: int = 0  # of these, that choose, of all heads of a KV head together; 0: the preset's
    decode: object = False  # select for single queries, too, and for the FEW_QUERIES that speculative decoding verifies
    min_queries: int = 0  # calls with fewer go to sdpa, if sdpa supports the model
    arithmetic: str = "automatic"
    threads: int = 0

    def __post_init__(self):
        if wrong := list(self._wrong()):
            raise ValueError("quoka: " + "; ".join(wrong))

    def _wrong(self):
        """All invalid settings."""
        if self.mode not in ("exact", "recommended", "balanced", "paper"):
            yield f"mode is {self.mode!r}, but must be exact, recommended, balanced or paper"
        budgets = [("budget", self.budget)]
        if isinstance(self.layer_budgets, dict):
            for layer in self.layer_budgets:
                if not (_is_whole(layer, 0) or (isinstance(layer, str) and layer.isdecimal() and layer == str(int(layer)))):
                    yield f"layer_budgets has {layer!r}, but must have numbers of layers, from 0 on"
            budgets += [(f"the budget of layer {n}", b) for n, b in self.layer_budgets.items()]
        else:
            yield f"layer_budgets is {self.layer_budgets!r}, but must be a dictionary of budgets by a layer's number"
        for name, budget in budgets:
            try:
                _core.State(budget)
            except ValueError as error:
                yield str(error).removeprefix("quoka: ") + (f" ({name})" if name != "budget" else "")
        if self.arithmetic not in ARITHMETICS:
            yield f"arithmetic is {self.arithmetic!r}, but must be one of {', '.join(ARITHMETICS)}"
        if self.decode not in (None, 0, 1):
            yield f"decode is {self.decode!r}, but must be true or false"
        for name, least, most in (("min_past", 0, 10**9), ("chunk", 1, 2**20), ("queries", 0, 2**20), ("threads", 0, 1024), ("min_queries", 0, 2**20)):
            if not _is_whole(getattr(self, name), least) or getattr(self, name) > most:
                yield f"{name} is {getattr(self, name)!r}, but must be a whole number from {least} to {most}"
        dense = self.dense_layers
        if not all(_is_whole(n, 0) for n in (dense if isinstance(dense, (list, tuple)) else [dense])):
            yield f"dense_layers is {dense!r}, but must be a count from 0 on, or a list of layers such as [0, 5]"

    @classmethod
    def of(cls, given):
        """From a dictionary, or the path of a JSON file."""
        if isinstance(given, Settings):
            return given
        if isinstance(given, str):
            given = cls._read(given)
        if not isinstance(given, dict):
            raise ValueError(f"quoka: settings are {given!r}, but must be a dictionary, or the path of a JSON file that holds one")
        names, wrong = {field.name for field in dataclasses.fields(cls)}, []
        for key in given:
            if key not in names | OF_OTHERS:
                nearest = difflib.get_close_matches(str(key), names, 1)
                wrong.append(f"{key!r} is not a setting, but must be one of {', '.join(sorted(names))}"
                             + (f". Is {nearest[0]!r} meant?" if nearest else ""))
        try:
            made = cls(**{key: value for key, value in given.items() if key in names})
        except ValueError as error:
            wrong.append(str(error).removeprefix("quoka: "))
        if wrong:
            raise ValueError("quoka: " + "; ".join(wrong))
        if "mode" not in given and (idle := [key for key in OF_SELECTION if key in given]):
            _warn_once(f"{', '.join(idle)} without a mode: attention is exact; mode recommended, balanced or paper selects keys")
        return made

    @staticmethod
    def _read(path, where=""):
        """The object that a JSON file holds. Raises ValueError."""
        try:
            with open(path, encoding="utf-8") as file:
                given = json.load(file)
        except OSError as error:
            raise ValueError(f"quoka: {where}cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"quoka: {where}{path} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"quoka: {where}{path} holds {given!r}, but must hold an object")
        return given

    @classmethod
    def of_environment(cls):
        """From QUOKA_CONFIG and the variables of its keys."""
        given = {}
        if path := os.environ.get("QUOKA_CONFIG"):  # an empty variable is not set
            given = cls._read(path, "QUOKA_CONFIG: ")
        for key in [field.name for field in dataclasses.fields(cls)]:
            if text := os.environ.get("QUOKA_" + key.upper()):
                try:
                    given[key] = float(text) if text.startswith(".") or text.endswith(".") else json.loads(text)
                except ValueError:
                    given[key] = text
        names = {"QUOKA_" + key.upper() for key in {field.name for field in dataclasses.fields(cls)} | OF_OTHERS} | {"QUOKA_CONFIG"}
        for name in os.environ.keys() - names:
            if name.startswith("QUOKA_") and os.environ[name] and (nearest := difflib.get_close_matches(name, names, 1, 0.8)):
                _warn_once(f"the environment variable {name} is not a setting. Is {nearest[0]} meant?")
        return cls.of(given)

    def selects(self, layer, types=None):
        """Does this layer select, once its past is long enough? types: of the model's layers (config.layer_types); those with
        a window never do, and are not counted among the first ones."""
        if self.mode == "exact" or layer is None:
            return False
        dense = self.dense_layers
        if isinstance(dense, (list, tuple)):
            return layer not in dense
        return (layer if types is None else sum(kind == "full_attention" for kind in types[:layer])) >= dense

    def warn_of_layers(self, count, types=None):
        """For a model with this many layers: the settings' layers that it does not have, and
        whether none selects."""
        if self.mode == "exact":
            return
        listed = self.dense_layers if isinstance(self.dense_layers, (list, tuple)) else []
        for name, layers in (("dense_layers", listed), ("layer_budgets", map(int, self.layer_budgets))):
            if missing := sorted(n for n in layers if n >= count):
                _warn_once(f"{name} names layer {', '.join(map(str, missing))}, but the model's last layer is {count - 1}")
        could = [n for n in range(count) if types is None or types[n] == "full_attention"]
        if not any(self.selects(n, types) for n in could):
            _warn_once(f"no layer selects keys: dense_layers is {self.dense_layers}, and {len(could)} of the model's layers could select")

    def is_decoding(self, q_len, past):
        """Is this call single tokens, or the few of them that speculative decoding verifies?"""
        return q_len == 1 or (past > 0 and q_len < min(self.chunk, FEW_QUERIES))

    def budget_of(self, layer):
        """The budget of a layer: keys or a share."""
        return self.layer_budgets.get(str(layer), self.layer_budgets.get(layer, self.budget))


def _is_whole(value, least):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


_here = contextvars.ContextVar("quoka_settings", default=None)
_of_configs = {}  # id of a config: its settings as they were read, and what they say
_open_scopes = {"settings": [], "watched": []}  # an entry for each such scope that any thread is in


@contextlib.contextmanager
def _scope(name, variable, value):
    token = variable.set(value)
    _open_scopes[name].append(None)
    try:
        yield value
    finally:
        _open_scopes[name].pop()
        variable.reset(token)


def _in_scope(name, variable):
    """The variable's value in this thread, or None: with a warning if another thread is in such a
    scope."""
    value = variable.get()
    if value is None and _open_scopes[name]:
        _warn_once(f"{name}() of another thread or task does not hold in this one. A thread that is to have it runs by "
                   "Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=...)")
    return value


@contextlib.contextmanager
def settings(given=None, **named):
    """In its scope all models that this thread runs have these settings: a dictionary, a file's path, or names."""
    with _scope("settings", _here, Settings.of({**({} if given is None else Settings.of(given).__dict__), **named})):
        yield


def _quoka_of_config(config):
    try:
        return config.__dict__["quoka"]
    except KeyError:
        raise AttributeError(f"{type(config).__name__} has no settings of quoka") from None


def _set_quoka_of_config(config, given):
    if given is not None:
        Settings.of(given)  # refuses what cannot be meant
    config.__dict__["quoka"] = given
    for part in _parts_of_config(config):
        part.quoka = given


def _delete_quoka_of_config(config):
    config.__dict__.pop("quoka", None)
    for part in _parts_of_config(config):
        del part.quoka


def _parts_of_config(config):
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [part for part in parts if isinstance(part, PreTrainedConfig)]


# model.config.quoka: checked when it is set, and set in the configs of a composite model's parts, whose attention reads theirs. As
# transformers' own _attn_implementation is.
PreTrainedConfig.quoka = property(_quoka_of_config, _set_quoka_of_config, _delete_quoka_of_config)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The keys that one chunk of one layer attended to: tokens [first, last) of sequence `batch`,
    over the past [0, first)."""
    layer: int
    batch: int
    first: int
    last: int
    selection: object  # a quoka.Selection of that past; None: all of it

    @property
    def kept_share(self):
        """How much of their attention the queries that chose keep, the mean over heads; None where the mode does not tell (paper)."""
        if self.selection is None:
            return 1.0
        shares = self.selection.kept_shares
        return None if shares is None else float(shares.mean())


_watching = contextvars.ContextVar("quoka_watching", default=None)


@contextlib.contextmanager
def watched():
    """A list to which each call of this thread in its scope adds a Chosen for each chunk of a layer that selects."""
    with _scope("watched", _watching, []) as chosen:
        yield chosen


def _settings_of(module):
    if (here := _in_scope("settings", _here)) is not None:
        return here
    given = getattr(getattr(module, "config", None), "quoka", None)
    if given is None:
        return _of_environment()
    known, said = _of_configs.get(id(module.config)), repr(given)  # a budget of 1 is not one of 1.0
    if known is None or known[0] != said:
        known = _of_configs[id(module.config)] = said, Settings.of(given)
        if (count := getattr(module.config, "num_hidden_layers", None)) is not None:
            known[1].warn_of_layers(count, getattr(module.config, "layer_types", None))
    return known[1]


@functools.cache
def _of_environment():
    return Settings.of_environment()


def _traced_settings(module):
    """The few of them that traced code keeps, which selects nothing: arithmetic, threads,
    min_queries. torch.compile watches the values that are read here, and compiles again if they
    have changed."""
    given = _here.get()
    if given is None:
        given = getattr(module.config, "quoka", None) if hasattr(module, "config") else None
    if given is None or isinstance(given, str):
        mode, *kept = _constant_settings(given)
    elif isinstance(given, Settings):
        mode, *kept = given.mode, given.arithmetic, given.threads, given.min_queries
    else:
        mode = given.get("mode", "exact")
        kept = given.get("arithmetic", "automatic"), given.get("threads", 0), given.get("min_queries", 0)
    if mode != "exact":
        _warn_while_tracing()
    return kept


@torch.compiler.assume_constant_result
def _constant_settings(path):
    """The settings of a file, or of the environment."""
    of = _of_environment() if path is None else Settings.of(path)
    return of.mode, of.arithmetic, of.threads, of.min_queries


@torch.compiler.assume_constant_result
def _warn_while_tracing():
    _warn_once("compiled and traced code selects nothing: its attention is exact")
    return True


# ---- masks -----------------------------------------------------------------------------------------

def _mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
          attention_mask=None, local_size=None, allow_is_causal_skip=True, cache_position=None, **others):
    """None where queries are the last of the keys' tokens and see what causality allows; else as sdpa has it."""
    queries = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:  # transformers 5.2
        queries = {"cache_position": cache_position}
        q_length = cache_position.shape[0]
        q_offset = None if torch.compiler.is_compiling() else int(cache_position[0])
    at_the_end = not isinstance(q_offset, torch.Tensor) and q_offset is not None and q_offset + q_length == kv_length + kv_offset
    if (allow_is_causal_skip and at_the_end and kv_offset == 0 and local_size is None
            and mask_function is causal_mask_function and _shows_all(attention_mask, kv_length)):
        return None
    return sdpa_mask(batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, **queries,
                     attention_mask=attention_mask, local_size=local_size,
                     allow_is_causal_skip=allow_is_causal_skip and at_the_end, **others)


def _shows_all(mask, kv_length):
    """Does a mask of tokens [batch, kv_length] hide none of them? One that ends sooner hides the others. Traced code cannot look."""
    if mask is None:
        return True
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return mask.shape[1] >= kv_length and bool(mask[:, :kv_length].all())


# ---- attention -------------------------------------------------------------------------------------

TYPES = (torch.float32, torch.float16, torch.bfloat16)
_warned = set()


def _warn_once(reason):
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"quoka: {reason}", stacklevel=3)


def _not_ours(query, key, value, dropout, position_bias):
    """Why this call is sdpa's, or None."""
    if query.device.type != "cpu":
        return f"tensors lie on {query.device.type}"
    if dropout:
        return "there is dropout"
    if position_bias is not None:
        return "there is a position bias"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in TYPES:
        return f"tensors are {query.dtype}, {key.dtype}, {value.dtype}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are wanted (torch.no_grad() in inference)"
    return None


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                      position_bias=None, softcap=None, s_aux=None, sliding_window=None, **kwargs):
    """As transformers calls it: query [batch, q_heads, q_len, dim], key and value [batch, kv_heads, kv_len, dim]; returns
    ([batch, q_len, q_heads, dim], None)."""
    q_len, kv_len = query.shape[2], key.shape[2]
    sees_behind = not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = not sees_behind and attention_mask is None
    if kwargs.pop("output_attentions", False):
        _warn_once("there are no attention weights (output_attentions): set_attn_implementation('eager') has them")

    def by_sdpa():
        mask = attention_mask
        if causal and (1 < q_len < kv_len or (sliding_window is not None and sliding_window < kv_len)):
            # sdpa would take the first keys for theirs, and has no window.
            mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
            if sliding_window is not None:
                mask = mask.triu(kv_len - q_len - sliding_window + 1)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling,
                                      is_causal=is_causal, position_bias=position_bias, softcap=softcap, **kwargs)

    if (reason := _not_ours(query, key, value, dropout, position_bias)) is not None:
        for there, name in ((s_aux, "attention sinks"), (softcap, "a soft-cap")):
            if there is not None:
                raise ValueError(f"quoka: {reason}, and this model has {name}, which sdpa does not know")
        _warn_once(f"{reason}: attention is sdpa's")
        return by_sdpa()
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced:
        arithmetic, threads, min_queries = _traced_settings(module)
    else:
        chosen = _settings_of(module)
        arithmetic, threads, min_queries = chosen.arithmetic, chosen.threads, chosen.min_queries
    if q_len < min_queries and s_aux is None and softcap is None:
        return by_sdpa()
    options = {"scale": scaling, "softcap": softcap or 0.0, "arithmetic": arithmetic, "threads": threads}
    sinks = None if s_aux is None else s_aux.detach().float()
    window = 0 if not causal or sliding_window is None else sliding_window
    past = kv_len - q_len
    if attention_mask is not None:
        attention_mask = attention_mask[..., :kv_len]
        if attention_mask.stride(-1) != 1 and kv_len > 1:
            attention_mask = attention_mask.contiguous()
    if traced:
        parts = _parts(key, value, past if causal else kv_len)
        out = torch.ops.quoka.attention(query, *parts, attention_mask, sinks, causal=causal, window=window, **options)
        return out.transpose(1, 2).contiguous(), None
    query, key, value = (x.detach() if x.requires_grad else x for x in (query, key, value))
    out = query.new_empty(query.shape[0], q_len, query.shape[1], value.shape[-1])
    by_head = out.transpose(1, 2)
    layer = getattr(module, "layer_idx", None)
    if (sliding_window is None and chosen.selects(layer, _layer_types(module))
            and (chosen.decode or not chosen.is_decoding(q_len, past)) and _can_select(sees_behind, attention_mask, q_len, kv_len)):
        _select_and_attend(query, key, value, by_head, attention_mask, chosen, layer, sinks, options)
    else:
        own_k, own_v, past_k, past_v = _parts(key, value, past if causal else kv_len)
        _core.attention(query, own_k, own_v, past_k=past_k, past_v=past_v, mask=attention_mask, causal=causal, window=window,
                        sinks=sinks, out=by_head, **options)
    return out, None


def _layer_types(module):
    return getattr(getattr(module, "config", None), "layer_types", None)


def _parts(key, value, past):
    """(own keys, own values, past keys, past values), None where there are none."""
    own = (key[:, :, past:], value[:, :, past:]) if past < key.shape[2] else (None, None)
    return own + ((key[:, :, :past], value[:, :, :past]) if past > 0 else (None, None))


def _can_select(sees_behind, mask, q_len, kv_len):
    """Are the queries the last tokens of the keys, of which each sees none behind itself?"""
    if not sees_behind and (mask is None or (
            mask.dtype == torch.bool and mask.shape[1] == 1 and q_len <= kv_len
            # The chunk is at the end of the keys where its last query sees the last key; not so in a static cache.
            and bool(mask[:, 0, -1, -1].all()) and not _shows_what_is_behind(mask.expand(-1, -1, q_len, -1)))):
        return True
    _warn_once("a cache with room behind the last token, or a mask that is not causal: attention is exact there")
    return False


def _shows_what_is_behind(mask):
    """Does a row of the mask [batch, 1, q_len, kv_len], whose queries are the last tokens, show a key behind its own token?"""
    q_len, kv_len = mask.shape[2:]
    for begin in range(0, q_len, 256):  # what is certainly hidden is not read as a triangle of the whole
        end = min(begin + 256, q_len)
        first, last = kv_len - q_len + begin, kv_len - q_len + end
        rows = mask[:, :, begin:end]
        if bool(rows[..., last:].any()) or bool(rows[..., first:last].triu(1).any()):
            return True
    return False


def _states_of(key, past, how):
    """For each sequence what selection keeps of its keys: the cache's, or made for this call. The choice is the same."""
    layer = getattr(_appended, "layer", lambda: None)()
    if layer is not None and layer.keys is key:
        return layer.states(past, how)
    return [_core.State(**how) for _ in range(key.shape[0])]


def _select_and_attend(query, key, value, out, mask, chosen, layer, sinks, options):
    """One sequence after the other, `chunk` queries at a time."""
    q_len, kv_len = query.shape[2], key.shape[2]
    how = {"budget": chosen.budget_of(layer), "preset": chosen.mode, "queries": chosen.queries}
    selecting = {"scale": options["scale"], "softcap": options["softcap"], "threads": options["threads"]}
    states = _states_of(key, kv_len - q_len, how) if mask is None else None
    for b in range(query.shape[0]):
        q, k, v, to = query[b:b + 1], key[b:b + 1], value[b:b + 1], out[b:b + 1]
        for begin in range(0, q_len, chosen.chunk):
            end = min(begin + chosen.chunk, q_len)
            first, last = kv_len - q_len + begin, kv_len - q_len + end
            queries, past = q[:, :, begin:end], k[:, :, :first]
            rows = None if mask is None else mask[b if mask.shape[0] > 1 else 0, None, :, begin:end, :last]
            keep = None
            if first >= max(chosen.min_past, 1):
                own = None if rows is not None else k[:, :, first:last]
                if states is not None:
                    keep = _core.select(queries, past, chunk_k=own, state=states[b], **selecting)
                else:
                    keep = _core.select(queries, past, chunk_k=own, mask=rows, **how, **selecting)
            if (watching := _in_scope("watched", _watching)) is not None:
                watching.append(Chosen(layer, b, first, last, keep))
            _core.attention(queries, k[:, :, first:last], v[:, :, first:last], past_k=past if first else None,
                            past_v=v[:, :, :first] if first else None, mask=rows, sinks=sinks, selection=keep,
                            causal=rows is None, out=to[:, :, begin:end], **options)


# ---- a cache ---------------------------------------------------------------------------------------

_appended = threading.local()  # layer: a weak reference to that of the last update(); attention gets its keys next


def _holders(tensor):
    """How many tensors use its memory, one more or less for torch's own bookkeeping; None where this torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


def _holders_of_two():
    whole = torch.empty(2)
    beginning = whole[:1]
    return _holders(beginning)


_ALONE = _holders_of_two()


class _GrowingLayer(DynamicLayer):
    """Keys and values with room behind them: a chunk is written there, where DynamicLayer copies all of them. Beside them
    lies what selection keeps of the keys.

    To others it is a DynamicLayer, whose update() never writes into a tensor that it gave out. So rows of the room are written
    a second time, after crop(), only where no other tensor uses that memory; and a copy of this object has no room of its own."""

    _room = None  # [2][batch, kv_heads, capacity, dim], of which self.keys and self.values are the beginning
    _room_of = None  # id of the object that may write there: not that of a copy of its attributes
    _written = 0  # rows of the room that were given out
    _states = None  # (options, [a State of each sequence]): of the keys in _noted
    _noted = None  # self.keys as update() or crop() left them, and their version

    def update(self, key_states, value_states, *args, **kwargs):
        """As DynamicLayer's."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or (torch.is_grad_enabled() and any(
                x.requires_grad for x in (key_states, value_states, self.keys, self.values))):
            self._room = None  # a graph is made of these tensors: nothing may be written into them afterwards
            return super().update(key_states, value_states, *args, **kwargs)
        length = self.get_seq_length()
        needed = length + key_states.shape[-2]
        self._truncate_states(length)
        if not self._fits(length, needed, key_states, value_states):
            capacity = needed if length == 0 else max(needed, 2 * length)
            room = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (key_states, value_states)]
            if length > 0:
                room[0][:, :, :length], room[1][:, :, :length] = self.keys, self.values
            self._room, self._room_of = room, id(self)
        self._room[0][:, :, length:needed] = key_states
        self._room[1][:, :, length:needed] = value_states
        self.keys, self.values = (x[:, :, :needed] for x in self._room)
        self._written = needed
        self._note()
        _appended.layer = weakref.ref(self)
        return self.keys, self.values

    def states(self, past, how):
        """The State of each sequence, over the first `past` keys at most; new ones if options have
        changed."""
        self._truncate_states(past)
        sequences, of = self.keys.shape[0], repr(how)  # a budget of 1 is not one of 1.0
        if self._states is None or self._states[0] != of or len(self._states[1]) != sequences:
            self._states = of, [_core.State(**how) for _ in range(sequences)]
            self._note()
        return self._states[1]

    def _truncate_states(self, length):
        """Keys from there on are new; all of them where others wrote."""
        if not self._as_noted():
            self._states = None
        for state in self._states[1] if self._states is not None else ():
            state.truncate(length)

    def _note(self):
        self._noted = self.keys, self._version()

    def _as_noted(self):
        """Has nobody but update() and crop() replaced or written the keys?"""
        return self._noted is not None and self._noted[0] is self.keys and self._noted[1] == self._version()

    def _version(self):
        # Tensors of inference_mode() count no writes. There the State looks some keys up, and
        # refuses keys that have changed.
        return None if self.keys.is_inference() else self.keys._version

    def crop(self, *args, **kwargs):
        """As DynamicLayer's."""
        as_noted = self._as_noted()
        super().crop(*args, **kwargs)
        if as_noted:
            self._note()  # what comes next tells the States
        else:
            self._noted = None  # which holds the longer keys

    def __getstate__(self):
        """Copies begin without room, and without what selection keeps."""
        return {**self.__dict__, "_room": None, "_states": None, "_noted": None}

    def _fits(self, length, needed, key_states, value_states):
        """May the rows [length, needed) be written into the room?"""
        if self._room is None or self._room_of != id(self):
            return False
        for room, now, new in zip(self._room, (self.keys, self.values), (key_states, value_states)):
            if needed > room.shape[2] or room.shape[:2] != new.shape[:2] or room.dtype != new.dtype:
                return False
            if room.is_inference() and not torch.is_inference_mode_enabled():  # torch refuses to write there
                return False
            # Reordered, repeated or copied elsewhere: then they are no longer the beginning of the room.
            if length > 0 and (now.data_ptr() != room.data_ptr() or now.stride() != room.stride()):
                return False
            # Rows that were given out, and cut off since: others may hold them.
            if length < self._written and (_ALONE is None or _holders(room) > _ALONE):
                return False
        return True

    def reset(self):
        """Empties it; the room is given back. DynamicLayer's of transformers 5.2 keeps its length."""
        self._room = self._states = self._noted = None
        super().reset()
        if self.get_seq_length() > 0:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]


class Cache(DynamicCache):
    """DynamicCache whose layers without a window append in place, and keep 8-bit codes of their keys once they select:
    model.generate(..., past_key_values=Cache(config=...)). crop() cuts these as well; if keys were
    replaced, reordered or written by others, they are made again."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layers = [self._growing(layer) if type(layer) is DynamicLayer else layer for layer in self.layers]
        if getattr(self, "layer_class_to_replicate", None) is DynamicLayer:
            self.layer_class_to_replicate = _GrowingLayer

    @staticmethod
    def _growing(layer):
        grown = _GrowingLayer()
        grown.__dict__.update(layer.__dict__)
        return grown


AttentionInterface.register("quoka", attention_forward)
AttentionMaskInterface.register("quoka", _mask)
