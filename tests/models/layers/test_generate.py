import pytest
import torch

from rptrain.models.layers.generate import generate
from rptrain.utils.errors import UserError

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def test_prompts_do_not_depend_on_one_another(fresh) -> None:
    model = fresh("Qwen3ForCausalLM", torch.float64)
    together = generate(model.spec, model.params.__getitem__, PROMPTS, 12)
    apart = [generate(model.spec, model.params.__getitem__, [prompt], 12)[0] for prompt in PROMPTS]
    assert together == apart and all(len(answer) == 12 for answer in together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype, fresh) -> None:
    model = fresh("LlamaForCausalLM", dtype)
    answers = generate(model.spec, model.params.__getitem__, PROMPTS, 3)
    exact = fresh("LlamaForCausalLM", torch.float32)
    for unit, source in zip(exact.params, model.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    expected = generate(exact.spec, exact.params.__getitem__, PROMPTS, 3)
    assert [answer[0] for answer in answers] == [answer[0] for answer in expected]


def test_sampling_follows_the_seed_and_the_temperature(fresh) -> None:
    model = fresh("Qwen3ForCausalLM")
    settings = (model.spec, model.params.__getitem__, PROMPTS, 20)
    first = generate(*settings, temperature=1.5, seed=3)
    assert generate(*settings, temperature=1.5, seed=3) == first
    assert generate(*settings, temperature=1.5, seed=4) != first
    assert generate(*settings, temperature=1e-4) == generate(*settings)


def test_nothing_to_do_and_bad_prompts(fresh) -> None:
    model = fresh("Qwen3ForCausalLM")
    assert generate(model.spec, model.params.__getitem__, [], 5) == []
    assert generate(model.spec, model.params.__getitem__, PROMPTS, 0) == [[], [], []]
    for prompts, problem in (([[1], []], "prompt 2 is empty"), ([[61]], "outside the vocabulary of 61")):
        with pytest.raises(UserError, match=problem):
            generate(model.spec, model.params.__getitem__, prompts, 5)
