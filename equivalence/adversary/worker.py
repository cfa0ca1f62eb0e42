"""A child process that judges one job after another and tells its parent in lines of JSON.

    python -m equivalence.adversary.worker LOCK GPU < jobs     # one job a line

Lines out: {"began": n} when job n has the device, then {"done": n, "rows": [...]}. LOCK is a file: the holder has the
device to itself, so that several workers compile at the same time and none disturbs another's timing. A worker whose
device hangs says so and ends at once: a process cannot take back a kernel.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch

from reference.stage import ContractError

from . import checks
from .attack import REPEATS, STALLS_US, Hang, Verdict, attack, baseline, judge
from .gpu import Gpu, overlaps, wait
from .image import Image
from .kernels import grid_barrier, occupier, producer
from .subjects import control, find, subject, with_kernels, without_pdl

HUNG = 7  # exit code
LIMIT_NS = 5_000_000_000  # after which the grid barrier of the control gives up, so that nothing hangs for ever
PATIENCE = 1.0  # seconds until that control is called a hang


def judge_kernel(job: dict, turn: Callable) -> list[dict]:
    """Every check of one production kernel. job: kernel, batch, target, repeats, stalls."""
    kernel = find(job["kernel"], job["batch"], job["target"])
    made = subject(kernel)
    image = Image(made.kernels)
    repeats, stalls = job.get("repeats", REPEATS), job.get("stalls", STALLS_US)
    broken = control(kernel)
    off = with_kernels(made, without_pdl)
    for k in (kernel, *off.kernels, producer(image.size), *([broken[0]] if broken else [])):
        k.compile(job["target"])  # before the device is ours
    truth, other = image.truth(made.values), subject(kernel, seed=1)
    with turn():
        runner = Gpu(made, image, truth)
        truth = runner.truth
        expected = baseline(made, image, runner, truth)
        if isinstance(expected, str):
            return [Verdict(made.name, "attack", "could not judge", text=expected).as_dict()]
        rows = [attack_all(made, image, runner, truth, expected, off, broken, stalls, repeats)]
        rows.append(checks.replay(made, other, image, runner, truth))
        rows += [checks.padding(made, image, runner, truth), checks.unowned(made, image, runner, truth)]
        sms = torch.cuda.get_device_properties(truth.device).multi_processor_count
        rows.append(checks.occupied(made, runner, expected, sms))
    return [row.as_dict() for row in rows if row]


def attack_all(made, image, runner, truth, expected, off, broken, stalls, repeats) -> Verdict:
    """The attack with PDL, the same without, and the control that shows at which stalls the overlap was real."""
    trials = attack(made, image, runner, truth, expected, stalls, repeats)
    both = [(), image.produced]
    plain = attack(made, image, Gpu(off, image, truth), truth, expected, stalls, repeats, both)
    without = [t for some in plain.values() for t in some.values()]
    if broken is None:
        real = [o.stall for o in overlaps(stalls) if o.ahead > 0]
        return judge(made.name, trials, real, without, "overlap shown by clocks; no control is known for this kernel")
    kernel, wanted = broken
    runner_ = Gpu(with_kernels(made, lambda _: kernel), image, truth)
    shown = attack(made, image, runner_, truth, expected, stalls, repeats, [(n,) for n in image.produced])
    real = [s for s in stalls if all(shown[s][n].wrong == repeats for n in wanted)]
    failed = ", ".join(f"{s:g} us: {min(shown[s][n].wrong for n in wanted)}" for s in stalls)
    why = f"with its wait below the loads of {', '.join(wanted)}, wrong runs of {repeats}: {failed}"
    return judge(made.name, trials, real, without, why)


def judge_table(job: dict, turn: Callable) -> list[dict]:
    """The control set: one row of the table per variant, and the clocks of producer and dependent."""
    from . import table

    repeats = job.get("repeats", REPEATS)
    with turn():
        rows = table.table(repeats)
        clocks = overlaps(job.get("stalls", STALLS_US))
    said = table.verdict(rows, job["target"], repeats)
    agrees = table.proof_agrees(rows)
    return [
        dict(check="table", subject="gemv", verdict=said, rows=[vars(r) for r in rows], proof_agrees=agrees,
             lines=table.lines(rows, repeats), clocks=[vars(c) for c in clocks]),
    ]  # fmt: skip


def judge_barrier(job: dict, turn: Callable) -> list[dict]:
    """The control of occupier and watchdog: a grid barrier, alone or beside an occupier of one SM. Raises Hang."""
    device = torch.device("cuda")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    barrier, taken = grid_barrier(sms), occupier(1)
    limit, hold = (torch.full((1,), LIMIT_NS, dtype=torch.int64, device=device) for _ in range(2))
    count = torch.zeros(1, dtype=torch.int32, device=device)
    seen = torch.zeros(taken.args[1].shape, dtype=torch.int64, device=device)
    with turn():
        barrier(limit, count)
        wait(PATIENCE)
        if int(count) != sms:
            return [Verdict("grid barrier", "watchdog", "could not judge", text="it ended early").as_dict()]
        if job["occupied"]:
            count.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                taken(hold, seen)
            time.sleep(0.002)
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier(limit, count)
                wait(PATIENCE)
    return [Verdict("grid barrier", "watchdog", "equal", runs=1).as_dict()]


PARTS = {"kernel": judge_kernel, "table": judge_table, "barrier": judge_barrier}


def main(lock: str, device: int) -> None:
    torch.cuda.set_device(device)
    jobs = [json.loads(line) for line in sys.stdin if line.strip()]
    with open(lock, "a") as file:
        for n, job in enumerate(jobs):

            @contextmanager
            def turn(n=n):
                fcntl.flock(file, fcntl.LOCK_EX)
                tell(began=n)
                try:
                    yield
                except Hang:
                    raise  # the device stays ours until this process, and with it the kernel, is gone
                except BaseException:
                    fcntl.flock(file, fcntl.LOCK_UN)
                    raise
                fcntl.flock(file, fcntl.LOCK_UN)

            try:
                rows = PARTS[job["part"]](job, turn)
            except Hang as hang:
                tell(done=n, rows=[verdict_of(job, "hang", str(hang))])
                os._exit(HUNG)
            except (ContractError, NotImplementedError) as error:
                rows = [verdict_of(job, "could not judge", str(error))]
            tell(done=n, rows=rows)


def verdict_of(job: dict, verdict: str, text: str) -> dict:
    """A verdict about a whole job."""
    return Verdict(job.get("kernel", job["part"]), job["part"], verdict, text=text).as_dict()


def tell(**line) -> None:
    print(json.dumps(line, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
