"""Checkpoints that are exported or generate text, and folders to export to."""

from collections.abc import Iterator

from benchmarks.bad_inputs.case import RUN_GENERATE, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import (
    deleted,
    directory,
    dumped,
    fifo,
    link,
    rehashed,
    rights,
    text,
    values,
)
from benchmarks.bad_inputs.resumes import LAST, UNIT, manifest, meta, named, unit

AREA = "exports"
EXPORT = ("export", "runs/x", "--to", "out")
BASE = f"{LAST}/base"
SETTINGS = {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}
FROZEN = {"patterns": ["*"], "drawn": False, "seed": 0, "sha256": {}}
# Number of exporting, number of generating (0: none), name, edits of the last checkpoint, outcome, what a refusal names
CHECKPOINTS: tuple[tuple[int, int, str, tuple[Edit, ...], Outcome, str], ...] = (
    (322, 323, "unchanged", (), "taken", ""),
    (440, 441, "unit of other bytes", (text(UNIT, b"\1" * 39232), rehashed(LAST)), "refused", "layers.0"),
    (442, 0, "unit empty", (text(UNIT, b""), rehashed(LAST)), "refused", "layers.0"),
    (443, 444, "unit missing", (deleted(UNIT), rehashed(LAST)), "refused", "layers.0"),
    (445, 446, "unit of another shape", unit("shape", [1]), "refused", "checkpoint-6"),
    (447, 448, "adapter in a list", meta(lora=[1]), "refused", "lora"),
    (449, 450, "adapter without settings", meta(lora={"base": "x"}), "refused", "lora"),
    (451, 452, "unknown setting", meta(lora={"base": "x", "settings": SETTINGS | {"no": 1}}), "refused", "lora"),
    (453, 454, "frozen tensors of no file", meta(frozen=FROZEN), "refused", ""),
    (
        455,
        0,
        "state without content",
        (text(f"{LAST}/trainer_state.json", "{}"), rehashed(LAST)),
        "refused",
        "trainer_state",
    ),
    (456, 457, "base without a config", (deleted(f"{BASE}/config.json"), rehashed(LAST)), "refused", "config.json"),
    (458, 459, "base without a tokenizer", (deleted(f"{BASE}/tokenizer.json"), rehashed(LAST)), "refused", "tokenizer"),
    (
        460,
        461,
        "base of more layers",
        (values(f"{BASE}/config.json", {"num_hidden_layers": 4}), rehashed(LAST)),
        "refused",
        "",
    ),
    (
        462,
        463,
        "base of another size",
        (values(f"{BASE}/config.json", {"hidden_size": 64}), rehashed(LAST)),
        "refused",
        "",
    ),
    (464, 465, "manifest names a file outside", manifest(named("../../../../../outside/secret.txt")), "refused", ""),
    (466, 0, "manifest names 5,000 characters", manifest(named("x" * 5000)), "refused", "checkpoint-6"),
    (467, 468, "run without checkpoints", (deleted("runs/x/checkpoints"),), "refused", "runs/x"),
)
OWN_MARKER = {"format": 1, "kind": "export", "files": {"notes.txt": {"size": 6, "sha256": "0" * 64}}}
USER = (text("o/notes.txt", "notes\n"),)

# Number, name, target, outcome, and edits
TARGETS: tuple[tuple[int, str, str, Outcome, tuple[Edit, ...]], ...] = (
    (469, "a folder of the user", "o", "refused", USER),
    (470, "beside a folder of the user named like a temporary one", "o", "either", (text("o.partial/notes.txt", "x"),)),
    (
        767,
        "beside a folder of the user with the hidden name",
        "o",
        "either",
        (text(".o.rptrain-partial/notes.txt", "x"),),
    ),
    (471, "beside a folder of the user named like a replaced one", "o", "either", (text("o.replaced/notes.txt", "x"),)),
    (472, "beside a file of that name", "o", "either", (text("o.partial", "x"), text(".o.rptrain-partial", "x"))),
    (473, "beside a link of that name", "o", "either", (link(".o.rptrain-partial", "../outside/folder"),)),
    (474, "the run itself", "runs/x", "refused", ()),
    (475, "a checkpoint", LAST, "refused", ()),
    (476, "the checkpoints", "runs/x/checkpoints", "refused", ()),
    (477, "the run's model", "runs/x/model", "either", ()),
    (478, "units of a checkpoint", f"{LAST}/units", "refused", ()),
    (479, "a new folder in a checkpoint", f"{LAST}/new", "refused", ()),
    (480, "a new checkpoint", "runs/x/checkpoints/checkpoint-9", "refused", ()),
    (481, "no name", "", "refused", ()),
    (482, "this folder", ".", "refused", ()),
    (483, "the root", "/", "refused", ()),
    (484, "this folder by its parent", "../work", "refused", ()),
    (485, "beside this folder", "../outside/x", "either", ()),
    (486, "name like an option", "-rf", "either", ()),
    (487, "two new folders", "a/b", "either", ()),
    (488, "name of a device of another system", "con", "either", ()),
    (489, "name of 300 bytes", "x" * 300, "refused", ()),
    (490, "name of 250 bytes", "x" * 250, "either", ()),
    (491, "line end in the name", "a\nb", "either", ()),
    (492, "name that is not UTF-8", "\udcff", "either", ()),
    (493, "a file", "data.jsonl", "refused", ()),
    (494, "under a file", "data.jsonl/x", "refused", ()),
    (495, "a pipe", "f", "refused", (fifo("f"),)),
    (496, "/proc", "/proc/x", "refused", ()),
    (497, "a device", "/dev/full", "refused", ()),
    (498, "a link to nothing", "l", "either", (link("l", "nope"),)),
    (499, "a link to an empty folder", "l", "either", (directory("e"), link("l", "e"))),
    (500, "a link to itself", "l", "refused", (link("l", "l"),)),
    (501, "a link outside", "l", "refused", (link("l", "../outside/folder"),)),
    (502, "a marker that names a file of the user", "o", "refused", (*USER, dumped("o/complete.json", OWN_MARKER))),
    (503, "folders without files", "o", "either", (directory("o/a"), directory("e"), link("o/b", "../e"))),
    (765, "a folder of the system", "/usr", "refused", ()),
)


def cases() -> Iterator[Case]:
    answers = deleted("runs/x/model")  # else the exported model generates
    for exporting, generating, name, edits, expected, shown in CHECKPOINTS:
        exported: Outcome = "either" if exporting == 458 else expected
        yield Case(exporting, AREA, f"exporting: {name}", EXPORT, exported, edits, shown)
        if generating:
            yield Case(generating, AREA, f"generating: {name}", RUN_GENERATE, expected, (*edits, answers), shown)
    for number, name, target, expected, edits in TARGETS:
        makes = {485: ("../outside/x",), 487: ("a",), 499: ("l", "e"), 498: ("l", "nope")}.get(number, (target,))
        changes = (target,) if number in (477, 498, 499, 503) else ()
        if expected == "refused":
            makes = changes = ()
        args = ("export", "runs/x", "--to", target)
        yield Case(number, AREA, f"to {name}", args, expected, edits, makes=makes, changes=changes)
    closed = (rights("runs", 0o555), rights(".", 0o555))
    yield Case(504, AREA, "to a folder without the right to write", EXPORT, edits=closed, as_user=True)
    for number, name, args, shown in (
        (505, "a source that is missing", ("nope", "--to", "o"), "nope"),
        (506, "a source that is a file", ("data.jsonl", "--to", "o"), "data.jsonl"),
        (507, "a source that is a model", ("model", "--to", "o"), "model"),
        (508, "a source that is an export", ("runs/x/model", "--to", "o"), "runs/x/model"),
        (509, "an unknown dtype", ("runs/x", "--to", "out", "--dtype", "int8"), "int8"),
        (510, "merging without adapters", ("runs/x", "--to", "out", "--merge"), "--merge"),
    ):
        yield Case(number, AREA, f"exporting: {name}", ("export", *args), names=shown)
    as_checkpoint = (
        directory("runs/x/checkpoints/checkpoint-9"),
        text("runs/x/checkpoints/checkpoint-9/config.json", "{}"),
    )
    yield Case(766, AREA, "exporting: beside an export named like a checkpoint", EXPORT, "either", as_checkpoint)
    linked = (link("out", "../outside/folder"),)
    yield Case(748, AREA, "exporting: over a link outside", EXPORT, edits=linked, makes=())
