"""Builds the C helpers as plain libraries for ctypes, and wheels that work with any version of Python.

All other settings are in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")  # in the table of names of a library: a version of a symbol that it needs


class Libraries(build_ext):
    """Libraries named without a version of Python, because they do not use it."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """A wheel whose tag has no version of Python, and the lowest glibc that its libraries need (PEP 600)."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = [file.read_bytes() for file in Path(self.bdist_dir).rglob("*.so")]
        if not libraries:  # there was no compiler
            return "py3", "none", "any"
        platform = super().get_tag()[2]
        needed = [(int(major), int(minor)) for library in libraries for major, minor in GLIBC.findall(library)]
        if needed:  # a C library of another kind has no tag that names its version
            major, minor = max(needed)
            platform = platform.replace("linux_", f"manylinux_{major}_{minor}_")
        return "py3", "none", platform


setup(cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel})
