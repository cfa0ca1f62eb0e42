from .launch import BACKENDS, TARGET, Interpreted, backend, launch
from .native import Fault
from .parse import Unsupported

__all__ = ["BACKENDS", "TARGET", "Fault", "Interpreted", "Unsupported", "backend", "launch"]
