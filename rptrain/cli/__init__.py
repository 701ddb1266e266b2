"""The command line. Signals are handled before the commands are imported, which takes a while."""

import signal
import sys

from rptrain.utils.descriptors import open_missing_streams


def main() -> None:
    open_missing_streams()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import would show a traceback
    from rptrain.cli.argv import OPEN, arguments
    from rptrain.utils.native_watchdog import NativeWatchdog
    from rptrain.utils.signals import PROCESS

    given = arguments(sys.argv[1:])
    signal.signal(signal.SIGINT, before)
    if given and given[0] not in (OPEN, "attach", "chat"):
        PROCESS.install(NativeWatchdog.load())
        from rptrain.cli.commands import run
    else:  # the interface and a conversation handle signals themselves
        with PROCESS.starting():
            from rptrain.cli.commands import run
    run(given)
