"""The areas, in the order of the cases' numbers."""

from collections.abc import Callable, Iterator

from benchmarks.bad_inputs import (
    adapters,
    caches,
    config_files,
    data,
    exports,
    listings,
    models,
    options,
    overrides,
    resumes,
    templates,
    tokenizers,
)
from benchmarks.bad_inputs.case import Case

AREAS: dict[str, Callable[[], Iterator[Case]]] = {
    "overrides": overrides.cases,
    "configs": config_files.cases,
    "adapters": adapters.cases,
    "runs": listings.cases,
    "resumes": resumes.cases,
    "exports": exports.cases,
    "templates": templates.cases,
    "models": models.cases,
    "tokenizers": tokenizers.cases,
    "options": options.cases,
    "left over": caches.cases,
    "data": data.cases,
}


def all_cases() -> list[Case]:
    return sorted((case for cases in AREAS.values() for case in cases()), key=lambda case: case.number)
