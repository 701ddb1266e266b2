"""Tokenize a file of chats with the rptrain that is imported, and print the seconds as JSON.

A script for `benchmarks.reading`, which also runs it with the rptrain of another commit: it uses only what both have.
"""

import json
import sys
import time
from pathlib import Path

from rptrain.config.schema import TrainSet
from rptrain.data import loader, template


def main(model: str, data: str, cache: str, processes: str) -> None:
    if int(processes):
        template.own_cores = lambda: int(processes)
    tokenizer = loader.load_tokenizer(model)
    began = time.perf_counter()
    sequences = loader.prepare(
        sources=[TrainSet(path=data)], tokenizer=tokenizer, max_length=2048, cache_dir=Path(cache)
    )
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "supervised": int(sequences.supervised.sum())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
