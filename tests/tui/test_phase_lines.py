"""The progress of reading data on the Run screen, while the trainer starts."""

from pathlib import Path

import pytest

from rptrain.tui.run.phase_lines import phase_in, shortened
from rptrain.tui.services import launch

from .conftest import Made, driven, screen_text, until
from .recorded import make_run

LINES = [f"reading a.jsonl: {n},000 rows, 1,000 rows/s, {25 * n}%, {4 - n} s left" for n in (1, 2)]


def test_the_last_line_is_shown_with_a_bar():
    assert phase_in("a warning\n" + "\n".join(LINES)) == f"{'━' * 12}{'─' * 12} {LINES[1]}"
    assert phase_in("reading a.txt: 1 row") == "reading a.txt: 1 row"
    for other in ("", "loading", f"{LINES[1]}\nread 4,000 rows of a.jsonl in 4 s (1,000 rows/s)"):
        assert phase_in(other) is None


def test_only_the_newest_of_successive_lines_is_kept():
    assert shortened("\n".join(["before", *LINES, "a warning", *LINES])) == "\n".join(
        ["before", LINES[1], "a warning", LINES[1]]
    )
    assert shortened("") == "" and shortened("a\n\nb") == "a\n\nb"


SCRIPT = f'echo "{LINES[0]}"; while ! test -e more; do sleep 0.1; done; echo "{LINES[1]}"; {{}}exec sleep 60'


@driven
async def test_a_run_that_is_resumed_shows_how_far_it_reads(make: Made, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "runs", end="stopped", alive=False)
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", SCRIPT.format(""), "trainer"))
    app = make(attach=run)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "■ stopped" in screen_text(app))
        await pilot.press("r")
        await until(pilot, lambda: f"{'━' * 6}{'─' * 18} {LINES[0]}" in screen_text(app))
        Path("more").touch()
        await until(pilot, lambda: f"{'━' * 12}{'─' * 12} {LINES[1]}" in screen_text(app))
        assert LINES[0] not in screen_text(app), "the output keeps the newest line alone"
        end(app, run)


@pytest.mark.long
@driven
async def test_a_new_run_shows_how_far_it_reads_until_it_has_read_all(make: Made, monkeypatch: pytest.MonkeyPatch):
    script = SCRIPT.format('while ! test -e done; do sleep 0.1; done; echo "the data is read"; ')
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", script, "trainer"))
    app = make()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: f"{'━' * 6}{'─' * 18} {LINES[0]}" in screen_text(app))
        Path("more").touch()
        await until(pilot, lambda: f"{'━' * 12}{'─' * 12} {LINES[1]}" in screen_text(app))
        Path("done").touch()
        await until(pilot, lambda: "the trainer is starting" in screen_text(app))
        end(app, next(iter(app._shared.launched)))


def end(app, run: Path) -> None:
    process = app._shared.launched[run].process
    process.kill()
    process.wait()
