"""Messages about settings, with the words of the form."""

import pytest

from rptrain.tui.new_run.setting_text import about, epochs_note, length_note, reason_of, with_labels
from rptrain.tui.services.fields import ALL


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`data.max_length` must be a number", "sequence length (data.max_length) must be a number"),
        ("lower train.global_batch_size, or more", "lower batch size (train.global_batch_size), or more"),
        ("train.micro_batch_size = 1 fits", "micro-batch = 1 fits"),
        ('or model.dtype="float32"', 'or weights = "float32"'),
        ("data.train.1.path: no such file", "data (data.train.1.path): no such file"),
        ("in lora.r.", "in rank (lora.r)."),
        ("engine.round_size = 2", "engine.round_size = 2"),
        ("my.lora.r lora.r.x lora.r_2", "my.lora.r lora.r.x lora.r_2"),
    ],
)
def test_labels_come_before_keys(message: str, shown: str):
    assert with_labels(message) == shown


def test_a_setting_in_the_form_and_another_one():
    assert about(ALL["train.num_epochs"]).startswith("epochs (train.num_epochs): ")
    assert about(ALL["engine.round_size"]).startswith("engine.round_size: ")
    assert reason_of("train.micro_batch_size", "train.micro_batch_size: 3 does not divide train.global_batch_size") == (
        "3 does not divide batch size (train.global_batch_size)"
    )


def test_a_note_about_the_samples():
    assert length_note(None) == length_note({"longest": None, "shorter": None}) == ""
    assert length_note({"longest": 1041, "shorter": None}) == "samples have up to 1,041 tokens"
    note = length_note({"longest": 33, "shorter": 64})
    assert note == "samples have up to 33 tokens: 64 would be enough, with less padding"


def test_a_note_about_the_epochs():
    planned = {"epochs": 8.0, "exact": True}
    assert epochs_note("", planned) == "" and epochs_note("160", None) == "max steps decides"
    assert epochs_note("160", planned) == "max steps decides: 8 epochs"
    assert epochs_note("20", {"epochs": 1.0, "exact": False}) == "max steps decides: about 1 epoch"
    assert epochs_note("20", {"epochs": None, "exact": True}) == "max steps decides"
