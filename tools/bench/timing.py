"""Timing in one run: CUDA graphs over rotated copies, variants interleaved, medians and spread.

A variant is a list of calls, one per copy of its weights and state; a graph holds all of them back to back, as the
launches of a decode step follow each other. Copies together exceed L2 several times, so no call finds its bytes there.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 7
COPIES, CACHE = 8, 4  # least copies of a variant's data, and how many times they exceed L2 together
TARGET_US = 20_000  # one measurement replays graphs for about this long


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median over the rounds, fastest and slowest round."""

    us: float
    low: float
    high: float


def copies(call_bytes: int) -> int:
    """How many copies a call of that many bytes needs; small ones are held to 256."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(COPIES, min(256, -(-CACHE * l2 // call_bytes)))


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls in order, after each has run once by itself (compilation, allocation, autotuning)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure(variants: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, Timing]:
    """Time the variants against each other; their order turns from round to round."""
    graphs = {name: (capture(calls), len(calls)) for name, calls in variants.items()}
    replays = {name: max(3, int(TARGET_US / max(_time(graph, 3), 1e-3))) for name, (graph, _) in graphs.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for round_ in range(ROUNDS):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            graph, calls = graphs[name]
            found[name].append(_time(graph, replays[name]) / calls)
    return {name: Timing(statistics.median(t), min(t), max(t)) for name, t in found.items()}


def _time(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds of one replay, averaged over `replays`."""
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def bandwidth() -> dict[str, float]:
    """Bytes per microsecond of this GPU over 4 GiB: a copy by its SMs (bytes read plus written) and a read (a sum)."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * 4
    times = measure({"copy": [lambda: torch.neg(source, out=target)], "read": [lambda: source.sum()]})
    return {"copy": 2 * size / times["copy"].us, "read": size / times["read"].us}
