"""Find the programs of llama.cpp that write GGUF files, and the packages that they import. Nothing is downloaded."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded

FOLDER = "LLAMA_CPP_DIR"  # the environment variable that names a checkout of llama.cpp
MODELS, ADAPTERS = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
QUANTIZE = "llama-quantize"
BUILT = ("build/bin", "bin", "")  # where a checkout, or an unpacked release, has its programs
PACKAGE = "gguf"
INSTALL = "pip install 'rptrain[gguf]'"
GET = f"git clone --depth 1 https://github.com/ggml-org/llama.cpp && export {FOLDER}=$PWD/llama.cpp"
BUILD = f"cd ${FOLDER} && cmake -B build && cmake --build build --target {QUANTIZE}"


@dataclass(frozen=True)
class Tools:
    """The programs of llama.cpp on this machine, as paths; None: not found."""

    models: Path | None
    adapters: Path | None
    quantize: Path | None

    def converter(self, *, adapter: bool) -> Path:
        """The converter of models or of adapters. UserError if it, or a package that it imports, is not there."""
        found, name = (self.adapters, ADAPTERS) if adapter else (self.models, MODELS)
        if found is None:
            missing = f"llama.cpp's {name}, which writes GGUF files, is not in PATH, and {FOLDER} is not set"
            raise UserError(f"{misplaced(self) or missing}. Get it with: {GET}")
        if not has_package():
            raise UserError(f"{name} needs the package {PACKAGE}: {INSTALL}")
        return found

    def quantizer(self, kind: str) -> Path:
        """llama-quantize. UserError if it is not there."""
        if self.quantize is None:
            raise UserError(
                f"{kind} needs llama.cpp's {QUANTIZE}, which is neither in PATH nor in ${FOLDER}/build/bin. "
                f"Build it with: {BUILD}; or use a type that needs no program, such as q8_0 or q4_0"
            )
        return self.quantize


def has_package() -> bool:
    """Whether the package is installed. A folder of this name in the current directory does not count."""
    found = find_spec(PACKAGE)
    return found is not None and found.origin is not None


def misplaced(tools: Tools) -> str | None:
    """What is wrong with LLAMA_CPP_DIR; None if it is not set, or has what was found."""
    given = os.environ.get(FOLDER)
    if not given or (tools.models and tools.adapters):
        return None
    return f"{FOLDER} is set to {given}, which has no {ADAPTERS if tools.models else MODELS}"


def find() -> Tools:
    """The programs in $LLAMA_CPP_DIR, and those in PATH and in the checkout that they belong to."""
    if given := os.environ.get(FOLDER):
        folder = expanded(given)
        return Tools(
            _first(folder / MODELS),
            _first(folder / ADAPTERS),
            _first(*(folder / place / QUANTIZE for place in BUILT), *_in_path(QUANTIZE)),
        )
    checkouts = [folder for program in _in_path(QUANTIZE) for folder in Path(os.path.realpath(program)).parents[:4]]
    models, adapters = (
        _first(*_in_path(name), *(folder / name for folder in checkouts)) for name in (MODELS, ADAPTERS)
    )
    return Tools(models, adapters, _first(*_in_path(QUANTIZE)))


def _in_path(name: str) -> Iterator[Path]:
    if (found := shutil.which(name)) is not None:
        yield Path(found)


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)
