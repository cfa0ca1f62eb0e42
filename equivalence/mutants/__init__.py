"""Kernels broken on purpose, by small named edits of the true ones, to measure what the checkers catch.

    ./tools/k3 order --score                    # every mutant, every checker; false alarms on the clean kernels
    ./tools/k3 order --toolchain FOLDER         # the order proof with another CuTe DSL

Rooms: `entry` says what a mutant is; `of_kda`, `of_attn_res`, `of_linear`, `of_wgmma` and `of_patterns` hold them,
`catalog` all of them by name. `patterns` are small kernels in the shapes that production kernels have or will have:
flags, counters, rings. `scenes` gives each base its arguments, `stream` the launches around it, `checkers` asks one
checker, `score` all of them. `toolchain` and `compile_child` compile with other versions.

Families. "ordering": a wait, trigger, barrier, phase, fence or flag is missing, late, early or wrong. "hoisted load": a
produced tensor is read by a load that a compiler may lift. "state": values or rows of state are wrong in any order.
"quality": right, but slow or beyond proof. A mutant counts as caught if on each target where it is a fault some checker
sees it; wrong values are looked for on the first target alone.

Of the public faults in the catalog, M7 (Lamport buffers), M10 (commits after verification), M12 (LSE bases) and M18
(fp8 scales) have no kernel here that could express them. M3 appears as a reader that waits too late behind a producer
that triggers at once. What checkers can and cannot see: equivalence/CHECKERS.md.
"""
