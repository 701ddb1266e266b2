"""The pages of the data browser, which the helper process makes."""

from pathlib import Path

from rptrain.config.resolve import resolve
from rptrain.data.samples import Page


def page(path: Path, text: str, number: int, first: int, count: int, problems: bool) -> Page:
    """Rows of a config's data set; see rptrain/data/browse.py."""
    from rptrain.data.browse import page

    return page(resolve(path, text=text).config, number, first, count, problems)
