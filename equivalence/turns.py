"""Who uses a GPU at a time: tests share it, but for those that measure time on it. They take it alone.

Two locks in files that the processes of one user share: `use` is held while a test runs, by all that share or by one
alone; `gate` only while it is taken, so that nobody enters in front of one that waits to be alone. A process that dies
gives both back.
"""

import fcntl
import os
import tempfile
from pathlib import Path


class Turns:
    """The locks of one device, by a name that all processes give it."""

    def __init__(self, device: str, folder: str | None = None):
        place = Path(folder or tempfile.gettempdir())
        names = [place / f"k3-{os.getuid()}-{device}.{lock}" for lock in ("gate", "use")]
        self.gate, self.use = (os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in names)

    def take(self, alone: bool) -> None:
        """Wait until nobody is alone, or, to be alone, until nobody is there."""
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def give(self) -> None:
        fcntl.flock(self.use, fcntl.LOCK_UN)
