"""Configs to start from: the bundled example, and a recipe per task in the files beside this one."""

from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted

_FOLDER = Path(__file__).parent


def example() -> str:
    """The text of the bundled example."""
    return (_FOLDER.parent / "rptrain.toml").read_text(encoding="utf-8")


def names() -> list[str]:
    """The recipes, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def title(name: str) -> str:
    """What a recipe is for: its first line, which is a comment."""
    return text(name).partition("\n")[0].removeprefix("# ")


def text(name: str) -> str:
    """The text of a recipe. Raises UserError if there is none of this name."""
    known = names()
    if name not in known:
        likely = "".join(f' Did you mean "{one}"?' for one in nearest(name, known))
        raise UserError(f'"{quoted(name)}" is not a recipe.{likely} `rptrain init --list` lists all')
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
