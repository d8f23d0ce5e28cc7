"""The ways in which a step can be judged."""

from tests.verification.conftest import way

__all__ = ["way"]
