"""Tiny tensors: torch's second thread would only wait, and on a busy machine spin."""

import pytest
import torch

from specq.verification import host_rows


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["at_once", "by_level", "portable"])
def way(request, monkeypatch):
    """The ways in which a step can be judged on a CPU: by the kernels, or by torch alone where they cannot be built."""
    if request.param == "portable":
        monkeypatch.setattr(host_rows, "kernels", lambda: None)
    elif host_rows.kernels() is None:
        pytest.skip("no C compiler")
    else:
        monkeypatch.setattr(host_rows, "MANY_LOGITS", 0 if request.param == "by_level" else 10**9)
    return request.param
