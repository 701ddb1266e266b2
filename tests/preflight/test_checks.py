"""What would refuse a run besides its memory: the plan says it, as training does, and both end with 2."""

import errno
import fcntl
import itertools
import json
import os
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from rptrain.data import plan_cache
from rptrain.data.datasets import find_tokenizer
from rptrain.data.excerpt import PLANNING
from rptrain.preflight import checks as module
from rptrain.runs.folder.run_dir import RunDir, check_creatable
from rptrain.utils.errors import UserError

from .. import run_tools as tools


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PLANNING", replace(PLANNING, seconds=inf))  # a slow machine reads as many rows
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    return tmp_path


def chats(*answers: str) -> str:
    rows = [
        {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def refusals(*overrides: str) -> dict[str, str]:
    """The messages by key. Training ends with one of them, too."""
    planned = tools.invoke("plan", "--config", "run.toml", "--json", *overrides)
    found = {one["key"]: one["message"] for one in json.loads(planned.stdout)["refusals"]}
    assert planned.exit_code == (2 if found else 0)
    if found:
        trained = tools.invoke("--config", "run.toml", *overrides)
        assert trained.exit_code == 2, "the plan refuses what training does not"
        assert any(message.splitlines()[0] in trained.stderr for message in found.values())
    return found


@pytest.mark.sample(8, gate=19)
@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["data.train.0.path=none.jsonl"], "data.train.0.path", "none.jsonl: no such data file or folder"),
        (["data.val_size=0.1", f"log.sample_prompts=['{'a' * 300}']"], "log.sample_prompts", "prompt 1 has 3"),
        (["data.train.0.path=empty.jsonl"], "data.train.0.path", "empty.jsonl: the file has no rows"),
        (["data.train.0.path=bad.jsonl"], "data.train.0.path", "no known data format"),
        (["data.val=[{path = 'none.jsonl'}]"], "data.val.0.path", "none.jsonl: no such"),
        (["data.train.0.path=chats.jsonl", "data.chat_template=none.jinja"], "data.chat_template", "none.jinja is"),
        (["data.train.0.path=chats.jsonl", "data.overlong=error", "data.max_length=4"], "data.max_length", "longer"),
        (["data.train.0.path=chats.jsonl", "data.max_length=4"], "data.max_length", "no token of the data is super"),
        (["data.train.0.path=chats.jsonl", "data.max_length=99", "data.val_size=1"], "data.max_length", "val_size"),
        (
            ["data.val=[{path = 'chats.jsonl'}]", "data.max_length=4"],
            "data.val.0.path",
            "no token of the data is super",
        ),
        (["model.path=no-tokenizer", "data.train.0.path=chats.jsonl"], "model.path", "there is no tokenizer"),
        (["model.path=linked"], "model.path", "vocab.txt -> "),
        (["model.path=tiny-tasks", "train.method=lora"], "train.method", "adapters need pretrained weights"),
        (["train.method=lora", "lora.adapter=none"], "lora.adapter", "none"),
        (["save.output_dir=run.toml/runs"], "save.output_dir", "run.toml is not a folder; change save.output_dir"),
        (["save.output_dir=/proc/runs"], "save.output_dir", "/proc is a folder of the operating system; change"),
        (
            ["data.train.0.path=chats.jsonl", "data.cache_dir=run.toml"],
            "data.cache_dir",
            "run.toml is not a folder; set",
        ),
        (
            ["data.train.0.path=chats.jsonl", "data.cache_dir=gone"],
            "data.cache_dir",
            "gone is a link to a missing path",
        ),
        (["save.resume=none"], "save.resume", "none is neither a run nor a checkpoint"),
    ],
)
def test_what_is_refused(overrides: list[str], key: str, message: str, folder: Path) -> None:
    (folder / "chats.jsonl").write_text(chats("cba"))
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"question": 1}\n')
    (folder / "gone").symlink_to("nowhere")
    tools.write_model(folder / "no-tokenizer")
    (folder / "no-tokenizer/tokenizer.json").unlink()
    (folder / "linked").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "linked" / file.name).hardlink_to(file)
    (folder / "linked/vocab.txt").symlink_to("../chats.jsonl")
    found = refusals(*overrides)
    assert list(found) == [key] and message in found[key]


def test_links_of_a_model_are_followed_on_request(folder: Path) -> None:
    """A run that began before they were there may be resumed with them, too."""
    assert tools.invoke("--config", "run.toml", "train.max_steps=1").exit_code == 0
    (folder / "secret").write_text("secret")
    (folder / "model/vocab.txt").symlink_to("../secret")
    resume = "--config", "run.toml", "save.resume=runs/run", "train.max_steps=2"
    assert tools.invoke(*resume).exit_code == 2
    assert tools.invoke(*resume, "model.follow_links=true").exit_code == 0
    assert (folder / "runs/run/model/vocab.txt").read_text() == "secret"


def test_a_template_that_refuses_every_row(folder: Path) -> None:
    (folder / "chats.jsonl").write_text(chats(*["cba"] * 9))
    (folder / "strict.jinja").write_text("{{ raise_exception('no such role') }}")
    found = refusals("data.train.0.path=chats.jsonl", "data.chat_template=strict.jinja")
    assert "9 of 9 rows are bad" in found["data.train.0.path"] and "no such role" in found["data.train.0.path"]


def test_all_refusals_are_shown_at_once(folder: Path) -> None:
    overrides = "data.train.0.path=none.jsonl", "save.output_dir=run.toml/runs", "eval.questions=1"
    assert set(refusals(*overrides)) == {"data.train.0.path", "save.output_dir"}
    shown = " ".join(tools.invoke("plan", "--config", "run.toml", *overrides).stdout.split())
    start = "The run cannot start: command line,"
    assert f"{start} save.output_dir: cannot create a run in run.toml/runs" in shown and "Its memory fits." in shown
    assert f"{start} data.train.0.path: none.jsonl: no such data file or folder" in shown


def test_a_name_that_is_taken(folder: Path) -> None:
    """By an unfinished run with other settings, or by one that trains."""
    run = tools.train_here(folder, "save.save_steps=3")
    assert not refusals("train.seed=5"), "a finished run is not resumed"
    lines = run.events_path.read_text().splitlines(keepends=True)
    run.events_path.write_text("".join(lines[:-1]))
    assert not refusals("save.save_steps=3", "train.max_steps=9")
    assert "cannot be resumed with changed settings" in refusals("train.seed=5")["save.resume"]
    with run.events_path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = refusals("save.save_steps=3", "train.max_steps=9")
    assert "another process is training this run" in found["save.resume"]
    (run.path / "model/mine.txt").write_text("")
    assert "it holds mine.txt" in refusals("save.save_steps=3", "train.max_steps=9")["save.resume"]


def test_a_folder_in_which_nothing_can_be_created(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_creatable(folder / "a/b", "run")
    for name in ("x" * 300, "a\0b"):
        said = set[str]()
        for make in (check_creatable, RunDir.create):
            with pytest.raises(UserError, match=r"change save\.output_dir or log\.run_name") as raised:
                make(folder / "a", name)
            said.add(str(raised.value))
        assert len(said) == 1, "training says the same"
    with monkeypatch.context() as without:
        without.setattr(os, "pathconf", lambda *_: 0)  # the file system does not tell
        check_creatable(folder / "a/b", "run")
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(UserError, match="may not be written; change"):
        check_creatable(folder, "run")


def test_a_token_cache_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused unless it has the tokens of all files of the run."""
    (folder / "chats.jsonl").write_text(chats("cba"))
    (folder / "others.jsonl").write_text(chats("bca"))
    kept, access = folder / "kept", os.access
    overrides = "data.train.0.path=chats.jsonl", f"data.cache_dir={kept}"
    trained = tools.invoke("--config", "run.toml", *overrides, "train.max_steps=1")
    assert trained.exit_code == 0 and len([*kept.glob("*.safetensors")]) == 1

    def without_writing(place: str, mode: int, **options: bool) -> bool:
        return access(place, mode, **options) and not (mode & os.W_OK and Path(place) == kept)

    monkeypatch.setattr(os, "access", without_writing)
    assert not refusals(*overrides, "log.run_name=again")
    for other in (
        "data.train.0.path=others.jsonl",
        "data.assistant_only_loss=false",
        "data.val=[{path = 'others.jsonl'}]",
    ):
        found = refusals(*overrides, "log.run_name=again", other)
        assert list(found) == ["data.cache_dir"]
        assert f"{kept}: the token cache cannot be written: {kept} may not be written; set" in found["data.cache_dir"]
    monkeypatch.setattr("rptrain.data.excerpt.HASHED", 0)
    assert not refusals(*overrides, "log.run_name=again", "data.train.0.path=others.jsonl"), "too large to tell"


def test_samples_that_are_left_out_are_a_warning(folder: Path) -> None:
    question = '{"messages": [{"role": "user", "content": "abc"}]}\n'
    different = "".join(chats(f"b{number}") for number in range(300))
    (folder / "chats.jsonl").write_text(f"{chats('a')}{question}{different}")
    planned = tools.invoke("plan", "--config", "run.toml", "--json", "data.train.0.path=chats.jsonl")
    (found,) = json.loads(planned.stdout)["data_warnings"]
    assert found == "1 of 302 samples have no supervised token and are left out: chats.jsonl:2"
    (folder / "chats.jsonl").write_text(f"{question}{different}{chats('b') * 2000}")
    planned = tools.invoke("plan", "--config", "run.toml", "--json", "data.train.0.path=chats.jsonl")
    found = json.loads(planned.stdout)["data_warnings"][0]
    assert found == "1 of the first 1,024 samples have no supervised token and are left out: chats.jsonl:1"


@pytest.mark.parametrize("path", ["builtin:random", "chats.jsonl"])
def test_eos_ids_of_a_wrong_type_are_refused(folder: Path, path: str) -> None:
    (folder / "chats.jsonl").write_text(chats("cba"))
    (folder / "model/generation_config.json").write_text('{"eos_token_id": "<|end|>"}')
    found = refusals(f"data.train.0.path={path}")
    assert "generation_config.json: eos_token_id has '<|end|>': set it to a token id" in found["model.path"]


def test_validation_data_without_a_supervised_token_is_refused(folder: Path) -> None:
    (folder / "chats.jsonl").write_text("".join(chats(f"b{number}") for number in range(30)))
    (folder / "val.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    sets = ("data.train.0.path=chats.jsonl", 'data.val=[{path="val.jsonl"}]')
    planned = tools.invoke("plan", "--config", "run.toml", "--json", *sets)
    (found,) = json.loads(planned.stdout)["refusals"]
    assert planned.exit_code == 2 and found["key"] == "data.val.0.path"
    started = tools.invoke("train", "--config", "run.toml", *sets)
    assert started.exit_code == 2 and "no token of the data is supervised" in started.output


def test_what_cannot_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "tokenizer.json")

    monkeypatch.setattr("rptrain.preflight.checks.find_tokenizer", unreadable)
    planned = tools.invoke("plan", "--config", "run.toml", "--json")
    (found,) = json.loads(planned.stdout)["refusals"]
    assert planned.exit_code == 2 and found["key"] == "model.path"
    assert found["message"].startswith("tokenizer.json: Permission denied")


def test_checks_of_data_are_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*overrides: str) -> tuple[bool, dict[str, object]]:
        """Whether the tokenizer was loaded, and what the plan says about the data."""
        loaded = []
        with monkeypatch.context() as patched:
            patched.setattr(module, "find_tokenizer", lambda *given: loaded.append(1) or find_tokenizer(*given))
            found = tools.invoke("plan", "--config", "run.toml", "--json", "data.train.0.path=chats.jsonl", *overrides)
        plan = json.loads(found.stdout)
        return bool(loaded), {key: plan[key] for key in ("refusals", "warnings", "length")}

    (folder / "chats.jsonl").write_text(chats("cba") + '{"messages": []}\n' + chats(*["cba"] * 300))
    first, before = planned()
    assert first and before["warnings"] and planned() == (False, before)
    (entry,) = (folder / "cache/rptrain/plans").iterdir()
    entry.write_text("{}")
    assert planned() == (True, before), "a damaged file"
    assert planned("data.max_length=12")[0] and planned("train.global_batch_size=32")[0], "other settings"
    (folder / "chats.jsonl").write_text('{"messages": []}\n')
    for _ in range(2):
        assert planned()[0] and planned()[1]["refusals"], "other data, and refusals are found out again"
    (folder / "chats.jsonl").write_text(chats(*["cba"] * 40))
    assert planned()[0] and not planned()[0]
    (folder / "model/tokenizer.json").touch()
    assert planned()[0] and not planned()[0]
    (folder / "cache/rptrain/new.safetensors").touch()
    assert planned()[0], "training has tokenized data"
    (folder / "check.py").touch()
    with monkeypatch.context() as patched:
        patched.setattr(module, "CODE", ("check.py",))
        assert planned()[0], "other checks"
    (folder / "model/tokenizer.json").unlink()
    assert planned()[1]["refusals"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_plan_says_what_is_in_a_file_now(folder: Path, replaced: bool) -> None:
    """Also after a change that kept its size and its time."""

    def planned() -> list[dict[str, str]]:
        sets = ("--json", "data.train.0.path=rows.jsonl")
        return json.loads(tools.invoke("plan", "--config", "run.toml", *sets).stdout)["refusals"]

    path, bad = folder / "rows.jsonl", chats(*["cba"] * 40)
    path.write_text(bad.replace("messages", "message:", 3).replace("message:", "messages", 1))
    (refused,) = planned()
    assert "2 of 40 rows are bad" in refused["message"] and "`rptrain data clean`" in refused["message"]
    before = path.stat()
    for text, refusals in ((bad, 0), (bad.replace("messages", "message:", 1), 1)):
        other = folder / "other" if replaced else path
        other.write_text(text)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)
        assert path.stat().st_size == before.st_size and len(planned()) == refusals


def test_the_oldest_checks_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "KEPT", 2)
    for number in range(4):
        path = tmp_path / "plans" / f"{number}.json"
        plan_cache.store(path, plan_cache.DataChecks((str(number),), None))
        os.utime(path, (number, number))
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == ["2.json", "3.json"]
    (tmp_path / "file").write_text("")
    plan_cache.store(tmp_path / "file" / "1.json", plan_cache.DataChecks((), None))  # cannot be written
    plan_cache.store(tmp_path / "plans" / "5.json", plan_cache.DataChecks(("caf\udce9.jsonl",), None))  # not UTF-8
    assert len([*(tmp_path / "plans").iterdir()]) == 2


def test_checks_that_others_may_have_written_are_not_used(tmp_path: Path) -> None:
    first, second = tmp_path / "plans/1.json", tmp_path / "plans/2.json"
    checks = plan_cache.DataChecks(("a",), None)

    def stored(path: Path) -> bool:
        plan_cache.store(path, checks)
        return plan_cache.load(path) == checks

    assert stored(first) and (first.stat().st_mode & 0o777, first.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    first.chmod(0o660)
    assert plan_cache.load(first) is None and stored(first)
    first.parent.chmod(0o770)
    assert plan_cache.load(first) is None and stored(second) and not first.exists(), "it could have another's name"
    (tmp_path / "mine").write_text("mine")
    first.symlink_to(tmp_path / "mine")
    assert stored(first) and (tmp_path / "mine").read_text() == "mine"
    if os.geteuid() == 0:
        os.chown(first.parent, 4242, -1)
        assert not stored(first) and not stored(tmp_path / "plans/3.json")


def test_checks_that_ran_out_of_time_are_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan may read rows that this one did not reach."""
    (folder / "chats.jsonl").write_text(chats(*["cba"] * 300))
    with monkeypatch.context() as patched:
        patched.setattr(module, "PLANNING", PLANNING)
        patched.setattr("rptrain.data.excerpt.time", SimpleNamespace(monotonic=itertools.count(0, 1000).__next__))
        tools.invoke("plan", "--config", "run.toml", "--json", "data.train.0.path=chats.jsonl")
    assert not (folder / "cache/rptrain/plans").exists()
    cache = folder / "elsewhere/cache"
    tools.invoke("plan", "--config", "run.toml", "--json", "data.train.0.path=chats.jsonl", f"data.cache_dir={cache}")
    assert len([*(folder / "cache/rptrain/plans").iterdir()]) == 1 and not cache.exists()


def test_another_machine_needs_no_data(folder: Path) -> None:
    found = tools.invoke("plan", "--config", "run.toml", "--json", "--gpus", "1", "data.train.0.path=none.jsonl")
    assert found.exit_code == 2 and "engine.devices" in found.stderr  # run.toml names CPU workers
    there = ("--gpus", "1", "engine.devices=auto", "data.train.0.path=none.jsonl", "model.dtype=bfloat16")
    found = tools.invoke("plan", "--config", "run.toml", "--json", *there)
    assert found.exit_code == 0 and json.loads(found.stdout)["refusals"] == []
