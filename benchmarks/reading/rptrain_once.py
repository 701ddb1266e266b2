"""Tokenize a file of chats with the rptrain that is imported, and print the seconds as JSON.

A script for `benchmarks.reading`, which also runs it with the rptrain of another commit: it uses only what both have.
"""

import json
import sys
import time
from pathlib import Path

from rptrain.config.schema import Config, Data, Model, TrainSet
from rptrain.data import datasets, loader, template


def main(model: str, data: str, cache: str, processes: str) -> None:
    if int(processes):
        template.own_cores = lambda: int(processes)
    tokenizer = loader.load_tokenizer(model)
    sets = Data(train=(TrainSet(path=data),), max_length=2048, cache_dir=cache)
    config = Config(model=Model(path=model), data=sets)
    began = time.perf_counter()
    sequences, _ = datasets.training_set(config, Path(model), sys.maxsize, tokenizer)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "supervised": int(sequences.supervised.sum())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
