"""adapter_config.json: which values are read, what is refused, and what is written."""

import ast
import json
import subprocess
import sys

import pytest

from rptrain.checkpoint import adapter_config
from rptrain.utils.errors import UserError
from tests import run_tools as tools
from tests.test_arrows import sources


@pytest.fixture
def read(tmp_path):
    """Reads a config with these settings."""

    def read(**settings):
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps({"peft_type": "LORA"} | settings))
        return adapter_config.read(file)

    return read


def test_what_is_not_there_has_the_default_of_peft(read) -> None:
    from peft import LoraConfig

    assert read() == LoraConfig()
    assert read(use_dora=None, use_rslora=None, target_modules=None, lora_dropout=None, bias=None) == LoraConfig()


def test_what_peft_writes_is_read(read, tmp_path) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["b", "a"], modules_to_save=["c"])
    config.save_pretrained(str(tmp_path))
    assert adapter_config.read(tmp_path / "adapter_config.json") == config


def test_what_is_written_is_what_peft_writes_in_a_fixed_order(tmp_path) -> None:
    config = adapter_config.make(r=3, target_modules=["d", "b", "a", "c"], task_type="CAUSAL_LM")
    written = json.loads(json.dumps(adapter_config.content(config)))
    assert written["target_modules"] == ["a", "b", "c", "d"]
    config.save_pretrained(str(tmp_path))
    theirs = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written == theirs | {"target_modules": sorted(theirs["target_modules"])}


def test_patterns_that_change_nothing_are_read(read) -> None:
    assert read(rank_pattern={"q_proj": 8}, alpha_pattern={"v_proj": 8, "o_proj": 8}).r == 8
    assert read(r=4, lora_alpha=16, rank_pattern={"q_proj": 4}, alpha_pattern={}).lora_alpha == 16
    with pytest.raises(UserError, match="alpha_pattern cannot be trained here"):
        read(lora_alpha=16, alpha_pattern={"q_proj": 8})


@pytest.mark.parametrize("settings", [{"later": None, "more": [], "most": False}, {"eva_config": {"later": 1}}])
def test_settings_of_a_later_version_that_say_nothing(settings, read) -> None:
    assert read(r=4, **settings).r == 4


@pytest.mark.parametrize(
    "settings",
    [
        *({key: True} for key in ("fan_in_fan_out", "lora_bias", "use_qalora", "later")),
        *({key: {"q_proj": 2}} for key in ("rank_pattern", "alpha_pattern", "trainable_token_indices")),
        *({key: {"a": 1}} for key in ("arrow_config", "kasa_config", "velora_config", "monteclora_config")),
        *({key: [[0, 1]]} for key in ("layer_replication", "alora_invocation_tokens", "use_bdlora")),
        *({"bias": "lora_only"}, {"megatron_config": {"a": 1}}),
        *({"init_lora_weights": value} for value in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", {"a": 1})),
    ],
)
def test_what_would_compute_something_else_is_refused(settings, read) -> None:
    with pytest.raises(
        UserError, match=rf"adapter_config.json: {next(iter(settings))}.* cannot be trained here: merge"
    ):
        read(**settings)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        *(
            (key, value, key)
            for key, value in (
                ("r", None),
                ("r", 4.0),
                ("r", True),
                ("r", "4"),
                ("r", 0),
                ("r", 10**30),
                ("lora_alpha", "16"),
                ("lora_alpha", True),
                ("lora_alpha", float("nan")),
                ("lora_alpha", float("-inf")),
                ("lora_alpha", 1e300),
                ("lora_alpha", 10**10),
                ("lora_alpha", 10**400),
                ("lora_dropout", "x"),
                ("use_rslora", "no"),
                ("use_dora", 1),
                ("base_model_name_or_path", 5),
                ("target_modules", 5),
                ("target_parameters", "down_proj"),
                ("modules_to_save", ["a", 5]),
                ("layers_pattern", "h"),
            )
        ),
        ("task_type", "\x1b[31m", "'␛[31m'"),
        ("\x1b[31m", 1, "␛[31m"),
    ],
)
def test_values_that_are_invalid(key, value, named, read) -> None:
    with pytest.raises(UserError) as caught:
        read(**{key: value})
    place, _, problem = str(caught.value).partition("adapter_config.json: ")
    assert place and named in problem
    assert len(str(caught.value)) < 400


PLAN = """
import sys
import rptrain.checkpoint.export, rptrain.inference.generate, rptrain.train.run
from rptrain.checkpoint import adapter_config
from rptrain.cli.commands import app
assert not app(["plan", "--config", sys.argv[1], "lora.r=4"], standalone_mode=False)
print("peft" in sys.modules)
adapter_config.make()
print("peft" in sys.modules)
"""


def test_peft_is_not_imported_with_a_module() -> None:
    """Once within a function, and twice for the type checker only."""
    places = []
    for name, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            places += [(name, node.col_offset) for found in names if found.partition(".")[0] == "peft"]
    assert sorted(places) == [("rptrain.checkpoint.adapter", 4)] + 2 * [("rptrain.checkpoint.adapter_config", 4)]


@pytest.mark.long
def test_peft_is_imported_only_for_an_adapter(tmp_path) -> None:
    """Neither by the modules of training, nor by a plan of it."""
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PLAN, tmp_path / "run.toml"], capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-2:] == ["False", "True"], done.stderr
