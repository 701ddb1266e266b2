"""The commands. They import heavy modules after the config has been checked."""

import logging
import sys
from contextlib import nullcontext
from io import TextIOWrapper

import typer

import rptrain.kernels
from rptrain.cli.argv import OPEN
from rptrain.cli.bench import bench
from rptrain.cli.chat import chat
from rptrain.cli.data import data
from rptrain.cli.doctor import doctor
from rptrain.cli.exits import ending_at_once
from rptrain.cli.hub import download, push
from rptrain.cli.init import init
from rptrain.cli.models import export, generate
from rptrain.cli.open import open_file
from rptrain.cli.plan import plan
from rptrain.cli.root import Commands, root
from rptrain.cli.runs import attach, runs
from rptrain.cli.train import train
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import as_message


class MessageFormatter(logging.Formatter):
    """Warnings as messages."""

    def format(self, record: logging.LogRecord) -> str:
        return as_message(super().format(record))


app = typer.Typer(
    cls=Commands,
    help="Fine-tunes language models that are larger than the GPUs they train on.\n\n"
    "rptrain, with nothing after it, opens the interface. rptrain FILE.toml opens it on that config file; without a "
    "terminal, it trains as the file says.\n\n"
    "rptrain --config FILE [key=value …] trains as the file says; it is short for rptrain train.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(invoke_without_command=True)(root)
for command in (init, train, plan, bench, runs, attach, doctor, export, generate, chat, download, push):
    app.command()(command)
app.add_typer(data, name="data")
app.command(OPEN, hidden=True)(open_file)


def run(given: list[str]) -> None:
    """Runs the command that the arguments name, and ends the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter does not end a run
            stream.reconfigure(errors="backslashreplace")
    assert logging.lastResort is not None  # shows warnings on stderr, also above the bar of progress
    logging.lastResort.setFormatter(MessageFormatter())
    planning = given[:1] == ["plan"] or "--dry-run" in given
    rptrain.kernels.with_triton = not planning  # a plan computes nothing, and Triton takes 0.2 s to import
    with ending_at_once() if planning else nullcontext():
        try:
            app(given)
        finally:
            PROCESS.close()
