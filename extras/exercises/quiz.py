"""python -m extras.exercises quiz: asks for numbers. After an answer it prints "right", or "wrong"
and the right number; then how to derive it. The numbers are computed here, by sizes.py, or by
schedules.py. No torch here."""

import re
from typing import NamedTuple

from schedules import make_schedule, placement, simulate
from sizes import GPTConfig, bytes_per_parameter

GB = 1e9


class Question(NamedTuple):
    text: str
    answer: float
    derivation: tuple  # lines
    slack: float = 0.02  # answers may be off by this share


def ring_bytes(n, N):
    """Bytes that each of N ranks sends in an all-reduce of n bytes (collectives.py)."""
    return 2 * (N - 1) / N * n


def bubble_of(name, P, m):
    return simulate(make_schedule(name, P, m), placement(name, P)).bubble


def most_in_flight(name, P, m):
    return max(simulate(make_schedule(name, P, m), placement(name, P)).peak_in_flight)


def states_of_7b():
    parts = bytes_per_parameter(0, 1)
    total = sum(parts)
    return Question(
        "A model of 7B parameters trains in 16 bits with AdamW, on one GPU. How many GB are its "
        "model states?", 7e9 * total / GB,
        ("weights {:g} + gradients {:g} + master weights and two moments {:g} bytes".format(*parts),
         f"7e9 parameters * {total:g} bytes = {7e9 * total / GB:g} GB: more than a GPU of 80 GB"))


def ring_of_eight():
    sent = ring_bytes(4, 8)
    return Question(
        "Eight ranks all-reduce 4 GB of gradients in a ring. How many GB does each rank send?",
        sent,
        ("reduce-scatter: N - 1 = 7 hops of 4 / 8 GB each; all-gather: as many",
         f"2 (N-1)/N n = 2 * 7/8 * 4 = {sent:g} GB"))


def more_gpus():
    eight, many = ring_bytes(4, 8), ring_bytes(4, 1024)
    return Question(
        "Just add more GPUs: the same all-reduce of 4 GB, on 1024 ranks and not 8. By what factor "
        "do the bytes that each rank sends grow?", many / eight,
        (f"8 ranks: 2 * 7/8 * 4 = {eight:g} GB; 1024 ranks: 2 * 1023/1024 * 4 = {many:.4g} GB",
         f"{many / eight:.3g} times as many: the bytes of a rank hardly grow, but they do not "
         "shrink either.",
         f"The hops grow, from {2 * 7} to {2 * 1023}; and with plain data parallelism each GPU "
         "still holds all model states"))


def zero3_of_70b():
    per = sum(bytes_per_parameter(3, 128))
    return Question(
        "70B parameters, 16-bit training with AdamW under ZeRO-3 on 128 GPUs. How many GB of model "
        "states does each GPU hold?", 70e9 * per / GB,
        ("ZeRO-3 shards weights, gradients and optimizer states: 16 / D bytes per parameter",
         f"70e9 * 16 / 128 = {70e9 * per / GB:g} GB; the GPU also holds activations, and the whole "
         "weights of a layer while the layer runs"))


def zero1_of_7b():
    per = bytes_per_parameter(1, 8)
    return Question(
        "7B parameters under ZeRO-1 on 8 GPUs (16-bit training, AdamW). How many GB of model "
        "states does each GPU hold?", 7e9 * sum(per) / GB,
        ("ZeRO-1 shards the 12 bytes of the optimizer: 2 + 2 + 12/8 = "
         f"{sum(per):g} bytes per parameter", f"7e9 * {sum(per):g} = {7e9 * sum(per) / GB:g} GB"))


def bubble_of_four():
    bubble = 100 * bubble_of("1f1b", 4, 12)
    return Question(
        "A pipeline of P = 4 ranks runs m = 12 microbatches. What share of the time is the bubble, "
        "in percent?", bubble,
        (f"(P-1) / (m+P-1) = 3 / 15 = {bubble:g}%: the pipeline fills and drains in 3 of 15 turns",
         f"GPipe's is the same: simulated, {100 * bubble_of('gpipe', 4, 12):g}%"))


def in_flight_of_1f1b():
    most, all_of = most_in_flight("1f1b", 4, 12), most_in_flight("gpipe", 4, 12)
    return Question(
        "The same pipeline: how many microbatches has the first rank in flight at most under 1F1B?",
        most, (f"one forward for each later rank to warm up, and the next forward: P = {most}",
               f"under GPipe all m: {all_of}"), 0)


def columns_of_qkv():
    C, T = 4096, 4
    whole = 3 * C * C
    return Question(
        "q, k and v of a block of width 4096 are one matrix. With T = 4 tensor ranks, how many "
        "millions of its weights has each rank?", whole / T / 1e6,
        (f"3 C^2 = 3 * {C}^2 = {whole / 1e6:.1f} million; each rank has the columns of 1/4 of the "
         f"heads: {whole / T / 1e6:.1f} million",))


def ranks_of_a_layout():
    T, P, D = 4, 4, 16
    return Question(
        "A layout has T = 4, P = 4 and D = 16. How many GPUs?", T * P * D,
        (f"each of the D replicas has P stages of T ranks: 4 * 4 * 16 = {T * P * D}",), 0)


def data_ranks():
    T, P, gpus = 4, 4, 64
    D = gpus // (T * P)
    # One rank has 1/(T P) of the parameters, and shards the optimizer states over D
    per = sum(bytes_per_parameter(1, D))
    held = 13e9 / (T * P) * per / GB
    return Question(
        "13B on 64 GPUs with P = 4 and T = 4, ZeRO-1 over the replicas. How many GB of model "
        "states does each GPU hold?", held,
        (f"D = 64 / (P T) = {D} replicas; a rank has 13e9 / 16 = {13e9 / 16 / 1e9:.4g}e9 "
         "parameters", f"each takes 2 + 2 + 12/{D} = {per:g} bytes: {held:.4g} GB"))


def bytes_of_tensor_parallelism():
    config = GPTConfig(n_embd=4096, block_size=2048)
    n = config.n_embd * config.block_size * 2  # bytes of an activation, one sequence
    sent = 4 * ring_bytes(n, 4) / 1e6
    return Question(
        "T = 4, width 4096, one sequence of 2048 tokens, 16 bits. How many MB does a rank send per "
        "block, forward and backward?", sent,
        (f"an activation B S C is 2048 * 4096 * 2 bytes = {n / 1e6:.4g} MB",
         "four all-reduces: after attention and after the MLP (g), and in backward before them (f)",
         f"4 * 2 (T-1)/T * {n / 1e6:.4g} = {sent:.4g} MB. train.py --sp sends 5/4 of this: it "
         "saves 1/T of a column's input, and gathers it again in backward.",
         "(The root's sequence_parallel.py saves the whole input, and sends no more than this)"))


def zero3_bytes():
    m, D = 4, 8
    gb = 3 * m * 7e9 * 2 * (D - 1) / D / GB
    return Question(
        "ZeRO-3 of 7B on 8 GPUs in 16 bits, 4 microbatches per step. How many GB does each GPU "
        "send in a step?", gb,
        ("each microbatch gathers the weights twice and reduce-scatters the gradients once",
         f"3 m Psi (D-1)/D = 3 * 4 * 7e9 * 7/8 elements of 2 bytes = {gb:g} GB; DDP: "
         f"{ring_bytes(14, 8):g} GB"))


COLLECTIVES = ("broadcast", "scatter", "gather", "reduce", "reduce-scatter", "all-gather",
               "all-reduce", "all-to-all")
NEEDS = (("every replica needs the sum of all gradients", "all-reduce"),
         ("rank r steps chunk r, so it needs chunk r of that sum", "reduce-scatter"),
         ("every rank needs all weights, of which rank r has chunk r", "all-gather"),
         ("each token goes to the rank of its expert", "all-to-all"))


def which_collective():
    digits = "".join(str(1 + COLLECTIVES.index(name)) for _, name in NEEDS)
    return Question(
        "Which collective? Answer with four digits, one for each need: "
        + "; ".join(need for need, _ in NEEDS) + ". "
        + ", ".join(f"{i} {name}" for i, name in enumerate(COLLECTIVES, 1)), int(digits),
        tuple(f"{need}: {name}" for need, name in NEEDS), 0)


def zero3_in_a_pipeline():
    P, gpus = 4, 64
    D = gpus // P
    held = 13e9 / P * sum(bytes_per_parameter(3, D)) / GB
    return Question(
        "13B on 64 GPUs with P = 4, ZeRO-3 over the replicas. How many GB of model states does "
        "each GPU hold?", held,
        (f"D = 64 / P = {D} replicas; a stage has 13e9 / 4 parameters, each 16/{D} = "
         f"{16 / D:g} bytes on a rank", f"13e9 / 4 * {16 / D:g} = {held:g} GB: 16 Psi / (D P), "
         "because all 64 ranks share the states"))


def least_stage_for_7b():
    activations, room, ranks = 20, 80, 8
    needs = [7 * sum(bytes_per_parameter(stage, ranks)) + activations for stage in range(4)]
    stage = next(stage for stage, gb in enumerate(needs) if gb <= room)
    return Question(
        "7B on 8 GPUs of 80 GB, with 20 GB of activations on each. Which is the lowest stage of "
        "ZeRO (0: none) that fits?", stage,
        ("stages 0 to 3 take " + ", ".join(f"{gb:g}" for gb in needs) + " GB with the activations",
         "Higher stages fit, too, and send in every microbatch; tensor and pipeline parallelism "
         "are not needed"), 0)


QUESTIONS = (states_of_7b, ring_of_eight, more_gpus, which_collective, zero1_of_7b,
             least_stage_for_7b, zero3_of_70b, zero3_bytes, bubble_of_four, in_flight_of_1f1b,
             columns_of_qkv, bytes_of_tensor_parallelism, ranks_of_a_layout, data_ranks,
             zero3_in_a_pipeline)


def is_right(question, text):
    """Is a typed answer right? A comma is a decimal point. Text after the number, such as a unit,
    is ignored. None: the answer does not begin with a number."""
    number = re.match(r"\s*([+-]?\d*[.,]?\d+(e[+-]?\d+)?)", text, re.IGNORECASE)
    if number is None:
        return None
    given = float(number[1].replace(",", "."))
    return abs(given - question.answer) <= question.slack * abs(question.answer) + 1e-9


def ask_all(ask, say):
    """Ask each question: ask(prompt) returns a line, say(line) prints. An empty line skips the
    question, the end of the input ends the quiz. Returns the exit code: 0 if all answers were
    right."""
    right = 0
    for number, make in enumerate(QUESTIONS, 1):
        question = make()
        say(f"{number} of {len(QUESTIONS)}. {question.text}")
        try:
            answer = ask("> ")
            while answer.strip() and is_right(question, answer) is None:
                answer = ask("a number, please > ")
        except EOFError:
            say("")
            break
        verdict = is_right(question, answer)
        right += bool(verdict)
        said = "right" if verdict else f"the answer is {question.answer:.4g}, because"
        say(f"wrong: {said}" if verdict is False else said)
        for line in question.derivation:
            say(f"   {line}")
    say(f"{right} of {len(QUESTIONS)} right")
    return 0 if right == len(QUESTIONS) else 1
