"""Check that a plan computes every layer once forward and once backward, in order."""

from rptrain.schedule.plan import Plan, Stage


class PlanError(ValueError):
    """The plan does not compute the model; the message shows the stages and marks the place."""


def validate(plan: Plan, num_layers: int) -> None:
    """Raises PlanError unless `plan` covers layers 0 ... num_layers - 1 (the head last) as the paper's section 3.2
    asks: sum(F) + B1 = L, sum(B) = L, B1 fused and holding the head, forward before backward.
    """

    def fail(index: int, why: str) -> PlanError:
        words = [str(stage) for stage in plan.stages]
        column = sum(len(word) + 1 for word in words[:index])
        mark = "^" * (len(words[index]) if index < len(words) else 1)
        return PlanError(f"{why}\n  {' '.join(words)}\n  {' ' * column}{mark}")

    if plan.devices < 1 or plan.round_size < 1 or plan.micro_batches % plan.round_size:
        raise PlanError(f"{plan.micro_batches} micro-batches do not make whole rounds of {plan.round_size}")
    if plan.replicas < 1 or plan.rounds % plan.replicas:
        raise PlanError(f"{plan.rounds} rounds cannot be divided among {plan.replicas} replicas")
    if plan.devices > plan.replicas and plan.devices % plan.replicas:
        raise PlanError(f"{plan.devices} devices cannot be divided among {plan.replicas} replicas")
    fused = [i for i, stage in enumerate(plan.stages) if stage.kind == "FB"]
    if len(fused) != 1:
        raise fail(fused[1] if fused else len(plan.stages), "a plan has exactly one fused stage FB")
    for index, stage in enumerate(plan.stages):
        kind = "F" if index < fused[0] else "FB" if index == fused[0] else "B"
        if stage.kind != kind:
            raise fail(index, f"{stage} stands where a stage of kind {kind} belongs")
        if stage.start >= stage.stop:
            raise fail(index, f"{stage} is empty")
        expected = _expected_edge(plan, index, fused[0], num_layers)
        edge = stage.stop if stage.backward else stage.start
        if edge != expected:
            raise fail(index, f"{stage} should {'end before' if stage.backward else 'start at'} layer {expected}")
    if plan.stages[fused[0]].start != (plan.stages[fused[0] - 1].stop if fused[0] else 0):
        raise fail(fused[0], "the fused stage does not start where the forward stages end")
    if plan.stages[-1].start != 0 and plan.stages[-1].backward:
        raise fail(len(plan.stages) - 1, "the backward stages do not reach layer 0")


def _expected_edge(plan: Plan, index: int, fused: int, num_layers: int) -> int:
    previous: Stage | None = plan.stages[index - 1] if index else None
    if index < fused:
        return previous.stop if previous else 0
    return num_layers if index == fused or previous is None else previous.start
