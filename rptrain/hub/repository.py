"""The files of a repository on the hub, at one commit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers

from rptrain import __version__
from rptrain.hub.errors import explained_answers, explained_errors
from rptrain.models.locate import HUB_ID, hub_cache
from rptrain.utils.errors import TrainingError, UserError
from rptrain.utils.text import quoted

KINDS = {"model": "model", "data set": "dataset"}  # what people call it, and the hub
TIMEOUT = 30  # seconds for the list of files
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size in bytes, and its content's sha256 or, of a small file, its git blob id."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, as the hub listed it. `card` is the metadata of its README.md."""

    name: str
    what: str  # of KINDS
    revision: str  # the branch, tag or commit that was asked for
    commit: str
    files: Mapping[str, RemoteFile]
    card: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Its folder in the hub's cache."""
        return hub_cache() / f"{KINDS[self.what]}s--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of its files in the hub's cache."""
        return self.folder / "snapshots" / self.commit

    def blob(self, file: RemoteFile) -> Path:
        """Where the cache keeps the content of a file."""
        return self.folder / "blobs" / file.digest

    def url(self, file: RemoteFile) -> str:
        return hf_hub_url(self.name, file.name, repo_type=KINDS[self.what], revision=self.commit)


def find(name: str, what: str, revision: str | None = None) -> Repository:
    """Asks the hub for a repository at a revision, by default `main`. Raises as `explained_errors`."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{quoted(repr(name))} is not the name of a {what} on the hub: write owner/name")
    if revision is not None and not {"", ".", ".."}.isdisjoint(revision.split("/")):
        raise UserError(f"{quoted(repr(revision))} is not a revision: name a branch, a tag or a commit")
    with explained_errors(name, what):
        ask = api().model_info if what == "model" else api().dataset_info
        with explained_answers(f"the files of {name}"):
            found = ask(name, revision=revision, files_metadata=True, timeout=TIMEOUT)
            files = [
                RemoteFile(file.rfilename, int(file.size or 0), file.lfs.sha256 if file.lfs else file.blob_id or "")
                for file in found.siblings or []
            ]
            card = found.card_data.to_dict() if found.card_data else {}
    commit = found.sha or ""
    if not (_DIGEST.fullmatch(commit) and all(map(_is_sound, files))):
        raise TrainingError(
            f"{constants.ENDPOINT} lists files of {name} without digests, so what it sends cannot be checked: if "
            "HF_ENDPOINT names a mirror, unset it"
        )
    return Repository(
        name, what, revision or constants.DEFAULT_REVISION, commit, {file.name: file for file in files}, card
    )


def _is_sound(file: RemoteFile) -> bool:
    """Whether a file has a digest, and a path within the repository."""
    path = PurePosixPath(file.name)
    return bool(_DIGEST.fullmatch(file.digest)) and not path.is_absolute() and ".." not in path.parts


def api() -> HfApi:
    """The client of the hub. It takes the token from where Hugging Face's libraries keep it."""
    return HfApi(library_name="rptrain", library_version=__version__)


def headers() -> dict[str, str]:
    """The headers of a request for a file, with the token if there is one."""
    return build_hf_headers(library_name="rptrain", library_version=__version__)
