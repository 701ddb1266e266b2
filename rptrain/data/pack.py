"""Which documents share a row."""

from array import array

import numpy as np

BLOCK = 1 << 16  # documents that are numbers of Python at a time


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of documents whose lengths add up to at most `capacity`, by best-fit decreasing.

    Each document, the longest first, goes to the fullest row that has room for it (Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024, section 3). Rows lie on one stack for each remaining room,
    and the bits of an integer tell which stacks are not empty, so finding a row takes no search.

    Returns the documents, row by row, int64 [documents], and where each row begins among them, int64 [rows + 1].
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = array("i", bytes(4 * len(lengths)))  # of the documents in this order
    top = [-1] * capacity  # the last row that was put on each stack
    below = array("i")  # of each row, the row under it
    filled = 0  # bit r: some row has room for exactly r more tokens
    for start in range(0, len(order), BLOCK):
        for place, length in enumerate(lengths[order[start : start + BLOCK]].tolist(), start):
            fitting = filled >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = top[room]
                top[room] = below[row]
                if top[room] < 0:
                    filled ^= 1 << room
            else:
                row, room = len(below), capacity
                below.append(-1)
            row_of[place] = row
            if room > length:
                below[row] = top[room - length]
                top[room - length] = row
                filled |= 1 << (room - length)
    rows = np.frombuffer(row_of, np.int32)
    starts = np.zeros(len(below) + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=len(below)), out=starts[1:])
    return order[np.argsort(rows, kind="stable")], starts
