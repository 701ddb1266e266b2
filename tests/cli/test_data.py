"""`rptrain data clean`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from rptrain.cli.commands import app

ROWS = '{"text": "a"}\n{"text": 5}\n{"text": "b"}\n'


def test_clean(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    given = ["data", "clean", "rows.jsonl", "--to", "good.jsonl"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == ["good.jsonl: 2 of 3 rows", "good.bad.jsonl: 1 bad row with the reasons"]
    again = CliRunner().invoke(app, given)
    assert again.exit_code == 2 and again.stderr.startswith("good.jsonl exists: name another file")
    found = json.loads(CliRunner().invoke(app, [*given, "--force", "--json"]).stdout)
    assert (found["rows"], found["good"], found["bad"]) == (3, 2, 1) and found["bad_path"] == "good.bad.jsonl"
    assert CliRunner().invoke(app, [*given[:-1], "other.jsonl", "--format", "none"]).exit_code == 2
    assert CliRunner().invoke(app, ["data"]).exit_code == 2
