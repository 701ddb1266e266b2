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
    """The settings of the runs. Their speeds are made up, and there are six of them."""
    speeds, settings = iter([10, 20, 90, 30, 12, 120]), []

    def bench(setting):
        settings.append(setting)
        if (speed := next(speeds, None)) is None:
            raise SystemExit("exit status 2")
        return {"throughput": {"tokens_per_second": speed}}

    monkeypatch.setattr(compare, "bench", bench)
    return settings


@pytest.mark.parametrize("second", ["--config b.toml", "--config a.toml"])
def test_settings_take_turns(out, benched, capsys, second):
    """Also a setting that is compared with itself."""
    settings = ["--config a.toml", second]
    compare.main(["--out", str(out), *settings])
    assert benched == settings * 3
    found = json.loads(out.read_text())
    assert [one["setting"] for one in found["settings"]] == settings
    assert [one["tokens_per_second"] for one in found["settings"]] == [12, 30]
    assert [one["ratio"] for one in found["settings"]] == [1, 2.5]
    assert [run["throughput"]["tokens_per_second"] for run in found["runs"]] == [10, 20, 90, 30, 12, 120]
    assert capsys.readouterr().out.splitlines()[-1] == f"median 30 tokens/s, 2.500: {second}"


def test_what_was_measured_before_a_failure_is_kept(out, benched):
    with pytest.raises(SystemExit, match="exit status 2"):
        compare.main(["--out", str(out), "--turns", "4", "--floor a", "b"])
    assert len(json.loads(out.read_text())["runs"]) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--turns", "0", "a"), "--turns must be at least 1"),
        (("a 'b",), "a 'b: No closing quotation"),
        (("--out", "missing/compare.json", "a"), "the folder missing does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_a_run(out, benched, capsys, arguments, message):
    with pytest.raises(SystemExit):
        compare.main(["--out", str(out), *arguments])
    assert message in capsys.readouterr().err and benched == []


@pytest.mark.long
def test_whole_runs(tmp_path, out, capfd):
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    setting = f"--config '{tmp_path}/run.toml' --warmup 1 --steps 1 model.dtype=bfloat16"
    compare.main(["--out", str(out), "--turns", "1", setting, f"{setting} engine.fp8=true"])
    found = json.loads(out.read_text())
    assert found["settings"][0]["ratio"] == 1
    assert all(run["throughput"]["tokens_per_second"] > 0 for run in found["runs"])
    with pytest.raises(SystemExit, match=r"exit status 2 of: .* engine\.fp8=7"):
        compare.main(["--out", str(out), f"{setting} engine.fp8=7"])
    assert "engine.fp8" in capfd.readouterr().err
