"""All mistakes of a run, of which training found the first."""

from rptrain.config.errors import ConfigError
from rptrain.config.resolve import Resolved
from rptrain.planner.dry_run import check_run
from rptrain.utils.errors import UserError


def with_others(resolved: Resolved, error: UserError) -> UserError:
    """All mistakes of a run with their places, if `error`, at which training stopped, is one of them; else `error`."""
    try:
        check_run(resolved, warn=False)  # training has warned
    except ConfigError as found:
        stopped = str(error)
        if any(stopped in (text, f"{key}: {text}") for key, (_, text) in zip(found.keys, found.mistakes, strict=True)):
            return found
    except (UserError, OSError):  # of what training does not need, such as a plan
        pass
    return error
