"""What a message is about, in words, found in the Python frames of the call that sends it.

    calls, the outermost first                  words
    run_pipeline, at the third of its forwards  F2: the forward of microbatch 2
      Row.forward, self is h.1.mlp.c_proj       output of h.1.mlp.c_proj
        all_reduce, of a tensor of two chunks   all-reduce, chunk 1 of 2
          reduce_scatter                        to add (the receiver adds what arrives)
            exchange, of this chunk

So no technique says anything for the sake of --watch (run/watch.py): WORDS below knows the function
in which each technique asks for messages. If another function asks, the words are its own name.
"""

import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = str(Path(__file__).parent.parent)  # the repository


class Call(NamedTuple):
    """A frame of the stack."""
    file: str  # without its ending, from the repository on, such as engine/ddp
    function: str
    at: dict  # local variables


def calls():
    """The calls that lead here, the innermost first; those of torch and Python are left out."""
    frame = sys._getframe(1)
    found = []
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(ROOT):
            file = path[len(ROOT) + 1 : -len(".py")]
            found.append(Call(file, frame.f_code.co_name, frame.f_locals))
        frame = frame.f_back
    return found


# ---- when: the action of the pipeline ----


def action_of(stack):
    """The pipeline's action: "F2", "B2", "I2" or "W2" for microbatch 2; "" outside of the pipeline.
    """
    for file, function, at in stack:
        if (file, function) == ("engine/pipeline", "execute") and "action" in at:
            kind, _, k = at["action"]  # kind: F B I W, or SF SB for a message
            return f"{kind[-1]}{k}"
        if (file, function) == ("pipeline", "run_pipeline") and "action" in at:
            # Microbatches are taken in order. F0 is the forward of the last one begun, B0 the
            # backward of the oldest in flight, which has left in_flight already: hence its - 1
            begun = len(at["batches"]) - len(at["to_forward"])
            if at["action"] == "F0":
                return f"F{begun - 1}"
            return f"B{begun - len(at['in_flight']) - 1}"
    return ""


# ---- of which parameter or layer ----


def short(name):
    """A canonical name without "transformer.", with which all names but lm_head.weight begin."""
    return name.removeprefix("transformer.")


def name_behind(node):
    """The name of the first parameter on the way from a node of autograd's graph to the inputs; ""
    if there is none. For the backward of f (copy_to_ranks), which sums a gradient, it is a
    parameter of the layer before f."""
    queue = deque([node])
    seen = set()
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        tag = getattr(getattr(node, "variable", None), "shard", None)
        if tag:
            return short(tag.name)
        queue.extend(following for following, _ in node.next_functions)
    return ""


def parameter_of(tensor):
    """The name of a parameter, or of the parameter from which a tensor was computed, because the
    plain ZeRO-3 computes with gathered weights."""
    tag = getattr(tensor, "shard", None)
    return short(tag.name) if tag else name_behind(getattr(tensor, "grad_fn", None))


def layer_of(module):
    """The common beginning of the names of a module's parameters, such as "h.0.mlp"; "": none."""
    # (In the plain ZeRO-3's forward parameters() yields gathered tensors, which have no tag)
    names = [name.split(".")[:-1] for name in map(parameter_of, module.parameters()) if name]
    common = []
    for words in zip(*names, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)


def bucket_of(bucket):
    """A bucket's parameter or, of several, the first and the last."""
    names = [short(param.shard.name) for param in bucket.params]
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]}"


def nearest(stack):
    """The parameter, layer or bucket that the innermost call knows of; "?" if none does."""
    for file, _, at in stack:
        owner = at.get("self")
        ctx = at.get("ctx")
        if file == "engine/vocabulary_parallel" and "targets" in at:
            return "lm_head"  # tied: its matrix has the name of the embedding
        # Each line: the name to which a local variable leads, and the files that have the variable
        found = [bucket_of(at["bucket"]) if "bucket" in at else "",  # engine/ddp, engine/zero
                 parameter_of(at.get("param")),  # ddp, zero
                 parameter_of(at.get("chunk")),  # zero's gather()
                 layer_of(owner) if isinstance(owner, torch.nn.Module) else "",  # any layer
                 parameter_of(getattr(ctx, "weight", None)),  # engine/tensor_parallel
                 name_behind(ctx) if is_backward(stack) else ""]  # any other backward
        if any(found):
            return next(filter(None, found))
    return "?"


def is_backward(stack):
    """Does autograd's backward ask for the message? The innermost function that has a `ctx`
    decides, because recompute runs a forward inside of a backward."""
    directions = [function for _, function, at in stack if "ctx" in at]
    return directions[:1] == ["backward"]


# ---- how: the collective ----

# Endings of the names of files that pass on messages for others, and ask for none of their own
MACHINERY = ("group", "collectives", "run/watch")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "_all_to_all")


def collective_of(stack):
    """The call of the outermost collective: all_reduce, rather than the reduce_scatter inside of
    it. None for a message from rank to rank."""
    found = [call for call in stack if call.file.endswith("collectives")
             and call.function in COLLECTIVES]
    return found[-1] if found else None


def is_term(stack):
    """Does the receiver add what arrives? Else the receiver keeps it as it is."""
    for _, function, at in stack:
        if function in ("reduce_scatter", "all_gather"):  # the root's
            return function == "reduce_scatter"
        # The engine's ring and butterfly loop over `step`, one message (engine/collectives.py)
        if function in ("ring_ahead", "ring_in_turn"):
            return at["step"].reduce  # does the receiver add?
        if function == "butterfly":
            if "step" not in at:  # the first message, sent before the loop: the receiver adds it
                return True
            return at["step"].total is not None  # total: the sum to which the receiver adds
    return False


def part_of(tensor, sent, size):
    """Which part of a collective's tensor is sent: all, one of its `size` chunks, or some elements.
    (A collective of your own may send another tensor.)"""
    if sent.numel() == tensor.numel():
        return "all"
    begin = (sent.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    if not 0 <= begin < tensor.numel():
        return "another tensor"
    start = 0
    for i, chunk in enumerate(tensor.view(-1).tensor_split(size)):
        if start == begin and chunk.numel() == sent.numel():
            return f"chunk {i} of {size}"
        start += chunk.numel()
    return f"elements {begin} to {begin + sent.numel() - 1} of {tensor.numel()}"


def means(stack, sent, size):
    """The collective that sends the tensor `sent` in a group of `size` ranks, and which part."""
    collective = collective_of(stack)
    if collective is None:
        return ""
    name = collective.function.strip("_").replace("_", "-")
    if name == "all-to-all":
        return name
    part = part_of(collective.at["tensor"], sent, size)
    add_or_keep = ""
    if name == "all-reduce":
        add_or_keep = ", to add" if is_term(stack) else ", to keep"
    return f"{name}, {part}{add_or_keep}"


# ---- what: the words of each function that asks for messages ----
# Some values of WORDS (below) are functions (at, stack). at: the local variables of the call that
# asks for the message; stack: all calls, that one among them


def to_stage(at, stack):
    """at: the local variables of Pipeline.send (engine/), which has `to`, or of run_pipeline, which
    sends to the next rank in forward, and to the rank before in backward."""
    forward = action_of(stack).startswith("F")
    to = at["to"] if "to" in at else at["rank"] + (1 if forward else -1)
    return f"{'activation' if forward else 'gradient'} of microbatch {action_of(stack)[1:]}, " \
           f"to stage {to}"


def layer_at(stack):
    return nearest(stack).removesuffix(".weight").removesuffix(".bias")


def of_layer(at, stack):
    name = layer_at(stack)
    return f"gradient of {name}'s output" if is_backward(stack) else f"output of {name}"


def is_column(stack):
    """Is a column asking? (In autograd's functions the class of ctx is ColumnLinearBackward.)"""
    return any(type(call.at.get("ctx")).__name__.startswith("Column") for call in stack)


def entering(at, stack):
    """The engine's --sp all-gathers the input of a column in forward and, once more, in the
    column's backward. In a row's backward it all-gathers the gradient of the row's output."""
    if is_backward(stack) and not is_column(stack):
        return of_layer(at, stack)
    return f"input of {layer_at(stack)}"


def leaving(at, stack):
    """The engine sums the output of a row in forward and, in a column's backward, the gradient of
    the column's input. (The head is a column. Its loss computes the gradient in forward.)"""
    name = layer_at(stack)
    column_backward = is_backward(stack) and is_column(stack)
    if name == "lm_head" or column_backward:
        return f"gradient of {name}'s input"
    return of_layer(at, stack)


def of_logits(at, stack):
    """vocabulary_loss all-reduces the largest logits, then two sums."""
    return "sums of each token's logits" if "sum_exp" in at else "each token's largest logit"


def of_rows(at, stack):
    """expert_parallel's move sends tokens to their experts, then the experts' outputs back. Between
    the two, run_at_owners sets `outputs`."""
    if is_backward(stack):  # run_at_owners is not on the stack
        return "gradients of the experts' rows, there or back"
    combining = any("outputs" in call.at for call in stack if call.function == "run_at_owners")
    return "outputs of experts, back" if combining else "tokens to their experts"


def of_heads(at, stack):
    """Before attention to_whole_sequences swaps tokens for heads; after it to_own_tokens swaps
    back."""
    if is_backward(stack):  # neither is on the stack
        return "gradients of heads, there or back"
    before = any(call.function == "to_whole_sequences" for call in stack)
    return "tokens for heads" if before else "heads for tokens"


def of_step(at, stack):
    """plain.py all-reduces the tied matrix's gradient, then the loss. Between the two
    training_steps() sets `norm`, for the first time: --watch shows the first step only."""
    return "loss" if "norm" in at else f"gradient of {short(at['tag'].name)}"


def of_sums(at, stack):
    """Trainer.gradients all-reduces `sums`, then the norm. Without experts `sums` has two numbers.
    """
    summed = collective_of(stack).at["tensor"]
    if summed is not at.get("sums"):
        return SQUARES
    words = "loss, requests to stop"
    return f"{words}, routers' statistics" if summed.numel() > 2 else words


SQUARES = "squares of the gradients, for the norm"
GRADIENT = "gradient of {}"
WEIGHTS = "{}"
NEW = "new {}"
# (file, function): the words, in which {} stands for the result of nearest(); or a function that
# returns the words
WORDS = {
    ("pipeline", "run_pipeline"): to_stage, ("engine/pipeline", "send"): to_stage,

    ("tensor_parallel", "vocabulary_loss"): of_logits,
    ("tensor_parallel", "forward"): of_layer, ("collectives", "backward"): of_layer,
    ("engine/vocabulary_parallel", "log_share"): "logsumexp of each token's logits",
    ("engine/vocabulary_parallel", "forward"): "loss of the microbatch",
    ("engine/sequence_parallel", "start_enter"): entering,
    ("engine/sequence_parallel", "start_leave"): leaving,

    ("engine/context_parallel", "ring_hops"): "keys and values, to the next rank",
    ("engine/context_parallel", "backward"): "gradient of keys and values, to the next rank",
    ("context_parallel", "swap"): of_heads,

    ("engine/expert_parallel", "count"): "how many tokens come for each expert",
    ("engine/expert_parallel", "sum_counts"): "tokens per expert, for the balance loss",
    ("expert_parallel", "move"): of_rows,

    ("ddp", "gradients"): GRADIENT, ("zero", "gradients"): GRADIENT,
    ("zero", "keep_own_chunk"): GRADIENT, ("zero", "backward"): GRADIENT,
    ("zero", "forward"): WEIGHTS, ("zero", "publish"): NEW,
    ("engine/ddp", "launch"): GRADIENT, ("engine/zero", "launch"): GRADIENT,
    ("engine/ddp", "finish"): GRADIENT,
    ("engine/zero", "gather_weights"): WEIGHTS, ("engine/zero", "publish"): NEW,

    ("optimizer", "global_norm"): SQUARES,
    ("plain", "training_steps"): of_step, ("train", "gradients"): of_sums,
    ("engine/layerwise", "whole_norms"): "squares of each tensor, for the trust ratios"}


# A whole step, or a layer, runs inside these functions. Their words hold only for messages that
# they ask for directly. If a function that WORDS lacks asks inside them, the words are its name
AROUND = (("pipeline", "run_pipeline"), ("plain", "training_steps"), ("train", "gradients"),
          ("zero", "forward"))


def subject(stack):
    """What is sent: the words of the innermost call in WORDS."""
    asking = next(call for call in stack if not call.file.endswith(MACHINERY))
    for call in stack:
        name = call.file, call.function
        if name in WORDS and (call is asking or name not in AROUND):
            words = WORDS[name]
            return words(call.at, stack) if callable(words) else words.format(nearest(stack))
    return f"by {asking.function} in {asking.file}.py"
