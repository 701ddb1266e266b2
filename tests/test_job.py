"""What is found out before a run takes memory."""

from pathlib import Path

import pytest

from rptrain.config_source import resolve
from rptrain.errors import UserError
from rptrain.job import prepare_job

CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_the_memory_of_workers_on_the_cpu_is_host_memory(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    plan = prepare_job(resolve(tmp_path / "c.toml").config).plan
    needed = plan.host_bytes + 2 * plan.device.total
    prepare_job(resolve(tmp_path / "c.toml", [f"engine.host_limit={needed}"]).config)
    with pytest.raises(UserError, match="host memory"):
        prepare_job(resolve(tmp_path / "c.toml", [f"engine.host_limit={needed - 1}"]).config)
