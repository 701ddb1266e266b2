"""The state of a run as a colored word."""

from textual.content import Content

STATES = {  # a character that is understood without color, and the color
    "new": ("…", "$muted"),
    "starting": ("…", "$accent"),
    "loading": ("…", "$accent"),
    "training": ("▶", "$success"),
    "paused": ("⏸", "$warning"),
    "saving": ("↓", "$accent"),
    "evaluating": ("◆", "$accent"),
    "exporting": ("↓", "$accent"),
    "stopped": ("■", "$muted"),
    "failed": ("✗", "$error"),
    "finished": ("✓", "$success"),
    "dead": ("✗", "$error"),
    "replay": ("▷", "$accent"),
}


def state_text(state: str) -> Content:
    letter, style = STATES[state]
    return Content.styled(f"{letter} {state}", f"bold {style}")
