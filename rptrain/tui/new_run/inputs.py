"""The files that a plan depends on, to notice when one of them has changed."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from rptrain.config.schema import Config
from rptrain.data.folders import choose
from rptrain.models.base_files import base_paths
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState

MOST = 1000  # files that are looked at


@dataclass(frozen=True)
class Inputs:
    """The files of the model and of the data as they were; None for one that did not exist."""

    states: Mapping[Path, FileState | None]

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls({path: _state(path) for path in islice(_paths(config), MOST)})

    @property
    def have_changed(self) -> bool:
        return any(_state(path) != state for path, state in self.states.items())


def _paths(config: Config) -> Iterator[Path]:
    """Folders too: their state changes with the names in them."""
    data, model = config.data, Path(config.model.path)
    if data.chat_template is not None and "{" not in data.chat_template:
        yield Path(data.chat_template)
    sources = (*data.train, *data.val)
    yield from (Path(source.path) for source in sources)
    yield model
    with suppress(UserError, OSError):  # which the plan says
        yield from base_paths(model)
    for source in sources:
        with suppress(UserError, OSError):
            yield from choose(source.path, source.split, follow_links=data.follow_links).files


def _state(path: Path) -> FileState | None:
    try:
        return FileState.of(path)
    except (OSError, ValueError):  # ValueError: a null character
        return None
