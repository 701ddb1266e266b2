"""The variables with which torchrun starts a process."""

import pytest

from rptrain.engine.distributed.launch import Launch
from rptrain.utils.errors import UserError


def test_what_torchrun_says():
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert Launch.of(given) == Launch(3, 4, 1, 2, "a", 5, hosts=True)
    assert Launch.of({}) is None and Launch.of(given | {"WORLD_SIZE": "1"}) is None
    alone = {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    alone |= {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.of(given | alone) == Launch(0, 1, 0, 1, "a", 5, "b")
    with pytest.raises(UserError, match="WORLD_SIZE is set, but not RANK, MASTER_PORT: start several processes with"):
        Launch.of({name: value for name, value in given.items() if name not in ("RANK", "MASTER_PORT")})
    wrong = [("WORLD_SIZE", "x"), ("WORLD_SIZE", "3"), ("RANK", "-1"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "5")]
    for name, value in (*wrong, ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")):
        with pytest.raises(UserError, match=f"the environment has .*{name}={value}[ ,].*: start several processes"):
            Launch.of(given | {name: value})
