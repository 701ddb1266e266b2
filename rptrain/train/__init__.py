"""Training: the loop, its setup, checkpoints, validation and monitoring. Calling the package trains a config."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """Importing any module in here makes `rptrain.train` this package, in place of the function of that name. So the
    package can be called as that function.
    """

    def __call__(self, *given: Any, **named: Any) -> Any:
        return import_module("rptrain.train.call").train(*given, **named)


sys.modules[__name__].__class__ = _Package
