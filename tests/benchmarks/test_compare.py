"""Settings compared by speed: the order of the runs, the medians, and what is left after a run that fails."""

import json

import pytest

from benchmarks import compare

from .. import run_tools as tools


@pytest.fixture
def out(tmp_path):
    return tmp_path / "compare.json"


@pytest.fixture
def benched(monkeypatch):
    """The arguments of each run. The speeds are made up, and those after the last are missing."""
    speeds, given = iter([10, 20, 14, 30, 12, 40]), []

    def bench(arguments):
        given.append(arguments)
        if (speed := next(speeds, None)) is None:
            raise SystemExit("exit status 2")
        return {"throughput": {"tokens_per_second": speed}}

    monkeypatch.setattr(compare, "bench", bench)
    return given


def test_settings_take_turns(out, benched, capsys):
    compare.main([str(out), "--turns", "3", "--common", "--config 'a b.toml'", "", "engine.fp8=true lora.base=fp8"])
    one, other = ["--config", "a b.toml"], ["--config", "a b.toml", "engine.fp8=true", "lora.base=fp8"]
    assert benched == [one, other] * 3
    found = json.loads(out.read_text())
    assert found["settings"] == {
        "": {"tokens_per_second": 12, "ratio": 1},
        "engine.fp8=true lora.base=fp8": {"tokens_per_second": 30, "ratio": 2.5},
    }
    assert [run["report"]["throughput"]["tokens_per_second"] for run in found["runs"]] == [10, 20, 14, 30, 12, 40]
    assert capsys.readouterr().out.splitlines()[-1] == "median: 30 tokens/s, 2.500  engine.fp8=true lora.base=fp8"


def test_what_was_measured_before_a_failure_is_kept(out, benched):
    with pytest.raises(SystemExit, match="exit status 2"):
        compare.main([str(out), "--turns", "4", "a", "b"])
    assert len(json.loads(out.read_text())["runs"]) == 6


@pytest.mark.long
def test_whole_runs(tmp_path, out):
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    common = f"--config {tmp_path}/run.toml --warmup 1 --steps 1 model.dtype=bfloat16"
    compare.main([str(out), "--turns", "1", "--common", common, "", "engine.fp8=true"])
    found = json.loads(out.read_text())
    assert list(found["settings"]) == ["", "engine.fp8=true"] and found["settings"][""]["ratio"] == 1
    assert all(run["report"]["throughput"]["tokens_per_second"] > 0 for run in found["runs"])
