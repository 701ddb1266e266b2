"""New run: the form shows the name under which a run will be stored."""

from pathlib import Path

import pytest

from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services import launch
from rptrain.tui.services.launch import free_name

from .conftest import Made, driven, press_until, screen_text, settled, type_over, until
from .recorded import make_run


@pytest.mark.parametrize(
    ("there", "free"),
    [
        ((), "support"),
        (("support",), "support-2"),
        (("support", "support-2"), "support-3"),
        (("support", "support-3"), "support-2"),
    ],
)
def test_a_taken_name_gets_the_next_free_number(tmp_path: Path, there: tuple[str, ...], free: str):
    for name in there:
        (tmp_path / name).mkdir()
    assert free_name(str(tmp_path), "support") == free


@pytest.mark.parametrize(
    ("there", "free"),
    [
        (("support-2", "support"), "support-3"),
        (("support-100", "support"), "support-101"),
        (("lora-16",), "lora-16-2"),
        (("lora-16", "lora-16-2"), "lora-16-3"),
        (("qwen-2507", "qwen"), "qwen-2507-2"),
    ],
)
def test_a_number_is_counted_up_if_a_run_has_the_name_without_it(tmp_path: Path, there: tuple[str, ...], free: str):
    """Otherwise it says something about the run, such as a setting."""
    for name in there:
        (tmp_path / name).mkdir()
    assert free_name(str(tmp_path), there[0]) == free


@pytest.mark.long
@driven
async def test_settings_of_a_past_run_come_with_the_name_that_the_new_one_gets(
    make: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", 'echo "$@" > said', "trainer"))
    for name in ("support", "support-2"):
        make_run(tmp_path / "runs", name, end="finished")
    app = make()
    async with app.run_test(size=(120, 36)) as pilot:
        await press_until(pilot, "f3", lambda: "support-2" in screen_text(app))
        await press_until(pilot, "n", lambda: isinstance(app.screen, NewRun))
        await until(pilot, lambda: app.screen.query_one("#log-run_name").value == "support-3")
        await settled(pilot)
        await press_until(pilot, "ctrl+r", lambda: isinstance(app.screen, RunScreen))
        await until(pilot, lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text() != "")
    assert 'log.run_name="support-3"' in (tmp_path / "said").read_text()


@pytest.mark.long
@driven
async def test_a_taken_name_is_noted_in_the_plan(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "support", end="finished")
    app = make()
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(pilot)
        assert "exists" not in screen_text(app)
        await type_over(pilot, "support", "#log-run_name")
        await until(pilot, lambda: "runs/support exists: this run will be" in screen_text(app))
        await type_over(pilot, "help", "#log-run_name")
        await until(pilot, lambda: "exists" not in screen_text(app))
        await type_over(pilot, "support", "#log-run_name")
        await until(pilot, lambda: "exists" in screen_text(app))
        await type_over(pilot, "x", "#data-max_length")
        await until(pilot, lambda: "Not ready" in screen_text(app) and "exists" not in screen_text(app))
