""" "auto" becomes numbers before step 1, and stays those numbers."""

from types import SimpleNamespace

import pytest

from rptrain.config.resolve import resolve
from rptrain.planner.auto import is_automatic, search_auto
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train.run import train
from rptrain.utils.errors import UserError
from tests.run_tools import write_config, write_model


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model")
    return tmp_path


def config_of(folder, *overrides):
    return write_config(folder, *overrides).config


def planner(periods, asked=None):
    """Plans whose period follows from rows and micro-batches a round; a pair that is not listed does not fit."""

    def plan(config):
        pair = config.train.sequences, config.round_size
        if asked is not None:
            asked.append(pair)
        if pair not in periods:
            raise UserError(f"{pair} does not fit")
        return SimpleNamespace(estimate=SimpleNamespace(period=periods[pair]))

    return plan


def chosen(config):
    return config.train.micro_batch_size, config.engine.round_size


def test_the_quickest_micro_batch_that_fits_is_taken(folder):
    config = config_of(folder, "train.micro_batch_size=auto")
    assert is_automatic(config)
    asked = []
    best = search_auto(config, 2, planner({(16, 4): 3.0, (8, 8): 2.0, (4, 16): 2.5}, asked))
    assert chosen(best) == (8, None)
    assert not is_automatic(best)
    assert {rows for rows, _ in asked} == {64, 32, 16, 8, 4, 2, 1}  # every divisor of the 64 rows of a step


def test_choices_that_cannot_be_quicker_are_not_planned(folder):
    config, asked = config_of(folder, "train.micro_batch_size=auto"), []
    periods = {(16, 4): 3.0, (8, 8): 2.0, (4, 16): 2.5}
    plan, least = planner(periods, asked), {16: 1.0, 8: 1.0, 4: 2.2}
    best = search_auto(config, 2, plan, 1, lambda choice: least.get(choice.train.sequences, 1.9))
    assert chosen(best) == (8, None)
    assert {rows for rows, _ in asked} == {64, 32, 16, 8, 2, 1}


def test_about_as_quick_is_not_worth_more_rounds_or_too_few_micro_batches(folder):
    config = config_of(folder, "train.micro_batch_size=auto", "engine.round_size=auto")
    everything = {(rows, 64 // rows // rounds): 1.0 for rows in (1, 2, 4, 8, 16, 32, 64) for rounds in (1, 2, 4)}
    assert chosen(search_auto(config, 4, planner(everything))) == (
        8,
        None,
    )  # eight micro-batches, the fewest above four
    assert chosen(search_auto(config, 4, planner(everything | {(8, 4): 0.9}))) == (8, 4)
    assert chosen(search_auto(config, 4, planner(everything | {(64, 1): 0.9}))) == (64, None)


def test_more_rounds_are_taken_only_if_nothing_else_fits(folder):
    config = config_of(folder, "train.micro_batch_size=auto", "engine.round_size=auto")
    assert chosen(search_auto(config, 2, planner({(4, 2): 1.0, (2, 2): 1.0}))) == (4, 2)
    assert chosen(search_auto(config, 2, planner({(4, 2): 1.0, (4, 16): 2.0}))) == (4, None)


def test_a_round_size_that_is_given_is_kept(folder):
    config = config_of(folder, "train.micro_batch_size=auto", "engine.round_size=8")
    assert chosen(search_auto(config, 2, planner({(4, 8): 1.0, (2, 8): 2.0}))) == (4, 8)
    with pytest.raises(UserError, match=r"engine\.round_size = 5 does not divide any number of micro-batches that 64"):
        search_auto(config_of(folder, "train.micro_batch_size=auto", "engine.round_size=5"), 2, planner({}))


def replicas_planner(periods, asked):
    """Plans whose period follows from the number of replicas; a number that is not listed does not fit."""

    def plan(config):
        asked.append((config.replicas, config.round_size))
        if config.replicas not in periods:
            raise UserError("it does not fit")
        return SimpleNamespace(estimate=SimpleNamespace(period=periods[config.replicas]))

    return plan


def test_the_quickest_replicas_are_taken(folder):
    config = config_of(folder, "train.micro_batch_size=4", "engine.replicas=auto")
    assert is_automatic(config)
    asked = []
    best = search_auto(config, 4, replicas_planner({1: 3.0, 2: 2.0, 4: 2.5}, asked))
    assert best.engine.replicas == 2 and best.engine.round_size is None and best.round_size == 8
    assert asked == [(1, 16), (2, 8), (4, 4)]  # the divisors of the number of devices
    alike = replicas_planner({1: 1.0, 2: 1.0, 4: 0.999}, [])
    assert search_auto(config, 4, alike).replicas == 1
    lora = config_of(folder, "train.micro_batch_size=4", "engine.replicas=auto", "train.method=lora")
    assert search_auto(lora, 4, alike).replicas == 4
    given = config_of(folder, "train.micro_batch_size=auto", "engine.replicas=3")
    with pytest.raises(UserError, match=r"engine.replicas = 3 does not divide any number of micro-batches that 64"):
        search_auto(given, 3, alike)


def test_each_of_several_processes_has_a_group_at_least(folder):
    config, asked = config_of(folder, "train.micro_batch_size=4", "engine.replicas=auto"), []
    plan = replicas_planner({1: 1.0, 2: 1.0, 4: 3.0, 8: 2.0}, asked)
    assert search_auto(config, 2, plan, 3).replicas == 8
    assert {replicas for replicas, _ in asked} == {4, 8}  # 3 and 6 do not divide 64 sequences


def test_where_nothing_fits_the_smallest_says_why(folder):
    with pytest.raises(UserError, match=r"\(1, 64\) does not fit"):
        search_auto(config_of(folder, "train.micro_batch_size=auto"), 2, planner({}))


def test_a_run_records_the_numbers_and_goes_on_with_them(folder, monkeypatch):
    resolved = write_config(folder, "train.micro_batch_size=auto", "engine.round_size=auto", "train.max_steps=2")
    run = train(resolved, quiet=True)
    recorded = run.config()
    assert not is_automatic(recorded)
    rows = recorded.train.sequences
    text = run.config_path.read_text()
    assert f"micro_batch_size = {rows} # planned" in text

    def other(config, devices, plan):
        raise AssertionError("a run that goes on plans its constants anew")

    monkeypatch.setattr("rptrain.planner.auto.search_auto", other)
    longer = write_config(
        folder, "train.micro_batch_size=auto", "engine.round_size=auto", "train.max_steps=3",
        f"save.resume={run.path / 'checkpoints' / 'checkpoint-2'}",
    )  # fmt: skip
    again = train(longer, quiet=True)
    assert isinstance(again, RunDir)
    assert again.config().train.sequences == rows
    assert resolve(again.config_path).config.train.max_steps == 3


@pytest.mark.parametrize("key", ["train.micro_batch_size", "engine.round_size", "engine.replicas"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "automatic", "[1]"])
def test_what_is_neither_a_number_nor_auto_is_said_once(folder, key, value):
    with pytest.raises(UserError) as caught:
        config_of(folder, f"{key}={value}")
    said = str(caught.value)
    assert f'`{key}` must be a whole number from 1 to 1000000000, or "auto", not ' in said and "\n" not in said
