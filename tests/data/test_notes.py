from collections import Counter

from rptrain.data import notes


def test_sentences_and_rules():
    counts = Counter()
    for _ in range(2):
        notes.count(counts, [notes.key_of("unknown_role", "asistant"), notes.key_of("calls")])
    notes.count(counts, [notes.key_of("ignored_key", "id"), notes.key_of("ignored_key", "tab\t")])
    ignored, roles = notes.sentences(counts)
    assert ignored.startswith("1 row with keys") and ignored.endswith(": `id`, `tab␉`")
    assert roles.startswith("2 rows with roles that") and roles.endswith(": `asistant`")
    assert notes.rules(counts, 0) == [notes.NOTES["calls"].rule]
    assert notes.rules(counts, 2) == [notes.NOTES["calls"].rule, notes.REFUSED]
    assert notes.rules(Counter(), 0) == [notes.BOUNDS]


def test_rows_are_counted_once_for_each_kind():
    counts = Counter()
    for name, rows in (("foo", 5), ("bar", 7)):
        for _ in range(rows):
            notes.count(counts, [notes.key_of("ignored_key", name), notes.key_of("ignored_key", "id")])
    (sentence,) = notes.sentences(counts)
    assert sentence.startswith("12 rows with keys") and sentence.endswith(": `bar`, `foo`, `id`")


def test_many_details_take_little_memory():
    counts = Counter()
    for number in range(1000):
        notes.count(counts, [notes.key_of("ignored_key", str(number))])
    assert len(counts) == notes.DETAILS and counts["ignored_key"] == 1000
    (sentence,) = notes.sentences(counts)
    assert sentence.startswith("1,000 rows with keys") and sentence.endswith("and 91 more")
