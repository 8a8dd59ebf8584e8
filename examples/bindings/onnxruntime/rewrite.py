#!/usr/bin/env python3
"""Puts quoka's GroupQueryAttention in the place of com.microsoft's in an .onnx file.

    rewrite.py model.onnx model.quoka.onnx                                    exact
    rewrite.py model.onnx out.onnx --preset recommended --budget 1024         selection, from the second layer on

Write beside the original: weights that lie in files of their own stay where they are. A node that asks for what the operator
does not do is left as it is, and named with the reason. Needs the package onnx.
"""
import argparse
import pathlib
import sys

import onnx
from onnx import helper

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import budget as budgets  # noqa: E402

DOMAIN, OPERATOR = "quoka", "GroupQueryAttention"
# Attributes of com.microsoft's operator: those kept as they are, and those that must have this
# value.
KEPT = {"num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "causal", "do_rotary", "rotary_interleaved", "smooth_softmax"}
ONLY = {"kv_cache_bit_width": 0, "qk_output": 0, "sliding_window_cache": 0, "k_quant_type": b"NONE", "v_quant_type": b"NONE"}
# Attributes that matter only with inputs that are refused, or on other devices.
DROPPED = {"qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"}
INPUTS = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache", "position_ids",
          "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens"]
REFUSED = {"k_scale", "v_scale", "q_norm_weight", "k_norm_weight"}
SELECTION = {"preset", "budget", "chunk", "min_past", "decode"}
OWN = SELECTION | {"arithmetic", "threads"}


def obstacle(node):
    """Why the operator cannot stand for this node; None: it can."""
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name in ONLY and value != ONLY[attribute.name]:
            return f"{attribute.name} is {value}, but must be {ONLY[attribute.name]}"
        if attribute.name not in KEPT | ONLY.keys() | DROPPED:
            return f"an attribute {attribute.name}, which is not known"
    for name, value in zip(INPUTS, node.input):
        if value and name in REFUSED:
            return f"an input {name}"
    if len(node.input) > len(INPUTS):
        return f"{len(node.input)} inputs, but {len(INPUTS)} are known"
    if any(node.output[3:]):
        return "an output output_qk"
    return None


def could_select(node):
    """Whether calls of this node may select: with a window, a bias, without causality or without presents all are exact."""
    values = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    biased = len(node.input) > INPUTS.index("attention_bias") and node.input[INPUTS.index("attention_bias")] != ""
    return values.get("local_window_size", -1) < 0 and values.get("causal", 1) == 1 and not biased and len(node.output) > 2 and all(node.output[1:3])


def graphs(graph):
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from graphs(inner)


def nodes_of(model):
    return [node for part in [*(graph.node for graph in graphs(model.graph)), *(one.node for one in model.functions)] for node in part]


def rewrite(model, dense_layers=0, **attributes):
    """Changes the model. The first `dense_layers` of the nodes that could select get no attributes
    of selection, nor do those that could not.
    -> ([name of those replaced], [(name, why not)])"""
    unknown = attributes.keys() - OWN
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no attribute of the operator; those are {', '.join(sorted(OWN))}")
    if isinstance(dense_layers, bool) or not isinstance(dense_layers, int) or dense_layers < 0:
        raise ValueError(f"dense_layers is {dense_layers!r}, but must be a whole number from 0 on")
    if "budget" in attributes:
        budgets.checked(attributes["budget"])
    replaced, left, before = [], [], 0  # before: how many earlier nodes could select
    for nodes, imports in [(graph.node, model.opset_import) for graph in graphs(model.graph)] + [(one.node, one.opset_import) for one in model.functions]:
        for i, node in enumerate(nodes):
            if (node.domain, node.op_type) != ("com.microsoft", OPERATOR):
                continue
            name = node.name or node.output[0]
            why = obstacle(node)
            if why:
                left.append((name, why))
                continue
            kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name in KEPT}
            selects = could_select(node) and before >= dense_layers
            before += could_select(node)
            own = {key: value for key, value in attributes.items() if selects or key not in SELECTION}
            nodes[i].CopyFrom(helper.make_node(OPERATOR, node.input, node.output[:3], name=node.name, domain=DOMAIN, **kept, **own))
            replaced.append(name)
            for where in {id(imports): imports, id(model.opset_import): model.opset_import}.values():
                if not any(one.domain == DOMAIN for one in where):
                    where.append(helper.make_opsetid(DOMAIN, 1))
    return replaced, left


def whole_from(least):
    def parse(text):
        if not text.strip().lstrip("+-").isdecimal() or int(text) < least:
            raise ValueError(f"{text} is not a whole number from {least} on")
        return int(text)
    return parse


def one_of(*names):
    def parse(text):
        if text not in names:
            raise ValueError(f"{text} is none of {', '.join(names)}")
        return text
    return parse


# The command line: how each value is read.
READ = {"preset": one_of("recommended", "balanced", "paper"), "budget": budgets.read, "chunk": whole_from(1), "min_past": whole_from(0),
        "dense_layers": whole_from(0), "threads": whole_from(0),
        "arithmetic": one_of("automatic", "float", "bf16", "int8")}


def option(name):
    return "--" + name.replace("_", "-")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("to", type=pathlib.Path)
    parser.add_argument("--preset", help="select keys: recommended, balanced or paper; without it attention is exact")
    parser.add_argument("--budget", help="keys for each KV head, or with a point a share of the past, 1.0 all of it (without: as many as the text asks for; paper: 1024)")
    parser.add_argument("--chunk", help="queries that select together (128)")
    parser.add_argument("--min-past", help="fewer keys before a chunk: exact (0)")
    parser.add_argument("--decode", action="store_const", const=1, help="single queries select, too, and calls of fewer than 64 (or --chunk, if less)")
    parser.add_argument("--dense-layers", help="how many of the first layers that could select stay exact (1)")
    parser.add_argument("--arithmetic", help="of chunks' products (automatic: no more rounding than the cache's type has)")
    parser.add_argument("--threads", help="of the session's threads that attention uses at most (as many as there are processors)")
    args = parser.parse_args()
    wrong = []  # all of it at once
    for name, read in READ.items():
        try:
            if getattr(args, name) is not None:
                setattr(args, name, read(getattr(args, name)))
        except ValueError as error:
            wrong.append(f"{option(name)}: {error}")
    own = {name: getattr(args, name) for name in ("preset", "budget", "chunk", "min_past", "decode", "arithmetic", "threads")
           if getattr(args, name) is not None}
    stray = own.keys() & SELECTION - {"preset"} | ({"dense_layers"} if args.dense_layers is not None else set())
    if stray and args.preset is None:
        wrong.append(f"{', '.join(map(option, sorted(stray)))} without --preset, which says that keys are selected")
    if not args.model.is_file():
        wrong.append(f"there is no file {args.model}")
    if not args.to.resolve().parent.is_dir():
        wrong.append(f"there is no folder {args.to.resolve().parent}")
    if args.to.is_dir():
        wrong.append(f"{args.to} is a folder, but must be a file")
    if args.to.resolve() == args.model.resolve():
        wrong.append(f"{args.to} is the original, which stays as it is")
    if wrong:
        parser.error("; ".join(wrong))
    try:
        model = onnx.load(args.model, load_external_data=False)
    except Exception as error:  # noqa: BLE001  # of protobuf's, which has no public name
        parser.error(f"{args.model} is not an ONNX model: {error}")
    apart = any(one.data_location == onnx.TensorProto.EXTERNAL for graph in graphs(model.graph) for one in graph.initializer)
    if apart and args.to.resolve().parent != args.model.resolve().parent:
        parser.error(f"the weights lie in files beside {args.model}: write there, too")
    dense = 1 if args.dense_layers is None else args.dense_layers
    replaced, left = rewrite(model, dense, **own)
    for name, why in left:
        print(f"left as it is: {name}: {why}")
    if not replaced:
        done = sum(node.domain == DOMAIN for node in nodes_of(model))
        sys.exit(f"{args.model} has no node com.microsoft::{OPERATOR} that can be replaced; {len(left)} that cannot. Nothing was written"
                 + (f". {done} of its nodes are quoka's: rewrite the original" if done else ""))
    try:
        onnx.save(model, args.to)
    except OSError as error:
        parser.error(f"{args.to} cannot be written: {error.strerror}")
    print(f"{args.to}: {len(replaced)} of {len(replaced) + len(left)} nodes replaced")
    if args.preset:
        nodes = [node for node in nodes_of(model) if node.domain == DOMAIN]
        selecting = sum(any(one.name == "preset" for one in node.attribute) for node in nodes)
        print(f"{selecting} of them select; the others are dense by --dense-layers, or have a window, a bias, no causality or no presents")
        if selecting == 0:
            print(f"no layer selects: --dense-layers is {dense}, and {sum(map(could_select, nodes))} of them could", file=sys.stderr)


if __name__ == "__main__":
    main()
