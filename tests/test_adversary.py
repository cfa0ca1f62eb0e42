"""The adversary without a GPU: verdicts on runners with known faults, kernels in the interpreter, the watchdog."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from equivalence.adversary import checks, rate_bound, table, watchdog
from equivalence.adversary.attack import Trial, attack, baseline, judge
from equivalence.adversary.gemv import VARIANTS
from equivalence.adversary.image import BESIDE, LATE, STALE, Image
from equivalence.adversary.kernels import CHUNK, CLOCK, CTAS, grid_barrier, occupier, producer
from equivalence.adversary.subjects import LATE_WAITS, Subject, control, edited, subject, with_kernels, without_pdl
from equivalence.simt import launch
from equivalence.simt.machine import Machine
from fast import production_kernels
from fast.kernel import Arg, Kernel
from fast.linear import DirectConfig, linear_kernel
from reference.stage import ContractError, Role
from tools import adversary as command

T, W, SLOTS = 4, 6, 8
bf16 = torch.bfloat16
TOY = Kernel(
    "toy", lambda: None,
    (Arg("x", Role.ACTIVATION, bf16, (T, W), (10, 1)), Arg("w", Role.WEIGHT, bf16, (W,)),
     Arg("slots", Role.INDEX, torch.int32, (T,)), Arg("state", Role.STATE, torch.float32, (SLOTS, W)),
     Arg("out", Role.OUTPUT, bf16, (T, W), (8, 1))),
)  # fmt: skip
FAULTS = ("reads x early", "reads slots early", "stores out early", "wrong alone", "leaks rows", "reads null slot",
          "writes null slot", "bakes inputs", "never writes")  # fmt: skip


class Toy:
    """A runner of TOY, out = w x + state[slot] and state[slot] += 1 for live rows, with one fault."""

    def __init__(self, fault: str = ""):
        self.made, self.fault, self.baked = subject(TOY), fault, None
        self.image = Image(self.made.kernels)
        self.truth = self.image.truth(self.made.values)

    def step(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """The words after the kernel; a load above the wait sees `before`."""
        fault, see = self.fault, self.image.view
        x = see(before if fault == "reads x early" else now, "x").clone()
        slots = see(before if fault == "reads slots early" else now, "slots").clone().long()
        words = now.clone()
        state, out = see(words, "state"), see(words, "out")
        live = slots > 0
        new = x.float() * self.made.values["w"].float() + torch.where(live[:, None], state[slots.clamp_min(0)], 0.0)
        if fault == "leaks rows":
            new = new + x.float().sum(0)
        if fault == "reads null slot":
            new = new + state[0].nan_to_num(1.5)
        state[slots[live]] += 1
        if fault == "writes null slot":
            state[0] += 1
        if fault != "never writes":
            out.copy_(new)
        if fault == "stores out early":
            see(words, "out").copy_(see(now, "out"))
        return words

    def plain(self, start):
        words = self.step(start, start)
        if self.fault == "stores out early":  # nothing is late here
            healthy = Toy()
            return healthy.step(start, start)
        return words

    def replay(self, start):
        if self.fault == "bakes inputs":
            self.baked = start if self.baked is None else self.baked
            words = self.plain(start)
            self.image.view(words, "out").copy_(self.image.view(self.plain(self.baked), "out"))
            return words
        return self.plain(start)

    def late(self, start, stall_us, runs, expected):
        words = self.step(start if stall_us > 1 else self.truth, self.truth)
        if self.fault == "wrong alone":
            self.image.view(words, "state")[3] = 7.0
        differs = (words != expected).nonzero()
        if not len(differs):
            return Trial(runs)
        return Trial(runs, runs, self.image.locate(int(differs[0])), int(words[differs[0]]) == LATE)


def judged(fault: str, real=(10.0,), off=()) -> tuple:
    toy = Toy(fault)
    expected = baseline(toy.made, toy.image, toy, toy.truth)
    assert not isinstance(expected, str), expected
    trials = attack(toy.made, toy.image, toy, toy.truth, expected, (0, 10.0), 20)
    return judge("toy", trials, real, off, "why"), trials


@pytest.mark.parametrize(
    "fault, verdict, tensors",
    [("", "equal", ()), ("reads x early", "stale", ("x",)), ("reads slots early", "stale", ("slots",)),
     ("stores out early", "early store", ("out",)), ("wrong alone", "wrong", ("state",))],
)  # fmt: skip
def test_the_verdict_names_the_tensor(fault, verdict, tensors):
    made, trials = judged(fault)
    assert (made.verdict, made.tensors) == (verdict, tensors)
    assert set(trials[10.0]) == {"", "x", "slots", "state", "all"}
    if fault.startswith("reads"):
        assert all(t.wrong == 0 for t in trials[0].values()), "without a stall nothing shows"


def test_no_overlap_is_no_verdict():
    made, _ = judged("", real=())
    assert made.verdict == "could not judge" and made.runs == 0 and made.bound == 1.0
    assert judged("reads x early", real=())[0].verdict == "stale", "what was seen needs no proof of overlap"


def test_wrong_without_pdl_is_no_question_of_order():
    made, _ = judged("reads x early", off=(Trial(20), Trial(20, 1, "out")))
    assert (made.verdict, made.tensors) == ("wrong", ("out",)) and "without PDL" in made.text


def test_runs_bound_the_failure_rate():
    made, _ = judged("")
    assert made.runs == 20 * 5 and (1 - made.bound) ** 100 == pytest.approx(0.05)
    assert rate_bound(20) == pytest.approx(3 / 20, rel=0.1) and rate_bound(10000) == pytest.approx(3e-4, rel=0.01)
    assert rate_bound(0) == 1.0


def test_a_bad_baseline_is_named():
    toy = Toy("never writes")
    assert baseline(toy.made, toy.image, toy, toy.truth) == "out is not written at [0, 0] with nothing to race with"
    turns = iter((0, 1))
    toy = Toy()
    toy.plain = lambda start: Toy().plain(start) + next(turns)
    assert "differ" in baseline(toy.made, toy.image, toy, toy.truth)


@pytest.mark.parametrize(
    "fault, check",
    [("bakes inputs", "replay"), ("leaks rows", "padding"), ("reads null slot", "unowned"),
     ("writes null slot", "unowned")],
)  # fmt: skip
def test_memory_checks(fault, check):
    def run(toy):
        more = (subject(TOY, seed=1),) if check == "replay" else ()
        return getattr(checks, check)(toy.made, *more, toy.image, toy, toy.truth)

    assert run(Toy()).verdict == "equal" and run(Toy()).runs
    broken = run(Toy(fault))
    assert broken.verdict == "wrong" and broken.tensors == (("state",) if fault == "writes null slot" else ("out",))


def test_what_is_not_there_is_not_judged():
    made = subject(linear_kernel(DirectConfig(8, 1), 1, 16, 32, 32, 16))
    image = Image(made.kernels)
    truth = image.truth(made.values)
    assert checks.padding(made, image, None, truth) is None and checks.unowned(made, image, None, truth) is None
    same = checks.replay(Toy().made, subject(TOY), Toy().image, Toy(), Toy().truth)
    assert same.verdict == "could not judge"


def test_occupier():
    class Busy:
        def __init__(self, right):
            self.right = right

        def occupied(self, free, expected):
            return self.right or free > 1, free > 1

    good, bad = (checks.occupied(Toy().made, Busy(right), None, 132) for right in (True, False))
    assert (
        good.verdict == "equal" and "66 free SMs: ended beside" in good.text and "1 free SMs: ended after" in good.text
    )
    assert bad.verdict == "wrong" and bad.text == "with 1 free SMs"


# ---------------------------------------------------------------- layout and inputs


def test_image():
    toy = Toy()
    image, truth, values = toy.image, toy.truth, toy.made.values
    assert image.produced == ("x", "slots", "state") and image.size % CHUNK == 0
    assert torch.equal(image.view(truth, "x"), values["x"]) and image.view(truth, "x").stride() == (10, 1)
    assert (image.region(truth, "out") == LATE).all() and int(truth[0]) == BESIDE and int(truth[-1]) == BESIDE
    start = image.start(truth, ("x", "slots"), toy.made.wrong)
    assert image.view(start, "x").isnan().all() and (image.region(start, "out") == STALE).all()
    assert torch.equal(image.view(start, "slots"), toy.made.wrong["slots"])
    assert torch.equal(image.view(start, "state").view(torch.int32), image.view(truth, "state").view(torch.int32))
    for name in image.args:
        assert image.locate(image.starts[name]) == name
    assert image.locate(image.starts["out"] - 1) == "the guard behind state" and "guard before" in image.locate(0)
    rows = image.rows(T, torch.tensor([1]))
    marked = image.view(rows.int() * 0x3F803F80, "x") != 0
    assert marked[1].all() and marked.sum() == W and not image.region(rows, "state").any()
    with pytest.raises(ContractError, match="another layout"):
        Image([TOY, replace(TOY, args=(replace(TOY.args[0], stride=(12, 1)),))])


def test_subjects_are_hostile():
    made = subject(TOY)
    slots, wrong = made.values["slots"], made.wrong["slots"]
    live = slots > 0
    assert (slots[live] != wrong[live]).all() and (wrong[live] > 0).all() and (wrong < SLOTS).all()
    assert len(set(wrong[live].tolist())) == int(live.sum()) and torch.equal(made.padding, ~live) and not live.all()
    assert made.values["state"][0].isnan().all() and made.values["state"][slots[live].long()].isfinite().all()
    assert not torch.equal(subject(TOY, 1).values["x"], made.values["x"])
    table_ = replace(TOY, args=(*TOY.args, Arg("pages", Role.INDEX, torch.int32, (T,))))
    with pytest.raises(NotImplementedError, match="index tensor 'pages'"):
        subject(table_)


def test_every_form_has_a_control():
    """An edit that no longer fits a kernel raises; a form without one would be judged by clocks alone."""
    first = {k.entry.__module__: k for k in production_kernels((1, 64))}
    assert set(first) == set(LATE_WAITS)
    for module, kernel in first.items():
        broken, stale = control(kernel)
        assert broken.entry is not kernel.entry and broken.args == kernel.args and stale == LATE_WAITS[module][1]
        assert without_pdl(kernel).pdl is False
    with pytest.raises(ValueError, match="occurs 0 times"):
        edited(kernel, (("no such text", ""),), "mark")
    assert control(TOY) is None


# ---------------------------------------------------------------- kernels, in the interpreter


class Interpreted:
    """A runner in the interpreter's adversarial order: the true producer, then the kernels."""

    def __init__(self, made: Subject, image: Image, truth: torch.Tensor):
        self.made, self.image, self.truth, self.producer = made, image, truth, producer(image.size)

    def bind(self, kernel, words):
        named = self.made.values
        return [named[a.name] if a.role is Role.WEIGHT else self.image.view(words, a.name) for a in kernel.args]

    def plain(self, start):
        words = start.clone()
        for kernel in self.made.kernels:
            launch(kernel, self.bind(kernel, words), run="numpy")
        return words

    def late(self, start, stall_us, runs, expected):
        words, stall = start.clone(), torch.zeros(1, dtype=torch.int64)
        times = torch.zeros(2, CTAS, dtype=torch.int64)
        ptx = re.sub(r"mov\.u64\s+(%\w+), %globaltimer;", r"mov.b64 \1, 0;", self.producer.compile("sm_90a").ptx)
        after = [(k, k.compile("sm_90a").ptx, self.bind(k, words)) for k in self.made.kernels]
        Machine("adversarial").run([(self.producer, ptx, [stall, self.truth, words, times]), *after])
        differs = (words != expected).nonzero()
        return Trial(runs, runs, self.image.locate(int(differs[0]))) if len(differs) else Trial(runs)


def test_the_producer_and_a_real_kernel():
    kernel = linear_kernel(DirectConfig(8, 1), 3, 24, 64, 72, 32)
    made = subject(kernel)
    image = Image(made.kernels)
    truth = image.truth(made.values)
    runner = Interpreted(made, image, truth)
    expected = baseline(made, image, runner, truth)
    clean = attack(made, image, runner, truth, expected, (10,), 20)
    assert judge("direct", clean, (10,), (), "").verdict == "equal"
    broken, stale = control(kernel)
    late = Interpreted(with_kernels(made, lambda _: broken), image, truth)
    verdict = judge("direct", attack(made, image, late, truth, expected, (10,), 20), (), (), "")
    assert (verdict.verdict, verdict.tensors) == ("stale", stale) and verdict.counts[10]["x"] == 20


def test_the_kernels_around_compile_and_read_the_clock_in_their_loops():
    off = without_pdl(linear_kernel(DirectConfig(8, 1), 3, 24, 64, 72, 32))
    for kernel in (producer(CHUNK), CLOCK, occupier(131), grid_barrier(132), off):
        ptx = kernel.compile("sm_90a").ptx
        assert (kernel.pdl or "no_pdl" in kernel.name) == ("griddepcontrol.wait" in ptx)
        if kernel.name.startswith(("producer", "occupier", "grid")):
            loop = ptx[ptx.index("nanosleep") :]
            assert "%globaltimer" in loop[: loop.index("bra")], "a clock read once would never end the loop"
    ptx = producer(CHUNK).compile("sm_90a").ptx
    assert ptx.index("launch_dependents") < ptx.index("%globaltimer") < ptx.index("st.global.v4")
    with pytest.raises(ValueError, match="multiples of"):
        producer(CHUNK + 4)


# ---------------------------------------------------------------- the control set


def rows(wrong=lambda row, name: None):
    made = []
    for variant in VARIANTS:
        row = table.Row(*variant, {}, {})
        found = row.expected("sm_90a", 20)
        made.append(
            replace(row, wrong={n: wrong(variant, n) if wrong(variant, n) is not None else v for n, v in found.items()})
        )
    return made


def test_the_proof_of_the_control_set():
    """Every invariant activation is a finding; the loads stand above the wait in SASS where BROKEN says, by target."""
    proved = table.proofs()
    made = [table.Row(*v, {}, proved[v]) for v in VARIANTS]
    if table.proof_agrees(made) is None:
        pytest.skip("no disassembler installed")
    assert table.proof_agrees(made)
    hoisted = {v for v in VARIANTS if proved[v]["sm_103a"][1]}
    assert hoisted == {v for v in VARIANTS if v[1] == "invariant" and v[0] != "invariant"}
    swapped = [replace(r, proof=made[0].proof) for r in made]
    assert not table.proof_agrees(swapped)
    assert "findings, 4 of 4 above" in "\n".join(table.lines(made, 20))


def test_the_table_is_reproduced_or_not():
    assert table.verdict(rows(), "sm_90a", 20) == "reproduced"
    broken = ("no_allocate", "invariant")
    assert (
        table.verdict(rows(lambda v, n: 19 if (v, n) == (broken, "10 us, graph") else None), "sm_90a", 20)
        == "could not judge"
    )
    assert (
        table.verdict(rows(lambda v, n: 1 if (v, n) == (VARIANTS[0], "10 us, graph") else None), "sm_90a", 20)
        == "differs"
    )
    assert table.verdict(rows(lambda v, n: 1 if (v, n) == (broken, "no stall") else None), "sm_90a", 20) == "differs"


# ---------------------------------------------------------------- watchdog

WORKER = """
import json, os, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
print("something a library prints")
for n, job in enumerate(json.loads(line) for line in sys.stdin):
    what = job["what"]
    if what == "silent": time.sleep(60)
    say(began=n)
    if what == "hang": time.sleep(60)
    if what == "die": sys.stderr.write("illegal memory access\\n"); sys.exit(3)
    say(done=n, rows=[dict(verdict="hang" if what == "tell" else "equal", pid=os.getpid())])
    if what == "tell": os._exit(7)
"""


def test_watchdog():
    what = ("fine", "hang", "fine", "die", "tell", "fine", "silent", "fine")
    jobs = [dict(part="part", what=w) for w in what]
    fake = (sys.executable, "-S", "-c", WORKER)
    found = dict(watchdog.run(jobs, command=fake, limit=0.5, silence=1.5))
    verdicts = [found[n][0]["verdict"] for n in range(len(jobs))]
    assert verdicts == ["equal", "hang", "equal", "fault", "hang", "equal", "hang", "equal"]
    assert "illegal memory access" in found[3][0]["text"] and "0.5 s with the device" in found[1][0]["text"]
    shared = dict(watchdog.run([dict(part="part", what="fine")] * 5, 2, command=fake))
    assert len(shared) == 5 and len({row["pid"] for (row,) in shared.values()}) == 2


# ---------------------------------------------------------------- command line


def test_exit_codes():
    def code(*verdicts):
        return command.Result([dict(verdict=v) for v in verdicts]).exit_code

    assert code("equal", "reproduced") == 0 and code() == 2 and code("equal", "could not judge") == 2
    for bad in ("stale", "early store", "wrong", "hang", "fault", "differs", "disagreement"):
        assert code("equal", "could not judge", bad) == 1
    with pytest.raises(ValueError, match="part 'all': allowed are table"):
        command.run(["all"], [1], "", 20, [0])
    with pytest.raises(ValueError, match="repeats 0"):
        command.run(["table"], [1], "", 0, [0])
    row = judged("")[0].as_dict()
    assert "in 100 runs at 10 us (failure rate < 2.95% at 95%)" in command.told(row)
    assert command.told(judged("reads x early")[0].as_dict()) == "attack    stale x; why"
