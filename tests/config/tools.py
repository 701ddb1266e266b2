"""A short config to change, and what loading it comes to: for the tests of configs."""

from pathlib import Path

import pytest

from rptrain.config.errors import ConfigError
from rptrain.config.resolve import Resolved, resolve

MINIMAL = """\
[model]
path = "tiny-tasks"

[[data.train]]
path = "builtin:tasks"
"""


def load(text: str, *overrides: str) -> Resolved:
    Path("c.toml").write_text(text, encoding="utf-8")
    return resolve("c.toml", overrides)


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    return [f"{place}: {message}" for place, message in error.value.mistakes]
