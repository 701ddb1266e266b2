"""A run that diverges ends with 1 and says so, and leaves no model."""

import pytest

from rptrain import metrics
from rptrain.rundir import RunDir

from . import run_tools as tools


@pytest.mark.parametrize("update", ["async", "sync"])
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (1, "model has diverged: model.embed_tokens.weight holds values that are infinite or not numbers"),
        (6, "the loss of the last step is nan: the model has diverged"),
        (40, "the gradients of the last 20 steps, up to step 2"),
    ],
)
def test_a_run_that_diverges_ends(steps, message, update, tmp_path):
    """However few steps are left by then."""
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    settings = (
        "optim.learning_rate=1e38",
        "optim.warmup_steps=0",
        f"train.max_steps={steps}",
        f"optim.update={update}",
    )
    result = tools.invoke("--config", tmp_path / "run.toml", *settings)
    assert result.exit_code == 1, result.output
    assert message in result.stderr and "with a lower optim.learning_rate" in result.stderr
    (path,) = (tmp_path / "runs").iterdir()
    run = RunDir(path)
    assert not list(path.glob("model*"))
    assert isinstance(list(metrics.read(run.events_path))[-1], metrics.Failed)
