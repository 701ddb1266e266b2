"""New run: several data sets are shown, added, removed and edited, and the file's comments stay where they belong."""

import tomllib
from pathlib import Path

import pytest

from rptrain.tui.app import RptrainApp
from rptrain.tui.new_run import planning
from rptrain.tui.new_run.edits import Edits
from rptrain.tui.new_run.form import Form, Row
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import set_fields
from rptrain.utils.errors import UserError

from .conftest import (
    Made,
    Scripted,
    driven,
    focus,
    notified,
    planned,
    press_until,
    screen_text,
    settled,
    type_over,
    until,
)

TEXT = """\
# mine
[model]
path = "tiny-tasks"

[[data.train]] # chats
path = "a.jsonl" # first

# poems
[[data.train]]
path = "b.jsonl"
weight = 0.5 # half

# in tokens
[data]
max_length = 64
"""
THIRD = """\
[[data.train]]
path = "c.jsonl"

"""


def test_the_first_set_of_a_file_without_one(tmp_path: Path):
    draft = Draft(tmp_path / "rptrain.toml", '[model]\npath = "tiny-tasks"\n')
    draft.add_train_set("c.jsonl")
    assert tomllib.loads(draft.text)["data"] == {"train": [{"path": "c.jsonl"}]} and draft.train_sets == 1


@driven
async def test_a_file_with_something_else_in_place_of_data_sets(make: Made, tmp_path: Path):
    """It is said, and nothing is lost."""
    text = '[model]\npath = "tiny-tasks"\n[data]\ntrain = "x"\n'
    (tmp_path / "rptrain.toml").write_text(text)
    (tmp_path / "c.jsonl").touch()
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        await press_until(pilot, "ctrl+n", lambda: "c.jsonl" in screen_text(pilot.app))
        await pilot.press(*"c.jsonl")
        await until(pilot, lambda: "the file has something else there" in screen_text(pilot.app))
        await press_until(pilot, "enter", lambda: "the file has something else there" in notified(pilot.app))
        assert pilot.app.is_running and (tmp_path / "rptrain.toml").read_text() == text


def test_comments_stay_with_what_they_are_about(tmp_path: Path):
    draft = Draft(tmp_path / "rptrain.toml", TEXT)
    draft.add_train_set("c.jsonl")
    assert draft.text == TEXT.replace("# in tokens", THIRD + "# in tokens") and draft.train_sets == 3
    draft.put("data.train.1.format", "text")
    assert "# half\nformat" in draft.text
    draft.remove_train_set(2)
    draft.put("data.train.1.format", "")
    assert draft.text == TEXT
    draft.remove_train_set(1)
    begin, end = TEXT.index("# poems"), TEXT.index("# in tokens")
    assert draft.text == TEXT[:begin] + TEXT[end:]


def test_the_first_set_is_removed_without_the_comments_of_the_second(tmp_path: Path):
    draft = Draft(tmp_path / "rptrain.toml", TEXT)
    draft.remove_train_set(0)
    assert "first" not in draft.text and "chats" not in draft.text
    assert all(comment in draft.text for comment in ("# poems", "# half", "# in tokens", "# mine"))
    assert tomllib.loads(draft.text)["data"]["train"] == [{"path": "b.jsonl", "weight": 0.5}]


@pytest.mark.parametrize("text", ['data.train = [{path = "a"}, {path = "b"}]\n', '[data]\ntrain = [{path = "a"}]\n'])
def test_sets_in_one_line_are_added_and_removed_there(tmp_path: Path, text: str):
    draft = Draft(tmp_path / "rptrain.toml", text)
    draft.add_train_set("c")
    draft.remove_train_set(0)
    left = [one["path"] for one in tomllib.loads(text)["data"]["train"]][1:]
    assert [one["path"] for one in tomllib.loads(draft.text)["data"]["train"]] == [*left, "c"]


def test_sets_with_another_table_between_them_are_left_as_they_are(tmp_path: Path):
    text = TEXT.replace("# poems", "[optim]\nlearning_rate = 1e-5\n# poems")
    draft = Draft(tmp_path / "rptrain.toml", text)
    with pytest.raises(UserError, match=r"another table stands between two \[\[data.train\]\]"):
        draft.add_train_set("c.jsonl")
    with pytest.raises(UserError, match="another table"):
        draft.remove_train_set(0)
    assert draft.text == text
    draft.put("data.train.1.path", "c.jsonl")
    assert draft.text == text.replace("b.jsonl", "c.jsonl")


def test_what_was_set_by_hand_stays_with_its_set(tmp_path: Path):
    """Edits of the sets behind a removed one move with them, and the new first set decides about the run's name."""
    edits = Edits(Draft(tmp_path / "rptrain.toml", TEXT + '[log]\nrun_name = "tiny-tasks-a"\n'))
    edits.take({"data.train.0.weight": "[", "data.train.1.weight": "[[", "data.max_length": "[[["})
    edits.remove_train_set(0)
    assert {key: refused.shown for key, refused in edits.refused.items()} == {
        "data.train.0.weight": "[[",
        "data.max_length": "[[[",
    }
    assert edits.draft.shown("log.run_name") == "tiny-tasks-b"


@pytest.mark.parametrize("given", [False, True])
def test_other_data_adds_no_settings_to_a_file(tmp_path: Path, given: bool):
    """Only to a new config, which begins with what suits its data."""
    draft = Draft(tmp_path / "rptrain.toml", TEXT)
    draft = draft if given else Draft.instead_of(tmp_path / "rptrain.toml")
    edits = Edits(draft)
    edits.take({"data.train.0.path": "c.jsonl"})
    assert bool(draft.shown("train.max_steps")) is not given
    edits.add_train_set("d.jsonl")
    edits.remove_train_set(0)
    assert bool(draft.shown("train.max_steps")) is not given


@pytest.mark.parametrize("before", ["a.jsonl", "builtin:tasks"])
def test_other_data_changes_no_settings_of_a_file_unless_they_were_for_an_example(tmp_path: Path, before: str):
    text = f"""
[model]
path = "tiny-tasks"

[[data.train]]
path = "{before}"

[[data.train]]
path = "b.jsonl"

[data]
max_length = 4096

[train]
num_epochs = 7.0
"""
    for change in ("take", "remove"):
        draft = Draft(tmp_path / "rptrain.toml", text)
        edits = Edits(draft)
        if change == "take":
            edits.take({"data.train.0.path": "c.jsonl"})
        else:
            edits.remove_train_set(0)
        kept = [draft.shown("data.max_length"), draft.shown("train.num_epochs")] == ["4096", "7.0"]
        assert kept is (before == "a.jsonl")


@pytest.mark.long
@driven
async def test_refused_values_move_with_their_sets(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(TEXT)
    app = make()
    async with app.run_test(size=(120, 50)) as pilot:
        await settled(pilot)
        await type_over(pilot, "[", "#data-train-1-weight")
        await focus(pilot, "#data-train-0-path")
        await press_until(pilot, "ctrl+l", lambda: values(app) == ["b.jsonl", "["])
        await settled(pilot)
        await pilot.press("7")  # it replaces the path, as any value that was just shown
        await until(pilot, lambda: values(app) == ["7", "["])


def values(app: RptrainApp) -> list[str]:
    """What is shown of the data sets."""
    rows = [row for row in app.screen.query(Row) if row.field in set_fields(row.field.train_set or 0) and row.display]
    return [row.editor.value for row in rows if row.editor is not None]


def sets(folder: Path) -> list[dict[str, object]]:
    return tomllib.loads((folder / "rptrain.toml").read_text())["data"]["train"]


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(60, 24), (200, 50)])
@driven
async def test_sets_are_edited_by_keys(make: Made, tmp_path: Path, size: tuple[int, int]):
    (tmp_path / "rptrain.toml").write_text(TEXT)
    (tmp_path / "c.jsonl").write_text("{}\n")
    app = make()
    async with app.run_test(size=size, notifications=True) as pilot:
        await settled(pilot)
        assert values(app) == ["a.jsonl", "", "auto", "b.jsonl", "0.5", "auto"]
        assert "data 2" in screen_text(app) and "✕ remove ^l" in screen_text(app)
        await press_until(pilot, "ctrl+l", lambda: "move to a data set" in notified(app))
        for _ in range(4):
            await pilot.press("down")
        await until(pilot, lambda: app.focused is app.screen.query_one("#data-train-1-path"))
        await press_until(pilot, "ctrl+l", lambda: values(app) == ["a.jsonl"])
        await until(pilot, lambda: app.focused is app.screen.query_one("#data-train-0-path"))
        await press_until(pilot, "ctrl+l", lambda: "a run needs at least one data set" in notified(app))
        await press_until(pilot, "ctrl+n", lambda: "c.jsonl" in screen_text(app))
        await pilot.press(*"c.js", "enter")
        await until(pilot, lambda: values(app) == ["a.jsonl", "", "auto", "c.jsonl", "", "auto"])
        await until(pilot, lambda: app.focused is app.screen.query_one("#data-train-1-path"))
        await press_until(pilot, "down", lambda: app.focused is app.screen.query_one("#data-train-1-weight"))
        await type_over(pilot, "0.5", "#data-train-1-weight")
        await press_until(pilot, "down", lambda: app.focused is app.screen.query_one("#data-train-1-format"))
        await press_until(pilot, "right", lambda: "messages" in values(app))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: len(sets(tmp_path)) == 2)
    expected = {"path": "c.jsonl", "weight": 0.5, "format": "messages"}
    assert sets(tmp_path) == [{"path": "a.jsonl"}, expected]
    assert "# first" in (tmp_path / "rptrain.toml").read_text()


@pytest.mark.long
@driven
async def test_sets_are_added_and_removed_by_the_mouse(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(TEXT)
    (tmp_path / "c.jsonl").write_text("{}\n")
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.click("Row .remove")  # of the first set
        await until(pilot, lambda: values(app) == ["b.jsonl", "0.5"])
        await pilot.click("Form .add")
        await until(pilot, lambda: "c.jsonl" in screen_text(app))
        await press_until(pilot, "escape", lambda: "A further data set" not in screen_text(app))
        assert values(app) == ["b.jsonl", "0.5"]
        await pilot.click("Form .add")
        await until(pilot, lambda: "c.jsonl" in screen_text(app))
        await pilot.press(*"c.js", "enter")
        await until(pilot, lambda: values(app)[3:] == ["c.jsonl", "", "auto"])
        await pilot.click("Sets .remove")
        await until(pilot, lambda: values(app) == ["b.jsonl", "0.5"])


@pytest.mark.long
@driven
async def test_a_mistake_in_a_set_is_marked_there(make: Made, helper: Scripted, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(TEXT)
    refused = planned()
    refused.report.update(fits=False, refusals=[{"key": "data.train.1.path", "message": "b.jsonl: no such data"}])
    helper.answers[planning.plan] = refused
    app = make()

    def marked() -> list[str]:
        return [row.field.key for row in app.screen.query(Row) if row.has_class("-invalid")]

    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: marked() == ["data.train.1.path"])
        await focus(pilot, "#model-path")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.focused is app.screen.query_one("#data-train-1-path"))
        await type_over(pilot, "0", "#data-train-1-weight")
        await until(pilot, lambda: marked() == ["data.train.1.weight"])
        assert "✗ must be" in screen_text(app)


@pytest.mark.long
@driven
async def test_another_file_brings_its_own_sets(make: Made, tmp_path: Path):
    (tmp_path / "rptrain.toml").write_text(TEXT)
    (tmp_path / "one.toml").write_text("[model]\npath = 'tiny-tasks'\n[[data.train]]\npath = 'x'\nsplit = 'dev'\n")
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for name, shown in (("one", ["x"]), ("rptrain", ["a.jsonl", "", "auto", "b.jsonl", "0.5", "auto"])):
            await press_until(pilot, "ctrl+o", lambda name=name: f"{name}.toml" in screen_text(app))
            await pilot.press(*name, "enter")
            await until(pilot, lambda shown=shown: values(app) == shown)
        assert app.screen.query_one(Form).has_class("-several")
