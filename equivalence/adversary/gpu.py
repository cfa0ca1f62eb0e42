"""The runner on a GPU: one captured graph of poison, producer and kernels, replayed for every attack.

In a graph the producer and what follows are launched together, so even a stall of a few microseconds overlaps. Outside
of one the stall must exceed the host's gap between two launches.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernel import Kernel
from reference.stage import Role

from .attack import Hang, Trial
from .image import LATE, Image
from .kernels import CHUNK, CLOCK, CTAS, occupier, producer
from .subjects import Subject

DEADLINE = 5.0  # seconds a replay may take; a stall is a millisecond
HOLD_NS = 20_000_000  # how long the occupier holds its SMs
TARDY_NS = 10_000  # the stall under an occupier


def wait(seconds: float = DEADLINE) -> None:
    """Wait for the current stream. Raises Hang after so many seconds."""
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            raise Hang(f"not ended after {seconds:g} s")


class Gpu:
    """One subject on one device, its words in `arena`, which kernels and producer share."""

    def __init__(self, made: Subject, image: Image, truth: Tensor, device: torch.device | str = "cuda"):
        self.made, self.image = made, image
        self.truth = truth.to(device)
        self.start, self.arena = torch.empty_like(self.truth), torch.empty_like(self.truth)
        self.stall = torch.zeros(1, dtype=torch.int64, device=device)
        self.times = torch.zeros(2, CTAS, dtype=torch.int64, device=device)
        self.producer = producer(image.size)
        weights = {n: v.to(device) for n, v in made.values.items() if n not in image.args}
        self.calls = [
            (k, [image.view(self.arena, a.name) if a.role is not Role.WEIGHT else weights[a.name] for a in k.args])
            for k in made.kernels
        ]
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def launch(self, late: bool) -> None:
        self.arena.copy_(self.start)
        if late:
            self.producer(self.stall, self.truth, self.arena, self.times)
        for kernel, tensors in self.calls:
            kernel(*tensors)

    def graph(self, late: bool) -> torch.cuda.CUDAGraph:
        """The launches as a graph, after one run outside of it, which compiles and loads."""
        if late not in self.graphs:
            self.stall.zero_()
            self.start.copy_(self.truth)
            self.launch(late)
            wait()
            self.graphs[late] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[late]):
                self.launch(late)
        return self.graphs[late]

    def plain(self, start: Tensor) -> Tensor:
        """The words after the kernels alone, launched outside of a graph."""
        self.start.copy_(start)
        torch.cuda.synchronize()
        self.launch(False)
        wait()
        return self.arena.clone()

    def replay(self, start: Tensor) -> Tensor:
        """The words after a replay of the captured kernels on other inputs."""
        graph = self.graph(False)
        self.start.copy_(start)
        torch.cuda.synchronize()
        graph.replay()
        wait()
        return self.arena.clone()

    def late(self, start: Tensor, stall_us: float, runs: int, expected: Tensor) -> Trial:
        graph = self.graph(True)
        self.start.copy_(start)
        self.stall.fill_(int(stall_us * 1000))
        wrong, where, late = 0, "", False
        for _ in range(runs):
            torch.cuda.synchronize()
            graph.replay()
            wait()
            if torch.equal(self.arena, expected):
                continue
            wrong += 1
            if not where:
                word = int((self.arena != expected).nonzero()[0])
                where, late = self.image.locate(word), int(self.arena[word]) == LATE
        return Trial(runs, wrong, where, late)

    def occupied(self, free: int, expected: Tensor) -> tuple[bool, bool]:
        """A late run while all but `free` SMs are taken: (right bits, ended while they were taken). Raises Hang."""
        device = self.truth.device
        taken = occupier(torch.cuda.get_device_properties(device).multi_processor_count - free)
        hold = torch.zeros(1, dtype=torch.int64, device=device)
        seen = torch.zeros(taken.args[1].shape, dtype=torch.int64, device=device)
        taken(hold, seen)  # loads it
        graph = self.graph(True)
        self.start.copy_(self.image.start(self.truth, self.image.produced, self.made.wrong))
        self.stall.fill_(TARDY_NS)
        hold.fill_(HOLD_NS)
        torch.cuda.synchronize()
        side, gone = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(side):
            taken(hold, seen)
            gone.record()
        time.sleep(0.002)  # every SM but the free ones is taken before the replay
        main = torch.cuda.Stream()
        with torch.cuda.stream(main):
            graph.replay()
            wait()
            beside = not gone.query()
        torch.cuda.synchronize()
        return torch.equal(self.arena, expected), beside


@dataclass(frozen=True)
class Overlap:
    """Of one replay, in us: how long before the producer's first CTA ended the last CTA after it had begun (negative:
    it began later), and how long after the producer's last end the first CTA passed its wait."""

    stall: float
    ahead: float
    passed: float


def overlaps(stalls, device: torch.device | str = "cuda") -> list[Overlap]:
    """The clocks of producer and dependent in a graph, per stall: the proof that a stall is seen by a dependent."""
    words = torch.zeros(CHUNK, dtype=torch.int32, device=device)
    late = producer(len(words))
    stall = torch.zeros(1, dtype=torch.int64, device=device)
    times, seen = (torch.zeros(2, CTAS, dtype=torch.int64, device=device) for _ in range(2))

    def launch():
        late(stall, words, words, times)
        CLOCK(seen)

    launch()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    found = []
    for us in stalls:
        stall.fill_(int(us * 1000))
        torch.cuda.synchronize()
        graph.replay()
        wait()
        (_, ends), (entries, passed) = times.tolist(), seen.tolist()
        found.append(Overlap(us, (min(ends) - max(entries)) / 1e3, (min(passed) - max(ends)) / 1e3))
    return found


def host_gap(kernel: Kernel, *tensors: Tensor, launches: int = 200) -> float:
    """Microseconds of host time between two launches of a kernel outside of a graph."""
    kernel(*tensors)
    wait()
    begin = time.perf_counter()
    for _ in range(launches):
        kernel(*tensors)
    gap = (time.perf_counter() - begin) / launches * 1e6
    wait()
    return gap
