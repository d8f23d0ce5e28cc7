"""The ways in which a step can be judged."""

import pytest

from specq.verification import host_kernels, host_rows


@pytest.fixture(params=["at_once", "by_level", "portable"])
def way(request, monkeypatch):
    """The ways in which a step can be judged on a CPU: by the kernels, or by torch alone where they cannot be built."""
    if request.param == "portable":
        monkeypatch.setattr(host_kernels, "kernels", lambda: None)
    elif host_kernels.kernels() is None:
        pytest.skip("no C compiler")
    else:
        monkeypatch.setattr(host_rows, "MANY_LOGITS", 0 if request.param == "by_level" else 10**9)
    return request.param
