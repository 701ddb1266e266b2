import pytest
import torch

from rptrain.models.decode.cache import cache_bytes
from rptrain.models.decode.generate import Sampling, _choose, generate, new_cache, stream
from rptrain.models.layers.keys_values import LEAST
from rptrain.utils.errors import UserError
from tests.models.transforms.test_delta_net import random_model, spec_with

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


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "MistralForCausalLM", "GptOssForCausalLM"])
def test_a_conversation_that_keeps_its_cache_answers_as_one_without(name, fresh, monkeypatch) -> None:
    """With windows and sinks, in pieces of fewer queries than there are new tokens, and after a change."""
    monkeypatch.setattr("rptrain.models.layers.keys_values.QUERIES", 3)
    model = fresh(name, torch.float64)
    spec, weights = model.spec, model.params.__getitem__
    cache = new_cache(spec, weights)
    said = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [5], [1] * 11]
    prompt: list[int] = []
    for number, tokens in enumerate(said):
        prompt = prompt + tokens
        answer = [token for (token,) in stream(spec, weights, [prompt], 6, cache=cache)]
        assert [answer] == generate(spec, weights, [prompt], 6), f"turn {number}"
        prompt = prompt + answer if number != 1 else prompt[:5]
    assert len(cache.tokens[0]) == len(prompt) - 1


def test_a_recurrent_state_continues_a_conversation_or_starts_again() -> None:
    model = random_model(spec_with())
    spec, weights = model.spec, model.params.__getitem__
    together = generate(spec, weights, PROMPTS, 8)
    assert together == [generate(spec, weights, [prompt], 8)[0] for prompt in PROMPTS]
    cache, prompt = new_cache(spec, weights), [1, 2, 3]
    for number, kept in enumerate((0, 8, 0, 15)):  # the first tokens of the third prompt are others
        assert cache.keep(0, prompt) == kept
        answer = [token for (token,) in stream(spec, weights, [prompt], 6, cache=cache)]
        assert [answer] == generate(spec, weights, [prompt], 6), f"turn {number}"
        prompt = [*prompt, *answer, 5] if number != 1 else [*prompt[:4], 7, 8, 9, 1, 2, 3]
    assert cache.nbytes == cache_bytes(spec, 1, 100, torch.float64)


def test_a_cache_holds_what_was_computed_and_shares_what_is_equal(fresh) -> None:
    model = fresh("Qwen3ForCausalLM")
    cache = new_cache(model.spec, model.params.__getitem__)
    steps = stream(model.spec, model.params.__getitem__, [[1, 2, 3]], 9, cache=cache)
    first, second = next(steps)[0], next(steps)[0]
    steps.close()  # type: ignore[attr-defined]
    assert cache.tokens == [[1, 2, 3, first]] and second is not None
    assert cache.nbytes == (3 + LEAST) * (cache_bytes(model.spec, 1, 1, torch.float32))
    assert cache.keep(0, [1, 2, 4, 5]) == 2 and cache.tokens == [[1, 2]]
    assert cache.keep(0, [1, 2]) == 1, "the last token's output is needed"


class Recurrent:
    """A state that stays whole or is lost."""

    nbytes = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def keep(self, sequence: int, tokens: int) -> int:
        self.tokens = tokens if tokens == self.tokens else 0
        return self.tokens


def test_a_sequence_is_cut_back_to_where_every_state_can_be(fresh) -> None:
    model = fresh("Qwen3ForCausalLM")
    for tokens, stay in (([1, 2, 3, 4], 3), ([1, 2, 4, 5], 0), ([1, 2, 3], 0)):
        cache = new_cache(model.spec, model.params.__getitem__)
        cache.place([[1, 2, 3]])
        cache.hold()
        cache.states.append(Recurrent(3))
        assert cache.keep(0, tokens) == len(cache.tokens[0]) == stay


def test_answers_are_drawn_from_the_most_likely_tokens() -> None:
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()

    def drawn(top_p: float) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {int(_choose(logits, Sampling(1.0, top_p), generator)) for _ in range(300)}

    assert [drawn(top_p) for top_p in (1e-9, 0.39, 0.41, 0.69, 0.71, 1.0)] == [
        {0},
        {0},
        {0, 2},
        {0, 2},
        {0, 2, 3},
        {0, 1, 2, 3},
    ]
