"""A real target in miniature and its own answers, as for the jobs of tests/ray."""

from tests.ray.conftest import model, sequences

__all__ = ["model", "sequences"]
