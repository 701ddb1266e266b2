"""The learning rate that suits a model, and the warning about a low one."""

import pytest

from rptrain.config.schema import Config
from rptrain.planner.learning_rate import low_rate, suitable_rate


def of_rate(rate: float, method: str = "full") -> Config:
    values = {"model": {"path": "m"}, "data": {"train": [{"path": "d"}]}, "train": {"method": method}}
    return Config.model_validate(values | {"optim": {"learning_rate": rate}})


@pytest.mark.parametrize("method", ["full", "lora"])
def test_rates_fall_with_the_size_and_are_higher_for_adapters(method):
    sizes = (1_000_000, 135_000_000, 600_000_000, 8_000_000_000, 235_000_000_000)
    rates = [suitable_rate(size, method) for size in sizes]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1e-3
    assert rates[-1] == (1e-4 if method == "lora" else 1e-5)
    assert all(suitable_rate(size, "full") <= suitable_rate(size, "lora") for size in sizes)


def test_a_low_rate_of_a_small_model_is_a_warning():
    warning = low_rate(of_rate(1e-5), 3_100_000)
    assert "learning_rate 1e-5 is low for a model of 3.1 M parameters" in warning and "about 1e-3 suits" in warning
    assert "adapters" in low_rate(of_rate(1e-5, "lora"), 3_100_000)
    assert not low_rate(of_rate(1e-3), 3_100_000) and not low_rate(of_rate(5e-5), 135_000_000)
    assert not low_rate(of_rate(1e-7), 8_000_000_000)
