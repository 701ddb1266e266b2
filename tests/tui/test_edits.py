"""The learning rate that is suggested for a model on New run."""

from pathlib import Path

from rptrain.tui.new_run.edits import Edits
from rptrain.tui.services.draft import Draft

OWN = '[model]\npath = "own"\n[[data.train]]\npath = "a.jsonl"\n[optim]\nlearning_rate = 3e-6\n'


def rate(edits: Edits) -> str:
    return edits.draft.shown("optim.learning_rate")


def begun(tmp_path: Path) -> Edits:
    """The bundled example, which was planned."""
    edits = Edits(Draft.instead_of(tmp_path / "rptrain.toml"))
    edits.begin()
    assert edits.know_size(407_000) == "" and rate(edits) == "2e-3"
    return edits


def test_the_rate_follows_the_size_of_the_model_and_the_method(tmp_path: Path):
    edits = begun(tmp_path)
    edits.take({"model.path": "own"})
    assert rate(edits) == "1e-5"  # the size is not known yet
    message = edits.know_size(3_100_000)
    assert rate(edits) == "1e-3"
    assert "1e-3 now, and was 2e-3" in message and "all weights of a model of 3.1 M parameters" in message
    edits.take({"data.train.0.path": "b.jsonl"})
    assert rate(edits) == "1e-3" and edits.know_size(3_100_000) == ""
    edits.take({"model.path": "large", "train.method": "lora"})
    assert "adapters of a model of 8.0 B parameters" in edits.know_size(8_000_000_000) and rate(edits) == "1e-4"


def test_a_rate_of_the_user_or_of_a_file_stays(tmp_path: Path):
    edits = begun(tmp_path)
    edits.take({"optim.learning_rate": "5e-5", "model.path": "own"})
    assert edits.know_size(3_100_000) == "" and rate(edits) == "5e-5"
    edits = Edits(Draft(tmp_path / "rptrain.toml", OWN))
    assert edits.know_size(3_100_000) == "" and rate(edits) == "3e-6"


def test_values_that_change_with_the_model_are_named_with_those_before(tmp_path: Path):
    edits = begun(tmp_path)
    edits.take({"train.micro_batch_size": "2"})
    edits.take({"model.path": "own"})
    told = edits.replaced()
    for change in ("sequence length 128 (was 26)", "max steps unset (was 1500)", "learning rate 1e-5 (was 2e-3)"):
        assert change in told
    assert "micro-batch" not in told and "name" not in told and edits.replaced() == ""
    edits.take({"model.path": "another"})
    edits.take({"model.path": "own"})
    assert edits.replaced() == ""
