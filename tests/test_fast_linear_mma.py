"""The ring of linear_mma under pressure: bulk copies must not overtake the reads of the stage they overwrite.

Alone on an SM the copies never catch up. With neighbours that fill the queues of shared memory, and weights in L2, a
kernel without the fence was wrong in 1 to 7 of 100 launches on an H200.
"""

from dataclasses import replace

import pytest
import torch

import fast.linear_mma as module
from equivalence.order import mutant
from fast import linear
from fast.linear_mma import MmaConfig
from fast.linear_tuned import TUNED

bf16 = torch.bfloat16
ROUND, ROUNDS = 8, 250
WORST = MmaConfig(16, 1, 1, 8, 512, 6, 1, True)  # of those tried: 7 of 100
FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none is visible")


def wrong_launches(kernel, M: int, N: int, K: int) -> int:
    """How many of ROUND * ROUNDS launches differ from a launch alone; in a graph, each between a projection that makes
    its x and one that reads its output."""
    generator = torch.Generator().manual_seed(M)

    def made(*shape):
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to("cuda", bf16)

    def tuned(n, k):
        return linear.linear_kernel(linear.choose_config(M, n, k, "sm_90a"), M, n, k, k, n)

    source, end = made(M, 1536), made(M, 7168)
    before, w_before, after, w_after = tuned(K, 1536), made(K, 1536), tuned(7168, N), made(7168, N)
    x, w, out = [made(M, K) for _ in range(ROUND)], made(N, K), [made(M, N) for _ in range(ROUND)]

    def step(wait=lambda: None):
        for a, b in zip(x, out, strict=True):
            for one, tensors in ((before, (source, w_before, a)), (kernel, (a, w, b)), (after, (b, w_after, end))):
                one(*tensors)
                wait()

    step(torch.cuda.synchronize)
    want = out[0].clone()
    graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        step()
    for _ in range(ROUNDS):
        for t in (*x, *out):
            t.fill_(float("nan"))
        graph.replay()
        wrong += sum((t.view(torch.int16) != want.view(torch.int16)).any() for t in out)
    return int(wrong)


def reusing() -> dict[str, tuple]:
    """Tuned configurations with bulk copies into stages that were read before."""
    found = {}
    for (N, K), by_tokens in TUNED.items():
        for M, cfg in by_tokens.items():
            if isinstance(cfg, MmaConfig) and cfg.bulk and K // cfg.bk // cfg.splits > cfg.stages:
                found[f"m{M}-n{N}-k{K}"] = cfg, M, N, K
    return found


@needs_gpu
@pytest.mark.parametrize("case", [("worst", (WORST, 1, 2112, 7168)), *reusing().items()], ids=lambda c: c[0])
def test_no_launch_is_wrong_beside_others(case):
    """0 of 2000: with 95 % confidence fewer than 15 of 10,000."""
    cfg, *shape = case[1]
    assert wrong_launches(linear.linear_kernel(cfg, *shape, shape[2], shape[1]), *shape) == 0


@needs_gpu
def test_the_pressure_shows_a_missing_fence():
    kernel = linear.linear_kernel(WORST, 1, 2112, 7168, 7168, 2112)
    broken = replace(kernel, name=kernel.name + "-no-fence", entry=mutant(module, [(FENCE, "pass")]).mma_entry)
    assert wrong_launches(broken, 1, 2112, 7168) > 0


def test_the_fence_stands_between_reads_and_arrival():
    """In SASS for sm_90a: FENCE.VIEW.ASYNC after the last LDSM and before the arrival; the mutant has none there."""

    def between(entry) -> str:
        from equivalence.isa import cubin

        kernel = replace(linear.linear_kernel(WORST, 1, 2112, 7168, 7168, 2112), entry=entry)
        build = kernel.compile("sm_90a")
        text = cubin.disassemble([(build.cubin, build.symbol)], "sm_90a")[0]
        tail = text[text.rindex("LDSM") :]
        return tail[: tail.index("SYNCS.ARRIVE")]

    assert "FENCE.VIEW.ASYNC" in between(module.mma_entry)
    assert "FENCE.VIEW.ASYNC" not in between(mutant(module, [(FENCE, "pass")]).mma_entry)


def test_there_are_rings_to_test():
    assert len(reusing()) >= 8
