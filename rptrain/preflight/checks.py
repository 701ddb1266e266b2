"""The checks before a run starts, apart from its plan, as far as they are quick.

Training makes these checks too, and stops at the first that fails; then it reads all data.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rptrain.checkpoint import adapter
from rptrain.checkpoint.adapter import AdapterFiles
from rptrain.checkpoint.atomic_dir import REPLACED, beside
from rptrain.checkpoint.export import check_names
from rptrain.config.resolve import Resolved
from rptrain.config.schema import Config, TrainSet
from rptrain.data import eos, padding, plan_cache
from rptrain.data.amount import Amount, amount_of, is_supervised, warnings_of
from rptrain.data.cache import check_folder, default_folder
from rptrain.data.datasets import check_vocabulary, find_tokenizer
from rptrain.data.excerpt import PLANNING, Excerpt, are_tokenized, check_readable, excerpt
from rptrain.data.loader import RANDOM, is_file_set
from rptrain.data.plan_cache import DataChecks
from rptrain.data.template import load_template
from rptrain.inference import evaluate, samples
from rptrain.models.base_files import check_base_files, check_links
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.pretrained import WeightFiles
from rptrain.preflight.model import find_files, lora_settings
from rptrain.runs.folder.event_log import check_not_training
from rptrain.runs.folder.run_dir import RunDir, check_creatable, find, forks
from rptrain.utils.errors import UserError, explained

TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}  # their modules
CODE = (__file__, evaluate.__file__, samples.__file__)  # checks of data are here, too


@dataclass(frozen=True)
class Refusal:
    """Why a run would not start, the key that this is about, and where that is set (see `Resolved.place`)."""

    key: str
    message: str
    place: str

    @property
    def text(self) -> str:
        """The message after a place, which may name the key already."""
        return self.message.removeprefix(f"{self.key}: ") if self.place.endswith(f", {self.key}") else self.message


@dataclass(frozen=True)
class CheckResults:
    """What was found out about a run that is not part of its plan. `amount`: None if it is unknown."""

    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    amount: Amount | None


def run_checks(resolved: Resolved, config: Config, model_dir: Path, spec: ModelSpec) -> CheckResults:
    """Checks a run on this machine. `config`: that of `resolved`, without "auto"."""
    checks, padding_row = Checks(resolved), None
    checks.make("log.report_to", check_trackers, config.log.report_to)
    with checks.about("save.resume"):
        resumed = _resumed(resolved)
        if resumed is None or forks(*resumed):
            checks.make("save.output_dir", check_creatable, config.save.output_dir, config.log.run_name or "run")
        check_other_files(config, model_dir, checks)
        if resumed is None or spec.frozen or spec.carried:
            with checks.about("model.path"):
                files = find_files(config, model_dir, spec)
                checks.make("train.method", check_adapters, config, files)
                if resumed is None and files is not None:
                    checks.make("lora.adapter", adapter_of, config, spec)
        if resumed is None:
            checks.make("model.path", padding.check, spec, model_dir)
            padding_row = padding.trained_without(spec)
    checks.make("data.cache_dir", check_token_cache, config, model_dir)
    data = check_data(config, model_dir, spec, padding_row, checks)
    return CheckResults(tuple(checks.refusals), data.warnings, data.amount)


class Checks:
    """Collects what checks refuse."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self.refusals: list[Refusal] = []

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """What the block raises ends the block and is a refusal about a key."""
        try:
            yield
        except (UserError, OSError) as error:
            message = str(explained(error) if isinstance(error, OSError) else error)
            self.refusals.append(Refusal(key, message, self._resolved.place(key)))

    def make(self, key: str, check: Callable[..., object], *given: Any) -> None:
        with self.about(key):
            check(*given)


def check_other_files(config: Config, model_dir: Path, checks: Checks) -> None:
    """Checks what checkpoints and exports copy from the model's folder."""
    checks.make("model.path", check_base_files, model_dir)
    if not config.model.follow_links:
        checks.make("model.path", check_links, model_dir)


def check_data(config: Config, model_dir: Path, spec: ModelSpec, padding_row: int | None, checks: Checks) -> DataChecks:
    """The checks of an earlier plan of the same data and tokenizer, or else those of this one."""
    path = None
    with suppress(UserError, OSError):  # of files that the checks below read, too
        path = plan_cache.path_of(config, model_dir, spec.vocab_size, padding_row, CODE)
    if path and (found := plan_cache.load(path)):
        return found
    refused, rows, amount, tokenizer = len(checks.refusals), _FirstRows(config, checks), None, None
    checks.make("data.chat_template", check_template, config)
    if len(checks.refusals) == refused:
        with checks.about("model.path"):
            tokenizer = find_tokenizer(config, model_dir)
    if len(checks.refusals) > refused:  # rows are not tokenized without a template and a tokenizer
        check_files(config, checks)
        return DataChecks((), None)
    with checks.about("model.path"):
        own_eos = eos.eos_ids(model_dir, spec.config, tokenizer)
        if config.eval.questions:
            checks.make("eval.questions", evaluate.check_questions, tokenizer)
        prompts = config.log.sample_prompts
        checks.make("log.sample_prompts", samples.encode_samples, tokenizer, prompts, spec.vocab_size)
        rows.read(tokenizer, spec.vocab_size, model_dir)
        rows.warn_of_ends(tokenizer, own_eos, padding_row)
        amount = rows.amount()
    found = DataChecks(tuple(rows.warnings), amount)
    if path and len(checks.refusals) == refused and not any(one.out_of_time for one in rows.excerpts):
        plan_cache.store(path, found)
    return found


def data_sets(config: Config) -> list[tuple[str, TrainSet]]:
    """The data sets of a config, with the keys of their paths."""
    sets = ("train", config.data.train), ("val", config.data.val)
    return [(f"data.{name}.{number}.path", source) for name, found in sets for number, source in enumerate(found)]


def check_files(config: Config, checks: Checks) -> None:
    """Checks what can be found out about data sets without a tokenizer."""
    for key, source in data_sets(config):
        checks.make(key, check_readable, source, config.data)


def check_template(config: Config) -> None:
    """UserError if data.chat_template is needed, and neither a template nor the name of one."""
    generates = config.eval.questions or config.log.sample_prompts
    needed = generates or any(source.path != RANDOM for _, source in data_sets(config))
    if needed and config.data.chat_template is not None:
        load_template(None, config.data.chat_template)


class _FirstRows:
    """Checks of the first rows of every data set, which are in `excerpts` if they could be read."""

    def __init__(self, config: Config, checks: Checks) -> None:
        self._config, self._checks = config, checks
        self.excerpts, self._train = list[Excerpt](), list[Excerpt]()
        self.warnings = list[str]()

    def read(self, tokenizer: Any, vocab_size: int, model_dir: Path) -> None:
        data, held_out = self._config.data, list[Excerpt]()
        for key, source in data_sets(self._config):
            with self._checks.about(key):
                one = excerpt(source, data, tokenizer, PLANNING)
                self.excerpts.append(one)
                if warning := one.check(data.max_bad_rows):
                    self.warnings.append(warning)
                check_vocabulary(max((part.stream.largest for part in one.parts), default=-1), vocab_size, model_dir)
                (self._train if key.startswith("data.train.") else held_out).append(one)
        if any(one.parts for one in held_out):
            with self._checks.about("data.val.0.path"):
                is_supervised(self._config, held_out)

    def warn_of_ends(self, tokenizer: Any, own_eos: frozenset[int], padding_row: int | None) -> None:
        """Warn of replies that end with other tokens than the EOS ids, and of a padding row that the data has."""
        ends = {token for one in self._train for token in one.tally.ends}
        if ends - own_eos:
            self.warnings.append(eos.sentence(sorted(ends - own_eos), tokenizer))
        streams = (part.stream for one in self._train for part in one.parts)
        if warning := padding.warning(padding_row, own_eos | ends, streams, tokenizer):
            self.warnings.append(warning)

    def amount(self) -> Amount | None:
        """The amount of the training sets; None if one of them could not be read."""
        if len(self._train) < len(self._config.data.train):
            return None
        with self._checks.about("data.max_length"):
            self.warnings += warnings_of(self._config, self._train)
            return amount_of(self._config, self._train)
        return None


def check_trackers(names: Sequence[str]) -> None:
    """UserError if trackers are not installed."""
    if missing := [name for name in names if find_spec(TRACKERS[name]) is None]:
        raise UserError(
            "\n".join(
                f'log.report_to names "{name}", but {TRACKERS[name]} is not installed: pip install "rptrain[{name}]", '
                "or remove it from log.report_to"
                for name in missing
            )
        )


def check_token_cache(config: Config, model_dir: Path) -> None:
    """UserError if the tokens of a file are not in the cache and cannot be written to it."""
    data = config.data
    sources = [source for source in (*data.train, *data.val) if is_file_set(source)]
    if not sources:
        return
    try:
        check_folder(Path(data.cache_dir) if data.cache_dir else default_folder())
    except UserError:
        with suppress(UserError, OSError):  # of the tokenizer or the files, which the checks of data find, too
            if are_tokenized(sources, data, find_tokenizer(config, model_dir)):
                return
        raise


def check_resumable(run: RunDir) -> None:
    """UserError if something is in the way of what a resumed run will write, such as its `model/` at the end."""
    run.check_folders()
    for path in (run.model_path, beside(run.model_path, REPLACED)):
        check_names(path)


def adapter_of(config: Config, spec: ModelSpec) -> AdapterFiles | None:
    """The adapter in `lora.adapter`, checked against the settings and the model."""
    lora = config.adapters
    if lora is None or lora.adapter is None:
        return None
    files = adapter.read(lora.adapter)
    adapter.check_settings(files, lora_settings(lora), config.model.path)
    adapter.check(files, spec)
    return files


def check_adapters(config: Config, files: WeightFiles | None) -> None:
    """UserError if adapters would be trained on random weights."""
    if config.adapters is not None and files is None:
        raise UserError(
            f"adapters need pretrained weights, but {config.model.path} starts from random ones: train all weights "
            "first, then set model.path to the trained model"
        )


def _resumed(resolved: Resolved) -> tuple[RunDir, Path] | None:
    """The run and the checkpoint that training would resume from. UserError if it could not."""
    found = find(resolved, warn=False)
    if found is not None and not forks(*found):
        check_resumable(found[0])
        check_not_training(found[0].events_path)
    return found
