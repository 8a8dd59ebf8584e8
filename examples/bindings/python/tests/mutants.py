#!/usr/bin/env python3
"""How many wrong packages would the tests of quoka.torch and quoka.transformers let pass?

    mutants.py            each mutant: one small mistake in a copy of the installed package, then the tests it names
    mutants.py --check    does every mutant still fit its source line?

A mutant is killed if a test fails. Wants what test.sh installs; a quarter of an hour.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "quoka"
MUTANTS = [  # file, what is there, what is there instead, tests
    ("torch.py", "lists=lists, counts=counts, block=block", "lists=lists, counts=None, block=block", "torch Operator.test_lists"),
    ("torch.py", "counts=counts, block=block", "counts=counts", "torch Operator.test_lists"),
    ("torch.py", '"libtorch_cpu.so"', '"libtorch_none.so"', "torch Operator.test_calls_run_in_torchs_threads"),
    ("torch.py", "(v, past_v, v_pages)", "(q,)", "torch Operator.test_is_attention"),
    ("torch.py", "(v, past_v, v_pages)", "(v, past_v)", "torch Operator.test_pages"),
    ("torch.py", "lengths=lengths, mask", "lengths=lengths - 1, mask", "torch Operator.test_pages"),
    ("transformers.py", 'types[:layer])', 'types[:layer + 1])', "transformers Selects"),
    ("transformers.py", 'kind == "full_attention"', 'True', "transformers Selects"),
    ("transformers.py", '"queries": chosen.queries', '"queries": 0', "transformers Selects"),
    ("transformers.py", '("queries", 0), ', '', "transformers Selects.test_settings"),
    ("transformers.py", 'given[key] = json.loads(text)', 'given.setdefault(key, json.loads(text))',
     "transformers Selects.test_settings_of_the_environment"),
    ("transformers.py", 'if given is None:\n        return _of_environment()', 'if not given:\n        return _of_environment()',
     "transformers Selects.test_settings_of_the_environment"),
    ("transformers.py", 'Chosen(layer, b, first, last, keep)', 'Chosen(layer, 0, first, last, keep)', "transformers Selects"),
    ("transformers.py", 'variable.reset(token)', 'pass', "transformers Selects"),
    ("transformers.py", 'first > chosen.min_past and', '', "transformers Selects"),
    ("transformers.py", 'q_offset + q_length == kv_length + kv_offset', 'True', "transformers Exact"),
    ("transformers.py", 'begin + chosen.chunk, q_len', 'begin + 128, q_len', "transformers Selects"),
    ("transformers.py", 'max(needed, 2 * length)', 'needed', "transformers Caches"),
    ("transformers.py", ' or now.stride() != room.stride()', '', "transformers Caches"),
    ("transformers.py", '    _room = None  #', '    _room = []  #', "transformers Caches"),
    ("transformers.py", '(1 < q_len < kv_len or', '(False or', "transformers Exact"),
    ("transformers.py", '"softcap": softcap or 0.0', '"softcap": 0.0', "transformers Exact"),
    ("transformers.py", 'said = _of_configs.get(id(module.config)), repr(given)', 'said = _of_configs.get(id(module.config)), given',
     "transformers KeptStates"),
    ("transformers.py", 'layer is not None and layer.keys is key', 'layer is not None', "transformers KeptStates"),
    ("transformers.py", 'return layer.states(past, how)', 'pass', "transformers KeptStates"),
    ("transformers.py", 'state=states[b]', 'state=states[0]', "transformers KeptStates"),
    ("transformers.py", 'self._truncate_states(length)', 'pass', "transformers KeptStates"),
    ("transformers.py", 'self._truncate_states(past)', 'pass', "transformers KeptStates"),
    ("transformers.py", 'self._note()  # what', 'pass  # what', "transformers KeptStates"),
    ("transformers.py", 'if as_noted:', 'if True:', "transformers KeptStates"),
    ("transformers.py", 'repr(how)', 'how', "transformers KeptStates"),
    ("transformers.py", ' or self._states[0] != of', '', "transformers KeptStates"),
    ("transformers.py", ' or len(self._states[1]) != sequences', '', "transformers KeptStates"),
    ("transformers.py", 'if not self._as_noted():', 'if False:', "transformers KeptStates"),
    ("transformers.py", ' and self._noted[0] is self.keys', '', "transformers KeptStates"),
    ("transformers.py", ' and self._noted[1] == self._version()', '', "transformers KeptStates"),
    ("transformers.py", 'None if self.keys.is_inference() else self.keys._version', 'self.keys._version', "transformers KeptStates"),
    ("transformers.py", 'state.truncate(length)', 'pass', "transformers KeptStates"),
    ("transformers.py", '"_states": None, ', '', "transformers KeptStates"),
    ("transformers.py", 'mask = mask.triu(', 'mask.triu(', "transformers Exact"),
    ("transformers.py", ' and not _shows_what_is_behind(mask.expand(-1, -1, q_len, -1))', '', "transformers NotCausal"),
    ("transformers.py", 'bool(rows[..., last:].any()) or ', '', "transformers NotCausal"),
    ("transformers.py", ' or bool(rows[..., first:last].triu(1).any())', '', "transformers NotCausal"),
    ("transformers.py", 'mask.shape[1] >= kv_length and ', '', "transformers NotCausal"),
    ("transformers.py", 'if length < self._written and', 'if False and', "transformers Branches"),
    ("transformers.py", ' or self._room_of != id(self)', '', "transformers Branches"),
    ("transformers.py", 'if room.is_inference() and', 'if False and', "transformers Branches"),
    ("transformers.py", ' or (past > 0 and q_len < min(self.chunk, FEW_QUERIES))', '', "transformers Speculative"),
    ("transformers.py", 'min(self.chunk, FEW_QUERIES)', 'FEW_QUERIES', "transformers Speculative"),
    ("transformers.py", 'if q_len < min_queries and', 'if q_len <= min_queries and', "transformers Speculative"),
    ("transformers.py", 'part.quoka = given', 'pass', "transformers SeenSettings"),
    ("transformers.py", 'del part.quoka', 'pass', "transformers SeenSettings"),
    ("transformers.py", 'Settings.of(given)  # refuses', 'pass  # refuses', "transformers SeenSettings"),
    ("transformers.py", '_open_scopes[name].pop()', 'pass', "transformers SeenSettings"),
    ("transformers.py", 'if value is None and _open_scopes[name]:', 'if False:', "transformers SeenSettings"),
    ("transformers.py", '_warn_while_tracing()\n    return', 'pass\n    return', "transformers Compiled"),
]


def main():
    texts = {file.name: file.read_text(encoding="utf-8") for file in SOURCE.glob("*.py")}
    wrong = [f"{file}: {old!r} is there {texts[file].count(old)} times" for file, old, _, _ in MUTANTS if texts[file].count(old) != 1]
    if wrong or sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(wrong) or 0)
    import quoka

    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder, "quoka")
        shutil.copytree(pathlib.Path(quoka.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new, tests in [("torch.py", "", "", "torch"), ("torch.py", "", "", "transformers"), *MUTANTS]:
            for name, text in texts.items():
                (package / name).write_text(text, encoding="utf-8")
            if old:
                (package / file).write_text(texts[file].replace(old, new), encoding="utf-8")
            which, *names = tests.split()
            run = subprocess.run([sys.executable, "-B", "-W", "ignore", str(HERE / f"test_{which}.py"), "-f", *names], cwd=folder,
                                 env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True)
            if not old:
                if run.returncode != 0:
                    sys.exit(f"the tests fail without a mutant:\n{run.stderr}")
                continue
            survived += run.returncode == 0
            print(f"{'SURVIVED' if run.returncode == 0 else 'killed':9s} {file}: {old!r} -> {new!r}", flush=True)
    sys.exit(f"{survived} survived" if survived else 0)


main()
