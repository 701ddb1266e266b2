"""Config files in other formats, which are recognized and refused by name: YAML, JSON and Python."""

import json
import re
from pathlib import Path

FORMATS = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".jsonl": "JSON", ".py": "Python", ".ipynb": "a notebook"}
ADVICE = (
    "write it as TOML: `rptrain init` writes an example, `rptrain --keys` lists the keys, and keys of other trainers "
    "are answered with these"
)

_PYTHON = re.compile(r"(?:from\s+[\w.]+\s+import|import\s+[\w.]+|def\s+\w+\(|class\s+\w+)\b")
_YAML = re.compile(r"---|%YAML|- |(?:[\w./-]+|\"[^\"]*\"|'[^']*')\s*:(?:\s|$)")


def format_of(path: Path, text: str) -> str | None:
    """The name of the format of a text that is not TOML; None if it is not recognized.

    The text decides before the suffix of the path.
    """
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if _is_json(text):
        return "JSON"
    if _PYTHON.match(first):
        return "Python"
    if _YAML.match(first):
        return "YAML"
    return FORMATS.get(path.suffix.lower())


def _is_json(text: str) -> bool:
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # broken JSON, or a TOML table
        return start == "{"
    return True
