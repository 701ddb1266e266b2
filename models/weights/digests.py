"""Digests of stored tensors, which are hashed by the threads that read them.

The digest of a tensor is the SHA-256 of the SHA-256 of its pieces of PIECE bytes, so that any number of threads can
hash it. Tensors are put together in groups: those of a layer, and each tensor outside of the layers. Neither depends on
how a checkpoint is divided into files.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from math import ceil
from pathlib import Path

import torch

from rptrain.models.weights.safetensors_io import CONVERTED, NAMES, PIECE, Stored, as_bytes
from rptrain.utils.errors import UserError
from rptrain.utils.file_digests import keep_digests, kept_digests
from rptrain.utils.file_ranges import OpenFile, Stamp
from rptrain.utils.file_state import FileState, states_of
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

LAYER = re.compile(r"(.*?\blayers\.\d+)\.")


class TensorDigests:
    """The digests of tensors in files. Those of files that were read before, and have not changed, are known already.

    Thread-safe. Raises UserError if a file has changed since it had its stamp.
    """

    def __init__(self, tensors: Mapping[str, Stored], stamps: Mapping[Path, Stamp]) -> None:
        self._tensors, self._wanted = tensors, {*tensors.values()}
        files = [*stamps]
        self._states = dict(zip(files, states_of(files), strict=True))
        for file, state in self._states.items():
            if Stamp(state.nbytes, state.modified_ns) != stamps[file]:
                raise _changed(file)
        kept = {file: kept_digests(file, state) for file, state in self._states.items()}
        self._kept = {
            stored: digest for stored in tensors.values() if (digest := kept[stored.file].get(_range(stored)))
        }
        self._pieces: dict[Stored, dict[int, bytes]] = {}
        self._own: dict[Stored, str] = {}  # those that were hashed here

    def wants(self, stored: Stored) -> bool:
        """Whether this is one of the tensors, and its digest is not known."""
        return stored in self._wanted and stored not in self._kept and stored not in self._own

    def add(self, stored: Stored, number: int, digest: bytes) -> None:
        """The SHA-256 of piece number `number` of a tensor."""
        found = self._pieces.setdefault(stored, {})
        found[number] = digest
        if len(found) == _count(stored):
            self._own[stored] = sha256(b"".join(found[index] for index in range(len(found)))).hexdigest()

    def works(self, stored: Stored, *, counted: bool = True) -> Iterator[Callable[[], None]]:
        """Works that hash a tensor whose digest is not known, for the threads that then read its pieces in an order of
        their own. `counted`: as in `OpenFile.read`.
        """
        if self.wants(stored):
            yield from (partial(self._hash, stored, index, counted) for index in range(_count(stored)))

    def groups(self, names: Collection[str] | None = None) -> dict[str, str]:
        """The digest of each group, of all tensors or of those with these names. Groups with a tensor that nobody has
        hashed are left out.
        """
        known = {**self._kept, **self._own}
        return {
            group: _digest_of((name, stored, known[stored]) for name, stored in members.items())
            for group, members in self._members(names).items()
            if all(stored in known for stored in members.values())
        }

    def differing(self, recorded: Mapping[str, str], names: Collection[str] | None = None) -> dict[str, list[Path]]:
        """The groups whose digests are not the recorded ones, each with its files. Digests from earlier processes are
        not enough for that: such tensors are hashed again.
        """
        found = self.groups(names)
        wrong = [group for group in found if recorded.get(group) != found[group]]
        members = self._members(names)
        again = {stored: None for group in wrong for stored in members[group].values() if stored in self._kept}
        if again:
            for stored in again:
                del self._kept[stored]
            with phase("hashing weights", sum(stored.nbytes for stored in again), reads=True):
                in_parallel(lambda work: work(), (work for stored in again for work in self.works(stored)))
            found = self.groups(names)
        return {
            group: [*dict.fromkeys(stored.file for stored in members[group].values())]
            for group in wrong
            if recorded.get(group) != found[group]
        }

    def keep(self) -> None:
        """Keeps the digests for later processes. UserError if a file was changed since this was made."""
        found: dict[Path, dict[str, str]] = {}
        for stored, digest in self._own.items():
            found.setdefault(stored.file, {})[_range(stored)] = digest
        for file, state in self._states.items():
            if _state(file) != state:
                raise _changed(file)
            if file in found:
                keep_digests(file, state, found[file])

    def _members(self, names: Collection[str] | None) -> dict[str, dict[str, Stored]]:
        found: dict[str, dict[str, Stored]] = {}
        for name in sorted(self._tensors if names is None else names):
            layer = LAYER.match(name)
            found.setdefault(layer[1] if layer else name, {})[name] = self._tensors[name]
        return found

    def _hash(self, stored: Stored, index: int, counted: bool) -> None:
        start, stop = index * PIECE, min((index + 1) * PIECE, stored.nbytes)
        digest, buffer = sha256(), as_bytes(torch.empty(min(CONVERTED, stop - start), dtype=torch.uint8))
        with OpenFile(stored.file) as file:
            for at in range(start, stop, CONVERTED):
                part = buffer[: min(CONVERTED, stop - at)]
                file.read(stored.offset + at, part, counted=counted)
                digest.update(part)
        self.add(stored, index, digest.digest())


def _digest_of(members: Iterable[tuple[str, Stored, str]]) -> str:
    lines = (f"{name} {NAMES[stored.dtype]} {list(stored.shape)} {digest}\n" for name, stored, digest in members)
    return sha256("".join(lines).encode()).hexdigest()


def _count(stored: Stored) -> int:
    return max(1, ceil(stored.nbytes / PIECE))


def _range(stored: Stored) -> str:
    """What a kept digest covers, in a file."""
    return f"pieces {stored.offset} {stored.nbytes}"


def _state(file: Path) -> FileState | None:
    try:
        return FileState.of(file)
    except OSError:  # deleted
        return None


def _changed(file: Path) -> UserError:
    return UserError(f"{file} was changed while it was read: try again once it is complete")
