"""Jobs in child processes, under a clock: a hang is a verdict, and the jobs behind it still run."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = (sys.executable, "-m", "equivalence.adversary.worker")
LIMIT = 60.0  # seconds a job may hold the device
SILENCE = 240.0  # seconds a worker may say nothing while others hold the device, or while it compiles


def run(
    jobs: Sequence[dict], workers: int = 1, *, command: Sequence[str] = WORKER, limit: float = LIMIT,
    silence: float = SILENCE,
) -> Iterator[tuple[int, list[dict]]]:  # fmt: skip
    """Judge the jobs: yields (number of the job, its rows) in the order in which they end.

    A job that holds the device for longer than `limit` seconds is a hang; one whose worker dies is a fault. Either
    kills the worker, and a fresh one goes on behind that job.
    """
    answers: queue.Queue = queue.Queue()
    with tempfile.NamedTemporaryFile(prefix="device-") as lock:
        call = (*command, lock.name, str(_device()))
        shares = [list(range(len(jobs)))[n::workers] for n in range(workers)]
        threads = [
            threading.Thread(target=_serve, args=(jobs, share, call, limit, silence, answers), daemon=True)
            for share in shares if share
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for _ in range(len(jobs)):
            yield answers.get()
        for thread in threads:
            thread.join()


def _device() -> int:
    """The GPU of this process, which its workers use, too."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _serve(jobs, share: list[int], call, limit: float, silence: float, answers: queue.Queue) -> None:
    """Work off a share of the jobs, with as many workers as it takes."""
    while share:
        worker = subprocess.Popen(
            call, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        said: queue.Queue = queue.Queue()
        errors: list[str] = []
        threading.Thread(target=_read, args=(worker.stdout, said), daemon=True).start()
        drain = threading.Thread(target=lambda w=worker, e=errors: e.extend(w.stderr.readlines()[-20:]), daemon=True)
        drain.start()
        try:
            worker.stdin.write("".join(json.dumps(jobs[n]) + "\n" for n in share))
            worker.stdin.close()
        except BrokenPipeError:
            pass  # it died; what it said says why
        done, why = _follow(said, share, limit, silence, answers)
        _end(worker)
        drain.join(5)
        share = share[done:]
        if share and why:
            text = why if why != "fault" else _last(errors, worker.returncode)
            job = jobs[share[0]]
            row = dict(subject=job.get("kernel", job["part"]), check=job["part"], text=text)
            answers.put((share[0], [row | dict(verdict="fault" if why == "fault" else "hang")]))
            share = share[1:]


def _follow(said: queue.Queue, share: list[int], limit: float, silence: float, answers: queue.Queue) -> tuple[int, str]:
    """Pass on a worker's answers: (jobs done, why it ended: "" if all went well, "fault", or what took too long)."""
    done, hung, until = 0, False, time.monotonic() + silence
    while done < len(share):
        try:
            line = said.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return done, f"no end after {limit:g} s with the device, or {silence:g} s of silence"
        if line is None:
            return done, "" if hung else "fault"  # after a hang it ends itself
        if "began" in line:
            until = time.monotonic() + limit
        elif "done" in line:
            hung = any(row["verdict"] == "hang" for row in line["rows"])
            answers.put((share[done], line["rows"]))
            done, until = done + 1, time.monotonic() + silence
    return done, ""


def _read(stream, said: queue.Queue) -> None:
    """Lines of JSON from a worker; anything else it prints is not for us. None at its end."""
    for text in stream:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            said.put(line)
    said.put(None)


def _end(worker: subprocess.Popen) -> None:
    """End a worker and what it started, if it has not ended by itself."""
    try:
        worker.wait(0.5)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _last(errors: Sequence[str], code: int | None) -> str:
    lines = [line.strip() for line in errors if line.strip()]
    return f"the worker ended with {code}: {lines[-1] if lines else 'it said nothing'}"[:400]
