"""Conan 2, a recipe of the tree that it lies in:

    conan create examples/packaging/conan -s compiler.cppstd=20 --build=missing

Conan 2.34 has made the package and run test_package with it; the test packaging.conan does so where there is a Conan.
"""
import os
import re

from conan import ConanFile
from conan.errors import ConanException
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load


class QuokaConan(ConanFile):
    name = "quoka"
    description = "Query-oriented KV selection for LLM prefill on CPUs, header-only C++20 on Eigen"
    license = "Apache-2.0"
    topics = ("attention", "llm", "eigen", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def _tree(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        header = os.path.join(self._tree(), "include", "quoka", "base", "version.hpp")
        parts = re.findall(r"^#define QUOKA_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", load(self, header), re.M)
        if len(parts) != 3:
            raise ConanException(f"{header} has {len(parts)} of the version's three numbers")
        self.version = ".".join(parts)

    def export_sources(self):
        copy(self, "LICENSE", self._tree(), self.export_sources_folder)
        for pattern in ("*.hpp", "quoka/compiled.cpp", "quoka/compiled_kernels.cpp", "quoka/c.h", "quoka/c.cpp"):
            copy(self, pattern, os.path.join(self._tree(), "include"), os.path.join(self.export_sources_folder, "include"))

    def requirements(self):
        self.requires("eigen/[>=3.4 <4]")

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "*", os.path.join(self.source_folder, "include"), os.path.join(self.package_folder, "include"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "quoka")
        self.cpp_info.set_property("cmake_target_name", "quoka::quoka")
        self.cpp_info.set_property("pkg_config_name", "quoka")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
