"""What errors of the hub mean, and what to do about them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging

from rptrain.utils.errors import TrainingError, UserError, describe
from rptrain.utils.text import one_line

# Raised if no answer comes; by which package depends on the version of huggingface_hub, which exports a subclass only.
HTTPError: Any = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
REFUSED, TOO_MANY = (401, 403), 429  # status codes


@contextmanager
def explained_errors(repository: str, what: str = "model") -> Iterator[None]:
    """Errors of the hub as messages that say what to do. `what`: the kind of repository.

    UserError for what a person can change, TrainingError if the hub or the network fails. An OSError of the disk stays.
    Meanwhile the library's warnings are not shown: they have the addresses of its retries, with signatures.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled, HFValidationError) as error:
        raise explained(error, repository, what) from error
    except RuntimeError as error:  # how huggingface_hub raises the error of a thread that uploads
        cause = error.__cause__
        if cause is None or not isinstance(cause, (HTTPError, OfflineModeIsEnabled)):
            raise
        raise explained(cause, repository, what) from error
    finally:
        logging.set_verbosity(before)


@contextmanager
def explained_answers(names: str) -> Iterator[None]:
    """What the library raises for answers that are not the hub's, as a TrainingError. Use it inside `explained_errors`.

    `names`: what was asked for. UserError if the token cannot be sent.
    """
    try:
        yield
    except HFValidationError:
        raise
    except UnicodeEncodeError as error:
        raise UserError(f"{_token()} has a character that no token has: {LOG_IN}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise TrainingError(
            f"{constants.ENDPOINT} answers with something else than {names}: check whether the network "
            "needs a log-in, and HF_ENDPOINT if a mirror is used"
        ) from error


def explained(error: BaseException, repository: str, what: str) -> UserError | TrainingError:
    """The message about an error of the hub."""
    hub, page = constants.ENDPOINT, page_of(repository, what)
    match error:
        case OfflineModeIsEnabled():
            return UserError(
                "no connection is made, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset it to download or "
                "push; what is in the cache works without it"
            )
        case HFValidationError():
            return UserError(f"{repository}: {one_line(str(error))}")
        case GatedRepoError():
            return UserError(
                f"{repository} is gated, and {_token()} has no access: ask for it at {page}, then "
                f"{LOG_IN}, and run this again"
            )
        case DisabledRepoError():
            return UserError(f"{repository} was disabled on {hub}: choose another one")
        case RevisionNotFoundError():
            return UserError(
                f"{repository} has no such revision: name a branch, a tag or a commit of {page}/commits/main, or leave "
                "out --revision"
            )
        case RepositoryNotFoundError():
            other = "a model, without --dataset" if what == "data set" else "a data set, with --dataset"
            return UserError(
                f"{hub} has no {what} {repository} that {_token()} may read: check the name, and whether it is "
                f"{other}. If it is private, {LOG_IN}"
            )
        case RemoteEntryNotFoundError():
            return UserError(f"{repository} changed meanwhile: a file that it listed is gone. Run this again")
        case HfHubHTTPError():
            return _of_status(error, repository)
    reason = one_line(describe(error, with_type=True))
    return TrainingError(
        f"{hub} does not answer ({reason}): check the network, HTTPS_PROXY if there is a proxy, and HF_ENDPOINT if a "
        "mirror is used; what was transferred is kept, so run this again"
    )


def _of_status(error: HfHubHTTPError, repository: str) -> UserError | TrainingError:
    hub, status = constants.ENDPOINT, error.response.status_code
    said = f": {one_line(error.server_message)}" if error.server_message else ""
    if status in REFUSED:
        return UserError(
            f"{hub} refuses access to {repository} with {_token()} (HTTP {status}{said}): check that the token is "
            f"valid, and may read it, or write to it to push; else {LOG_IN}"
        )
    if status == TOO_MANY:
        return TrainingError(
            f"{hub} received too many requests from here (HTTP {status}): wait some minutes and run this again, which "
            f"resumes; with a token it allows more: {LOG_IN}"
        )
    return TrainingError(
        f"{hub} failed for {repository} (HTTP {status}{said}): run this again later, which resumes; "
        "https://status.huggingface.co says whether it is known"
    )


def page_of(repository: str, what: str = "model") -> str:
    """The address of a repository in a browser."""
    return f"{constants.ENDPOINT}/{'datasets/' if what == 'data set' else ''}{repository}"


def has_token() -> bool:
    """Whether Hugging Face's libraries have a token."""
    return get_token() is not None


def _token() -> str:
    """Where the token comes from; never the token."""
    if not has_token():
        return "a request without a token"
    variables = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)]
    return f"the token in {variables[0]}" if variables else f"the token in {constants.HF_TOKEN_PATH}"
