"""Find a run, or a model of one, by its name or its path."""

from pathlib import Path

from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.runs.folder.listing import newest
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.suggest import nearest
from rptrain.utils.text import one_line

NEAR = 3  # names that a message suggests


def named_run(name: str | None, folder: Path) -> Path:
    """The folder of a run: `name` is a path or the name of a run in `folder`; None is the newest run there.

    UserError if the run does not exist, with the names most like it.
    """
    if name is None:
        if (found := newest(folder)) is None:
            raise UserError(f"there are no runs in {folder}: `rptrain --config FILE` begins one")
        return found
    path = expanded(_given(name))
    for run in (path, folder / path):
        if (run / RUN_CONFIG).is_file():
            return run
    if path.is_dir():
        raise UserError(
            f"{one_line(name)} is not a run: it has no {RUN_CONFIG}; `rptrain runs` lists the runs, or with --runs "
            "those of a folder"
        )
    known = [file.parent.name for file in folder.glob(f"*/{RUN_CONFIG}")]
    near = nearest(name, known, NEAR)
    advice = f"did you mean {', '.join(near)}?" if near else "`rptrain runs` lists the runs"
    raise UserError(f"{one_line(name)} does not exist, neither as a path nor as a run in {folder}: {advice}")


def named_source(name: str, folder: Path) -> Path:
    """A run as in `named_run`, a checkpoint or the directory of a model; a path that exists comes before a name.

    UserError if there is neither.
    """
    path = expanded(_given(name))
    return path if path.exists() else named_run(name, folder)


def _given(name: str) -> Path:
    """The name as a path. UserError if it is empty, which would be the current folder."""
    if not name.strip():
        raise UserError("the name of the run is empty: `rptrain runs` lists the runs")
    return Path(name)
