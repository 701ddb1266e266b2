"""Opening the interface in a terminal that supports it."""

import os
import sys
from pathlib import Path

from rptrain.utils.collecting import gc_disabled, gc_rarely
from rptrain.utils.errors import UserError
from rptrain.utils.text import is_terminal, printable

PLAIN = ("", "dumb", "unknown")  # terminals without cursor control


def open_interface(attach: Path | None = None, config: Path | None = None) -> None:
    """Shows the interface, on a run or a config file, until the user quits.

    Raises UserError if the terminal does not support it, and SystemExit if a signal ended the interface.
    """
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise UserError(f"the interface needs a terminal, and this is not one. {_instead(attach)}")
    if os.environ.get("TERM", "") in PLAIN:
        raise UserError(
            f"the interface needs a terminal that moves its cursor; TERM does not name one. {_instead(attach)}"
        )
    with gc_disabled():
        from rptrain.tui.app import make_app

        if config is not None:
            app = make_app(config=config)
        elif attach is None:
            app = make_app()
        else:
            attach = attach if attach.name else attach.resolve()
            app = make_app(attach=attach, runs_folder=attach.parent)
    with gc_rarely():
        app.run()
    if app.return_code:
        raise SystemExit(app.return_code)
    for text in app.still_training():
        print(printable(text))


def _instead(attach: Path | None) -> str:
    if attach is None:
        return "To train without it: rptrain --config rptrain.toml; rptrain --help lists the other commands"
    return f"The records of the run are in {attach / 'events.jsonl'}"
