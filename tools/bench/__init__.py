"""`k3 bench`: our twins, their peers and the memory floor in one run on this GPU.

A row is a ratio, not a promise: microseconds per call from CUDA-graph replay over rotated copies (`timing`), the share
of the floor (least bytes over the higher of the copy and read bandwidths measured in the same run), and the time
relative to each peer.
"""

import datetime
import gc
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..common import out

RESULTS = Path(__file__).parent / "results"


def run(stage: str, tokens: list[int], save: bool) -> dict:
    """Time every stage whose name contains `stage` at these batch sizes; prints a line per row and returns them all.

    Raises NotImplementedError without a GPU that the twins serve.
    """
    import torch

    from fast.kernel import device_arch

    if not torch.cuda.is_available():
        raise NotImplementedError("bench needs a CUDA GPU of sm_90/sm_100/sm_103: none is visible")
    arch = device_arch(torch.device("cuda"))
    from .rows import ROWS
    from .timing import bandwidth

    names = [n for n in ROWS if stage in n]
    if not names:
        raise ValueError(f"stage {stage!r}: allowed are {', '.join(ROWS)}")
    speed, rows = bandwidth(), []
    rates = ", ".join(f"{kind} {value / 1e6:.2f} TB/s" for kind, value in speed.items())
    out.print(f"{torch.cuda.get_device_name()}: {rates}", markup=False)
    out.print(f"{'stage':16s} {'case':20s}       us     low    high   GB/s  floor  peers: us, ours/peer", markup=False)
    for name in names:
        for row in ROWS[name](tokens):
            rows.append(_timed(row, speed))
            del row
            gc.collect()
            torch.cuda.empty_cache()
    versions = {p: _version(p) for p in ("torch", "nvidia-cutlass-dsl", "fla-core", "triton")}
    result = dict(
        date=datetime.date.today().isoformat(), chip=torch.cuda.get_device_name(), target=arch, bandwidth=speed,
        versions=versions | dict(cuda=torch.version.cuda), rows=rows,
    )  # fmt: skip
    if save:
        chip = result["chip"].replace("NVIDIA ", "").replace(" ", "-").lower()
        target = RESULTS / f"{result['date']}-{chip}{'-' + stage if stage else ''}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _timed(row, speed: dict[str, float]) -> dict:
    """Measure a row; a peer that cannot run is named with its error and leaves the others in the race."""
    from .timing import capture, measure

    missing, present = {}, {}
    for name, calls in row.peers.items():
        try:
            if isinstance(calls, str):
                raise RuntimeError(calls)
            capture(calls[:1])
            present[name] = calls
        except Exception as error:  # whatever another project's code raises
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0] if not isinstance(calls, str) else calls
    times = measure({"ours": row.ours} | present)
    ours, floor = times.pop("ours"), row.bytes / max(speed.values())
    peers = {n: dict(us=t.us, low=t.low, high=t.high, ours_over_peer=ours.us / t.us) for n, t in times.items()}
    share, rate = floor / ours.us, row.bytes / ours.us / 1e3
    told = [f"{n} {p['us']:.2f}, {p['ours_over_peer']:.3f}" for n, p in peers.items()]
    told += [f"{n}: {why}" for n, why in missing.items()]
    figures = f"{ours.us:8.2f} {ours.low:7.2f} {ours.high:7.2f} {rate:6.0f} {share:6.1%}"
    out.print(f"{row.stage:16s} {row.case:20s} {figures}  {'; '.join(told)}", markup=False)
    return dict(
        stage=row.stage, case=row.case, us=ours.us, low=ours.low, high=ours.high, bytes=row.bytes, floor_us=floor,
        share_of_floor=share, missing=missing, peers=peers,
    )  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
