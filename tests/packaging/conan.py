#!/usr/bin/env python3
"""conan.py CONAN WORK EIGEN: Conan makes the package of examples/packaging/conan, and builds and runs its test_package with it.

Conan's home is WORK, and no remote is asked: Eigen is that of EIGEN, the include folder. The package must hold the library's
headers and its licence and nothing else, be of the version of include/quoka/base/version.hpp, and refuse C++17. Debian's
changelog must be of that version, too.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
conan, work, eigen = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]

header = (SOURCE / "include/quoka/base/version.hpp").read_text(encoding="utf-8")
version = ".".join(re.search(rf"^#define QUOKA_VERSION_{part} +(\d+)", header, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH"))
changelog = (SOURCE / "examples/packaging/debian/changelog").read_text(encoding="utf-8")
debian = re.match(r"quoka \((.+)-\d+\) ", changelog)[1]
if debian != version:
    sys.exit(f"debian/changelog has version {debian}, version.hpp has {version}")
if not shutil.which(conan):
    print(f"there is no {conan}: skipped")
    sys.exit()

shutil.rmtree(work, ignore_errors=True)
(work / "home").mkdir(parents=True)
# test_package is built beside its recipe: in a copy of what the recipe reads of the tree.
tree = work / "tree"
for part in ("include", "examples/packaging/conan", "tests/consumer"):
    shutil.copytree(SOURCE / part, tree / part, ignore=shutil.ignore_patterns("build", "CMakeUserPresets.json"))
shutil.copy(SOURCE / "LICENSE", tree)
environment = os.environ | {"CONAN_HOME": str(work / "home")}


def run(*arguments):
    result = subprocess.run([conan, *map(str, arguments)], capture_output=True, text=True, env=environment)
    return result.returncode, result.stdout + result.stderr


def create(standard):
    return run("create", tree / "examples/packaging/conan", "--no-remote", "-pr", work / "profile", "-s", f"compiler.cppstd={standard}")


status, said = run("profile", "detect")
if status != 0:
    sys.exit(said)
(work / "profile").write_text("include(default)\n[platform_requires]\neigen/3.4.0\n[conf]\n"
                              f'tools.build:cxxflags=["-isystem{eigen}", "-O0", "-DQUOKA_ALLOW_UNOPTIMIZED"]\n')
status, said = create(17)
if status == 0 or "cppstd" not in said:
    sys.exit(f"C++17 is not refused:\n{said}")
status, said = create(20)
if status != 0:
    sys.exit(said)

packages = list((work / "home/p").rglob("p/licenses/LICENSE"))
if len(packages) != 1:
    sys.exit(f"{len(packages)} packages of quoka/{version}, not one: {packages}")
root = packages[0].parents[1] / "include"
held = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
sources = SOURCE / "include"
wanted = {str(path.relative_to(sources)) for path in sources.rglob("*")
          if path.suffix == ".hpp" or path.name in ("compiled.cpp", "compiled_kernels.cpp", "c.h", "c.cpp")}
if held != wanted:
    sys.exit(f"missing {sorted(wanted - held)}, too many {sorted(held - wanted)}")
differ = [name for name in held if (root / name).read_bytes() != (sources / name).read_bytes()]
if differ:
    sys.exit(f"other bytes: {differ}")
print(f"Conan: quoka/{version}, {len(held)} files")
