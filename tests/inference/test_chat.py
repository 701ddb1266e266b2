"""Conversations: turns, another try, stopping, and what is refused. Whole ones with a run's model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rptrain.inference.chat import Chat
from rptrain.inference.free_memory import free_memory
from rptrain.inference.generate import Request, stream_text
from rptrain.inference.load import LoadedChat
from rptrain.inference.settings import AnswerSettings
from rptrain.models.decode.cache import cache_bytes
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from .letters import letters_chat, letters_spec

GREEDY = AnswerSettings(temperature=0, max_new_tokens=6)


@pytest.fixture
def chat() -> Chat:
    chat = letters_chat()
    chat.settings = GREEDY
    return chat


def test_a_turn_continues_what_was_said_and_computes_only_what_is_new(chat: Chat) -> None:
    first = "".join(chat.ask("abc"))
    assert chat.turns[0].answer == first and chat.tuned.speed is not None and chat.tuned.speed.prompt == 3
    second = "".join(chat.ask("d"))
    held = 3 + len(first) - 1  # keys and values of the last token were not needed
    assert chat.tuned.speed.prompt == len(f"abc\n{first}\nd") - 3, "the line end that the transcript adds differs"
    fresh = letters_chat()
    fresh.settings = GREEDY
    fresh.turns = chat.turns[:1]
    assert "".join(fresh.ask("d")) == second and fresh.tuned.speed is not None
    assert fresh.tuned.speed.prompt > held


def test_another_try_takes_back_and_draws_other_tokens(chat: Chat) -> None:
    chat.settings = AnswerSettings(temperature=2.0, top_p=1.0, max_new_tokens=12)
    tries = {"".join(chat.ask("abc")), *("".join(chat.retry()) for _ in range(3))}
    assert len(tries) == 4 and len(chat.turns) == 1 and chat.turns[0].said == "abc"
    assert chat.take_back() == "abc" and not chat.turns
    with pytest.raises(UserError, match="nothing was said yet"):
        chat.retry()
    again = letters_chat()
    again.settings = chat.settings
    assert "".join(again.ask("abc")) in tries, "the first answer follows the seed"


def test_another_try_that_is_refused_leaves_the_earlier_answer(chat: Chat) -> None:
    first = "".join(chat.ask("abc"))
    chat.settings = replace(GREEDY, top_p=0)
    with pytest.raises(UserError, match="top-p"):
        list(chat.retry())
    assert [(turn.said, turn.answer) for turn in chat.turns] == [("abc", first)]


def test_keys_and_values_take_no_more_than_what_was_checked(chat: Chat) -> None:
    chat.settings = replace(GREEDY, max_new_tokens=100)
    list(chat.ask("a" * 250))
    assert 0 < chat.tuned.cache_nbytes <= cache_bytes(letters_spec(), 1, 350, torch.float32)


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(chat: Chat) -> None:
    pieces: Any = chat.ask("abc")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert chat.turns[0].answer == said and len(said) == 2
    assert len("".join(chat.ask("d"))) == GREEDY.max_new_tokens


def test_the_base_model_keeps_its_own_answers(chat: Chat) -> None:
    assert chat.base is not None
    first = "".join(chat.ask("abc"))
    assert "".join(chat.ask_base()) == first, "the same weights"
    assert chat.turns[0].base_answer == first
    chat.turns[0].base_answer = "other"
    list(chat.ask("d"))
    list(chat.ask_base())
    assert chat.base.speed is not None and chat.base.speed.prompt == len("\nother\nd")


@pytest.mark.parametrize(
    ("said", "settings", "free", "message"),
    [
        ("a\ud800", GREEDY, 1 << 40, "not UTF-8"),
        ("a" * 401, GREEDY, 1 << 40, "401 tokens, more than 8 times .* reset it"),
        ("a", GREEDY, 1000, "keys and values of up to 7 tokens take .* lower the number of new tokens"),
        ("a", replace(GREEDY, top_p=0), 1 << 40, "top-p must be above 0"),
        ("a", replace(GREEDY, temperature=float("nan")), 1 << 40, "temperature must be a finite"),
        ("a", replace(GREEDY, max_new_tokens=0), 1 << 40, "at least 1 new token"),
    ],
)
def test_what_is_refused_was_not_said(said: str, settings: AnswerSettings, free: int, message: str) -> None:
    chat = letters_chat(free)
    chat.settings = settings
    with pytest.raises(UserError, match=message):
        list(chat.ask(said))
    assert not chat.turns


def test_a_system_prompt_comes_first(chat: Chat) -> None:
    chat.system = "zz"
    list(chat.ask("abc"))
    assert chat.tuned.speed is not None and chat.tuned.speed.prompt == len("zz\nabc")


@pytest.mark.long
def test_a_run_answers_as_generate_does_and_beside_its_base(tmp_path) -> None:
    """Adapters are switched off, unless other modules were trained too: then the base model is loaded."""
    tools.write_model(tmp_path / "model")
    lora = ("lora.r=3", "optim.learning_rate=0.1")
    for name, more in (("plain", ()), ("norm", ("lora.modules_to_save=['model.norm']",))):
        run = tools.train_here(tmp_path, *lora, *more, f"log.run_name={name}")
        loaded = LoadedChat(run.path, free_memory())
        assert loaded.model.source == run.model_path and loaded.model.has_adapters_only is (name == "plain")
        loaded.chat.settings = GREEDY
        answer = "".join(loaded.chat.ask("Sort: 321"))
        asked = (["Sort: 321"], GREEDY.max_new_tokens, 0.0, 0, False)
        assert [answer] == tools.generated(run.path, *asked)
        assert ["".join(piece or "" for (piece,) in stream_text(Request(run.path, *asked), free_memory()))] == [answer]
        loaded.load_base()
        (expected,) = tools.generated(tmp_path / "model", *asked)
        assert "".join(loaded.chat.ask_base()) == expected != answer
    full = tools.train_here(tmp_path, "optim.learning_rate=0.1", "log.run_name=full")
    for source in (full.path, full.model_path, full.checkpoints()[-1]):
        loaded = LoadedChat(source, free_memory())
        loaded.load_base()
        loaded.chat.settings = GREEDY
        list(loaded.chat.ask("Sort: 321"))
        assert "".join(loaded.chat.ask_base()) == expected
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights; the run began with random ones"):
        LoadedChat(full.path, free_memory()).load_base()
