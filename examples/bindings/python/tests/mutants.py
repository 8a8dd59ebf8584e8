#!/usr/bin/env python3
"""How many wrong packages would the tests of quoka.torch and quoka.transformers let pass?

    mutants.py [N [SEED]]    N mutants (40) drawn by SEED (1): each is one small mistake in a copy of the installed package
    mutants.py --list [N [SEED]]

A mutant is made of the syntax tree: another comparison, and for or, a condition that is negated, a number that is one more,
a statement or a keyword argument that is left out, two arguments that change places, another value that is returned.
It is killed if a test fails. EQUAL has those that no test can tell from the original, with the reason.
Wants what test.sh installs; half a minute a mutant.
"""
import ast
import copy
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "quoka"
TESTS = {"torch.py": ("torch", "transformers"), "transformers.py": ("transformers",)}
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


def mutants_of(file, text):
    """(key, line, operator, text with the mistake)"""
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = {id(n) for f in functions for statement in f.body for n in ast.walk(statement)} | {id(f) for f in functions}
    found, counts = [], {}
    for at, node in enumerate(ast.walk(tree)):
        if id(node) not in inside:
            continue
        for which, (operator, _) in enumerate(changes(node)):
            copied = copy.deepcopy(tree)
            changed = list(ast.walk(copied))[at]
            line = getattr(node, "lineno", 0)
            before = ast.unparse(node)
            list(changes(changed))[which][1](changed)
            after = ast.unparse(ast.fix_missing_locations(changed))
            content = f"{file}|{operator}|{before}|{after}"
            counts[content] = counts.get(content, 0) + 1
            key = hashlib.sha256(f"{content}|{counts[content]}".encode()).hexdigest()[:10]
            found.append((key, file, line, operator, ast.unparse(copied), before, after))
    return found


def difference(before, after):
    """The lines that only one of both has."""
    old, new = before.splitlines(), after.splitlines()
    return [f"- {x.strip()}" for x in old if x not in new][:2] + [f"+ {x.strip()}" for x in new if x not in old][:2]


def run(folder, which):
    done = subprocess.run([sys.executable, "-B", "-W", "ignore", str(HERE / f"test_{which}.py"), "-f"], cwd=folder,
                          env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, timeout=900)
    return done.returncode == 0, done.stderr


def main():
    arguments = [x for x in sys.argv[1:] if x != "--list"]
    count, seed = [int(x) for x in arguments] + [40, 1][len(arguments):]
    texts = {file: (SOURCE / file).read_text(encoding="utf-8") for file in TESTS}
    possible = [m for file, text in texts.items() for m in mutants_of(file, text)]
    drawn = random.Random(seed).sample(possible, min(count, len(possible)))
    print(f"{len(drawn)} of {len(possible)} mutants", flush=True)
    if "--list" in sys.argv:
        for key, file, line, operator, _, before, after in drawn:
            print(f"{key} {file}:{line} {operator}", *difference(before, after), sep="\n    ")
        return
    import quoka

    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder, "quoka")
        shutil.copytree(pathlib.Path(quoka.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in texts.items():
            (package / file).write_text(text, encoding="utf-8")
        for which in TESTS["torch.py"]:
            passed, said = run(folder, which)
            if not passed:
                sys.exit(f"the tests fail without a mutant:\n{said}")
        for key, file, line, operator, text, before, after in drawn:
            if key in EQUAL:
                continue
            (package / file).write_text(text, encoding="utf-8")
            try:
                alive = all(run(folder, which)[0] for which in TESTS[file])
            except subprocess.TimeoutExpired:
                alive = False
            (package / file).write_text(texts[file], encoding="utf-8")
            survived += alive
            print(f"{'alive' if alive else 'killed':7s} {key} {file}:{line} {operator}", flush=True)
            if alive:
                print("    " + "\n    ".join(difference(before, after)), flush=True)
    sys.exit(f"{survived} of {len(drawn)} are alive" if survived else 0)


main()
