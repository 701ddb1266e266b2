"""What the doctor says about the programs that write GGUF files."""

import pytest

from rptrain.doctor import gguf
from rptrain.gguf import tools


@pytest.fixture(autouse=True)
def no_programs(monkeypatch):
    monkeypatch.delenv(tools.FOLDER, raising=False)
    monkeypatch.setenv("PATH", "")


def test_without_the_converter_it_says_how_to_get_it_and_does_not_warn():
    found = gguf.examine()
    assert found.status == "ok" and tools.GET in found.text and found.figures["converter"] is None


def test_a_variable_that_names_another_folder_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv(tools.FOLDER, str(tmp_path))
    found = gguf.examine()
    assert found.status == "warning" and str(tmp_path) in found.text and tools.GET in str(found.advice)


def test_a_checkout(monkeypatch, tmp_path):
    for name in (tools.MODELS, tools.ADAPTERS):
        (tmp_path / name).touch()
    monkeypatch.setenv(tools.FOLDER, str(tmp_path))
    monkeypatch.setattr(tools, "PACKAGE", "a_package_that_is_not_there")
    found = gguf.examine()
    assert found.status == "ok" and str(tmp_path / tools.MODELS) in found.text and tools.INSTALL in found.text
    assert found.figures == {"converter": str(tmp_path / tools.MODELS), "quantizer": None, "package": False}
