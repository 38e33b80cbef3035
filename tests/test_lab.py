"""lab.html: its core computes what Python computes, and the page works in a browser.

The block <script id="core"> runs under Node on random cases; integers are compared exactly, others to
1e-12. Then headless Chromium opens lab.html?selftest, which moves every control to both ends."""

import html
import json
import math
import queue
import random
import re
import shutil
import subprocess
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import collectives
import plan
import schedules
import sizes
from mesh import lay_out
from planner import costs, memory, ring, traffic
from planner.hardware import DEVICES, MODELS
from planner.search import as_config
from run.config import check_layout
from tests.harness import HERE

PAGE = HERE / "lab.html"
CORE = re.search(r'<script id="core">(.*?)</script>', PAGE.read_text(), re.S)[1]
DRIVER = """
const short = ({times, ...rest}) => ({...rest, times: times.map((row) => row.map(
  (a) => [a.kind, a.stage, a.microbatch, a.start, a.end]))});
const timeline = (name, P, m, v, costs) => short(simulate(make_schedule(name, P, m, v), placement(name, P, v), costs));
const parts = (job, layout) => { const {rank, ...rest} = memory(job, layout); return rest; };
const checked = (cfg, world) => { const ranks = check_layout(cfg, world); return [ranks, cfg.dp, cfg.microbatches,
  cfg.chunks, command(cfg, ranks)]; };
const data = () => [DEVICES, Object.fromEntries(Object.entries(MODELS).map(([name, m]) =>
  [name, [n_parameters(m), m.n_layer, m.n_head, m.n_embd, m.vocab_size, m.block_size]]))];
const run = ([name, ...args]) => { try { return eval(name)(...args); } catch (e) { return e.message; } };
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(run)));
"""
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no Node: lab.html's core not run")


def in_node(cases, core=CORE):
    """The results of [function, *arguments] in lab.html's core; of an error, its message."""
    out = subprocess.run(["node", "-e", core + DRIVER], input=json.dumps(cases), text=True,
                         capture_output=True)
    assert not out.stderr, out.stderr[-2000:]
    return json.loads(out.stdout)


def same(got, want, where=""):
    """The first place where two results differ, or None."""
    if isinstance(want, dict):
        keys = got.keys() if isinstance(got, dict) else got
        return where + ": keys" if keys != want.keys() else next(filter(None, (
            same(got[key], want[key], f"{where}.{key}") for key in want)), None)
    if isinstance(want, list | tuple):
        if not isinstance(got, list) or len(got) != len(want):
            return f"{where}: {got} is not {want}"
        return next(filter(None, (same(a, b, f"{where}[{i}]")
                                  for i, (a, b) in enumerate(zip(got, want, strict=True)))), None)
    if isinstance(want, float) and isinstance(got, int | float):
        return None if math.isclose(got, want, rel_tol=1e-12, abs_tol=1e-12) else (
            f"{where}: {got} is not {want}")
    return None if got == want else f"{where}: {got} is not {want}"


def differences(pairs, core=CORE):
    """[(case, the first difference)] of pairs (case, what Python computes)."""
    got = in_node([case for case, _ in pairs], core)
    return [(case, found) for (case, want), result in zip(pairs, got, strict=True)
            if (found := same(result, want))]


# ---- the same cases in Python ----


def ring_hops(N):
    """Run collectives.plain_all_reduce on N threads. After each hop: the set of ranks, as bits, whose
    terms each chunk of each rank has; and the chunk that each rank sends in that hop."""
    links = [queue.Queue() for _ in range(N)]
    states, sends = [[[] for _ in range(N)] for _ in range(2)]

    def run(r):
        tensor = torch.full((N,), 1 << r)

        def exchange(out, to, into, source):
            states[r].append(tensor.tolist())
            sends[r].append(out.storage_offset())  # a chunk is one element
            links[to].put(out.clone())
            into.copy_(links[r].get())
            return SimpleNamespace(wait=lambda: None)

        collectives.plain_all_reduce(tensor, SimpleNamespace(
            size=N, rank=r, next=(r + 1) % N, prev=(r - 1) % N, exchange=exchange))
        states[r].append(tensor.tolist())

    threads = [threading.Thread(target=run, args=(r,)) for r in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    phases = ["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)]
    return [{"phase": phase, "sends": [sends[r][i - 1] for r in range(N)] if i else [],
             "terms": [states[r][i] for r in range(N)]} for i, phase in enumerate(phases)]


class Counting:
    """A group of planner/ring.py's two all-reduces, seen from one rank: counts bytes."""

    def __init__(self, rank, size):
        self.rank, self.size, self.sent = rank, size, 0

    def send(self, tensor, to):
        self.sent += tensor.nbytes
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensor, source):
        return SimpleNamespace(wait=lambda: None)


def ring_cases(rng):
    for N in range(2, 17):
        yield ["ring_hops", N], ring_hops(N)
        D = 4 * N * rng.randint(1, 50)
        for name, all_reduce in (("sequential_bytes", ring.sequential_all_reduce),
                                 ("server_bytes", ring.parameter_server_all_reduce)):
            groups = [Counting(rank, N) for rank in range(N)]
            for group in groups:
                all_reduce(torch.empty(D // 4), group)
            yield [name, N, D], [group.sent for group in groups]
        device = replace(DEVICES["h100"], nvlink=rng.uniform(1, 900), f_nvlink=1.0, node=N,
                         latency=rng.uniform(0, 1e-3))
        for name, nbytes in (("ring_time", D), ("in_turn_time", D * N)):
            yield [name, N, D, 1e9 * device.nvlink, device.latency], costs.ring_time(
                device, 1, N, nbytes, rounds=2)
        yield ["ring_bytes", N, D], float(sum(group.sent for group in groups) / N)


def schedule_cases(rng):
    for name in schedules.SCHEDULES:
        for _ in range(60):
            P, m = rng.randint(1, 8), rng.randint(1, 20)
            v = {"zb-v": 2, "interleaved": rng.randint(1, 4)}.get(name, rng.choice((1, 1, 1, 2)))
            m = m + -m % P if name == "interleaved" and rng.random() < 0.9 else m
            times = [rng.randint(1, 9) for _ in range(3)] + [rng.choice((0, 0, 1, 2))]
            if rng.random() < 0.3:
                times = [1, 1, 1, 0]
            try:
                lists = schedules.make_schedule(name, P, m, v)
                t = schedules.simulate(lists, schedules.placement(name, P, v), times)
                want = {**t._asdict(), "times": [[(*action, start, end) for action, start, end in row]
                                                 for row in t.times]}
                yield ["closed_form", name, P, m, v, times], costs.closed_form(name, P, m, v, times)
            except ValueError as error:
                want = str(error)
            yield ["timeline", name, P, m, v, times], want


def random_jobs(rng, count):
    """(job and flags as JavaScript takes them, Job, Config, number of processes)"""
    for _ in range(count):
        model = rng.choice(list(MODELS.values()))
        small = {"n_layer": rng.randint(1, 30)} if rng.random() < 0.7 else {}
        experts = {"n_experts": rng.choice((4, 8, 6)), "top_k": rng.choice((1, 2, 3))}
        model = replace(model, **small, **(experts if rng.random() < 0.3 else {}))
        P, D = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 2, 4, 6))
        layout = memory.Layout(
            D, rng.choice((1, 1, 2, 4, 8)), P, rng.choice((1, 1, 2, 4)),
            rng.choice([e for e in (1, 2, 3) if D % e == 0]) if model.n_experts else 1,
            rng.random() < 0.4, rng.randint(0, 3), rng.choice(list(schedules.SCHEDULES)), 0,
            rng.choice((0, 1, 2, P, 2 * P, 3 * P)), rng.choice(("none", "full")),
            rng.choice(("ring", "all-to-all")))
        m = max(1, layout.microbatches)
        job = memory.Job(model, rng.choice((D * m, 12 * D * m, 24)), wide=rng.random() < 0.3)
        yield job, layout


def for_node(job, layout):
    return ({"model": asdict(job.model), "batch_size": job.batch_size, "width": job.width,
             "grad_width": job.grad_width}, layout._asdict())


def job_cases(rng):
    for job, layout in random_jobs(rng, 500):
        yield ["n_parameters", asdict(job.model)], float(memory.n_parameters(job.model))
        yield ["layer_costs", asdict(job.model)], job.model.layer_costs()
        cfg = as_config(job, layout._asdict())
        world = rng.choice((1, layout.ranks, layout.ranks, 7))
        try:
            case = ["checked", asdict(cfg), world]
            ranks = check_layout(cfg, world)
        except ValueError as error:
            yield case, str(error)
            continue
        yield case, [ranks, cfg.dp, cfg.microbatches, cfg.chunks, plan.command(cfg, ranks, 8)]
        layout = layout._replace(microbatches=cfg.microbatches, chunks=cfg.chunks)
        yield ["parts", *for_node(job, layout)], memory.memory(job, layout)
        for rank in range(layout.pp):
            yield ["messages", *for_node(job, layout), rank], [
                [axis, name, float(times), float(nbytes)]
                for axis, name, times, nbytes in traffic.messages(job, layout, rank)]


def other_cases(rng):
    yield ["data"], [{name: device.gb for name, device in DEVICES.items()}, {name: [
        memory.n_parameters(model), model.n_layer, model.n_head, model.n_embd, model.vocab_size,
        model.block_size] for name, model in MODELS.items()}]
    for _ in range(300):
        zero, ranks, width = rng.randint(0, 3), rng.randint(1, 4096), rng.choice((2, 4, 8))
        yield ["bytes_per_parameter", zero, ranks, width, 4], [
            float(n) for n in sizes.bytes_per_parameter(zero, ranks, width, 4)]
        mesh = {axis: rng.randint(1, 3) for axis in ("dp", "ep", "pp", "cp", "tp")}
        axes = rng.sample(list(mesh), rng.randint(1, 3))
        rank = rng.randrange(math.prod(mesh.values()))
        group = next(sorted(row) for row in lay_out(mesh, axes) if rank in row)
        yield ["group_of", rank, mesh, axes], group
        layers = [rng.randint(0, 9) for _ in range(rng.randint(3, 12))]
        n = rng.randint(1, len(layers))
        yield ["cut", layers, n], [list(stage) for stage in schedules.cut(layers, n)]


def all_cases():
    rng = random.Random(0)
    return [case for cases in (ring_cases, schedule_cases, job_cases, other_cases)
            for case in cases(rng)]


@needs_node
def test_the_page_computes_what_python_computes():
    pairs = all_cases()
    assert len(pairs) > 3000 and not differences(pairs)[:3]


@needs_node
@pytest.mark.parametrize("right,wrong,where", [
    ("2 * half * params * gw", "half * params * gw", "messages"),
    ("(4 * h + 4) * w", "(4 * h + 2) * w", "parts"),
    ('if (k >= lag) actions.push("W0");', 'if (k > lag) actions.push("W0");', "timeline"),
    ("repeat([\"I0\", \"I1\"], rank)", "repeat([\"I1\", \"I0\"], rank)", "timeline")])
def test_the_comparison_notices(right, wrong, where):
    """A wrong factor in a formula, an action of a schedule that is moved."""
    assert CORE.count(right) == 1
    found = differences(all_cases(), CORE.replace(right, wrong))
    assert {case[0] for case, _ in found} >= {where}
