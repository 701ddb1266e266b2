"""Ours against Hugging Face's modelling code on tiny random models, through checkpoints both ways."""

import pytest
import torch
from torch import Tensor

from rptrain.models.decode.generate import generate
from rptrain.models.weights import pretrained
from tests.families import FAMILIES, VARIANTS

from .conftest import hugging_face


def by_stored_name(model) -> dict[str, Tensor]:
    """Gradients by the names of a checkpoint."""
    gradients, kinds = {}, FAMILIES[model.config.model_type].apart
    for name, parameter in model.named_parameters():
        if kinds is None or ".experts." not in name:
            gradients[name] = parameter.grad
            continue
        at, kind = name.rsplit(".", 1)
        for expert, gradient in enumerate(parameter.grad):
            pieces = (
                zip(kinds[:2], gradient.chunk(2), strict=True) if kind == "gate_up_proj" else [(kinds[2], gradient)]
            )
            gradients |= {f"{at}.{expert}.{piece}.weight": part for piece, part in pieces}
    if model.config.model_type == "minimax_m2":
        return {name.replace(".mlp.", ".block_sparse_moe."): gradient for name, gradient in gradients.items()}
    return gradients


def test_logits_and_every_gradient(checkpoint, native, micro_batch) -> None:
    theirs, directory = checkpoint
    ours = native(directory)
    torch.manual_seed(2)
    ids, labels = torch.randint(61, (2, 23)), torch.randint(61, (2, 23))
    labels[0, :5] = -100
    mb = micro_batch(ours.spec, [[23], [23]], labels.flatten())

    logits = theirs(ids).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    theirs.zero_grad()
    expected.backward()

    torch.testing.assert_close(ours.logits(ids.flatten(), mb), logits, rtol=1e-5, atol=1e-5)
    loss = ours.backward(ids.flatten(), mb)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    gradients, named = ours.gradients(), by_stored_name(theirs)
    assert gradients.keys() == named.keys()
    for name, gradient in named.items():
        size = gradient.abs().max().item()
        assert size > 0
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * size, msg=name)


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-moe-some-dense"])
def test_a_model_that_was_saved_without_its_head(variant, native, micro_batch, tmp_path) -> None:
    """Its names have no prefix, and its architecture is not that of a language model."""
    theirs = hugging_face(tmp_path / "whole", **VARIANTS[variant])
    theirs.model.save_pretrained(tmp_path / "inner")
    inner, whole = native(tmp_path / "inner"), native(tmp_path / "whole")
    assert inner.spec.architecture == type(theirs).__name__
    ids, mb = torch.arange(20), micro_batch(whole.spec, [[20]])
    assert torch.equal(inner.logits(ids, mb), whole.logits(ids, mb))


def test_packed_documents_match_separate_ones(checkpoint, native, micro_batch) -> None:
    theirs, directory = checkpoint
    ours = native(directory)
    torch.manual_seed(3)
    ids, lengths = torch.randint(61, (22,)), [5, 6, 1, 10]
    expected = torch.cat([theirs(document[None]).logits[0] for document in ids.split(lengths)])
    mb = micro_batch(ours.spec, [[5, 6], [1, 10]])
    torch.testing.assert_close(ours.logits(ids, mb), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpoint", ["qwen3.5-odd", "qwen3-next"], indirect=True)
def test_documents_of_several_chunks(checkpoint, native, micro_batch) -> None:
    """Of tokens that delta nets compute together: logits and every gradient, each document alone in transformers."""
    theirs, directory = checkpoint
    ours = native(directory)
    torch.manual_seed(3)
    lengths = [130, 64, 65, 1]
    ids, labels = torch.randint(61, (2, sum(lengths)))
    logits = torch.cat([theirs(document[None]).logits[0] for document in ids.split(lengths)])
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    mb = micro_batch(ours.spec, [lengths], labels)
    torch.testing.assert_close(ours.logits(ids, mb), logits, rtol=1e-5, atol=1e-5)
    ours.backward(ids, mb)
    for name, gradient in by_stored_name(theirs).items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(ours.gradients()[name], gradient, rtol=1e-5, atol=1e-5 * size, msg=name)


@pytest.mark.sample(35)
@pytest.mark.parametrize("max_shard_bytes", [5e9, 8000])
def test_what_we_save_transformers_loads(checkpoint, native, tmp_path, max_shard_bytes) -> None:
    from transformers import AutoModelForCausalLM

    theirs, directory = checkpoint
    ours = native(directory)
    pretrained.save(tmp_path, ours.spec, ours.view, torch.float32, max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 5e9)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(20)[None]
    again.set_attn_implementation("eager")
    again.set_experts_implementation("eager")
    assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.sample(20, gate=40)
def test_greedy_generation(checkpoint, native) -> None:
    theirs, directory = checkpoint
    ours = native(directory)
    torch.manual_seed(4)
    prompts = [torch.randint(61, (length,)).tolist() for length in (7, 1, 12)]

    def expected(prompt: list[int], eos: int | None) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()

    free = [expected(prompt, None) for prompt in prompts]
    assert generate(ours.spec, ours.params.__getitem__, prompts, 11) == free
    eos = free[0][4]
    stopped = generate(ours.spec, ours.params.__getitem__, prompts, 11, {eos})
    assert stopped == [expected(prompt, eos) for prompt in prompts]
    assert stopped[0] == free[0][: free[0].index(eos) + 1]
