"""Skinny GEMM twin: out[M, N] = x[M, K] w[N, K]^T for M = 1..64, bf16 in and out, fp32 accumulation, one rounding.

Four forms. `linear_fma` streams weights into registers, for the fewest tokens: fp32 FMA, no shared memory between a
weight and its use. `linear_mma` streams them through shared memory into tensor cores, for more tokens. `linear_wgmma`
streams them into registers that warpgroup tensor cores read, for the most tokens; only sm_90a has those, so sm_100a and
sm_103a get the best of the other forms. `linear_direct` loads a K of a few steps straight into tensor core operands.
Which form and which split of the work is a table over (N, K, M), with an estimate for what was not measured. The order
of the additions follows the configuration, so a row's last bit may depend on M; for one M a result never varies.
M is part of the code of fma alone: the others serve every M up to a `bucket` with one code.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import torch

from reference import kda, mla
from reference.config import Config, deep, k3_rank, mini
from reference.stage import ContractError, Role, twin

from .kernel import ARCHS, Arg, Kernel
from .linear_direct import STEP, DirectConfig, direct_entry
from .linear_fma import SWEEP, FmaConfig, fma_entry, sweeps
from .linear_mma import PAD, MmaConfig, mma_entry
from .linear_tuned import HOPPER, TUNED
from .linear_wgmma import CHUNK, WgmmaConfig, wgmma_entry

SMS = 132  # of an H200; a GB300 has 148 to 152, where one wave of these grids fits as well
SMEM = 232448  # bytes of shared memory a CTA may use on all targets
REGISTERS = 65536  # of an SM
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of tokens that share code: at most a third, and 8 of 24, do idle work
FMA_TOKENS = 4  # above, FMA and the conversions to fp32 cost more than the weights' arrival
WGMMA_TOKENS = 2  # up to here fma is as fast or faster; at 4 and 8 wgmma won four of five measured shapes
ALIGN = 8  # elements of 16 bytes
GPCS = (16, 16, 16, 16, 16, 16, 18, 18)  # SMs of an H200's clusters of processors; a cluster of CTAs stays in one
CLOCK = 1755.0  # cycles per microsecond
WGMMA_ARCHS = ("sm_90a",)
SLOW = ("more than one wave", "SMs idle", "too few bytes in flight", "uneven last pass", "whole groups of tokens idle")
LinearConfig = FmaConfig | MmaConfig | DirectConfig | WgmmaConfig


def why_not(cfg: LinearConfig, M: int, N: int, K: int) -> str | None:
    """Why a configuration is illegal or hopeless for a shape, or None."""
    rules = {
        FmaConfig: why_not_fma,
        MmaConfig: why_not_mma,
        DirectConfig: why_not_direct,
        WgmmaConfig: why_not_wgmma,
    }
    return rules[type(cfg)](cfg, M, N, K)


def why_not_direct(cfg: DirectConfig, M: int, N: int, K: int) -> str | None:
    if K % STEP:
        return "K is no whole number of loads"
    if cfg.registers(K) > 120:
        return "operands do not fit in registers"
    if cfg.tokens > 8 and cfg.tokens >= M + 8:
        return "whole groups of tokens idle"
    return None


def why_not_fma(cfg: FmaConfig, M: int, N: int, K: int) -> str | None:
    passes = -(-N // (cfg.ctas * cfg.warps * cfg.rows))
    if sweeps(K) % cfg.depth:
        return "depth does not divide the sweeps of K"
    if 4 * cfg.rows * cfg.depth > 112:
        return "more than 112 registers of weights"
    if cfg.rows * M > 8:
        return "accumulators crowd out weights"
    if cfg.warps * 32 * registers_fma(cfg) > REGISTERS:
        return "registers of a CTA do not fit"
    flight = 512 * cfg.rows * cfg.depth * cfg.warps * min(cfg.ctas, SMS * residents_fma(cfg))
    if flight < min(5e6, 0.9 * N * max(K, SWEEP) * 2):
        return "too few bytes in flight"
    if passes > 1 and N < 0.9 * passes * cfg.ctas * cfg.warps * cfg.rows:
        return "uneven last pass"
    return None


def registers_fma(cfg: FmaConfig) -> int:
    """Registers of a thread, at most as ptxas allots them for sm_90a."""
    return 4 * cfg.rows * cfg.depth + 80


def residents_fma(cfg: FmaConfig) -> int:
    """CTAs of one SM."""
    return REGISTERS // (cfg.warps * 32 * registers_fma(cfg))


def why_not_mma(cfg: MmaConfig, M: int, N: int, K: int) -> str | None:
    chunks = K // cfg.bk
    _, pieces, step = cfg.copies
    if cfg.rows > N:
        return "more rows than weights"
    if cfg.rows % (16 * cfg.warps_n) or cfg.bk % (16 * cfg.warps_k) or K % cfg.bk:
        return "warps or stages do not divide the tile"
    if not cfg.bulk and step * pieces != cfg.producers * 32:
        return "producers do not copy whole rows at once"
    if cfg.bulk and cfg.bk < 192:
        return "bulk copies of short rows"
    if cfg.splits > 8 or cfg.splits > chunks or cfg.stages > -(-chunks // cfg.splits):
        return "more than eight splits, or fewer chunks than splits or stages"
    if cfg.stages < 1 or cfg.smem(M) > SMEM:
        return "shared memory does not fit"
    if cfg.fragments(M) > 24:
        return "more than 96 accumulators per lane"
    there = residents_mma(cfg, M)
    if cfg.tiles(N) > sum(sms * there // cfg.splits for sms in GPCS):
        return "more than one wave"
    if cfg.tiles(N) * cfg.splits < 0.7 * SMS and (cfg.rows > 16 or cfg.splits > 1):
        return "SMs idle"
    return None


def residents_mma(cfg: MmaConfig, M: int) -> int:
    """CTAs of one SM, for a generous guess of registers."""
    registers = 64 + 5 * cfg.fragments(M)
    return min((SMEM + 1024) // (cfg.smem(M) + 1024), REGISTERS // (cfg.threads * registers), 2048 // cfg.threads)


def why_not_wgmma(cfg: WgmmaConfig, M: int, N: int, K: int) -> str | None:
    tokens, blocks = cfg.fragments(M), K // (CHUNK * cfg.depth)
    if cfg.rows > N:
        return "more rows than weights"
    if K % (CHUNK * cfg.depth) or cfg.depth % cfg.width:
        return "depth does not divide K, or stages do not divide the depth"
    if cfg.splits > 8 or cfg.splits > blocks:
        return "more than eight splits, or fewer blocks than splits"
    if cfg.producers % cfg.team or not 1 <= cfg.producers // cfg.team <= cfg.stages or cfg.team > tokens:
        return "no whole team of producers, more teams than stages, or more in a team than groups of 8 tokens"
    if cfg.smem(M) > SMEM:
        return "shared memory does not fit"
    if cfg.share(M) * cfg.width > 16:
        return "more than 64 registers of x"
    if registers_wgmma(cfg, M) > min(248, REGISTERS // (-(-cfg.threads // 128) * 128) // 8 * 8):
        return "registers of a CTA do not fit"
    there = residents_wgmma(cfg, M)
    if cfg.tiles(N) > 0.96 * sum(sms * there // cfg.splits for sms in GPCS):
        return "more than one wave"  # as measured: grids that need every place, or all but one of 34, took two
    if cfg.tiles(N) * cfg.splits < 0.5 * SMS and cfg.splits < min(8, blocks):
        return "SMs idle"
    return None


def registers_wgmma(cfg: WgmmaConfig, M: int) -> int:
    """Registers of a thread, at most as ptxas allots them: sums, ring, fragments, and addresses."""
    return 4 * cfg.fragments(M) + 8 * (cfg.depth + cfg.width) + 16


def residents_wgmma(cfg: WgmmaConfig, M: int) -> int:
    """CTAs of one SM."""
    registers = cfg.threads * ((registers_wgmma(cfg, M) + 7) // 8 * 8)
    return min((SMEM + 1024) // (cfg.smem(M) + 1024), REGISTERS // registers, 2048 // cfg.threads)


@cache  # one for all N
def wgmma_config(M: int, K: int, groups: int, splits: int, depth: int, producers: int, team: int) -> WgmmaConfig:
    """Stages as wide as a producer's registers allow; two for each team, as far as there are as many."""
    share, teams = -(-M // 8 // team), producers // team
    width = next(w for w in (8, 4, 2, 1) if depth % w == 0 and (w * share <= 16 or w == 1))
    most = max(1, -(-(K // (CHUNK * depth)) // splits) * depth // width)
    return WgmmaConfig(groups, splits, depth, width, min(2 * teams, most), team * min(teams, most), team)


@cache
def mma_config(M: int, K: int, rows: int, splits: int, ring: int, most: int, producers: int, bulk: bool) -> MmaConfig:
    """Fill a ring of `ring` bytes; warps_n leaves a warp at most `most` fragments, warps_k fills up to eight warps."""
    tiles, tokens = rows // 16, -(-M // 8)
    warps_n = next(n for n in range(1, tiles + 1) if tiles % n == 0 and (tiles // n * tokens <= most or n == tiles))
    widths = [w for w in (512, 384, 256, 192, 128, 96, 64, 48, 32, 16) if K % w == 0]
    if not bulk:
        widths = [w for w in widths if producers * 32 % (w // 8) == 0]
    bk = next((w for w in widths if 8 * (rows + M) * (w + PAD) <= ring and w * splits <= K), widths[-1])
    warps_k = next(k for k in (8, 4, 2, 1) if bk // 16 % k == 0 and (warps_n * k <= 8 or k == 1))
    stages = min(ring // ((rows + M) * (bk + PAD) * 2), -(-K // bk // splits))
    return MmaConfig(rows, splits, warps_n, warps_k, bk, stages, producers, bulk)


def candidates(M: int, N: int, K: int, arch: str = "sm_90a") -> tuple[list[LinearConfig], dict[LinearConfig, str]]:
    """The configurations worth timing for a shape on an arch, and the dropped ones with the reason."""
    tried: list[LinearConfig] = [DirectConfig(*c) for c in product((8, 16, 32), (1, 2, 4))]
    depths = [d for d in range(1, 29) if sweeps(K) % d == 0]
    for rows, depth, warps, per_sm in product((1, 2, 4), depths, (4, 6, 8, 9, 10, 12, 14, 16), (1, 2, 3)):
        if M <= FMA_TOKENS:
            passes = -(-N // (SMS * per_sm * warps * rows))
            tried.append(FmaConfig(rows, depth, warps, -(-N // (passes * warps * rows))))
    copies = [(1, True), (2, True)] if M <= 8 else [(2, True), (4, False)] if M <= 32 else [(4, False)]
    for rows, splits, ring, most, (producers, bulk) in product(
        (16, 32, 48, 64, 96, 112, 128, 144, 192, 224), (1, 2, 3, 4, 5, 6, 7, 8), (104_000, 216_000), (16, 24), copies
    ):
        tried.append(mma_config(M, K, rows, splits, ring, most, producers, bulk))
    tried += [mma_config(M, K, 16, 1, 104_000, 16, 4, False)]  # legal for every shape
    if arch in WGMMA_ARCHS and M > WGMMA_TOKENS:
        widths = (2, 4, 6, 7, 8, 12)
        teams = [(2, 1), (4, 1), (6, 1), (8, 1), (2, 2), (4, 2), (6, 2), (8, 2), (4, 4), (8, 4)]
        for groups, splits, depth, (producers, team) in product((1, 2, 3, 4), range(1, 9), widths, teams):
            tried.append(wgmma_config(M, K, groups, splits, depth, producers, team))
    why = {cfg: why_not(cfg, M, N, K) for cfg in dict.fromkeys(tried)}
    return [cfg for cfg, reason in why.items() if not reason], {cfg: reason for cfg, reason in why.items() if reason}


def estimate(cfg: LinearConfig, M: int, N: int, K: int) -> float:
    """Microseconds a configuration should take on an H200: the slowest of its streams, plus what is not hidden.

    Rates in bytes per microsecond: 4.3e6 of HBM, 5.5e6 of L2 into all SMs; 0.9 us from a load to its data under load.
    """
    if isinstance(cfg, DirectConfig):
        blocks, groups, _ = cfg.grid(M, N)
        l2 = 2 * K * (16 * groups + cfg.tokens) * blocks * cfg.warps * groups / 5.5e6
        return 1.2 + l2 + 70 * K / 32 / CLOCK + 0.1 * cfg.tokens / 8
    if isinstance(cfg, FmaConfig):
        flight = 512 * cfg.rows * cfg.depth * cfg.warps * cfg.ctas
        work = -(-N // (cfg.ctas * cfg.warps * cfg.rows)) * cfg.ctas * cfg.warps * cfg.rows
        return max(2 * work * K / 4.3e6, 2 * N * K * 0.9 / flight) * (1 + 0.04 * (M - 1)) + 1.5
    if isinstance(cfg, WgmmaConfig):
        return estimate_wgmma(cfg, M, N, K)
    return estimate_mma(cfg, M, N, K)


def estimate_wgmma(cfg: WgmmaConfig, M: int, N: int, K: int) -> float:
    """A sum, for what is not hidden adds up; fitted to 130 timings, of which it misses one by 10 %, root mean square.

    The streams, 5.5e4 bytes per microsecond into one SM among them; 0.085 us of a consumer for each stage, whose wgmma
    end before the next begin; 0.18 us for each stage of a team of producers; the partial sums.
    """
    tiles, tokens = cfg.tiles(N), 8 * cfg.fragments(M)
    ctas, stages = tiles * cfg.splits, -(-(K // (CHUNK * cfg.depth)) // cfg.splits) * cfg.depth // cfg.width
    weights = 2 * tiles * cfg.rows * K
    read = weights + 2 * tiles * tokens * K
    flight = weights * 0.9 / (ctas * cfg.rows * cfg.depth * CHUNK * 2)
    stream = max(weights / 4.3e6, read / 5.5e6, read / min(ctas, SMS) / 5.5e4, flight)
    rounds = -(-stages // (cfg.producers // cfg.team))
    sums = cfg.rows * tokens * 4 * (cfg.splits - 1) / cfg.splits / 24 / CLOCK
    return 2.2 + 0.83 * stream + 0.085 * stages + 0.18 * rounds + sums


def estimate_mma(cfg: MmaConfig, M: int, N: int, K: int) -> float:
    """Cycles of one SM: 128 bytes of shared memory or 1270 products a cycle; 17 a bulk copy, 20 a cp.async of a warp.

    A stage costs 150 more to produce and 200 to consume, for its barriers and the first loads behind them.
    """
    tiles, tokens = cfg.tiles(N), -(-M // 8) * 8
    ctas, chunks = tiles * cfg.splits, -(-(K // cfg.bk) // cfg.splits)
    weights = 2 * tiles * cfg.rows * K
    hbm = weights / 4.3e6 * (1 + max(0, SMS * 0.7 - ctas) / SMS)
    l2 = (weights + 2 * tiles * M * K) / 5.5e6
    flight = weights * 0.9 / (ctas * cfg.stages * cfg.rows * cfg.bk * 2)
    _, pieces, _ = cfg.copies
    cost = max(17 / cfg.producers, 8) if cfg.bulk else max(20 / cfg.producers, 8) / 32
    issue = chunks * ((cfg.rows + M) * pieces * cost + 150)
    lead = min(cfg.stages, chunks) * M * pieces * cost
    shared = 32 * (2 * cfg.rows + M + tokens * cfg.warps_n) / 128
    steps = chunks * (cfg.bk / 16 * max(shared, cfg.rows * tokens * 16 / 1270) + 200) * -(-ctas // SMS)
    sums = cfg.rows * tokens * 4
    tail = (2 * sums * cfg.warps_k / 128 if cfg.warps_k > 1 else 0) + (1600 + sums / 24 if cfg.splits > 1 else 0)
    return max(hbm, l2, flight, issue / CLOCK, steps / CLOCK) + (lead + tail) / CLOCK + 1.6


def bucket(M: int) -> int:
    """The most tokens that the code for M serves. Raises NotImplementedError for more than 64."""
    if not 1 <= M <= BUCKETS[-1]:
        raise NotImplementedError(f"linear: M = {M}; allowed are 1..{BUCKETS[-1]}")
    return next(most for most in BUCKETS if most >= M)


def choose_config(M: int, N: int, K: int, arch: str = "sm_90a") -> LinearConfig:
    """The measured winner for (N, K, M), or of the next larger M measured; the best estimate where there is none.

    M counts as its whole bucket. Raises NotImplementedError for a shape that no configuration can do.
    """
    return _chosen(bucket(M), N, K, arch if arch in WGMMA_ARCHS else "")


@cache
def _chosen(M: int, N: int, K: int, arch: str) -> LinearConfig:
    """The same for all targets without wgmma."""
    table = TUNED.get((N, K), {}) | (HOPPER.get((N, K), {}) if arch else {})
    tuned = {m: cfg for m, cfg in table.items() if m >= M}
    if tuned:
        return tuned[min(tuned)]
    kept, dropped = candidates(M, N, K, arch)
    kept = kept or [cfg for cfg, reason in dropped.items() if reason in SLOW and getattr(cfg, "splits", 1) == 1]
    if not kept:
        raise NotImplementedError(f"linear: M = {M}, N = {N}, K = {K}: no configuration; {set(dropped.values())}")
    return min(kept, key=lambda cfg: estimate(cfg, M, N, K))


SPANS = [
    [stage.name] for stage in (kda.IN_PROJ, kda.GATE_PROJ, kda.O_PROJ, mla.QKV_A, mla.Q_B, mla.GATE_PROJ, mla.O_PROJ)
]


@twin("linear", SPANS, ARCHS, range(1, 65))
def linear(x, w, out):
    """x [M, K] bf16, w [N, K] bf16, out [M, N] bf16; rows of x and out may be strided.

    M is 1..64, K a multiple of 16, N of 8 and at least 16, row strides multiples of 8: rows start on 16 bytes.
    One kernel for all targets, or one for those with wgmma and one for the others (`Kernel.archs`).
    Raises NotImplementedError for another size or stride, ContractError for shapes that disagree.
    """
    (M, K), N = x.shape, w.shape[0]
    if w.shape[1] != K or out.shape != (M, N):
        raise ContractError(f"linear: x {tuple(x.shape)}, w {tuple(w.shape)}, out {tuple(out.shape)} disagree")
    if not 1 <= M <= 64:
        raise NotImplementedError(f"linear: x has {M} tokens; allowed are 1..64")
    if K % 16 or K < 16:
        raise NotImplementedError(f"linear: K = {K}; allowed are multiples of 16")
    if N % ALIGN or N < 16:
        raise NotImplementedError(f"linear: N = {N}; allowed are multiples of 8 from 16 on")
    for name, t in (("x", x), ("out", out)):
        if t.stride(0) % ALIGN:
            raise NotImplementedError(f"linear: {name} has row stride {t.stride(0)}; allowed are multiples of {ALIGN}")
    chosen: dict[LinearConfig, tuple[str, ...]] = {}
    for arch in ARCHS:
        cfg = choose_config(M, N, K, arch)
        chosen[cfg] = (*chosen.get(cfg, ()), arch)
    return tuple(
        replace(linear_kernel(cfg, M, N, K, x.stride(0), out.stride(0)), archs=archs) for cfg, archs in chosen.items()
    )


def linear_kernel(cfg: LinearConfig, M: int, N: int, K: int, x_stride: int, out_stride: int) -> Kernel:
    """The kernel of one configuration; strides are in elements. Raises ValueError for fewer weight rows than a tile.

    But for fma, its code is the same for every M of a bucket; that of direct for every M up to 64.
    """
    rows = {FmaConfig: 1, DirectConfig: 16}.get(type(cfg)) or cfg.rows
    if rows > N:
        raise ValueError(f"linear: N = {N}; allowed for {cfg} are multiples of {ALIGN} from {rows} on")
    bf16, tokens = torch.bfloat16, bucket(M)
    if isinstance(cfg, WgmmaConfig):
        tokens = max(tokens, 8)  # as many as it multiplies at least
    any_m = None if isinstance(cfg, FmaConfig) else "T"
    args = (
        Arg("x", Role.ACTIVATION, bf16, (M, K), (x_stride, 1), rows=any_m),
        Arg("w", Role.WEIGHT, bf16, (N, K)),
        Arg("out", Role.OUTPUT, bf16, (M, N), (out_stride, 1), rows=any_m),
    )
    title = "linear_{}-m" + f"{M}-n{N}-k{K}"
    if isinstance(cfg, FmaConfig):
        block, smem = (cfg.warps * 32, 1, 1), cfg.smem(M, K)
        return Kernel(title.format("fma"), fma_entry, args, (cfg,), (cfg.ctas, 1, 1), block, smem)
    if isinstance(cfg, DirectConfig):
        grid, block = cfg.grid(M, N), (cfg.warps * 32, 1, 1)
        span = dict(token_axis=1, token_span=cfg.tokens)
        return Kernel(title.format("direct"), direct_entry, args, (cfg,), grid, block, counts=True, **span)
    name, entry, archs = "mma", mma_entry, ARCHS
    if isinstance(cfg, WgmmaConfig):
        name, entry, archs = "wgmma", wgmma_entry, WGMMA_ARCHS
    grid, block, smem = (cfg.splits, cfg.tiles(N), 1), (cfg.threads, 1, 1), cfg.smem(tokens)
    cluster = (cfg.splits, 1, 1) if cfg.splits > 1 else None
    return Kernel(title.format(name), entry, args, (cfg, tokens), grid, block, smem, cluster, counts=True, archs=archs)


def linear_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """(N, K) of every covered stage on one rank."""
    hidden, width = config.hidden, config.kda_width
    return {
        "kda.in_proj": (config.in_proj_width, hidden),
        "kda.gate_proj": (width, config.kda_dim),
        "kda.o_proj": (hidden, width),
        "mla.qkv_a": (config.q_lora + config.kv_row, hidden),
        "mla.q_b": (config.heads * config.q_dim, config.q_lora),
        "mla.gate_proj": (config.heads * config.v_dim, hidden),
        "mla.o_proj": (hidden, config.heads * config.v_dim),
    }


def linear_cases(tokens=(1, 2, 3, 4, 8, 16, 32, 64), device="meta") -> dict[str, dict[str, torch.Tensor]]:
    """Production arguments without memory (meta tensors), by case id; the gate's x is a slice of kda.in_proj's out."""
    cases = {}
    for config in (k3_rank(8), k3_rank(16), mini, deep):
        for stage, (N, K) in linear_shapes(config).items():
            for M in tokens:
                x = torch.empty(M, K, dtype=torch.bfloat16, device=device)
                if stage == "kda.gate_proj":
                    row = torch.empty(M, config.in_proj_width, dtype=torch.bfloat16, device=device)
                    x = row[:, 4 * config.kda_width : 4 * config.kda_width + K]
                w, out = (torch.empty(n, dtype=torch.bfloat16, device=device) for n in ((N, K), (M, N)))
                cases[f"{stage}-{config.name}-m{M}"] = dict(x=x, w=w, out=out)
    return cases
