"""Packing of documents into sequences."""

from array import array

import numpy as np

from rptrain.utils.liveness import progressed

BLOCK = 1 << 16  # documents that are converted to Python ints at a time


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs documents into sequences of at most `capacity` tokens by best-fit decreasing.

    Each document, the longest first, goes to the fullest sequence that has room for it (Ding et al., "Fewer
    Truncations Improve Language Modeling", 2024, section 3). There is a stack of sequences for each amount of
    remaining room, and the bits of an integer tell which stacks are not empty, so no search is needed.

    Returns the documents, sequence by sequence, int64 [documents], and the index of the first document of each
    sequence, int64 [sequences + 1].
    """
    order = np.argsort(-lengths, kind="stable")
    sequence_of = array("i", bytes(4 * len(lengths)))  # sequence of each document, in this order
    top = [-1] * capacity  # the top sequence of each stack
    below = array("i")  # the sequence below each sequence on its stack
    filled = 0  # bit r: some sequence has room for exactly r more tokens
    for start in range(0, len(order), BLOCK):
        progressed()
        for place, length in enumerate(lengths[order[start : start + BLOCK]].tolist(), start):
            fitting = filled >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                sequence = top[room]
                top[room] = below[sequence]
                if top[room] < 0:
                    filled ^= 1 << room
            else:
                sequence, room = len(below), capacity
                below.append(-1)
            sequence_of[place] = sequence
            if room > length:
                below[sequence] = top[room - length]
                top[room - length] = sequence
                filled |= 1 << (room - length)
    sequences = np.frombuffer(sequence_of, np.int32)
    starts = np.zeros(len(below) + 1, np.int64)
    np.cumsum(np.bincount(sequences, minlength=len(below)), out=starts[1:])
    return order[np.argsort(sequences, kind="stable")], starts
