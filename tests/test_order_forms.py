"""What makes the order proof quick, against the slow way: forms of instructions, equal texts, rare collections."""

import gc
from dataclasses import fields
from types import SimpleNamespace

import pytest

from equivalence.isa import ptx, sass
from equivalence.isa.cubin import Parameters
from equivalence.isa.program import Inst
from equivalence.order import check
from equivalence.order.collector import SELDOM, seldom_collected

PARAMETERS = Parameters(0x380, ((0, 8), (8, 8)))


def told(inst: Inst) -> dict:
    return {f.name: getattr(inst, f.name) for f in fields(Inst)}


SASS = [
    "LDG.E.NA.128 R4, desc[UR4][R2.64+0x10]", "@!P3 LDG.E.64 R8, desc[UR4][R6.64]", "STG.E desc[UR4][R1.64], R0",
    "LDG.E R4, desc[UR6][R4+UR4.64]", "LDG.E.ENL2.256 R8, R12, desc[UR4][R4.64]", "STL.64 [R1+0x8], R6",
    "STL.128 [R9], R4", "LDL.64 R2, [R1+0x8]", "LDC.64 R2, c[0x0][0x388]", "LDC.64 R2, c[0x0][R4+0x380]",
    "IMAD.WIDE R2, R5, 0x2, c[0x0][0x380]", "SEL R2, R2, R6, P0", "VOTE.ANY P1, !P2", "VOTEU.ALL UP1, P0",
    "R2P PR, R5, 0x7f", "R2UR UR6, R6", "LDSM.16.M88.4 R4, [R9+UR4]", "@P1 EXIT", "BRA.U !UP0, 0x40", "@!PT BAR.SYNC",
    "HGMMA.64x8x16.F32 R24, R4, gdesc[UR8], R24", "UBLKCP.S.G [UR8], [UR4], UR11", "BSSY B0, `(.L_x_R2)",
    "IADD3.X R3, PT, PT, R5, c[0x0][0x38c], RZ, P0, !PT", "FADD R10, -R11.reuse, |R12|", "SHFL.BFLY PT, R3, R2, 0x1",
]  # fmt: skip


@pytest.mark.parametrize("text", SASS)
def test_a_form_is_what_reading_the_instruction_itself_gives(text):
    line = f"  {text} ;"
    wanted = sass._instruction(sass._INST.match(line), PARAMETERS)
    for _ in range(2):
        assert told(sass._made(line, PARAMETERS)) == told(wanted)


def test_instructions_of_one_form_are_each_their_own():
    one, two = (sass._made(f" @P{n} BRA 0x{n}0 ;", None) for n in (2, 3))
    one.targets = ()
    assert (two.targets, two.guard, one.guard) == (("0x30",), ("P3", True), ("P2", True))


def body(text: str):
    return list(ptx.read(f".entry k(.param .b64 a)\n{{ {text} ret;\n}}\n", "k"))


@pytest.mark.parametrize("declared, names, unique", [
    (".reg .b32 %r<9>;", "%r1 %r8", "%r1 %r8"), (".reg .b32 %r1<3>;", "%r10 %r12", "%r10 %r12"),
    (".reg .b32 x, y;", "x y", "x y"), (".reg .b32 %r<9>; { .reg .b32 %r1;", "%r1 %r2", "%r1@1 %r2"),
])  # fmt: skip
def test_registers_are_found_as_declared(declared, names, unique):
    into, source = names.split()
    inst = body(f"{declared} @!{into} add.s32 {into}, {source}, 4; {'}' * declared.count('{')}")[0]
    into, source = unique.split()
    assert (inst.guard, inst.writes, inst.reads) == ((into, False), (into,), (source,))
    assert inst.moves == ((into, (source,), False),)


def test_one_form_serves_registers_parameters_and_variables():
    insts = body(".reg .b64 %rd<9>; .shared .b8 box[8]; mov.b64 %rd1, %rd2; mov.b64 %rd3, %rd1; mov.b64 %rd4, box; "
                 "mov.b64 %rd5, none;")  # fmt: skip
    made = [inst.moves[0].operands for inst in insts[:4]]
    assert made[:2] == [("%rd2",), ("%rd1",)] and len(set(made)) == 4


@pytest.mark.parametrize("text, wanted", [
    (".target sm_90a\n.entry k()\nk_1 ak k", "\n.entry kernel()\nkernel_1 ak kernel"),
    ("kk k\n.target x\n.target y", "kernelk kernel\n\n"), ("", ""), ("a\n .target k", "a\n .target kernel"),
])  # fmt: skip
def test_ptx_without_names(text, wanted):
    assert check._body(SimpleNamespace(ptx=text, symbol="k")) == wanted


def test_disassemblies_are_the_same_but_for_addresses():
    one = "        /*0010*/                   MOV R1, R2 ;\n        /*0020*/                   @P0 BRA 0x10 ;"
    moved = one.replace("0010", "10010").replace("0020", "10020").replace("BRA 0x10", "BRA 0x10010")
    assert check._same(one, moved)
    for other in (one.replace("R2", "R3"), one.replace("@P0", "@P1"), f"{one}\n", one.splitlines()[0]):
        assert not check._same(one, other) and not check._same(other, one)


def test_collections_are_rare_inside_only():
    before, kept = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collected():
        with seldom_collected():
            pass
        assert gc.get_threshold()[0] == SELDOM and gc.get_freeze_count() > 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, kept)
