"""`rptrain` without a command, and messages about wrong arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rptrain import __version__
from rptrain.cli.argv import arguments
from rptrain.cli.exits import exit_codes
from rptrain.utils.text import as_message

# Raised for wrong arguments; by which package depends on the version of typer, which exports a subclass only.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


class Commands(TyperGroup):
    """The commands. What is wrong with arguments is shown as a message, because it quotes them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = arguments(args) if ctx.resilient_parsing else args  # the shell completes what was typed
        with _usage_messages():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage_messages():
            return super().invoke(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands and the options; and as `train` may be omitted, its config file too."""
        train = self.get_command(ctx, "train")
        more = [] if train is None else train.shell_complete(ctx, incomplete)
        return [*super().shell_complete(ctx, incomplete), *(item for item in more if item.value == "--config")]


@contextmanager
def _usage_messages() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(as_message(error.format_message()), error.ctx) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rptrain {__version__}")
        raise typer.Exit


def _show_keys(wanted: bool) -> None:
    if wanted:
        from rptrain.config.reference import text

        print(text())
        raise typer.Exit


def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    show_keys: Annotated[
        bool, typer.Option("--keys", callback=_show_keys, is_eager=True, help="List the keys of a config.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        with exit_codes():
            from rptrain.tui.start import open_interface

            open_interface()
