"""Rows for other tasks are refused by name, in the first row of a file and in any other."""

import json

import pytest

from rptrain.data.formats import Tally, read
from rptrain.data.row_format import RowFormat
from rptrain.utils.errors import UserError

SAID = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
CHAT = {"messages": SAID}
TURNS = {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "2"}]}
ALPACA = {"instruction": "Say 2.", "output": "2"}
PAIR = {"prompt": "2?", "completion": " 2"}
TEXT = {"text": "two"}
CASES = {
    "kto-messages": (CHAT | {"label": False}, "preference data for KTO (label)"),
    "kto-alpaca": (ALPACA | {"label": True}, "preference data for KTO (label)"),
    "kto-tag": (TURNS | {"kto_tag": False}, "preference data for KTO (kto_tag)"),
    "kto-csv": (CHAT | {"label": "False"}, "preference data for KTO (label)"),
    "kto-numbers": (PAIR | {"label": 0}, "preference data for KTO (label)"),
    "kto-csv-numbers": (PAIR | {"label": "1"}, "preference data for KTO (label)"),
    "dpo-without-prompt": ({"chosen": SAID, "rejected": SAID}, "preference data (chosen, rejected)"),
    "dpo-sharegpt": (TURNS | {"chosen": {"from": "gpt"}, "rejected": {}}, "preference data (chosen, rejected)"),
    "dpo-openai": ({"preferred_output": SAID, "non_preferred_output": SAID}, "preference data (non_preferred_output"),
    "a-worse-answer": (ALPACA | {"rejected": "3"}, "preference data (rejected)"),
    "ms-swift": (CHAT | {"rejected_response": "3"}, "preference data (rejected_response)"),
    "ms-swift-messages": (CHAT | {"rejected_messages": SAID}, "preference data (rejected_messages)"),
    "ranking": (ALPACA | {"output": ["2", "3"]}, "preference data (output)"),
    "ultrafeedback": (
        {"instruction": "2?", "completions": [{"response": "2"}, {"response": "3"}]},
        "data with several answers to a prompt (completions)",
    ),
    "distilabel": ({"prompt": "2?", "generations": ["2", "3"], "ratings": [5, 1]}, "(generations)"),
    "embedding": (CHAT | {"positive_messages": [SAID]}, "data for embedding models (positive_messages)"),
    "steps": (
        {"prompt": "2?", "completions": ["2", "3"], "labels": [True, False]},
        "data with labels for steps (completions, labels)",
    ),
    "images": (CHAT | {"images": ["a.jpg"]}, "data with images (images)"),
    "image": (TURNS | {"image": "x.jpg"}, "data with images (image)"),
    "image-path": (ALPACA | {"image_path": "x.jpg"}, "data with images (image_path)"),
    "audio": (
        CHAT | {"audios": [{"path": "a.wav"}], "videos": ["b.mp4"]},
        "data with audio and video (audios, videos)",
    ),
    "caption": (TEXT | {"image": {"bytes": "AAAA", "path": None}}, "data with images (image)"),
}
RIGHT = {
    "topic": CHAT | {"label": "arithmetic", "output": None},
    "topic-number": CHAT | {"label": 1},
    "null-label": CHAT | {"label": None, "kto_tag": None, "rejected_response": ""},
    "no-media": CHAT | {"images": [], "image": "", "videos": [None], "audio": {"bytes": None, "path": None}},
    "nan": CHAT | {"images": float("nan"), "label": float("nan")},  # pandas, for a column that other rows have
    "csv": CHAT | {"images": "[]", "audios": "null", "image_path": " "},
    "url": TEXT | {"image_url": "https://example.org/a.jpg", "label": True},
    "scores": CHAT | {"score_chosen": 8.0, "score_rejected": 2.0},
    "generations": CHAT | {"generations": ["2", "3"], "ratings": [5, 1]},
}


@pytest.fixture
def parse(tmp_path):
    def parse(rows, format="auto"):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tally = Tally()
        return list(read(tmp_path / "rows.jsonl", RowFormat(format), tally)), tally

    return parse


@pytest.mark.parametrize("case", CASES)
def test_rows_for_other_tasks(parse, case):
    row, what = CASES[case]
    with pytest.raises(UserError) as caught:
        parse([row])
    assert ": this is " in str(caught.value) and what in str(caught.value)
    assert "which rptrain does not train on: give rows" in str(caught.value) and "`format`" in str(caught.value)
    found, tally = parse([CHAT, row, CHAT])
    assert len(found) == 2 and tally.bad == 1 and tally.notes == {"other_task": 1}
    assert tally.first[0].startswith("2: ") and what in tally.first[0]


@pytest.mark.parametrize("case", RIGHT)
def test_rows_that_are_not_for_other_tasks(parse, case):
    found, tally = parse([RIGHT[case]])
    assert len(found) == 1 and not tally.bad and not tally.notes


@pytest.mark.parametrize(
    ("case", "format"),
    [("kto-messages", "messages"), ("kto-tag", "sharegpt"), ("images", "messages"), ("caption", "text")],
)
def test_an_explicit_format_overrides(parse, case, format):
    found, tally = parse([CASES[case][0]], format)
    assert len(found) == 1 and not tally.bad and not tally.notes


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "who?", "images": ["a.jpg"]}, "a message has `images`"),
        ({"content": [{"type": "text", "text": "who?"}, {"type": "image"}]}, "a part of type 'image'"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "a part of type 'input_audio'"),
    ],
)
def test_media_within_messages(parse, message, reason):
    found, tally = parse([{"messages": [{"role": "user", **message}, SAID[1]]}])
    assert not found and reason in tally.first[0]


def test_placeholders_without_media_are_noted(parse):
    first = {"messages": [{"role": "user", "content": "<image>who?"}, SAID[1]], "images": []}
    found, tally = parse([first, TEXT, first | {"images": ["a.jpg"]}])
    assert len(found) == 1 and tally.bad == 2
    assert tally.notes == {"placeholder": 1, "placeholder:<image>": 1, "other_task": 1}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_an_image_in_a_table(tmp_path, name):
    import pyarrow
    from pyarrow import ipc, parquet

    def write(images):
        table = pyarrow.table(
            {
                "messages": [SAID] * len(images),
                "image": pyarrow.array(
                    images, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
                ),
            }
        )
        if name == "rows.parquet":
            parquet.write_table(table, tmp_path / name)
        else:
            with ipc.new_stream(tmp_path / name, table.schema) as writer:
                writer.write_table(table)

    write([{"bytes": b"\xff\xd8", "path": None}])
    with pytest.raises(UserError, match=r"this is data with images \(image\)"):
        read(tmp_path / name)
    write([None, {"bytes": None, "path": None}, {"bytes": b"\xff", "path": None}])
    tally = Tally()
    assert [example.line for example in read(tmp_path / name, tally=tally)] == [1, 2] and tally.bad == 1
