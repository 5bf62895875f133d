"""A driver that only says that there is a device."""

from triton.backends.driver import DriverBase as _DriverBase


class Driver(_DriverBase):
    def __init__(self) -> None:
        pass

    @staticmethod
    def is_active() -> bool:
        return True


Driver.__abstractmethods__ = frozenset()
