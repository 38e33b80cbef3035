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
gradients, several dtypes, hooks, layers of any form. The result is one process's, or an error that
names the technique, the parameter and what to do. docs/your-model.md has the rules.
"""

import zlib
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch._utils import get_tensor_metadata, set_tensor_metadata
from torch.nn import ModuleDict, ModuleList, Parameter, ParameterList, Sequential
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves, tree_map

import ddp
import zero
from collectives import all_gather, all_reduce, broadcast, own_chunk
from shard import Tag

# ---- tensors that refuse: freed weights, marks and pieces of gradients ----

VIEWS = {"data", "T", "H", "mT", "mH", "real", "imag"}  # other attributes have no values
HARMLESS = {"__get__", "__set__", "__delete__", "size", "dim", "numel", "element_size",
            "is_floating_point", "is_complex", "requires_grad_", "register_hook",
            "register_post_accumulate_grad_hook", "untyped_storage"}


class Refusing(Parameter):
    """A tensor that raises its `line` in place of functions that are not `allowed`. (None are
    given: in place of norms.)"""

    def refuses(self, name):
        return name not in self.allowed if self.allowed else "norm" in name

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


def refuse(tensor, line, allowed=HARMLESS):
    tensor.__class__ = Refusing  # it stays the same object
    tensor.line, tensor.allowed = line, allowed
    return tensor


def versions(tensors):
    """How often each tensor was changed in place."""
    return [tensor._version for tensor in tensors]


# ---- what all four have in common ----

LISTS = (ModuleList, ModuleDict)  # which nobody calls


class YourModel:
    """Comes before a class of ddp.py or zero.py. From backward to gradients() a mark is in
    param.grad and weights.grad: without it a replica's part would look like the gradient. A mark
    that is gone says that the gradient was dropped, as by zero_grad()."""

    sends_weights = False

    def __init__(self, model, mesh):
        self.model = model
        self.replicas = mesh.group("dp")
        self.order = mesh.group("shard")  # the same ranks, for messages of this thread
        self.own = dict(model.named_parameters())  # {name: parameter}
        self.marked = {}  # parameter with a gradient in this step -> versions of its marks
        self.dropped = []  # names of parameters whose gradient was dropped in this step
        self.backwards = 0  # so far
        self.watched = self.latest = None  # autograd's numbers of backwards
        self.version = 0  # version of the parameter to whose gradient autograd adds now
        # The layers are the elements of each Sequential, ModuleList and ModuleDict, but not those
        # inside of such an element
        self.in_layers = {}  # module -> the name of the layer that it is, or is in
        places = {}  # parameter -> layers, or attributes of the model around layers, that have it
        for name, module in model.named_modules():
            if getattr(module, "max_norm", None):  # of an Embedding
                raise self.error(f"{name} changes its weights in forward, other rows on other "
                                 "replicas: set max_norm=None")
            if type(module) in (Sequential, *LISTS) and module not in self.in_layers:
                for key, child in module.named_children():
                    if type(child) not in LISTS:
                        self.in_layers |= dict.fromkeys(child.modules(), f"{name}.{key}")
            place = self.in_layers.get(module, name.partition(".")[0])
            for param in module.parameters(recurse=False):
                places.setdefault(param, []).append(place)
        # ddp.py lays drafts, which have no memory, into Flats; pieces_to_step() replaces them
        alike = {}  # (places, dtype, device) -> drafts of parameters, for a Flat
        for name, param in self.own.items():
            if hasattr(param, "tag"):
                raise self.error(f"{name} is in a model that was wrapped before: wrap one module "
                                 "that contains both, once")
            if is_lazy(param) or param.is_meta:
                raise self.error(f"{name} has no values yet: run the model once, or load its "
                                 "weights, before wrapping it")
            rows = param.shape[0] if param.dim() else 1
            param.tag = Tag(name, param.shape, 0, ((0, rows),))
            draft = Parameter(torch.empty(param.shape, device="meta"), param.requires_grad)
            draft.tag = replace(param.tag, sum_over=(self.replicas,))
            alike.setdefault((*places[param], param.dtype, param.device), []).append(draft)
        shapes = [(name, param.shape, param.dtype) for name, param in self.own.items()]
        self.same_everywhere(f"the start, with model {zlib.crc32(str(shapes).encode())}")
        super().__init__({0: [ParameterList(drafts) for drafts in alike.values()]},
                         lambda tag: torch.empty(tag.shape, device="meta"), None, "meta",
                         mesh.background)
        for buffer in model.buffers():
            values = broadcast(buffer.contiguous().clone(), self.replicas)
            if not torch.equal(buffer, values):
                buffer.copy_(values)
        self.params = [param for flat in self.trained_flats for param in flat.params]
        if not self.sharded:
            self.weights = self.params
        self.marks = {}  # parameter -> {it: its mark, its piece: the piece's mark}
        self.nodes = []  # autograd's, which it would not keep
        for param, weights in zip(self.params, self.weights, strict=True):
            line = (f"{self.technique}: the gradient of {param.tag.name} is in the reducer: "
                    "reducer.gradients() returns the sums over the replicas, for reducer.weights, "
                    "which the optimizer takes. To clip: reducer.clip_grad_norm_(max_norm)")
            self.marks[param] = {}
            for holder in (param, weights):
                mark = holder.new_zeros(()).expand(holder.shape)
                # zero_grad(set_to_none=False) zeroes it
                self.marks[param][holder] = refuse(mark, line, {*HARMLESS, "zero_"})
            self.nodes.append(torch.autograd.graph.get_gradient_edge(param).node)
            self.nodes[-1].register_prehook(partial(self.before_grad, param))
        self.published = versions(self.weights)
        model.register_forward_pre_hook(self.check_published)

    def error(self, line):
        return RuntimeError(f"{self.technique}: {line}")

    def __deepcopy__(self, memo):
        return self  # a copy of the model has its hooks

    def __reduce__(self):
        raise self.error("a model is saved without its hooks: save its state_dict(), "
                         "{tag.name: whole for tag, whole in reducer.whole()}")

    def pieces_to_step(self, flat):
        flat.params = [self.own[param.tag.name] for param in flat.params]
        flat.offsets = dict(zip(flat.params, flat.offsets.values(), strict=True))
        first = flat.params[0]
        flat.weights = torch.zeros(flat.weights.numel(), dtype=first.dtype, device=first.device)
        for param in flat.params:
            flat.view(flat.weights, param).copy_(param.detach())
        broadcast(flat.weights, self.replicas)
        for param in flat.params:
            param.data = flat.view(flat.weights, param).data
        return super().pieces_to_step(flat)

    def register_hooks(self, layer, previous, following):
        """Nothing: your layers' weights are whole after publish(), or ZeRO3 watches them itself."""

    def same_everywhere(self, place):
        """RuntimeError if the replica before this one is at another place: its next message would
        be taken for this replica's."""
        if self.order.size > 1:
            mine = torch.tensor([zlib.crc32(place.encode())], device=self.order.device)
            theirs = torch.empty_like(mine)
            self.order.exchange(mine, self.order.next, theirs, self.order.prev).wait()
            if not torch.equal(mine, theirs):
                raise self.error(
                    f"replica {self.order.rank} is at {place}, replica {self.order.prev} elsewhere:"
                    " all have the same model, and run the same layers and backwards, drop "
                    "gradients, and step or skip alike")

    # -- in backward --

    def watch_backward(self):
        """Have autograd call end_of_backward(). Returns autograd's number of the backward."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.watched):
            self.watched = task
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)
        return task

    def before_grad(self, param, grad):
        """Called by autograd right before it adds a gradient to param.grad."""
        if self.latest != self.watch_backward():
            self.latest = self.watched
            if self.every_microbatch:
                self.same_everywhere(f"backward {self.backwards}")
                self.expect(0, is_final=True)
                for flat in self.queue:
                    flat.missing = sum(param.requires_grad for param in flat.params)
            self.backwards += 1
        if self.sharded or param in self.marked:  # else the gradient of DDP's last step is there
            self.look_at_marks(param)
        param.grad = None
        self.version = param._version

    def check(self, name, param):
        flat = self.home.get(param)
        if flat is None:
            raise self.error(f"{name} is new: wrap the model that has it")
        if param.untyped_storage()._cdata != flat.weights.untyped_storage()._cdata:
            raise self.error(f"the memory of {name} was replaced, as by model.to() or half(): "
                             "convert weights before wrapping")
        if param.requires_grad and not flat.is_trained:
            raise self.error(f"{name} was frozen when the model was wrapped: wrap it with "
                             "requires_grad=True, then freeze it for a while")

    def grad_added(self, param):
        flat = self.home[param]
        self.check(param.tag.name, param)
        if param.grad is None or param._version != self.version:
            raise self.error(f"a hook steps {param.tag.name} in backward, with the gradient of "
                             "this replica: step after reducer.gradients()")
        self.make_room(flat)
        flat.view(flat.grads, param).add_(param.grad.to_dense())  # it may be sparse
        for holder, mark in self.marks[param].items():
            holder.grad = mark
        self.marked[param] = versions(self.marks[param].values())
        flat.missing -= 1
        while self.queue and self.queue[0].missing <= 0:
            self.start(self.queue.pop(0))

    def make_room(self, flat):
        """For gradients of a Flat."""
        if self.every_microbatch and (flat.grads is None or flat is self.reducing):
            self.keep_chunk()
        if flat.grads is None:
            flat.grads = torch.zeros_like(flat.weights)

    def start(self, flat):
        self.make_room(flat)
        flat.missing = 0  # a gradient that has not come is zeros
        super().start(flat)

    def end_of_backward(self):
        if self.every_microbatch:
            # Also gradients that came late: checkpoint() has a backward inside of the backward
            self.queue += [flat for flat in self.trained_flats if flat.grads is not None
                           and flat not in (self.reducing, *self.queue)]
            self.start_rest()
            self.keep_chunk()

    def look_at_marks(self, param):
        """Drop or zero a gradient if your loop has done so with its marks."""
        marks, was = self.marks[param], self.marked.get(param)
        grads = [holder.grad for holder in (marks if was else [param])]
        if any(type(grad) not in (Refusing, type(None)) for grad in grads):
            raise self.error(f"the gradient of {param.tag.name} was set by hand: give it to "
                             "param.backward(gradient), or set weights.grad after gradients()")
        is_gone = any(grad is None for grad in grads)
        if was and (is_gone or was != versions(marks.values())):
            self.marked[param] = versions(marks.values())
            if is_gone:
                del self.marked[param]
            self.dropped.append(param.tag.name)
            flat = self.home[param]
            part = self.sums[flat] if self.every_microbatch else flat.grads
            first = zero.first_of_chunk(flat) if self.every_microbatch else 0
            for tag, _, values in flat.pieces(part, first):
                if tag is param.tag:
                    values.zero_()

    # -- at the end of a step --

    def are_stepped(self):
        return self.published != versions(self.weights)

    def check_published(self, *args):
        if self.sharded and self.are_stepped():
            raise self.error(f"{self.params[0].tag.name} and others are stepped, but not published:"
                             " call reducer.publish() after each step")

    def gradients(self):
        """The gradient of each of self.weights, summed over the replicas and this step's backwards.
        None for a parameter that no replica has used, as in one process."""
        for name, param in self.model.named_parameters():
            self.check(name, param)
        self.check_published()
        # What else is in DDP's param.grad may be the gradient of the last step
        marked = self.params if self.sharded or not self.marked else [*self.marked]
        for param in marked:
            self.look_at_marks(param)
        # ZeRO-2 and 3 have summed gradients: some replicas alone cannot drop theirs
        dropped = sorted(self.dropped) if self.every_microbatch else "some"
        self.same_everywhere(f"the end of a step: {self.backwards} backwards, {dropped} dropped")
        used = torch.tensor([param in self.marked for param in self.params], dtype=torch.long)
        used = all_reduce(used.to(self.order.device), self.order).tolist()
        used = {param for param, count in zip(self.params, used, strict=True) if count}
        flats = [flat for flat in self.trained_flats if used.intersection(flat.params)]
        if not self.every_microbatch:
            for flat in flats:
                self.start(flat)
        found = dict.fromkeys(self.params)
        for flat in flats:
            pieces = flat.pieces(*self.wait_for_reduction(flat))
            for param, (_, _, piece) in zip(flat.params, pieces, strict=True):
                if param in used:
                    found[param] = piece if self.sharded else piece.view(param.shape)
        for flat in self.trained_flats:
            flat.grads = None
        if self.every_microbatch:
            self.sums.clear()
        self.marked.clear()
        self.dropped.clear()
        for param, grad in found.items():
            if not self.sharded:
                param.grad = None
            elif grad is not None:
                refuse(grad, "ZeRO: a replica has pieces of gradients, and the norm is that of all:"
                             " clip by reducer.clip_grad_norm_(max_norm)", allowed=())
        return [*found.values()]

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
        self.same_everywhere(f"publish(), weights stepped: {self.are_stepped()}")
        super().publish()
        if self.sends_weights:
            for flat in self.trained_flats:
                self.make_whole(flat)  # your code may read weights at any time
                # A backward whose forward has used the old weights is to fail, as in one process
                torch.autograd.graph.increment_version(flat.params)
        self.published = versions(self.weights)


class DDP(YourModel, ddp.DDP):
    """Here `weights` are the model's own parameters."""

    technique = "DDP"


class ZeRO1(YourModel, zero.ZeRO1):
    technique = "ZeRO-1"
    sends_weights = True


class ZeRO2(YourModel, zero.ZeRO2):
    technique = "ZeRO-2"
    sends_weights = True


# ---- ZeRO-3 ----


def memory_of(flat):
    return flat.weights.untyped_storage()._cdata


def in_transform():
    """Is a transform of torch.func under way? Nothing can be gathered or saved in it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class ZeRO3(YourModel, zero.ZeRO3):
    """Gathers weights when a module is called, and frees them after its forward: those of the layer
    that the module is or is in or, for a module around layers, those in no layer. In backward the
    nodes of autograd's graph that have saved a weight gather it again. No layer runs twice."""

    technique = "ZeRO-3"

    def __init__(self, model, mesh):
        super().__init__(model, mesh)
        self.running = Counter()  # Flat -> how many modules that use it are in their forward
        self.hooks = []  # of the modules in their forward: hooks on what autograd saves
        self.node = None  # of the graph: the last one to read weights
        self.classes = {param: type(param) for param in self.home}
        self.at = {memory_of(flat): flat for flat in self.trained_flats + self.frozen_flats}
        self.beside = {flat: {flat} for flat in self.at.values()}  # Flats of the same modules
        for flat in self.beside:
            self.refuse_freed(flat)
        self.used_by = {}  # module -> its Flats
        for module in model.modules():
            parts = [part for part in module.modules()
                     if module in self.in_layers or part not in self.in_layers]
            flats = dict.fromkeys(self.home[param] for part in parts
                                  for param in part.parameters(recurse=False))
            self.used_by[module] = [*flats]
            for flat in flats:
                self.beside[flat].update(flats)
            if flats:  # the first and the last hook: yours may read the weights
                module.register_forward_pre_hook(self.enter, prepend=True)
                module.register_forward_hook(self.leave, always_call=True)

    @torch.compiler.disable  # else model.compile() would trace messages
    def enter(self, module, args):
        flats = self.used_by[module]
        if in_transform():
            raise self.error(f"{flats[0].params[0].tag.name} cannot be gathered inside of "
                             "torch.func's transforms: wrap the model by DDP, ZeRO1 or ZeRO2")
        self.running.update(flats)
        self.hooks.append(self.saving())
        self.hooks[-1].__enter__()
        for flat in flats:
            self.make_whole(flat)

    @torch.compiler.disable
    def leave(self, module, args, out):
        if in_transform():
            return out
        self.hooks.pop().__exit__()
        self.running.subtract(self.used_by[module])
        if any(self.flat_of(x) for x in tree_leaves(out)):  # an output that is a weight
            out = tree_map(lambda x: x.clone() if self.flat_of(x) else x, out)
        if torch._C._current_graph_task_id() == -1:  # else backward reads the weights next
            self.free_all_but(())
        return out

    def flat_of(self, tensor):
        """The Flat in whose memory a tensor lies, or None."""
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            return self.at.get(tensor.untyped_storage()._cdata)

    def saving(self):
        """Hooks on what autograd saves in a forward. What is no weight goes on to the hooks around
        these, such as those of torch.utils.checkpoint."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor):
            flat = self.flat_of(tensor)
            if outer and not flat:
                return partial(outer[1], outer[0](tensor))
            if flat:
                place = tensor.storage_offset(), tensor.size(), tensor.stride()
                return partial(self.again, flat, tensor.new_empty(0), place,
                               get_tensor_metadata(tensor), self.chunks[flat]._version)
            return partial(self.unchanged, tensor.detach(), tensor._version)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda read: read())

    def unchanged(self, tensor, version):
        """A saved tensor. (Autograd itself checks no versions of tensors with hooks.)"""
        if tensor._version != version:
            raise self.error("a tensor was modified between a forward and its backward by an "
                             "inplace operation: clone it before")
        return tensor

    def again(self, flat, like, place, metadata, version):
        """Called by a node of the graph for a weight that was saved: gathers it, and returns it."""
        if self.chunks[flat]._version != version:
            raise self.error(f"{flat.params[0].tag.name} was modified between a forward and its "
                             "backward by an inplace operation, such as a step: step after both")
        self.watch_backward()
        if torch._C._current_autograd_node() is not self.node:  # else the node needs what it has
            self.node = torch._C._current_autograd_node()
            self.free_all_but(self.beside[flat])
        self.make_whole(flat)
        tensor = like.new_empty(0).set_(flat.weights.untyped_storage(), *place)
        set_tensor_metadata(tensor, metadata)  # is it a conjugate?
        # With create_graph the node's derivative saves this tensor, and has no hooks
        return tensor.clone() if torch.is_grad_enabled() else tensor

    def end_of_backward(self):
        self.node = None
        self.free_all_but(())
        super().end_of_backward()

    def start_gather(self, flat):
        if flat not in self.gathers:
            with torch.no_grad():
                self.same_everywhere(f"the weights of {flat.params[0].tag.name}")
                flat.weights.untyped_storage().resize_(flat.weights.nbytes)
                own_chunk(flat.weights, self.order).copy_(self.chunks[flat])
                all_gather(flat.weights, self.order)
            self.gathers[flat] = lambda: None
            for param in flat.params:
                param.__class__ = self.classes[param]

    def free(self, flats):
        """Free weights, but not those of which your code has a view."""
        # What uses the memory otherwise: the Flat, its parameters, the storage's object in Python
        flats = [flat for flat in flats
                 if torch._C._storage_Use_Count(memory_of(flat)) <= 2 + len(flat.params)]
        super().free(flats)
        for flat in flats:
            self.refuse_freed(flat)

    def publish(self):
        super().publish()
        for flat in self.gathers:
            raise self.error(f"{flat.params[0].tag.name} or a weight beside it is kept after the "
                             "step by a view, which shows its old values: keep a clone()")

    def refuse_freed(self, flat):
        for param in flat.params:
            refuse(param, f"ZeRO-3: the weights of {param.tag.name} are freed outside of their "
                          "layer's forward: read them in it. reducer.whole() has all weights, for "
                          "state_dict(), copies, norms; load and convert weights before wrapping")

    def free_all_but(self, flats):
        """Free all weights but these and those of modules in their forward."""
        self.free([flat for flat in self.gathers if flat not in flats and not self.running[flat]])
