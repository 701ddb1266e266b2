"""The row of `pad_token_id` in the embedding gets no gradient from look-ups, as in transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rptrain.engine.memory.store import ModelStore
from rptrain.kernels.batch import Batch
from rptrain.models.families import registry
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.engine import runs
from tests.families import FAMILIES, VARIANTS

from ..layouts import layout_of
from .conftest import COMMON, hugging_face
from .test_configs import MISTRAL

PAD = 7
ROWS = {  # variants of models, and their padding tokens
    **{next(iter(cases.variants)): PAD for cases in FAMILIES.values()},
    **dict.fromkeys(("llama-tied", "qwen2-tied"), PAD),
    "mistral-no-window": -1,
}
RATE, DECAY, EPS = 1e-2, 0.1, 1e-3  # an epsilon far above the errors of gradients, which AdamW would divide by


def batch_of(ids: Tensor) -> Batch:
    """A micro-batch for each row, whose labels are the next tokens."""
    labels = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
    return Batch(
        input_ids=ids,
        positions=torch.arange(ids.shape[1]).repeat(len(ids), 1),
        labels=labels,
        documents=((ids.shape[1],),) * len(ids),
        sequences=1,
        length=ids.shape[1],
        supervised=labels[labels >= 0].numel(),
    )


def native_step(directory: Path, ids: Tensor, plan: str) -> tuple[dict[str, Tensor], float]:
    """Weights after a step of the engine, and the gradient norm."""
    spec = registry.build(registry.model_config(directory))
    with ModelStore(spec, layout_of(torch.float32, generations=1)) as store:
        pretrained.load(pretrained.check(directory, spec), spec, store.stored_view)
        store.loaded()
        options = {"asynchronous": False, "weight_decay": DECAY, "max_grad_norm": 0.5, "eps": EPS}
        _, (norm,), weights, _ = runs.train(store, [batch_of(ids)], plan, rate=RATE, **options)
    return weights, norm


@pytest.mark.sample(8)
@pytest.mark.parametrize("variant", ROWS)
def test_a_step_equals_that_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = hugging_face(tmp_path / "before", **VARIANTS[variant], pad_token_id=ROWS[variant])
    torch.manual_seed(5)
    ids = torch.randint(61, (4, 12))
    ids[:, 3:6] = row = ROWS[variant] % 61
    plan = f"FB0-{theirs.config.num_hidden_layers} | N=2 M=4 MR=4"
    ours, norm = native_step(tmp_path / "before", ids, plan)

    undecayed = ("norm", "bias", "sinks", "A_log")
    plain = [p for name, p in theirs.named_parameters() if any(word in name for word in undecayed)]
    others = [p for p in theirs.parameters() if all(p is not other for other in plain)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, RATE, runs.BETAS, EPS, DECAY)
    theirs(ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    lookups = theirs.get_input_embeddings().weight
    assert (lookups.grad[row].abs().max() > 0) == theirs.config.tie_word_embeddings
    optimizer.step()
    theirs.save_pretrained(tmp_path / "after")

    assert norm == pytest.approx(expected.item(), rel=1e-6)
    spec = registry.build(registry.model_config(tmp_path / "after"))
    with ModelStore(spec, layout_of(torch.float32, generations=1)) as store:
        pretrained.load(pretrained.check(tmp_path / "after", spec), spec, store.stored_view)
        for name, tensor in runs.checkpoint_tensors(store).items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_which_row_it_is() -> None:
    """As torch.nn.Embedding counts; null is none, and a missing key is the default of the architecture."""
    assert registry.build(MISTRAL).padding_row is None
    assert registry.build({**MISTRAL, "pad_token_id": 5}).padding_row == 5
    assert registry.build({**MISTRAL, "pad_token_id": -1}).padding_row == MISTRAL["vocab_size"] - 1
    for wrong in ("5", 5.0, True, [5]):
        with pytest.raises(UserError, match="pad_token_id must be a token id or null"):
            registry.build({**MISTRAL, "pad_token_id": wrong})


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    assert AutoConfig.for_model(kind).pad_token_id == FAMILIES[kind].padding
    architecture = registry.MODEL_TYPES[kind]
    given = {**COMMON, "head_dim": 8, **FAMILIES[kind].layers, "architectures": [architecture]}
    del given["pad_token_id"]
    assert registry.build(given).padding_row == FAMILIES[kind].padding
    assert registry.build({**given, "pad_token_id": None}).padding_row is None


def test_a_text_model_in_a_larger_one_has_its_own() -> None:
    """transformers does not hand down that of the whole model."""
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "pad_token_id": 5}
    text = {**MISTRAL, "architectures": None}
    assert registry.build({**whole, "text_config": text}).padding_row is None
    assert registry.build({**whole, "text_config": {**text, "pad_token_id": 9}}).padding_row == 9
