"""The command line: what is asked of which module, exit codes, and what is not imported."""

import ast
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from rptrain.checkpoint.atomic_dir import written_aside
from rptrain.checkpoint.export_progress import KIND, Report
from rptrain.cli import argv
from rptrain.cli.commands import MessageFormatter, app
from rptrain.config.resolve import Resolved, resolve
from rptrain.runs.folder.run_dir import RunDir, begin
from rptrain.runs.records.events import VALIDATION_LOSS, Evaluation, Step, to_line
from rptrain.utils.errors import UserError

from .run_tools import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CONFIG = '[model]\npath = "m"\n[[data.train]]\npath = "builtin:tasks"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, argv.arguments(list(arguments)))


def replace(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def trained(monkeypatch) -> list:
    calls: list = []

    def train(resolved: Resolved, *, quiet: bool, watchdog: object) -> RunDir:
        calls.append((resolved, quiet))
        return RunDir(Path("runs/c"))

    replace(monkeypatch, "rptrain.train.run", train=train)
    return calls


# Training


def test_training_is_what_is_done_without_a_command(trained):
    for arguments in (
        ["--config", "c.toml", "train.seed=3"],
        ["train.seed=3", "--config", "c.toml"],
        ["train", "--config", "c.toml", "train.seed=3"],
    ):
        assert run(*arguments).exit_code == 0
        resolved, quiet = trained.pop()
        assert resolved.config.train.seed == 3 and not quiet


def test_training_with_json_is_quiet_and_says_where_the_model_is(trained, monkeypatch):
    for finished, model in ((True, "runs/c/model"), (False, None)):
        monkeypatch.setattr(RunDir, "finished", finished)
        result = run("--config", "c.toml", "--json")
        assert json.loads(result.stdout) == {"run": "runs/c", "model": model}
        assert trained.pop()[1] is True


def test_mistakes_in_the_config_end_with_2_before_training(trained):
    result = run("--config", "c.toml", "train.sed=3", "optim.lr=1")
    assert (result.exit_code, result.stdout, trained) == (2, "", [])
    assert result.stderr.splitlines() == [
        "2 mistakes in the config",
        "  command line: unknown key `train.sed`: did you mean `train.seed`?",
        "  command line: unknown key `optim.lr`: use `optim.learning_rate`",
    ]
    assert run("--config", "none.toml").exit_code == 2


def test_a_run_that_cannot_be_resumed_ends_with_2_before_training(trained):
    result = run("--config", "c.toml", "save.resume=nowhere")
    assert (result.exit_code, trained) == (2, []) and "neither a run nor a checkpoint" in result.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_several_processes_meet_before_one_looks_for_a_run_and_one_says_where_the_model_is(trained, monkeypatch, rank):
    given = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "MASTER_PORT": 1,
        "MASTER_ADDR": "a",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    result = run("--config", "c.toml", "save.resume=nowhere", "--json")
    assert (result.exit_code, bool(result.stdout)) == (0, rank == 0) and trained.pop()[1] is True


RAISE = "raise the limit of `ulimit -v` or of the container, or free memory"
NO_MEMORY = f"memory cannot be allocated: {RAISE}"
NO_THREADS = "no more threads can be started: raise the limits of `ulimit -u` and `ulimit -v`"


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such model"), 2, "no such model\n"),
        (UserError("\x1b[2Jcleared\nand \u202eso on"), 2, "␛[2Jcleared\nand \ufffdso on\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a"),
            2,
            "a: Permission denied: change its permissions, or name another path\n",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 1, "a: No space left on device: free disk space\n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "a"), 1, f"a: Cannot allocate memory: {RAISE}\n"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error\n"),
        (MemoryError(), 1, f"{NO_MEMORY}\n"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
            1,
            f"{NO_MEMORY}\n",
        ),
        (ImportError("libx.so: failed to map segment from shared object"), 1, f"{NO_MEMORY}\n"),
        (RuntimeError("can't start new thread"), 1, f"{NO_THREADS}\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(3), 1, "SystemExit: 3\n"),
        (Broken("device cuda:0"), 1, ""),
    ],
)
def test_exit_codes(monkeypatch, error, code, said):
    def train(resolved: object, quiet: bool, watchdog: object) -> None:
        raise error

    replace(monkeypatch, "rptrain.train.run", train=train)
    result = run("--config", "c.toml")
    assert (result.exit_code, result.stderr) == (code, said)
    if isinstance(error, Broken):
        assert result.exception is error  # Python prints the traceback and exits with 1


def test_sigterm_is_an_interrupt_also_before_and_after_the_steps(monkeypatch):
    def train(resolved: object, quiet: bool, watchdog: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the tests go on without what is tested
    try:
        replace(monkeypatch, "rptrain.train.run", train=train)
        result = run("--config", "c.toml")
        assert (result.exit_code, result.stderr) == (130, "interrupted\n")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.seed=3"],
        ["--config"],
        ["--config", "c.toml", "--nonsense"],
        ["nonsense"],
        ["export", "nowhere", "--to", "x"],
        ["export", "."],
        ["generate", "."],
        ["generate", ".", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", ".", "--prompt", "x", "--temperature", "-1"],
        ["--config", "c.toml", "export"],
        ["runs", "--runs", __file__],
        ["doctor", "--runs", __file__],
    ],
    ids=[
        *("no-config", "no-path", "unknown-option", "unknown-command", "export-nothing", "export-nowhere"),
        *("generate-nothing", "no-new-tokens", "negative-temperature", "config-and-command"),
        *("runs-in-a-file", "doctor-of-a-file"),
    ],
)
def test_bad_usage_ends_with_2(trained, arguments):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr and trained == []


@pytest.mark.parametrize(
    "arguments", [["x" * 9000], ["--config", "c.toml", f"--{'x' * 9000}\x1b"], ["runs", "--runs", "\x1b" * 9000]]
)
def test_long_arguments_are_not_repeated(arguments):
    said = run(*arguments).stderr
    assert "more characters …" in said and max(map(len, said.split("\n"))) < 600 and "\x1b" not in said


def test_warnings_are_messages():
    record = logging.LogRecord("rptrain", logging.WARNING, "", 0, "%s\x1b", ("a\n" * 30,), None)
    assert MessageFormatter().format(record).endswith("\n… and 11 more lines")


# --dry-run


@pytest.fixture
def tiny(folder: Path) -> None:
    """The model of the config exists."""
    (folder / "c.toml").write_text(CONFIG.replace('"m"', '"tiny-tasks"'))


def test_dry_run_shows_the_config_and_its_origins(trained, tiny):
    result = run("--config", "c.toml", "--dry-run", "train.seed=3")
    assert result.exit_code == 0 and trained == []
    assert result.stdout.startswith("# a new run\n")
    assert tomllib.loads(result.stdout)["train"]["seed"] == 3
    assert "seed = 3 # command line" in result.stdout and 'path = "tiny-tasks" # c.toml:2' in result.stdout
    assert not Path("runs").exists()


def test_dry_run_as_json(tiny):
    result = run("--config", "c.toml", "--dry-run", "--json", "engine.vram_limit=8GiB")
    shown = json.loads(result.stdout)
    assert shown["config"]["engine"]["vram_limit"] == "8GiB"
    assert shown["origins"]["model.path"] == "c.toml:2" and shown["resumes"] is None


@pytest.mark.parametrize("command", [["plan"], ["--dry-run"], ["train"]], ids=["plan", "dry-run", "train"])
def test_all_mistakes_are_reported_with_their_places(folder, command, monkeypatch):
    monkeypatch.setattr("rptrain.preflight.checks.find_spec", lambda name: None)
    (folder / "rows.jsonl").write_text('{"question": 1}\n')
    (folder / "c.toml").write_text(
        '[model]\npath = "m"\n[[data.train]]\npath = "none.jsonl"\n[[data.train]]\npath = "rows.jsonl"\n'
        '[[data.val]]\npath = "gone.jsonl"\n[data]\nchat_template = "none.jinja"\ncache_dir = "c.toml"\n'
        '[lora]\nadapter = "none"\n[log]\nreport_to = ["wandb"]\n'
    )
    result = run(*command, "--config", "c.toml", "engine.devices=cuda:9", "save.output_dir=c.toml")
    assert (result.exit_code, result.stdout) == (2, ""), result.stdout
    head, *lines = result.stderr.splitlines()
    assert head == "10 mistakes in the config"
    for line, (place, words) in zip(
        lines,
        [
            ("c.toml:2", "no model 'm'"),
            ("c.toml:4", "none.jsonl: no such data file"),
            ("c.toml:6", "no known data format"),
            ("c.toml:8", "gone.jsonl: no such data file"),
            ("c.toml:10", "none.jinja is neither"),
            ("c.toml:11", "the token cache cannot be written"),
            ("c.toml:13", "none is not an adapter"),
            ("c.toml:15", "wandb is not installed"),
            ("command line, engine.devices", "this machine has"),
            ("command line, save.output_dir", "cannot create a run"),
        ],
        strict=True,
    ):
        assert line.startswith(f"  {place}: ") and words in line
    assert sorted(path.name for path in folder.iterdir()) == ["c.toml", "rows.jsonl"]


def test_a_dry_run_that_does_not_fit_ends_with_2_and_with_advice(tiny):
    result = run("--config", "c.toml", "--dry-run", "engine.host_limit=1MiB", "data.train.0.path=none.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    head, first, second, *advice = result.stderr.splitlines()
    assert head == "the run cannot start, for 2 reasons"
    assert first.startswith("  command line, data.train.0.path: none.jsonl: no such data file")
    assert second.startswith("  command line, engine.host_limit: the run needs ") and advice


def test_a_dry_run_on_a_machine_that_is_too_small_blames_the_machine(tiny, monkeypatch):
    monkeypatch.setattr("rptrain.machine.hardware.available_bytes", lambda: 1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0, total=1 << 40))
    result = run("--config", "c.toml", "--dry-run")
    head, *reasons = result.stderr.splitlines()[:3]
    assert result.exit_code == 2 and head == "the run cannot start, for 2 reasons"
    assert all(reason.startswith("  this machine: the run needs ") for reason in reasons)


def test_dry_run_says_what_would_be_resumed(tiny):
    write_checkpoint(RunDir(begun_run()).checkpoint_path(4))
    assert run("--config", "c.toml", "--dry-run").stdout.startswith("# resumes runs/c/checkpoints/checkpoint-4\n")


# Ways to ask for help


def test_short_options():
    for given, words in (("-h", "Usage"), ("train -h", "--dry-run"), ("-V", "rptrain "), ("data -h", "clean")):
        shown = run(*given.split())
        assert shown.exit_code == 0 and words in shown.stdout


@pytest.mark.parametrize("name", ["c.yaml", "c.yml", "c.json", "c.py"])
def test_a_config_of_another_trainer_is_refused_by_name(folder, trained, name):
    (folder / name).write_text("{" if name == "c.json" else "a: 1\n")
    for given in ([name], ["--config", name], [name, "train.seed=1"]):
        result = run(*given)
        assert (result.exit_code, trained) == (2, []) and f"{name} is " in result.stderr and "TOML" in result.stderr


# The other commands


def test_help():
    result = run("--help")
    assert result.exit_code == 0
    assert "export" in result.stdout and "generate" in result.stdout


def test_without_a_terminal_nothing_opens_and_the_way_to_train_is_told():
    result = run()
    assert result.exit_code == 2
    assert "needs a terminal" in result.stderr and "rptrain --config rptrain.toml" in result.stderr


def test_version_and_keys():
    assert run("--version").stdout.startswith("rptrain 0.")
    keys = run("--keys").stdout
    assert "  model.path  (text; required)\n" in keys
    assert "  optim.betas  (list of numbers; default [0.9, 0.999])\n      AdamW betas: " in keys


def test_export(monkeypatch, folder):
    calls: list = []

    def export(*arguments: object, merge: bool, force: bool, report: Report, tell: Callable[[str], object]) -> Path:
        calls.append((*arguments, merge, force))
        tell("checkpoint-4: step 4")
        report("checking", 0, 0)
        report("writing", 5, 10)
        report("writing", 10, 10)
        return Path("out")

    replace(monkeypatch, "rptrain.checkpoint.export", export=export)
    result = run("export", ".", "--to", "out", "--dtype", "float32")
    assert (result.exit_code, result.stdout) == (0, "out\n")
    assert 'path = "out"\n  model = AutoModelForCausalLM.from_pretrained(path)\n' in result.stderr
    assert result.stderr.startswith("checkpoint-4: step 4\n")
    run("export", ".", "--to", "out", "--merge")
    run("export", ".", "--to", "out", "--force")
    assert calls == [
        (Path("."), Path("out"), "float32", False, False),
        (Path("."), Path("out"), None, True, False),
        (Path("."), Path("out"), None, False, True),
    ]
    records = [json.loads(line) for line in run("export", ".", "--to", "out", "--json").stdout.splitlines()]
    assert [(record["phase"], record.get("bytes")) for record in records] == [
        ("found", None),
        ("checking", 0),
        ("writing", 5),
        ("writing", 10),
        ("done", None),
    ]
    assert (
        records[0]["state"] == "checkpoint-4: step 4"
        and records[-1]["path"] == "out"
        and "from_pretrained" in records[-1]["code"]
    )


def test_an_export_of_adapters_of_experts_says_what_vllm_needs(monkeypatch, folder):
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"base_model_name_or_path": "base", "r": 4, "use_dora": False, "modules_to_save": None}
    Path("out").mkdir()
    Path("out/adapter_config.json").write_text(json.dumps(config | {"target_parameters": names}))
    replace(monkeypatch, "rptrain.checkpoint.export", export=lambda *given, **named: Path("out"))
    result = run("export", ".", "--to", "out")
    assert result.stdout == "out\n" and "--max-lora-rank 8" in result.stderr
    done = json.loads(run("export", ".", "--to", "out", "--json").stdout)
    assert done["vllm"] == {"max_lora_rank": 8, "enable_mixed_moe_lora_format": True, "refused": []}
    assert done["note"] in result.stderr


@pytest.mark.parametrize(("answer", "exported"), [("n\n", False), ("\n", False), ("y\n", True)])
def test_on_a_terminal_it_asks_before_an_export_is_replaced(monkeypatch, folder, answer: str, exported: bool):
    calls: list = []
    replace(monkeypatch, "rptrain.checkpoint.export", export=lambda *given, **named: calls.append(given) or Path("out"))
    monkeypatch.setattr("rptrain.cli.models.is_terminal", lambda stream: True)
    with written_aside(folder / "out", {"kind": KIND}, 0) as aside:
        aside.write("weights", [b"x"])
    arguments = argv.arguments(["export", ".", "--to", "out"])
    result = CliRunner().invoke(app, arguments, input=answer)
    assert "Replace the export in out?" in result.stderr and (result.exit_code, bool(calls)) == (0, exported)
    monkeypatch.setattr("rptrain.cli.models.is_terminal", lambda stream: False)
    assert run("export", ".", "--to", "out").stdout == "out\n", "a script is not asked"


def test_generate(monkeypatch):
    calls: list = []

    def request(*values: object) -> tuple[object, ...]:
        *given, tell = values
        assert callable(tell)
        return tuple(given)

    def generate_text(*arguments: object) -> list[str]:
        calls.append(arguments)
        return ["größer", "b"]

    def stream_text(*arguments: object) -> Iterator[list[str | None]]:
        """The second answer ends first, and waits for its turn; the end of the first one is in the last item."""
        calls.append(arguments)
        yield from (["gr", "b"], ["ö", None], ["", None], ["ßer", None])

    replace(
        monkeypatch, "rptrain.inference.generate", Request=request, generate_text=generate_text, stream_text=stream_text
    )
    replace(monkeypatch, "rptrain.inference.free_memory", free_memory=lambda training: "room")
    arguments = ["generate", ".", "a=1", "--prompt", "y"]
    assert run(*arguments).stdout == "> a=1\ngrößer\n> y\nb\n"
    shown = run(
        *arguments,
        "--json",
        "--max-new-tokens",
        "5",
        "--temperature",
        "0.5",
        "--seed",
        "7",
        "--raw",
        "--placement",
        "cpu",
    )
    assert json.loads(shown.stdout) == [{"prompt": "a=1", "text": "größer"}, {"prompt": "y", "text": "b"}]
    assert calls == [
        ((Path("."), ["a=1", "y"], 128, 0.0, 0, False), "room", "auto"),
        ((Path("."), ["a=1", "y"], 5, 0.5, 7, True), "room", "cpu"),
    ]


def test_a_mistake_in_generate_ends_with_2(monkeypatch):
    def fail(*arguments: object) -> list[str]:
        raise UserError("no tokenizer")

    replace(monkeypatch, "rptrain.inference.generate", Request=fail, generate_text=fail, stream_text=fail)
    result = run("generate", ".", "--prompt", "x")
    assert (result.exit_code, result.stderr) == (2, "no tokenizer\n")


def begun_run(config: str = "c.toml") -> Path:
    run, _, log = begin(resolve(config), None)
    log.close()
    return run.path


def test_runs():
    assert run("runs").stdout == "no runs in runs\n"
    begun_run()
    assert run("runs").stdout.splitlines()[1].split()[:3] == ["c", "new", "0"]
    (only,) = json.loads(run("runs", "--json").stdout)
    assert (only["path"], only["state"], only["loss"]) == ("runs/c", "new", None)
    assert json.loads(run("runs", "--runs", "elsewhere", "--json").stdout) == []
    assert run("runs", "--runs", "elsewhere").stdout == "no runs: the folder elsewhere does not exist\n"


def test_runs_are_compared_by_name():
    for name, loss, rate in (("slow", 2.5, "1e-3"), ("fast", 1.25, "6e-3")):
        Path(f"{name}.toml").write_text(f"{CONFIG}[optim]\nlearning_rate = {rate}\n")
        with (begun_run(f"{name}.toml") / "events.jsonl").open("a") as file:
            for event in (Step(1, loss, 1e-3, 1.0, 64, 32, 100.0), Evaluation(1, VALIDATION_LOSS, loss)):
                file.write(f"{to_line(event)}\n")
    assert "validation" in run("runs").stdout.splitlines()[0]
    lines = [re.split(r"  +", line.strip()) for line in run("runs", "slow", "runs/fast").stdout.splitlines()]
    compared = {name: cells for name, *cells in lines}
    assert compared["lowest validation loss"] == ["2.5000", "1.2500 (best)"] and compared["at step"] == ["1", "1"]
    assert compared["optim.learning_rate"] == ["0.001", "0.006"] and "may not be comparable" not in str(lines)
    assert [one["validation_loss"] for one in json.loads(run("runs", "fast", "slow", "--json").stdout)] == [1.25, 2.5]
    assert "did you mean fast?" in run("runs", "fest").stderr
    config = Path("runs/fast/config.toml")
    config.write_text(config.read_text().replace("builtin:tasks", "builtin:random"))
    assert "The data or the models differ: the losses may not be comparable." in run("runs", "slow", "fast").stdout


def test_piped_tables_are_not_cut(monkeypatch):
    """And as wide as COLUMNS says, where it is set."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a-name-of-a-run-" * 6
    Path("c.toml").write_text(f'{CONFIG}[log]\nrun_name = "{name}"\n')
    begun_run()
    heading, row = run("runs").stdout.splitlines()
    assert row.split()[:2] == [name, "new"] and len(heading) == len(row) < 200
    monkeypatch.setenv("COLUMNS", "70")
    assert name not in run("runs").stdout


def test_doctor(monkeypatch):
    asked: list = []

    def examine(runs: Path) -> list:
        asked.append(runs)
        return [SimpleNamespace(to_dict=lambda: {"subject": "GPU"})]

    replace(monkeypatch, "rptrain.doctor.examine", examine=examine)
    replace(monkeypatch, "rptrain.doctor.checks", lines=lambda found: ["ok GPU"])
    assert run("doctor").stdout == "ok GPU\n"
    assert json.loads(run("doctor", "--json", "--runs", "x").stdout) == [{"subject": "GPU"}]
    assert asked == [Path("runs"), Path("x")]


def test_attach_opens_the_interface_on_a_run(monkeypatch, folder):
    opened: list = []
    replace(monkeypatch, "rptrain.tui.start", open_interface=opened.append)
    path = begun_run()
    assert run("attach", str(path)).exit_code == 0 and opened == [path]
    result = run("attach", ".")
    assert result.exit_code == 2 and "`rptrain runs` lists the runs" in result.stderr
    assert run("attach", path.name).exit_code == 0 and run("attach").exit_code == 0 and opened == [path] * 3
    result = run("attach", "--runs", "elsewhere")
    assert result.exit_code == 2 and "there are no runs in elsewhere" in result.stderr


def test_textual_is_imported_by_the_interface_only():
    """And the interface by the command that opens it, when it does: a run trains without both."""
    for folder in ("rptrain", "kernels", "models"):
        for file in (ROOT / folder).rglob("*.py"):
            if (ROOT / "rptrain/tui") in file.parents:
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            assert not {name for name in imported(ast.walk(tree)) if name.partition(".")[0].startswith("textual")}, file
            assert not {name for name in imported(tree.body) if name.startswith("rptrain.tui")}, file


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Processes of their own


def python(*arguments: str, cwd: Path) -> SimpleNamespace:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


MISTAKE = """
import signal
import sys
from rptrain import cli
before = [name for name in ("torch", "transformers", "numpy", "tomlkit", "textual") if name in sys.modules]
sys.argv = ["rptrain", "--config", "c.toml", "train.sed=3"]
try:
    cli.main()
except SystemExit as exit:
    assert exit.code == 2, exit.code
after = [name for name in ("torch", "transformers", "numpy", "textual") if name in sys.modules]
print(before, after)
"""


def test_a_mistake_in_the_config_imports_nothing_heavy(folder):
    result = python("-c", MISTAKE, cwd=folder)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "[] []"


def test_python_m_in_the_repository_root():
    result = python("-m", "rptrain", "--config", "rptrain.toml", "train.sed=3", cwd=ROOT)
    assert (result.code, result.out) == (2, "") and "did you mean `train.seed`?" in result.err


GUARD = """
import importlib.util, runpy, sys
import rptrain.__main__
print([name for name in ("kernels", "models") if importlib.util.find_spec(name)])
import rptrain.kernels, rptrain.models
"""


def test_the_folders_beside_the_package_are_not_importable_by_bare_names():
    result = python("-c", GUARD, cwd=ROOT)
    assert (result.code, result.out) == (0, "[]\n"), result.err


def test_interrupt_and_failure_as_a_shell_sees_them(folder):
    script = "import sys, types; from rptrain import cli; m = types.ModuleType('t')\n"
    script += "def train(resolved, **others): raise {error}\nm.train = train; sys.modules['rptrain.train.run'] = m\n"
    script += "sys.argv = ['rptrain', '--config', 'c.toml']; cli.main()"
    failed = python("-c", script.replace("{error}", "RuntimeError('device cuda:0')"), cwd=folder)
    assert failed.code == 1 and failed.err.rstrip().endswith("RuntimeError: device cuda:0")
    assert python("-c", script.replace("{error}", "KeyboardInterrupt"), cwd=folder).code == 130
    unread = python("-c", script.replace("{error}", "BrokenPipeError(32, 'Broken pipe')"), cwd=folder)
    assert (unread.code, unread.err) == (1, "")


EARLY = """
import os, signal, sys
from importlib.abc import MetaPathFinder
from rptrain.cli import main
class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["rptrain", *{arguments!r}]
main()
"""


@pytest.mark.parametrize("arguments", [["runs"], ["attach"]])
def test_an_interrupt_while_the_program_starts(folder, arguments):
    done = python("-c", EARLY.format(module="typer", arguments=arguments), cwd=folder)
    assert (done.code, done.err) == (130, "\ninterrupted\n")
    done = python("-c", EARLY.format(module="rptrain.utils.signals", arguments=arguments), cwd=folder)
    assert (done.code, done.err) == (-signal.SIGINT, ""), "no traceback"
