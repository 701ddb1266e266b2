from collections import Counter

from rptrain.data import notes


def test_sentences_and_rules():
    counts = Counter()
    for _ in range(2):
        notes.count(counts, [notes.key_of("unknown_role", "asistant"), notes.key_of("calls")])
    notes.count(counts, [notes.key_of("ignored_key", "id"), notes.key_of("ignored_key", "tab\t")])
    ignored, roles = notes.sentences(counts)
    assert ignored == "1 row: keys are ignored: `id`, `tab␉`"
    assert roles.startswith("2 rows with roles that") and roles.endswith(": `asistant`")
    assert [rule.partition(" are")[0] for rule in notes.rules(counts)] == ["tool calls and tools"]


def test_many_details_take_little_memory():
    counts = Counter()
    for number in range(1000):
        notes.count(counts, [notes.key_of("ignored_key", str(number))])
    assert len(counts) == notes.DETAILS + 1 and counts["ignored_key"] == 900
    (sentence,) = notes.sentences(counts)
    assert sentence.startswith("900 rows: ") and sentence.endswith("and 92 more")
