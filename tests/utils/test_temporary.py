"""Temporary files are deleted by the process that created them."""

import os
from pathlib import Path

from rptrain.utils import temporary


def test_a_file_is_deleted_by_its_process_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (descriptor, one), (other_descriptor, other) = temporary.create(".json"), temporary.create(".json")
    os.close(descriptor), os.close(other_descriptor)
    if (child := os.fork()) == 0:
        try:
            temporary.delete(one)
            temporary.delete_all()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert {*tmp_path.iterdir()} == {Path(one), Path(other)}
    temporary.delete(one)
    assert [*tmp_path.iterdir()] == [Path(other)]
    temporary.delete_all()
    assert not [*tmp_path.iterdir()]
    temporary.delete(one)
