"""The balanced binary tree in which partial sums of replicas are added: their number alone determines the order."""

from collections.abc import Iterator, Sequence


def additions(count: int) -> Iterator[tuple[int, int]]:
    """Pairs (i, j), in order: partial sum j is added to partial sum i. The total is then in 0."""
    for level in range((count - 1).bit_length()):
        stride = 1 << level
        for to in range(0, count - stride, 2 * stride):
            yield to, to + stride


def subtrees(part: range, count: int) -> Sequence[range]:
    """The maximal subtrees, of the tree over `count` partial sums, whose leaves all belong to `part`.

    Their totals are all that the rest of the tree needs of these partial sums.
    """
    found, start = [], part.start
    while start < part.stop:
        size = 1
        while start % (2 * size) == 0 and min(start + 2 * size, count) <= part.stop and size < count:
            size *= 2
        stop = min(start + size, count)
        found.append(range(start, stop))
        start = stop
    return found


def joins(roots: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The additions of the tree over `count` partial sums that are left when each subtree that begins at one of
    `roots` is added up. The subtrees cover all partial sums.
    """
    present = {*roots}
    for to, source in additions(count):
        if to in present and source in present:
            present.discard(source)
            yield to, source
