"""The documents: their code blocks, their inline code, and the commands in both."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/benchmarks.md")),
    *sorted((ROOT / "docs").glob("*/*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- ((?:(?!-->).)+)-->\s*\Z", re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `source`: the comment above it, which names the command that prints it."""

    document: Path
    line: int
    language: str
    text: str
    source: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """Words of a shell command, without what follows a pipe or `&&`."""

    place: str
    words: tuple[str, ...]


@cache
def blocks(document: Path) -> tuple[Block, ...]:
    text, found = document.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        above = COMMENT.search(text[: match.start()])
        source = " ".join(above[1].split()) if above else ""
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(document, text.count("\n", 0, match.start()) + 1, match[2], body, source))
    return tuple(found)


def all_blocks(language: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document) if block.language == language]


@cache
def prose(document: Path) -> str:
    """The text without its blocks; lines keep their numbers."""
    text = document.read_text(encoding="utf-8")
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def spans(document: Path) -> Iterator[tuple[str, str]]:
    """The place and the text of each inline code; line breaks in it are spaces."""
    text = prose(document)
    for match in SPAN.finditer(text):
        yield f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", " ".join(match[1].split())


def commands() -> Iterator[Command]:
    """The commands of all shell blocks, with variables that a block sets filled in."""
    for block in all_blocks("sh"):
        variables: dict[str, str] = {}
        joined = block.text.replace("\\\n", " ")
        for line in joined.splitlines():
            filled = Template(line).safe_substitute(variables)
            if assigned := re.fullmatch(r'(\w+)="(.*)"', filled):
                variables[assigned[1]] = assigned[2]
                continue
            words = shlex.split(filled, comments=True)
            for part in _parts(words):
                yield Command(f"{block.place}: {line.strip()}", part)


def _parts(words: list[str]) -> Iterator[tuple[str, ...]]:
    part: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", "|", ";"):
            yield tuple(part)
            part = []
        else:
            part.append(word)
