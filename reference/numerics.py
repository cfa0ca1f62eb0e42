"""Three precision modes behind one source text: where values are lifted, and where they are rounded.

`exact` computes in float64 and never rounds: the oracle. `fused` computes in float32 and rounds at the production
rounding points of SPEC.md. `unfused` adds the bf16 roundings between the kernels of the unfused chain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("exact", "fused", "unfused")
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Numerics:
    """A precision mode. Laws call its functions; nothing else in a law changes a dtype."""

    mode: str

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"precision mode {self.mode!r}: allowed are {', '.join(MODES)}")

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.mode == "exact" else torch.float32

    def up(self, x: Tensor) -> Tensor:
        """Lift to the compute type: float64 in `exact`, float32 otherwise."""
        return x.to(self.compute)

    def round(self, x: Tensor) -> Tensor:
        """A production rounding point: to bf16, except in `exact`."""
        return x if self.mode == "exact" else x.to(torch.bfloat16)

    def round8(self, x: Tensor) -> Tensor:
        """A production rounding point to fp8 e4m3: nearest even, saturating at 448, NaN kept; none in `exact`."""
        return x if self.mode == "exact" else x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def chain(self, x: Tensor) -> Tensor:
        """A rounding that exists only between kernels of the unfused chain; the value stays in the compute type."""
        return x.to(torch.bfloat16).to(x.dtype) if self.mode == "unfused" else x

    def storage(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which this mode keeps a tensor that the contract declares as `dtype`."""
        return torch.float64 if self.mode == "exact" and dtype.is_floating_point else dtype


exact, fused, unfused = (Numerics(m) for m in MODES)
