"""Spack 1.0 and later, a package of the repository that it lies in:

    spack repo add examples/packaging/spack/spack_repo/quoka && spack install quoka

The test packaging.recipes runs it with stand-ins for Spack's classes. Spack itself has not run it.
"""
import pathlib

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Quoka(CMakePackage):
    """Query-oriented KV selection for LLM prefill on CPUs, header-only C++20 on Eigen."""

    homepage = "https://arxiv.org/abs/2602.08722"
    git = pathlib.Path(__file__).resolve().parents[7].as_uri()

    license("Apache-2.0")

    version("main", branch="main")
    version("0.2.0", tag="v0.2.0")

    depends_on("cxx", type="build")
    depends_on("cmake@3.21:", type="build")
    depends_on("eigen@3.4:3")
