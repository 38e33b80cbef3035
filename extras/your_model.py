"""DDP and ZeRO-1, 2, 3 for a model of your own, any nn.Module, in three lines of your own loop:

    mesh = Mesh(dp=dist.get_world_size())                                  # mesh.py
    reducer = ZeRO3(model, mesh)                                           # 1
    optimizer = torch.optim.AdamW(reducer.weights)
    for x, y in batches:
        (loss_of(model(x), y) / mesh.world.size).backward()
        for weights, grad in zip(reducer.weights, reducer.gradients()):    # 2
            weights.grad = grad
        optimizer.step()
        reducer.publish()                                                  # 3

The classes of ddp.py and zero.py, with what train.py does not need: frozen, unused and dropped
gradients, several dtypes, hooks, layers of any form. The result is one process's. The commonest
mistakes are errors of one line. docs/your-model.md has the rules.
"""

import zlib
from functools import partial

import torch
from torch.nn import ModuleDict, ModuleList, Parameter, ParameterList, Sequential
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves, tree_map

import ddp
import zero
from collectives import all_gather, all_reduce, broadcast, maximum, own_chunk
from shard import Tag

# ---- tensors that refuse: freed weights, marks in place of gradients, pieces of gradients ----

VIEWS = {"data", "T", "H", "mT", "mH", "real", "imag"}  # other attributes show no values
HARMLESS = {"__get__", "__set__", "__delete__", "size", "dim", "numel", "is_floating_point",
            "is_complex", "requires_grad_", "register_hook", "untyped_storage"}


class Refusing(Parameter):
    """A tensor that raises its `line` in place of the functions that it `refuses`."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name in ("__get__", "__set__") and function.__self__.__name__ in VIEWS:
            name = function.__self__.__name__
        for tensor in tree_leaves((args, kwargs)):
            if type(tensor) is cls and tensor.refuses(name):
                raise RuntimeError(tensor.line)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def refuse(tensor, line, refuses=lambda name: name not in HARMLESS):
    tensor.__class__ = Refusing  # it stays the same object
    tensor.line = line
    tensor.refuses = refuses
    return tensor


# ---- what all four have in common ----

LISTS = (ModuleList, ModuleDict)  # which nobody calls


def layers_of(model):
    """{module: the layer that it is, or is in}. The layers are the elements of each Sequential,
    ModuleList and ModuleDict, but not those inside of such an element. The weights around all of
    these are one more layer, the first, because backward completes its gradients last."""
    around = ParameterList()
    layers = dict.fromkeys(model.modules(), around)
    for module in model.modules():
        if type(module) in (Sequential, *LISTS) and layers[module] is around:
            for child in module.children():
                if type(child) not in LISTS:
                    layers |= dict.fromkeys(child.modules(), child)
    for module, layer in layers.items():
        if layer is around:
            around.extend(module.parameters(recurse=False))
    return layers


class YourModel:
    """Comes before a class of ddp.py or zero.py. From backward to gradients() a mark is in
    param.grad and weights.grad: without it a replica's part would look like the gradient. If a mark
    is gone, the loop has dropped the gradient, as by zero_grad()."""

    def __init__(self, model, mesh):
        self.replicas = mesh.group("dp")
        self.order = mesh.group("shard")  # the same ranks, for messages of this thread
        self.own = dict(model.named_parameters())  # {name: parameter}
        self.layers = layers_of(model)  # {module: its layer}
        self.at = {}  # where a Flat's weights are in memory -> the Flat
        self.backward = None  # autograd's number of the last backward
        super().__init__({0: self.drafts()}, lambda tag: torch.empty(tag.shape), None, "meta",
                         mesh.background)
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer.contiguous().clone(), self.replicas))
        self.params = [param for flat in self.trained_flats for param in flat.params]
        if not self.sharded:
            self.weights = self.params
        self.published = self.versions()
        self.marked = set()  # parameters with a gradient in this step
        self.marks = {}  # parameter -> {it: its mark, its piece: the piece's mark}
        self.nodes = []  # autograd's, which it would not keep
        for param, weights in zip(self.params, self.weights, strict=True):
            line = (f"{type(self).__name__}: the gradient of {param.tag.name} is in the reducer: "
                    "reducer.gradients() returns the sums over the replicas, for reducer.weights, "
                    "which the optimizer takes. To clip: reducer.clip_grad_norm_(max_norm)")
            self.marks[param] = {each: refuse(each.new_zeros(()).expand(each.shape), line)
                                 for each in (param, weights)}
            self.nodes.append(torch.autograd.graph.get_gradient_edge(param).node)
            self.nodes[-1].register_prehook(partial(self.before_grad, param))

    def drafts(self):
        """For ddp.py, which makes Flats of them: a list of parameters without memory for each dtype
        of each layer. pieces_to_step() replaces each by the model's own. (Nobody calls these lists,
        so the hooks that zero.py registers on them never run.)"""
        drafts = {}  # parameter -> its draft
        for name, param in self.own.items():
            param.tag = Tag(name, param.shape, sum_over=(self.replicas,))
            draft = Parameter(torch.empty(param.shape, device="meta"), param.requires_grad)
            draft.tag = param.tag
            drafts[param] = draft
        lists = {}  # (layer, dtype) -> drafts
        for layer in dict.fromkeys(self.layers.values()):
            for param in layer.parameters():
                lists.setdefault((layer, param.dtype), ParameterList()).append(drafts[param])
        return [*lists.values()]

    def pieces_to_step(self, flat):
        flat.params = [self.own[draft.tag.name] for draft in flat.params]
        flat.offsets = dict(zip(flat.params, flat.offsets.values(), strict=True))
        first = flat.params[0]
        flat.weights = torch.zeros(flat.weights.numel(), dtype=first.dtype, device=first.device)
        self.at[flat.weights.untyped_storage()._cdata] = flat
        for param in flat.params:
            view = flat.view(flat.weights, param)
            view.copy_(param.detach())
            param.data = view
        broadcast(flat.weights, self.replicas)
        return super().pieces_to_step(flat)

    def flat_of(self, x):
        """The Flat in whose memory a tensor lies, or None."""
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            return self.at.get(x.untyped_storage()._cdata)

    def error(self, line):
        return RuntimeError(f"{type(self).__name__}: {line}")

    def least_of_all(self, count, place):
        """The least count of all replicas. RuntimeError if they are not at the same place: the next
        message of one would be taken for another's."""
        code = zlib.crc32(place.encode())
        most = torch.tensor([code, -code, -count], device=self.order.device)
        most = all_reduce(most, self.order, maximum).tolist()
        if most[0] + most[1] != 0:
            raise self.error(f"replica {self.order.rank} is at {place}, another replica elsewhere: "
                             "all run the same layers and steps")
        return -most[2]

    # -- in backward --

    def watch_backward(self):
        """Called in a backward of ZeRO-2 and 3, which reduce gradients in each."""
        task = torch._C._current_graph_task_id()
        if self.backward != task:
            self.backward = task
            self.end_of_backward()  # the outer backward, as under torch.utils.checkpoint
            self.expect(0, is_final=True)
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def end_of_backward(self):
        self.start_rest()
        self.keep_chunk()

    def before_grad(self, param, grads):
        """Called by autograd right before it adds a gradient to param.grad."""
        if self.every_microbatch:
            self.watch_backward()
        self.look_at_marks(param)
        param.grad = None

    def look_at_marks(self, param):
        """Drop a gradient if the loop has done so with one of its marks."""
        is_gone = any(holder.grad is not mark for holder, mark in self.marks[param].items())
        if param in self.marked and is_gone:
            self.marked.remove(param)
            flat = self.home[param]
            if self.every_microbatch:
                pieces = flat.pieces(self.sums[flat], zero.first_of_chunk(flat))
            else:
                pieces = flat.pieces(flat.grads, 0)
            for tag, _, values in pieces:
                if tag is param.tag:
                    values.zero_()

    def grad_added(self, param):
        if self.flat_of(param) is not self.home[param]:
            raise self.error(f"the memory of {param.tag.name} was replaced, as by model.to() or "
                             "half(): convert weights before wrapping")
        self.marked.add(param)
        super().grad_added(param)

    def collect(self, param, flat):
        """Add a gradient to its Flat, and put the marks in its place."""
        if flat.grads is None:
            flat.grads = torch.zeros_like(flat.weights)
        is_new = param.grad is not None and param.grad is not self.marks[param][param]
        if is_new and param in self.marked:
            flat.view(flat.grads, param).add_(param.grad)
            for holder, mark in self.marks[param].items():
                holder.grad = mark

    # -- at the end of a step --

    def versions(self):
        """How often each tensor that the optimizer steps was changed in place."""
        return [weights._version for weights in self.weights]

    def gradients(self):
        """The gradient of each of self.weights, summed over the replicas and this step's backwards.
        None for a parameter that no replica has used, as in one process."""
        for name, param in self.own.items():
            if param.requires_grad and not self.home[param].is_trained:
                raise self.error(f"{name} was frozen when the model was wrapped: wrap it with "
                                 "requires_grad=True, then freeze it for a while")
        if self.sharded and self.published != self.versions():
            raise self.error("weights are stepped, but not published: call reducer.publish() after "
                             "each step")
        for param in [*self.marked]:
            self.look_at_marks(param)
        self.least_of_all(0, "the end of a step")
        used = torch.tensor([param in self.marked for param in self.params], dtype=torch.long)
        used = all_reduce(used.to(self.order.device), self.order).tolist()
        if not self.every_microbatch:
            self.expect(0, is_final=True)
        found = super().gradients()
        for i, param in enumerate(self.params):
            if not used[i]:
                found[i] = None
            elif self.sharded:
                param.grad = self.marks[param][param]
                refuse(found[i], "ZeRO: a replica has pieces of gradients, and the norm is that of "
                       "all: clip by reducer.clip_grad_norm_(max_norm)",
                       refuses=lambda name: "norm" in name)
            else:
                found[i] = found[i].view(param.shape)
        for flat in self.trained_flats:
            flat.grads = None
        self.marked.clear()
        return found

    def clip_grad_norm_(self, max_norm):
        """torch's clip_grad_norm_ for whole gradients: scales weights.grad, returns the norm."""
        grads = [weights.grad.as_subclass(torch.Tensor) for weights in self.weights
                 if weights.grad is not None]
        square = get_total_norm(grads).to(self.order.device, torch.double).square().reshape(1)
        if self.sharded:
            all_reduce(square, self.order)
        clip_grads_with_norm_(self.weights, max_norm, square.sqrt()[0])
        return square.sqrt()[0]

    def publish(self):
        self.least_of_all(0, f"publish(), weights stepped: {self.published != self.versions()}")
        super().publish()
        if self.sharded:
            for flat in [*self.gathers]:  # on their way
                self.make_whole(flat)
        self.published = self.versions()


class DDP(YourModel, ddp.DDP):
    """Here `weights` are the model's own parameters."""


class ZeRO1(YourModel, zero.ZeRO1):
    """Here, and below, `weights` are this replica's piece of each parameter, a flat tensor."""


class ZeRO2(YourModel, zero.ZeRO2):
    """Reduces gradients in each backward."""


# ---- ZeRO-3 ----


class ZeRO3(YourModel, zero.ZeRO3):
    """Gathers the weights of a layer when the layer or a part of it is called, and frees them after
    its forward. They are gathered again when backward reaches an output of the call, or a node of
    autograd's graph that has saved a weight. No layer runs twice. (use() of zero.py gathers the
    weights of a layer, keeps those of a second, and frees all others.)"""

    def __init__(self, model, mesh):
        super().__init__(model, mesh)
        self.running = ModuleList()  # layers in their forward, the outermost first
        self.around = self.layers[model]  # the weights around layers
        for flat in self.at.values():
            self.refuse_freed(flat)
        for module in model.modules():
            if [*module.parameters()]:
                # The first and the last hook: yours may read the weights
                module.register_forward_pre_hook(self.enter, prepend=True)
                module.register_forward_hook(self.leave, always_call=True)

    def __deepcopy__(self, memo):
        return self  # a copy of the model has its hooks, and then parameters that refuse

    @torch.compiler.disable  # else model.compile() would trace messages
    def enter(self, module, args):
        self.running.append(self.layers[module])
        # (pack, unpack) around these, such as those of torch.utils.checkpoint. A copy, if there are
        # none: to keep the tensor itself would be a cycle that the gc cannot free
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack = partial(self.pack, outer or (torch.detach, torch.detach))
        torch._C._autograd._push_saved_tensors_default_hooks(pack, lambda unpack: unpack())
        for flat in self.flats_in(self.layers[module]):
            self.make_whole(flat)

    @torch.compiler.disable
    def leave(self, module, args, out):
        self.running.pop(-1)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if any(self.flat_of(x) for x in tree_leaves(out)):  # an output that is a weight
            out = tree_map(lambda x: x.clone() if self.flat_of(x) else x, out)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(partial(self.before_backward, self.layers[module]))
        if torch._C._current_graph_task_id() == -1:  # else backward reads the weights next
            self.use(self.running, None)
        return out

    def pack(self, outer, tensor):
        """What autograd saves in a forward in place of a tensor: a function that returns it. What
        is no weight goes on to the hooks around these."""
        if flat := self.flat_of(tensor):
            return partial(self.again, flat, tensor.detach())
        return partial(outer[1], outer[0](tensor))

    def again(self, flat, saved):
        """Called by a node of the graph for a weight that was saved."""
        self.watch_backward()
        self.make_whole(flat)
        # With create_graph the node's derivative saves this tensor, and has no hooks
        return saved.clone() if torch.is_grad_enabled() else saved

    def before_backward(self, layer, grad):
        """Called by autograd when it has the gradient of an output of a layer, or of its part."""
        self.watch_backward()
        if layer is not self.around:
            self.use(layer, self.running)
        for flat in self.flats_in(layer):  # around layers: the output may be a layer's, too
            self.make_whole(flat)

    def end_of_backward(self):
        self.use(self.running, None)
        super().end_of_backward()

    def expect(self, stage, is_final):
        """Let no Flat's message start when its gradients are complete on this replica: another may
        lack one, and wait for this one's part of a gather. start_gather() starts the messages."""
        super().expect(stage, is_final)
        for flat in self.queue:
            flat.missing += 1

    def start_gather(self, flat):
        if flat not in self.gathers:
            # How many Flats at the head of the queue have all their gradients here
            complete = [flat.missing == 1 for flat in self.queue] + [False]
            place = f"the weights of {flat.params[0].tag.name}"
            for _ in range(self.least_of_all(complete.index(False), place)):
                self.start_reduction(self.queue.pop(0))
            flat.weights.untyped_storage().resize_(flat.weights.nbytes)
            own_chunk(flat.weights, self.order).copy_(self.chunks[flat])
            all_gather(flat.weights, self.order)
            self.gathers[flat] = lambda: None
            for param in flat.params:
                param.__class__ = Parameter

    def free(self, flats):
        super().free(flats)
        for flat in flats:
            self.refuse_freed(flat)

    def refuse_freed(self, flat):
        for param in flat.params:
            refuse(param, f"ZeRO3: the weights of {param.tag.name} are freed outside of their "
                          "layer's forward: read them in it. reducer.whole() has all weights, for "
                          "state_dict(), copies, norms; load and convert weights before wrapping")
