"""The lanes of a run: what a device waits for is shown whole where there is room."""

from pathlib import Path

import pytest

from rptrain.runs.view.run_view import RunView
from rptrain.tui.run.lanes import Lanes, Shown

from .conftest import Page, driven, widget_text
from .recorded import make_run


@pytest.mark.parametrize(("width", "shown"), [(120, "waits: weights of laye…"), (160, "waits: weights of layers.3")])
@driven
async def test_a_wide_terminal_shows_what_a_device_waits_for(tmp_path: Path, width: int, shown: str):
    lanes, view = Lanes(), RunView(make_run(tmp_path, steps=5))
    async with Page(lanes).run_test(size=(width, 10)) as pilot:
        lanes.shown = Shown.of(view, 240, "training", lambda view, state: "")
        await pilot.pause()
        assert f"{shown} " in widget_text(lanes)
