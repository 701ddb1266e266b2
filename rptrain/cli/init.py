"""`rptrain init`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.complete import config_files, recipe_names
from rptrain.cli.exits import exit_codes
from rptrain.config import recipes
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.replacing import replace_file

EXAMPLE = "rptrain.toml"


def init(
    file: Annotated[
        Path | None,
        typer.Argument(
            help=f"The file to write; by default {EXAMPLE}, or NAME.toml for a recipe.", autocompletion=config_files
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write this recipe in place of the example.", autocompletion=recipe_names),
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the recipes; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a config to start from: the bundled example, which trains a tiny model, or a recipe."""
    with exit_codes():
        if as_list:
            names = recipes.names()
            width = max(map(len, names))
            print("\n".join(f"{name:{width}}  {recipes.title(name)}" for name in names))
            return
        text = recipes.example() if recipe is None else recipes.text(recipe)
        path = expanded(file or (EXAMPLE if recipe is None else f"{recipe}.toml"))
        _check(path, force=force)
        replace_file(path, text.encode())
        command = f"rptrain --config {shlex.quote(str(path))}"
        if recipe is None:
            print(f"wrote {path}. Train with: {command}")
        else:
            print(f"wrote {path}. Set its model and data, then check the run with: {command} --dry-run")


def _check(path: Path, *, force: bool) -> None:
    """UserError if the file cannot be created, or exists and may not be replaced."""
    if path.suffix != ".toml":
        raise UserError(f"{path} is not the name of a config: name a file that ends with .toml")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist: create it, or name another file")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file")
    if os.path.lexists(path) and not force:
        raise UserError(f"{path} exists: name another file, or add --force to replace it")
