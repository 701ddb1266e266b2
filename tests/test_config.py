"""The config: values, mistakes in words, provenance, and the round trip through its rendering."""

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rptrain.config import Config, Lora, keys
from rptrain.config_aliases import _ALIASES, _CANONICAL
from rptrain.config_lines import key_lines
from rptrain.config_mistakes import ConfigError
from rptrain.config_source import Resolved, render, resolve
from rptrain.config_values import format_size, parse_devices, parse_size
from rptrain.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
MINIMAL = """\
[model]
path = "tiny-tasks"

[[data.train]]
path = "builtin:tasks"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, *overrides: str) -> Resolved:
    Path("c.toml").write_text(text, encoding="utf-8")
    return resolve("c.toml", overrides)


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    return [f"{place}: {message}" for place, message in error.value.mistakes]


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
        (1000, 1000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


def test_sizes_print_short():
    assert [format_size(size) for size in (24 * 2**30, 24 * 10**9, 1001)] == ["24GiB", "24GB", "1001B"]


@pytest.mark.parametrize("text", ["24", "GiB", "24Gi", "24ib", "-1GB", "1e3GB", ""])
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
        ("train", "no override: write key=value"),
        ("=3", "no override"),
        ("train..seed=3", "no override"),
        ("0.seed=3", "no override"),
        ("optim.betas=[0.9,", "no TOML; put the whole override in single quotes"),
        ("data.train=[{path=x}]", "no TOML"),
        ("train.seed=1\n[optim]", "must be a whole number"),
        ("optim.betas.0=0.5", "set the whole of it, optim.betas=[...]"),
        ("data.train.2.path=x", "the next free index is data.train.1"),
        ("data.train.x.path=x", "the next free index is data.train.1"),
        ("model.path.x=1", "model.path is a value, not a table"),
    ],
)
def test_overrides_that_are_none(folder, override, message):
    (mistake,) = mistakes(MINIMAL, override)
    assert mistake.startswith("command line: ") and message in mistake


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[train]\nmax_step = 3", "c.toml:7: unknown key `train.max_step`: did you mean `train.max_steps`?"),
        ("[optim]\nlr = 3", "c.toml:7: unknown key `optim.lr`: rptrain calls this `optim.learning_rate`"),
        ("[optm]\neps = 3", "c.toml:7: unknown key `optm.eps`: rptrain calls this `optim.eps`"),
        ("[lora]\nrank = 3", "c.toml:7: unknown key `lora.rank`: rptrain calls this `lora.r`"),
        ("[lora]\nr = 0", "c.toml:7: `lora.r` must be greater than 0, not 0"),
        ("[lora]\ndropout = 1", "c.toml:7: `lora.dropout` must be less than 1, not 1"),
        (
            "[lora]\ntarget_modules = []",
            '`lora.target_modules`: must be text, or a list such as ["q_proj", "v_proj"], where lora.target_parameters',
        ),
        (
            "[lora]\ntarget_modules = ['']",
            '`lora.target_modules` must be text, or a list such as ["q_proj", "v_proj"], not',
        ),
        ("[lora]\n[train]\nmethod = 'full'", "c.toml:8: `train.method`: adapters are trained where there is a [lora]"),
        ("[train]\nseed = 'x'", 'c.toml:7: `train.seed` must be a whole number, not "x"'),
        ("[train]\nseed = true", "c.toml:7: `train.seed` must be a whole number, not true"),
        ("[train]\nseed = 1.0", "c.toml:7: `train.seed` must be a whole number, not 1.0"),
        ("[train]\nseed = -1", "c.toml:7: `train.seed` must be greater than or equal to 0, not -1"),
        ("[train]\nmax_steps = 10_000_000_000", "`train.max_steps` must be less than or equal to 1000000000, not"),
        ("[train]\nglobal_batch_size = 1_000_000_007", "`train.global_batch_size` must be less than or equal to"),
        (
            "[train]\nmicro_batch_size = 1_000_000_007",
            'batch_size` must be a whole number from 1 to 1000000000, or "auto", not',
        ),
        ("[train]\nnum_epochs = 1e308", "`train.num_epochs` must be less than or equal to 1000000, not 1e+308"),
        (
            "[engine]\nround_size = 1_000_000_007",
            'round_size` must be a whole number from 1 to 1000000000, or "auto", not',
        ),
        ("[engine]\nstall_timeout = 1e12", "`engine.stall_timeout` must be less than or equal to 1000000000, not"),
        ("[engine]\ndevices = 'cpu:9999'", "`engine.devices` must have at most 1024 workers on the CPU, not"),
        (f"[engine]\nhost_limit = '{'9' * 400}GB'", '`engine.host_limit` must be a size such as "24GiB"'),
        ("[eval]\nquestions = 1_000_000", "`eval.questions` must be less than or equal to 100000, not 1000000"),
        ('[data]\ncache_dir = "a\\u0000"', "`data.cache_dir` must be a path, and none has a null character, not"),
        ('[save]\nresume = "a\\u0000"', "`save.resume` must be a path, and none has a null character, not"),
        ("[train]\nmax_steps = 0", "c.toml:7: `train.max_steps` must be greater than 0, not 0"),
        (
            "[train]\nmethod = 'qlora'",
            '`train.method`: must be one of "full", "lora", not "qlora"; did you mean "lora"?',
        ),
        ("[train]\nglobal_batch_size = 3\nmicro_batch_size = 2", "c.toml:7: `train.global_batch_size`: 3 is no"),
        ("[train]\nmicro_batch_size = 3", "c.toml:6: `train.global_batch_size`: 16 is no multiple"),
        ("[engine]\nround_size = 3", "c.toml:7: `engine.round_size`: 3 does not divide the 16 micro-batches"),
        ("[engine]\nvram_limit = '24x'", 'c.toml:7: `engine.vram_limit` must be a size such as "24GiB"'),
        ("[engine]\nvram_limit = 0", "c.toml:7: `engine.vram_limit` must be greater than 0, not 0"),
        ("[engine]\ndevices = 'gpu'", 'c.toml:7: `engine.devices` must be "auto"'),
        ("[optim]\nlr_scheduler_type = 'cosin'", 'not "cosin"; did you mean "cosine"?'),
        ("[optim]\nmoments = 'int4'", 'c.toml:7: `optim.moments`: must be one of "fp32", "bf16", "int8", not "int4"'),
        ("[optim]\noptim_bits = 8", "unknown key `optim.optim_bits`: rptrain calls this `optim.moments`"),
        ("[optim]\noptim = 'adamw_8bit'", 'unknown key `optim.optim`: rptrain writes this `optim.moments = "int8"`'),
        ("[optim]\noptim = 'adamw_bnb_8bit'", 'rptrain writes this `optim.moments = "int8"`'),
        ("[optim]\noptimizer = 'paged_adamw_8bit'", 'rptrain writes this `optim.moments = "int8"`'),
        ("[optim]\nbetas = [0.9]", "c.toml:7: `optim.betas` has too few values"),
        ("[optim]\nbetas = [0.9, 0.9, 0.9]", "c.toml:7: `optim.betas` must have at most 2 items"),
        ("[optim]\nbetas = [0.9, 1.0]", "c.toml:7: `optim.betas.1` must be less than 1, not 1.0"),
        ("[optim]\nbetas = [0.9, '0.9']", "c.toml:7: `optim.betas.1` must be a valid number"),
        ("[optim]\nlearning_rate = inf", "c.toml:7: `optim.learning_rate` must be a finite number, not inf"),
        ("[optim]\nlearning_rate = '1e-5'", "c.toml:7: `optim.learning_rate` must be a valid number"),
        ("[optim]\nwarmup_steps = 1.5", "c.toml:7: `optim.warmup_steps`: 1.5 is no whole number of steps"),
        (
            "[optim]\nwarmup_steps = 5\nlr_scheduler_type = 'constant'",
            'c.toml:8: `optim.lr_scheduler_type`: "constant" has no warm-up',
        ),
        ("[data]\npacking = 'yes'", 'c.toml:7: `data.packing` must be true or false, not "yes"'),
        ("[data]\nmax_length = 1", "c.toml:7: `data.max_length` must be greater than or equal to 2, not 1"),
        ("[log]\nrun_name = 'a/b'", "c.toml:7: `log.run_name` must do as the name of a folder"),
        ("[log]\nrun_name = 5", "c.toml:7: `log.run_name` must be text, in quotes, not 5"),
        ("[optim]\nloss_scale = 65535", "c.toml:7: `optim.loss_scale` must be a power of two, 1 or more, not 65535"),
        ("[log]\nrun_name = ''", "c.toml:7: `log.run_name` must have at least 1 character"),
        ("[eval]\nsets = [{path = 'x'}]", "unknown key `eval.sets.0.path`: rptrain calls this `data.val.path`"),
        ("[[train]]\nseed = 1", "c.toml:6: `train` must be a table, [train], not tables"),
    ],
)
def test_mistakes(folder, line, message):
    (mistake,) = mistakes(MINIMAL + line)
    assert message in mistake


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_moments_are_not_for_float64(folder, moments):
    text = MINIMAL + f"[optim]\nmoments = '{moments}'"
    (mistake,) = mistakes(text, "model.dtype=float64")
    assert mistake.startswith(f'c.toml:7: `optim.moments`: "{moments}" is not for models in float64')
    assert resolve("c.toml", ["model.dtype=float32"]).config.optim.moments == moments


@pytest.mark.parametrize(
    "line", ["[engine]\nfp16_accumulation = true", "[optim]\nloss_scale = 4", "[optim]\nloss_scale_steps = 9"]
)
def test_what_is_for_float16_alone(folder, line):
    (mistake,) = mistakes(MINIMAL + line)
    assert mistake.endswith('this is for model.dtype = "float16": remove it, or set model.dtype')
    assert mistake.startswith(f"c.toml:7: `{line[1:].split(']')[0]}.{line.split()[1]}`")
    (folder / "c.toml").write_text(MINIMAL + line)
    assert resolve("c.toml", ["model.dtype=float16"]).config.model.dtype == "float16"


def test_a_single_data_table_is_told_from_an_array(folder):
    (mistake,) = mistakes("[model]\npath = 'm'\n[data.train]\npath = 'x'")
    assert mistake.startswith("c.toml:3: `data.train` must be an array of tables: write [[data.train]]")


def test_what_is_missing(folder):
    assert mistakes("") == [
        "c.toml: `model.path` is missing: a directory with a Hugging Face checkpoint, or the name of a bundled preset",
        "c.toml: `data.train` is missing: write a [[data.train]] table with a path",
    ]
    assert mistakes("[data]\ntrain = []\n[model]\npath = 'm'") == [
        "c.toml:2: `data.train` must have at least 1 item, not []"
    ]
    assert mistakes("[model]\npath = 'm'\n[[data.train]]\nformat = 'text'") == [
        "c.toml:3: `data.train.0.path` is missing: a file, a folder of files or a pattern such as chats/*.jsonl, "
        "or builtin:tasks, or builtin:random"
    ]


def test_all_mistakes_at_once_in_the_order_of_the_file(folder):
    found = mistakes(
        "[optim]\nlr = 1\neps = 0\n[model]\n[[data.train]]\npath = 'x'\nweigth = 2\n[foo]\n",
        "train.seed=x",
        "nonsense",
    )
    assert [mistake.split(" ")[0] for mistake in found[:-2]] == [
        "c.toml:2:",
        "c.toml:3:",
        "c.toml:4:",
        "c.toml:7:",
        "c.toml:8:",
    ]
    assert all(mistake.startswith("command line:") for mistake in found[-2:])
    with pytest.raises(ConfigError) as error:
        load(MINIMAL, "train.seed=x", "train.sed=1")
    assert str(error.value).splitlines()[0] == "2 mistakes in the config"


def test_an_override_mends_a_mistake_of_the_file(folder):
    assert load(MINIMAL + "[train]\nseed = 'x'", "train.seed=3").config.train.seed == 3


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model\n", "c.toml:1: no valid TOML"),
        ("a = 1\n\nb = = 2\n", "c.toml:3:"),
        ('x = """a\n', "c.toml:1:"),
    ],
)
def test_syntax_errors_have_a_line(folder, text, place):
    (mistake,) = mistakes(text)
    assert mistake.startswith(place)


def test_files_that_cannot_be_read(folder):
    with pytest.raises(UserError, match=r"none\.toml: cannot be read"):
        resolve("none.toml")
    Path("latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(UserError, match="UTF-8"):
        resolve("latin.toml")


# Other trainers' words


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("per_device_train_batch_size", "`train.micro_batch_size`"),
        ("num_train_epochs", "`train.num_epochs`"),
        ("cutoff_len", "`data.max_length`"),
        ("sequence_len", "`data.max_length`"),
        ("max_seq_len", "`data.max_length`"),
        ("sample_packing", "`data.packing`"),
        ("model_name_or_path", "`model.path`"),
        ("adam_beta2", "`optim.betas`"),
        ("warmup-ratio", "`optim.warmup_steps`"),
        ("resume_from_checkpoint", "`save.resume`"),
        ("learning_rate", "rptrain calls this `optim.learning_rate`"),
        ("gradient_accumulation_steps", "`train.global_batch_size` / `train.micro_batch_size`"),
        ("train_on_inputs", "the opposite, `data.assistant_only_loss`"),
        ("gradient_checkpointing", "not needed"),
        ("lora_rank", "rptrain calls this `lora.r`"),
        ("use_dora", "rptrain calls this `lora.use_dora`"),
        ("load_in_4bit", "rptrain calls this `lora.base`"),
        ("bnb_4bit_use_double_quant", "rptrain calls this `lora.double_quant`"),
        ("bnb_4bit_compute_dtype", "a choice of how weights are quantised is not available in this version"),
        ("report_to", "rptrain calls this `log.report_to`"),
        ("val_set_size", "rptrain calls this `data.val_size`"),
        ("fp16", "rptrain calls this `model.dtype`"),
        ("fp16_backend", '`model.dtype = "float16"` is all'),
        ("initial_scale_power", "`optim.loss_scale`"),
        ("allow_fp16_accumulation", "`engine.fp16_accumulation`"),
        ("xyzzy", "the tables are: [model], [data]"),
        ("train.xyzzy", "[train] has: method, freeze, micro_batch_size"),
        ("data.train.0.pth", "did you mean `data.train.path`?"),
        ("train.learning_rat", "did you mean `optim.learning_rate`?"),
    ],
)
def test_words_of_other_trainers(folder, word, message):
    (mistake,) = mistakes(MINIMAL, f"{word}=1")
    assert message in mistake


def test_aliases_lead_to_keys_and_are_no_keys():
    known = {*keys(), "data.train"}
    assert set(_ALIASES) <= known
    assert not {key.rpartition(".")[2] for key in keys()} & set(_CANONICAL)
    assert sum(len(words.split()) for words in _ALIASES.values()) == len(_CANONICAL), "a word stands for two keys"


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


def test_adapters_are_trained_where_they_are_asked_for(folder):
    assert load(MINIMAL).config.adapters is None
    assert load(MINIMAL, "train.method=full").config.adapters is None
    assert load(MINIMAL, "train.method=lora").config.adapters == Lora()
    lora = load(MINIMAL, "lora.r=3", "lora.target_modules=['q_proj']").config.adapters
    assert lora == Lora(r=3, target_modules=("q_proj",)) and lora.alpha == 8


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("given", "written"), [("16", "16"), ("16.0", "16"), ("0.5", "0.5")])
def test_alpha_is_any_number_and_is_written_whole_where_it_is(given, written) -> None:
    resolved = load(MINIMAL, f"lora.alpha={given}")
    assert resolved.config.lora is not None and resolved.config.lora.alpha == float(written)
    assert repr(resolved.config.lora.model_dump()["alpha"]) == written
    assert repr(tomllib.loads(render(resolved))["lora"]["alpha"]) == written


def test_experts_alone_can_have_adapters(folder):
    lora = load(MINIMAL, "lora.target_modules=[]", "lora.target_parameters=['down_proj']").config.adapters
    assert lora == Lora(target_modules=(), target_parameters=("down_proj",))


LORA = MINIMAL + "[lora]\nalpha = 4\ntarget_modules = ['q_proj']\nmodules_to_save = ['lm_head']\n"


@pytest.mark.parametrize("text", [MINIMAL, FULL, LORA, (ROOT / "rptrain.toml").read_text(encoding="utf-8")])
def test_rendering_parses_back_to_the_same_config(folder, text):
    resolved = load(text, "engine.host_limit=123456789", "train.max_steps=7")
    rendered = render(resolved)
    Path("again.toml").write_text(rendered, encoding="utf-8")
    assert resolve("again.toml").config == resolved.config
    for line in rendered.splitlines():
        assert not line or line.startswith("[") or line.endswith(("default", "command line")) or "# c.toml:" in line


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
