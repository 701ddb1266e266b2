"""Which package may import which: those below it in ORDER. Neither files nor ROOMS import each other in a circle."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    *("utils", "config", "schedule", "kernels", "models", "engine", "checkpoint", "data", "inference", "runs"),
    *("planner", "train", "bench", "doctor", "tui", "cli", "__main__"),
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
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                wanted = {alias.name for alias in node.names}
            else:
                continue
            found[name] |= wanted & modules.keys() - {"rptrain", name}
    return found


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
