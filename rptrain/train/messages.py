"""What a trainer tells: records with a line for a person, and the times of slots."""

from rptrain.engine.trace import Span
from rptrain.planner.hardware import readable
from rptrain.runs import events
from rptrain.schedule.plan import Slot

ROWS = 8  # of the data that a line names


def tell(log: events.EventLog, progress: events.Progress, event: events.Event) -> None:
    """A record, and a line for a person where it is of something that went wrong, or of a choice."""
    log.write(event)
    match event:
        case events.SaveFailed():
            progress.note(f"step {event.step} could not be saved: {event.message}")
        case events.TrackerFailed():
            progress.note(f"{event.name} gets no more numbers: {event.message}")
        case events.Stalled():
            progress.note(f"no step ended for {event.seconds:g} s: {event.path} says what everything waits for")
        case events.StepSkipped(rows=(_, *_)):
            rows = ", ".join(map(str, event.rows[:ROWS])) + (" …" if len(event.rows) > ROWS else "")
            progress.note(f"step {event.step} was skipped: in rows {rows} of the data the loss is no number")
        case events.MemoryLow():
            progress.note(f"only {readable(event.free)} of host memory are left: the system may end the run")
        case events.BestLoaded():
            progress.note(
                f"the model is that after {event.step} steps, with the lowest held-out loss, {event.loss:.4f}"
            )
        case events.CheckpointDamaged():
            progress.note(f"{event.message}: another one is taken")


def slots(step: int, spans: list[Span]) -> events.Slots:
    """One record a slot, from the start of its first computation to the end of its last."""
    times: dict[Slot, list[Span]] = {}
    for span in spans:
        times.setdefault(span.slot, []).append(span)
    return events.Slots(
        step,
        tuple(
            events.SlotTime(
                slot.device,
                slot.index,
                slot.stage.kind,
                slot.stage.start,
                slot.stage.stop - 1,
                slot.round,
                part[0].start(),
                part[-1].end(),
            )
            for slot, part in sorted(times.items(), key=lambda item: item[0].index)
        ),
    )
