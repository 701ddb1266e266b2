"""Loads a model for a conversation, and its base model beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rptrain.data.loader import load_tokenizer
from rptrain.engine.memory.arena import available_bytes
from rptrain.inference.chat import Chat, Speaker
from rptrain.inference.model import find_base, find_model
from rptrain.inference.placement import FREE, Room, Sizes, choose, speeds
from rptrain.inference.weights import placed
from rptrain.models.adapters.lora import without_adapters
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes


class LoadedChat:
    """A conversation with a model in memory. `chat` has no base model until `load_base`."""

    def __init__(self, source: Path, room: Room, wanted: str = "auto") -> None:
        """Raises UserError as `find_model` and `choose`, before weights are loaded."""
        self.model = find_model(source)
        sizes = Sizes.of(self.model.spec, self.model.dtype)
        self.placement, self.speeds = choose(sizes, room, wanted), speeds(sizes, room)
        tokenizer = load_tokenizer(self.model.tokenizer)
        self._weights = placed(self.model, self.placement, self._note)
        self._free = _free_on(self.placement.device)
        tuned = Speaker(self.model.spec, self._weights, self._free)
        self.chat = Chat(tokenizer, self.model.ends(tokenizer), tuned, self.model.longest)

    def _note(self, said: str) -> None:
        """Completes why the model answers slowly where it is."""
        if said not in self.placement.reason:
            self.placement = replace(self.placement, reason=f"{self.placement.reason}; {said}")

    def load_base(self) -> None:
        """Makes the base model answer too. That of adapters is the same weights without them.

        Raises UserError if the base model is unknown, or is not on this machine, or does not fit.
        """
        if self.chat.base is not None:
            return
        if self.model.has_adapters_only:
            spec, weights = without_adapters(self.model.spec), self._weights
        else:
            base = find_base(self.model)
            if (base.spec.vocab_size, base.spec.architecture) != (
                self.model.spec.vocab_size,
                self.model.spec.architecture,
            ):
                raise UserError(f"{base.source} is another model than the one that was trained: it cannot be compared")
            if base.nbytes > FREE * self._free():
                raise UserError(
                    f"the base model takes {format_bytes(base.nbytes)}, and {format_bytes(self._free())} is free "
                    "beside the tuned one: free memory"
                )
            spec, weights = base.spec, placed(base, self.placement, self._note)
        self.chat.base = Speaker(spec, weights, self._free)


def _free_on(device: torch.device) -> Callable[[], int]:
    return (lambda: torch.cuda.mem_get_info()[0]) if device.type == "cuda" else available_bytes
