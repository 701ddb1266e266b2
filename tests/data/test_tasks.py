import pytest

from rptrain.data.tasks import TASKS, questions, score, split_of


def payload(question):
    return question.prompt.removeprefix(TASKS[question.task].phrase)


def test_answers_are_right():
    solved = {
        "reverse": lambda text: "".join(reversed(text)),
        "capitals": lambda text: "".join(chr(ord(letter) - 32) for letter in text),
        "sort": lambda text: "".join(digit * text.count(digit) for digit in "0123456789"),
    }
    for question in questions("train", 300):
        assert 3 <= len(payload(question)) <= 5
        assert question.answer == solved[question.task](payload(question))
        assert [message["role"] for message in question.messages] == ["user", "assistant"]


def test_held_out_questions_are_never_trained_on():
    trained = {payload(question) for seed in range(3) for question in questions("train", 4000, seed)}
    held_out = {payload(question) for seed in range(3) for question in questions("test", 500, seed)}
    assert not trained & held_out
    assert {split_of(text) for text in trained} == {"train"}


def test_questions_follow_from_split_and_seed():
    assert questions("train", 50, 1) == questions("train", 50, 1) == questions("train", 90, 1)[:50]
    assert questions("train", 50, 1) != questions("train", 50, 2)
    assert [question.task for question in questions("test", 6)] == list(TASKS) * 2


def test_score_for_each_task_and_overall():
    asked = questions("test", 9)
    answers = [question.answer for question in asked]
    assert score(asked, answers) == {"overall": 1, "reverse": 1, "capitals": 1, "sort": 1}
    answers[0] += " "
    shares = score(asked, answers)
    assert shares["reverse"] == pytest.approx(2 / 3) and shares["overall"] == pytest.approx(8 / 9)
    assert set(score(asked[:1], answers[:1])) == {"overall", "reverse"}
    with pytest.raises(ValueError, match="zip"):
        score(asked, answers[:-1])
