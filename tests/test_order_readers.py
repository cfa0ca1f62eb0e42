"""The two readers of the order checker, on short texts: control flow, addresses, and what they refuse to guess."""

from types import SimpleNamespace

import pytest
import torch

from equivalence.isa import Unreadable, cubin, ptx, sass
from equivalence.isa.program import Program
from equivalence.isa.values import parameters, untraced
from equivalence.mutants import patterns
from equivalence.order import check as order_check
from equivalence.order.paths import before_wait, route, syncs_before
from equivalence.order.rules import Case, View, followed, prefetched
from equivalence.order.trace import addresses
from fast import linear
from fast.kernel import pick

WAIT = "griddepcontrol.wait;"
PARAMETERS = cubin.Parameters(0x380, ((0, 8), (8, 8), (16, 4), (24, 8)))


def from_ptx(body: str, declared=(".b64 a", ".b64 b", ".u32 n")) -> Program:
    head = ".entry k(" + ", ".join(f".param {d}" for d in declared) + ")\n{\n"
    registers = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;\n"
    loads = "ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b];\n"
    return ptx.read(f".version 9.4\n{head}{registers}{loads}{body}\n}}\n", "k")


def from_sass(*lines: str) -> Program:
    """Instructions 16 bytes apart; a line that ends in a colon is a label."""
    out, at = [".text.k:"], 0
    for line in lines:
        out.append(line if line.endswith(":") else f"        /*{at:04x}*/                   {line} ;")
        at += 0 if line.endswith(":") else 16
    return sass.read("\n".join(out), "k", PARAMETERS)


def origins(program: Program) -> list[set[int]]:
    return [set(parameters(v)) for _, v in sorted(addresses(program).items())]


def doubts(program: Program) -> list[str]:
    return [inst.doubt for inst in program if inst.doubt]


def early(program: Program) -> list[str]:
    return [program.insts[i].op for i in sorted(before_wait(program)) if program.insts[i].access]


LOAD = "ld.global.b32 %r1, [%rd1];"
SPIN = "{ .reg .pred P1; AGAIN: mbarrier.try_wait.parity.shared.b64 P1, [%r2], 0; @P1 bra DONE; bra AGAIN; DONE: }"


@pytest.mark.parametrize(
    ("body", "is_early"),
    [
        (f"{WAIT} {LOAD} ret;", False),
        (f"{LOAD} {WAIT} ret;", True),
        (f"@%p1 bra L; {WAIT} L: {LOAD} ret;", True),
        (f"@%p1 bra L; {WAIT} bra M; L: {WAIT} M: {LOAD} ret;", False),
        (f"bra M; L: {LOAD} ret; M: {WAIT} bra L;", False),
        (f"@%p1 {WAIT} @%p1 {LOAD} ret;", False),
        (f"@%p1 {WAIT} @!%p1 {LOAD} ret;", True),
        (f"@%p1 {WAIT} @!%p1 bra L; {LOAD} L: ret;", False),
        (f"@%p1 {WAIT} setp.eq.b32 %p1, %r1, 0; @%p1 {LOAD} ret;", True),
        (f"@%p1 {WAIT} barrier.red.or.pred %p1, 0, %p2; @%p1 {LOAD} ret;", True),
        (f"@%p1 {WAIT} @!%p1 {WAIT} {LOAD} ret;", False),
        (f"{SPIN} {SPIN} {WAIT} {LOAD} ret;", False),
        (f"{SPIN} {LOAD} {SPIN} {WAIT} ret;", True),
        (f"brx.idx %r1, T; T: .branchtargets L, M; L: {WAIT} M: {LOAD} ret;", True),
        (f"brx.idx %r1, T; T: .branchtargets L, M; L: {WAIT} bra N; M: {WAIT} N: {LOAD} ret;", False),
        (f"L: @%p1 bra N; {WAIT} bra L; N: {LOAD} ret;", True),
        (f"@%p1 exit; {WAIT} {LOAD} ret;", False),
    ],
)
def test_before_the_wait_is_a_matter_of_paths(body, is_early):
    assert early(from_ptx(body)) == ["ld.global.b32"] * is_early


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("add.s64 %rd3, %rd1, 8; ld.global.b32 %r1, [%rd3+4];", {0}),
        ("selp.b64 %rd3, %rd1, %rd2, %p1; ld.global.b32 %r1, [%rd3];", {0, 1}),
        ("mov.b64 %rd3, %rd1; L: ld.global.b32 %r1, [%rd3]; add.s64 %rd3, %rd3, 4; @%p1 bra L;", {0}),
        ("mov.b64 %rd3, %rd1; L: ld.global.b32 %r1, [%rd3]; mov.b64 %rd3, %rd2; @%p1 bra L;", {0, 1}),
        ("mov.b64 {%r1, %r2}, %rd2; mov.b64 %rd3, {%r1, %r2}; ld.global.b32 %r1, [%rd3];", {1}),
        ("ld.param.u32 %r1, [n]; mad.wide.u32 %rd3, %r1, 4, %rd2; ld.global.b32 %r1, [%rd3];", {1}),
        ("cvta.to.global.u64 %rd3, %rd2; ld.b32 %r1, [%rd3];", {1}),
        (".local .b8 depot[8]; mov.b64 %rd4, depot; st.local.b64 [%rd4], %rd2; ld.local.b64 %rd3, [%rd4]; "
         "ld.global.b32 %r1, [%rd3];", {1}),
        ("{ .reg .b64 %rd1; mov.b64 %rd1, %rd2; ld.global.b32 %r1, [%rd1]; }", {1}),
    ],
)  # fmt: skip
def test_addresses_in_ptx(body, wanted):
    program = from_ptx(body + " ret;")
    assert origins(program) == [wanted]
    assert not any(untraced(v) for v in addresses(program).values())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("ld.global.b64 %rd3, [%rd1]; ld.global.b32 %r1, [%rd3];", "it was loaded from memory, out of 0"),
        ("ld.shared.b64 %rd3, [%r1]; ld.global.b32 %r1, [%rd3];", "it was loaded from shared memory"),
        ("ld.shared.b64 %rd3, [%r1]; selp.b64 %rd4, %rd1, %rd3, %p1; ld.global.b32 %r1, [%rd4];", "from shared memory"),
        ("mov.b64 %rd3, 4096; ld.global.b32 %r1, [%rd3];", "it starts from no parameter"),
        ("ld.global.b32 %r1, [%rd8];", "the checker does not understand how it is made"),
        ("ld.global.b32 %r1, [table];", "the checker does not understand how it is made"),
    ],
)
def test_addresses_that_cannot_be_traced(body, why):
    values = addresses(from_ptx(body + " ret;"))
    assert why in untraced(values[max(values)])


def test_generic_access_to_shared_memory_is_not_global():
    program = from_ptx(".shared .b8 box[16]; mov.b64 %rd3, box; cvta.shared.u64 %rd4, %rd3; ld.b32 %r1, [%rd4+8]; ret;")
    (value,) = addresses(program).values()
    assert not parameters(value) and not untraced(value)


@pytest.mark.parametrize(
    ("text", "kind", "coherent"),
    [
        ("ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]", "load", False),
        ("ldu.global.b32 %r1, [%rd1]", "load", False),
        ("ld.volatile.global.b32 %r1, [%rd1]", "load", True),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", "load", True),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3]", "load", True),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], "
         "[%r4]", "load", True),
        ("multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]", "load", True),
        ("prefetch.global.L1 [%rd1]", "load", True),
        ("prefetch.global.L2 [%rd1]", "prefetch", True),
        ("prefetch.global.L2::evict_last [%rd1]", "prefetch", True),
        ("cp.async.bulk.prefetch.L2.global [%rd1], %r1", "prefetch", True),
        ("st.global.b32 [%rd1], %r1", "store", True),
        ("st.release.sys.global.b32 [%rd1], %r1", "store", True),
        ("multimem.st.relaxed.sys.global.f32 [%rd1], %f1", "store", True),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2", "store", True),
        ("discard.global.L2 [%rd1], 128", "store", True),
        ("atom.global.add.u32 %r1, [%rd1], 1", "atomic", True),
        ("red.release.gpu.global.add.s32 [%rd1], 1", "atomic", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], %r2", "atomic", True),
        ("ld.shared.b32 %r1, [%r2]", None, None),
        ("st.async.mmio.release.sys.global.b32 [%rd1], %r2", "store", True),
        ("red.async.mmio.release.sys.global.add.u32 [%rd1], %r2", "atomic", True),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]", None, None),
        ("red.async.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3]", None, None),
        ("cp.async.commit_group", None, None),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]", None, None),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5]", None, None),
    ],
)  # fmt: skip
def test_kinds_of_ptx_instructions(text, kind, coherent):
    inst = from_ptx(text + "; ret;").insts[2]
    assert not inst.doubt
    if kind is None:
        assert inst.access is None
    else:
        assert (inst.access.kind, inst.access.coherent) == (kind, coherent)
        assert "%rd1" in inst.access.address


@pytest.mark.parametrize(
    "text", ["wmma.load.a.sync.f16 {%r1}, [%rd1], %r2", "call (%r1), helper, (%rd1)", "tex.1d %r1"]
)
def test_what_is_not_known_is_a_doubt(text):
    assert len(doubts(from_ptx(text + "; ret;"))) == 1


@pytest.mark.parametrize(
    ("scope", "orders"),
    [("acq_rel.gpu", {"acquire", "release"}), ("acq_rel.cta", set()), ("release.sys", {"release"}),
     ("acquire", {"acquire"})],
)  # fmt: skip
def test_only_scopes_beyond_the_block_order_anything(scope, orders):
    assert from_ptx(f"atom.{scope}.global.add.u32 %r1, [%rd1], 1; ret;").insts[2].sync == orders


def test_damaged_text_is_refused():
    with pytest.raises(Unreadable, match=r"the PTX has no \.entry other"):
        ptx.read(".entry k() { ret; }", "other")
    with pytest.raises(Unreadable, match=r"PTX line 3: cannot read 'bra \$L'"):
        ptx.read(".entry k()\n{ ret;\nbra $L\n", "k")
    for short in (".entry k(.param .b64 a", ".entry k(.param .b64 a)", ".entry k()\n{ ld.global.b32 %r1; }"):
        with pytest.raises(Unreadable, match=r"the PTX breaks off in the parameters of k|PTX line 2: cannot read"):
            ptx.read(short, "k")
    with pytest.raises(Unreadable, match=r"jumps to \$L, which is not in this function"):
        ptx.read(".entry k()\n{ bra $L; }", "k")
    with pytest.raises(Unreadable, match="the disassembly has no function k"):
        sass.read(".text.other:\n", "k", PARAMETERS)
    with pytest.raises(Unreadable, match=r"SASS line .* is not understood"):
        from_sass("%%%")
    build = patterns.GEMV.compile("sm_90a")
    for damaged in (b"", build.cubin[:200], build.cubin[: len(build.cubin) // 2], b"\0" * 4096):
        with pytest.raises(Unreadable):
            cubin.parameters(damaged, build.symbol)
    with pytest.raises(Unreadable, match=r"the cubin has no section \.nv\.info\.other"):
        cubin.parameters(build.cubin, "other")


STG = "STG.E desc[UR4][R2.64], R0"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["LDC.64 R2, c[0x0][0x388]", "IMAD.WIDE R2, R5, 0x2, R2", STG], {1}),
        (["IMAD.WIDE R2, R5, 0x2, c[0x0][0x380]", STG], {0}),
        (["IADD3 R2, P0, PT, R4, c[0x0][0x388], RZ", "IADD3.X R3, PT, PT, R5, c[0x0][0x38c], RZ, P0, !PT", STG], {1}),
        (["LDCU.128 UR8, c[0x0][0x380]", "MOV R2, UR10", "MOV R3, UR11", STG], {1}),
        (["LDC.64 R2, c[0x0][R4+0x380]", STG], {0, 1, 3}),
        (["LDC.64 R6, c[0x0][0x380]", "LDC.64 R2, c[0x0][0x388]", "SEL R2, R2, R6, P0", "SEL R3, R3, R7, P0", STG],
         {0, 1}),
        (["LDC.64 R6, c[0x0][0x398]", "STL.64 [R1+0x8], R6 (*\"SpillRefill\"*)", "LDC.64 R6, c[0x0][0x380]",
          "LDL.64 R2, [R1+0x8] (*\"SpillRefill\"*)", STG], {3}),
        (["LDC.64 R6, c[0x0][0x398]", "STL.64 [R9], R6", "LDL.64 R2, [R9]", STG], {3}),
        (["LDC.64 R6, c[0x0][0x380]", "R2UR UR6, R6", "R2UR UR7, R7", "MOV R2, UR6", "MOV R3, UR7", STG], {0}),
        (["LDC.64 R2, c[0x0][0x380]", "@P0 LDC.64 R2, c[0x0][0x388]", STG], {0, 1}),
        (["LDC.64 R2, c[0x0][0x380]", "@P0 LDC.64 R2, c[0x0][0x388]", "@P0 " + STG], {1}),
        (["LDC.64 R2, c[0x0][0x380]", "@P0 LDC.64 R2, c[0x0][0x388]", "@!P0 " + STG], {0}),
        (["LDC.64 R2, c[0x0][0x380]", "@P0 LDC.64 R2, c[0x0][0x388]", "ISETP.NE.AND P0, PT, R5, RZ, PT", "@P0 " + STG],
         {0, 1}),
        (["LDC.64 R2, c[0x0][0x380]", "@P0 LDC.64 R2, c[0x0][0x388]", "R2P PR, R5, 0x7f", "@P0 " + STG], {0, 1}),
        (["LDC.64 R2, c[0x0][0x380]", "CALL.REL.NOINC `($helper)", "IADD.64 R2, R2, c[0x0][0x388]", STG, "EXIT",
          "$helper:", "MOV R2, R4", "MOV R3, R5", "RET.REL.NODEC R4 `(k)"], {1}),
        (["@P0 LDC.64 R2, c[0x0][0x380]", "@!P0 LDC.64 R2, c[0x0][0x388]", STG], {0, 1}),
        (["LDC.64 R2, c[0x0][0x380]", "BRA.U UP0, `(.L_x_1)", "LDC.64 R2, c[0x0][0x388]", ".L_x_1:", STG], {0, 1}),
    ],
)  # fmt: skip
def test_addresses_in_sass(lines, wanted):
    program = from_sass(*lines, "EXIT")
    assert origins(program) == [wanted] and not doubts(program)
    assert not any(untraced(v) for v in addresses(program).values())


@pytest.mark.parametrize(
    "lines",
    [
        ["LDG.E.64 R2, desc[UR4][R6.64]", STG],
        ["LDC.64 R2, c[0x0][0x390]", STG],
        ["LDC.64 R2, c[0x0][0x358]", STG],
        ["LDC.64 R2, c[0x0][0x380]", "@P0 LDS.64 R2, [R9]", STG],
        ["LDC.64 R2, c[0x0][0x380]", "LDG.E.ENL2.256 R8, R2, desc[UR4][R6.64]", STG],
        ["FADD R2, R3, R4", STG],
    ],
)
def test_addresses_in_sass_that_cannot_be_traced(lines):
    program = from_sass(*lines, "EXIT")
    values = addresses(program)
    assert untraced(values[max(values)])


LDG = "LDG.E R0, desc[UR4][R2.64]"


@pytest.mark.parametrize(
    ("lines", "is_early"),
    [
        (["ACQBULK", LDG, "EXIT"], False),
        ([LDG, "ACQBULK", "EXIT"], True),
        (["@!PT " + LDG, "ACQBULK", "EXIT"], False),
        (["@P0 BRA `(.L_x_1)", "ACQBULK", ".L_x_1:", LDG, "EXIT"], True),
        (["BRA.U !UP0, `(.L_x_1)", "ACQBULK", ".L_x_1:", LDG, "EXIT"], True),
        (["@P0 BRA 0x30", "ACQBULK", "BRA 0x50", "ACQBULK", "BRA 0x50", LDG, "EXIT"], False),
        (["@P0 ACQBULK", "@P0 " + LDG, "EXIT"], False),
        (["@P0 ACQBULK", "@P0 BRA P1, `(.L_x_1)", "EXIT", ".L_x_1:", LDG, "EXIT"], False),
        (["@P0 ACQBULK", "@P0 BRA P1, `(.L_x_1)", LDG, "EXIT", ".L_x_1:", "EXIT"], True),
        (["BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_1)", "ACQBULK", "BSYNC B0", ".L_x_1:", "BSYNC B0", ".L_x_2:", LDG,
          "EXIT"], True),
        (["BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_1)", "ACQBULK", "BSYNC B0", ".L_x_1:", "ACQBULK", "BSYNC B0", LDG,
          ".L_x_2:", "EXIT"], False),
        (["BSSY B0, `(.L_x_2)", "BSYNC B0", ".L_x_2:", "ACQBULK", "BSSY B0, `(.L_x_3)", "BSYNC B0", ".L_x_3:", LDG,
          "EXIT"], False),
        (["CALL.REL.NOINC `($helper)", "ACQBULK", "CALL.REL.NOINC `($helper)", LDG, "EXIT", "$helper:",
          "IADD3 R0, R0, R1, RZ", "RET.REL.NODEC R4 `(k)"], False),
    ],
)  # fmt: skip
def test_before_the_wait_in_sass(lines, is_early):
    program = from_sass(*lines)
    assert not doubts(program)
    assert early(program) == ["LDG.E"] * is_early


@pytest.mark.parametrize(
    ("text", "kind", "address"),
    [
        ("LDG.E.NA.128 R4, desc[UR4][R2.64+0x10]", "load", ("R2", "R3")),
        ("LDG.E.64.STRONG.GPU R4, desc[UR4][UR6.64]", "load", ("UR6", "UR7")),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]", "load", ("R2", "R3")),
        ("UBLKCP.S.G [UR8], [UR4], UR11", "load", ("UR4", "UR5")),
        ("UBLKCP.G.S [UR4], [UR8], UR11", "store", ("UR4", "UR5")),
        ("UBLKRED.G.S.ADD.F32 [UR4], [UR8], UR11", "atomic", ("UR4", "UR5")),
        ("ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR6][R4.64], R3", "atomic", ("R4", "R5")),
        ("REDG.E.ADD.S32.STRONG.GPU desc[UR4][R2.64], R5", "atomic", ("R2", "R3")),
        ("CCTL.E.PF2 [R2.64]", "prefetch", ("R2", "R3")),
        ("STG.E.U16 desc[UR4][R2.64+-0x400], R3", "store", ("R2", "R3")),
    ],
)
def test_kinds_of_sass_instructions(text, kind, address):
    access = from_sass(text, "EXIT").insts[0].access
    assert (access.kind, access.address, access.coherent) == (kind, address, True)
    constant = from_sass("LDG.E.U16.CONSTANT R4, desc[UR4][R2.64]", "EXIT").insts[0].access
    assert not constant.coherent


@pytest.mark.parametrize(
    "lines",
    [
        ["NEWLD.E R0, [R2.64]", "EXIT"],
        ["BRX R2 -0x100", "EXIT"],
        ["BSYNC B3", "EXIT"],
        ["CALL.REL.NOINC `($helper)", "EXIT", "$helper:", LDG, "RET.REL.NODEC R4 `(k)"],
        ["CALL.ABS.NOINC R2", "EXIT"],
        ["UBLKCP.T.G [UR8], [UR4], UR11", "EXIT"],
        ["TLD.LZ R0, R2, UR4, 1D", "EXIT"],
    ],
)
def test_sass_that_is_not_known_is_a_doubt(lines):
    assert doubts(from_sass(*lines))


def test_jump_tables_are_followed():
    lines = ['BRX R2 -0x100 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', ".L_x_1:", "ACQBULK", ".L_x_2:", LDG, "EXIT"]
    program = from_sass(*lines)
    assert not doubts(program) and early(program) == ["LDG.E"]


def test_routes_and_syncs_are_told():
    program = from_ptx(f"bar.sync 0; griddepcontrol.launch_dependents; @%p1 bra L; {WAIT} L: bar.sync 0; {LOAD} ret;")
    load = next(i for i, inst in enumerate(program) if inst.access)
    branch = next(i for i, inst in enumerate(program) if inst.targets)
    assert route(program, load) == [(branch, True)]
    assert [program.insts[i].op for i in syncs_before(program)[load]] == ["bar.sync", "bar.sync"]


def view_case(ptx_body: str, *sass_lines: str, roles="WX") -> Case:
    role = {"W": patterns.W, "X": patterns.X}
    args = tuple(SimpleNamespace(name=n, role=role[r]) for n, r in zip("ab", roles, strict=True))
    kernel = SimpleNamespace(name="k", args=args, pdl=True)
    return Case(kernel, "sm_103a", View(from_ptx(ptx_body)), View(from_sass(*sass_lines)))


def test_the_two_readings_must_agree():
    whole = ["LDC.64 R2, c[0x0][0x380]", LDG, "ACQBULK", "EXIT"]
    assert not list(followed(view_case(f"{LOAD} {WAIT} ret;", *whole)))
    (finding,) = followed(view_case(f"{LOAD} {WAIT} ret;", "ACQBULK", "EXIT"))
    assert (finding.severity, finding.tensor, finding.where) == ("unproven", "a", "SASS")
    finding = next(followed(view_case("ret;", "LDC.64 R2, c[0x0][0x398]", LDG, "EXIT")))
    assert (finding.tensor, finding.text) == ("parameter 3", "the kernel has no Arg for this parameter")


def test_a_prefetch_that_ptxas_sank_is_reported():
    sunk = ["LDC.64 R2, c[0x0][0x380]", "ACQBULK", LDG, "EXIT"]
    (finding,) = prefetched(view_case(f"{LOAD} {WAIT} ret;", *sunk))
    assert (finding.severity, finding.tensor, finding.where) == ("quality", "a", "SASS 0x0020")


def test_a_pointer_loaded_under_a_vote_is_known_to_the_lanes_that_vote():
    """ptxas loads `out` only where some lane stores: a lane that stores has voted. Another vote leaves it open."""
    x, w, out = (torch.empty(n, dtype=torch.bfloat16, device="meta") for n in ((1, 7168), (1536, 7168), (1, 1536)))
    (kernel,) = pick(linear.linear, dict(x=x, w=w, out=out), {})
    build = kernel.compile("sm_103a")
    text = cubin.disassemble([(build.cubin, build.symbol)], build.target)[0]
    assert text.count("VOTEU.ALL UP1, P0") == 1
    assert order_check._report(build, *order_check._views(build, text, {})).verdict == "proved"
    text = text.replace("VOTEU.ALL UP1, P0", "VOTEU.ANY UP1, P0")
    broken = order_check._report(build, *order_check._views(build, text, {}))
    assert {f.tensor for f in broken.findings if f.rule == "R8"} == {"w"}
