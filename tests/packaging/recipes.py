#!/usr/bin/env python3
"""recipes.py WORK CMAKE [OPTION...]: the recipes in examples/packaging, each run in WORK; OPTIONs are for cmake.

vcpkg, Conan and Spack are not needed: vcpkg.cmake beside this file and the classes below stand in for them. Each package
must hold the library's headers and its licence, and nothing of the tests, and a user's project must find it; that which
Conan's package_info() describes is compiled and run, for there the target is not the library's own. The versions of all
recipes are that of include/quoka/base/version.hpp.
"""
import fnmatch
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RECIPES = SOURCE / "examples/packaging"
VERSION_HEADER = "include/quoka/base/version.hpp"

work, cmake, *options = sys.argv[1:]
work = pathlib.Path(work)
failures = []


def check(holds, what):
    if not holds:
        failures.append(what)


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nreturned {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def library():
    """What a package has: all headers, but for what only a build from the sources takes."""
    root = SOURCE / "include/quoka"
    return {str(file.relative_to(root)) for file in root.rglob("*")
            if file.suffix == ".hpp" or file.name in ("compiled.cpp", "c.h", "c.cpp")}


def check_package(manager, prefix, licence):
    root = prefix / "include/quoka"
    held = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
    wanted = library()
    check(held == wanted, f"{manager}: missing {sorted(wanted - held)}, too many {sorted(held - wanted)}")
    for name in held & wanted:
        check((root / name).read_bytes() == (SOURCE / "include/quoka" / name).read_bytes(), f"{manager}: {name} differs")
    check((prefix / licence).is_file(), f"{manager}: no licence {prefix / licence}")


def check_found(manager, prefix):
    """A user's project finds this package, and is given its headers."""
    project = work / f"{manager}_user"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(user LANGUAGES CXX)\n"
        f"find_package(quoka {VERSION} CONFIG REQUIRED)\n"
        "get_target_property(includes quoka::quoka INTERFACE_INCLUDE_DIRECTORIES)\n"
        'message(STATUS "quoka in ${includes}")\n')
    said = run(cmake, "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix}", *options)
    check(f"quoka in {prefix}/include\n" in said, f"{manager}: the target's headers are elsewhere:\n{said}")


def check_built(manager, build):
    """No test, bench or example of the library's own is built for a user."""
    built = re.findall(r"^(QUOKA_BUILD_\w+):BOOL=ON", (build / "CMakeCache.txt").read_text(encoding="utf-8"), re.M)
    if built:
        sys.exit(f"{manager} builds {built}")


def module(name, **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
    return made


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# ---- versions ------------------------------------------------------------------------------------

HEADER = (SOURCE / VERSION_HEADER).read_text(encoding="utf-8")
VERSION = ".".join(re.search(rf"^#define QUOKA_VERSION_{part} +(\d+)", HEADER, re.M)[1]
                   for part in ("MAJOR", "MINOR", "PATCH"))


def check_version(where, found):
    check(found == VERSION, f"{where} has version {found}, {VERSION_HEADER} has {VERSION}")


# ---- vcpkg ---------------------------------------------------------------------------------------

def vcpkg():
    manifest = json.loads((RECIPES / "vcpkg/vcpkg.json").read_text(encoding="utf-8"))
    check(manifest["name"] == "quoka" and manifest["license"] == "Apache-2.0", f"vcpkg.json: {manifest}")
    check_version("vcpkg.json", manifest["version"])
    needed = {entry if isinstance(entry, str) else entry["name"] for entry in manifest["dependencies"]}
    portfile = (RECIPES / "vcpkg/portfile.cmake").read_text(encoding="utf-8")
    for port, functions in (("vcpkg-cmake", ("vcpkg_cmake_configure", "vcpkg_cmake_install")),
                            ("vcpkg-cmake-config", ("vcpkg_cmake_config_fixup",))):
        used = any(function in portfile for function in functions)
        check(used == (port in needed), f"vcpkg.json: {port} is {'not ' * (port not in needed)}there, used: {used}")
    check("eigen3" in needed, f"vcpkg.json: no eigen3 in {sorted(needed)}")
    packages = work / "vcpkg"
    run(cmake, "-D", f"PORT_DIR={RECIPES / 'vcpkg'}", "-D", f"PACKAGES={packages}", "-D", f"BUILD={work / 'vcpkg_build'}",
        "-D", f"OPTIONS={';'.join(options)}", "-P", pathlib.Path(__file__).with_name("vcpkg.cmake"))
    check_built("vcpkg", work / "vcpkg_build")
    check_package("vcpkg", packages, "share/quoka/copyright")
    usage = (packages / "share/quoka/usage").read_text(encoding="utf-8")
    check("quoka::quoka" in usage, f"vcpkg: usage is {usage}")
    rest = {file.name for file in packages.rglob("*") if file.is_file() and "include" not in file.parts}
    check(rest == {"copyright", "usage", "quoka.pc", "quokaConfig.cmake", "quokaConfigVersion.cmake", "quokaTargets.cmake"},
          f"vcpkg: besides headers {sorted(rest)}")
    check_found("vcpkg", packages)


# ---- Conan ---------------------------------------------------------------------------------------

class Settings(types.SimpleNamespace):
    pass


class ConanInvalidConfiguration(Exception):
    pass


class CppInfo:
    def __init__(self):
        self.properties, self.bindirs, self.libdirs, self.includedirs, self.system_libs = {}, ["bin"], ["lib"], ["include"], []

    def set_property(self, name, value):
        self.properties[name] = value


class ConanFile:
    def __init__(self, recipe_folder, cppstd):
        self.settings = Settings(os="Linux", arch="x86_64", build_type="Release", compiler=Settings(cppstd=cppstd))
        self.recipe_folder, self.required, self.cpp_info = str(recipe_folder), [], CppInfo()
        self.info = types.SimpleNamespace(cleared=False)
        self.info.clear = lambda: setattr(self.info, "cleared", True)

    def requires(self, reference):
        self.required.append(reference)

    def run(self, command, env):
        check(env == "conanrun", f"Conan: run in {env}")
        run(command)


class CMake:
    def __init__(self, recipe):
        self.recipe = recipe

    def configure(self):
        # What CMakeDeps writes of the package's cpp_info.
        package, info = self.recipe.tested, self.recipe.tested.cpp_info
        target = info.properties["cmake_target_name"]
        config = pathlib.Path(self.recipe.build_folder) / f"{info.properties['cmake_file_name']}Config.cmake"
        includes = ";".join(f"{package.package_folder}/{folder}" for folder in info.includedirs)
        config.parent.mkdir(parents=True)
        config.write_text(
            "find_package(Eigen3 REQUIRED CONFIG)\n"
            f"add_library({target} INTERFACE IMPORTED)\n"
            f'target_include_directories({target} INTERFACE "{includes}")\n'
            f"target_link_libraries({target} INTERFACE Eigen3::Eigen {' '.join(info.system_libs)})\n")
        run(cmake, "-S", self.recipe.source_folder, "-B", self.recipe.build_folder, f"-D{config.stem[:-6]}_DIR={config.parent}",
            "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0",
            f"-DCMAKE_CXX_STANDARD={self.recipe.settings.compiler.cppstd}", *options)

    def build(self):
        run(cmake, "--build", self.recipe.build_folder)


def conan_copy(recipe, pattern, src, dst):
    src, dst = pathlib.Path(src), pathlib.Path(dst)
    for file in sorted(src.rglob("*")):
        name = str(file.relative_to(src))
        if file.is_file() and fnmatch.fnmatch(name, pattern):
            (dst / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, dst / name)


def check_min_cppstd(recipe, least):
    if int(recipe.settings.compiler.cppstd) < least:
        raise ConanInvalidConfiguration(f"cppstd {recipe.settings.compiler.cppstd} < {least}")


def conan():
    module("conan", ConanFile=ConanFile)
    module("conan.tools")
    module("conan.errors", ConanException=RuntimeError, ConanInvalidConfiguration=ConanInvalidConfiguration)
    module("conan.tools.files", copy=conan_copy, load=lambda recipe, path: pathlib.Path(path).read_text(encoding="utf-8"))
    module("conan.tools.build", check_min_cppstd=check_min_cppstd, can_run=lambda recipe: True)
    module("conan.tools.cmake", CMake=CMake, cmake_layout=lambda recipe: None)

    made = load(RECIPES / "conan/conanfile.py", "conanfile").QuokaConan(RECIPES / "conan", "20")
    made.set_version()
    check_version("conanfile.py", made.version)
    # As in Conan's cache: the tree is no longer around the recipe.
    made.export_sources_folder = made.source_folder = str(work / "conan_sources")
    made.export_sources()
    made.recipe_folder, made.package_folder = str(work / "conan_recipe"), str(work / "conan")
    made.requirements()
    check(len(made.required) == 1 and made.required[0].startswith("eigen/"), f"Conan: requires {made.required}")
    made.validate()
    old = type(made)(RECIPES / "conan", "17")
    try:
        old.validate()
        failures.append("Conan: C++17 is not refused")
    except ConanInvalidConfiguration:
        pass
    made.package_id()
    check(made.info.cleared and made.package_type == "header-library", "Conan: a package for each setting")
    made.package()
    made.package_info()
    check_package("Conan", work / "conan", "licenses/LICENSE")
    check(made.cpp_info.libdirs == [] and made.cpp_info.bindirs == [], "Conan: libdirs or bindirs of a header-only library")

    test = load(RECIPES / "conan/test_package/conanfile.py", "test_package").QuokaTest(RECIPES / "conan/test_package", "20")
    test.tested, test.tested_reference_str = made, f"quoka/{made.version}"
    test.source_folder, test.build_folder = test.recipe_folder, str(work / "conan_test")
    test.cpp = types.SimpleNamespace(build=types.SimpleNamespace(bindir=test.build_folder))
    test.requirements()
    check(test.required == [f"quoka/{VERSION}"], f"Conan: test_package requires {test.required}")
    test.layout()
    test.build()
    test.test()


# ---- Spack ---------------------------------------------------------------------------------------

def spack():
    said = {"version": [], "depends_on": [], "license": []}

    class CMakePackage:
        def cmake_args(self):
            return []

    module("spack_repo")
    module("spack_repo.builtin")
    module("spack_repo.builtin.build_systems")
    module("spack_repo.builtin.build_systems.cmake", CMakePackage=CMakePackage)
    module("spack")
    module("spack.package", **{name: lambda *arguments, name=name, **named: said[name].append((arguments, named))
                               for name in said})
    made = load(RECIPES / "spack/spack_repo/quoka/packages/quoka/package.py", "package").Quoka
    versions = [arguments[0] for arguments, _ in said["version"]]
    check_version("package.py", versions[-1])
    check(said["version"][-1][1] == {"tag": f"v{VERSION}"}, f"Spack: {said['version'][-1]} is not of the tag v{VERSION}")
    check(made.git == SOURCE.as_uri(), f"Spack: the sources are {made.git}, not {SOURCE.as_uri()}")
    needed = [arguments[0] for arguments, _ in said["depends_on"]]
    check(any(name.startswith("eigen@3.4") for name in needed), f"Spack: depends on {needed}")
    repository = (RECIPES / "spack/spack_repo/quoka/repo.yaml").read_text(encoding="utf-8")
    check(re.search(r"^  namespace: quoka$", repository, re.M), f"Spack: repo.yaml is {repository}")
    prefix, build = work / "spack", work / "spack_build"
    run(cmake, "-S", SOURCE, "-B", build, f"-DCMAKE_INSTALL_PREFIX={prefix}", *options, *made().cmake_args())
    check_built("Spack", build)
    run(cmake, "--build", build, "--target", "install")
    check_package("Spack", prefix, "share/doc/quoka/LICENSE")
    check_found("Spack", prefix)


# ---- Debian: examples/packaging/debian.sh builds it; its version is looked at here --------------------

def debian():
    changelog = (RECIPES / "debian/changelog").read_text(encoding="utf-8")
    check_version("debian/changelog", re.match(r"quoka \((.+)-\d+\) ", changelog)[1])


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
for recipe in (vcpkg, conan, spack, debian):
    recipe()
if failures:
    sys.exit("\n".join(failures))
print(f"quoka {VERSION}: vcpkg, Conan, Spack; {len(library())} files in each")
