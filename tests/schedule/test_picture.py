"""Pictures of schedules: text, SVG and trace events."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from rptrain.schedule.baselines import one_f_one_b
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links, dispatch
from rptrain.schedule.picture import svg, text
from rptrain.schedule.plan import Plan
from rptrain.schedule.simulate import Program, Task, simulate
from rptrain.schedule.trace import chrome_trace

PLAN = Plan.parse("F0-2 FB3-3 B2-2 B1-1 B0-0 | N=2 M=4 MR=4")
COSTS = [LayerCost(1, 3, params=4, grads=4, update=1)] * 3 + [LayerCost(0, 3, params=4, grads=4, update=1)]
LINKS = Links(up=4, down=4, boundary=1, latency=0)
PROGRAM = dispatch(PLAN, COSTS)
SVG = "{http://www.w3.org/2000/svg}"


def timeline(links=None, iterations=1):
    return simulate(dispatch(PLAN, COSTS, links=links, iterations=iterations))


def test_text_is_to_scale():
    assert text(timeline(), width=46).splitlines() == [
        "0 FFF F0-2 FFFBBB B2-2 BBBbbb B0-0 bbb   0.0%",
        "1 ···XX FB3-3 XXXBBB B1-1 BBB·········  33.3%",
        "F forward | X forward and backward in one",
        "B backward | · idle",
        "small letters: every other stage",
        "36 s, 1 s per character | bubble 16.7%",
    ]


def test_long_times_have_no_exponent():
    short = timeline()
    starts, ends = (tuple(1e4 * each for each in times) for times in (short.starts, short.ends))
    assert "360,000 s, 10,000 s per character" in text(replace(short, starts=starts, ends=ends), width=46)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_text_keeps_its_width(width):
    assert all(len(line) <= width for line in text(timeline(LINKS, 3), width).splitlines())


def test_text_without_room_for_labels_tells_stages_apart_by_case():
    assert [line[2:16] for line in text(timeline(), 24).splitlines()[:2]] == ["FFFFFBBBBbbbbb", "·XXXXXBBBBB···"]


def rects(drawing):
    return [
        tuple(float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        for group in ElementTree.fromstring(drawing).iter(f"{SVG}g")
        for rect in group.iter(f"{SVG}rect")
    ]


def test_svg_has_a_rectangle_a_task_to_scale():
    drawing = svg(timeline(), "a <b> & c")
    root = ElementTree.fromstring(drawing)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words.count("device 0") == words.count("device 1") == 1
    assert f"a <b> & c · bubble {timeline().bubble():.1%}" in words
    assert f"{timeline().bubble(1):.1%}" in words and "0–2" in words
    scale = (1200 - 70 - 64) / 40  # pixels a second: the last update ends at 40
    compute = [rect for rect in rects(drawing) if rect[3] == 24]
    starts = [start for task, start in zip(PROGRAM.tasks, timeline().starts, strict=True) if task.lane == "compute"]
    assert sorted(x for x, *_ in compute) == pytest.approx(sorted(70 + start * scale for start in starts), abs=0.01)
    assert all(width == pytest.approx(3 * scale, abs=1) for _, _, width, _ in compute)


def test_svg_draws_links_and_the_optimizer_where_they_work():
    heights = [sorted({rect[3] for rect in rects(svg(timeline(links), "t"))}) for links in (None, LINKS)]
    assert heights == [[8, 24], [5, 8, 24]]


def test_svg_joins_what_is_too_narrow_or_too_much_to_draw():
    long, short = Task("compute", 0, 1000, (), "F", range(1)), Task("compute", 0, 0.01, (), "B", range(2))
    few = rects(svg(simulate(Program(1, (long, *[short] * 50), ())), "t"))
    assert len(few) < 10
    assert sum(width for _, _, width, _ in few) == pytest.approx(1066, abs=2)
    many = rects(svg(simulate(Program(1, (short,) * 20_000, ())), "t"))
    assert 1000 < len(many) <= 5000


def test_idle_time_is_never_drawn_over():
    work = Task("compute", 0, 1, (), "F", range(1))
    waiting = Task("compute", 1, 50, (), "F", range(1))
    later = Task("compute", 0, 1, (1,), "F", range(1))
    drawn = sorted(rect for rect in rects(svg(simulate(Program(2, (work, waiting, later), ())), "t")))
    top = [rect for rect in drawn if rect[1] == min(r[1] for r in drawn)]
    assert len(top) == 2 and top[1][0] - top[0][0] > 1000


def test_idle_time_between_short_tasks_is_not_drawn_over():
    tasks = []
    for i in range(9):  # the devices take turns: 0.01 of 90 seconds is less than is drawn alone
        tasks.append(Task("compute", i % 2, 10 if i % 2 else 0.01, (i - 1,) if i else (), "F", range(i, i + 1)))
    same = [Task("compute", t.device, t.seconds, t.after, "F", range(1)) for t in tasks]
    for program in (tasks, same):
        drawn = rects(svg(simulate(Program(2, tuple(program), ())), "t"))
        assert sorted(round(width, 1) for _, _, width, _ in drawn)[:5] == [0.3] * 5


def test_trace_events_are_the_tasks():
    result = timeline(LINKS, 2)
    trace = json.loads(json.dumps(chrome_trace(result)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(result.program.tasks)
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    compute = [event for event in events if names[event["pid"], event["tid"]] == "compute"]
    assert sum(event["dur"] for event in compute if event["pid"] == 1) == pytest.approx(result.busy(1) * 1e6)
    assert max(event["ts"] + event["dur"] for event in compute) == pytest.approx(result.makespan * 1e6)
    assert names[0, None].startswith("device 0") and names[2, None] == "host"
    assert {name for (pid, tid), name in names.items() if pid == 2 and tid is not None} == {"optimizer"}
    assert {name for (pid, tid), name in names.items() if pid == 0 and tid is not None} == {
        "compute",
        "link up",
        "link down",
    }


def test_schedules_that_are_bound_are_drawn_too():
    result = simulate(one_f_one_b([LayerCost(1, 3)] * 3 + [LayerCost(1, 4)], 2, 4))
    assert len(rects(svg(result, "1F1B"))) == 2 * 2 * 4
    assert text(result).splitlines()[0].startswith("0 F")
