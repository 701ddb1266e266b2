"""Rows for other tasks than to imitate an answer: preferences, rewards of steps, images, audio and video."""

from typing import Any

from rptrain.data.values import is_blank

# Two answers, the better one first: TRL and most others, OpenAI, TRL's older reward trainer.
PAIRS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"), ("response_j", "response_k"))
WORSE = ("rejected_messages", "rejected_response", "rejected_responses")  # ms-swift: beside the better answer
CONTRASTS = ("positive_messages", "negative_messages")  # ms-swift: for embedding models and rerankers
SEVERAL = ("completions", "generations", "responses")  # answers of several models: UltraFeedback, distilabel
RATINGS = ("ratings", "scores", "ranks")
KINDS = {"image": "images", "audio": "audio", "video": "video"}
MEDIA = {f"{kind}{end}": kind for kind in KINDS for end in ("", "s", "_path", "_paths", "_url", "_urls", "_bytes")}
ADDRESSES = {key for key in MEDIA if "_url" in key}  # of a row, which may be where its text was found
KEYS = {key for pair in PAIRS for key in pair} | {*WORSE, *CONTRASTS, *SEVERAL, *MEDIA} - ADDRESSES
KEYS |= {"kto_tag", "label", "output", "rejected"}
KNOWN = ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"})
PLACEHOLDERS = ("<image>", "<audio>", "<video>")


class OtherTask(ValueError):
    """A row is for a task that rptrain does not train."""

    def __init__(self, what: str, keys: list[str], advice: str):
        super().__init__(
            f"{what} ({', '.join(keys)}), which rptrain does not train on: {advice}, or set `format` to take "
            "them as they are"
        )


def check_task(row: dict[str, Any]) -> None:
    """Raises OtherTask if the keys of a row say that it is for another task."""
    if KEYS.isdisjoint(row):
        return
    present = {key for key in row if row[key] is not None}
    known = any(keys <= present for keys in KNOWN)
    one = "give rows with one answer each"
    for pair in PAIRS:
        if present.issuperset(pair):
            raise OtherTask("preference data", sorted(pair), one)
    if known and isinstance(row.get("rejected"), str | list | dict) and not is_blank(row["rejected"]):
        raise OtherTask("preference data", ["rejected"], one)
    if worse := [key for key in WORSE if not is_blank(row.get(key))]:
        raise OtherTask("preference data", worse, one)
    if isinstance(row.get("output"), list) and "instruction" in present:  # LLaMA-Factory's older rankings
        raise OtherTask("preference data", ["output"], one)
    _check_kto(row, present, known)
    if "completions" in present and _are_flags(row.get("labels")):
        raise OtherTask("data with labels for steps", ["completions", "labels"], "give rows with `completion`")
    if not known and (several := [key for key in SEVERAL if _are_rated(row, key)]):
        raise OtherTask("data with several answers to a prompt", several, one)
    if contrasts := [key for key in CONTRASTS if not is_blank(row.get(key))]:
        raise OtherTask("data for embedding models", contrasts, one)
    if media := [key for key in MEDIA if key in present and key not in ADDRESSES and not is_blank(row[key])]:
        what = " and ".join(dict.fromkeys(KINDS[MEDIA[key]] for key in media))
        raise OtherTask(f"data with {what}", media, "give rows of text alone")


def _check_kto(row: dict[str, Any], present: set[str], known: bool) -> None:
    """KTO's rows have one answer, with a label for whether it is a good one."""
    good = "give rows with good answers, without the label"
    if not is_blank(row.get("kto_tag")) or row.get("kto_tag") is False:
        raise OtherTask("preference data for KTO", ["kto_tag"], good)
    label = row.get("label")
    boolean = isinstance(label, bool) or (isinstance(label, str) and label.lower() in ("true", "false"))
    number = {"prompt", "completion"} <= present and label in (0, 1, "0", "1")
    if known and (boolean or number):
        raise OtherTask("preference data for KTO", ["label"], good)


def _are_flags(labels: Any) -> bool:
    return isinstance(labels, list) and bool(labels) and all(isinstance(label, bool) for label in labels)


def _are_rated(row: dict[str, Any], key: str) -> bool:
    """Whether there are several answers under `key`, as objects or with ratings beside them."""
    answers = row.get(key)
    if not isinstance(answers, list) or len(answers) < 2:
        return False
    return all(isinstance(answer, dict) for answer in answers) or any(isinstance(row.get(key), list) for key in RATINGS)
