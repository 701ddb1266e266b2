"""What a check that fails becomes: a warning with what to do."""

from collections.abc import Callable
from typing import Any

from rptrain.doctor.checks import Check, check
from rptrain.kernels import toolchain_errors
from rptrain.kernels.toolchain_errors import ToolchainError, explain, reinstall
from rptrain.utils.errors import describe

FAILURES = (*toolchain_errors.FAILURES, ToolchainError)  # what a check may raise


def attempt(subject: str, make: Callable[..., Check], *given: Any, **named: Any) -> Check:
    """The check that a function makes, or one that failed, so that the others are still made."""
    try:
        return make(*given, **named)
    except FAILURES as error:
        return failed(subject, error)


def failed(subject: str, error: BaseException, **figures: Any) -> Check:
    """The check that ended with one of FAILURES."""
    if (known := explain(error)) is not None:
        return check(subject, known.problem, known.advice, error=known.problem, **figures)
    said = describe(error).partition("\n")[0]
    if isinstance(error, OSError):
        advice = "see whether the path exists and who may use it"
    elif isinstance(error, RuntimeError):  # of a GPU that is full or has failed
        advice = "see in nvidia-smi what else takes it; a GPU that has failed comes back by a restart of the machine"
    else:
        advice = reinstall()
    return check(subject, f"cannot be measured: {said}", advice, error=said, **figures)
