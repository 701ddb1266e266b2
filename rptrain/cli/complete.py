"""What the shell completes: names of runs, config files and config keys. Nothing heavy is imported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from rptrain.gguf import kinds
from rptrain.utils.paths import RUNS
from rptrain.utils.text import one_line


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """The runs in the folder of --runs, or in the default one. Nothing for a path, which the shell completes."""
    from rptrain.checkpoint.metadata import RUN_CONFIG

    folder = Path(context.params.get("folder") or RUNS)
    names = (file.parent.name for file in folder.glob(f"*/{RUN_CONFIG}"))
    return sorted(name for name in names if name.startswith(incomplete) and name == one_line(name))


def config_files(incomplete: str) -> list[str]:
    """TOML files whose path begins with `incomplete`. Without one, the shell completes other paths, such as folders."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    paths = map(str, folder.glob("*.toml"))
    return sorted(path for path in paths if path.startswith(incomplete) and path == one_line(path))


def config_keys(incomplete: str) -> list[tuple[str, str]]:
    """Config keys and what they do, and after `key=` the values of a key that has a list of them."""
    from rptrain.config.schema import keys

    tables = ("data.train.", "data.val.")  # of these there are several, so that a key needs a number
    fields = {key: field for key, field in keys().items() if not key.startswith(tables)}
    named, equals, value = incomplete.partition("=")
    if equals:
        field = fields.get(named)
        choices = [] if field is None else _choices(field.annotation)
        return [(f"{named}={choice}", "") for choice in choices if choice.startswith(value)]
    return [(f"{key}=", field.description or "") for key, field in fields.items() if key.startswith(incomplete)]


def _choices(annotation: Any) -> Iterator[str]:
    """The texts that a type lists."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    else:
        for one in get_args(annotation):
            yield from _choices(one)


def recipe_names(incomplete: str) -> list[tuple[str, str]]:
    """The recipes and what they are for."""
    from rptrain.config import recipes

    return [(name, recipes.title(name)) for name in recipes.names() if name.startswith(incomplete)]


def gguf_types(incomplete: str) -> list[str]:
    """The types of GGUF files that begin with `incomplete`."""
    return [kind for kind in kinds.ALL if kind.startswith(incomplete)]


def no_completions() -> list[str]:
    """For paths: the shell completes them itself."""
    return []
