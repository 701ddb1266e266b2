"""Forms that are typed into New run of a real terminal, at 30 keys per second, while plans are computed."""

import random
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .terminal import PATIENCE, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]

FORMS = 10
RATE = 30  # keys per second
PLANS = 0.45  # seconds without a key, after which a plan is being computed
START = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:tasks"\n[train]\nnum_epochs = 1.0\n'


def forms(seed: int) -> Iterator[dict[str, Any]]:
    """Ten settings a form, in the order of the form, which all differ from those of the form before."""
    chance = random.Random(seed)
    for number in range(FORMS):
        micro = chance.choice((1, 2, 4)) if number % 2 else chance.choice((3, 5, 6))
        yield {
            "model.path": "tiny-tasks",
            "train.num_epochs": 1.5 + number,
            "train.max_steps": 100 + 10 * number + chance.randrange(10),
            "optim.learning_rate": float(f"{1 + number % 9}.{chance.randrange(1, 9)}e-{3 + number % 2}"),
            "optim.warmup_steps": 20 + number,
            "data.max_length": 64 + 3 * number,
            "train.micro_batch_size": micro,
            "train.global_batch_size": micro * (2 + number),
            "log.run_name": f"form-{seed}-{number}",
            "save.save_steps": 500 + number,
        }


PLACES = dict(zip(next(forms(0)), (0, 3, 4, 5, 6, 7, 8, 9, 16, 18), strict=True))  # rows of the settings


def strokes(form: dict[str, Any], chance: random.Random) -> list[list[str]]:
    """The keys of a form; between two lists of them a plan begins to be computed."""
    found, place = [["C-Home"]], 0
    for key, value in form.items():
        way = chance.choice(("Down", "Tab"))
        found[-1] += [way] * (PLACES[key] - place)
        place = PLACES[key]
        written = f"{value:.1e}".replace("e-0", "e-") if key == "optim.learning_rate" else str(value)
        if chance.random() < 0.3:  # a slip of the finger
            found[-1] += ["x", "BSpace"]
        found[-1] += list(written)
        if chance.random() < 0.4:
            found.append([])
    found[-1].append("C-s")
    return found


def saved(path: Path, form: dict[str, Any]) -> dict[str, Any]:
    """The settings of a form in the file, once that was saved with its name. The deadline only ends a hang."""
    end = time.monotonic() + PATIENCE
    while True:
        config = tomllib.loads(path.read_text())
        values = {key: config.get(key.split(".")[0], {}).get(key.split(".")[1]) for key in form}
        if values["log.run_name"] == form["log.run_name"] or time.monotonic() > end:
            return values
        time.sleep(0.1)


@pytest.mark.parametrize("size", ["80x24", "120x40", "200x60"])
def test_every_setting_is_as_it_was_typed(size: str, tmp_path: Path):
    columns, _, lines = size.partition("x")
    (tmp_path / "r.toml").write_text(START)
    terminal = Terminal(tmp_path, (int(columns), int(lines)))
    chance = random.Random(size)
    typed = list(forms(int(columns)))
    wrong: list[tuple[str, Any, Any]] = []
    keys, took = 0, 0.0
    terminal.start("r.toml")
    try:
        terminal.until("model +tiny-tasks")
        for form in typed:
            for part in strokes(form, chance):
                begun = time.monotonic()
                terminal.press(*part, every=1 / RATE)
                keys, took = keys + len(part), took + time.monotonic() - begun
                time.sleep(PLANS)
            found = saved(tmp_path / "r.toml", form)
            wrong += [(key, form[key], found[key]) for key in form if found[key] != form[key]]
    finally:
        terminal.close()
    settings = FORMS * len(PLACES)
    print(f"{size}: {settings - len(wrong)} of {settings} settings as typed, {keys} keys, {keys / took:.0f} per second")
    assert not wrong
