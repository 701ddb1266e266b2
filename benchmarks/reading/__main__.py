"""Compare how fast chats are read, rendered and tokenized: on 1, 2 and 4 processes, by another commit, by `datasets`.

python -m benchmarks.reading COMMIT OUT.json [--megabytes 100] [--repetitions 3] [--only NAME...]

Makes a JSON-lines file of chats and a tokenizer of 32,000 tokens, and tokenizes the file in turns, each time in a new
process with an empty cache: by rptrain with N processes, by the rptrain of COMMIT, and by `map(num_proc=2)` of
`datasets` with an assistant mask (`pip install datasets`). Seconds count from the call, without imports. `peak_bytes`
is the largest sum of the resident memory of a process and its descendants, which counts shared pages several times.
`cache` is the hash of the cache's file, and `arrays` that of the arrays in it. Use a machine that does nothing else.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.commit import commit
from benchmarks.golden import unpack
from benchmarks.reading import chats
from benchmarks.reading.measure import Peak, cache_hashes

HERE = Path(__file__).parent
NAMES = ("1 process", "2 processes", "4 processes", "before", "datasets")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.reading", description="Compare how fast chats are read.")
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the data (default: 100)")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = chats.write_chats(folder / "chats.jsonl", int(given.megabytes * 1e6))
        chats.write_tokenizer(folder / "model")
        (folder / "marked.jinja").write_text(chats.MARKED)
        package = unpack(given.commit, folder / "package") if "before" in given.only else None
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in given.only}
        for _ in range(given.repetitions):
            for name in given.only:
                found[name].append(measured(name, folder, package))
                print(f"{name:12} {rows / found[name][-1]['seconds']:8.1f} rows/s", flush=True)
        digest = hashlib.sha256((folder / "chats.jsonl").read_bytes()).hexdigest()
        nbytes = (folder / "chats.jsonl").stat().st_size
    result = {
        "commit": commit(),
        "before": given.commit,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "data": {"bytes": nbytes, "rows": rows, "sha256": digest},
        "results": {name: _summary(some, rows) for name, some in found.items()},
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(name: str, folder: Path, package: Path | None) -> dict[str, Any]:
    """The seconds, peak memory and hashes of a run in a process of its own."""
    with TemporaryDirectory(dir=folder) as cache:
        given = [str(folder / "model"), str(folder / "chats.jsonl"), cache]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
        if name == "datasets":
            command = [sys.executable, "-P", str(HERE / "datasets_once.py"), *given, str(folder / "marked.jinja")]
            environment |= {"TOKENIZERS_PARALLELISM": "false"}  # it forks
        else:
            processes = name.split()[0] if name[0].isdigit() else "0"
            command = [sys.executable, "-P", str(HERE / "rptrain_once.py"), *given, processes]
            environment |= {"PYTHONPATH": str(package)} if name == "before" else {}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, cwd=folder)
        peak = Peak(process.pid)
        output, _ = process.communicate()
        nbytes = peak.end()
        if process.returncode:
            raise SystemExit(f"{name}: exit status {process.returncode}")
        result = {**json.loads(output.splitlines()[-1]), "peak_bytes": nbytes}
        return result if name == "datasets" else result | cache_hashes(Path(cache))


def _summary(some: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    seconds = [round(one["seconds"], 3) for one in some]
    hashes = {key: sorted({one[key] for one in some}) for key in ("cache", "arrays") if key in some[0]}
    return {
        "rows_per_second": round(rows / median(seconds), 1),
        "seconds": seconds,
        "peak_bytes": max(one["peak_bytes"] for one in some),
        **hashes,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
