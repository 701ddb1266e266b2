"""Fine-tunes language models that are larger than the GPUs they train on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rptrain.api import TrainResult, UserError, load_config, plan, train

__version__ = "0.1.0"
__all__ = ["TrainResult", "UserError", "load_config", "plan", "train"]


def __getattr__(name: str) -> Any:
    """A name of the Python API, which is imported with the first one that is used."""
    if name in __all__:
        return getattr(import_module("rptrain.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
