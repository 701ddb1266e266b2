"""Pictures of a simulated schedule: text for a terminal, and SVG."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from rptrain.schedule.simulate import COMPUTATION, Lane, Task, Timeline

LETTERS = {"F": "F", "FB": "X", "B": "B"}
LEGEND = ("F forward", "X forward and backward in one", "B backward", "· idle")

COMMENT = "<!-- Written by rptrain plan -->"
MARK = re.compile(rb"<svg [^>]*>\n" + re.escape(COMMENT).encode())  # how pictures begin

WIDTH, LEFT, RIGHT, TOP = 1200, 70, 64, 56  # pixels: total size, and margins of the plot
HEIGHTS: dict[Lane, int] = {"compute": 24, "up": 5, "down": 5, "optimizer": 8}
GAP = 8  # pixels between devices
FINEST = 0.3  # pixels: narrower rectangles are joined with their neighbors
RECTS = 4000  # with more tasks, neighbors are joined until about this many rectangles remain
INK = "#6e7781"  # readable on light and dark backgrounds
FILLS = {  # alternating shades, so that the end of a stage is visible
    "F": ("#86b3dc", "#a3c6e6"),
    "FB": ("#a898d4", "#bdb0df"),
    "B": ("#e0a070", "#e9b891"),
    "params": ("#5f9e8f",) * 2,
    "grads": ("#b9726f",) * 2,
    "sums": ("#7f8c5a",) * 2,
    "x": ("#94a3b1",) * 2,
    "y": ("#94a3b1",) * 2,
    "reduce": ("#6c8ebf",) * 2,
    "update": ("#a5a05c",) * 2,
}
MEANINGS = {
    "F": "forward", "FB": "forward and backward in one", "B": "backward", "params": "parameters up",
    "grads": "gradients down", "sums": "partial sums up", "x": "activations", "y": "activations",
    "reduce": "sums over nodes", "update": "optimizer",
}  # fmt: skip


@dataclass(frozen=True)
class _Span:
    """Consecutive tasks of one stage on a resource; `shade` alternates between stages of a kind."""

    task: Task  # the first
    shade: int
    times: tuple[tuple[float, float], ...]

    @property
    def label(self) -> str:
        return f"{self.task.kind}{self.task.layers[0]}-{self.task.layers[-1]}"


def _spans(timeline: Timeline) -> dict[tuple[Lane, int], list[_Span]]:
    """The spans of each resource in order of time. Tasks that take no time are left out."""
    resources: dict[tuple[Lane, int], list[tuple[float, float, Task]]] = defaultdict(list)
    for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
        if end > start:
            resources[task.lane, task.device].append((start, end, task))

    def stage(task: Task) -> tuple[object, ...]:
        return task.layers, task.iteration, task.round

    spans: dict[tuple[Lane, int], list[_Span]] = {}
    for resource, done in resources.items():
        done.sort(key=lambda run: run[0])
        of_resource: list[_Span] = []
        last: dict[str, _Span] = {}
        for start, end, task in done:
            before = last.get(task.kind)
            same = before is not None and stage(before.task) == stage(task)
            if before is not None and same and of_resource[-1] is before:
                of_resource[-1] = _Span(before.task, before.shade, (*before.times, (start, end)))
            else:
                shade = 0 if before is None else before.shade if same else 1 - before.shade
                of_resource.append(_Span(task, shade, ((start, end),)))
            last[task.kind] = of_resource[-1]
        spans[resource] = of_resource
    return spans


def text(timeline: Timeline, width: int = 100, note: str = "") -> str:
    """A line per device with its computation and its bubble, then a legend, in lines of at most `width` columns. The
    legend ends with `note`.
    """
    spans, devices = _spans(timeline), range(timeline.program.devices)
    margin = len(str(devices[-1])) + 1
    cells = max(width - margin - 8, 10)
    computed = [[s for s in spans.get(("compute", device), []) if s.task.kind in COMPUTATION] for device in devices]
    lines = [
        f"{device:>{margin - 1}} {_row(computed[device], timeline.makespan, cells)} {timeline.bubble(device):6.1%}"
        for device in devices
    ]
    scale = f"{_seconds(timeline.makespan, 4)}, {_seconds(timeline.makespan / cells, 2)} per character"
    words = [*LEGEND, "small letters: every other stage", scale, f"bubble {timeline.bubble():.1%}"]
    words += [note] if note else []
    return "\n".join([*lines, *_wrapped(words, width)])


def _seconds(value: float, digits: int) -> str:
    """A number with this many significant digits, and without an exponent for long times."""
    return f"{value:.{digits}g} s" if value < 100 else f"{value:,.0f} s"


def _row(spans: Sequence[_Span], makespan: float, cells: int) -> str:
    """A character for each `makespan / cells` seconds, for the task that took most of them; with labels that fit."""
    shares: list[dict[int, float]] = [defaultdict(float) for _ in range(cells)]
    for i, span in enumerate(spans):
        for start, end in span.times:
            first, last = start / makespan * cells, end / makespan * cells
            for cell in range(floor(first), min(ceil(last), cells)):
                shares[cell][i] += min(last, cell + 1) - max(first, cell)
    owners = []
    for share in shares:
        most = max(share, key=lambda i: share[i], default=-1)
        owners.append(most if most >= 0 and sum(share.values()) >= 0.5 else -1)
    row, cell = "", 0
    while cell < cells:
        owner, start = owners[cell], cell
        while cell < cells and owners[cell] == owner:
            cell += 1
        row += "·" * (cell - start) if owner < 0 else _run(spans[owner], cell - start)
    return row


def _run(span: _Span, length: int) -> str:
    letter = LETTERS[span.task.kind]
    letter = letter.lower() if span.shade else letter
    label = f" {span.label} "
    return label.center(length, letter) if length >= len(label) + 2 else letter * length


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" | {word}"
        else:
            lines.append(word)
    return lines


def svg(timeline: Timeline, title: str) -> str:
    """A self-contained SVG: a lane per device, thin lanes for its links, one for the optimizer, and an axis in seconds.

    Each micro-batch is a rectangle, unless the rectangles would be too narrow or too many.
    """
    spans = _spans(timeline)
    end = max(timeline.ends)
    scale = (WIDTH - LEFT - RIGHT) / end
    tasks = sum(len(span.times) for lane in spans.values() for span in lane)
    finest = FINEST if tasks <= RECTS else max(FINEST, len(spans) * (WIDTH - LEFT - RIGHT) / RECTS)
    shapes: list[str] = []
    y = TOP
    order: list[Lane] = ["up", "compute", "down"]
    for device in range(timeline.program.devices):
        lanes: list[Lane] = [lane for lane in order if lane == "compute" or any(key[0] == lane for key in spans)]
        for lane in lanes:
            height = HEIGHTS[lane]
            if lane == "compute":
                middle = y + height / 2 + 4
                shapes.append(_text(LEFT - 8, middle, f"device {device}", "end"))
                shapes.append(_text(WIDTH - RIGHT + 8, middle, f"{timeline.bubble(device):.1%}"))
            shapes += _lane(spans.get((lane, device), []), y, height, scale, finest)
            y += height + (1 if lane != lanes[-1] else GAP)
    if ("optimizer", 0) in spans:
        shapes.append(_text(LEFT - 8, y + 8, "optimizer", "end"))
        shapes += _lane(spans["optimizer", 0], y, HEIGHTS["optimizer"], scale, finest)
        y += HEIGHTS["optimizer"] + GAP
    shapes += _axis(end, scale, y)
    shapes.append(_text(LEFT, 20, f"{title} · bubble {timeline.bubble():.1%}", size=15))
    shapes += _key({span.task.kind for lane in spans.values() for span in lane})
    shapes.append(_text(WIDTH - RIGHT + 8, TOP - 8, "bubble"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" width="{WIDTH}" height="{y + 24}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">\n{COMMENT}\n'
        + "\n".join([*shapes, "</svg>\n"])
    )


def _lane(spans: Sequence[_Span], y: float, height: float, scale: float, finest: float) -> Iterator[str]:
    wait: _Span | None = None  # narrower than FINEST: drawn with what follows it
    for i, span in enumerate(spans):
        if wait is not None:
            span, wait = _Span(span.task, span.shade, wait.times + span.times), None
        start, end = span.times[0][0], span.times[-1][1]
        following = spans[i + 1] if i + 1 < len(spans) else None
        near = following is not None and (following.times[0][0] - end) * scale < FINEST
        if near and following is not None and following.task.kind == span.task.kind and (end - start) * scale < FINEST:
            wait = span
            continue
        fill = FILLS[span.task.kind][span.shade]
        where = f"iteration {span.task.iteration}, round {span.task.round}: {start:.4g} to {end:.4g} s"
        yield f'<g fill="{fill}"><title>{escape(span.label)}, {where}</title>'
        for first, last in _joined(span.times, scale, finest):
            x, width = LEFT + first * scale, (last - first) * scale
            gap = 0.6 if width > 3 else 0.0  # marks the end of a micro-batch
            yield f'<rect x="{x:.2f}" y="{y}" width="{max(width - gap, FINEST):.2f}" height="{height}"/>'
        label = f"{span.task.layers[0]}–{span.task.layers[-1]}" if len(span.task.layers) > 1 else span.task.layers[0]
        solid = sum(last - first for first, last in span.times) > 0.8 * (end - start)
        if height > 12 and solid and (end - start) * scale > 7 * len(str(label)) + 4:
            middle = LEFT + (start + end) / 2 * scale
            yield _text(middle, y + height / 2 + 4, str(label), "middle", fill="#1f2328")
        yield "</g>"


def _joined(times: Sequence[tuple[float, float]], scale: float, finest: float) -> Iterator[tuple[float, float]]:
    """Joins neighbors without visible idle time between them until they are `finest` pixels wide."""
    start, end = times[0]
    for first, last in times[1:]:
        if (first - end) * scale < FINEST and (end - start) * scale < finest:
            end = last
        else:
            yield start, end
            start, end = first, last
    yield start, end


def _axis(end: float, scale: float, y: float) -> Iterator[str]:
    rough = end / 8
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    yield f'<path d="M{LEFT} {y}H{LEFT + end * scale:.2f}" stroke="{INK}" stroke-width="0.8"/>'
    for tick in range(floor(end / step) + 1):
        x = LEFT + tick * step * scale
        yield f'<path d="M{x:.2f} {y}v4" stroke="{INK}" stroke-width="0.8"/>'
        yield _text(x, y + 16, f"{tick * step:.4g} s", "middle")


def _key(kinds: set[str]) -> Iterator[str]:
    x, seen = float(LEFT), set()
    for kind in (kind for kind in FILLS if kind in kinds):
        if MEANINGS[kind] not in seen:
            seen.add(MEANINGS[kind])
            yield f'<rect x="{x}" y="31" width="11" height="11" fill="{FILLS[kind][0]}"/>'
            yield _text(x + 16, 41, MEANINGS[kind])
            x += 34 + 6.2 * len(MEANINGS[kind])


def _text(x: float, y: float, words: str, anchor: str = "start", *, size: int | None = None, fill: str = "") -> str:
    extra = (f' font-size="{size}"' if size else "") + (f' fill="{fill}"' if fill else "")
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'
