"""Which package may import which: those below it in ORDER. Neither files nor ROOMS import each other in a circle."""

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    *("utils", "config", "schedule", "kernels", "models", "data", "engine", "machine", "checkpoint", "inference"),
    *("runs", "preflight", "planner", "train", "bench", "doctor", "tui", "cli", "__main__"),
)
ROOMS = ("engine",)  # packages whose rooms, the files and folders at their top, form no circle


def sources() -> dict[str, str]:
    """The product's modules and their text."""
    files = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("rptrain", "kernels", "models")}
    found = {}
    for folder, paths in files.items():
        for path in paths:
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = ("rptrain", *parts) if folder != "rptrain" else parts
            found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the modules each one imports, inside functions too."""
    return {name: set(imported(text) & modules.keys() - {"rptrain", name}) for name, text in modules.items()}


@cache
def imported(text: str) -> frozenset[str]:
    """The names of modules, and what may be one, that a module's text imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def violations(modules: Mapping[str, str]) -> list[str]:
    arrows, found = imports(modules), []
    for name, wanted in arrows.items():
        for other in sorted(wanted):
            if package(name) != package(other) and ORDER.index(package(name)) <= ORDER.index(package(other)):
                found.append(f"{name} imports {other}")
    return found + circles(arrows)


def circles(arrows: Mapping[str, set[str]]) -> list[str]:
    """A circle of arrows in words, if there is one."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return ["a circle: " + " -> ".join(error.args[1])]
    return []


def room_arrows(modules: Mapping[str, str], within: str) -> dict[str, set[str]]:
    """Which rooms of a package each of its rooms imports."""
    start, found = f"rptrain.{within}.", dict[str, set[str]]()
    for name, wanted in imports(modules).items():
        if name.startswith(start):
            rooms = {other.removeprefix(start).split(".")[0] for other in wanted if other.startswith(start)}
            room = name.removeprefix(start).split(".")[0]
            found.setdefault(room, set()).update(rooms - {room})
    return found


def package(module: str) -> str:
    return module.removeprefix("rptrain").lstrip(".").split(".")[0]


def test_the_arrows_point_down():
    modules = sources()
    assert {package(name) for name in modules if name != "rptrain"} == set(ORDER)
    assert violations(modules) == []
    arrows = imports(modules)
    assert not arrows["rptrain"], "importing the package does nothing"
    of_schedule = {other for name, wanted in arrows.items() if package(name) == "schedule" for other in wanted}
    assert {package(other) for other in of_schedule} == {"schedule"}


@pytest.mark.parametrize("within", ROOMS)
def test_rooms_form_no_circle(within):
    assert circles(room_arrows(sources(), within)) == []


def test_a_circle_of_rooms_is_found():
    modules = sources()
    modules["rptrain.engine.memory.arena"] += "from rptrain.engine.optim.adam import CpuAdam\n"
    assert circles(imports(modules)) == []
    (circle,) = circles(room_arrows(modules, "engine"))
    assert {"memory", "optim"} <= {*circle.removeprefix("a circle: ").split(" -> ")}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "rptrain.engine.memory.store",
            "def held():\n    from rptrain.runs import control\n",
            "engine.memory.store imports rptrain.ru",
        ),
        ("rptrain.schedule.plan", "from rptrain.schedule.dispatch import dispatch\n", "a circle: "),
        ("rptrain.kernels.batch", "import rptrain.models.spec\n", "kernels.batch imports rptrain.models.spec"),
    ],
    ids=["function", "circle", "dotted"],
)
def test_a_wrong_arrow_is_found(name, text, expected):
    modules = sources()
    modules[name] += text
    assert any(expected in found for found in violations(modules))


# By package: its rooms, the files and folders at its top, of which each imports only those left of it.
ROOM_ORDERS = {
    "models": "locate base_files presets params <- layer <- spec <- layers weights <- families <- decode <- transforms",
    "runs": "records <- view <- folder",
    "tui": "dialogs outcomes services themes turns widgets <- context messages"
    " <- chat data doctor export new_run run runs <- app <- start",
}


def room_violations(modules: Mapping[str, str], within: str) -> list[str]:
    steps = {room: step for step, rooms in enumerate(ROOM_ORDERS[within].split(" <- ")) for room in rooms.split()}
    arrows = room_arrows(modules, within)
    assert arrows.keys() == steps.keys()
    return [f"{room} imports {other}" for room in arrows for other in arrows[room] if steps[other] >= steps[room]]


@pytest.mark.parametrize("within", ROOM_ORDERS)
def test_rooms_import_those_left_of_them(within):
    assert room_violations(sources(), within) == []


def test_a_wrong_arrow_between_rooms_is_found():
    modules = sources()
    modules["rptrain.models.weights.pretrained"] += "from rptrain.models.layers.rope import tables\n"
    modules["rptrain.models.layer"] += "def spec():\n    from rptrain.models.spec import ModelSpec\n"
    assert sorted(room_violations(modules, "models")) == ["layer imports spec", "weights imports layers"]
    modules["rptrain.runs.view.pace"] += "from rptrain.runs.folder.run_dir import RunDir\n"
    assert room_violations(modules, "runs") == ["view imports folder"]
    modules["rptrain.tui.run.screen"] += "def chat():\n    from rptrain.tui.chat.screen import ChatScreen\n"
    assert room_violations(modules, "tui") == ["run imports chat"]
