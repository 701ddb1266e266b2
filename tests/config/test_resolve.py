"""The config: values, overrides, provenance, and the round trip through its rendering."""

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rptrain.config.resolve import render, resolve
from rptrain.config.schema import Config, Lora, keys
from rptrain.config.toml_lines import key_lines
from rptrain.config.types import format_size, parse_devices, parse_size

from .tools import MINIMAL, load, mistakes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Values


def test_defaults(folder):
    config = load(MINIMAL).config
    assert config.model.dtype == "bfloat16" and config.data.max_length == 2048 and config.data.packing
    assert (config.train.micro_batch_size, config.train.global_batch_size, config.train.micro_batches) == (
        1,
        16,
        16,
    )
    assert config.optim.betas == (0.9, 0.999) and config.optim.update == "async"
    assert config.engine.devices == "auto" and config.engine.vram_limit is None
    assert config.save.resume == "auto" and config.log.run_name == "c"


def test_the_tree_is_frozen_and_documented(folder):
    config = load(MINIMAL).config
    with pytest.raises(ValidationError):
        config.train.seed = 1
    assert [key for key, field in keys().items() if not field.description] == []


def test_digest_tells_configs_apart(folder):
    assert load(MINIMAL).config.digest == load(MINIMAL + "[train]\nseed = 0").config.digest
    assert load(MINIMAL).config.digest != load(MINIMAL, "train.seed=1").config.digest


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5gib", 3 * 2**29),
        ("7B", 7),
        ("256G", 256 * 2**30),
        ("256g", 256 * 2**30),
        ("24gb", 24 * 10**9),
        ("24 Gi", 24 * 2**30),
        ("1T", 2**40),
        (1000, 1000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


def test_sizes_print_short():
    assert [format_size(size) for size in (24 * 2**30, 24 * 10**9, 1001)] == ["24GiB", "24GB", "1001B"]


@pytest.mark.parametrize("text", ["24", "GiB", "24ib", "24i", "24 gibi", "-1GB", "1e3GB", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="24GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("auto", "auto"),
        ("cuda", "cuda"),
        ("cuda:0,1", "cuda:0,1"),
        (["cuda:1", "cuda:0"], "cuda:1,0"),
        ("cpu", "cpu:1"),
        ("cpu:3", "cpu:3"),
        (["cpu", "cpu:2"], "cpu:3"),
    ],
)
def test_devices(written, devices):
    assert parse_devices(written) == devices


@pytest.mark.parametrize(
    "written", ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:0,0", [], ["cuda:0", "cpu"], ["auto", "cpu"], 1, [0]]
)
def test_devices_that_are_none(written):
    with pytest.raises(ValueError, match="must"):
        parse_devices(written)


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(MINIMAL, "model.path=~/m").config.model.path == "/home/somebody/m"


# Overrides


def test_overrides_take_toml_values_and_bare_words(folder):
    config = load(
        MINIMAL,
        "train.max_steps=20",
        "train.max_steps = 30",
        "optim.betas=[0.8, 0.9]",
        "optim.learning_rate=1",
        "data.packing=false",
        "engine.devices=cpu:2",
        'engine.vram_limit="24 GiB"',
        "engine.host_limit=1_000",
        "log.run_name=2026-01-02",
    ).config
    assert config.train.max_steps == 30
    assert config.optim.betas == (0.8, 0.9) and config.optim.learning_rate == 1.0
    assert config.data.packing is False and config.engine.devices == "cpu:2"
    assert config.engine.vram_limit == 24 * 2**30 and config.engine.host_limit == 1000
    assert config.log.run_name == "2026-01-02"


def test_overrides_of_data_sets(folder):
    whole = load(MINIMAL, 'data.train=[{path="a"}, {path="b", format="text"}]').config.data.train
    assert [(one.path, one.format) for one in whole] == [("a", "auto"), ("b", "text")]
    one = load(MINIMAL, "data.train.0.path=a", "data.train.1.path=b").config.data.train
    assert [one.path for one in one] == ["a", "b"]
    assert load("[model]\npath = 'm'", "data.train.0.path=a").config.data.train[0].path == "a"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train", "not an override: write key=value"),
        ("=3", "not an override"),
        ("train..seed=3", "not an override"),
        ("0.seed=3", "not an override"),
        ("optim.betas=[0.9,", "not valid TOML; put the whole override in single quotes"),
        ("data.train=[{path=x}]", "not valid TOML"),
        ("train.seed=1\n[optim]", "must be a whole number"),
        ("optim.betas.0=0.5", "set the whole of it, optim.betas=[...]"),
        ("data.train.2.path=x", "the next free index is data.train.1"),
        ("data.train.x.path=x", "the next free index is data.train.1"),
        ("model.path.x=1", "model.path is a value, not a table"),
        (f"data.train.{'9' * 5000}.path=x", "the next free index is data.train.1"),
        ("data.train.١.path=x", "the next free index is data.train.1"),  # a digit, but not of ASCII
        ("a." * 30000 + "a=1", "unknown key `a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a…`: no key has 30,001 parts"),
        ("log.r\udcff=x", "is not UTF-8 text"),
        ("log.run_name=\udcff", "is not UTF-8 text"),
    ],
)
def test_overrides_that_are_none(folder, override, message):
    (mistake,) = mistakes(MINIMAL, override)
    assert mistake.startswith("command line: ") and message in mistake


# Provenance and rendering

FULL = """\
log.logging_steps = 5  # a dotted key

[model]
path = "m # no comment"
[[data.train]]
path = 'a "quoted" \\ path'
[[data.train]]
path = "ü\\n\\u0001é"
format = "text"

[optim]
betas = [
  0.8,
  0.9,
]
eps = 1e-30
[engine]
devices = ["cuda:0", "cuda:1"]
vram_limit = "24 GB"
"""


def test_origins(folder):
    resolved = load(FULL, "train.seed=3", "data.train.1.path=b", "optim.eps=1e-9")
    origins = resolved.origins
    assert origins["log.logging_steps"] == "c.toml:1"
    assert origins["model.path"] == "c.toml:4"
    assert origins["data.train.0.path"] == "c.toml:6"
    assert origins["data.train.1.path"] == "command line"
    assert origins["data.train.1.format"] == "c.toml:9"
    assert origins["data.train.0.format"] == "default"
    assert origins["optim.betas"] == "c.toml:12"
    assert origins["optim.eps"] == origins["train.seed"] == "command line"
    assert origins["log.run_name"] == origins["train.max_steps"] == "default"
    assert origins["engine.devices"] == "c.toml:18"
    found = {key.replace(".0.", ".").replace(".1.", ".") for key in origins}
    absent = ("lora", "data.val")  # tables that are not there
    assert found == {key for key in keys() if not key.startswith(tuple(f"{table}." for table in absent))} | {*absent}
    assert load(FULL, "lora.r=3").origins["lora.modules_to_save"] == "default"


def test_columns_are_written_and_read_as_they_were(folder):
    resolved = load(f'{MINIMAL}columns = {{text = "b c"}}\n[data]\nmax_length = 9\n', "data.columns.prompt=q")
    assert resolved.config.data.columns == {"prompt": "q"} and resolved.config.data.train[0].columns == {"text": "b c"}
    text = render(resolved)
    assert 'columns = {text = "b c"} # c.toml:6' in text and 'columns = {prompt = "q"} # command line' in text
    assert load(text).config == resolved.config.model_copy(update={"log": load(text).config.log})
    assert load(f"{MINIMAL}columns = {{}}").config.data.train[0].columns == {}


def test_adapters_are_trained_where_they_are_asked_for(folder):
    assert load(MINIMAL).config.adapters is None
    assert load(MINIMAL, "train.method=full").config.adapters is None
    assert load(MINIMAL, "train.method=lora").config.adapters == Lora()
    lora = load(MINIMAL, "lora.r=3", "lora.target_modules=['q_proj']").config.adapters
    assert lora == Lora(r=3, target_modules=("q_proj",)) and lora.lora_alpha == 8


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("given", "written"), [("16", "16"), ("16.0", "16"), ("0.5", "0.5")])
def test_alpha_is_any_number_and_is_written_whole_where_it_is(given, written) -> None:
    resolved = load(MINIMAL, f"lora.lora_alpha={given}")
    assert resolved.config.lora is not None and resolved.config.lora.lora_alpha == float(written)
    assert repr(resolved.config.lora.model_dump()["lora_alpha"]) == written
    assert repr(tomllib.loads(render(resolved))["lora"]["lora_alpha"]) == written


def test_experts_alone_can_have_adapters(folder):
    lora = load(MINIMAL, "lora.target_modules=[]", "lora.target_parameters=['down_proj']").config.adapters
    assert lora == Lora(target_modules=(), target_parameters=("down_proj",))


LORA = MINIMAL + "[lora]\nlora_alpha = 4\ntarget_modules = ['q_proj']\nmodules_to_save = ['lm_head']\n"


@pytest.mark.parametrize("text", [MINIMAL, FULL, LORA, (ROOT / "rptrain.toml").read_text(encoding="utf-8")])
def test_rendering_parses_back_to_the_same_config(folder, text):
    resolved = load(text, "engine.host_limit=123456789", "train.max_steps=7")
    rendered = render(resolved)
    Path("again.toml").write_text(rendered, encoding="utf-8")
    assert resolve("again.toml").config == resolved.config
    for line in rendered.splitlines():
        assert not line or line.startswith("[") or line.endswith(("default", "command line")) or "# c.toml:" in line


@pytest.mark.parametrize(
    "stem", ["a\nb", "a\x07b", "a\u2028b", "a\udcff", "\n"], ids=["line", "bell", "separator", "bytes", "only"]
)
def test_rendering_after_a_file_with_an_odd_name(folder, stem):
    path = Path(f"{stem}.toml")
    path.write_text(MINIMAL, encoding="utf-8")
    resolved = resolve(path)
    Path("again.toml").write_text(render(resolved), encoding="utf-8")
    assert resolve("again.toml").config == resolved.config


def test_keys_that_are_nested_too_deeply(folder):
    (mistake,) = mistakes("a." * 5000 + "a = 1\n" + MINIMAL)
    assert mistake.startswith("c.toml:1: unknown key `a.a.")


# Line numbers

TRICKY = '''\
# [a comment]
top = 1
"quoted.key" = "a # b [c] = d"   # x = 1
[a]
b.c = { d = 1, e = [1, { f = 2 }] }
text = """
[not.a.table]
x = 1 \\""" y = 2
""""
raw = \'\'\'
[neither] \'\' \'\'\'
after = 1979-05-27 07:32:00
float = 3.14
[[t.s]]
k = [ # a comment ]
  "]", # [
  "}",
]
[t.s.sub]
x = 1
[[t.s]]
k = []
[ t . "s u" ]
z = \'"\'
'''


def test_lines_of_keys():
    tomllib.loads(TRICKY)
    lines = key_lines(TRICKY)
    expected = {
        ("top",): 2,
        ("quoted.key",): 3,
        ("a",): 4,
        ("a", "b"): 5,
        ("a", "b", "c", "d"): 5,
        ("a", "b", "c", "e", 1, "f"): 5,
        ("a", "text"): 6,
        ("a", "raw"): 10,
        ("a", "after"): 12,
        ("a", "float"): 13,
        ("t",): 14,
        ("t", "s", 0): 14,
        ("t", "s", 0, "k"): 15,
        ("t", "s", 0, "k", 1): 17,
        ("t", "s", 0, "sub"): 19,
        ("t", "s", 0, "sub", "x"): 20,
        ("t", "s", 1): 21,
        ("t", "s", 1, "k"): 22,
        ("t", "s u", "z"): 24,
    }
    assert {key: lines.get(key) for key in expected} == expected
    assert ("x",) not in lines and ("not",) not in lines and ("a", "x") not in lines


def test_lines_know_every_key_that_the_parser_knows():
    def walk(value, key=()):
        if key:
            yield key
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield from walk(inner, (*key, name))
        for index, inner in enumerate(value) if isinstance(value, list) else ():
            yield from walk(inner, (*key, index))

    for text in (
        TRICKY,
        FULL,
        (ROOT / "rptrain.toml").read_text(encoding="utf-8"),
        TRICKY.replace("\n", "\r\n"),
    ):
        assert set(walk(tomllib.loads(text))) == set(key_lines(text))


# The shipped config


def test_the_shipped_config_explains_every_key():
    text = (ROOT / "rptrain.toml").read_text(encoding="utf-8")
    config = resolve(ROOT / "rptrain.toml").config
    assert config.model.path == "tiny-tasks" and config.eval.questions == 500
    bare = [line for line in text.splitlines() if "=" in line.partition("#")[0] and " # " not in line]
    assert bare == []


def test_config_from_values():
    with pytest.raises(ValidationError):
        Config.model_validate({"model": {"path": "m"}, "data": {"train": [{"path": "x"}]}, "ui": {}})
