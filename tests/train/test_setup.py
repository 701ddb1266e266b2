"""What is set up before the engine is opened."""

from hashlib import sha256
from types import SimpleNamespace

import torch

from rptrain.train.session import initial_hashes


def test_frozen_weights_that_were_hashed_are_not_read_again():
    trained = SimpleNamespace(unit=SimpleNamespace(name="adapters"), params=[torch.ones(4)])
    frozen = SimpleNamespace(unit=SimpleNamespace(name="base"), params=None)
    digest = sha256(torch.ones(4).numpy().tobytes()).hexdigest()
    both, one = SimpleNamespace(units=[frozen, trained]), SimpleNamespace(units=[trained])
    assert initial_hashes(both, {"sha256": {"base": "known"}}) == {"base": "known", "adapters": digest}  # pyright: ignore[reportArgumentType]
    assert initial_hashes(one, None) == {"adapters": digest}  # pyright: ignore[reportArgumentType]
