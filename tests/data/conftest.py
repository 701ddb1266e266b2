import pytest

from .tokenizer import make


@pytest.fixture(scope="session")
def tokenizer():
    return make()
