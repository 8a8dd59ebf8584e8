#!/usr/bin/env python3
"""plugin_packages.py WORK LIBRARY GGML [CHECK]: the npm package and the wheel of the ggml backend, used as users do.

LIBRARY: libggml-quoka.so of this machine; GGML: a libggml beside its CPU backends; CHECK: the program, for `python -m quoka check`.
node is asked where there is one, a model measured where models/ has SmolLM2.
"""
import base64
import ctypes
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORK, LIBRARY, GGML, *CHECK = (pathlib.Path(one).resolve() for one in sys.argv[1:5])
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
ARCH = platform.machine()


def make(*arguments):
    return subprocess.run([sys.executable, "-B", ROOT / "examples/packaging/plugin.py", *map(str, arguments)],
                          capture_output=True, text=True)


def check(is_true, what):
    if not is_true:
        sys.exit(f"plugin_packages.py: {what}")


def packages(to):
    made = make("--library", f"{ARCH}={LIBRARY}", "--to", to)
    check(made.returncode == 0, made.stderr)
    npm, wheel = map(pathlib.Path, made.stdout.split())
    return npm, wheel


def refusals():
    of_musl = WORK / "musl.so"
    of_musl.write_bytes(LIBRARY.read_bytes().replace(b"GLIBC_2.", b"OTHER_2."))
    for arguments, reason in (
        ([f"{ARCH}={ROOT / 'LICENSE'}"], f"is not a library for {ARCH}"),
        ([f"{'x86_64' if ARCH == 'aarch64' else 'aarch64'}={LIBRARY}"], "is not a library for"),
        ([f"{ARCH}={GGML}"], "is not libggml-quoka.so"),
        ([f"{ARCH}={of_musl}"], "is not built for glibc"),
        ([f"{ARCH}={WORK / 'none'}"], "no file"),
        ([f"riscv64={LIBRARY}"], "is not ARCH=FILE"),
        ([f"{ARCH}={LIBRARY}", f"{ARCH}={LIBRARY}"], "is given twice"),
    ):
        to = WORK / "refused"
        made = make("--to", to, *(part for one in arguments for part in ("--library", one)))
        check(made.returncode != 0 and reason in made.stderr, f"{arguments}: {made.stderr or 'taken'}")
        check(not to.exists(), f"{arguments}: refused, and yet {to} is there")


def run(command, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("QUOKA_", "GGML_", "PYTHON"))}
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, cwd=WORK / "empty")


def in_python(wheel):
    """From the wheel alone; llama-cpp-python's place is taken by a module that has what load() asks of it."""
    site = WORK / "site"
    with zipfile.ZipFile(wheel) as archive:
        record = {line.split(",")[0]: line.split(",")[1] for line in
                  archive.read(next(name for name in archive.namelist() if name.endswith("RECORD"))).decode().splitlines()}
        check(set(record) == set(archive.namelist()), "RECORD does not list the wheel's files")
        for name, digest in record.items():
            if digest:
                data = hashlib.sha256(archive.read(name)).digest()
                check(digest == "sha256=" + base64.urlsafe_b64encode(data).rstrip(b"=").decode(), f"RECORD: {name}")
        archive.extractall(site)
    (site / "llama_cpp").mkdir()
    (site / "llama_cpp/__init__.py").write_text("")
    (site / "llama_cpp/_ggml.py").write_text(f"import ctypes\nlibggml = ctypes.CDLL({str(GGML)!r}, mode=ctypes.DEFAULT_MODE)\n")

    def python(*lines, **variables):
        return run([sys.executable, "-B", "-c", "\n".join(["import ggml_quoka", *lines])], PYTHONPATH=str(site), **variables)

    said = python("ggml_quoka.load()", "ggml_quoka.load()", "from llama_cpp import _ggml",
                  "print(_ggml.libggml.ggml_backend_dev_count())")
    check(said.returncode == 0 and said.stdout.split() == ["1"] and "exact attention" in said.stderr, f"load(): {said}")
    said = python("ggml_quoka.load(mode='recommended', budget=0.25, dense_layers=[0, 5])", QUOKA_BUDGET="7")
    check('"budget":0.25,"dense_layers":[0,5],"mode":"recommended"' in said.stderr, f"settings: {said}")
    said = python("ggml_quoka.load()", "ggml_quoka.load(mode='paper')")
    check(said.returncode != 0 and "mode came too late" in said.stderr, f"late settings: {said}")
    said = python("import ctypes", "library = ctypes.CDLL(ggml_quoka.path)", "print(library.ggml_backend_init())")
    check(said.stdout.split() == ["0"] and "not loaded: what loads it has no function ggml_" in said.stderr,
          f"loaded without a ggml: {said}")
    said = python("import ctypes", "ggml_quoka.path = '/none.so'", "ggml_quoka.load()")
    check(said.returncode != 0 and "carries no ggml backend: /none.so is not there" in said.stderr, f"no file: {said}")


def in_quokas_wheel():
    """`python -m quoka plugin` and `check` of a wheel that plugin.py put them into. Its module is of no use here: an empty one."""
    source, made = ROOT / "examples/bindings/python/src/quoka", WORK / "quoka_wheels"
    made.mkdir()
    plain = made / f"quoka-1.2.3-cp312-abi3-linux_{ARCH}.whl"
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("quoka/__init__.py", "")
        for name in ("plugin.py", "check.py", "__main__.py"):
            archive.write(source / name, f"quoka/{name}")
        archive.writestr("quoka-1.2.3.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-abi3-linux_{ARCH}\n")
        archive.writestr("quoka-1.2.3.dist-info/RECORD", "quoka/__init__.py,,\nquoka-1.2.3.dist-info/WHEEL,,\n")

    def python(site, *arguments, **variables):
        return run([sys.executable, "-B", "-m", "quoka", *map(str, arguments)], PYTHONPATH=str(site), **variables)

    def unpacked(wheel, name):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(WORK / name)
        return WORK / name

    without = unpacked(plain, "quoka_without")
    said = python(without, "plugin")
    check(said.returncode == 1 and said.stdout == "" and "carries no ggml backend" in said.stderr, f"no library: {said}")
    said = python(without, "chek", SMOLLM2)
    check(said.returncode == 1 and "there is no Python program chek" in said.stderr and "Traceback" not in said.stderr, f"no program: {said}")
    said = python(without, "check", SMOLLM2)
    check(said.returncode == 2 and said.stdout == "" and "carries nothing to check models with" in said.stderr, f"no program: {said}")
    to = WORK / "quoka_with"
    done = make("--library", f"{ARCH}={LIBRARY}", "--into", plain, "--to", to)
    check(done.returncode == 0 and done.stdout.strip() == str(to / plain.name), f"--into: {done}")
    with zipfile.ZipFile(to / plain.name) as archive:
        record = archive.read("quoka-1.2.3.dist-info/RECORD").decode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(LIBRARY.read_bytes()).digest()).rstrip(b"=").decode()
    check(f"quoka/libggml-quoka.so,sha256={digest},{LIBRARY.stat().st_size}\n" in record and "quoka/__init__.py,," in record, record)
    again = make("--library", f"{ARCH}={LIBRARY}", "--into", to / plain.name, "--to", WORK / "quoka_again")  # in place of the one that it has
    check((WORK / "quoka_again" / plain.name).read_bytes() == (to / plain.name).read_bytes(), f"--into twice: {again}")

    site = unpacked(to / plain.name, "quoka_site")
    said = python(site, "plugin")
    check(said.returncode == 0 and said.stdout == f"{site / 'quoka/libggml-quoka.so'}\n", f"plugin: {said}")
    check("was built for version" in said.stderr and "of ggml's backend interface" in said.stderr, f"plugin: {said}")
    cpu = sorted(GGML.parent.glob("libggml-cpu*.so"))[-1]
    said = python(site, "plugin", cpu)
    check(said.returncode == 0 and said.stdout.strip().endswith("libggml-quoka.so"), f"fits: {said}")
    said = python(site, "plugin", GGML.parent / "none.so")
    check(said.returncode == 1 and "cannot be loaded" in said.stderr and "Traceback" not in said.stderr, f"no file: {said}")
    other = site / "quoka/libggml-quoka.so"  # as if it were built for another version
    data = other.read_bytes()
    at = data.index(b"built for version ") + len(b"built for version ")
    other.write_bytes(data[:at] + b"9" + data[at + 1:])
    said = python(site, "plugin", cpu)
    check(said.returncode == 1 and said.stdout == "" and "this backend was built for 9: that ggml does not load it" in said.stderr, f"another ggml: {said}")

    if CHECK:
        checks_models(plain, python, unpacked)

    older = made / f"quoka-1.2.3-cp312-abi3-manylinux_2_1_{ARCH}.manylinux_2_2_{ARCH}.whl"
    shutil.copy(plain, older)
    newer = make("--library", f"{ARCH}={LIBRARY}", "--into", older, "--to", WORK / "quoka_newer").stdout.strip()
    platform = pathlib.Path(newer).name.removeprefix("quoka-1.2.3-cp312-abi3-").removesuffix(".whl")
    check(int(platform.split("_")[2]) >= 17 and platform.endswith(ARCH) and "." not in platform, f"the tag of {newer}")
    with zipfile.ZipFile(newer) as archive:
        check(archive.read("quoka-1.2.3.dist-info/WHEEL").decode().endswith(f"Root-Is-Purelib: false\nTag: cp312-abi3-{platform}\n"), f"WHEEL of {newer}")
        check(archive.read("quoka-1.2.3.dist-info/RECORD").decode().count("dist-info/WHEEL,sha256=") == 1, f"RECORD of {newer}")
    another = made / "quoka-1.2.3-py3-none-any.whl"
    shutil.copy(plain, another)
    for arguments, reason in (
        (["--into", another], "is not a wheel of quoka for Linux"),
        (["--into", WORK / "none.whl"], "is not a wheel"),
        (["--into", to / plain.name], "name another folder"),
        (["--check", LIBRARY], "goes into quoka's wheel"),
        (["--into", plain, "--check", LIBRARY], "is not the program check"),
    ):
        refused = make("--library", f"{ARCH}={LIBRARY}", *arguments, "--to", to)
        check(refused.returncode != 0 and reason in refused.stderr, f"{arguments}: {refused}")


def checks_models(plain, python, unpacked):
    """`python -m quoka check` of a wheel that has the program."""
    made = make("--library", f"{ARCH}={LIBRARY}", "--into", plain, "--check", CHECK[0], "--to", WORK / "quoka_check")
    check(made.returncode == 0, f"--check: {made}")
    site = unpacked(WORK / "quoka_check" / plain.name, "quoka_check_site")
    check(b"libfmt" not in CHECK[0].read_bytes() and b"libstdc++.so" not in CHECK[0].read_bytes(), "the program wants libraries that others may lack")
    ours, model = ["--llama-cpp", GGML.parent], SMOLLM2 if SMOLLM2.is_file() else ROOT / "examples/data/trained/deep.gguf"
    said = python(site, "check", *ours, "--options")
    check(said.returncode == 0 and "--max-perplexity" in said.stdout, f"--options: {said}")
    for arguments, reason in (
        ([], "python -m quoka check MODEL.gguf"),
        (["none.gguf", *ours], "there is no file none.gguf"),
        (["--quick", *ours], "no MODEL.gguf among the arguments"),
        ([model, "--llama-cpp"], "--llama-cpp is without a value"),
        ([model, "--llama-cpp", WORK], "has no libllama"),
        ([model, *ours, "--lenghts", "512", "--quick=1", "none.txt"], "--lenghts is not an option: --options lists them; --quick takes no value; there is no file none.txt"),
        ([model, *ours, "--seed"], "--seed is without a value"),
        (["--compare"], "none is given"),
        (["--compare", WORK], "there is no file"),
    ):
        said = python(site, "check", *arguments)
        check(said.returncode != 0 and reason in said.stdout + said.stderr and "Traceback" not in said.stderr, f"{arguments}: {said}")
    script, module = (ROOT / "examples/bindings/ggml/check.sh").read_text(), (site / "quoka/check.py").read_text()
    of_script = set(re.findall(r"\[(--[a-z-]+)\]=", script)) | set(re.search(r"^flags='(.*)'", script, re.MULTILINE)[1].split())
    of_module = set(re.findall(r'"(--[a-z-]+)"', module[module.index("WITHOUT_VALUE = "):module.index("class Refused")]))
    check(of_script == of_module, f"options of check.sh and of quoka.check: {of_script ^ of_module}")
    said = python(site, "check", "--estimate", model)
    check("Traceback" not in said.stderr and (model is not SMOLLM2 or "30 layers" in said.stdout), f"--estimate: {said}")

    # Libraries without the release in their names, as others build them, beside which llama-server lies.
    other = WORK / "other_llama_cpp"
    other.mkdir()
    for library in GGML.parent.glob("*.so"):
        (other / library.name.replace(".v0.5.0", "")).symlink_to(library)
    (other / "llama-server").write_text("")
    (other / "llama-server").chmod(0o755)
    measured = [model, "--lengths", "128", "--modes", "exact", "--samples", "16", "--questions", "1", "--measure-only", "--out", WORK / "measured", "--threads", "1"]
    said = python(site, "check", *measured, PATH=f"{other}:{os.environ['PATH']}")
    if model is SMOLLM2:
        check(said.returncode == 0 and "not taken" not in said.stderr, f"measured: {said}")
        check("exact" in (WORK / "measured/check.json").read_text(), f"measured: {said}")
    else:
        check("llama.cpp cannot load" in said.stderr, f"not begun: {said}")
    program = site / "quoka/check_files/examples/bindings/ggml/check"  # as if it were built for another release
    program.write_bytes(program.read_bytes().replace(b"libllama.v0.5.0.so", b"libllama.v0.6.0.so"))
    said = python(site, "check", *measured, GGML_DIR=str(other))
    check(said.returncode == 2 and "is of llama.cpp 0.5.0, `check` was built for 0.6.0" in said.stderr, f"another release: {said}")


def in_node(npm):
    with tarfile.open(npm) as tar:
        tar.extractall(WORK / "node_modules/of")
    shutil.move(WORK / "node_modules/of/package", WORK / "node_modules/ggml-quoka")
    package = WORK / "node_modules/ggml-quoka"
    description = json.loads((package / "package.json").read_text())
    check(description["version"] in npm.name, f"{npm} has version {description['version']}")
    library = next(package.glob("lib/linux-*/libggml-quoka.so"))
    check(library.read_bytes() == LIBRARY.read_bytes(), "the package's library is another one")
    if shutil.which("node") is None:
        print("No node here: the package was not imported")
        return
    script = WORK / "empty/app.mjs"
    script.write_text("""import {path, settings} from "ggml-quoka";
settings({mode: "recommended", budget: 0.25, dense_layers: [0, 5]});
console.log(path, process.env.GGML_BACKEND_PATH, process.env.QUOKA_MODE, process.env.QUOKA_BUDGET, process.env.QUOKA_DENSE_LAYERS);
""")
    for own, used in (("", library), ("/mine.so", "/mine.so")):  # a path that was set stays
        said = run(["node", script], **({"GGML_BACKEND_PATH": own} if own else {}))
        check(said.stdout.split() == [str(library), str(used), "recommended", "0.25", "[0,5]"], f"import: {said}")


def main():
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "empty").mkdir(parents=True)
    npm, wheel = packages(WORK / "packages")
    check([one.read_bytes() for one in (npm, wheel)] == [one.read_bytes() for one in packages(WORK / "again")],
          "the same library makes other packages")
    check(b"libggml-base" not in LIBRARY.read_bytes(), "the backend links a ggml by name: no other engine can load it")
    refusals()
    in_python(wheel)
    in_quokas_wheel()
    in_node(npm)


main()
