"""The base of event records."""

from dataclasses import dataclass, field
from time import time as now
from typing import ClassVar, Literal

from rptrain.runs.records.fields import UnixTime

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A record: a line of JSON with `schema`, `event` (the name) and the fields. NaN and infinities become null."""

    time: UnixTime = field(default_factory=now)
    severity: ClassVar[Severity] = "info"

    def sentence(self) -> str | None:
        """The message for a log or a terminal; None if the event has none."""
        return None
