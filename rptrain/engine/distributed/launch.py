"""What torchrun tells a process. It is read before torch is imported."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rptrain.utils.errors import UserError

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" where torchrun hosts the store


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process: its number, how many there are, the same on its machine, and where to meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    run: str = ""  # the name that torchrun has for all of its processes, also those that it restarts
    hosts: bool = False  # whether the first process hosts the store, not torchrun

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None for a process of its own; one that torchrun started may be the only one, too. UserError if the variables
        of several processes are incomplete, or cannot be those of one among them.
        """
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        if environment.get("WORLD_SIZE", "1") == "1" and not run:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
        if missing := [name for name in names if name not in environment]:
            raise UserError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start several processes with torchrun")
        *texts, host = (environment[name] for name in names)
        numbers = [int(text) if text.isdecimal() else -1 for text in texts]
        rank, world, local_rank, local_world, port = numbers
        if not (0 <= rank < world and 0 <= local_rank < local_world <= world and 0 < port < 1 << 16):
            given = " ".join(f"{name}={text}" for name, text in zip(names, texts, strict=False))
            raise UserError(f"the environment has {given}, which no process has: start several processes with torchrun")
        hosts = environment.get(AGENT_STORE) != str(True)
        return cls(rank, world, local_rank, local_world, host, port, run, hosts)
