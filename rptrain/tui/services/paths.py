"""Completion of paths as they are typed."""

import asyncio
import os
from contextlib import suppress

from textual.suggester import Suggester


class PathSuggester(Suggester):
    """Suggests the completion of the typed text by `complete`."""

    def __init__(self, suffixes: tuple[str, ...] = (), models: bool = False) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._suffixes, self._models = suffixes, models

    async def get_suggestion(self, value: str) -> str | None:
        return await asyncio.to_thread(complete, value, self._suffixes, self._models)


def complete(value: str, suffixes: tuple[str, ...] = (), models: bool = False) -> str | None:
    """The path with its last part completed: a folder gets a slash; files need one of `suffixes`, if there are any.

    With `models`, no files: a model's folder is the end of a path.
    """
    folder, part = os.path.split(value)
    if models and _is_model(folder or "."):
        return None
    try:
        with os.scandir(os.path.expanduser(folder or ".")) as entries:
            found = sorted(
                (entry.name, os.path.isdir(entry.path))
                for entry in entries
                if entry.name.startswith(part) and (part or not entry.name.startswith(".")) and is_text(entry.name)
            )
    except OSError:
        return None
    for name, is_folder in found:
        if is_folder or not (models or (suffixes and not name.lower().endswith(suffixes))):
            path = os.path.join(folder, name)
            completed = path + ("/" if is_folder and not (models and _is_model(path)) else "")
            if completed != value:
                return completed
    return None


def _is_model(folder: str) -> bool:
    return os.path.isfile(os.path.join(os.path.expanduser(folder), "config.json"))


def is_folder_without(value: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a path is a folder without a file with one of the suffixes, in it and in its folder `data`, as data sets
    of the Hub have one. Other folders in it are not searched, because that takes long for a path that is still typed,
    such as `~/`.
    """
    folder = os.path.expanduser(value)
    try:
        names = os.listdir(folder)
        with suppress(OSError):
            names += os.listdir(os.path.join(folder, "data"))
    except OSError:  # a file, or nothing
        return False
    return not any(name.lower().endswith(suffixes) for name in names)


def is_text(name: str) -> bool:
    """Whether a config can hold a file's name, which must be valid UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
