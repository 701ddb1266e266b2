"""Which package may import which: those below it in ORDER. Neither files nor submodules import each other in cycles."""

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    *("utils", "config", "schedule", "kernels", "models", "data", "engine", "machine", "checkpoint", "gguf"),
    *("inference", "runs", "hub", "preflight", "planner", "train", "api", "bench", "doctor", "tui", "cli", "__main__"),
)
ACYCLIC = ("engine",)  # packages whose submodules, the files and folders at their top, form no cycle


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
    """Which of the modules each one imports, inside functions too. Without the package itself, which names the API."""
    named = {name: text for name, text in modules.items() if name != "rptrain"}
    return {name: set(imported(text) & named.keys() - {name}) for name, text in named.items()}


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
    return found + cycles(arrows)


def cycles(arrows: Mapping[str, set[str]]) -> list[str]:
    """A cycle of arrows in words, if there is one."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return ["a cycle: " + " -> ".join(error.args[1])]
    return []


def submodule_arrows(modules: Mapping[str, str], within: str) -> dict[str, set[str]]:
    """Which submodules of a package each of them imports."""
    start, found = f"rptrain.{within}.", dict[str, set[str]]()
    for name, wanted in imports(modules).items():
        if name.startswith(start):
            submodules = {other.removeprefix(start).split(".")[0] for other in wanted if other.startswith(start)}
            submodule = name.removeprefix(start).split(".")[0]
            found.setdefault(submodule, set()).update(submodules - {submodule})
    return found


def package(module: str) -> str:
    return module.removeprefix("rptrain").lstrip(".").split(".")[0]


def test_the_arrows_point_down():
    modules = sources()
    assert {package(name) for name in modules if name != "rptrain"} == set(ORDER)
    assert violations(modules) == []
    arrows = imports(modules)
    assert imported(modules["rptrain"]) & modules.keys() == {"rptrain.api"}, "for type checkers"
    of_schedule = {other for name, wanted in arrows.items() if package(name) == "schedule" for other in wanted}
    assert {package(other) for other in of_schedule} == {"schedule"}


@pytest.mark.parametrize("within", ACYCLIC)
def test_submodules_form_no_cycle(within):
    assert cycles(submodule_arrows(sources(), within)) == []


def test_a_cycle_of_submodules_is_found():
    modules = sources()
    modules["rptrain.engine.memory.arena"] += "from rptrain.engine.optim.adam import CpuAdam\n"
    assert cycles(imports(modules)) == []
    (cycle,) = cycles(submodule_arrows(modules, "engine"))
    assert {"memory", "optim"} <= {*cycle.removeprefix("a cycle: ").split(" -> ")}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "rptrain.engine.memory.store",
            "def held():\n    from rptrain.runs import control\n",
            "engine.memory.store imports rptrain.ru",
        ),
        ("rptrain.schedule.plan", "from rptrain.schedule.dispatch import dispatch\n", "a cycle: "),
        ("rptrain.kernels.batch", "import rptrain.models.spec\n", "kernels.batch imports rptrain.models.spec"),
    ],
    ids=["function", "cycle", "dotted"],
)
def test_a_wrong_arrow_is_found(name, text, expected):
    modules = sources()
    modules[name] += text
    assert any(expected in found for found in violations(modules))


# By package: its submodules, the files and folders at its top, of which each imports only those left of it.
SUBMODULE_ORDERS = {
    "models": "locate base_files presets params <- layer <- spec <- layers weights <- families <- decode <- transforms",
    "runs": "records <- view <- folder",
    "tui": "dialogs outcomes services themes turns widgets <- context messages"
    " <- chat data doctor export new_run run runs <- app <- start",
}


def submodule_violations(modules: Mapping[str, str], within: str) -> list[str]:
    steps = {
        submodule: step
        for step, submodules in enumerate(SUBMODULE_ORDERS[within].split(" <- "))
        for submodule in submodules.split()
    }
    arrows = submodule_arrows(modules, within)
    assert arrows.keys() == steps.keys()
    return [
        f"{submodule} imports {other}"
        for submodule in arrows
        for other in arrows[submodule]
        if steps[other] >= steps[submodule]
    ]


@pytest.mark.parametrize("within", SUBMODULE_ORDERS)
def test_submodules_import_those_left_of_them(within):
    assert submodule_violations(sources(), within) == []


def test_a_wrong_arrow_between_submodules_is_found():
    modules = sources()
    modules["rptrain.models.weights.pretrained"] += "from rptrain.models.layers.rope import tables\n"
    modules["rptrain.models.layer"] += "def spec():\n    from rptrain.models.spec import ModelSpec\n"
    assert sorted(submodule_violations(modules, "models")) == ["layer imports spec", "weights imports layers"]
    modules["rptrain.runs.view.pace"] += "from rptrain.runs.folder.run_dir import RunDir\n"
    assert submodule_violations(modules, "runs") == ["view imports folder"]
    modules["rptrain.tui.run.screen"] += "def chat():\n    from rptrain.tui.chat.screen import ChatScreen\n"
    assert submodule_violations(modules, "tui") == ["run imports chat"]
