"""Combine SVG screenshots of a terminal into one animated SVG.

Screenshots by Rich differ in little from frame to frame, so every distinct element is stored once, and CSS keyframes
show it in the frames that contain it. Programs without support for CSS animations show the `poster` frame.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape

ELEMENT = re.compile(r"<rect\b[^>]*/>|<text\b[^>]*>[^<]*</text>")
STYLE = re.compile(r"\.(terminal-\d+-r\d+) \{([^}]*)\}")
CLASS = re.compile(r'class="(terminal-\d+-r\d+)"')
IDENTIFIER = re.compile(r"(?<=[\"#.])terminal-\d+")


def without_fonts(svg: str) -> str:
    """The screenshot without web fonts, whose addresses every viewer would request."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def combine(frames: Sequence[tuple[str, float]], poster: int, title: str) -> str:
    """An animated SVG of screenshots of one size, each with the seconds that it is shown; it repeats forever."""
    styles: dict[str, str] = {}
    shown: dict[str, int] = defaultdict(int)  # element: bits of the frames that contain it
    for number, (svg, _) in enumerate(frames):
        names = {name: styles.setdefault(style.strip(), f"s{len(styles)}") for name, style in STYLE.findall(svg)}
        content = svg[svg.rindex("</defs>") :]
        for element in ELEMENT.findall(content[content.index("clip-path") :]):
            for name in CLASS.findall(element):
                element = element.replace(f'class="{name}"', f'class="{names[name]}"')
            shown[IDENTIFIER.sub("t", element)] |= 1 << number
    groups: dict[int, list[str]] = defaultdict(list)
    for element, frames_of in shown.items():
        groups[frames_of].append(element)
    first = without_fonts(frames[0][0])
    head = IDENTIFIER.sub("t", first[: first.index("<style>")])
    defs = IDENTIFIER.sub("t", first[first.index("<defs>") : first.index("</defs>") + len("</defs>")])
    window = first[first.index("</defs>") + len("</defs>") :]
    window = IDENTIFIER.sub("t", window[: re.search(r'<g transform="[^"]*" clip-path', window).start()])  # type: ignore[union-attr]
    place = re.search(r'<g transform="[^"]*" clip-path="[^"]*">', IDENTIFIER.sub("t", first))
    assert place is not None
    times = [seconds for _, seconds in frames]
    rules = [
        ".t-matrix { font-family: Fira Code, monospace; font-size: 20px; line-height: 24.4px; white-space: pre; }",
        ".t-title { font-size: 18px; font-weight: bold; font-family: arial; }",
        *(f".{name} {{{style}}}" for style, name in styles.items()),
    ]
    body = []
    for number, (mask, elements) in enumerate(sorted(groups.items())):
        always = mask == (1 << len(frames)) - 1
        if not always:
            rules.append(_keyframes(f"k{number}", mask, times))
            still = "visible" if mask >> poster & 1 else "hidden"
            rules.append(
                f".g{number} {{ visibility: {still}; animation: k{number} {sum(times):g}s step-end infinite; }}"
            )
        # Backgrounds first: an element is never behind the background of its own frame.
        elements.sort(key=lambda element: element.startswith("<text"))
        body.append((elements, "" if always else f' class="g{number}"'))
    layers = [
        f"<g{name}>{''.join(part)}</g>"
        for tag in ("<rect", "<text")
        for elements, name in body
        if (part := [element for element in elements if element.startswith(tag)])
    ]
    style = "\n".join(rules)
    return (
        f"{head}<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n{defs}\n{window}"
        f'{place[0]}<g class="t-matrix">\n' + "\n".join(layers) + "\n</g></g>\n</svg>\n"
    )


def _keyframes(name: str, mask: int, times: Sequence[float]) -> str:
    """Keyframes of the visibility of an element that frames with a set bit contain."""
    at, total, points = 0.0, sum(times), []
    for number, seconds in enumerate(times):
        visible = mask >> number & 1
        if number == 0 or visible != mask >> (number - 1) & 1:
            points.append(f"{100 * at / total:.3f}% {{ visibility: {'visible' if visible else 'hidden'}; }}")
        at += seconds
    return f"@keyframes {name} {{ {' '.join(points)} }}"
