"""Documents of made-up tokens, and rows of them."""

import numpy as np

from rptrain.data.pieces import piece
from rptrain.data.sequences import build
from rptrain.data.tokens import Document, gather


def stream_of(documents, masks=None, divisible=False, name="f"):
    masks = masks or [[True] * len(document) for document in documents]
    made = (
        Document(line, np.array(ids, np.int32), np.array(mask, bool), divisible)
        for line, (ids, mask) in enumerate(zip(documents, masks, strict=True), 1)
    )
    return gather(made, name)


def laid_out(documents, max_length, masks=None, *, packing=True, seed=0, divisible=False, overlong="truncate"):
    """The rows of documents, given as lists of token ids; without masks all tokens are supervised."""
    stream = stream_of(documents, masks, divisible)
    pieces = piece([stream], max_length, overlong)
    pieces.trimmed.warn()
    return build([stream], pieces, packing=packing, pad_id=0, seed=seed)


def tokens_of(rows):
    """Token ids and labels of all rows, as lists."""
    ids, labels = rows.take(range(len(rows)))
    return ids.tolist(), labels.tolist()
