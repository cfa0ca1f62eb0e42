"""One rank under torchrun, and the small walk that every world repeats: prefill, then padded decode steps.

    torchrun --nproc-per-node 2 tests/torchrun_worker.py '{"tp": 2, "dcp": 2}' folder

leaves folder/rank<r>.json with digests of everything the rank computed, and the error of a world whose meshes differ.

    torchrun --nproc-per-node 2 tests/torchrun_worker.py '{"tp": 2, "dcp": 2}'

walks over nccl, or gloo where there is no GPU, and over a LocalWorld on the same device; every rank compares its own
bits of three meshes and of the shipped checkpoint, and the exit code is 0 only if all are equal.
"""

import json
import sys
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

import golden
from reference.checkpoint import Checkpoint
from reference.config import Config
from reference.decoder import Decoder
from reference.numerics import Numerics, fused
from reference.ranks import RankedDecoder, WorldState
from reference.shard import Mesh, rank_weights
from reference.stage import ContractError
from reference.state import DecodeState
from reference.weights import RandomCheckpoint
from reference.world import LocalWorld, TorchWorld, World

WIDE = Config(  # 16 heads for 16 ranks, all else as narrow as the cuts allow
    "wide", vocab=272, hidden=64, layers=3, mla_layers=(1,), heads=16, q_lora=32, dense_inter=64, experts=16, topk=4,
    expert_inter=512, latent=64, shared_inter=64, block=2, bos=256, eos=257, pad=258,
)  # fmt: skip
SHIPPED = Checkpoint(Path(golden.__file__).parent / "mini")
PAGE = 4
PROMPTS = ([256, *b"ranks"], [65])  # the second leaves most context ranks empty
STEPS = 2


def sources(config: Config = WIDE) -> RandomCheckpoint:
    return RandomCheckpoint(config, 1)


def single_state(num: Numerics, config: Config = WIDE) -> DecodeState:
    return DecodeState(config, slots=4, pages=12, page_size=PAGE, num=num, order=3)


def ranked(world: World, num: Numerics, config: Config = WIDE, kind=RankedDecoder, source=None) -> RankedDecoder:
    """A decoder over a world with the weights of a source, by default `sources`, its pages as many as it needs."""
    state = WorldState(config, world, slots=4, pages=12, page_size=PAGE, num=num, order=3)
    weights = rank_weights(source or sources(config), config, world.mesh, world.ranks, world.device)
    return kind(config, weights, world, state)


def walk(decoder: Decoder, rows: int = 3) -> list[Tensor]:
    """Logits of the two prompts and of every decode step, live rows only; memory of nobody is NaN while decoding."""
    state, out, requests = decoder.state, [], []
    for prompt in PROMPTS:
        requests.append(state.open())
        out.append(decoder.prefill(requests[-1], prompt).act["vocab_logits"])
    state.reserve(*((r, r.length + STEPS) for r in requests))
    state.poison(keep=requests)
    for i in range(STEPS):
        logits = decoder.decode(requests, [65 + i, 97 + i], rows=rows).act["vocab_logits"]
        out.append(logits[: len(requests)].clone())
    return out


def digest(t: Tensor) -> str:
    return blake2b(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def digests(decoder: RankedDecoder, rank: int, logits: list[Tensor]) -> dict[str, str]:
    """Everything a rank holds after a walk: logits, buffers of the last step, state."""
    made = {f"logits.{i}": digest(t) for i, t in enumerate(logits)}
    made |= {f"act.{name}": digest(t) for name, t in decoder.spaces[rank].act.items()}
    return made | {f"state.{name}.{layer}": digest(t) for (name, layer), t in decoder.state.of(rank).items()}


def differing(mine: dict[str, str], local: dict[str, str]) -> list[str]:
    return sorted(name for name in mine.keys() | local.keys() if mine.get(name) != local.get(name))


MORE = (dict(tail=0, split_router=True, split_latent=True), dict(tail=2, reduce="two_stage", accumulate="bf16"))


def same_bits(options: dict) -> int:
    """Walk over processes and over a LocalWorld on each process's device: how many meshes differ on this rank."""
    torch.set_num_threads(1)
    world, bad = TorchWorld(**options), 0
    (rank,) = world.ranks
    cases = [(m, WIDE, sources(WIDE)) for m in (options, *(options | more for more in MORE))]
    for mesh, config, source in [*cases, (options, SHIPPED.config, SHIPPED)]:
        world.mesh, found = Mesh(**mesh), []
        for w in (world, LocalWorld(**mesh, device=world.device)):
            d = ranked(w, fused, config, source=source)
            found.append(digests(d, rank, walk(d)))
        names = differing(*found)
        said = f"{len(names)} differ, {names[0]} first" if names else "equal bit for bit"
        about = f"rank {rank}, {world.device}, {config.name}, {json.dumps(mesh)}"
        print(f"{about}: {len(found[0])} tensors, {said}", flush=True)
        bad += bool(names)
    world.close()
    return bad


def main(options: dict, folder: Path) -> None:
    torch.set_num_threads(1)
    world = TorchWorld(**options, device="cpu")
    decoder = ranked(world, fused)
    logits = walk(decoder)
    (rank,) = world.ranks
    found = digests(decoder, rank, logits)
    try:
        world.mesh = Mesh(options["tp"], lse_base="2" if rank == 1 else "e")
        world.agree()
    except ContractError as raised:  # it has closed the world
        found["error"] = str(raised)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(int(same_bits(json.loads(sys.argv[1])) > 0))
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
