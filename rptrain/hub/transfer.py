"""Download a file into the hub's cache: resumed where it was cut, and checked against the hub's digest."""

import hashlib
import os
from collections.abc import Callable
from io import BufferedRandom
from pathlib import Path
from threading import Event

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session, hf_raise_for_status

from rptrain.hub.errors import HTTPError
from rptrain.hub.repository import RemoteFile, headers
from rptrain.utils.errors import TrainingError, UserError
from rptrain.utils.files import naming
from rptrain.utils.locks import lock

PARTIAL = ".rptrain.incomplete"  # suffix of a file that is not complete yet; other programs skip *.incomplete
CHUNK = 1 << 20  # bytes that are written at a time: what a cut loses
ATTEMPTS = 5  # failures in a row, without a byte between them, after which the file is asked for again
PAUSE = 1.0  # seconds after the first of them; twice as many after each of the others
RETRIED = (408, 429, 500, 502, 503, 504)  # status codes that may pass
IGNORED_RANGE = 200  # the status code if a server sends the whole file instead of its rest
REFUSED_RANGE = 416  # and if it says that the file has no such rest
SHA1 = 40  # characters of a git blob id


class Stopped(Exception):
    """The download was interrupted."""


class _OtherContent(Exception):
    """What is sent, or was received before, is not the file that the hub lists."""


def download(url: str, file: RemoteFile, to: Path, count: Callable[[int], object], stopping: Event) -> None:
    """Downloads a file to `to`, which appears only once it is complete and its digest is right.

    Continues where an earlier call was cut, which may have been in another process. `count` gets the bytes that are
    there: at first those of earlier calls, then each piece; a negative number if bytes are dropped. Raises HTTPError,
    OSError of the disk, UserError if another process downloads it, TrainingError if the content is another one than the
    hub lists, and Stopped soon after `stopping` is set.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = to.with_name(to.name + PARTIAL)
    with naming(aside), open(aside, "a+b") as partial:
        try:
            lock(partial.fileno())
        except BlockingIOError:
            raise UserError(f"another process is downloading {file.name}: wait for it, then run this again") from None
        if to.exists():  # that process has completed it meanwhile
            aside.unlink(missing_ok=True)
            count(file.size)
            return
        done = partial.seek(0, os.SEEK_END)
        count(done)
        if done > file.size:
            partial.truncate(0)
            count(-done)
        try:
            _receive(url, file.size, partial, count, stopping)
            partial.flush()
            is_other = _digest(partial, file) != file.digest
        except _OtherContent:
            is_other = True
        if is_other:
            aside.unlink()
            raise TrainingError(
                f"{file.name} arrived with other content than the hub lists, and was deleted: run this again; if a "
                "proxy or a mirror is used, try without it"
            )
        os.fsync(partial.fileno())
        aside.replace(to)


def _receive(url: str, size: int, partial: BufferedRandom, count: Callable[[int], object], stopping: Event) -> None:
    """Appends what is missing, and asks again for the rest after a cut."""
    cuts = 0
    while (done := partial.seek(0, os.SEEK_END)) < size:
        failed = None
        try:
            _append(url, size, partial, done, count, stopping)
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in RETRIED:
                raise
            failed = error
        if (now := partial.tell()) == size:
            return
        if now > done:
            cuts = 0
        if cuts == ATTEMPTS:
            raise failed or TrainingError(f"the hub sent {now:,} bytes of a file with {size:,}: run this again")
        if stopping.wait(PAUSE * 2**cuts):
            raise Stopped from failed
        cuts += 1


def _append(
    url: str, size: int, partial: BufferedRandom, done: int, count: Callable[[int], object], stopping: Event
) -> None:
    asked = headers() | ({"Range": f"bytes={done}-"} if done else {}) | {"Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=asked, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
        if done and answer.status_code == REFUSED_RANGE:
            raise _OtherContent
        hf_raise_for_status(answer)
        begin = 0 if answer.status_code == IGNORED_RANGE else done
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and "Content-Encoding" not in answer.headers and int(length) != size - begin:
            raise _OtherContent  # such as the page of a proxy
        if begin < done:
            partial.truncate(0)
            count(-done)
        for chunk in answer.iter_bytes(CHUNK):
            if stopping.is_set():
                raise Stopped
            if partial.tell() + len(chunk) > size:
                raise _OtherContent
            partial.write(chunk)
            count(len(chunk))


def _digest(content: BufferedRandom, file: RemoteFile) -> str:
    """The digest of a file's content, of the kind that the hub lists."""
    content.seek(0)
    if len(file.digest) != SHA1:
        return hashlib.file_digest(content, "sha256").hexdigest()
    found = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    while piece := content.read(CHUNK):
        found.update(piece)
    return found.hexdigest()
