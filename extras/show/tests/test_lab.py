"""docs/lab.html: its <script id="core"> runs under Node on random cases and is compared with
Python, integers exactly, others to 1e-12. Headless Chromium moves every control to both ends."""

import html
import json
import math
import queue
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

import collectives
import context_parallel
import expert_parallel
import extras.planner.__main__ as plan
import schedules
import sizes
from extras.planner import costs, hardware, memory, report, traffic
from extras.planner.hardware import DEVICES
from extras.planner.search import as_config
from extras.show import ring, tables
from mesh import lay_out
from run import timeline
from run.config import check_layout
from schedules import make_schedule, simulate, validate
from tests.harness import HERE
from tests.pool import HANG

PAGE = HERE.joinpath("docs/lab.html").read_text()
AUDIT = HERE.joinpath("extras/show/tests/audit.js")
CORE = re.search(r'<script id="core">(.*?)</script>', PAGE, re.S)[1]
# The schedules that the page knows: all but a fork's own (test_docs.py holds that)
TABLE = CORE.split("const SCHEDULES = {")[1].split("};")[0]
# The models that the page knows: some of the planner's. It has no mixtures with heads of their own
OF_PAGE = CORE.split("const MODELS = {")[1].split("};")[0]
MODELS = {name: model for name, model in hardware.MODELS.items()
          if re.search(rf'\b{name}"?: (gpt|llama)\(', OF_PAGE)}
KNOWN = [name for name in schedules.SCHEDULES if re.search(rf"\b{name}\b", TABLE)]
DRIVER = """
const list = (a) => [[a.kind, a.stage, a.microbatch], a.start, a.end];
const played = (name, P, m, v, costs) => {
  const t = simulate(make_schedule(name, P, m, v), placement(name, P, v), costs);
  return [t.times.map((row) => row.map(list)), t.makespan, t.bubble, t.peak_in_flight];
};
const written = (rows) => {
  const lists = rows.map((row, rank) => number_actions(row, [rank])), where = range(rows.length);
  validate(lists, where);
  const t = simulate(lists, where, [1, 1, 1, 0]);
  return [t.times.map((row) => row.map(list)), t.makespan, t.bubble, t.peak_in_flight];
};
const checked = (cfg, n) => [check_layout(cfg), cfg.microbatches, cfg.chunks, command(cfg, n)];
const parts = (job, layout) => ({...memory(job, layout), rank: undefined});
const trace = (text) => (({P, v, m, name, costs, measured}) => [P, v, m, name, costs, measured])(
  read_trace(text));
const run = ([name, ...args]) => {
  try { return eval(name)(...args); } catch (error) { return error.message; }
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(run)));
"""
PROBE = """<script>
const errors = [], numbers = [];
addEventListener("error", (event) => errors.push(event.message));
console.error = (...words) => errors.push(words.join(" "));
const inputs = all("main input:not([type=file]), main select"), presets = all("button.preset");
for (const input of inputs) {
  const values = input.options ? [...input.options].map((o) => o.value) : [input.min, input.max];
  for (const event of [new Event("input"), new Event("change")]) {
    for (input.value of values) input.dispatchEvent(event);
  }
}
[...all("[type=checkbox]"), ...all("[type=checkbox]"), ...presets].forEach((e) => e.click());
// What a screen reader says of a slider is what the page shows
const spoken = (slider) => slider.getAttribute("aria-valuetext");
const mute = all("[type=range]").filter((slider) =>
  spoken(slider) !== slider.parentElement.querySelector("b").textContent);
// Each Try: no preset solves it, alone or after another one; after any preset controls of its own
// figure do
const solved = (figure) => all(`#${figure} .try`)[0].classList.contains("done");
function turn(figure, key, value) {
  const label = all(`#${figure} .controls [data-key=${key}]`)[0];
  const input = label.querySelector("input, select, textarea");
  if (input.type === "checkbox") input.checked = value;
  else input.value = input.type === "range" ? CONTROLS[key][3].indexOf(value) : value;
  for (const name of ["input", "change"]) input.dispatchEvent(new Event(name));
}
const tries = {given_away: [], unsolved: [], solved: 0};
for (const [figure, answers] of Object.entries(ANSWERS)) {
  const own = all(`#${figure} button.preset`);
  for (const first of own) {
    for (const second of own) {
      from_address("#");
      for (const button of [first, second]) {
        button.click();
        if (solved(figure)) tries.given_away.push([figure, button.textContent]);
      }
    }
    first.click();
    const answer = answers.some((values) => {
      for (const [key, value] of Object.entries(values)) turn(figure, key, value);
      return solved(figure);
    });
    if (answer) tries.solved += 1; else tries.unsolved.push([figure, first.textContent]);
  }
}
const trace_lines = TRACES.map((text) => {
  take_trace(text);
  return $("trace-error").textContent;
});
$("trace-example").click();
trace_lines.push($("trace-text").textContent);
// The pipeline with a mouse: it points at rank 0's first action, then drags the line to the middle
recorded = null;
from_address("#");
const canvas = $("pipe-a").getBoundingClientRect(), {scale, longest} = runs["pipe-a"];
const mouse = (type, x, y) => $("pipe-a").dispatchEvent(new PointerEvent(type,
  {clientX: canvas.left + x, clientY: y, pointerId: 1, pointerType: "mouse"}));
const said = () => $("pipe-action").textContent, pipe = {chunks: []};
mouse("pointermove", LEFT + 0.5 * scale, canvas.top + 10); pipe.pointed = said();
mouse("pointerleave", 0, 0); pipe.left = said();
mouse("pointerdown", LEFT + 0.9 * longest * scale, canvas.bottom - 5);
mouse("pointermove", LEFT + 0.5 * longest * scale, canvas.bottom - 5); pipe.time = state.t;
mouse("pointerup", 0, 0);
mouse("pointermove", LEFT + 0.7 * longest * scale, canvas.bottom - 5); pipe.still = state.t;
for (const name of ["1f1b", "interleaved"]) {
  set({sa: name, sb: "zb-v"});
  pipe.chunks.push(all("[data-key=v]")[0].hidden);
}
// The ring: a touch of rank 2's chunk 1 and of rank 3 on the circle; half of the race's time
from_address("#rn=4&rh=1");
const touches = [];
for (const [x, y] of [ring_at.center_of(2, 1), ring_at.centers(3)]) {
  const {left, top} = $("ring-canvas").getBoundingClientRect();
  $("ring-canvas").dispatchEvent(new MouseEvent("click", {clientX: left + x, clientY: top + y}));
  touches.push($("ring-text").textContent.split(". ")[0]);
}
$("ring-canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"}));
touches.push($("ring-text").textContent.split(". ")[0]);
raced = 0.5;
draw("ring");
const race = all("#ring-table tr").slice(1).map((row) => row.cells[4].textContent);
raced = 1;
// The grid: a row of the table under the mouse
from_address("#dp=2&tp=2&pp=4");
const lights = all("#grid-table td:nth-child(4)").slice(-1).map((cell) => {
  cell.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
  const on = lit;
  $("grid-table").dispatchEvent(new PointerEvent("pointerleave"));
  return [cell.textContent.slice(0, 2), on, lit];
});
// The address may ask for one figure
const figures_asked = ["#only=ring", "#only=typo", "#"].map((address) => {
  from_address(address);
  return all("section:not([hidden])").length;
});
for (const setting of SETTINGS) {
  from_address("#" + setting);
  numbers.push(Object.fromEntries(all("[id]").map((e) => [e.id, e.innerText])));
}
AUDIT
const report = {errors, numbers, audits: audit(), mute: mute.length, tries, trace_lines, pipe,
                touches, race, lights, figures_asked, moved: inputs.length + presets.length,
                requests: performance.getEntriesByType("resource").length};
document.body.append(make("pre", {id: "report", textContent: JSON.stringify(report)}));
</script></body>"""
COUNTS = [1, 2, 4, 8, 14, 16, 32, 64, 256, 1024]  # values of the page's slider
# {figure: settings of its controls, of which one at least solves its Try}
ANSWERS = {
    "wall": [{"wm": "by number", "wn": 4.5, "wd": "h100"}],
    "ring": [{"rn": 16, "rd": 0.0001}],
    "zero": [{"zr": ranks} for ranks in COUNTS],
    "pipe": [{"p": 4, "m": 32}],
    "own": [{"ol": "\n".join(" ".join(code[0] for code in schedules.zero_bubble(1, 4, 4, 1, rank))
                            for rank in range(4))}],
    "tensor": [{"tt": 4, "ts": True}],
    "context": [{"an": 4, "am": "llama-70b"}],
    "experts": [{"eu": 1, "ec": capacity} for capacity in (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8)],
    "grid": [{"dp": 8, "pp": 1, "cp": 1, "tp": 2, "ep": 1, "cb": 8, "cmb": 1}],
    "calc": [{"cm": "llama-70b", "dp": 1, "pp": 4, "cp": 1, "tp": 8, "ep": 1, "z": 0, "x": 0,
              "s": "1f1b", "k": 0, "cb": 64, "cmb": 64, "sp": True, "cd": "h100"}]}


def spans(P, m, steps):
    """The text of a trace of 1F1B, with this many steps."""
    times = simulate(make_schedule("1f1b", P, m), range(P), (1, 1, 1, 0)).times
    return json.dumps({"traceEvents": [
        {"pid": rank, "tid": "main", "cat": action.kind, "ts": 1000 * (100 * step + start),
         "dur": 1000 * (end - start), "args": {**action._asdict(), "step": step}}
        for step in range(steps) for rank, row in enumerate(times) for action, start, end in row]})


CHROME = shutil.which("chromium") or shutil.which("google-chrome")
needs_chrome = pytest.mark.skipif(not CHROME, reason="no Chromium: docs/lab.html is not opened")
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no Node: lab.html is not run")


def same(got, want):
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        return all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple) and isinstance(got, list) and len(got) == len(want):
        return all(map(same, got, want))
    if isinstance(want, float) and isinstance(got, int | float):
        return math.isclose(got, want, rel_tol=1e-12, abs_tol=1e-12)
    return got == want


def results(cases, core=CORE):
    """JavaScript's results of cases, [function, *arguments] each."""
    out = subprocess.run(["node", "-e", core + DRIVER], text=True, capture_output=True,
                         input=json.dumps(cases))
    assert not out.stderr, out.stderr[-2000:]
    return json.loads(out.stdout)


def differences(pairs, core=CORE):
    """[(case, JavaScript's result, Python's)]. pairs: ([function, *arguments], Python's result)."""
    got = results([case for case, _ in pairs], core)
    return [(case, result, want) for (case, want), result in zip(pairs, got, strict=True)
            if not same(result, want)]


def on_threads(N, run, record):
    """run(group) on N threads; record(rank, tensor, to) before each exchange."""
    links = [[queue.Queue() for _ in range(N)] for _ in range(N)]

    def group_of(r):
        def exchange(out, to, into, source):
            record(r, out, to)
            links[r][to].put(out.clone())
            into.copy_(links[source][r].get())
            return Mock()

        return SimpleNamespace(size=N, rank=r, next=(r + 1) % N, prev=(r - 1) % N,
                               exchange=exchange)

    with ThreadPoolExecutor(N) as threads:
        list(threads.map(run, map(group_of, range(N))))


def ring_hops(N):
    """Run collectives.all_reduce on N threads. After each hop: the set of ranks, as bits,
    whose terms each chunk of each rank has; and the chunk that each rank sends in that hop."""
    phases = ("reduce-scatter", "all-gather")
    tensors = [torch.full((N,), 1 << r) for r in range(N)]
    states, sends = [[[] for _ in range(N)] for _ in range(2)]

    def record(r, out, to):
        states[r].append(tensors[r].tolist())
        sends[r].append(out.storage_offset())  # a chunk is one element

    def run(group):
        total = collectives.all_reduce(tensors[group.rank], group)
        states[group.rank].append(total.tolist())

    on_threads(N, run, record)
    return [{"phase": phases[(i - 1) // (N - 1)] if i else "start", "terms": list(terms),
             "sends": [sends[r][i - 1] for r in range(N) if i]}
            for i, terms in enumerate(zip(*states, strict=True))]


def keys_by_hop(N):
    """Run context_parallel.ring_attention on N threads, where a rank's keys are its number. For
    each rank: the number of the rank whose keys it passes on in each hop."""
    passed_on = [[] for _ in range(N)]

    def run(group):
        keys = torch.full((1, 1, 2, 1), float(group.rank))
        context_parallel.ring_attention(torch.zeros(1, 1, 2, 1), keys, keys, group)

    on_threads(N, run, lambda r, out, to: passed_on[r].append(int(out.max())))
    return passed_on


def dispatched(chosen, n_experts):
    """Run expert_parallel.dispatch_and_combine on threads, with the experts that each rank's tokens
    chose: the rows sent from rank to rank, and those that each expert runs."""
    E = len(chosen)
    exchanges, load = [[] for _ in range(E)], [[] for _ in range(E)]

    def run(group):
        def experts(inputs):
            load[group.rank] = list(map(len, inputs))
            return inputs

        experts.c_fc = SimpleNamespace(weight=torch.empty(n_experts // E, 1))
        experts_of = torch.tensor(chosen[group.rank]).view(1, -1, 1)  # one for each token
        expert_parallel.dispatch_and_combine(
            torch.ones(1, experts_of.numel(), 3), torch.ones(experts_of.shape), experts_of,
            experts, group)

    on_threads(E, run, lambda r, out, to: exchanges[r].append((to, len(out))))
    sent = [[len(experts)] * E for experts in chosen]
    for r in range(E):
        # Counts are exchanged first, then rows, then rows back
        for to, rows in exchanges[r][E - 1 : 2 * (E - 1)]:
            sent[r][to] = rows
        sent[r][r] -= sum(sent[r][:r] + sent[r][r + 1 :])
    return {"sent": sent, "load": sum(load, [])}


def ring_cases(rng):
    for N in range(2, 17):
        D, bandwidth, latency = 4 * N * rng.randint(1, 50), rng.uniform(1, 900), rng.random() / 1e3
        for name, all_reduce in (("sequential_bytes", ring.sequential_all_reduce),
                                 ("server_bytes", ring.parameter_server_all_reduce)):
            groups = [Mock(rank=r, size=N) for r in range(N)]
            for group in groups:
                all_reduce(torch.empty(D // 4), group)
            yield [name, N, D], [D * group.send.call_count for group in groups]
        device = replace(DEVICES["h100"], nvlink=bandwidth, f_nvlink=1.0, node=N, latency=latency)
        for name, nbytes in (("ring_time", D), ("in_turn_time", D * N)):
            yield [name, N, D, 1e9 * bandwidth, latency], costs.ring_time(device, N, N, nbytes, 2)
        yield from ((["ring_hops", N], ring_hops(N)), (["ring_bytes", N, D], 2 * (N - 1) * D / N))


def attention_cases(rng):
    for N in (2, 3, 4, 8):
        yield (["(N) => range(N).map((r) => range(N - 1).map((hop) => keys_after(N, r, hop)))", N],
               keys_by_hop(N))
        for zigzag in (True, False):
            tokens = rng.randint(1, 5)  # of a segment
            positions = ([context_parallel.zigzag(2 * N * tokens, N, r) for r in range(N)]
                         if zigzag else torch.arange(2 * N * tokens).chunk(N))
            pairs = [[tables.visible_pairs(queries, keys) for keys in positions]
                     for queries in positions]
            yield ["""(N, zigzag, tokens) => range(N).map((q) => range(N).map((k) => visible_pairs(
                   segments_of(N, q, zigzag), segments_of(N, k, zigzag), tokens)))""",
                   N, zigzag, tokens], pairs
        n = N * rng.randint(1, 3)
        chosen = [rng.choices(range(n), k=12) for _ in range(N)]
        yield ["dispatch", chosen, n, N], dispatched(chosen, n)


def schedule_cases(rng):
    for name in KNOWN * 50:
        P, m = rng.randint(1, 8), rng.randint(1, 20)
        v = {"zb-v": 2, "interleaved": rng.randint(1, 4)}.get(name, rng.choice((1, 1, 1, 2)))
        m = m + -m % P if name == "interleaved" and rng.random() < 0.9 else m
        times = rng.choice(([1, 1, 1, 0], [*rng.choices(range(1, 10), k=3), rng.randint(0, 2)]))
        try:
            lists = make_schedule(name, P, m, v)
            want = simulate(lists, schedules.placement(name, P, v), times)
            yield ["closed_form", name, P, m, v, times], schedules.closed_form(name, P, m, v, times)
        except ValueError as error:
            want = str(error)
        yield ["played", name, P, m, v, times], want


def list_cases(rng):
    """Lists that somebody could write for figure 5: right ones, and ones with an action too many,
    too few, or in another place."""
    for _ in range(150):
        P, m = rng.randint(1, 4), rng.randint(1, 5)
        rows = [rng.choice((schedules.gpipe, schedules.one_f_one_b, partial(
            schedules.zero_bubble, rng.choice((1, 2)))))(P, m, 1, rank) for rank in range(P)]
        for _ in range(rng.choice((0, 0, 1, 2))):
            row = rng.choice(rows)
            letter = row.pop(rng.randrange(len(row)))
            for _ in range(rng.choice((0, 1, 1, 1, 2))):
                row.insert(rng.randint(0, len(row)), rng.choice((letter, letter, "B", "I", "W")))
        mine = {"mine": schedules.Schedule(lambda P, m, v, rank, rows=rows: rows[rank])}
        with patch.dict(schedules.SCHEDULES, mine):
            lists = make_schedule("mine", P, m, 1)
        try:
            validate(lists, range(P))
            want = simulate(lists, range(P), (1, 1, 1, 0))
        except ValueError as error:
            want = str(error)
        yield ["written", rows], want


def job_cases(rng):
    pick = rng.choice
    for _ in range(400):
        experts = pick(({}, {}, {"n_experts": pick((4, 8, 6)), "top_k": pick((1, 2, 8))}))
        model = replace(pick(list(MODELS.values())), n_layer=rng.randint(1, 40), **experts)
        P, D, ep = pick((1, 1, 2, 3, 4)), pick((2, 4, 6)), pick((1, 2)) if experts else 1
        layout = memory.Layout(
            D, pick((1, 1, 2, 4, 8)), P, pick((1, 1, 2, 4)), ep, pick((True, False)),
            pick(range(4)), pick(KNOWN), 0, pick((0, 1, 2, P, 2 * P, 3 * P)),
            pick((False, True)), pick(("ring", "all-to-all")))
        sequences = pick((D * max(1, layout.microbatches), 12 * D, 24))
        job = memory.Job(model, sequences, grad_width=pick((4, 2)))
        cfg = as_config(job, layout._asdict())
        case = ["checked", asdict(cfg), layout.ranks]
        try:
            check_layout(cfg, 1)
        except ValueError as error:
            yield case, str(error)
            continue
        # (check_layout has also filled in --shard and --fast, which no control of the page sets)
        words = report.command(replace(cfg, shard=0, fast=""), layout.ranks, 8)
        yield case, [None, cfg.microbatches, cfg.chunks, words]
        layout = layout._replace(microbatches=cfg.microbatches, chunks=cfg.chunks)
        asked = [{**job._asdict(), "model": asdict(model)}, layout._asdict()]
        yield ["parts", *asked], memory.memory(job, layout)
        for rank in range(layout.pp):
            sent = traffic.messages(job, layout, rank)
            yield ["messages", *asked, rank], [(*m[:2], *map(float, m[2:])) for m in sent]


def other_cases(rng):
    yield ["() => DEVICES"], {
        name: {"gb": device.gb, "nvlink": device.nvlink, "network": device.network}
        for name, device in DEVICES.items()}
    yield ["() => [NODE, RESERVE]"], [DEVICES["h100"].node, DEVICES["h100"].reserve]
    for name, model in MODELS.items():
        # Few tokens and words: the optimizer's copy of some gradients decides
        small = replace(model, n_layer=2, block_size=64, vocab_size=256)
        for layout in (memory.Layout(dp=2), memory.Layout(dp=2, tp=2)):
            job = memory.Job(small, 2)
            yield (["parts", {**job._asdict(), "model": asdict(small)}, layout._asdict()],
                   memory.memory(job, layout))
        yield ["(name) => n_parameters(MODELS[name])", name], memory.n_parameters(model)
        yield ["(name) => layer_costs(MODELS[name])", name], model.layer_costs()
    for zero in range(4):  # what figure 3 says each rank sends
        D, numel = rng.randint(1, 512), 1000
        rows = traffic.dp_messages(memory.Job(MODELS["gpt2"], D), memory.Layout(D, zero=zero),
                                   numel, D, 2 * numel)
        yield ["data_bytes", zero, D, numel], sum(float(times * each) for *_, times, each in rows)
    for _ in range(300):
        split = rng.randint(0, 3), rng.randint(1, 4096), rng.choice((2, 4, 8)), rng.choice((2, 4))
        yield ["bytes_per_parameter", *split], [*map(float, sizes.bytes_per_parameter(*split))]
        mesh = {axis: rng.randint(1, 3) for axis in ("shard", "pp", "ep", "cp", "tp")}
        axes, rank = rng.sample(list(mesh), 2), rng.randrange(math.prod(mesh.values()))
        names = dict(zip(mesh, ("dp", "pp", "ep", "cp", "tp"), strict=True))  # those of the page
        yield (["group_of", rank, {names[axis]: n for axis, n in mesh.items()},
                [names[axis] for axis in axes]],
               next(sorted(row) for row in lay_out(mesh, axes) if rank in row))
        layers = rng.choices(range(10), k=rng.randint(3, 12))
        n = rng.randint(1, len(layers))
        yield ["cut", layers, n], schedules.cut(layers, n)


@pytest.fixture(scope="module", autouse=True)
def opened(tmp_path_factory):
    """(Chromium, which opens the page with PROBE while the other tests run; what the page should
    show; the file with what it shows)."""
    if not CHROME:
        yield
        return
    rng, settings, want = random.Random(1), [], []
    for name in rng.sample(list(MODELS), 12):
        D, T, P, zero = (rng.choice(values) for values in ((1, 8), (1, 2), (1, 4), (0, 3)))
        if MODELS[name].n_head % 2:  # gpt2-xl has 25 heads
            T = 1
        layout = memory.Layout(D, T, P, zero=zero, schedule="zb-h1", microbatches=8)
        settings.append(f"cm={name}&dp={D}&tp={T}&pp={P}&z={zero}&s=zb-h1&cb=64&cmb=8")
        want.append(memory.memory(memory.Job(MODELS[name], 64), layout))
    page = tmp_path_factory.mktemp("lab") / "lab.html"
    probe = PROBE.replace("AUDIT\n", AUDIT.read_text())
    traces = ["{", spans(2, 2, 1)]  # the second one is read: the first one's error goes away
    for name, value in (("SETTINGS", settings), ("ANSWERS", ANSWERS), ("TRACES", traces)):
        probe = probe.replace(name, json.dumps(value), 1)
    page.write_text(PAGE.replace("</body>", probe))
    shown = page.with_name("shown")
    with open(shown, "w") as out:
        chromium = subprocess.Popen(
            [CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=30000",
             page.as_uri()], stdout=out, stderr=subprocess.DEVNULL)
    yield chromium, want, shown
    chromium.kill()
    chromium.wait()


@cache
def all_cases():
    rng, kinds = random.Random(0), (
        ring_cases, attention_cases, schedule_cases, list_cases, job_cases, other_cases)
    return [case for cases in kinds for case in cases(rng)]


def test_the_page_is_one_small_file():
    assert len(PAGE.encode()) <= 130_000
    assert not re.findall(r'(?:src|href)="https?:', PAGE)


def test_the_published_page_leads_to_files_that_exist(tmp_path):
    """.ci/pages, which .github/workflows/pages.yml runs: links and the preview's picture."""
    site, files = "https://site.example/lab", "https://host.example/you/repo/blob/1234"
    subprocess.run(["bash", HERE / ".ci/pages", tmp_path, f"{site}/", files], check=True)
    page = (tmp_path / "index.html").read_text()
    links = [link for link in re.findall(r'href="([^"#]*)[^"]*"', page) if link]
    links.remove("data:,")
    assert len(links) == 3 and all((HERE / link.removeprefix(f"{files}/")).exists()
                                   and link.startswith(files) for link in links)
    preview = dict(re.findall(r'property="og:(\w+)" content="([^"]*)"', page))
    assert preview.keys() == {"title", "description", "image"}
    picture = tmp_path / preview["image"].removeprefix(f"{site}/")
    assert picture.read_bytes() == (HERE / "docs/pictures/lab.png").read_bytes()


@needs_node
def test_the_page_computes_what_python_computes():
    assert len(all_cases()) > 2000 and not differences(all_cases())[:3]


@needs_node
@pytest.mark.parametrize("right,wrong,where", [
    ("(zero ? 1 : 2) * half", "half", "messages"), ("(4 * h + 2 * norm)", "(4 * h)", "parts"),
    ("mlps * up * h * inner", "mlps * h * inner", "parts"),
    ('if (k >= lag) actions.push("W");', 'if (k > lag) actions.push("W");', "played"),
    ('["Wb", "Wa", "Fb"', '["Wb", "Fb", "Wa"', "played")])
def test_the_comparison_notices(right, wrong, where):
    """A wrong factor of a formula; an action of a schedule that is missing, or moved."""
    assert CORE.count(right) == 1
    pairs = [pair for pair in all_cases() if pair[0][0] == where]
    assert differences(pairs, CORE.replace(right, wrong))


@needs_node
def test_the_command_for_the_seconds_of_a_layout_plans_this_layout(capsys, monkeypatch):
    """Of the calculator, for three layouts: the planner shows the same layout."""
    a, b = memory.Layout(dp=4, tp=4, pp=4, sp=True, microbatches=16), memory.Layout(dp=8, zero=3)
    cases = [("llama-70b", 128, {}, a), ("gpt2", 64, {"n_experts": 8}, b._replace(ep=4)),
             ("gpt3-13b", 64, {}, a._replace(schedule="interleaved", chunks=2, zero=1, cp=2))]
    for name, batch_size, experts, layout in cases:
        job = memory.Job(replace(MODELS[name], **experts), batch_size, grad_width=4)
        layout = layout._replace(microbatches=layout.microbatches or 1, chunks=layout.chunks or 1)
        asked = [{**job._asdict(), "model": asdict(job.model)}, layout._asdict(), layout.ranks]
        [words] = results([["timed", name, "h100", *asked]])
        monkeypatch.setattr("sys.argv", [*words.split()[2:], "--json"])
        plan.main()
        [row] = json.loads(capsys.readouterr().out)["layouts"]  # "best" has the fastest of all
        assert same(row, report.figures(job, layout, DEVICES["h100"]) | {"trades": row["trades"]})


@needs_node
def test_the_page_shows_powers_of_ten_and_percents_with_a_decimal():
    """What arXiv 1910.02054 and 1811.06965 print: 7.5 billion parameters take 120 GB, and 31.4 with
    ZeRO-1 on 64 ranks; four stages and 8, 12, 16 microbatches idle 27.3, 20.0, 15.8%."""
    show = re.search(r"const digits = .*?(?=\n// ---- )", PAGE, re.S)[0]
    psi = 7.5e9
    pairs = [(["GB", 16 * psi], "120"), (["GB", (4 + 12 / 64) * psi], "31.41"),
             (["GB", 16e12], "16,000"), (["size", 7e9], "7 GB"), (["size", 2**30], "1.07 GB"),
             (["size", 32e6], "32 MB"), (["size", 1500], "1.5 kB"), (["seconds", 5e-3], "5 ms"),
             *((["percent", 3 / (m + 3)], text)
               for m, text in ((8, "27.3%"), (12, "20.0%"), (16, "15.8%")))]
    assert not differences(pairs, show)


WRONG = "this is not a file that train.py --trace wrote"


@needs_node
def test_a_wrong_trace_is_refused_in_words():
    """... and not in JavaScript's: no JSON, other JSON, numbers that are none, too large ones."""
    event = {"pid": 0, "tid": "main", "cat": "F", "ts": 0.0, "dur": 1.0,
             "args": {"stage": 0, "microbatch": 0, "step": 0}}

    def text(**changes):
        return json.dumps({"traceEvents": [{**event, **changes}]})

    pairs = [(["trace", words], WRONG) for words in (
        "", "{", "[]", "3", "null", '{"traceEvents": 3}', '{"traceEvents": [null]}',
        text(ts="soon"), text(dur=None), text(dur=-1), text(pid="x"), text(args=None),
        text(args={"stage": 1e9, "microbatch": 0, "step": 0}),
        text(args={"stage": 0, "microbatch": 0.5, "step": 0}))]
    pairs += [
        (["trace", text(cat="send")], "no actions of a pipeline in this file: train.py --pp 2 "
         "--trace FILE writes some"),
        (["trace", spans(17, 2, 1)], "this trace has 17 pipeline ranks; the figure draws up to 16"),
        (["trace", spans(2, 65, 1)], "this trace has 65 microbatches; the figure draws up to 64"),
        (["() => trace(' '.repeat(33e6))"], "this file has 33 MB; the page reads up to 32")]
    assert not differences(pairs)


@needs_node
def test_a_long_trace_is_read_in_one_pass():
    """Lists that are filtered have few times as many elements as the trace, together: not one whole
    trace for each step."""
    looked = """(text) => {
      const filter = Array.prototype.filter;
      let elements = 0;
      Array.prototype.filter = function (...how) {
        elements += this.length;
        return filter.apply(this, how);
      };
      try { return [read_trace(text).steps, elements < 5 * JSON.parse(text).traceEvents.length]; }
      finally { Array.prototype.filter = filter; }
    }"""
    assert not differences([([looked, spans(2, 4, 300)], [300, True])])


def luminance(color):
    """Of a color like #fff or #2f6fd0 (WCAG 2.2, relative luminance)."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_lines_of_the_page_can_be_told_from_it(theme):
    """WCAG 2.2: 4.5 for words, 3 for lines and signs; numbers on actions are #16181b."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE, re.S)[:2]
    colors = dict(re.findall(r"--(\w+): (#\w+);", light))
    if theme == "dark":
        colors.update(re.findall(r"--(\w+): (#\w+);", dark))
    for words, behind in (("text", "page"), ("quiet", "page"), ("limit", "page"), ("link", "page"),
                          ("text", "soft"), ("quiet", "soft")):
        assert contrast(colors[words], colors[behind]) >= 4.5, words
    for name in ("c0", "c1", "c2", "c3", "c4"):
        assert contrast(colors[name], colors["page"]) >= 3, name
    for name in "FBW":
        assert contrast(colors[name], "#16181b") >= 4.5, name


@needs_node
@pytest.mark.parametrize("name,v", [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_trace_is_read_as_train_py_reports_it(name, v, tmp_path):
    where, costs = schedules.placement(name, 4, v), (3, 2, 2, 0)
    t = simulate(make_schedule(name, 4, 8, v), where, costs)
    every = [[[kind, "main", start, start + span, {**a._asdict(), "step": 2, "group": "tp"}]
              for a, start, end in row
              for kind, span in ((a.kind, end - start), ("wait", (end - start) / 4))]
             for row in t.times]  # a quarter of each action is a wait
    timeline.write_chrome(tmp_path / name, every)
    _, mean = timeline.shares(every, lambda rank, stage: rank)
    f, b, i, w = (1e3 * v * mean.get(kind, 0.0) for kind in "FBIW")
    want = [4, v, 8, name, [f, i + b / 2, w + b / 2, 0], 1e3 * t.makespan]
    assert not differences([(["trace", (tmp_path / name).read_text()], want)])


def report_of(opened):
    chromium, _, shown = opened
    chromium.wait(HANG)
    text = re.search(r'<pre id="report">(.*?)</pre>', shown.read_text(), re.S)[1]
    return json.loads(html.unescape(text))


@needs_chrome
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_and_reach_the_page(opened, theme):
    """Names, roles, headings, ids, landmarks, focus; and the contrast of all words, on canvases
    too."""
    assert report_of(opened)["audits"][theme] == []


# The page in a frame of each width. A cell is cut if it ends to the right of the frame
WIDTHS = """<body><iframe src="page.html#rn=16" height="900"></iframe><script>
onload = async () => {
  const [frame] = document.querySelectorAll("iframe"), seen = [];
  for (const width of [320, 360, 500, 820, 1200]) {
    frame.width = width;
    await new Promise((next) => setTimeout(next, 200));
    const cells = [...frame.contentDocument.querySelectorAll("td")].map((cell) => [cell,
      cell.getBoundingClientRect()]);
    seen.push([width, cells.length > 50, cells.filter(([, box]) => box.right > width).map(
      ([cell]) => `${cell.closest("table").id}: ${cell.textContent}`)]);
  }
  document.body.textContent = "seen" + JSON.stringify(seen) + "seen";
};
</script></body>"""


@needs_chrome
def test_no_cell_of_a_table_is_cut_on_a_telephone(tmp_path):
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "frame.html").write_text(WIDTHS)
    out = subprocess.run(
        [CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path}/profile",
         "--virtual-time-budget=30000", (tmp_path / "frame.html").as_uri()],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=HANG).stdout
    seen = json.loads(html.unescape(out.split("seen")[1]))
    assert seen == [[width, True, []] for width in (320, 360, 500, 820, 1200)]


@needs_chrome
def test_every_control_of_the_page_works_and_its_numbers_are_pythons(opened):
    report, want = report_of(opened), opened[1]
    assert not report["errors"] and report["requests"] == 0 and report["moved"] > 65
    assert not report["mute"] and report["trace_lines"][:2] == [WRONG, ""]
    assert report["trace_lines"][2].startswith("recorded by train.py: 1f1b, 381 ms a step")
    # Each Try, after each preset of its figure
    assert report["tries"] == {"given_away": [], "unsolved": [], "solved": 32}
    first = "F0 of stage 0 (rank 0), time 0 to 1: needs no action; did not wait; needed by"
    assert report["pipe"].pop("pointed").startswith(first)
    assert report["pipe"] == {"left": "no action is chosen", "time": 50, "still": 50,
                              "chunks": [True, False]}
    # After hop 1 of 4 ranks, rank r has added its term to rank r-1's in chunk r-2
    assert report["touches"] == [
        "Rank 2, chunk 1: the terms of rank 2", "Rank 3, chunk 1: the terms of ranks 2 3",
        "Rank 0, chunk 1: the terms of rank 0"]
    assert report["race"] == ["120 ms", "3 of 6 messages", "3 of 6 messages"]
    assert report["lights"] == [["dp", "dp", None]]
    ring, *every = report["figures_asked"]  # a name that no figure has asks for none: all stay
    assert ring == 1 and every == [PAGE.count("<section")] * 2
    for shown, parts in zip(report["numbers"], want, strict=True):
        assert shown["calc-timed"].startswith("python -m extras.planner ")
        more = parts["total"] / 80e9
        verdict = "Too large" if more > 1 else "Fits barely" if more > 0.93 else "Fits, and"
        assert shown["calc-verdict"].startswith(verdict)
        for part, size in parts.items():  # four digits are shown
            got = float(shown["calc-" + part].replace(",", ""))
            assert math.isclose(got, size / 1e9, rel_tol=5e-4)
