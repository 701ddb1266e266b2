"""Run folders: what is made, what is resumed, and what may change between."""

import errno
import stat
from pathlib import Path

import pytest

from rptrain.checkpoint.atomic_dir import MANIFEST, Damaged, set_aside
from rptrain.config.resolve import Resolved, resolve
from rptrain.runs.folder import run_dir
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir, changed, checkpoint_of, find, resolve_config
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools

CONFIG = """\
[model]
path = "tiny-tasks"
[[data.train]]
path = "builtin:tasks"
[log]
run_name = "r"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(resolved: Resolved) -> tuple[RunDir, Path | None]:
    run, checkpoint, log = run_dir.begin(resolved, find(resolved))
    log.close()
    return run, checkpoint


def config(*overrides: str) -> Resolved:
    Path("c.toml").write_text(CONFIG, encoding="utf-8")
    return resolve("c.toml", overrides)


def save(run: RunDir, step: int, complete: bool = True) -> Path:
    path = run.checkpoint_path(step)
    if complete:
        tools.write_checkpoint(path)
    else:
        path.mkdir()
    return path


def record(run: RunDir, event: events.Event) -> None:
    with EventLog(run.events_path) as log:
        log.write(event)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_layout():
    resolved = config("train.seed=3")
    run, checkpoint = begin(resolved)
    assert checkpoint is None and run.path == Path("runs/r")
    assert mode(run.path) == mode(run.checkpoints_path) == 0o700
    assert run.config() == resolved.config
    assert "seed = 3 # command line" in run.config_path.read_text()
    assert run.events_path.name == "events.jsonl" and run.model_path.name == "model"
    assert RunDir.open("runs/r") == run and not run.finished


def test_names_that_are_taken():
    assert [RunDir.create("runs", "r").path.name for _ in range(3)] == ["r", "r-2", "r-3"]


def test_complete_checkpoints_by_step():
    run, _ = begin(config())
    for step, complete in ((100, True), (20, True), (300, False)):
        save(run, step, complete)
    (run.checkpoints_path / "checkpoint-9.part").mkdir()
    assert [path.name for path in run.checkpoints()] == ["checkpoint-20", "checkpoint-100"]


def test_a_folder_that_is_no_run():
    with pytest.raises(UserError, match=r"no config\.toml"):
        RunDir.open("nowhere")


# save.resume = "auto"


def test_auto_resumes_the_unfinished_run():
    run, _ = begin(config())
    save(run, 10)
    save(run, 20)
    save(run, 30, complete=False)
    assert begin(config()) == (run, run.checkpoint_path(20))


def test_auto_begins_anew_without_a_checkpoint():
    """The first save of the run was killed, if there was one."""
    run, _ = begin(config())
    (run.checkpoints_path / ".checkpoint-10.rptrain-partial").mkdir()
    again, checkpoint = begin(config())
    assert (again.path.name, checkpoint) == ("r-2", None)


@pytest.mark.parametrize("override", ["save.resume=auto", "save.resume=runs/r"])
def test_a_run_whose_checkpoints_are_all_unusable_is_not_begun_anew(override):
    run, _ = begin(config())
    for step in (10, 20, 30):
        save(run, step)
    (run.checkpoint_path(10) / MANIFEST).unlink()
    (run.checkpoint_path(20) / MANIFEST).write_text("{")
    set_aside(run.checkpoint_path(30))
    for resolved in (config(override), config(override, "train.seed=1")):
        with pytest.raises(Damaged) as error:
            find(resolved)
        first, *reasons = str(error.value).splitlines()
        assert first == (
            "runs/r cannot be resumed, because it has no complete checkpoint that is undamaged. Restore one from a "
            "copy, or start a new run with save.resume=never or another log.run_name. What is wrong with each:"
        )
        assert [reason.partition(": ")[0] for reason in reasons] == [
            f"  {run.checkpoint_path(20) / MANIFEST} is damaged",
            f"  {run.checkpoint_path(10)} is not complete",
            f"  {run.checkpoints_path}/checkpoint-30.damaged was set aside as damaged",
        ]
    assert find(config("save.resume=never")) is None and find(config("log.run_name=other")) is None
    save(run, 5)
    assert begin(config(override)) == (run, run.checkpoint_path(5))


@pytest.mark.parametrize("renamed", ["Checkpoint-10", "checkpoint-10.bak", "", "../old"])
def test_a_run_that_saved_and_has_no_checkpoint_of_a_known_name_is_not_begun_anew(renamed):
    run, _ = begin(config())
    saved = save(run, 10)
    record(run, events.CheckpointSaved(step=10, path=str(saved)))
    saved.rename(run.checkpoints_path / (renamed or "aside"))
    with pytest.raises(Damaged, match=r"runs/r cannot be resumed(.|\n)*/checkpoints has none of those that were saved"):
        find(config())


def test_a_run_that_saved_and_has_no_config_is_not_begun_anew():
    run, _ = begin(config())
    save(run, 10)
    run.config_path.unlink()
    with pytest.raises(UserError, match=r"runs/r cannot be resumed: it has no config\.toml.*save\.resume=never"):
        find(config())
    record(run, events.Finished(step=10))
    assert find(config()) is None


def test_a_run_without_manifests_comes_before_an_earlier_run():
    first, _ = begin(config())
    save(first, 10)
    second, _ = begin(config("save.resume=never"))
    save(second, 10, complete=False)
    with pytest.raises(Damaged, match="runs/r-2 cannot be resumed"):
        find(config())


def test_auto_begins_anew_after_a_finished_run():
    run, _ = begin(config())
    save(run, 10)
    record(run, events.Finished(10))
    second, checkpoint = begin(config())
    assert (second.path.name, checkpoint) == ("r-2", None)
    save(second, 5)
    record(second, events.Failed("x"))
    assert begin(config()) == (second, second.checkpoint_path(5))


def test_auto_takes_the_newest_run_of_the_very_name():
    for name in ("r", "r-2", "r-1", "rr", "r-x"):
        run, _ = begin(config(f"log.run_name={name}", "save.resume=never"))
        save(run, 10)
    ours, _ = begin(config("save.resume=never"))
    assert ours.path.name == "r-3"
    assert begin(config()) == (RunDir(Path("runs/r")), Path("runs/r/checkpoints/checkpoint-10"))
    save(ours, 7)
    assert begin(config()) == (ours, ours.checkpoint_path(7))


def test_never_begins_anew():
    run, _ = begin(config())
    save(run, 10)
    assert find(config("save.resume=never")) is None
    assert begin(config("save.resume=never"))[0].path.name == "r-2"


# save.resume = PATH


def test_a_path_to_a_run_or_a_checkpoint():
    run, _ = begin(config())
    save(run, 10)
    save(run, 20)
    record(run, events.Finished(20))
    assert begin(config("save.resume=runs/r")) == (run, run.checkpoint_path(20))
    by_checkpoint, checkpoint = begin(config("save.resume=runs/r/checkpoints/checkpoint-20"))
    assert by_checkpoint.path.resolve() == run.path.resolve() and checkpoint.name == "checkpoint-20"
    assert checkpoint_of("runs/r/") == (run, run.checkpoint_path(20))


def test_an_earlier_checkpoint_begins_a_run_of_its_own():
    run, _ = begin(config())
    save(run, 10)
    save(run, 20)
    other, checkpoint = begin(config("save.resume=runs/r/checkpoints/checkpoint-10"))
    assert checkpoint is not None
    assert (other.path.name, checkpoint.name) == ("r-2", "checkpoint-10")
    assert [path.name for path in run.checkpoints()] == ["checkpoint-10", "checkpoint-20"]


def test_a_path_from_inside_the_run(monkeypatch):
    run, _ = begin(config())
    save(run, 10)
    monkeypatch.chdir(run.checkpoints_path)
    assert checkpoint_of("checkpoint-10")[0].config_path.is_file()


def test_paths_that_lead_nowhere():
    run, _ = begin(config())
    save(run, 10, complete=False)
    for path, message in (
        ("runs/r", r"(?s)has no complete checkpoint .*checkpoint-10 is not complete: it has no complete\.json"),
        ("runs/r/checkpoints/checkpoint-10", "is not complete"),
        ("runs", "neither a run nor a checkpoint"),
        ("nowhere", "neither a run nor a checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            find(config(f"save.resume={path}"))


def test_a_run_that_cannot_be_read(monkeypatch):
    """As another user's in a shared folder."""
    run, _ = begin(config())
    save(run, 10)

    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parts[0] == "runs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    for override in ("save.resume=auto", f"save.resume={run.path}"):
        with pytest.raises(UserError, match=r"runs/r/(events.jsonl|config.toml): Permission denied; make it readable"):
            find(config(override))
    assert find(config("save.resume=never")) is None


# What a resumed run may change


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps=40",
        "engine.devices=cpu:2",
        "engine.vram_limit=8GiB",
        "engine.trace=true",
        "save.save_steps=5",
        "log.logging_steps=5",
        "eval.questions=9",
    ],
)
def test_changes_that_do_not_reach_the_numbers(override):
    run, _ = begin(config())
    save(run, 10)
    resolved = config(override)
    assert begin(resolved)[0] == run
    assert run.config() == resolved.config


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.path=other", 'model.path was "tiny-tasks", is "other"'),
        ("model.dtype=float32", "model.dtype"),
        ("data.train.1.path=x", 'data.train.1.path was not set, is "x"'),
        ("data.train.0.format=text", "data.train.0.format"),
        ("data.train.0.columns.text=body", 'data.train.0.columns.text was not set, is "body"'),
        ("data.columns.text=body", "data.columns.text"),
        ("data.max_length=512", "data.max_length was 2048, is 512"),
        ("train.seed=1", "train.seed was 0, is 1"),
        ("train.micro_batch_size=2", "train.micro_batch_size"),
        ("train.global_batch_size=32", "train.global_batch_size"),
        ("engine.round_size=4", "engine.round_size was not set, is 4"),
        ("engine.reduce_dtype=bfloat16", 'engine.reduce_dtype was "float32", is "bfloat16"'),
        ("optim.update=sync", "optim.update"),
        ("optim.betas=[0.8, 0.9]", r"optim.betas was \[0.9, 0.999\], is \[0.8, 0.9\]"),
        ("optim.learning_rate=1", "optim.learning_rate"),
    ],
)
def test_changes_that_would_change_the_numbers(override, key):
    run, _ = begin(config())
    save(run, 10)
    before = run.config_path.read_text()
    with pytest.raises(UserError, match=key) as error:
        begin(config(override))
    assert "save.resume=never" in str(error.value)
    assert run.config_path.read_text() == before


def test_all_changes_are_named():
    first, second = config().config, config("train.seed=1", "optim.eps=1", "save.save_steps=2").config
    assert changed(first, second) == ["train.seed was 0, is 1", "optim.eps was 1e-08, is 1.0"]
    adapters = config("lora.r=16").config
    assert changed(adapters, first) == ["lora was a table, is not set"], "one entry for all its keys"
    assert changed(first, adapters) == ["lora was not set, is a table"]
    assert changed(adapters, config("lora.r=2").config) == ["lora.r was 16, is 2"]


@pytest.mark.parametrize("setting", ["data.max_bad_rows=50", "data.reasoning=drop"])
def test_what_only_the_data_depends_on_may_change(setting):
    """The tokens are compared."""
    assert changed(config().config, config(setting).config) == []


def test_a_resumed_run_keeps_its_name():
    run, _ = begin(config())
    save(run, 10)
    begin(config("save.resume=runs/r", "log.run_name=other"))
    assert run.config().log.run_name == "r"


def test_a_run_with_earlier_names_of_keys_is_resumed():
    resolved = config("lora.r=2", "lora.lora_alpha=3", "lora.lora_dropout=0.1", "lora.use_rslora=true")
    run, _ = begin(resolved)
    record(run, events.Paused(1))
    save(run, 1)
    text = run.config_path.read_text().replace("lora_alpha", "alpha").replace("lora_dropout", "dropout")
    text = text.replace("use_rslora", "rslora").replace("\nuse_dora =", "\ndouble_quant = false # default\nuse_dora =")
    assert "double_quant" in text
    run.config_path.write_text(text)
    again = resolve_config(run.config_path, [f"save.resume={run.path}"])
    assert again.config.lora == resolved.config.lora == run.config().lora
    assert find(again) == find(config("lora.r=2", "lora.lora_alpha=3", "lora.lora_dropout=0.1", "lora.use_rslora=true"))
    assert run.config_path.read_text() == text
    run.config_path.write_text(text.replace("double_quant = false", "double_quant = true"))
    with pytest.raises(UserError, match="it was removed"):
        run.config()
    run.config_path.write_text(text)
    run.events_path.unlink()  # a config with that name that belongs to no run
    with pytest.raises(UserError, match=r"use `lora\.lora_alpha`"):
        resolve_config(run.config_path)


def test_an_unfinished_run_whose_config_cannot_be_read_says_what_to_do():
    run, _ = begin(config())
    run.config_path.write_text(run.config_path.read_text() + "[lora]\ndouble_quant = true\n")
    record(run, events.Paused(1))
    assert find(config()) is None  # without a checkpoint there is nothing to resume
    save(run, 1)
    with pytest.raises(UserError, match=r"r cannot be resumed: .*it was removed.*save\.resume=never"):
        find(config())
    assert find(config("save.resume=never")) is None


def test_other_processes_keep_their_records_in_folders_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.of_process(0) == run
    assert run.of_process(2).events_path == run.path / "processes/2/events.jsonl"
