import pytest
import torch


@pytest.fixture
def one_torch_thread():
    """As the engine sets it: the threads of a pool are the only ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
