"""Code that is compiled with the package is found where there is a compiler: without it the same bits come slower."""

import re
import shutil
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import rptrain.kernels
from rptrain.doctor.host import EXTENSIONS
from rptrain.utils import native

ROOT = Path(__file__).resolve().parents[2]


def test_all_compiled_files_load():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    built = {module["name"] for module in settings["ext-modules"]}
    product = [path for folder in ("rptrain", "kernels") for path in (ROOT / folder).rglob("*.py")]
    calls = re.compile(r'native[._]library\("(rptrain[\w.]+)"\)')
    asked = {name for path in product for name in calls.findall(path.read_text())}
    asked.add("rptrain.schedule._estimate")  # rptrain.schedule imports no package
    assert built == asked == set(EXTENSIONS)
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert not [name for name in built if native.library(name) is None]


def test_libraries_of_one_version_of_python_are_not_loaded(tmp_path, monkeypatch):
    """They may be left from an earlier installation."""
    (tmp_path / f"_quant{EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(rptrain.kernels, "__path__", [str(tmp_path)])
    assert native.library.__wrapped__("rptrain.kernels._quant") is None


def test_a_library_that_cannot_be_loaded_is_reported_once(tmp_path, monkeypatch, caplog):
    """It may be of another machine, or on a file system mounted with noexec."""
    for name in ("_quant", "_fp8"):
        (tmp_path / f"{name}.so").write_bytes(b"of another machine")
    monkeypatch.setattr(rptrain.kernels, "__path__", [str(tmp_path)])
    monkeypatch.setattr(native, "_unusable", [])
    assert native.library.__wrapped__("rptrain.kernels._quant") is None
    assert native.library.__wrapped__("rptrain.kernels._fp8") is None
    assert [f"{tmp_path}/_quant.so" in line for line in caplog.messages] == [True]


def test_all_packages_are_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    own = (path.parent.relative_to(ROOT) for path in (ROOT / "rptrain").rglob("__init__.py"))
    above = (
        path.parent.relative_to(ROOT) for name in ("kernels", "models") for path in (ROOT / name).rglob("__init__.py")
    )
    names = {".".join(path.parts) for path in own} | {".".join(("rptrain", *path.parts)) for path in above}
    assert names == set(settings["packages"])
