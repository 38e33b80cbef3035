"""Judges the schedules: exercises 12 to 14."""

from unittest.mock import patch

import schedules
from extras.exercises.catalogue import RANKS
from extras.exercises.judge import Wrong, trains, while_trying
from extras.show.draw import in_flight, schedule_text
from schedules import Schedule, letter, make_schedule, simulate, validate


def actions_of_form(form, P, m, v):
    """The ranks' lists of Actions. Raises Wrong if the form returns anything but a list of actions
    like "F" or, with several chunks, "Fb"."""
    lists = []
    for rank in range(P):
        codes = form(P, m, v, rank)
        for i, code in enumerate(codes if isinstance(codes, list) else [codes]):
            kind, chunk = (code[:1], code[1:]) if isinstance(code, str) else ("", "")
            chunks = [""] * (v == 1) + [letter(k) for k in range(v)]
            if kind not in tuple("FBIW") or chunk not in chunks:
                example = '"F", "B"' if v == 1 else '"Fa", "Bb"'
                raise Wrong(f"rank {rank}: {code!r} is no action: return a list of {example}, ...")
            if kind == "W" and codes[:i].count(code) >= codes[:i].count("I" + chunk):
                raise Wrong(f'rank {rank}: entry {i} of the list, "{code}", comes before its '
                            f'"I{chunk}"')
        lists.append(codes)
    schedule = Schedule(lambda P, m, v, rank: lists[rank], chunks=v)
    with patch.dict(schedules.SCHEDULES, {"attempt": schedule}):
        return make_schedule("attempt", P, m, v)


def play_form(form, P, m, v=1, costs=(1, 1, 1, 0)):
    """Play a form's lists against a clock. costs: ticks of F, I, W and of a message. Returns
    schedules.py's Timeline: times, makespan, bubble, and peak_in_flight, a number for each rank.
    Raises Wrong if the lists cannot run."""
    lists = actions_of_form(form, P, m, v)
    where = schedules.in_turn(P, v)
    # Count before validate(): if rank 0 runs a microbatch too many, that would miss it on rank 1
    for stage, rank in enumerate(where):
        for name, kinds in (("forwards", "F"), ("backwards", "BI")):
            number = sum(action.stage == stage and action.kind in kinds for action in lists[rank])
            if number != m:
                of_stage = f" of stage {stage}" if v > 1 else ""
                raise Wrong(f"P = {P}, m = {m}: rank {rank} runs {number} {name}{of_stage}, and "
                            f"should run m = {m}")
    try:
        validate(lists, where)
    except ValueError as error:
        raise Wrong(f"P = {P}, m = {m}: {error}") from None
    return simulate(lists, where, costs)


def explain_timeline(got, want):
    """How a Timeline is worse than the one that it should equal; "" if it is not worse."""
    for rank, (held, most) in enumerate(zip(got.peak_in_flight, want.peak_in_flight, strict=True)):
        if held > most:
            return f"rank {rank} has {held} in flight, and should have at most {most}"
    if got.makespan > want.makespan:
        return (f"it takes {got.makespan:g} ticks, and should take {want.makespan:g}: who waits, "
                "and for what?")
    return ""


def check_against(right, form, P, m, v=1, costs=(1, 1, 1, 0)):
    """Play a form's lists, and those of the repository's form, `right`. Raise Wrong if the former
    cannot run or are worse; it names the first rank whose list differs. Returns the form's
    Timeline."""
    differ = [rank for rank in range(P) if form(P, m, v, rank) != right(P, m, v, rank)]
    rank = min(differ, default=0)
    with while_trying(f"look at rank {rank}'s list of {right.__name__} first"):
        got = play_form(form, P, m, v, costs)
        said = explain_timeline(got, play_form(right, P, m, v, costs))
        if said:
            slow = ", messages of 0.1 F" if costs[3] else ""
            chunks = f", v = {v}" if v > 1 else ""
            raise Wrong(f"P = {P}, m = {m}{chunks}{slow}: {said}")
    return got


def schedule_facts(name, timeline, P, m, formula, v=1):
    """Lines: the schedule drawn, and its bubble next to the formula."""
    return [*schedule_text(timeline.times, 110).splitlines(),
            f"{name}, P = {P}, m = {m}: bubble {timeline.bubble:.2%}    formula {formula}; "
            f"{in_flight(timeline, v)}"]


def judge_orders(make_mesh, forms):
    facts = []
    attempts = {}  # {name of a schedule in SCHEDULES: the attempt in its place}
    for name, key in (("gpipe", "gpipe"), ("one_f_one_b", "1f1b")):
        form = forms[name]
        for P, m in ((3, 3), (4, 8), (4, 2), (1, 3)):
            got = check_against(getattr(schedules, name), form, P, m)
            if name == "gpipe" and min(got.peak_in_flight) < m:
                rank = got.peak_in_flight.index(min(got.peak_in_flight))
                raise Wrong(f"gpipe, P = {P}, m = {m}: rank {rank}: a backward comes before the "
                            "last forward")
        facts += schedule_facts(name, play_form(form, 4, 8), 4, 8,
                                f"(P-1)/(m+P-1) = {3 / 11:.2%}")
        attempts[key] = Schedule(form)
    with patch.dict(schedules.SCHEDULES, attempts):
        for key in attempts:
            line = trains(make_mesh, [], {"pp": 4}, microbatches=8, schedule=key)[1]
            facts.append(f"{key}: {line}")
    return facts


def trains_in_engine(make_mesh, schedule, m, v):
    """trains() under this Schedule. engine/'s pipeline runs it, which runs any schedule, with those
    of engine/'s parts that can split a backward (needed_parts in run/config.py)."""
    schedules.splits_backward.cache_clear()  # an earlier "attempt" may be in its cache
    with patch.dict(schedules.SCHEDULES, {"attempt": schedule}):
        return trains(make_mesh, [], {"pp": RANKS}, {"n_layer": 6}, schedule="attempt",
                      microbatches=m, chunks=v, fast="mesh,tp,ddp,pp")[1]


def judge_interleaved(make_mesh, forms):
    form = forms["interleaved"]
    for P, m, v in ((2, 2, 2), (4, 8, 2), (3, 6, 3), (4, 8, 1)):
        for costs in ((1, 1, 1, 0), (10, 10, 10, 1)):
            check_against(schedules.interleaved, form, P, m, v, costs)
    schedule = schedules.SCHEDULES["interleaved"]._replace(actions=form)
    return [*schedule_facts("interleaved", play_form(form, 4, 8, 2), 4, 8,
                            f"(P-1)/(vm+P-1) = {3 / 19:.2%}", v=2),
            trains_in_engine(make_mesh, schedule, 8, 2)]


def judge_own_schedule(make_mesh, forms):
    form = forms["own_schedule"]
    P, m, most = 4, 8, 4
    timeline = play_form(form, P, m)
    held = max(timeline.peak_in_flight)
    if held > most:
        rank = timeline.peak_in_flight.index(held)
        raise Wrong(f"rank {rank} has {held} in flight, and may have {most}")
    bubble = play_form(schedules.one_f_one_b, P, m).bubble
    if timeline.bubble >= bubble - 1e-9:
        raise Wrong(f"a bubble of {timeline.bubble:.2%} is not below 1F1B's {bubble:.2%}: what can "
                    "a rank do while it waits?")
    return [*schedule_facts("your own", timeline, P, m, f"of 1F1B: {bubble:.2%}"),
            trains_in_engine(make_mesh, Schedule(form), m, 1)]
