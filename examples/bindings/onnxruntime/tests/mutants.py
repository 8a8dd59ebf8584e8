#!/usr/bin/env python3
"""How many wrong operators would the tests let pass?

    mutants.py BUILD            each mutant: one small mistake in a copy of the sources, built as BUILD builds, then the tests it names
    mutants.py BUILD --check    does every mutant still fit its source line, and compile?

BUILD: a build folder of CMake's that has built the target onnxruntime-quoka with Ninja. A mutant is killed if a test fails.
Wants what test.sh installs; ten minutes.
"""
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent
MUTANTS = [  # file, what is there, what is there instead, tests
    ("call.hpp", "const Index len = Index{last[b]} + 1;", "const Index len = Index{last[b]} + 2;", "Node.test_sequences_of_different_lengths"),
    ("call.hpp", "Index count = std::min(q_len, len);", "Index count = q_len;", "Node.test_sequences_of_different_lengths"),
    ("call.hpp", "count = own[b];", "", "Node.test_sequences_of_different_lengths"),
    ("call.hpp", "first_prompt = own == nullptr && q_len == total;", "first_prompt = false;", "Node.test_rotary_positions"),
    ("call.hpp", "ids.as<int64_t>()[b * q_len + i]", "ids.as<int64_t>()[i]", "Node.test_rotary_positions"),
    ("call.hpp", "ids.as<int64_t>()[0] + i", "ids.as<int64_t>()[0]", "Node.test_rotary_positions"),
    ("call.hpp", "(bias.sizes[0] == 1 ? 0 : b * bias.sizes[1] * head)", "0", "Node.test_bias"),
    ("call.hpp", "{bias.sizes[1] * head, head, row}", "{bias.sizes[1] * head, row, row}", "Node.test_bias"),
    ("call.hpp", "k.chunk = all.some_heads(of.q_heads, of.kv_heads);", "k.chunk = all.some_heads(of.q_heads + of.kv_heads, of.kv_heads);", "Node.test_prompts_and_chunks"),
    ("call.hpp", "v.chunk = all.some_heads(of.q_heads + of.kv_heads, of.kv_heads);", "v.chunk = all.some_heads(of.q_heads, of.kv_heads);", "Node.test_prompts_and_chunks"),
    ("call.hpp", "std::max(past_rows(), total)", "total", "Node.test_prompts_and_chunks"),
    ("call.hpp", "data + (b * q_len + begin) * token", "data + b * q_len * token", "Model.test_selection_is_the_same_however_it_is_cut"),
    ("call.hpp", "data + b * of_.kv_heads * head,", "data,", "Node.test_sequences_of_different_lengths"),
    ("call.hpp", "past.data == present.data", "false", "Buffers"),
    ("kernel.hpp", "if (!side->present || side->shared()) continue;", "if (!side->present) continue;", "Buffers"),
    ("kernel.hpp", "if (count > 0)", "if (false)", "Node.test_prompts_and_chunks"),
    ("kernel.hpp", "side->borrowed ? sequence.len() : sequence.past", "sequence.past", "Node.test_borrowed_keys"),
    ("kernel.hpp", "if (call.k.borrowed) return;  // turned where they were cached", "", "Node.test_borrowed_keys"),
    ("call.hpp", "k.borrowed ? len : len - count", "len - count", "Errors.test_lengths"),
    ("call.hpp", "return borrowed && !present ? past : present;", "return present;", "Node.test_borrowed_keys"),
    ("kernel.hpp", "side->past.data + task * side->past.sizes[2] * row", "side->past.data + task * side->present.sizes[2] * row", "Node.test_prompts_and_chunks"),
    ("kernel.hpp", "present_row(call, *side, b, head, sequence.len()), 0,", "present_row(call, *side, b, head, sequence.len()), 1,", "Node.test_sequences_of_different_lengths"),
    ("kernel.hpp", "if (i >= sequence.q_len) return;", "", "Node.test_sequences_of_different_lengths"),
    ("kernel.hpp", "if (turned_q != nullptr) call.q = float_rows(call, turned_q, of_.q_heads);", "", "Node.test_rotary"),
    ("kernel.hpp", "if (turned_k != nullptr) call.k.chunk = float_rows(call, turned_k, of_.kv_heads);", "", "Node.test_rotary_without_present"),
    ("kernel.hpp", ".softcap = of_.softcap,", "", "Node.test_attributes"),
    ("kernel.hpp", "of_.scale == 0 ? std::optional<float>() : of_.scale", "std::optional<float>()", "Node.test_attributes"),
    ("kernel.hpp", ".sliding_window = of_.window,", "", "Node.test_attributes"),
    ("kernel.hpp", ".arithmetic = of_.arithmetic,", ".arithmetic = quoka::Arithmetic::int8,", "Node.test_prompts_and_chunks"),
    ("kernel.hpp", ".causal = of_.causal", ".causal = true", "Node.test_attributes"),
    ("kernel.hpp", "of_.chunk - past % of_.chunk", "of_.chunk", "Node.test_chunks_end_at_multiples"),
    ("kernel.hpp", "past >= of_.min_past", "true", "Model.test_decode_and_min_past"),
    ("kernel.hpp", "one.past.selection = &scratch.selection;", "", "Model.test_selection_of_all_is_exact"),
    ("kernel.hpp", "of_.window == 0 && ", "", "Model.test_window_stays_exact"),
    ("kernel.hpp", "of_.decode || sequence.q_len", "sequence.q_len", "Model.test_decode_and_min_past"),
    ("kernel.hpp", "sequence.q_len >= std::min(of_.chunk, least_that_select)", "sequence.q_len > 1", "Node.test_few_queries_attend_as_single_ones"),
    ("kernel.hpp", "std::min(of_.chunk, least_that_select)", "least_that_select", "Node.test_few_queries_attend_as_single_ones"),
    ("kernel.hpp", "hide_padding(call, b);", "", "Node.test_sequences_of_different_lengths"),
    ("kernel.hpp", "if (sinks) sinks.format->widen(sinks.data, {of_.q_heads}, logits.data());", "", "Node.test_sinks"),
    ("kernel.hpp", "if (!sinks && !of_.smooth) return {};", "if (!sinks) return {};", "Node.test_attributes"),
    ("kernel.hpp", ".mask = call.bias(b)", "", "Node.test_bias"),
    ("kernel.hpp", "free_.pop_back();", "", "Node.test_one_session_in_many_threads"),
    ("rotary.hpp", "interleaved_ ? 1 : half_", "half_", "Node.test_rotary"),
    ("rotary.hpp", "interleaved_ ? 2 : 1", "1", "Node.test_rotary"),
    ("rotary.hpp", "y = x * sin[i] + y * cos[i];", "y = y * cos[i] - x * sin[i];", "Node.test_rotary"),
    ("rotary.hpp", "position * half_ * from", "half_ * from", "Node.test_rotary"),
    ("selecting.hpp", "state.truncate(0);", "", "Model.test_sequences_that_share_a_session Node.test_another_conversation_of_the_same_length"),
    ("ort_threads.hpp", "work(static_cast<int>(worker))", "work(0)", "Node.test_threads Node.test_one_session_in_many_threads"),
    ("operator.cpp", "*inputs = from, *outputs = to;\n      return std::size(from);", "*inputs = from, *outputs = to;\n      return 0;", "Buffers.test_inside_a_model"),
    ("operator.cpp", "for (const Operator* op : {&single, &half})", "for (const Operator* op : {&single})", "Node.test_prompts_and_chunks"),
    ("operator.cpp", "check(api, api.ShapeInferContext_SetOutputTypeShape(&context, 0, sizes));", "return;", "Node.test_output_size"),
    ("attributes.hpp", "all.smooth = node.whole(\"smooth_softmax\", -1, -1, 1) == 1;", "", "Node.test_attributes"),
    ("attributes.hpp", "budget = quoka_examples::share_budget(share);", "budget = quoka_examples::count_budget(16);", "Model.test_budget_as_a_share"),
    ("attributes.hpp", "all.blind = window == 0;", "all.blind = false;", "Node.test_attributes"),
    ("attributes.hpp", "ORT_LOGGING_LEVEL_INFO", "ORT_LOGGING_LEVEL_WARNING", "Node.test_the_log_says_which_nodes_select"),
    ("call.hpp", "total != rows + chunk", "false", "Errors.test_lengths"),
    ("call.hpp", "!first_prompt && len < q_len", "false", "Errors.test_lengths"),
    ("attributes.hpp", "if (!said.insert(quoka::arithmetic_name(asked)).second) return;", "", "Node.test_arithmetic_that_is_no_faster_is_said_once"),
    ("attributes.hpp", "return static_cast<double>(whole);", "return otherwise;", "Errors.test_attributes"),
]


def main():
    build, texts = pathlib.Path(sys.argv[1]), {file.name: file.read_text(encoding="utf-8") for file in SOURCE.glob("*.[hc]pp")}
    wrong = [f"{file}: {old!r} is there {texts[file].count(old)} times" for file, old, _, _ in MUTANTS if texts[file].count(old) != 1]
    if wrong:
        sys.exit("\n".join(wrong))
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", "onnxruntime-quoka"], check=True, capture_output=True, text=True).stdout.splitlines()
    compile_, link = ([one for one in commands if word in one][-1] for word in ("operator.cpp.o -c", "libonnxruntime-quoka.so"))
    survived = 0
    for file, old, new, tests in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                pathlib.Path(folder, name).write_text(text.replace(old, new) if name == file else text, encoding="utf-8")
            words = [*shlex.split(compile_)[:-1], "-O0", shlex.split(compile_)[-1]]  # it compiles in half the time
            output = words[words.index("-o") + 1]
            words[-1], words[words.index("-o") + 1] = f"{folder}/operator.cpp", f"{folder}/operator.o"
            built = subprocess.run(words, cwd=build, capture_output=True, text=True)
            if built.returncode:
                print(f"does not compile: {file}: {new!r}\n{built.stderr[:500]}")
                survived += 1
                continue
            if "--check" in sys.argv:
                continue
            linked = link.replace(output, f"{folder}/operator.o").replace("examples/bindings/onnxruntime/libonnxruntime-quoka.so", f"{folder}/mutant.so")
            linked = linked.replace(" libonnxruntime-quoka.so", f" {folder}/mutant.so")
            subprocess.run(linked, shell=True, cwd=build, check=True)
            done = subprocess.run([sys.executable, "-B", str(HERE / "test_operator.py"), "--failfast", *tests.split()], capture_output=True, text=True, timeout=600,
                                  env=os.environ | {"QUOKA_ONNXRUNTIME_LIBRARY": f"{folder}/mutant.so"})
        killed = done.returncode != 0
        survived += not killed
        print(f"{'killed  ' if killed else 'SURVIVED'} {file}: {old!r} -> {new!r}", flush=True)
    print(f"{survived} of {len(MUTANTS)} survived")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
