"""A check of the doctor, as a value and as text."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """The result of a check. `advice` says what to do about a warning; `figures` has its numbers for JSON."""

    subject: str
    status: Literal["ok", "warning"]
    text: str
    advice: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(subject: str, text: str, advice: str | None = None, **figures: Any) -> Check:
    """Creates a check, which is a warning if there is advice."""
    return Check(subject, "ok" if advice is None else "warning", text, advice, figures)


def lines(findings: Iterable[Check]) -> Iterator[str]:
    """The report as text."""
    findings = list(findings)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{finding.status:7}  {finding.subject:{width}}  {finding.text}"
        if finding.advice is not None:
            yield f"{'':7}  {'':{width}}  -> {finding.advice}"
