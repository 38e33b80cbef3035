"""lab.html: its core computes what Python computes, and the page works in a browser.

The block <script id="core"> runs under Node on random cases: integers are compared exactly, others
to 1e-12. Headless Chromium then moves every control of the page to both ends."""

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
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import quote

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
from run import timeline
from run.config import check_layout
from tests.harness import HERE

PAGE = HERE.joinpath("lab.html").read_text()
CORE = re.search(r'<script id="core">(.*?)</script>', PAGE, re.S)[1]
DRIVER = """
const played = (name, P, m, v, costs) => {
  const {times, ...rest} = simulate(make_schedule(name, P, m, v), placement(name, P, v), costs);
  return {...rest, times: times.map((row) => row.map(
    (a) => [a.kind, a.stage, a.microbatch, a.start, a.end]))};
};
const parts = (job, layout) => { const {rank, ...rest} = memory(job, layout); return rest; };
const checked = (cfg, world) => {
  const ranks = check_layout(cfg, world);
  return [ranks, cfg.dp, cfg.microbatches, cfg.chunks, command(cfg, ranks)];
};
const sizes = () => [DEVICES, Object.fromEntries(Object.entries(MODELS).map(([name, model]) =>
  [name, [n_parameters(model), model.n_head, ...layer_costs(model)]]))];
const trace = (text) => (({P, v, m, name, costs}) => [P, v, m, name, costs])(read_trace(text));
const run = ([name, ...args]) => {
  try { return eval(name)(...args); } catch (error) { return error.message; }
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(run)));
"""
PROBE = """<script>
const errors = [], numbers = [], ids = [...document.querySelectorAll("[id]")];
addEventListener("error", (event) => errors.push(event.message));
console.error = (...words) => errors.push(words.join(" "));
const go = (input, value) => ["input", "change"].forEach((name) => {
  input.value = value;
  input.dispatchEvent(new Event(name));
});
const inputs = [...document.querySelectorAll("main input:not([type=file]), main select")];
for (const input of inputs) {
  if (input.type === "checkbox") [0, 1].forEach(() => input.click());
  else (input.options ? [...input.options].map((o) => o.value) : [input.min, input.max]).forEach(
    (value) => go(input, value));
}
const presets = [...document.querySelectorAll("button.preset")];
presets.forEach((preset) => preset.click());
for (const setting of SETTINGS) {
  from_address("#" + setting);
  numbers.push(Object.fromEntries(ids.concat([...document.querySelectorAll("[id]")]).map(
    (e) => [e.id, e.innerText])));
}
document.body.append(make("pre", {id: "report", textContent: JSON.stringify({errors, numbers,
  inputs: inputs.length, presets: presets.length,
  requests: performance.getEntriesByType("resource").length})}));
</script>"""
CHROME = shutil.which("chromium") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no Node: lab.html is not run")


def same(got, want):
    """The first difference, as text; or None."""
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        got, want = list(got.values()), [want[key] for key in got]
    if isinstance(want, list | tuple) and isinstance(got, list) and len(got) == len(want):
        return next(filter(None, map(same, got, want)), None)
    close = isinstance(want, float) and isinstance(got, int | float) and math.isclose(
        got, want, rel_tol=1e-12, abs_tol=1e-12)
    return None if close or got == want else f"{got} is not {want}"


def differences(pairs, core=CORE):
    """[(case, the first difference)]. pairs: case [function, *arguments], and Python's result."""
    out = subprocess.run(["node", "-e", core + DRIVER], text=True, capture_output=True,
                         input=json.dumps([case for case, _ in pairs]))
    assert not out.stderr, out.stderr[-2000:]
    return [(case, found) for (case, want), got in zip(pairs, json.loads(out.stdout), strict=True)
            if (found := same(got, want))]


def ring_hops(N):
    """Run collectives.plain_all_reduce on N threads. After each hop: the set of ranks, as bits,
    whose terms each chunk of each rank has; and the chunk that each rank sends in that hop."""
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
    for act in (threading.Thread.start, threading.Thread.join):
        list(map(act, threads))
    phases = ["start", *["reduce-scatter"] * (N - 1), *["all-gather"] * (N - 1)]
    return [{"phase": phase, "sends": [sends[r][i - 1] for r in range(N)] if i else [],
             "terms": [states[r][i] for r in range(N)]} for i, phase in enumerate(phases)]


def ring_cases(rng):
    for N in range(2, 17):
        yield ["ring_hops", N], ring_hops(N)
        D = 4 * N * rng.randint(1, 50)
        for name, all_reduce in (("sequential_bytes", ring.sequential_all_reduce),
                                 ("server_bytes", ring.parameter_server_all_reduce)):
            groups = [Mock(rank=r, size=N) for r in range(N)]
            for group in groups:
                all_reduce(torch.empty(D // 4), group)
            yield [name, N, D], [D * group.send.call_count for group in groups]
        yield ["ring_bytes", N, D], 2 * (N - 1) * D / N
        device = replace(DEVICES["h100"], nvlink=rng.uniform(1, 900), f_nvlink=1.0, node=N,
                         latency=rng.uniform(0, 1e-3))
        for name, nbytes in (("ring_time", D), ("in_turn_time", D * N)):
            yield [name, N, D, 1e9 * device.nvlink, device.latency], costs.ring_time(
                device, 1, N, nbytes, rounds=2)


def schedule_cases(rng):
    for name in list(schedules.SCHEDULES) * 60:
        P, m = rng.randint(1, 8), rng.randint(1, 20)
        v = {"zb-v": 2, "interleaved": rng.randint(1, 4)}.get(name, rng.choice((1, 1, 1, 2)))
        m = m + -m % P if name == "interleaved" and rng.random() < 0.9 else m
        times = [rng.randint(1, 9) for _ in range(3)] + [rng.choice((0, 0, 1, 2))]
        times = [1, 1, 1, 0] if rng.random() < 0.3 else times
        try:
            lists = schedules.make_schedule(name, P, m, v)
            t = schedules.simulate(lists, schedules.placement(name, P, v), times)
            rows = [[(*action, start, end) for action, start, end in row] for row in t.times]
            want = {**t._asdict(), "times": rows}
            yield ["closed_form", name, P, m, v, times], costs.closed_form(name, P, m, v, times)
        except ValueError as error:
            want = str(error)
        yield ["played", name, P, m, v, times], {key: want[key] for key in (
            "makespan", "bubble", "peak_in_flight", "times")} if type(want) is dict else want


def job_cases(rng):
    for _ in range(500):
        experts = {"n_experts": rng.choice((4, 8, 6)), "top_k": rng.choice((1, 2, 3))}
        model = replace(rng.choice(list(MODELS.values())), n_layer=rng.randint(1, 40),
                        **(experts if rng.random() < 0.3 else {}))
        P, D = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 2, 4, 6))
        ep = rng.choice([e for e in (1, 2, 3) if D % e == 0]) if model.n_experts else 1
        layout = memory.Layout(
            D, rng.choice((1, 1, 2, 4, 8)), P, rng.choice((1, 1, 2, 4)), ep, rng.random() < 0.4,
            rng.randint(0, 3), rng.choice(list(schedules.SCHEDULES)), 0, rng.choice(
                (0, 1, 2, P, 2 * P, 3 * P)), rng.choice(("none", "full")), rng.choice(
                ("ring", "all-to-all")))
        sequences = rng.choice((D * max(1, layout.microbatches), 12 * D, 24))
        job = memory.Job(model, sequences, wide=rng.random() < 0.3)
        yield ["n_parameters", asdict(model)], float(memory.n_parameters(model))
        cfg = as_config(job, layout._asdict())
        case = ["checked", asdict(cfg), rng.choice((1, layout.ranks, layout.ranks, 7))]
        try:
            ranks = check_layout(cfg, case[-1])
        except ValueError as error:
            yield case, str(error)
            continue
        yield case, [ranks, cfg.dp, cfg.microbatches, cfg.chunks, plan.command(cfg, ranks, 8)]
        layout = layout._replace(microbatches=cfg.microbatches, chunks=cfg.chunks)
        asked = [{**job._asdict(), "model": asdict(model), "grad_width": job.grad_width},
                 layout._asdict()]
        yield ["parts", *asked], memory.memory(job, layout)
        for rank in range(layout.pp):
            yield ["messages", *asked, rank], [
                [axis, name, float(times), float(nbytes)]
                for axis, name, times, nbytes in traffic.messages(job, layout, rank)]


def other_cases(rng):
    yield ["sizes"], [{name: device.gb for name, device in DEVICES.items()}, {
        name: [memory.n_parameters(model), model.n_head, *model.layer_costs()]
        for name, model in MODELS.items()}]
    for _ in range(300):
        zero, ranks, width = rng.randint(0, 3), rng.randint(1, 4096), rng.choice((2, 4, 8))
        yield ["bytes_per_parameter", zero, ranks, width, 4], [
            float(n) for n in sizes.bytes_per_parameter(zero, ranks, width, 4)]
        mesh = {axis: rng.randint(1, 3) for axis in ("dp", "ep", "pp", "cp", "tp")}
        axes, rank = rng.sample(list(mesh), rng.randint(1, 3)), rng.randrange(math.prod(
            mesh.values()))
        yield ["group_of", rank, mesh, axes], next(
            sorted(row) for row in lay_out(mesh, axes) if rank in row)
        layers = [rng.randint(0, 9) for _ in range(rng.randint(3, 12))]
        n = rng.randint(1, len(layers))
        yield ["cut", layers, n], [list(stage) for stage in schedules.cut(layers, n)]


@cache
def all_cases():
    """[([function, *arguments], what Python computes)]"""
    rng, kinds = random.Random(0), (ring_cases, schedule_cases, job_cases, other_cases)
    return [case for cases in kinds for case in cases(rng)]


@needs_node
def test_the_page_computes_what_python_computes():
    assert len(all_cases()) > 3000 and not differences(all_cases())[:3]


@needs_node
@pytest.mark.parametrize("right,wrong,where", [
    ("(zero ? 1 : 2) * half", "half", "messages"), ("(4 * h + 2 * norm)", "(4 * h)", "parts"),
    ('if (k >= lag) actions.push("W0");', 'if (k > lag) actions.push("W0");', "played"),
    ('repeat(["I0", "I1"], rank)', 'repeat(["I1", "I0"], rank)', "played")])
def test_the_comparison_notices(right, wrong, where):
    """A wrong factor of a formula; an action of a schedule that is missing, or moved."""
    assert CORE.count(right) == 1
    pairs = [pair for pair in all_cases() if pair[0][0] == where]
    assert differences(pairs, CORE.replace(right, wrong))


@needs_node
def test_a_trace_is_read_as_it_was_written(tmp_path):
    pairs = []
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        t = schedules.simulate(schedules.make_schedule(name, 4, 8, v),
                               schedules.placement(name, 4, v), (3, 2, 2, 0))
        every = [[[a.kind, "main", 1e-3 * start, 1e-3 * end, {**a._asdict(), "step": 2}]
                  for a, start, end in row] for row in t.times]
        timeline.write_chrome(tmp_path / name, every)
        text = (tmp_path / name).read_text()
        pairs.append((["trace", text], [4, v, 8, name, [3.0, 2.0, 2.0, 0]]))
    assert not differences(pairs)


@pytest.mark.skipif(not CHROME, reason="no Chromium: lab.html is not opened")
def test_every_control_of_the_page_works_and_its_numbers_are_pythons(tmp_path):
    rng, settings, want = random.Random(1), [], []
    for _ in range(12):
        name, P, T = rng.choice(list(MODELS)), rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
        layout = memory.Layout(rng.choice((1, 2, 8)), T, P, zero=rng.randint(0, 3), microbatches=8,
                               schedule=rng.choice(("gpipe", "1f1b", "zb-h1")))
        job = memory.Job(MODELS[name], 64)
        settings.append(quote(f"cm={name}&dp={layout.dp}&tp={T}&pp={P}&z={layout.zero}&cb=64&cmb=8"
                              f"&s={layout.schedule}", safe="=&"))
        want.append({part: size / 1e9 for part, size in memory.memory(job, layout).items()})
    page = tmp_path / "lab.html"
    page.write_text(PAGE.replace("</body>", PROBE.replace("SETTINGS", json.dumps(settings))))
    out = subprocess.run([CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                          "--virtual-time-budget=30000", page.as_uri()], capture_output=True,
                         text=True, timeout=100).stdout
    report = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', out, re.S)[1]))
    assert not report["errors"] and report["requests"] == 0
    assert report["inputs"] > 45 and report["presets"] > 17
    for shown, parts in zip(report["numbers"], want, strict=True):
        for part, size in parts.items():  # four digits are shown
            assert math.isclose(float(shown["calc-" + part].replace(",", "")), size, rel_tol=5e-4)
