"""The data browser: pages, problems, several data sets, and what a small or colorless terminal shows of them."""

from pathlib import Path
from typing import Any

import pytest

from rptrain.data.samples import FirstSamples, Page, Row, Sample, TextPart
from rptrain.tui.data import pages
from rptrain.tui.data.screen import ROWS, DataBrowser
from rptrain.tui.new_run.sample_text import preview_text
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.services.paths import is_folder_without
from rptrain.utils.errors import UserError

from .conftest import Made, Scripted, driven, notified, press_until, screen_text, type_over, until

pytestmark = pytest.mark.long
SETS = ("chats.jsonl", "more\x1b.jsonl")


class Paged(Scripted):
    """Answers with the page that was asked for: 12 rows, of which every fifth is bad."""

    async def call(self, function: Any, *given: Any) -> Any:
        if function is not pages.page or pages.page in self.answers:
            return await super().call(function, *given)
        self.asked.append((function, *given))
        return page_of(*given[2:])


def page_of(number: int, first: int, count: int, problems: bool) -> Page:
    numbers = [line for line in range(1, 13) if not problems or line % 5 == 0]
    rows = tuple(_row(number, line) for line in numbers[first : first + count])
    counts = (("bad", 2),)
    bins = ((16, 4), (32, 5), (50, 1), (64, 1))
    return Page(SETS, number, rows, first, len(numbers), 12, number == 0, counts, bins, 50, (9, 60), repeats=3 * number)


def _row(number: int, line: int) -> Row:
    place = f"{SETS[number]}:{line}"
    if line % 5 == 0:
        return Row(place, 0, (), "has no [b]messages\x1b", '{"text\x1b": [b]5}')
    return Row(place, 12, (TextPart(f"question {line}", False), TextPart("answer", True)), "")


@pytest.fixture
def helper() -> Scripted:
    return Paged()


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [(60, 24), (80, 24), (120, 36), (200, 50)])
@driven
async def test_pages_problems_and_sets(make: Made, helper: Scripted, size: tuple[int, int]):
    async with make().run_test(size=size) as pilot:
        app = pilot.app

        def shows(*parts: str) -> bool:
            return all(part in screen_text(app) for part in parts)

        await until(pilot, lambda: isinstance(app.screen, NewRun))
        await press_until(pilot, "ctrl+t", lambda: shows("question 1⟦answer⟧"))
        text = screen_text(app)
        assert "1 of 2: chats.jsonl" in text and "12 rows read, 2 bad; 1-5 of 12" in text
        assert "9 to 60 tokens" in text and "max_length" in text and "50 tokens" in text
        await press_until(pilot, "pagedown", lambda: shows("chats.jsonl:6,", f"{ROWS + 1}-{2 * ROWS} of 12"))
        await press_until(pilot, "n", lambda: shows("chats.jsonl:11,", "11-12 of 12"))
        asked = len(helper.asked)
        await pilot.press("pagedown")
        await press_until(pilot, "pageup", lambda: shows("6-10 of 12"))
        assert len(helper.asked) == asked + 1, "nothing comes after the last page"
        await press_until(pilot, "b", lambda: shows("chats.jsonl:5  ✗ has no [b]messages␛", "1-2 of 2 with problems"))
        assert shows('{"text␛": [b]5}')
        await press_until(
            pilot, "d", lambda: shows("2 of 2: more␛.jsonl", "the first 12 rows read", "3 samples repeat earlier ones")
        )
        await press_until(pilot, "b", lambda: shows("1-5 of 12"))
        assert max(map(len, screen_text(app).splitlines())) <= size[0]
        await press_until(pilot, "escape", lambda: isinstance(app.screen, NewRun))
        await press_until(pilot, "ctrl+t", lambda: isinstance(app.screen, DataBrowser))
        await press_until(pilot, "f3", lambda: not isinstance(app.screen, DataBrowser))


@driven
async def test_data_that_cannot_be_read(make: Made, helper: Scripted):
    helper.answers[pages.page] = UserError("none.jsonl: no such data file or folder")
    async with make().run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(pilot.app.screen, NewRun))
        await press_until(pilot, "ctrl+t", lambda: "no such data file" in screen_text(pilot.app))
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, NewRun))
        await type_over(pilot, "many", "#data-max_length")
        await press_until(pilot, "ctrl+t", lambda: "the data is shown once" in notified(pilot.app))


def test_warnings_about_the_data_are_above_its_samples():
    found = FirstSamples(
        "texts, 1 KiB", (Sample("a:1", 2, 1, (TextPart("ab", True),)),), ("2 of 3 samples\x1b repeat",)
    )
    lines = preview_text(found).plain.splitlines()
    assert lines.index("! 2 of 3 samples␛ repeat") < lines.index("sample 1, 2 tokens") < lines.index("ab")


def test_only_a_folder_that_itself_has_data_is_read_while_its_path_is_typed(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").touch()
    assert is_folder_without(str(tmp_path), (".jsonl",))
    assert not is_folder_without(str(tmp_path / "sub"), (".jsonl",))
    assert not is_folder_without(str(tmp_path / "sub" / "a.jsonl"), (".jsonl",))
    assert not is_folder_without(str(tmp_path / "missing"), (".jsonl",))
    (tmp_path / "data").mkdir()
    assert is_folder_without(str(tmp_path), (".jsonl",))
    (tmp_path / "data/train-00000-of-00001.jsonl").touch()
    assert not is_folder_without(str(tmp_path), (".jsonl",))
