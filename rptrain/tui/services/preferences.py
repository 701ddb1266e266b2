"""Preferences of the interface: a small TOML file, `rptrain/tui.toml` in the settings folder."""

import tomllib
from pathlib import Path
from typing import Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rptrain.config.types import PathText
from rptrain.utils.errors import UserError, describe
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import from_environment
from rptrain.utils.replacing import replace_file

ThemeName = Literal["dark", "light"]


class Preferences(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    look: ThemeName = "dark"
    models: tuple[PathText, ...] = Field(default=(".", "models", "~/models", "/models"))  # folders to search
    data: tuple[PathText, ...] = Field(default=(".", "data", "~/data"))


def place() -> Path:
    return from_environment("XDG_CONFIG_HOME", "~/.config") / "rptrain" / "tui.toml"


def load(path: Path) -> Preferences:
    """The preferences in the file, or the defaults if there is none. Raises UserError for an invalid file."""
    try:
        return Preferences.model_validate(tomllib.loads(read_small_text(path)))
    except FileNotFoundError:
        return Preferences()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read: {describe(error)}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        known = ", ".join(Preferences.model_fields)
        raise UserError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; its keys are {known}: fix or remove it"
        ) from None


def save_theme(path: Path, theme: ThemeName) -> None:
    """Writes the theme and keeps everything else in the file. Raises OSError or UserError if it cannot be written."""
    document = tomlkit.parse(read_small_text(path)) if path.is_file() else tomlkit.document()
    document["look"] = theme
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, tomlkit.dumps(document).encode())
