"""What a message is about, in words, found in the Python frames of the call that sends it.

    calls, the outermost first                  words
    run_pipeline, at the third of its forwards  F2: the forward of microbatch 2
      Row.forward, self is h.1.mlp.c_proj       output of h.1.mlp.c_proj
        all_reduce, of a tensor in 2 chunks     all-reduce, chunk 1 of 2 (the later of 0 and 1)
          reduce_scatter                        to add (the receiver adds what arrives)
            exchange, of this chunk

So no technique says anything for the sake of --watch (run/watch.py).

Terms of this page. A *call* is a frame; its `at` holds its local variables. The `stack` is the list
of all calls, the innermost first. Files in MACHINERY pass messages on for other files: the *asking
call* is the innermost call of a function of any other file. WORDS has the words for some functions:
the *known call* is the innermost call of a function in WORDS, and its words say what the message is
about. Functions in AROUND have words, too, but only for messages that they ask for themselves,
because much else runs inside them: a call of them is the known call only if it is the asking call.
For example, in plain.py's loss (outermost first, some calls left out):

    training_steps   plain.py             in WORDS and AROUND, not the asking call: not known
    run_pipeline     pipeline.py          the same
    vocabulary_loss  tensor_parallel.py   in WORDS: the known call, "sums of each token's logits"
    forward          collectives.py       in MACHINERY
    sum_of_copy      tensor_parallel.py   the asking call: it is not in WORDS
    all_reduce       collectives.py       in MACHINERY
    exchange         group.py             in MACHINERY

If WORDS lacked vocabulary_loss, no call would be known. The message would then get the asking
call's name: "by sum_of_copy in tensor_parallel.py". If AROUND lacked run_pipeline as well, the
message would get run_pipeline's words, which are about an activation for the next stage.
"""

import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = str(Path(__file__).parent.parent)  # the repository


class Call(NamedTuple):
    file: str  # without its ending, from the repository on, such as engine/ddp
    function: str
    at: dict  # {name: value} of the local variables


def calls():
    """The stack: the calls that lead here, the innermost first, without those of torch and Python.
    """
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


# ---- what: the parameter or layer ----


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
    """The name of the parameter, layer or bucket in the local variables of the innermost call that
    has one there; "?" if none has."""
    for file, _, at in stack:
        owner = at.get("self")
        ctx = at.get("ctx")
        if file == "engine/vocabulary_parallel" and "targets" in at:
            return "lm_head"  # its matrix is tied, and has the embedding's name
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


def nearest_layer(stack):
    return nearest(stack).removesuffix(".weight").removesuffix(".bias")


def is_backward(stack):
    """Is the message sent in autograd's backward? The innermost call that has a `ctx` decides,
    because recompute runs a forward inside of a backward."""
    directions = [function for _, function, at in stack if "ctx" in at]
    return directions[:1] == ["backward"]


# ---- how: the collective ----

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "_all_to_all")


def collective_of(stack):
    """The call of the outermost collective, such as all_reduce, which calls reduce_scatter. None
    for a message from rank to rank."""
    found = [call for call in stack if call.file.endswith("collectives")
             and call.function in COLLECTIVES]
    return found[-1] if found else None


def is_term(stack):
    """Does the receiver of a message of an all-reduce add it to a sum? (If not, the receiver keeps
    the message as it is.)"""
    for _, function, at in stack:
        if function in ("reduce_scatter", "all_gather"):  # the two halves of the root's all_reduce
            return function == "reduce_scatter"
        # The engine's all_reduce calls one of these three, which loop over messages: `step` is one
        # (engine/collectives.py)
        if function in ("ring_ahead", "ring_in_turn"):
            return at["step"].reduce  # does the receiver add?
        if function == "butterfly":
            if "step" not in at:  # the first message, sent before the loop: the receiver adds it
                return True
            return at["step"].total is not None  # total: the sum to which the receiver adds
    return False


def part_of(tensor, sent, size):
    """The part of a collective's tensor that the message `sent` is: all, one of its `size` chunks
    (counted from 0: "chunk 1 of 2" is the later one), or some elements. (A collective of your own
    may send another tensor.)"""
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
    """How the tensor `sent` is sent in a group of `size` ranks: by which collective, which part of
    the collective's tensor, to add or to keep. "" for a message from rank to rank."""
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


# ---- what: the words of each known call ----
# The functions (at, stack) below return the words of a known call. at: its local variables


def to_stage(at, stack):
    """Pipeline.send (engine/pipeline.py) has the local variable `to`. run_pipeline has no `to`: it
    sends to the next rank in forward, and to the rank before in backward."""
    forward = action_of(stack).startswith("F")
    to = at["to"] if "to" in at else at["rank"] + (1 if forward else -1)
    return f"{'activation' if forward else 'gradient'} of microbatch {action_of(stack)[1:]}, " \
           f"to stage {to}"


def of_layer(at, stack):
    name = nearest_layer(stack)
    return f"gradient of {name}'s output" if is_backward(stack) else f"output of {name}"


def is_column(stack):
    """Is the message sent in the forward or backward of ColumnLinear (engine/tensor_parallel.py)?
    It is an autograd.Function: the class of its `ctx` is ColumnLinearBackward."""
    return any(type(call.at.get("ctx")).__name__.startswith("Column") for call in stack)


def entering(at, stack):
    """Under --sp the engine all-gathers the input of a column in forward and, once more, in the
    column's backward. In a row's backward it all-gathers the gradient of the row's output."""
    if is_backward(stack) and not is_column(stack):
        return of_layer(at, stack)
    return f"input of {nearest_layer(stack)}"


def leaving(at, stack):
    """The engine sums the output of a row in forward and, in a column's backward, the gradient of
    the column's input. The head, lm_head, is a column whose loss computes the gradient already in
    forward."""
    name = nearest_layer(stack)
    column_backward = is_backward(stack) and is_column(stack)
    if name == "lm_head" or column_backward:
        return f"gradient of {name}'s input"
    return of_layer(at, stack)


def of_logits(at, stack):
    """vocabulary_loss calls all_reduce twice: for the largest logits, then for two sums at once.
    Between the two calls it sets `sum_exp`."""
    return "sums of each token's logits" if "sum_exp" in at else "each token's largest logit"


def of_rows(at, stack):
    """`move` (expert_parallel.py) sends tokens to their experts, then the experts' outputs back.
    run_at_owners (engine/expert_parallel.py) asks for both, and sets `outputs` between them."""
    if is_backward(stack):  # autograd calls `move`: run_at_owners is not on the stack
        return "gradients of the experts' rows, there or back"
    combining = any("outputs" in call.at for call in stack if call.function == "run_at_owners")
    return "outputs of experts, back" if combining else "tokens to their experts"


def of_heads(at, stack):
    """Before attention to_whole_sequences calls `swap`, to swap tokens for heads; after attention
    to_own_tokens calls it, to swap back (context_parallel.py)."""
    if is_backward(stack):
        return "gradients of heads, there or back"
    before = any(call.function == "to_whole_sequences" for call in stack)
    return "tokens for heads" if before else "heads for tokens"


def of_step(at, stack):
    """training_steps (plain.py) all-reduces the tied matrix's gradient, then the loss. Between
    the two all-reduces it sets `norm`, for the first time: --watch shows the first step only."""
    return "loss" if "norm" in at else f"gradient of {short(at['tag'].name)}"


def of_sums(at, stack):
    """Trainer.gradients (train.py) all-reduces `sums`, then the norm. Without experts `sums` has
    two numbers."""
    summed = collective_of(stack).at["tensor"]
    if summed is not at.get("sums"):
        return SQUARES
    words = "loss, requests to stop"
    return f"{words}, routers' statistics" if summed.numel() > 2 else words


SQUARES = "squares of the gradients, for the norm"
GRADIENT = "gradient of {}"
WEIGHTS = "{}"
NEW = "new {}"
# (file, function) of a known call: its words, in which {} stands for the result of nearest(); or
# one of the functions above, which returns the words
WORDS = {
    ("pipeline", "run_pipeline"): to_stage, ("engine/pipeline", "send"): to_stage,

    ("tensor_parallel", "vocabulary_loss"): of_logits,
    # forward: a row's or the embedding's. backward: WithBackward's, which autograd calls for the
    # root's f (copy_to_ranks). A known call may be in a file of MACHINERY, an asking call may not
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
    ("zero", "keep_own_chunk"): GRADIENT,
    # The functions forward and backward in gather(): a layer's weights, and their gradients
    ("zero", "forward"): WEIGHTS, ("zero", "backward"): GRADIENT,
    ("zero", "publish"): NEW,
    ("engine/ddp", "launch"): GRADIENT, ("engine/zero", "launch"): GRADIENT,
    ("engine/ddp", "finish"): GRADIENT,
    ("engine/zero", "gather_weights"): WEIGHTS, ("engine/zero", "publish"): NEW,

    ("optimizer", "global_norm"): SQUARES,
    ("plain", "training_steps"): of_step, ("train", "gradients"): of_sums,
    ("engine/layerwise", "whole_norms"): "squares of each tensor, for the trust ratios"}

# Inside each of the first three run at least the forward and backward of all microbatches.
# ("zero", "forward") names two functions: the one in gather(), which asks for messages, and
# Gathered.forward, inside which a whole layer runs
AROUND = (("pipeline", "run_pipeline"), ("plain", "training_steps"), ("train", "gradients"),
          ("zero", "forward"))
# Endings of files' names, so that engine/group and engine/collectives are among them
MACHINERY = ("group", "collectives", "run/watch")


def subject(stack):
    """What the message is about: the words of the known call or, if none is known, the name of the
    asking call."""
    asking = next(call for call in stack if not call.file.endswith(MACHINERY))
    for call in stack:
        name = call.file, call.function
        is_known = name in WORDS and (call is asking or name not in AROUND)
        if is_known:
            words = WORDS[name]
            return words(call.at, stack) if callable(words) else words.format(nearest(stack))
    return f"by {asking.function} in {asking.file}.py"
