"""Mistakes in a config: each is told in words, with its place and what was meant."""

from pathlib import Path

import pytest

from rptrain.config import errors
from rptrain.config.aliases import _CANONICAL, ALIASES
from rptrain.config.errors import ConfigError
from rptrain.config.resolve import resolve
from rptrain.config.schema import keys
from rptrain.utils.errors import UserError

from .tools import MINIMAL, load, mistakes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[train]\nmax_step = 3", "c.toml:7: unknown key `train.max_step`: did you mean `train.max_steps`?"),
        ("[optim]\nlr = 3", "c.toml:7: unknown key `optim.lr`: use `optim.learning_rate`"),
        ("[optm]\neps = 3", "c.toml:7: unknown key `optm.eps`: use `optim.eps`"),
        ("[lora]\nrank = 3", "c.toml:7: unknown key `lora.rank`: use `lora.r`"),
        ("[lora]\nalpha = 3", "c.toml:7: unknown key `lora.alpha`: use `lora.lora_alpha`"),
        ("[lora]\ndropout = 0.1", "c.toml:7: unknown key `lora.dropout`: use `lora.lora_dropout`"),
        ("[lora]\nrslora = true", "c.toml:7: unknown key `lora.rslora`: use `lora.use_rslora`"),
        ("[lora]\nr = 0", "c.toml:7: `lora.r` must be greater than 0, not 0"),
        ("[lora]\nr = 1_000_000_007", "c.toml:7: `lora.r` must be less than or equal to 1000000000, not 1000000007"),
        (
            "[lora]\nlora_alpha = 1e300",
            "c.toml:7: `lora.lora_alpha` must be less than or equal to 1000000000, not 1e+300",
        ),
        (
            f"[log]\nrun_name = '{'é' * 101}'",
            f'c.toml:7: `log.run_name` must be a folder name of at most 200 bytes, not "{"é" * 58}…',
        ),
        (f"[engine]\ndevices = 'cpu:{'9' * 5000}'", 'c.toml:7: `engine.devices` must be "auto", "cuda",'),
        (f"[engine]\ndevices = 'cuda:{'9' * 5000}'", 'c.toml:7: `engine.devices` must be "auto", "cuda",'),
        ("[lora]\nlora_dropout = 1", "c.toml:7: `lora.lora_dropout` must be less than 1, not 1"),
        (
            "[lora]\ntarget_modules = []",
            '`lora.target_modules`: must be text, or a list such as ["q_proj", "v_proj"], unless lora.',
        ),
        (
            "[lora]\ntarget_modules = ['']",
            '`lora.target_modules` must be text, or a list such as ["q_proj", "v_proj"], not',
        ),
        ("[lora]\nmodules_to_save = 'lm_head'", '`lora.modules_to_save` must be a list, in brackets, not "lm_head"'),
        ("[lora]\n[train]\nmethod = 'full'", "c.toml:8: `train.method`: a [lora] table trains adapters"),
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
        ('[data]\ncache_dir = "a\\u0000"', "`data.cache_dir` must be a path without null characters, not"),
        ('[save]\nresume = "a\\u0000"', "`save.resume` must be a path without null characters, not"),
        ("[train]\nmax_steps = 0", "c.toml:7: `train.max_steps` must be greater than 0, not 0"),
        (
            "[train]\nmethod = 'qlora'",
            '`train.method`: must be one of "full", "lora", not "qlora"; write "lora", and lora.base = "nf4"',
        ),
        ("[train]\nglobal_batch_size = 3\nmicro_batch_size = 2", "c.toml:7: `train.global_batch_size`: 3 is no"),
        ("[train]\nmicro_batch_size = 3", "c.toml:6: `train.global_batch_size`: 16 is not a multiple"),
        ("[engine]\nround_size = 3", "c.toml:7: `engine.round_size`: 3 does not divide the 16 micro-batches"),
        ("[engine]\nreplicas = 3", "c.toml:7: `engine.replicas`: 3 does not divide the 16 micro-batches of a step"),
        (
            "[engine]\noptimizer_threads = 1025",
            "c.toml:7: `engine.optimizer_threads` must be less than or equal to 1024, not 1025",
        ),
        (
            "[engine]\nround_size = 8\nreplicas = 4",
            "c.toml:8: `engine.replicas`: 4 does not divide the rounds of a step: 2, by engine.round_size",
        ),
        ("[engine]\nvram_limit = '24x'", 'c.toml:7: `engine.vram_limit` must be a size such as "24GiB"'),
        ("[engine]\nvram_limit = 0", "c.toml:7: `engine.vram_limit` must be greater than 0, not 0"),
        ("[engine]\ndevices = 'gpu'", 'c.toml:7: `engine.devices` must be "auto"'),
        ("[optim]\nlr_scheduler_type = 'cosin'", 'not "cosin"; did you mean "cosine"?'),
        ("[optim]\nmoments = 'int4'", 'c.toml:7: `optim.moments`: must be one of "fp32", "bf16", "int8", not "int4"'),
        ("[optim]\noptim_bits = 8", "unknown key `optim.optim_bits`: use `optim.moments`"),
        ("[optim]\noptim = 'adamw_8bit'", 'unknown key `optim.optim`: use `optim.moments = "int8"`'),
        ("[optim]\noptim = 'adamw_bnb_8bit'", 'use `optim.moments = "int8"`'),
        ("[optim]\noptimizer = 'paged_adamw_8bit'", 'use `optim.moments = "int8"`'),
        ("[optim]\nbetas = [0.9]", "c.toml:7: `optim.betas` has too few values"),
        ("[optim]\nbetas = [0.9, 0.9, 0.9]", "c.toml:7: `optim.betas` must have at most 2 items"),
        ("[optim]\nbetas = [0.9, 1.0]", "c.toml:7: `optim.betas.1` must be less than 1, not 1.0"),
        ("[optim]\nbetas = [0.9, '0.9']", "c.toml:7: `optim.betas.1` must be a valid number"),
        ("[optim]\nlearning_rate = inf", "c.toml:7: `optim.learning_rate` must be a finite number, not inf"),
        ("[optim]\nlearning_rate = '1e-5'", "c.toml:7: `optim.learning_rate` must be a valid number"),
        ("[optim]\nwarmup_steps = 1.5", "c.toml:7: `optim.warmup_steps`: 1.5 is neither a whole number of steps"),
        (
            "[optim]\nwarmup_steps = 5\nlr_scheduler_type = 'constant'",
            'c.toml:8: `optim.lr_scheduler_type`: "constant" has no warm-up',
        ),
        ("[data]\npacking = 'yes'", 'c.toml:7: `data.packing` must be true or false, not "yes"'),
        (
            "[data]\nmax_bad_rows = 1.5",
            "c.toml:7: `data.max_bad_rows` must be a whole number of rows, or below 1, not 1.5",
        ),
        ("[data]\nmax_length = 1", "c.toml:7: `data.max_length` must be greater than or equal to 2, not 1"),
        ("[log]\nrun_name = 'a/b'", "c.toml:7: `log.run_name` must be a folder name"),
        (
            '[log]\nrun_name = "a\\nb"',
            "c.toml:7: `log.run_name` must be a folder name without line ends, tabs",
        ),
        ("[log]\nrun_name = 5", "c.toml:7: `log.run_name` must be text, in quotes, not 5"),
        ("[optim]\nloss_scale = 65535", "c.toml:7: `optim.loss_scale` must be a power of two, 1 or more, not 65535"),
        ("[log]\nrun_name = ''", "c.toml:7: `log.run_name` must have at least 1 character"),
        ("[lora]\nbias = 'none'", "`lora.bias`: training of biases with adapters is not available"),
        ("[eval]\nsteps = 10", "unknown key `eval.steps`: use `train.eval_steps`"),
        ("[save]\nsteps = 10", "unknown key `save.steps`: use `save.save_steps`"),
        ("[save]\neval_steps = 10", "unknown key `save.eval_steps`: use `train.eval_steps`"),
        ("[data]\npath = 'x'", "unknown key `data.path`: use `data.train.path`"),
        ("[[datasets]]\npath = 'x'", "unknown key `datasets.0.path`: use `data.train.path`"),
        ("[[datasets]]\ntype = 'alpaca'", "unknown key `datasets.0.type`: use `data.train.format`"),
        ("[model.quantization_config]\nload_in_4bit = true", 'use `lora.base`: write "nf4"'),
        ("[lora]\ntype = 'dora'", "unknown key `lora.type`: [lora] has: r, lora_alpha"),
        ("[optim]\nmomentum = 0.9", "`optim.momentum`: a choice of optimizer is not available"),
        ("[eval]\nbatch_size = 8", "not needed: `train.micro_batch_size` is used in evaluation, too"),
        ("[optim]\nname = 'adamw'", "unknown key `optim.name`: [optim] has: learning_rate"),
        ("[optim]\nbase = 1", "unknown key `optim.base`: [optim] has: learning_rate"),
        ("[modle]\nsize = 1", "unknown key `modle.size`: did you mean the table [model]?"),
        ("[train]\nadapter = 'qlora'", 'use `train.method`: write "lora", and lora.base = "nf4"'),
        ("[lora]\nbase = '4bit'", 'not "4bit"; write "nf4"'),
        ("[save]\nresume = false", '`save.resume` must be text, in quotes, not false; write "never"'),
        ("[optim]\nlr_scheduler_type = 'inverse_sqrt'", '"constant_with_warmup", not "inverse_sqrt"'),
        ("[eval]\nsets = [{path = 'x'}]", "unknown key `eval.sets.0.path`: use `data.val.path`"),
        ("[data]\ncolumns = 'text'", "c.toml:7: `data.columns` must be a table, such as {"),
        ("[data]\ncolumns = {text = 5}", "c.toml:7: `data.columns.text` must be text, in quotes, not 5"),
        ("[data]\ncolumns = {body = 'x'}", "c.toml:7: `data.columns` must have names of a format, and none has `body`"),
        ("[data]\ncolumns = {prompt = 'q', response = 'a'}", "query and response are instruction, input and output"),
        ("[data]\ncolumns = {question = 'prompt'}", "`data.columns` must have the name of the format first"),
        ("[data]\ncolumns = {prompt = 'x', completion = 'x'}", "must have another column for `completion`"),
        ("[data]\ncolumns = {prompt = 'q', output = 'a'}", "must have names of one format"),
        ("format = 'text'\ncolumns = {prompt = 'q'}", "c.toml:7: `data.train.0.columns`: `prompt` is not a name of"),
        ("format = 'text'\n[data.columns]\nprompt = 'q'", "c.toml:4: `data.train.0.columns`: `prompt` is not a name"),
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


def test_gradients_in_float64_are_not_rounded(folder):
    (mistake,) = mistakes(MINIMAL + "[engine]\nreduce_dtype = 'bfloat16'", "model.dtype=float64")
    assert mistake.startswith('c.toml:7: `engine.reduce_dtype`: "bfloat16" is not for models in float64')


@pytest.mark.parametrize(
    "line", ["[engine]\nfp16_accumulation = true", "[optim]\nloss_scale = 4", "[optim]\nloss_scale_steps = 9"]
)
def test_what_is_for_float16_alone(folder, line):
    (mistake,) = mistakes(MINIMAL + line)
    assert mistake.endswith('is only for model.dtype = "float16": remove it, or set model.dtype')
    assert mistake.startswith(f"c.toml:7: `{line[1:].split(']')[0]}.{line.split()[1]}`")
    (folder / "c.toml").write_text(MINIMAL + line)
    assert resolve("c.toml", ["model.dtype=float16"]).config.model.dtype == "float16"


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_fp8_is_for_bfloat16_and_float32(folder, dtype):
    (mistake,) = mistakes(MINIMAL + "[engine]\nfp8 = true", f"model.dtype={dtype}")
    assert mistake.startswith("c.toml:7: `engine.fp8`: is for models in bfloat16 or float32")
    for kind in ("bfloat16", "float32"):
        assert resolve("c.toml", [f"model.dtype={kind}"]).config.engine.fp8


def test_a_single_data_table_is_told_from_an_array(folder):
    (mistake,) = mistakes("[model]\npath = 'm'\n[data.train]\npath = 'x'")
    assert mistake.startswith("c.toml:3: `data.train` must be an array of tables: write [[data.train]]")


def test_what_is_missing(folder):
    assert mistakes("") == [
        "c.toml: `model.path` is missing: a directory with a Hugging Face checkpoint, a model in the Hugging Face "
        "cache, or a bundled preset",
        "c.toml: `data.train` is missing: write a [[data.train]] table with a path",
    ]
    assert mistakes("[data]\ntrain = []\n[model]\npath = 'm'") == [
        "c.toml:2: `data.train` must have at least 1 item, not []"
    ]
    assert mistakes("[model]\npath = 'm'\n[[data.train]]\nformat = 'text'") == [
        'c.toml:3: `data.train.0.path` is missing: a file, a folder, a pattern such as "chats/*.jsonl", or '
        "built-in data: builtin:tasks, builtin:random"
    ]


def test_many_mistakes_are_counted_and_few_are_explained(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(errors, "answer", lambda key, *value: asked.append(key) or "no")
    lines = "".join(f"k{index} = {index}\n" for index in range(2_000))
    for text in (f"[train]\n{lines}", lines.replace("k", "[[other]]\nk"), f"[other.other]\n{lines}"):
        asked.clear()
        with pytest.raises(ConfigError) as error:
            load(text + MINIMAL)
        shown = str(error.value).split("\n")
        assert shown[0] == "2,000 mistakes in the config" and "`" in shown[1]
        assert shown[-1] == "… and 1,800 more lines" and len(shown) == errors.EXPLAINED + 2
        assert len(asked) == len(error.value.mistakes) == errors.EXPLAINED


def test_long_keys_and_values_are_cut(folder):
    long = "x" * 100_000
    (unknown,) = mistakes(f"{MINIMAL}[train]\n{long} = 1")
    assert unknown.startswith("c.toml:7: unknown key `train.xxx") and len(unknown) < 1000
    for override in (f"train.seed={long}", f"{long}=1", f"{long}.{long}=1", long, f"train.seed=[{long}"):
        (message,) = mistakes(MINIMAL, override)
        assert message.count("x") < 130


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


def test_mistakes_in_how_keys_go_together_are_reported_with_all_others(folder):
    text = (
        "[train]\nmicro_batch_size = 3\nearly_stopping_patience = 2\nseed = 'x'\n[optim]\nwarmup_steps = 5\n"
        "lr_scheduler_type = 'constant'\nloss_scale = 4\n[engine]\nfp8 = true\n[model]\npath = 'm'\n"
        "dtype = 'float64'\n[[data.train]]\npath = 'x'\nweigth = 2\n[lora]\nr = 0\n"
    )
    found = mistakes(text, "train.freeze=['a']", "nonsense")
    assert [mistake.split(" ")[0].strip(":") for mistake in found] == [
        *(f"c.toml:{line}" for line in (1, 3, 4, 7, 8, 10, 16, 18)),
        *("command", "command"),
    ]
    assert "16 is not a multiple" in found[0] and "`train.freeze`: with adapters" in found[-2] + found[-1]


@pytest.mark.parametrize("line", ["vla_size = 0.1", "val_size = '0.1'", "val_set_size = 0.1"])
def test_a_mistake_in_a_key_is_not_reported_again_for_the_keys_that_depend_on_it(folder, line):
    (mistake,) = mistakes(f"{MINIMAL}[data]\n{line}\n[train]\neval_steps = 2")
    assert mistake.startswith("c.toml:7:")


def test_an_override_mends_a_mistake_of_the_file(folder):
    assert load(MINIMAL + "[train]\nseed = 'x'", "train.seed=3").config.train.seed == 3


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model\n", "c.toml:1: invalid TOML"),
        ("a = 1\n\nb = = 2\n", "c.toml:3:"),
        ('x = """a\n', "c.toml:1:"),
    ],
)
def test_syntax_errors_have_a_line(folder, text, place):
    (mistake,) = mistakes(text)
    assert mistake.startswith(place)


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("c.yaml", "# axolotl\nbase_model: x\ndatasets:\n  - path: a.jsonl\n", "YAML"),
        ("c.toml", "---\nmodel_name_or_path: x\n", "YAML"),
        ("config", '"a": 1\n', "YAML"),
        ("c.toml", '{"learning_rate": 1e-5}', "JSON"),
        ("c.json", "{broken", "JSON"),
        ("c", "from trl import SFTTrainer\nargs = dict(a=1)\n", "Python"),
        ("c.py", "args = dict(a=1)\n", "Python"),
    ],
    ids=["yaml", "yaml-as-toml", "yaml-without-suffix", "json-as-toml", "broken-json", "python", "python-by-name"],
)
def test_other_formats_are_refused_by_name(folder, name, text, format):
    Path(name).write_text(text)
    with pytest.raises(UserError, match=rf"^{name} is {format}, and a config is TOML: .*rptrain --keys"):
        resolve(name)


def test_toml_with_another_suffix_is_read(folder):
    Path("c.yaml").write_text(MINIMAL)
    assert resolve("c.yaml").config.model.path == "tiny-tasks"


def test_files_that_cannot_be_read(folder):
    with pytest.raises(UserError, match=r"none\.toml does not exist"):
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
        ("learning_rate", "use `optim.learning_rate`"),
        ("gradient_accumulation_steps", "`train.global_batch_size` / `train.micro_batch_size`"),
        ("train_on_inputs", "the opposite, `data.assistant_only_loss`"),
        ("gradient_checkpointing", "not needed"),
        ("lora_rank", "use `lora.r`"),
        ("use_dora", "use `lora.use_dora`"),
        ("load_in_4bit", "use `lora.base`"),
        ("adapter", "use `train.method`"),
        ("overwrite_output_dir", '`save.resume = "never"`'),
        ("type", "the tables are: [model], [data]"),
        ("model.dtyp", "did you mean `model.dtype`?"),
        ("ddp_timeout", "not needed"),
        ("enable_liger_kernel", "not needed"),
        ("trust_remote_code", "no code of models is run"),
        ("max_samples", "`data.train.weight` below 1"),
        ("data.dataset_text_field", "use `data.columns`, such as columns = {text"),
        ("datasets.field_output", "use `data.columns`"),
        ("columns.response", "use `data.columns`"),
        ("datasets.message_field_role", "another name for the fields of messages is not available"),
        ("lora.layers_to_transform", "LoRA on layers by number is not available"),
        ("train.random_state", "use `train.seed`"),
        ("evals_per_epoch", "use `train.eval_steps`"),
        ("bnb_4bit_use_double_quant", "double quantization is not available in this version"),
        ("bnb_4bit_compute_dtype", "a choice of how weights are quantized is not available in this version"),
        ("report_to", "use `log.report_to`"),
        ("val_set_size", "use `data.val_size`"),
        ("fp16", "use `model.dtype`"),
        ("fp16_backend", 'set `model.dtype = "float16"`'),
        ("initial_scale_power", "`optim.loss_scale`"),
        ("allow_fp16_accumulation", "`engine.fp16_accumulation`"),
        ("xyzzy", "the tables are: [model], [data]"),
        ("train.xyzzy", "[train] has: method, freeze, micro_batch_size"),
        ("data.train.0.pth", "did you mean `data.train.path`?"),
        ("train.learning_rat", "did you mean `optim.learning_rate`?"),
        ("optim.beta", "did you mean `optim.betas`?"),
        ("train.beta", "preference and reinforcement learning is not available"),
        ("optim.min_lr", "falls to 0 with the `optim.lr_scheduler_type` cosine or linear"),
        ("optim.clip", "use `optim.max_grad_norm`"),
        ("train.steps", "use `train.max_steps`"),
        ("lora.modules", "use `lora.target_modules`"),
        ("lora.rank", "use `lora.r`"),
        ("rank", "use `lora.r`"),
        ("engine.rank", "[engine] has: devices"),
        ("data.weights", "use `data.train.weight`"),
        ("data.train.0.weights", "use `data.train.weight`"),
        ("model.weights", "[model] has: path"),
        ("save.weights", "[save] has: output_dir"),
        ("train.weights", "[train] has: method"),
        ("data.test", "use `data.val`"),
        ("data.eval", "use `data.val`"),
        ("data.valid", "use `data.val`"),
        ("eval.dataset", "use `data.val`"),
        ("model.quantization", "use `lora.base`"),
        ("validation", "use `data.val`"),
        ("data.validation.0.path", "use `data.val.path`"),
        ("data.validation.0.type", "use `data.val.format`"),
        ("data.xyzzy", "cache_dir, train, val"),
    ],
)
def test_words_of_other_trainers(folder, word, message):
    (mistake,) = mistakes(MINIMAL, f"{word}=1")
    assert message in mistake


def test_aliases_lead_to_keys_and_are_no_keys():
    known = {*keys(), "data.train"}
    assert set(ALIASES) <= known
    assert not ({key.rpartition(".")[2] for key in keys()} | known) & set(_CANONICAL)
    assert sum(len(words.split()) for words in ALIASES.values()) == len(_CANONICAL), "a word stands for two keys"
