"""Side streams for independent work of a step: branches of a captured graph, nothing at all on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lanes:
    """Streams that start where the current stream is and that it waits for in `join`.

    What a lane allocates may be read after `join`; what it reads must live until then.
    """

    def __init__(self, device: torch.device, count: int):
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []
        self.used: set[torch.cuda.Stream] = set()

    @contextmanager
    def lane(self, index: int) -> Iterator[None]:
        """Work inside goes to lane `index` (modulo their number)."""
        if not self.streams:
            yield
            return
        stream = self.streams[index % len(self.streams)]
        self.used.add(stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The current stream waits for every lane used since the last join (others may lie outside a capture)."""
        for stream in self.used:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.used.clear()
