"""Does the table of settings in examples/README.md agree with each door's sources? No setting is
missing from it, or from a door."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def text(path):
    return path.read_text(encoding="utf-8")


def assigned(path, *names):
    """Literals of a Python source, by the names they are assigned to."""
    found = {}
    for one in ast.walk(ast.parse(text(path))):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id in names:
            found[one.targets[0].id] = one.value
    return [found[name] for name in names]


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def table():
    page = text(EXAMPLES / "README.md").split("## Settings at every door\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]
    return rows[1:]


def main():
    rows = table()
    assert len(rows) == 10, rows
    settings = text(EXAMPLES / "bindings" / "ggml" / "settings.cpp")
    plugin = {name: set(re.findall(r'"(\w+)"', re.search(name + r"\{([^}]*)\}", settings)[1])) for name in ("variables", "of_the_file")}
    transformers = EXAMPLES / "bindings" / "python" / "src" / "quoka" / "transformers.py"
    of_transformers = {one.target.id for each in ast.parse(text(transformers)).body if isinstance(each, ast.ClassDef) and each.name == "Settings"
                       for one in each.body if isinstance(one, ast.AnnAssign)}
    of_others, = (ast.literal_eval(one) for one in assigned(transformers, "OF_OTHERS"))
    of_check = set(re.findall(r'"(\w+)"', re.search(r"settings_names\{([^}]*)\}", text(EXAMPLES / "bindings" / "ggml" / "check.cpp"))[1]))
    rewrite = EXAMPLES / "bindings" / "onnxruntime" / "rewrite.py"
    selection, = (ast.literal_eval(one) for one in assigned(rewrite, "SELECTION"))
    attributes = selection | {"arithmetic", "threads"}
    assert "OWN = SELECTION | {\"arithmetic\", \"threads\"}" in text(rewrite)
    options = set(re.findall(r'add_argument\("(--[a-z-]+)"', text(rewrite)))
    operator = set(re.findall(r'node\.(?:text|whole|budget|has)\("(\w+)"', text(EXAMPLES / "bindings" / "onnxruntime" / "attributes.hpp")))
    c = set(re.findall(r"\w+", text(ROOT / "include" / "quoka" / "c.h")))

    in_table = {"variables": set(), "keys": set(), "options": set(), "attributes": set()}
    for setting, _, here, onnx, of_c in rows:
        for name in spans(here):
            in_table["variables" if name.startswith("QUOKA_") else "keys"].add(name)
        for name in spans(onnx):
            in_table["options" if name.startswith("--") else "attributes"].add(name)
        for name in spans(of_c):
            assert name in c, f"{setting}: c.h has no {name}"
    assert in_table["variables"] == {"QUOKA_" + key.upper() for key in in_table["keys"] & plugin["variables"]}, in_table["variables"]
    own = {"stats", "quiet", "isa", "sketch", "model", "min_queries"}  # of the plug-in
    assert in_table["keys"] == (plugin["variables"] | plugin["of_the_file"]) - own, in_table["keys"]
    assert in_table["keys"] == of_transformers - own, of_transformers
    # transformers reads the plug-in's files and those of check, and takes note of every setting there.
    others = plugin["variables"] | plugin["of_the_file"] | of_check
    assert len(of_check) > 1 and others - {"config"} <= of_transformers | set(of_others), others
    assert in_table["options"] == options, options
    assert in_table["attributes"] == attributes, attributes
    assert attributes <= operator, attributes - operator

    # Values by name.
    values = {setting: spans(cells) for setting, cells, *_ in rows}
    presets, arithmetics = values["what selects keys"], values["what products are computed in"]
    assert set(presets) | {"exact"} == set(re.findall(r'"(\w+)"', re.search(r"modes\[\] = \{([^}]*)\}", settings)[1])), presets
    assert arithmetics == list(ast.literal_eval(assigned(transformers, "ARITHMETICS")[0])), arithmetics
    header = text(ROOT / "include" / "quoka" / "attention" / "arithmetic.hpp")
    assert arithmetics == re.findall(r'"(\w+)"', re.search(r"names\[\] = \{([^}]*)\}", header)[1]), arithmetics
    for name, wanted in (("preset", presets), ("arithmetic", arithmetics)):
        given = re.search(rf'"{name}": one_of\(([^)]*)\)', text(rewrite))[1]
        assert re.findall(r'"(\w+)"', given) == wanted, (name, given)


if __name__ == "__main__":
    main()
