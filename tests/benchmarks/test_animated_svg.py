"""Screenshots combined into an animated SVG."""

import re
import xml.etree.ElementTree as ElementTree
from io import StringIO

from rich.console import Console

from benchmarks.animated_svg import combine, without_fonts


def frame(*lines: str) -> str:
    console = Console(width=20, height=3, file=StringIO(), force_terminal=True, record=True)
    for line in lines:
        console.print(line)
    return console.export_svg(title="a title")


def shown(svg: str, seconds: float | None, total: float) -> set[str]:
    """The texts that are visible at a time, or without animation."""
    root = ElementTree.fromstring(svg)
    style = root.findtext("{*}style") or ""
    visible = set()
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        name = group.get("class", "")
        state = True
        if name.startswith("g"):
            points = re.search(rf"@keyframes k{name[1:]} {{(.*?)}} }}", style + " }")
            assert points is not None
            state = f".{name} {{ visibility: visible;" in style
            for at, value in re.findall(r"([\d.]+)% { visibility: (\w+)", points[0]):
                if seconds is not None and float(at) / 100 * total <= seconds + 1e-9:
                    state = value == "visible"
        if state:
            visible |= {(text.text or "").strip("\xa0") for text in group.findall("{*}text")}
    return visible - {""}


def test_each_frame_shows_its_own_elements():
    frames = [(frame("[red]one", "same"), 1.0), (frame("[blue]two", "same"), 2.0), (frame("[red]one", "end"), 1.0)]
    svg = combine(frames, 1, "a title & more")
    assert [shown(svg, at, 4.0) & {"one", "two", "same", "end"} for at in (0.5, 1.5, 3.5, None)] == [
        {"one", "same"},
        {"two", "same"},
        {"one", "end"},
        {"two", "same"},
    ]
    identifiers = re.findall(r'id="([^"]+)"', svg)
    assert len(identifiers) == len(set(identifiers))
    assert "@font-face" not in svg and "@font-face" in frames[0][0]
    assert "@font-face" not in without_fonts(frames[0][0])
