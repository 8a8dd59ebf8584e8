#!/usr/bin/env python3
"""plugin.py --library ARCH=FILE [--library ARCH=FILE] [--into quoka-*.whl [--check FILE]] --to DIR: the ggml backend as an npm package and as wheels.

    python3 examples/packaging/plugin.py --library x86_64=build/examples/bindings/ggml/libggml-quoka.so --to .

ARCH is x86_64 or aarch64. Makes DIR/ggml-quoka-VERSION.tgz, for node-llama-cpp, with all libraries that are given, and a
wheel for each, for llama-cpp-python. Their contents are in plugin/. A wheel's tag has the oldest
glibc that its library runs with, which is read from the file. With --into the package quoka's wheel
carries the library of its architecture, for `python -m quoka plugin`, with --check the program of
that name, too, for `python -m quoka check`, and nothing else is made; its tag becomes that of a newer
glibc, if these need one. The same files make the same packages. Python's standard library is all it
needs.
"""
import argparse
import base64
import gzip
import hashlib
import io
import json
import pathlib
import re
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARCHITECTURES = {"x86_64": ("x64", 62), "aarch64": ("arm64", 183)}  # npm's name; ELF's number
MODULE = ROOT / "examples/bindings/python/src/quoka/plugin.py"  # the whole package ggml_quoka
SUMMARY = "Faster attention for llama.cpp on CPUs: a ggml backend, exact by default, selecting where asked to"

# What `python -m quoka check` runs and reads beside the program, as it lies in the repository.
CHECK_FILES = ["examples/bindings/ggml/check_page.py", "examples/bindings/ggml/estimate.py", "examples/support/budget.py", "bench/report.py",
               "examples/data/pride_and_prejudice.txt"]

GLIBC = re.compile(rb"\0GLIBC_2\.(\d+)(?=[.\0])")  # versions that a library asks for: GLIBC_2.34, GLIBC_2.2.5


def fail(what):
    sys.exit(f"plugin.py: {what}")


def version():
    header = (ROOT / "include/quoka/base/version.hpp").read_text()
    return ".".join(re.search(rf"#define QUOKA_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def read_file(arch, path, what, says):
    """The file's bytes, after a check that it is of this kind and architecture."""
    if not path.is_file():
        fail(f"no file {path}")
    data = path.read_bytes()
    machine = ARCHITECTURES[arch][1]
    if data[:6] != b"\x7fELF\x02\x01" or int.from_bytes(data[18:20], "little") != machine:
        fail(f"{path} is not a {what} for {arch}")
    if says not in data:
        fail(f"{path} is not {'libggml-quoka.so' if what == 'library' else 'the program check'}")
    if not GLIBC.search(data):
        fail(f"{path} is not built for glibc, which the packages ask for")
    return data


def read_library(arch, path):
    return read_file(arch, path, "library", b"QuoKA attention on the CPU")  # what backend.cpp calls its device


def pinned_llama_cpp():
    """The npm package of the llama.cpp that `check` is built against, of npm.sh."""
    package, tarball, integrity = re.search(r"^llama_cpp=\((\S+) (\S+)\s+(\S+)\)", (ROOT / "examples/support/npm.sh").read_text(), re.MULTILINE).groups()
    return (json.dumps({"package": package, "tarball": tarball, "integrity": integrity}, indent=1) + "\n").encode()


def glibc(data):
    """The newest minor version of glibc 2 that the library asks for."""
    return max(map(int, GLIBC.findall(data)))


def npm(libraries, to):
    package = {
        "name": "ggml-quoka",
        "version": version(),
        "description": SUMMARY,
        "keywords": ["llama.cpp", "ggml", "node-llama-cpp", "attention", "llm"],
        "license": "Apache-2.0",
        "main": "index.js",
        "types": "index.d.ts",
        "os": ["linux"],
        "cpu": sorted(ARCHITECTURES[arch][0] for arch in libraries),
        "engines": {"node": ">=18"},
    }
    files = {"package.json": (json.dumps(package, indent=2) + "\n").encode()}
    for name in ("index.js", "index.d.ts", "README.md"):
        files[name] = (HERE / "plugin" / name).read_bytes()
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    for arch, data in libraries.items():
        files[f"lib/linux-{ARCHITECTURES[arch][0]}/libggml-quoka.so"] = data
    path = to / f"ggml-quoka-{version()}.tgz"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return path


def wheel(arch, data, to):
    tag = f"py3-none-manylinux_2_{max(glibc(data), 17)}_{arch}"
    name = f"ggml_quoka-{version()}"
    readme = (HERE / "plugin/README.md").read_text()
    files = {
        "ggml_quoka/__init__.py": MODULE.read_bytes(),
        "ggml_quoka/libggml-quoka.so": data,
        f"{name}.dist-info/METADATA": (f"Metadata-Version: 2.1\nName: ggml-quoka\nVersion: {version()}\nSummary: {SUMMARY}\nLicense: Apache-2.0\n"
                                       f"Requires-Python: >=3.8\nDescription-Content-Type: text/markdown\n\n{readme}").encode(),
        f"{name}.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: plugin.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{name}.dist-info/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    record = f"{name}.dist-info/RECORD"
    lines = []
    for of, content in files.items():
        lines.append(digest_line(of, content))
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    path = to / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for of, content in files.items():
            entry = zipfile.ZipInfo(of)  # of 1980: no time of the build
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return path


def digest_line(of, content):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{of},sha256={digest},{len(content)}\n"


def into(given, libraries, check, to):
    """A copy of quoka's wheel with the library in it, and the program `check` where its path is given."""
    if not zipfile.is_zipfile(given):
        fail(f"{given} is not a wheel")
    tag = re.search(r"-(?:manylinux_2_(\d+)|linux)[^-]*_(x86_64|aarch64)\.whl$", given.name)
    if not given.name.startswith("quoka-") or tag is None:
        fail(f"{given.name} is not a wheel of quoka for Linux")
    if tag[2] not in libraries:
        fail(f"{given.name} is for {tag[2]}, and no --library is")
    added, program = {"quoka/libggml-quoka.so": libraries[tag[2]]}, "quoka/check_files/examples/bindings/ggml/check"
    if check:
        added[program] = read_file(tag[2], check, "program", b"Does it work on my model?")  # what it says of itself
        added |= {f"quoka/check_files/{name}": (ROOT / name).read_bytes() for name in CHECK_FILES}
        added["quoka/check_files/llama_cpp.json"] = pinned_llama_cpp()
    needs = max(glibc(added[name]) for name in added.keys() & {"quoka/libggml-quoka.so", program})
    name = given.name
    if tag[1] and needs > int(tag[1]):  # an older C library's than the files that come in
        name = f"{name[:tag.start()]}-manylinux_2_{needs}_{tag[2]}.whl"
    with zipfile.ZipFile(given) as archive:
        files = {entry: archive.read(entry) for entry in archive.infolist() if entry.filename not in added}
    record = next((entry for entry in files if entry.filename.endswith(".dist-info/RECORD")), None)
    if record is None:
        fail(f"{given} has no RECORD: it is not a wheel")
    if name != given.name:
        told = record.filename.removesuffix("RECORD") + "WHEEL"
        old = next((entry for entry in files if entry.filename == told), None)
        if old is None:
            fail(f"{given} has no {told}")
        kept = [line for line in files.pop(old).decode().splitlines() if not line.startswith("Tag:")]
        added[told] = "\n".join([*kept, "Tag: " + name.removesuffix(".whl").split("-", 2)[2], ""]).encode()
    lines = [line for line in files[record].decode().splitlines(True) if line.rsplit(",", 2)[0] not in added]
    files[record] = "".join([*(digest_line(file, data) for file, data in added.items()), *lines]).encode()
    path = to / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in added.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr, entry.compress_type = (0o755 if file == program else 0o644) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
        for entry, content in files.items():
            archive.writestr(entry, content)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", required=True, metavar="ARCH=FILE")
    parser.add_argument("--into", type=pathlib.Path, metavar="WHEEL")
    parser.add_argument("--check", type=pathlib.Path, metavar="FILE", help="the program, of the wheel's architecture")
    parser.add_argument("--to", type=pathlib.Path, required=True, metavar="DIR")
    options = parser.parse_args()
    libraries = {}
    for one in options.library:
        arch, equals, path = one.partition("=")
        if not equals or arch not in ARCHITECTURES:
            fail(f"--library {one} is not ARCH=FILE with ARCH one of {', '.join(ARCHITECTURES)}")
        if arch in libraries:
            fail(f"--library {arch} is given twice")
        libraries[arch] = read_library(arch, pathlib.Path(path))
    if options.check and not options.into:
        fail("--check FILE goes into quoka's wheel: --into names it")
    if options.into and options.into.resolve().parent == options.to.resolve():
        fail(f"{options.into} lies in {options.to}: name another folder")
    options.to.mkdir(parents=True, exist_ok=True)
    if options.into:
        print(into(options.into, libraries, options.check, options.to))
        return
    print(npm(libraries, options.to))
    for arch, data in libraries.items():
        print(wheel(arch, data, options.to))


if __name__ == "__main__":
    main()
