"""A process that stands for the one with a model: it answers with the words of the message in capitals.

"wait" is answered until it is stopped, "nothing" has empty answers, and "die" ends the process. "refuse" is refused,
also as a system prompt. Models in a folder with a file `slow` are loaded once it is deleted.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

stopped, requests = threading.Event(), list[dict[str, Any]]()
arrived = threading.Condition()


def report(kind: str, **values: Any) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


def read() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "stop":
            stopped.set()
        else:
            with arrived:
                requests.append(request)
                arrived.notify()
    os._exit(0)


def answer(said: str, turns: int, base: bool, system: str) -> bool:
    """Returns whether the message was accepted."""
    stopped.clear()
    if said == "die":
        print("RuntimeError: out of luck", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)
    if "refuse" in (said, system):
        report("refused", text="too \x1b[1mlong", turns=turns)
        return False
    if base and said == "no base":
        report("no base", text="the base model is not here")
        base = False
    for word in said.upper().split() if said != "nothing" else ():
        report("piece", text=f"{word} ", base=False)
    if said == "wait":
        stopped.wait()
        report("stopped", base=False)
    elif base and said != "nothing":
        report("piece", text=f"[{said}]", base=True)
    report("measured", speed=12.34, base=False)
    return True


def answering(source: str) -> str:
    """The directory that answers: a run's exported model, or its newest checkpoint."""
    if (model := Path(source, "model")).is_dir():
        return str(model)
    saved = Path(source, "checkpoints").glob("checkpoint-*")
    return str(max(saved, key=lambda path: int(path.name.split("-")[1]), default=source))


def main() -> None:
    threading.Thread(target=read, daemon=True).start()
    turns = list[str]()
    while True:
        with arrived:
            arrived.wait_for(lambda: requests)
            request = requests.pop(0)
        if request["do"] == "load":
            turns = [said for said, _, _ in request["turns"]]
            while Path(request["source"], "slow").exists():
                time.sleep(0.01)
            if request["source"].endswith("broken"):
                report("refused", text="neither a checkpoint nor a run", turns=0)
            else:
                placement = "cpu" if request["placement"] == "auto" else request["placement"]
                training = request["training"]
                reason = f"{training} trains on this machine" if training else "no GPU"
                values = {"placement": placement, "reason": reason, "expected": 1234.5, "templated": True}
                values["speeds"] = {"gpu": 5678.0, "cpu": 1234.5}
                report("loaded", source=answering(request["source"]), **values)
        elif request["do"] == "ask":
            if answer(request["said"], len(turns), request["base"], request["system"]):
                turns.append(request["said"])
        elif request["do"] == "retry":
            answer(turns[-1], len(turns), request["base"], request["system"])
        elif request["do"] == "take_back":
            turns.pop()
        elif request["do"] == "reset":
            turns.clear()
        if request["do"] in ("load", "ask", "retry"):
            report("idle", host=300 << 20, vram=0)


if __name__ == "__main__":
    main()
