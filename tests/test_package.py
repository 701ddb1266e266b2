"""The source archive and the wheel: what is in them, and the tags of wheels built with and without a C compiler."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"rptrain": "rptrain", "kernels": "rptrain/kernels", "models": "rptrain/models"}  # where a wheel has them
NOT_PACKED = (".c", ".h", ".so", ".pyc")
FILES = ("pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE", "rptrain.toml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LIBRARIES = {f"{module['name'].replace('.', '/')}.so" for module in PROJECT["tool"]["setuptools"]["ext-modules"]}


def build(what: str, tree: Path, **environment: str) -> Path:
    """Calls setuptools in a tree, as `python -m build` does."""
    program = f"import sys; from setuptools import build_meta; print('>', build_meta.build_{what}(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", program, str(tree / "dist")]
    done = subprocess.run(command, cwd=tree, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree / "dist" / done.stdout.rpartition("> ")[2].strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The source archive of a copy of the repository, which tests read while it is built."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copyfile(ROOT / name, tree / name)
    (tree / "tests").mkdir()
    shutil.copyfile(__file__, tree / "tests" / Path(__file__).name)
    return build("sdist", tree)


def unpacked(source: Path, folder: Path) -> Path:
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def packages() -> set[str]:
    """The paths that a wheel has, without its metadata and the libraries."""
    return {
        f"{place}/{file.relative_to(ROOT / name).as_posix()}"
        for name, place in FOLDERS.items()
        for file in (ROOT / name).rglob("*")
        if file.is_file() and file.suffix not in NOT_PACKED
    }


def contents(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_from_the_source_archive_has_all_files_and_libraries(source, tmp_path):
    fast = tmp_path / "cc"  # a compiler that does not optimize, which takes most of the time
    fast.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    fast.chmod(0o755)
    wheel = build("wheel", unpacked(source, tmp_path / "source"), CC=str(fast))
    assert contents(wheel) == packages() | LIBRARIES
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    assert (tmp_path / "wheel/rptrain/config/rptrain.toml").read_bytes() == (ROOT / "rptrain.toml").read_bytes()
    needed = subprocess.run(
        ["readelf", "--version-info", *LIBRARIES], cwd=tmp_path / "wheel", check=True, capture_output=True, text=True
    ).stdout
    versions = {(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", needed)}
    major, minor = max(versions)
    assert re.search(rf"-py3-none-manylinux_{major}_{minor}_\w+\.whl$", wheel.name)


def test_a_wheel_built_without_a_compiler_has_no_libraries(source, tmp_path):
    wheel = build("wheel", unpacked(source, tmp_path), CC="false")
    assert contents(wheel) == packages()
    assert wheel.name.endswith("-py3-none-any.whl")
