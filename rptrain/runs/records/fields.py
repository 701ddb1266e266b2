"""Types of the fields of JSON records, and checks of records against them.

The types are strict: text is not converted to numbers, nor numbers to booleans. Arrays become tuples.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import AllowInfNan, Field, GetCoreSchemaHandler, GetPydanticSchema, Strict, TypeAdapter, ValidationError
from pydantic_core.core_schema import CoreSchema, typed_dict_field, typed_dict_schema, with_default_schema

Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict(), Field(gt=-(1 << 63), lt=1 << 63)]
Float = Annotated[float, Strict(), AllowInfNan(False)]  # JSON integers are converted
UnixTime = Annotated[Float, Field(ge=0, lt=1e11)]  # seconds, in a range that clocks can show


def time_of(record: Mapping[str, Any], default: float | None = None) -> float | None:
    """The Unix time of a record, or `default` if the record has none or an invalid one."""
    try:
        return validator(UnixTime)(record.get("time"))
    except ValidationError:
        return default


def known_fields(record: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind` that a record has, checked and converted to their types.

    A missing field has its default, or is missing in the result if it has none or a generated one. Unknown fields are
    left out. Raises ValidationError, which is a ValueError.
    """
    return _partial_validator(kind)(record)


@cache
def validator(kind: Any) -> Callable[[Any], Any]:
    """A function that checks a value from JSON against a type and converts it. It raises ValidationError."""
    return TypeAdapter(kind).validator.validate_python  # without the options of TypeAdapter's own: it is faster


@cache
def _partial_validator(kind: type) -> Callable[[Any], dict[str, Any]]:
    """As `validator`, for a dictionary with some of a dataclass's fields."""
    hints = get_type_hints(kind, include_extras=True)

    def schema(_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = {one: handler.generate_schema(hints[one.name]) for one in fields(kind)}
        filled = {
            one.name: checked if one.default is MISSING else with_default_schema(checked, default=one.default)
            for one, checked in types.items()
        }
        return typed_dict_schema({name: typed_dict_field(one, required=False) for name, one in filled.items()})

    return validator(Annotated[dict[str, Any], GetPydanticSchema(schema)])
