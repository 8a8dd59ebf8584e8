#!/usr/bin/env python3
"""How many wrong bindings would their tests let pass?

    mutants.py python [N [SEED]]               of quoka.torch and quoka.transformers; wants what python/test.sh installs
    mutants.py onnxruntime BUILD [N [SEED]]    of the operator; wants what onnxruntime/test.sh installs, and a build folder
                                               of CMake's that has built the target onnxruntime-quoka with Ninja
    mutants.py --list ...                      shows them alone

N mutants (40) are drawn by SEED (1): each is one small mistake in a copy of the sources. Python's are made of the syntax
tree: another comparison, and for or, a condition that is negated, a number that is one more, a statement or a keyword
argument that is left out, two arguments that change places, another value that is returned; those of C++ by
tests/mutants/generate.py. One is killed if a test fails. EQUAL has those that no test can tell from the original, with the
reason. Half a minute a mutant.
"""
import ast
import copy
import hashlib
import os
import pathlib
import random
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "mutants"))
import generate  # noqa: E402

EQUAL = {}  # key: why
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


def changes(node):
    """(operator, function that makes the mistake in a copy of the node) of all that this node can have."""
    if isinstance(node, ast.Compare):
        yield "comparison", lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())
    elif isinstance(node, ast.BoolOp):
        yield "logical", lambda n: setattr(n, "op", ast.And() if isinstance(n.op, ast.Or) else ast.Or())
        for i in range(len(node.values) if len(node.values) > 1 else 0):
            yield "condition", lambda n, i=i: n.values.pop(i)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant):
        yield "arithmetic", lambda n: setattr(n, "op", ARITHMETIC[type(n.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "negation", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returned", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.Call):
        if len(node.args) > 1:
            yield "swapped_arguments", lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])
        for i in range(len(node.keywords)):
            yield "dropped_argument", lambda n, i=i: n.keywords.pop(i)
    for field in ("body", "orelse"):
        for i, statement in enumerate(getattr(node, field, None) or [] if isinstance(node, ast.stmt) else []):
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)) or (
                    isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)):
                yield "dropped_statement", lambda n, f=field, i=i: getattr(n, f).__setitem__(i, ast.Pass())


class Mutant:
    """A file's text with one mistake; `shown` are the lines that differ."""

    def __init__(self, key, file, line, operator, text, shown):
        self.key, self.file, self.line, self.operator, self.text, self.shown = key, file, line, operator, text, shown

    def __str__(self):
        return f"{self.key} {self.file}:{self.line} {self.operator}"


class Python:
    """In a copy of the installed package."""

    SOURCE = HERE / "python" / "src" / "quoka"
    FILES = {"torch.py": ("torch", "transformers"), "transformers.py": ("transformers",)}  # and the tests of each

    def __init__(self):
        self.texts = {file: (self.SOURCE / file).read_text(encoding="utf-8") for file in self.FILES}

    def mutants(self):
        for file, text in self.texts.items():
            yield from self.mutants_of(file, text)

    @staticmethod
    def mutants_of(file, text):
        tree, counts = ast.parse(text), {}
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        inside = {id(n) for f in functions for statement in f.body for n in ast.walk(statement)} | {id(f) for f in functions}
        for at, node in enumerate(ast.walk(tree)):
            for which, (operator, _) in enumerate(changes(node) if id(node) in inside else ()):
                copied = copy.deepcopy(tree)
                changed = list(ast.walk(copied))[at]
                before = ast.unparse(node)
                list(changes(changed))[which][1](changed)
                after = ast.unparse(ast.fix_missing_locations(changed))
                content = f"{file}|{operator}|{before}|{after}"
                counts[content] = counts.get(content, 0) + 1
                key = hashlib.sha256(f"{content}|{counts[content]}".encode()).hexdigest()[:10]
                old, new = before.splitlines(), after.splitlines()
                shown = [f"- {x.strip()}" for x in old if x not in new][:2] + [f"+ {x.strip()}" for x in new if x not in old][:2]
                yield Mutant(key, file, getattr(node, "lineno", 0), operator, ast.unparse(copied), shown)

    def state_of(self, folder, mutant):
        import quoka

        package = pathlib.Path(folder, "quoka")
        shutil.copytree(pathlib.Path(quoka.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in self.texts.items():
            (package / file).write_text(mutant.text if mutant and file == mutant.file else text, encoding="utf-8")
        return state_by((f"python/tests/test_{which}.py" for which in self.FILES[mutant.file if mutant else "torch.py"]),
                        cwd=folder, PYTHONPATH=folder)


class Onnxruntime:
    """In a copy of the operator's sources, built as the build folder builds them."""

    SOURCE = HERE / "onnxruntime"

    def __init__(self, build=None):
        self.texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(self.SOURCE.glob("*.[hc]pp"))}
        self.build = build

    def mutants(self):
        for name, text in self.texts.items():
            for m in generate.of_header(name, text):
                if m.kind != "returned":
                    yield Mutant(m.key, name, m.line, m.operator, generate.replaced(text, m),
                                 [f"- {generate.squeeze(m.old)}", f"+ {generate.squeeze(m.new)}"])

    def state_of(self, folder, mutant):
        for name, text in self.texts.items():
            pathlib.Path(folder, name).write_text(mutant.text if mutant and name == mutant.file else text, encoding="utf-8")
        commands = subprocess.run(["ninja", "-C", self.build, "-t", "commands", "onnxruntime-quoka"], check=True,
                                  capture_output=True, text=True).stdout.splitlines()
        compile_, link = ([one for one in commands if word in one][-1] for word in ("operator.cpp.o -c", "libonnxruntime-quoka.so"))
        words = [*shlex.split(compile_)[:-1], "-O0", f"{folder}/operator.cpp"]  # it compiles in half the time
        output = words[words.index("-o") + 1]
        words[words.index("-o") + 1] = f"{folder}/operator.o"
        if subprocess.run(words, cwd=self.build, capture_output=True).returncode:
            return "no C++"
        library = f"{folder}/mutant.so"
        link = link.replace(output, f"{folder}/operator.o").replace("examples/bindings/onnxruntime/libonnxruntime-quoka.so", library)
        subprocess.run(link.replace(" libonnxruntime-quoka.so", f" {library}"), shell=True, cwd=self.build, check=True)
        return state_by(["onnxruntime/tests/test_operator.py"], QUOKA_ONNXRUNTIME_LIBRARY=library)


def state_by(tests, cwd=None, **environment):
    for test in tests:
        try:
            done = subprocess.run([sys.executable, "-B", "-W", "ignore", str(HERE / test), "--failfast"], cwd=cwd, capture_output=True,
                                  timeout=900, env=os.environ | environment)
        except subprocess.TimeoutExpired:
            return "killed"
        if done.returncode:
            return "killed"
    return "alive"


def main():
    listed, arguments = "--list" in sys.argv, [x for x in sys.argv[1:] if x != "--list"]
    if not arguments or arguments[0] not in ("python", "onnxruntime"):
        sys.exit(__doc__)
    door = Python() if arguments.pop(0) == "python" else Onnxruntime(None if listed else arguments.pop(0))
    count, seed = [int(x) for x in arguments] + [40, 1][len(arguments):]
    possible = list(door.mutants())
    drawn = random.Random(seed).sample(possible, min(count, len(possible)))
    print(f"{len(drawn)} of {len(possible)} mutants", flush=True)
    survived = 0
    for m in drawn if listed else [None, *(m for m in drawn if m.key not in EQUAL)]:
        state = ""
        if not listed:
            with tempfile.TemporaryDirectory() as folder:
                state = door.state_of(folder, m)
            if m is None:
                if state != "alive":
                    sys.exit("without a mutant the tests fail or do not compile")
                continue
            survived += state == "alive"
        print(f"{state:7s} {m}", *(m.shown if state in ("", "alive") else ()), sep="\n    ", flush=True)
    sys.exit(f"{survived} of {len(drawn)} are alive" if survived else 0)


if __name__ == "__main__":
    main()
