"""Tensors of a checkpoint that training leaves out, and that exports copy from it byte by byte."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from rptrain.models.weights.safetensors_io import Stored, as_bytes, read_here
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel


@dataclass(frozen=True)
class Carried:
    """Such tensors by name, and the SHA-256 of their bytes when the run began."""

    tensors: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    sha256: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def entries(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types by name. Those with the largest numbers come first, so that each is aligned in a file."""
        entries = {name: (stored.shape, stored.dtype) for name, stored in self.tensors.items()}
        return dict(sorted(entries.items(), key=lambda item: -item[1][1].itemsize))

    def read(self) -> Iterator[Tensor]:
        """The tensors in the order of `entries`, one at a time. UserError if one changed since the run began."""
        for name in self.entries:
            tensor = _read(self.tensors[name])
            self._check(name, self.tensors[name], _digest(tensor))
            yield tensor

    def check(self, found: Mapping[str, Stored]) -> None:
        """UserError if a tensor is missing among these, or if its bytes are others than when the run began."""
        if missing := [name for name in self.sha256 if name not in found]:
            raise UserError(f"{missing[0]} is missing, but was there when the run started: restore the model's files")
        for name, digest in hashes({name: found[name] for name in self.sha256}).items():
            self._check(name, found[name], digest)

    def _check(self, name: str, stored: Stored, digest: str) -> None:
        if digest != self.sha256[name]:
            raise UserError(f"{stored.file}: {name} changed since the run started: restore the model's files")


NOTHING = Carried()


def hashes(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """The SHA-256 of the bytes of each tensor."""
    found: dict[str, str] = {}

    def digest(item: tuple[str, Stored]) -> None:
        found[item[0]] = _digest(_read(item[1]))

    in_parallel(digest, tensors.items())
    return {name: found[name] for name in tensors}


def _digest(tensor: Tensor) -> str:
    return sha256(as_bytes(tensor)).hexdigest()


def _read(stored: Stored) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_here(stored, tensor)
    return tensor
