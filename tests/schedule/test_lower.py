"""Lowering: the chains of accesses to boundary buffers, and transfer windows."""

from rptrain.schedule.lower import boundaries, windows
from rptrain.schedule.plan import Plan


def io_table(text):
    bounds = boundaries(Plan.parse(f"{text} | N=1 M=1 MR=1").stages)
    rows = []
    for io in bounds.stages:
        parts = [f"x{io.x_in.boundary}.{io.x_in.order}"]
        parts += [f"dy{io.dy_in.boundary}.{io.dy_in.order}"] if io.dy_in else []
        parts += [f">x{a.boundary}.{a.order}" for a in io.x_out]
        parts += [f">dx{io.dx_out.boundary}.{io.dx_out.order}"] if io.dx_out else []
        rows.append(" ".join(parts))
    return rows, bounds.chain


def test_accesses_are_numbered_in_dispatch_order():
    rows, chain = io_table("F0-2 F3-3 FB4-4 B2-3 B0-1")
    assert rows == [
        "x0.1 >x2.0 >x3.0",  # boundary 2 is where a backward stage starts, inside the forward stage
        "x3.1 >x4.0",
        "x4.1 >dx4.2",
        "x2.1 dy4.3 >dx2.2",
        "x0.2 dy2.3 >dx0.3",
    ]
    assert chain == {0: 5, 2: 4, 3: 2, 4: 4}  # boundary 0: written and read by the host beside


def test_one_fused_stage_needs_boundary_0_only():
    rows, chain = io_table("FB0-4")
    assert rows == ["x0.1 >dx0.2"]
    assert chain == {0: 4}


def test_windows_cover_every_element_once_and_balance_bytes():
    sizes = [(0, 1000), (3, 70), (1, 250)]
    dealt = windows(sizes, 4, 100)
    seen = {unit: [False] * numel for unit, numel in sizes}
    for chunk in (c for window in dealt for c in window):
        assert chunk.stop - chunk.start <= 100
        assert not any(seen[chunk.unit][chunk.start : chunk.stop])
        seen[chunk.unit][chunk.start : chunk.stop] = [True] * (chunk.stop - chunk.start)
    assert all(all(flags) for flags in seen.values())
    loads = [sum(c.stop - c.start for c in window) for window in dealt]
    assert max(loads) - min(loads) <= 100
