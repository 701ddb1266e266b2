"""What an export tells while it works and at its end, without torch: for the command line and the interface."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rptrain.checkpoint.atomic_dir import MANIFEST, is_of_kind
from rptrain.models.base_files import GENERATION
from rptrain.utils import phases
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import from_here

ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
KIND = "export"  # `kind` in the manifest of an export
Phase = Literal["checking", "writing", "reading back"]
NAMES: dict[Phase, str] = {
    "checking": "checking the checkpoint",
    "writing": "writing the export",
    "reading back": "reading the export back",
}
Report = Callable[[Phase, int, int], object]  # the phase, and the bytes that are written of those to write


class ExportProgress:
    """Counts the bytes of an export, shows its phases, and passes them on."""

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._phase: Phase = "checking"
        self._done = self._total = 0
        self._shown: phases.Phase | None = None

    @contextmanager
    def doing(self, phase: Phase, total: int = 0) -> Iterator[None]:
        """The export is in a phase as long as the context lasts. `total`: the bytes that it will write."""
        self._phase, self._total = phase, total or self._total
        self.wrote(0)
        with phases.phase(NAMES[phase], total or self._total or None, reads=phase == "reading back") as self._shown:
            yield

    def wrote(self, nbytes: int) -> None:
        self._done += nbytes
        if self._shown is not None and nbytes:
            self._shown.add(nbytes)
        if self._report is not None:
            self._report(self._phase, self._done, self._total)


def is_export(directory: Path) -> bool:
    """Whether an export wrote this directory, and its files still have their sizes."""
    return is_of_kind(directory, KIND)


def base_format(directory: Path) -> str:
    """The format in which the run of an exported adapter held its base; "bf16" for other adapters. The adapter's
    files may have been edited since it was exported.
    """
    return _fact(directory, "base") or "bf16"


def _fact(directory: Path, key: str) -> str:
    """A text that an export's manifest holds; empty without one."""
    try:
        found = json.loads(read_small_text(directory / MANIFEST))
    except (OSError, ValueError, RecursionError):  # not an export, or damaged
        return ""
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""


def loading_code(directory: Path, name: str | None = None, base_name: str | None = None) -> str:
    """Python code that loads an export: with PEFT if it is an adapter, else with transformers. Its path is relative to
    the current directory if it is inside. `name` and `base_name` replace the path of the export and of an adapter's
    base.
    """
    adapter, base, at = directory / ADAPTER_CONFIG, None, "path"
    if adapter.is_file():
        named, at = json.loads(read_small_text(adapter)).get("base_model_name_or_path"), "base"
        base = named if isinstance(named, str) else ""
    architecture = _fact(directory, "architecture") or _architecture(directory if base is None else Path(base))
    several = architecture.endswith("ForConditionalGeneration")
    model = "AutoModelForImageTextToText" if several else "AutoModelForCausalLM"
    tokenizer = (directory / TOKENIZER_CONFIG).is_file()
    generation = base is not None and (directory / GENERATION).is_file()  # PEFT does not read it
    return "\n".join(
        [
            *(["from peft import PeftModel"] if base is not None else []),
            f"from transformers import {model}{', AutoTokenizer' * tokenizer}{', GenerationConfig' * generation}",
            "",
            *([f"base = {_quoted(base_name or base)}"] if base is not None else []),
            f"path = {_quoted(name or str(from_here(directory)))}",
            f"model = {model}.from_pretrained({at})",
            *(["model.generation_config = GenerationConfig.from_pretrained(path)"] if generation else []),
            *(["model = PeftModel.from_pretrained(model, path)"] if base is not None else []),
            *(["tokenizer = AutoTokenizer.from_pretrained(path)"] if tokenizer else []),
        ]
    )


def _architecture(directory: Path) -> str:
    """That of the model in a directory; empty if it cannot be read."""
    try:
        return str(json.loads(read_small_text(directory / "config.json"))["architectures"][0])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _quoted(text: str) -> str:
    """A string of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def record(**fields: Any) -> str:
    """A line of `rptrain export --json`."""
    return json.dumps(fields, separators=(",", ":"))


def last_record(output: str) -> dict[str, Any]:
    """The last record among the lines of an export's output; empty without one."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
