"""What is measured of a process that reads: its peak memory, and the hashes of the cache that it wrote."""

import hashlib
import threading
from pathlib import Path

import psutil

from rptrain.data.cache import HEADER

SAMPLES = 0.1  # seconds between two looks at the memory


class Peak:
    """The largest sum of the resident memory of a process and its descendants, from now on."""

    def __init__(self, pid: int):
        self._process, self._most, self._over = psutil.Process(pid), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLES):
            total = 0
            try:
                for process in (self._process, *self._process.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:  # one has ended meanwhile
                continue
            self._most = max(self._most, total)

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most


def cache_hashes(folder: Path) -> dict[str, str]:
    """The hash of the only file in a folder of caches, and that of the arrays in it."""
    (file,) = (file for file in folder.rglob("*") if file.is_file())
    content = file.read_bytes()
    return {"cache": hashlib.sha256(content).hexdigest(), "arrays": hashlib.sha256(content[HEADER:]).hexdigest()}
