"""Types of config values with a notation of their own: sizes, devices, names."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PositiveFloat, PositiveInt

from rptrain.config.columns import parse_columns
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded_text
from rptrain.utils.text import one_line

MOST_WORKERS = 1024  # on the CPU
LONGEST_NAME = 200  # bytes of the name of a folder, for which file systems allow 255; runs and exports add to it
_GPU = r"(?:\d{1,9}|(?:GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]{,35})"  # an index, or a UUID as nvidia-smi -L prints it
MAX_COUNT = 10**9  # steps, sequences, tokens, ranks; factor of an adapter

# G is GiB, as for Slurm, Docker and Java; GB is 10^9 bytes.
UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", 1)
}


def parse_size(value: object) -> object:
    """Bytes from a text such as "24GiB", "24G" (the same), "24 GB" or "512MiB", in any case; other values are returned
    unchanged.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt](?:i?b|i)?|b)", value.strip().lower())
    units = {name.lower(): unit for name, unit in UNITS.items()}
    units |= {short: units[f"{prefix}ib"] for prefix in "kmgt" for short in (prefix, f"{prefix}i")}
    if match is None:
        raise ValueError('must be a size such as "24GiB", "24G", "24 GB", or a number of bytes')
    return round(float(match[1]) * units[match[2]])


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as exactly `size` bytes."""
    number, unit = min((size // unit, name) for name, unit in UNITS.items() if size % unit == 0)
    return f"{number}{unit}"


def parse_devices(value: object) -> object:
    """One of "auto", "cuda", "cuda:0,1" and "cpu:N", given as one text or as a list. GPUs are named by torch's indices
    or by UUIDs, of which the beginning suffices: "cuda:GPU-8a1b,GPU-90c2".
    """
    names = list(value) if isinstance(value, list | tuple) else [value]
    if names in (["auto"], ["cuda"]):
        return names[0]
    texts = [name for name in names if isinstance(name, str)]
    if texts and len(texts) == len(names):
        if all(re.fullmatch(rf"cuda:{_GPU}(,{_GPU})*", text) for text in texts):
            gpus = [gpu for text in texts for gpu in text.removeprefix("cuda:").split(",")]
            gpus = [str(int(gpu)) if gpu.isdecimal() else gpu for gpu in gpus]
            if len(set(gpus)) < len(gpus):
                raise ValueError("must name each GPU once")
            return f"cuda:{','.join(gpus)}"
        if all(re.fullmatch(r"cpu(:[1-9]\d{,8})?", text) for text in texts):
            workers = sum(int(text[4:] or 1) for text in texts)
            if workers > MOST_WORKERS:
                raise ValueError(f"must have at most {MOST_WORKERS} workers on the CPU")
            return f"cpu:{workers}"
    raise ValueError(
        'must be "auto", "cuda", "cuda:0,1" or "cuda:GPU-8a1b" (these GPUs) or "cpu:2" (two workers on the CPU)'
    )


def _folder_name(name: str) -> str:
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise ValueError(f"must be a folder name of at most {LONGEST_NAME} bytes")
    if "/" in name or name.startswith("."):
        raise ValueError('must be a folder name, without "/" and not starting with "."')
    if one_line(name) != name:
        raise ValueError("must be a folder name without line ends, tabs and other control characters")
    return name


def _path(path: str) -> str:
    if "\0" in path:
        raise ValueError("must be a path without null characters")
    try:
        return expanded_text(path)
    except UserError:
        raise ValueError('must be a path with a known home directory after "~" (or ./~name)') from None


def parse_names(value: object) -> object:
    """A text, or several as a tuple."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError('must be text, or a list such as ["q_proj", "v_proj"]')
    return value if isinstance(value, str) else tuple(names)


def shortest(number: float) -> int | float:
    """A whole number as an integer."""
    return int(number) if number % 1 == 0 else number


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(_path)]
Count = Annotated[PositiveInt, Field(le=MAX_COUNT)]
RunName = Annotated[Text, AfterValidator(_folder_name)]
Size = Annotated[PositiveInt, BeforeValidator(parse_size), PlainSerializer(format_size, when_used="json")]
Devices = Annotated[str, BeforeValidator(parse_devices)]
Names = Annotated[str | tuple[str, ...], BeforeValidator(parse_names)]
Number = Annotated[PositiveFloat, PlainSerializer(shortest)]
Columns = Annotated[dict[str, Text], AfterValidator(parse_columns)]
Beta = Annotated[float, Field(ge=0, lt=1)]
