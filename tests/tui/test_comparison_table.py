"""The table of compared runs: settings that differ, and a warning where losses may not be comparable."""

from pathlib import Path

import pytest

from rptrain.runs.folder.comparison import Row
from rptrain.tui.runs.comparison import _table
from rptrain.tui.runs.run_rows import Mark
from rptrain.tui.runs.summaries import Compared

WARNING = "The data or the models differ: the losses may not be comparable."


@pytest.mark.parametrize(
    ("key", "warns"), [("optim.learning_rate", False), ("data.train.0.path", True), ("model.path", True)]
)
def test_other_data_or_another_model_is_warned_about(key: str, warns: bool):
    results = [Row("lowest validation loss", ("1.5000", "1.2500"), 1)]
    compared = Compared((Path("a"), Path("b")), (), results, [Row(key, ("one", "two"))])
    lines = [line.plain for line in _table(compared, ["a", "b"], [Mark("A"), Mark("B")])]
    assert lines[0].split() == ["results", "A", "a", "B", "b"] and lines[1].endswith("1.2500 ✓ best  ")
    assert [key, "one", "two"] in [line.split() for line in lines] and (WARNING in lines) == warns
