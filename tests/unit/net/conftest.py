"""Async tests run in a loop whose clock jumps."""

from tests.unit.async_tests import loop, pytest_pyfunc_call

__all__ = ["loop", "pytest_pyfunc_call"]
