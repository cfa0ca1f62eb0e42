"""All mutants by name."""

from . import of_attn_res, of_kda, of_linear, of_patterns, of_wgmma
from .entry import Mutant

CATALOG: dict[str, Mutant] = {
    m.name: m for module in (of_kda, of_attn_res, of_linear, of_wgmma, of_patterns) for m in module.MUTANTS
}
