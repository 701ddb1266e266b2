"""Tables of a config: strict and frozen, and how they are found in the tree."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The table that a key holds, alone or several times; None if it holds values."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
