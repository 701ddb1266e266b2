"""Count the files of rptrain that a run enters on its way from `train()` to its first checkpoint.

python -m benchmarks.walk [--list] [KEY=VALUE...]: trains the bundled example on one CPU worker in a temporary directory
and counts, in all threads, the source files in which a function is called until the first checkpoint is complete.
Prints the number, and with --list the files by package. Modules that are only imported do not count.
"""

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import rptrain
import rptrain.kernels
import rptrain.models

CONFIG = Path(__file__).resolve().parent.parent / "rptrain.toml"
FOLDERS = {
    Path(str(package.__file__)).parent: package.__name__ for package in (rptrain.kernels, rptrain.models, rptrain)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    files = sorted(name for name in map(module, entered(arguments.overrides)) if name)
    print(len(files))
    if arguments.list:
        for package, count in Counter(".".join(name.split(".")[:2]) for name in files).items():
            inside = [name.removeprefix(package + ".") for name in files if name.startswith(package + ".")]
            print(f"  {package:22} {count:3}  {' '.join(inside)}")


def entered(overrides: list[str]) -> set[str]:
    """Paths of the files in which a function was called."""
    files: set[str] = set()
    done = threading.Event()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not done.is_set() and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    resolve, train, save = steps()
    with TemporaryDirectory() as folder:
        short = [
            "train.max_steps=4",
            "save.save_steps=2",
            "eval.questions=0",
            "engine.devices=cpu:1",
            "log.run_name=walk",
        ]
        config = resolve(CONFIG, [*short, f"save.output_dir={folder}", *overrides])
        save(done)
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            train(config, quiet=True)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return files


def steps() -> tuple[Any, Any, Any]:
    """`resolve`, `train`, and a function that sets an event once a checkpoint is complete."""
    from rptrain.checkpoint import state
    from rptrain.config.resolve import resolve
    from rptrain.train import run, save

    def watch(done: threading.Event) -> None:
        write = state.save_state

        def watched(*arguments: Any, **named: Any) -> Any:
            path = write(*arguments, **named)
            done.set()
            return path

        save.save_state = watched

    return resolve, run.train, watch


def module(path: str) -> str | None:
    """The dotted name of a file of rptrain; None for all others."""
    for folder, name in FOLDERS.items():
        if Path(path).is_relative_to(folder):
            inner = Path(path).relative_to(folder).with_suffix("").parts
            return ".".join((name, *inner))
    return None


if __name__ == "__main__":
    main()
