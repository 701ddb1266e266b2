"""Chat templates by name, for base models without one, and the text of `data.chat_template`."""

from os.path import isfile
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.text import not_utf8

NAMES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "vicuna")


def text_of(given: str) -> str:
    """The Jinja text of `data.chat_template`: the path of a file, one of NAMES, or a Jinja text.

    A file with one of the names is used in place of the template. Raises UserError if it is none of these.
    """
    if not given.strip():
        raise UserError(f"data.chat_template is empty: set it to a Jinja file, or to one of {', '.join(NAMES)}")
    if "{" in given:
        return given
    path = Path(given)
    if not isfile(path):
        if given not in NAMES:
            names = ", ".join(NAMES)
            raise UserError(f"data.chat_template: {path} is neither a file nor a Jinja template, nor one of {names}")
        path = Path(__file__).with_name(f"{given}.jinja")
    try:
        return read_small_text(path)
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path} is {not_utf8(error.object[error.start])}") from error
