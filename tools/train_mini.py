"""Train `mini` on text found on this machine and write it in the checkpoint layout, within a fixed time.

Run from the repository's root: python3 -m tools.train_mini --minutes 8 --out FOLDER
Writes FOLDER/early (at 60 % of the training time), FOLDER/final and FOLDER/train_log.json; --smoke only the log.
"""

import argparse
import json
import math
import platform
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from reference.config import mini

from .train_corpus import Order3, build
from .train_decode import continuations, diversity
from .train_kda import CHUNK
from .train_model import Mini
from .train_report import evaluate, export, internals, layout, load

START = time.monotonic()
WARMUP, FLOOR = 0.03, 0.01  # share of the training time with a rising rate; last rate as a share of the highest
BETAS, EPS, DECAY, CLIP, Z_LOSS, BIAS_RATE = (0.9, 0.95), 1e-10, 0.05, 1.0, 1e-4, 2e-3
EARLY = 0.6  # share of the training time after which a first checkpoint is written
PROMPTS = (
    b"def read_config(path):\n    ", b"The standard library contains ", b'{"items": [{"name": "',
    b"User: How do I sort a list?\n",
)  # fmt: skip


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:7.1f} s] {text}", flush=True)


class Compiler:
    """torch.compile of pure functions, each compiled once per shape."""

    def __init__(self):
        torch._dynamo.config.recompile_limit = 64
        self.made = {}

    def __call__(self, f):
        if f not in self.made:
            self.made[f] = torch.compile(f, dynamic=False, fullgraph=True)
        return self.made[f]


class Optimizer:
    """AdamW on the flat masters with a clipped gradient norm, all on the device, so that a step can be captured."""

    def __init__(self, model: Mini):
        self.model, self.params = model, list(model.masters.values())
        device = model.bias.device
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.rate, self.count, self.skipped = (torch.zeros((), device=device) for _ in range(3))
        self.bias_rate = torch.zeros((), device=device)
        decays = []
        for shapes in model.shapes.values():
            flags = [torch.full((math.prod(s),), float(len(s) == 2 and s[0] > 1)) for s in shapes.values()]
            decays.append(torch.cat(flags).to(device) * DECAY)
        self.decays = [*decays, DECAY, DECAY]

    def reset(self) -> None:
        """Forget the steps taken so far: those of warming up, at rate zero."""
        for t in (self.count, self.skipped, *(t for pair in self.moments for t in pair)):
            t.zero_()

    @torch.no_grad()
    def step(self, grads: list, loads: torch.Tensor) -> torch.Tensor:
        """Update parameters and router biases; a step whose gradient is not finite changes no parameter."""
        norm = torch.stack([g.float().norm() for g in grads]).norm()
        ok = norm.isfinite()
        self.count += 1
        self.skipped += 1 - ok.float()
        scale = (CLIP / (norm + 1e-6)).clamp_max(1.0)
        (b1, b2), fix = BETAS, [1 - b**self.count for b in BETAS]
        for p, g, (m, v), decay in zip(self.params, grads, self.moments, self.decays, strict=True):
            g = torch.where(ok, g.float() * scale, torch.zeros_like(p))  # no scalar: it would be copied to the device
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            p.sub_(self.rate * ((m / fix[0]) / ((v / fix[1]).sqrt() + EPS) + decay * p))
        bias = self.model.bias
        bias.add_(self.bias_rate * torch.sign(loads.mean(-1, keepdim=True) - loads))
        bias.sub_(bias.mean(-1, keepdim=True))
        return norm


class Phase:
    """Training steps of one shape: static inputs, and the step as a CUDA graph where there is a device for it."""

    def __init__(self, model: Mini, optimizer: Optimizer, rows: int, length: int):
        self.model, self.optimizer, self.rows, self.length = model, optimizer, rows, length
        device = model.bias.device
        self.x, self.y = (torch.zeros(length // CHUNK, rows, CHUNK, dtype=torch.int64, device=device) for _ in range(2))
        self.loss, self.norm = torch.zeros((), device=device), torch.zeros((), device=device)
        self.graph = None

    def body(self) -> None:
        ce, z, loads = self.model.losses(self.model.weights(), self.x, self.y)
        loss = ce.mean()
        grads = torch.autograd.grad(loss + Z_LOSS * z.square().mean(), self.optimizer.params)
        self.norm.copy_(self.optimizer.step(grads, loads.detach()))
        self.loss.copy_(loss.detach())

    def fill(self, stream, g) -> None:
        x, y = stream.sample(self.rows, self.length, g)
        self.x.copy_(layout(x))
        self.y.copy_(layout(y))

    def warm(self, times: int = 3) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(times):
                self.body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def capture(self, pool=None) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.body()
        self.graph = graph

    def step(self) -> None:
        self.graph.replay() if self.graph else self.body()


def prepare(args) -> tuple[Mini, list[Phase], dict]:
    """The model and its two phases, warmed up and captured. Compilation or capture that fails is reported and done
    without: slower, the same arithmetic."""
    facts = {"compiled": False, "captured": False}
    cuda = args.device == "cuda"
    act = torch.bfloat16 if cuda else torch.float32
    model = Mini(mini, device=args.device, act=act, seed=args.seed)
    phases = [Phase(model, o := Optimizer(model), args.batch, args.seq)]
    phases.append(Phase(model, o, args.batch * args.seq // args.long_seq, args.long_seq))
    for phase in phases:
        phase.x.random_(256)
        phase.y.random_(256)
    if not cuda:
        return model, phases, facts
    if args.compile:
        try:
            model.run = Compiler()
            phases[0].warm()
            facts["compiled"] = True
        except Exception as error:
            facts["compile_error"] = f"{type(error).__name__}: {str(error)[:600]}"
            say(f"NOT COMPILED: {facts['compile_error']}")
            model.run = lambda f: f
        say("compiled" if facts["compiled"] else "running uncompiled")
    try:
        pool = None
        for phase in phases:
            phase.warm()
            phase.capture(pool)
            pool = phase.graph.pool()
            say(f"captured {phase.rows} x {phase.length}; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")
        facts["captured"] = True
    except Exception as error:
        facts["capture_error"] = f"{type(error).__name__}: {str(error)[:600]}"
        say(f"NOT CAPTURED: {facts['capture_error']}")
        for phase in phases:
            phase.graph = None
        torch.cuda.synchronize()
    return model, phases, facts


def rate_at(progress: float) -> float:
    """Share of the highest rate after a share of the training time."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def train(args, phases: list[Phase], stream, g, seconds: float, early) -> dict:
    """Train for `seconds`; early() is called once, at EARLY of them. Returns the loss curve and totals."""
    optimizer, curve, steps, tokens, wrote = phases[0].optimizer, [], 0, 0, early is None
    optimizer.reset()
    begin = time.monotonic()
    while (progress := (time.monotonic() - begin) / seconds) < 1:
        if progress > EARLY and not wrote:
            early()
            wrote = True
        phase = phases[progress > 1 - args.long_share]
        factor = rate_at(progress)
        optimizer.rate.fill_(args.lr * factor)
        optimizer.bias_rate.fill_(BIAS_RATE * factor)
        phase.fill(stream, g)
        phase.step()
        steps, tokens = steps + 1, tokens + phase.rows * phase.length
        if steps % args.sync == 0 or not phase.graph:  # keeps the host at most `sync` steps ahead
            loss, norm = phase.loss.item(), phase.norm.item()
            curve.append((round(time.monotonic() - begin, 1), tokens, round(loss, 4), round(norm, 3)))
            if len(curve) % 20 == 1:
                say(f"step {steps}, {tokens / 1e6:.1f} M tokens, loss {loss:.3f} nats, gradient norm {norm:.2f}")
    spent = time.monotonic() - begin
    say(f"{steps} steps, {tokens / 1e6:.1f} M tokens in {spent:.1f} s: {tokens / spent:,.0f} tokens/s")
    stride = max(1, -(-len(curve) // 100))
    return {
        "steps": steps, "tokens": tokens, "training_seconds": round(spent, 1), "tokens_per_second": int(tokens / spent),
        "skipped_steps": int(optimizer.skipped.item()), "curve": [list(row) for row in curve[::stride]],
        "curve_columns": ["seconds", "tokens", "loss_nats", "grad_norm"],
    }  # fmt: skip


def profile(phases: list[Phase]) -> None:
    """Print where a step's device time goes: phases as a whole, then kernels of one uncaptured step."""
    for phase in phases:
        torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(5):
            phase.step()
        torch.cuda.synchronize()
        each = (time.monotonic() - begin) / 5
        speed = phase.rows * phase.length / each
        say(f"{phase.rows} x {phase.length}: {each * 1e3:.1f} ms per step, {speed:,.0f} tokens/s")
    with torch.profiler.profile() as found:
        phases[0].body()
        torch.cuda.synchronize()
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    say(f"one uncaptured step: {sum(e.count for e in kernels)} kernels, {total / 1e3:.1f} ms of device time")
    for e in kernels[:40]:
        print(f"{e.self_device_time_total / 1e3:8.2f} ms {e.count:5} x {e.key[:90]}")


def generate(model: Mini, tokens: int, graph: bool) -> dict:
    begin, model.run = time.monotonic(), lambda f: f  # compiling for single tokens would outlast the run
    with torch.no_grad():
        made = continuations(model, list(PROMPTS), tokens, graph=graph)
    texts = [bytes(t if t < 256 else 35 for t in row[:160]).decode("utf-8", "replace") for row in made]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        say(f"{prompt.decode()!r} -> {text!r}")
    return {
        "tokens_each": tokens, "seconds": round(time.monotonic() - begin, 1), "starts": texts,
        "prompts": [p.decode() for p in PROMPTS], "diversity": [diversity(row) for row in made],
    }  # fmt: skip


def finish(args, model: Mini, stream, held, out: Path, final: Path) -> dict:
    """Export, read back, and measure what was written."""
    found = {"folder_bytes": export(model, final)}
    say(f"wrote {final}: {found['folder_bytes']:,} bytes")
    load(model, final)
    order3 = Order3(stream.tokens)
    say("fitted the order-3 model")
    rows = max(1, args.batch * args.seq // args.long_seq)
    found |= evaluate(model, held, order3, rows=rows, length=args.long_seq, batches=args.eval_batches)
    say(f"held out: {found['bits_per_byte']} bits per byte, order-3 model {found['order3_bits_per_byte']}")
    found |= internals(model, held, rows=4, length=min(1024, args.seq))
    if args.device == "cuda":
        torch.cuda.empty_cache()
    found["generation"] = generate(model, args.generate, args.device == "cuda")
    return found


def versions(args) -> dict:
    chip = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "chip": chip,
            "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--minutes", type=float, default=20, help="wall time of the whole run, at most 25")
    parser.add_argument("--smoke", action="store_true", help="train 20 s, print times, keep only the log")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step of the first phase")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--long-seq", type=int, default=4096, help="of the last phase, with as many tokens per step")
    parser.add_argument("--long-share", type=float, default=0.2, help="share of the training time of the last phase")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the corpus")
    parser.add_argument("--collect-seconds", type=float, default=40)
    parser.add_argument("--reserve", type=float, help="seconds kept for export and measurements")
    parser.add_argument("--eval-batches", type=int, default=40)
    parser.add_argument("--generate", type=int, default=4096, help="tokens of each greedy continuation")
    parser.add_argument("--sync", type=int, default=10, help="steps between looks at the loss")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    if not 0 < args.minutes <= 25:
        parser.error(f"--minutes {args.minutes}: allowed are more than 0 and at most 25")
    args.long_seq = min(args.long_seq, args.batch * args.seq)
    for name in ("seq", "long_seq"):
        if getattr(args, name) % CHUNK or args.batch * args.seq % args.long_seq:
            parser.error(f"{name} = {getattr(args, name)}: allowed are multiples of {CHUNK} that divide batch * seq")
    if args.smoke:
        args.generate, args.eval_batches = min(args.generate, 512), min(args.eval_batches, 8)
    if args.reserve is None:
        args.reserve = min(60.0, 12 * args.minutes)
    return args


def main(argv=None) -> dict:
    args = arguments(argv)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as pool:  # reads, on the host alone, while the model is compiled
        corpus = pool.submit(build, mini, scale=args.scale, seconds=args.collect_seconds, seed=args.seed)
        model, phases, log = prepare(args)
        stream, held, facts = corpus.result()
    stream, held, log = stream.to(args.device), held.to(args.device), log | facts
    say(f"corpus: {facts}")
    if args.smoke and args.device == "cuda":
        profile(phases)
    g = torch.Generator(args.device).manual_seed(args.seed)
    limit = args.minutes * 60 - args.reserve - (time.monotonic() - START)
    seconds = min(20.0, limit) if args.smoke else limit
    if seconds <= 0:
        raise SystemExit(
            f"--minutes {args.minutes}: nothing is left to train in after {time.monotonic() - START:.0f} s"
        )
    scratch = Path(tempfile.mkdtemp()) if args.smoke else args.out
    log |= train(args, phases, stream, g, seconds, lambda: say(f"early: {export(model, scratch / 'early'):,} bytes"))
    log |= finish(args, model, stream, held, args.out, scratch / "final")
    if args.smoke:
        shutil.rmtree(scratch)
    log |= versions(args) | {"config": mini.name, "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"}}
    log["seconds"] = round(time.monotonic() - START, 1)
    if args.device == "cuda":
        log["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    text = json.dumps(log, separators=(",", ":"), ensure_ascii=False)
    (args.out / "train_log.json").write_text(text + "\n", encoding="utf-8")
    say(f"done: {text[:3000]}")
    return log


if __name__ == "__main__":
    main()
