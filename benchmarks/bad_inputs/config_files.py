"""Config files: their text, their kind and name, and the command's own arguments."""

from collections.abc import Callable, Iterator

from benchmarks.bad_inputs.case import CHECK, TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import fifo, link, made, rights, sparse, text
from benchmarks.bad_inputs.sound import CONFIG

AREA = "configs"
SETS = '[[data.train]]\npath = "data.jsonl"\n'
BOM = b"\xef\xbb\xbf"


def before(addition: str) -> str:
    """The sound config with something before its first table."""
    return addition + CONFIG


def within(table: str, addition: str) -> str:
    """The sound config with lines at the beginning of a table."""
    assert f"[{table}]\n" in CONFIG
    return CONFIG.replace(f"[{table}]\n", f"[{table}]\n{addition}\n")


def others(*lines: str) -> str:
    return "\n".join(lines) + "\n"


# Number, name, content of r.toml, outcome when it is checked, and what a refusal names.
CONTENTS: tuple[tuple[int, str, str | bytes, Outcome, str], ...] = (
    (174, "empty", "", "refused", "model.path"),
    (175, "spaces", " \n\t\n", "refused", "model.path"),
    (176, "byte order mark", BOM + CONFIG.encode(), "taken", ""),
    (177, "two byte order marks", BOM * 2 + CONFIG.encode(), "refused", "r.toml"),
    (178, "CRLF", CONFIG.replace("\n", "\r\n"), "taken", ""),
    (179, "CR alone", CONFIG.replace("\n", "\r"), "either", "r.toml"),
    (180, "UTF-16", CONFIG.encode("utf-16"), "refused", "r.toml"),
    (181, "Latin-1", before("# é\n").encode("latin-1"), "refused", "r.toml"),
    (182, "bytes", bytes(range(256)) * 4, "refused", "r.toml"),
    (183, "null characters", b"\0" * 100, "refused", "r.toml"),
    (184, "null character in text", CONFIG + '[log]\nrun_name = "a\0b"\n', "refused", "r.toml"),
    (185, "half a character", CONFIG + '[log]\nrun_name = "\\ud800"\n', "refused", "r.toml"),
    (186, "control character", CONFIG + '[log]\nrun_name = "a\x07b"\n', "refused", "r.toml"),
    (187, "table twice", CONFIG + "[train]\nseed = 1\n", "refused", "train"),
    (188, "key twice", within("train", "seed = 1\nseed = 2"), "refused", "r.toml:13"),
    (189, "key and dotted key", before("model.path = 'a'\n"), "refused", "model"),
    (190, "table as array of tables", CONFIG.replace("[train]", "[[train]]"), "refused", "train"),
    (191, "array of tables as table", CONFIG.replace("[[data.train]]", "[data.train]"), "refused", "data.train"),
    (192, "text without an end", within("model", 'init = "auto'), "refused", "r.toml"),
    (193, "long text without an end", within("model", 'init = """auto'), "refused", "r.toml"),
    (
        203,
        "keys of TrainingArguments",
        others(
            "[train]",
            "per_device_train_batch_size = 4",
            "gradient_accumulation_steps = 8",
            "num_train_epochs = 3",
            "warmup_ratio = 0.1",
            "bf16 = true",
        ),
        "refused",
        "micro_batch_size",
    ),
    (
        204,
        "flat keys",
        others('model_name_or_path = "x"', "learning_rate = 1e-4", "max_seq_length = 512", 'output_dir = "o"'),
        "refused",
        "model.path",
    ),
    (
        205,
        "keys of axolotl",
        others(
            'base_model = "x"',
            "sequence_len = 2048",
            "sample_packing = true",
            "micro_batch_size = 2",
            'adapter = "lora"',
            "[[datasets]]",
            'path = "x"',
            'type = "alpaca"',
        ),
        "refused",
        "model.path",
    ),
    (
        206,
        "keys of LLaMA-Factory",
        others('stage = "sft"', 'finetuning_type = "lora"', 'template = "qwen"', "cutoff_len = 1024", 'dataset = "x"'),
        "refused",
        "data.chat_template",
    ),
    (
        207,
        "misspelled keys",
        CONFIG.replace("max_steps", "max_step").replace("learning_rate", "learning_rat"),
        "refused",
        "max_steps",
    ),
    (208, "YAML", "model:\n  path: x\n", "refused", "r.toml"),
    (209, "JSON", '{"model": {"path": "x"}}', "refused", "r.toml"),
    (210, "text in place of a table", 'model = "x"\n' + SETS, "refused", "model"),
    (211, "array in place of a table", "model = [1, 2]\n" + SETS, "refused", "model"),
    (212, "emoji as a key", before('"😀" = 1\n'), "refused", "😀"),
    (213, "line end in a key", before('"a\\nb" = 1\n'), "refused", "r.toml"),
    (214, "keys like attributes", before("__class__ = 1\n__init__ = 2\nconstructor = 3\n"), "refused", "__class__"),
    (
        215,
        "keys like methods",
        within("train", "model_config = 1\nmodel_dump = 2\ncopy = 3"),
        "refused",
        "model_config",
    ),
    (216, "infinite and undefined numbers", within("optim", "eps = nan\nweight_decay = inf"), "refused", "optim.eps"),
    (
        217,
        "hexadecimal and octal numbers",
        within("train", "seed = 0x1F\neval_steps = 0o17\nmax_step = 0b1"),
        "refused",
        "max_step",
    ),
    (218, "underscore in a number", within("train", "seed = 1_000"), "taken", ""),
)

# The same for contents that are large: they are made when the case runs.
LARGE: tuple[tuple[int, str, Callable[[], str], Outcome, str], ...] = (
    (194, "10 MB of comments", lambda: before("# comment\n" * 1_000_000), "taken", ""),
    (
        195,
        "10 MB of unknown keys",
        lambda: before("".join(f"key_{i} = {i}\n" for i in range(600_000))),
        "refused",
        "key_0",
    ),
    (196, "10 MB of text", lambda: CONFIG + f'[log]\nrun_name = "{"x" * 10_000_000}"\n', "either", "log.run_name"),
    (197, "100,000 tables", lambda: CONFIG + "".join(f"[a.b{i}]\n" for i in range(100_000)), "refused", "a"),
    (198, "key of 5,000 parts", lambda: before("a." * 5000 + "a = 1\n"), "refused", "r.toml"),
    (199, "array 5,000 deep", lambda: before("a = " + "[" * 5000 + "]" * 5000 + "\n"), "refused", "r.toml"),
    (200, "table 5,000 deep", lambda: before("a = " + "{a=" * 5000 + "1" + "}" * 5000 + "\n"), "refused", "r.toml"),
)
LARGE_RUN: tuple[tuple[int, str, Callable[[], str], Outcome, str], ...] = (
    (201, "2,000 data sets", lambda: CONFIG + '[[data.train]]\npath = "nope"\n' * 2000, "refused", "nope"),
    (
        202,
        "20,000 patterns to freeze",
        lambda: within("train", f"freeze = {[f'nosuch.{i}' for i in range(20_000)]}"),
        "refused",
        "train.freeze",
    ),
)

LONG = "x" * 5000 + ".toml"

# Number, name, name of the config file, outcome, what a refusal names, and the edits.
FILES: tuple[tuple[int, str, str, Outcome, str, tuple[Edit, ...]], ...] = (
    (219, "config that is a folder", "model", "refused", "model", ()),
    (220, "config that is missing", "nope.toml", "refused", "nope.toml", ()),
    (221, "config without a name", "", "refused", "", ()),
    (222, "config that is a pipe", "f.toml", "refused", "f.toml", (fifo("f.toml"),)),
    (223, "config that is a device", "/dev/zero", "refused", "/dev/zero", ()),
    (224, "config that links to a device", "z.toml", "refused", "z.toml", (link("z.toml", "/dev/zero"),)),
    (225, "config that links to itself", "z.toml", "refused", "z.toml", (link("z.toml", "z.toml"),)),
    (226, "config of 12 GiB", "s.toml", "refused", "s.toml", (sparse("s.toml"),)),
    (227, "config that is the program's memory", "/proc/self/mem", "refused", "/proc/self/mem", ()),
    (228, "config with a name of 5,000 characters", LONG, "refused", "xxx", ()),
    (229, "config from standard input", "/dev/stdin", "either", "/dev/stdin", ()),
    (232, "line end in the config's name, checked", "a\nb.toml", "either", "toml", (text("a\nb.toml", CONFIG),)),
    (235, "config name that is not UTF-8, checked", "a\udcff.toml", "either", "toml", (text("a\udcff.toml", CONFIG),)),
)
RUN_FILES = (
    (233, "line end in the config's name", "a\nb.toml"),
    (234, "control character in the config's name", "a\x07b.toml"),
    (236, "config name that is not UTF-8", "a\udcff.toml"),
    (237, "config named like an option", "-rf.toml"),
    (238, "config named with dots", "..toml"),
)


def cases() -> Iterator[Case]:
    for number, name, content, expected, named in CONTENTS:
        yield Case(number, AREA, name, CHECK, expected, (text("r.toml", content),), named)
    for number, name, content, expected, named in LARGE:
        yield Case(number, AREA, name, CHECK, expected, (made("r.toml", content),), named)
    for number, name, content, expected, named in LARGE_RUN:
        yield Case(number, AREA, name, TRAIN, expected, (made("r.toml", content),), named)
    for number, name, file, expected, named, edits in FILES:
        yield Case(number, AREA, name, ("--config", file, "--dry-run"), expected, edits, named, stdin=CONFIG.encode())
    for number, name, file in RUN_FILES:
        yield Case(number, AREA, name, ("--config", file), "either", (text(file, CONFIG),), "toml")
    yield Case(230, AREA, "config without the right to read", CHECK, edits=(rights("r.toml", 0),), as_user=True)
    closed = (rights("runs", 0o555),)
    yield Case(231, AREA, "outputs without the right to write", TRAIN, edits=closed, names="runs", as_user=True)
    yield Case(239, AREA, "command without its option", ("train",), names="--config", fresh=True)
    yield Case(240, AREA, "unknown command", ("trian", "--config", "r.toml"), names="trian", fresh=True)
    yield Case(241, AREA, "unknown option", (*TRAIN, "--max-steps", "5"), names="--max-steps", fresh=True)
    yield Case(242, AREA, "interface without a terminal", (), "either", fresh=True)
