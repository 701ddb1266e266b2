"""The log of a run: what its records say, in sentences."""

from collections import deque

from rptrain.runs.records.event import Severity
from rptrain.runs.view.values import LogLine

KEPT_LINES = 1000
LONGEST = 2000  # characters of a line


class Log(deque[LogLine]):
    """The newest KEPT_LINES lines, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT_LINES)

    def add(self, time: float, text: str, kind: Severity) -> None:
        self.append(LogLine(time, text if len(text) <= LONGEST else f"{text[:LONGEST]} …", kind))
