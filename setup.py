"""Builds the CPU kernels as an optional part of the package; all else is in pyproject.toml.

The kernels are a plain shared library, loaded with ctypes, not a Python extension module: setuptools
only provides the place in the build where they are made. Without a compiler, or where compiling
fails, the package installs all the same and works with its PyTorch reference; ``mxquant env`` tells.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CPU = Path(__file__).resolve().parent / "kernels" / "cpu"


def _build_module():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("_mxquant_build", CPU / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cpu = _build_module()


class BuildKernels(build_ext):
    """Compiles with the rules of kernels/cpu/build.py."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(cpu.NAME))

    def build_extension(self, ext: Extension) -> None:
        try:
            cpu.build(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp))
        except RuntimeError as error:
            raise CompileError(f"no CPU kernels: {error}") from error  # a warning, as the extension is optional


class PlatformWheel(bdist_wheel):
    """The library depends on the platform, but on no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


extensions = []
if sys.platform != "win32" and cpu.find_compiler() is not None:
    sources = [str(p.relative_to(CPU.parent.parent)) for p in sorted((CPU / "src").glob("*.cpp"))]
    extensions = [Extension("mxquant.kernels.cpu._native", sources, optional=True)]

setup(ext_modules=extensions, cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
