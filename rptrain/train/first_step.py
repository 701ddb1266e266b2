"""The phase of an engine's first step, in which kernels are compiled."""

from rptrain.engine.engine import Engine
from rptrain.kernels.compiling import COMPILED
from rptrain.utils.phases import Phase
from rptrain.utils.text import counted


def first_step(engine: Engine) -> Phase:
    """How far the first step of an engine is, and how many kernels were compiled in it so far."""
    phase, before = Phase("running the first step", unit=""), COMPILED.count

    def update() -> None:
        phase.done, phase.total = engine.of_first_step
        if compiled := COMPILED.count - before:
            phase.name = f"running the first step, {counted(compiled, 'kernel')} compiled"

    phase.update = update
    return phase
