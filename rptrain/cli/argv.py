"""The arguments of the command line, with the command that was left out. Imports little, as it comes first."""

import sys

from rptrain.utils.text import is_terminal

OPEN = "open"
_GLOBAL_OPTIONS = ("--help", "-h", "--version", "-V", "--keys", "--install-completion", "--show-completion")
_OTHER_FORMATS = (".yaml", ".yml", ".json", ".py")


def arguments(given: list[str]) -> list[str]:
    """The arguments, with the command `train` added if no command is named.

    A config file alone is opened in the interface if there is a terminal.
    """
    first = given[0] if given else ""
    if first.endswith(_OTHER_FORMATS) and "=" not in first and not first.startswith("-"):
        return ["train", "--config", *given]  # which says that it is not TOML
    if first.endswith(".toml") and "=" not in first and not first.startswith("-"):
        alone = len(given) == 1 and is_terminal(sys.stdin) and is_terminal(sys.stdout)
        return [OPEN, first] if alone else ["train", "--config", *given]
    if (first.startswith("-") and first not in _GLOBAL_OPTIONS) or "=" in first:
        return ["train", *given]
    return given
