"""Export a run or a checkpoint to a GGUF file: a model, or an adapter."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from rptrain.checkpoint import adapter_config
from rptrain.checkpoint.adapter import Adapter, saved_modules, shapes
from rptrain.checkpoint.atomic_dir import BASE, staged, sync_folder
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export import checked_target, export
from rptrain.checkpoint.export_progress import Report
from rptrain.checkpoint.result import checkpoint_of
from rptrain.checkpoint.state import dtype_of
from rptrain.checkpoint.target_lock import locked
from rptrain.data.loader import load_tokenizer
from rptrain.gguf import kinds, modelfile
from rptrain.gguf.convert import module, python, run
from rptrain.gguf.tools import FOLDER, MODELS, Tools, find
from rptrain.models.locate import read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.lora import without_adapters
from rptrain.models.weights import pretrained
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import from_here

MAGIC = b"GGUF"
TOKENIZER = "tokenizer_config.json"
NO_DRAFTS, DRAFTING = "--no-mtp", ("Qwen3_5", "Qwen3Next")  # and the architectures that may have such layers
MERGE = "use --merge to write the whole model with the adapters in its weights"


@dataclass(frozen=True)
class Written:
    """A GGUF file and the Modelfile beside it. `base`: the model that an adapter is for. `note`: on the template."""

    file: Path
    modelfile: Path
    kind: str
    base: str | None
    note: str

    def commands(self) -> str:
        """The commands that load it in llama.cpp and in Ollama."""
        file, described = quote(str(from_here(self.file))), quote(str(from_here(self.modelfile)))
        name = quote(self.file.stem.lower())
        loaded = f"-m {file}" if self.base is None else f"-m BASE.gguf --lora {file}"
        lines = [f"llama-cli {loaded}", f"ollama create {name} -f {described} && ollama run {name}"]
        if self.base is not None:
            converted = f"python ${FOLDER}/{MODELS} --outfile BASE.gguf {quote(self.base)}"
            lines.insert(0, f"{converted}  # the base model, which the adapter needs")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    """What is written from a checkpoint: to `to`, in the type `kind`. `lora`: the adapters, unless they are merged."""

    checkpoint: Path
    state: Mapping[str, Any]
    spec: ModelSpec
    to: Path
    kind: str
    lora: Adapter | None
    merge: bool
    converter: Path
    quantizer: Path | None


def modelfile_of(to: Path) -> Path:
    """The Modelfile beside a GGUF file."""
    return to.with_suffix(kinds.MODELFILE)


def export_gguf(
    source: Path,
    to: Path,
    kind: str | None = None,
    *,
    merge: bool = False,
    force: bool = False,
    report: Report | None = None,
    tell: Callable[[str], object] = lambda said: None,
) -> Written:
    """Writes the result of a run, or a checkpoint, to the GGUF file `to`, with a Modelfile beside it.

    Of adapters, an adapter is written, or with `merge` the whole model. `kind`: one of `kinds.ALL`; None: q8_0, and f32
    for an adapter. The export in the layout of Hugging Face, from which it is converted, is written beside the target
    and deleted. `report` and `tell`: as in `export`.

    UserError before anything is written if a program or package is missing, if the converter does not know the
    tokenizer, if llama.cpp cannot load the adapter, if a target is in the way (`force` replaces files), or as in
    `export`; later if a program fails. DiskFull if space is short.
    """
    checkpoint, said = checkpoint_of(source)
    state, spec = read_model(checkpoint)
    job = _job(checkpoint, state, spec, checked_target(to, source, checkpoint, state, force=force), kind, merge, find())
    for target in (job.to, modelfile_of(job.to)):
        _check_free(target, force)
    dtype = _dtype(job)
    with locked(job.to, force=False), staged(job.to, _needed(job, dtype)) as folder:
        if job.lora is None:
            vocabulary = folder / "vocabulary.gguf"
            options = ["--vocab-only", "--outfile", vocabulary, *_without_drafts(job)]
            run(python(job.converter, *options, checkpoint / BASE), vocabulary, "checking the tokenizer")
            vocabulary.unlink()
        # The run may go on: what it is found to have now may be newer.
        named = (lambda sentence: tell(f"{checkpoint}: {said}")) if said else tell
        model = export(checkpoint, folder / "model", dtype, merge=merge, report=report, tell=named)
        _prepare(model, job)
        made = _converted(model, job, folder)
        _check_magic(made)
        chat = modelfile.read_chat(model)
        own = f"./{job.to.name}"
        text = modelfile.text_of(chat, own) if job.lora is None else modelfile.text_of(chat, job.lora.base, own)
        described = folder / modelfile_of(job.to).name
        described.write_text(text, encoding="utf-8")
        for file in (described, made):
            _sync(file)
        for target in (job.to, modelfile_of(job.to)):  # they may have come meanwhile
            _check_free(target, force)
        described.replace(modelfile_of(job.to))
        made.replace(job.to)
        sync_folder(job.to.parent)
    return Written(job.to, modelfile_of(job.to), job.kind, None if job.lora is None else job.lora.base, chat.note)


def _job(
    checkpoint: Path,
    state: Mapping[str, Any],
    spec: ModelSpec,
    to: Path,
    kind: str | None,
    merge: bool,
    tools: Tools,
) -> _Job:
    """What is to be done. UserError if it cannot be, as far as that is known without doing it."""
    lora = state["meta"].get("lora")
    if merge and lora is None:
        raise UserError(f"{checkpoint} has no adapters to merge: export it without --merge")
    adapter = None if merge or lora is None else Adapter.of(lora)
    chosen = kinds.chosen(kind, adapter=adapter is not None)
    if adapter is not None and (refused := _refused(adapter, spec)):
        raise UserError(f"llama.cpp cannot load {refused}: {MERGE}")
    converter = tools.converter(adapter=adapter is not None)
    quantizer = tools.quantizer(chosen) if chosen in kinds.QUANTIZE else None
    return _Job(checkpoint, state, spec, to, chosen, adapter, merge, converter, quantizer)


def _refused(adapter: Adapter, spec: ModelSpec) -> str:
    """What an adapter has that llama.cpp cannot load; empty if it has nothing such."""
    if adapter.settings.use_dora:
        return "adapters with DoRA (lora.use_dora)"
    if adapter.settings.target_parameters:
        return "adapters of experts in PEFT's form (lora.target_parameters)"
    if saved := saved_modules(spec):
        return f"an adapter with modules that are trained in full ({', '.join(saved[:3])}; lora.modules_to_save)"
    return ""


def _check_free(target: Path, force: bool) -> None:
    """UserError if a file must not be written here."""
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise UserError(f"{target} is a folder or a link: move it away, or choose another file")
    if target.exists() and not force:
        raise UserError(f"{target} exists: choose another file, or add --force to replace it")


def _dtype(job: _Job) -> str | None:
    """The dtype of the export that is converted; None: the run's. Types that keep all bits come from master weights."""
    return "float32" if job.lora is not None else kinds.EXACT.get(job.kind)


def _needed(job: _Job, dtype: str | None) -> int:
    """The bytes that are on the disk at once while the file is written."""
    stored = dtype_of(job.state) if dtype is None else DTYPES[dtype]
    if job.lora is not None:
        weights = sum(torch.Size(shape).numel() for shape in shapes(job.spec).values())
        return weights * stored.itemsize + kinds.needed_bytes(job.kind, weights)
    spec = without_adapters(job.spec) if job.merge else job.spec
    weights = pretrained.stored_bytes(spec, torch.float32) // torch.float32.itemsize
    return pretrained.stored_bytes(spec, stored) + kinds.needed_bytes(job.kind, weights)


def _prepare(model: Path, job: _Job) -> None:
    """Changes the exported files so that the converter understands them.

    A GGUF file has one EOS token, the tokenizer's. If the data of the run ends replies with another one, it takes its
    place: llama.cpp finds the usual tokens that end texts by their names. The converter takes no notice of rsLoRA's
    scale, alpha / sqrt(r), so alpha is written so that alpha / r is the same.
    """
    if job.lora is not None and job.lora.settings.use_rslora:
        settings = job.lora.settings
        changed = {"use_rslora": False, "lora_alpha": settings.lora_alpha * sqrt(settings.r)}
        _change(model / adapter_config.CONFIG, changed)
    if job.lora is None and (ends := job.state["meta"].get("ends")):
        tokens = load_tokenizer(model).added_tokens_decoder
        if ends[0] in tokens:
            _change(model / TOKENIZER, {"eos_token": str(tokens[ends[0]])})


def _change(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(read_config(file) | dict(values)), encoding="utf-8")


def _converted(model: Path, job: _Job, folder: Path) -> Path:
    """The GGUF file of an export, which is deleted once it has been converted."""
    first = job.kind if job.kind in kinds.CONVERTER else kinds.BETWEEN
    made = folder / job.to.name
    options = ["--outfile", made, "--outtype", first]
    base = [] if job.lora is None else ["--base", job.checkpoint / BASE]
    options += base or _without_drafts(job)
    run(python(job.converter, *options, model), made, "converting to GGUF", MERGE if base else "")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    if job.kind == first:
        return made
    between = made.rename(folder / "between.gguf")
    if job.quantizer is None:
        command = module("rptrain.gguf.requantize", between, made, job.kind)
    else:
        command = [job.quantizer, between, made, job.kind.upper()]
    run(command, made, f"quantizing to {job.kind}")
    between.unlink()
    return made


def _without_drafts(job: _Job) -> list[str]:
    """The option that leaves out the layers that draft tokens. They are not trained, and the converter of models fails
    if it finds none. Versions without the option leave them out themselves.
    """
    drafting = job.spec.architecture.startswith(DRAFTING) and NO_DRAFTS in read_small_text(job.converter)
    return [NO_DRAFTS] if drafting else []


def _check_magic(file: Path) -> None:
    with open(file, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise UserError(
                f"{file.name} is not a GGUF file, although its converter reported no error: update llama.cpp"
            )


def _sync(file: Path) -> None:
    with open(file, "rb+") as stream:
        os.fsync(stream.fileno())
