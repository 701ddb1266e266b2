"""Exit codes, and the messages that come with them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from rptrain.engine.failures import gpu_failure
from rptrain.utils import temporary
from rptrain.utils.errors import TrainingError, UserError, describe, explained, out_of_resources
from rptrain.utils.signals import INTERRUPTED, PROCESS


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with 2 for errors of the user, among them files that cannot be read, with 130 for an interrupt, and with 1
    for a run that diverged, a disk or a GPU that fails or a library that exits. Any other error exits with 1 and shows
    its traceback; that of a GPU does so with CUDA_LAUNCH_BLOCKING=1, with which its traceback names the kernel.
    """
    PROCESS.begin()
    try:
        yield
    except BrokenPipeError:  # the reader closed the pipe: typer exits silently
        raise
    except (UserError, TrainingError, OSError) as error:
        shown = explained(error) if isinstance(error, OSError) else error
        print(shown, file=sys.stderr)
        raise typer.Exit(2 if isinstance(shown, UserError) else 1) from None
    except (MemoryError, RuntimeError, ImportError) as error:
        failed = None if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" else gpu_failure(error)
        shown = out_of_resources(error) if failed is None else TrainingError("\n".join(failed.lines()))
        if shown is None:
            raise
        print(shown, file=sys.stderr)
        raise typer.Exit(1) from None
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # rich exits when the pipe is closed
            print(describe(error, with_type=True), file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        PROCESS.close()
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process with the exit code of the block, without what the interpreter does at its end: with PyTorch,
    searches for cycles take 0.3 s there (`gc.freeze` saves them too, but then triton reports leaks). For a block that
    leaves nothing behind but its output.
    """
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            with suppress(OSError):  # the reader closed the pipe: the interpreter ends as usual
                sys.stdout.flush()
                sys.stderr.flush()
                temporary.delete_all()
                os._exit(end.code)
        raise
