"""The models of a run that can answer, and which of them does."""

from pathlib import Path

from rptrain.checkpoint.answer_sources import answer_sources
from tests import run_tools as tools


def test_the_exported_model_comes_first_and_then_the_newest_checkpoint(tmp_path: Path) -> None:
    assert answer_sources(tmp_path) == []
    saved = [tmp_path / "checkpoints" / f"checkpoint-{step}" for step in (9, 10)]
    (tmp_path / "checkpoints").mkdir()
    for path in saved:
        tools.write_checkpoint(path)
    (tmp_path / "checkpoints/checkpoint-11").mkdir()
    (tmp_path / "model").mkdir()
    assert answer_sources(tmp_path) == saved[::-1]
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / "model" / name).touch()
        assert answer_sources(tmp_path) == [tmp_path / "model", *saved[::-1]]
        (tmp_path / "model" / name).unlink()


def test_links_that_lead_out_of_the_run_are_left_out(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "checkpoints").mkdir(parents=True)
    other.mkdir()
    tools.write_checkpoint(run / "checkpoints/checkpoint-3")
    tools.write_checkpoint(other / "checkpoint-4")
    (other / "config.json").touch()
    (run / "model").symlink_to(other)
    (run / "checkpoints/checkpoint-4").symlink_to(other / "checkpoint-4")
    assert answer_sources(run) == [run / "checkpoints/checkpoint-3"]
