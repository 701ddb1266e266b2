"""A simulated schedule as trace events, which chrome://tracing and Perfetto show."""

from typing import Any

from rptrain.plan.simulate import Lane, Timeline

LANES: dict[Lane, str] = {"compute": "compute", "up": "link up", "down": "link down", "optimizer": "optimizer"}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """What `json.dump` writes as a trace file: a process a device, a thread a lane, times in microseconds.

    The optimizer has a process of its own, numbered after the last device. Tasks that take no time are left out.
    """
    host = timeline.program.devices
    threads = {lane: number for number, lane in enumerate(LANES)}
    seen: set[tuple[int, Lane]] = set()
    events: list[dict[str, Any]] = []
    for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
        if end == start:
            continue
        process = host if task.lane == "optimizer" else task.device
        seen.add((process, task.lane))
        events.append(
            {
                "name": f"{task.kind}{task.layers[0]}-{task.layers[-1]}",
                "cat": task.kind,
                "ph": "X",
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "pid": process,
                "tid": threads[task.lane],
                "args": {"micro_batch": task.micro_batch, "round": task.round, "iteration": task.iteration},
            }
        )
    names: list[dict[str, Any]] = []
    for process in sorted({process for process, _ in seen}):
        name = "host" if process == host else f"device {process}, bubble {timeline.bubble(process):.1%}"
        names.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        names.append({"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}})
    for process, lane in sorted(seen, key=lambda key: (key[0], threads[key[1]])):
        where = {"pid": process, "tid": threads[lane]}
        names.append({"name": "thread_name", "ph": "M", **where, "args": {"name": LANES[lane]}})
        names.append({"name": "thread_sort_index", "ph": "M", **where, "args": {"sort_index": threads[lane]}})
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
