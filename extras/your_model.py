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
from functools import partial

import torch
from torch.nn import ModuleDict, ModuleList, Parameter, Sequential
from torch.utils._pytree import tree_leaves, tree_map

import ddp
import zero
from collectives import all_gather, all_reduce, broadcast, own_chunk
from shard import Tag

# ---- tensors that refuse to be computed with ----

HARMLESS = {"size", "dim", "numel", "element_size", "is_floating_point", "is_complex",
            "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
            "untyped_storage"}  # these methods read no values, nor do attributes but VALUES
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}


def refuse(cls, function, types, args=(), kwargs=None):
    """A __torch_function__: RuntimeError if the function reads the values of a tensor."""
    name = function.__name__
    if name in ("__get__", "__set__", "__delete__"):
        harmless = function.__self__.__name__ not in VALUES
    else:
        harmless = name in HARMLESS
    if not harmless:
        tensor = next(x for x in tree_leaves((args, kwargs)) if type(x) is cls)
        raise RuntimeError(tensor.line.format(tensor.technique, tensor.tag.name))
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs or {})


class Freed(Parameter):
    """The class of a parameter, which stays the same object, while its weights are freed."""

    __torch_function__ = classmethod(refuse)
    technique = "ZeRO-3"
    line = ("{}: the weights of {} are freed outside of their layer's forward: read them in it. "
            "reducer.whole() has all weights, for state_dict(), copies and norms; load and convert "
            "weights before ZeRO3(model, mesh)")


class Elsewhere(torch.Tensor):
    """What param.grad is while the reducer has the gradient, or the other replicas parts of it."""

    __torch_function__ = classmethod(refuse)
    line = ("{}: the gradient of {} is in the reducer: reducer.gradients() returns the sums "
            "over the replicas, for reducer.weights, which the optimizer takes. To clip: "
            "reducer.clip_grad_norm_(max_norm)")

    is_zero = False

    def zero_(self):  # model.zero_grad(set_to_none=False)
        self.is_zero = True


class Piece(torch.Tensor):
    """A gradient under ZeRO. Each replica has other pieces, so norms of these are no norms."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "norm" in function.__name__:
            raise RuntimeError("ZeRO: a replica has pieces of gradients, and the norm is that of "
                               "all: clip by reducer.clip_grad_norm_(max_norm)")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


# ---- what all four have in common ----


def layers_of(module):
    """The elements of each Sequential, ModuleList and ModuleDict in a module, but not those inside
    of such an element."""
    found = []
    for child in module.children():
        is_listed = type(module) in (Sequential, ModuleList, ModuleDict)
        if is_listed and type(child) not in (ModuleList, ModuleDict):
            found.append(child)
        else:
            found += layers_of(child)
    return found


class YourModel:
    """Comes before a class of ddp.py or zero.py. Between backward and gradients() param.grad is an
    Elsewhere: without it a replica's part would look like the gradient. If the Elsewhere is gone,
    the gradient was dropped, as by model.zero_grad()."""

    def __init__(self, model, mesh):
        self.model = model
        self.replicas = mesh.group("dp")
        self.order = mesh.group("shard")  # the same ranks, for messages of this thread
        self.arrived = set()  # parameters whose param.grad the current backward has completed
        self.elsewhere = {}  # parameter -> the Elsewhere for its gradient of this step
        self.dropped = []  # names of parameters whose gradient was dropped in this step
        self.backwards = 0  # so far
        self.tasks = set()  # autograd's numbers of the backwards that are watched
        self.own = dict(model.named_parameters())  # {name: parameter}
        # ddp.py lays stand-ins, which have no memory, into Flats; pieces_to_step() replaces them
        stand_ins = {}
        for name, param in self.own.items():
            if hasattr(param, "tag"):
                raise ValueError(f"{self.technique}: {name} is in a model that was wrapped before: "
                                 "wrap one module that contains both, once")
            rows = param.shape[0] if param.dim() else 1
            param.tag = Tag(name, param.shape, 0, ((0, rows),), sum_over=(self.replicas,))
            stand_in = Parameter(torch.empty(param.shape, device="meta"), param.requires_grad)
            stand_in.tag = param.tag
            stand_ins[param] = stand_in
        self.layers = dict.fromkeys(layers_of(model))
        self.in_layers = {module for layer in self.layers for module in layer.modules()}
        alike = {}  # (layer or the attribute around it, dtype, device) -> parameters, for a Flat
        for name, module in model.named_modules():
            if getattr(module, "max_norm", None):  # of an Embedding
                raise ValueError(f"{self.technique}: {name} changes its weights in forward, other "
                                 "rows on other replicas: set max_norm=None")
            place = name if module in self.layers else name.partition(".")[0]
            for param in self.params_of(module):
                alike.setdefault((place, param.dtype, param.device), []).append(stand_ins[param])
        shapes = [(name, param.shape, param.dtype) for name, param in self.own.items()]
        self.same_everywhere(f"the start, with model {zlib.crc32(str(shapes).encode())}")
        super().__init__({0: [torch.nn.ParameterList(params) for params in alike.values()]},
                         lambda tag: torch.empty(tag.shape, device="meta"), None, "meta",
                         mesh.background)
        self.params = [param for flat in self.trained_flats for param in flat.params]
        self.nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self.params]
        for node, param in zip(self.nodes, self.params, strict=True):
            node.register_prehook(partial(self.before_grad, param))
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer.contiguous().clone(), self.replicas))
        self.queue = [*self.trained_flats]
        if not self.sharded:
            self.weights = self.params
        self.note_versions()
        if self.must_publish:
            model.register_forward_pre_hook(lambda *args: self.check_published())

    def params_of(self, module):
        """The parameters of a layer; of another module, its own; of a part of a layer, none."""
        if module in self.in_layers and module not in self.layers:
            return []
        return module.parameters(recurse=module in self.layers)

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
                raise RuntimeError(
                    f"{self.technique}: replica {self.order.rank} is at {place}, replica "
                    f"{self.order.prev} elsewhere: all have the same model, and run the same layers"
                    " and backwards, drop gradients, and step or skip alike")

    # -- in backward --

    def watch_backward(self):
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self.tasks:
            self.tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def before_grad(self, param, grad):
        """Called by autograd right before it adds a gradient to param.grad."""
        self.watch_backward()
        if param not in self.arrived:
            self.drop_if_gone(param)
            param.grad = None

    def check(self, name, param):
        flat = self.home.get(param)
        memory = param.untyped_storage()._cdata
        if flat is None or memory != flat.weights.untyped_storage()._cdata:
            raise RuntimeError(f"{self.technique}: the memory of {name} was replaced, as by "
                               "model.to() or half(): convert weights before wrapping")
        if param.requires_grad and not flat.is_trained:
            raise RuntimeError(f"{self.technique}: {name} was frozen when the model was wrapped: "
                               "wrap it with requires_grad=True, then freeze it for a while")

    def grad_added(self, param):
        self.check(param.tag.name, param)
        begins = not self.arrived and len(self.queue) == len(self.trained_flats)
        if self.every_microbatch and begins:
            self.same_everywhere(f"backward {self.backwards}")
        self.arrived.add(param)
        while self.every_microbatch and self.queue and all(
                one in self.arrived or not one.requires_grad for one in self.queue[0].params):
            self.start(self.queue.pop(0))

    def end_of_backward(self):
        if not self.arrived and len(self.queue) == len(self.trained_flats):
            return
        self.backwards += 1
        if self.every_microbatch:
            while self.arrived or self.queue:  # twice: checkpoint()'s backward inside of this one
                self.start_rest()
                self.queue = [*self.trained_flats] if self.arrived else []
            self.keep_chunk()
            self.queue = [*self.trained_flats]
        else:
            for param in self.params:
                self.collect(param, self.home[param])

    def collect(self, param, flat):
        """Add a gradient that has arrived to its Flat."""
        if self.every_microbatch and (flat.grads is None or flat is self.reducing):
            self.keep_chunk()
        if flat.grads is None:
            flat.grads = torch.zeros_like(flat.weights)
        if param in self.arrived and param.grad is not None:
            flat.view(flat.grads, param).add_(param.grad.to_dense())  # it may be sparse
            stand_in = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
            param.grad = self.elsewhere[param] = stand_in.as_subclass(Elsewhere)
            param.grad.tag, param.grad.technique = param.tag, self.technique
        self.arrived.discard(param)

    def start(self, flat):
        for param in flat.params:
            self.collect(param, flat)
        super().start(flat)

    def part(self, flat):
        """(this rank's part of a Flat's gradient in this step, where the part begins)"""
        if self.every_microbatch:
            return self.sums[flat], zero.first_of_chunk(flat)
        return flat.grads, 0

    def drop_if_gone(self, param):
        stand_in = self.elsewhere.get(param)
        if stand_in is None or (param.grad is stand_in and not stand_in.is_zero):
            return
        if param.grad is not stand_in:
            del self.elsewhere[param]
        stand_in.is_zero = False
        self.dropped.append(param.tag.name)
        flat = self.home[param]
        for tag, _, values in flat.pieces(*self.part(flat)):
            if tag is param.tag:
                values.zero_()

    # -- at the end of a step --

    def note_versions(self):
        """Note how often each of the weights was changed so far: by an optimizer, above all."""
        self.versions = [weights._version for weights in self.weights]

    def are_stepped(self):
        return self.versions != [weights._version for weights in self.weights]

    def check_published(self):
        if self.must_publish and self.are_stepped():
            raise RuntimeError(f"{self.technique}: {self.params[0].tag.name} and others are stepped"
                               ", but not published: call reducer.publish() after each step")

    def gradients(self):
        """The gradient of each of self.weights, summed over the replicas and this step's backwards.
        None for a parameter that no replica has used, as in one process."""
        for name, param in self.model.named_parameters():
            self.check(name, param)
        self.check_published()
        for param in self.params:
            self.drop_if_gone(param)
        # ZeRO-2 and 3 have summed gradients: some replicas alone cannot drop theirs
        dropped = sorted(self.dropped) if self.every_microbatch else "some"
        self.same_everywhere(f"the end of a step: {self.backwards} backwards, {dropped} dropped")
        used = torch.tensor([param in self.elsewhere for param in self.params], dtype=torch.long)
        used = all_reduce(used.to(self.order.device), self.order).tolist()
        used = dict(zip(self.params, used, strict=True))
        flats = [flat for flat in self.trained_flats if any(used[param] for param in flat.params)]
        if not self.every_microbatch:
            for flat in flats:
                self.start(flat)
        found = dict.fromkeys(self.params)
        for flat in flats:
            pieces = flat.pieces(*self.wait_for_reduction(flat))
            for param, (_, _, piece) in zip(flat.params, pieces, strict=True):
                grad = piece.as_subclass(Piece) if self.sharded else piece.view(param.shape)
                found[param] = grad if used[param] else None
        for param in self.params:
            param.grad = self.elsewhere.get(param) if self.sharded else None
            self.home[param].grads = None
        if self.every_microbatch:
            self.sums.clear()
        self.elsewhere.clear()
        self.dropped.clear()
        self.tasks.clear()
        return [*found.values()]

    def clip_grad_norm_(self, max_norm):
        """torch's clip_grad_norm_ for whole gradients: scales weights.grad, returns the norm."""
        grads = [weights.grad.as_subclass(torch.Tensor) for weights in self.weights
                 if weights.grad is not None]
        square = torch.zeros(1, dtype=torch.double, device=self.order.device)
        for grad in grads:
            square += grad.abs().double().square().sum()
        if self.sharded:
            all_reduce(square, self.order)
        norm = square.sqrt()[0]
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def publish(self):
        if self.elsewhere:
            raise RuntimeError(f"{self.technique}: {next(iter(self.elsewhere)).tag.name} and others"
                               " were stepped without their gradients: call reducer.gradients()")
        self.same_everywhere(f"publish(), weights stepped: {self.are_stepped()}")
        super().publish()
        if self.must_publish:
            for flat in self.trained_flats:
                self.make_whole(flat)  # your code may read weights at any time
                # A backward whose forward has used the old weights is to fail, as in one process
                torch.autograd.graph.increment_version(flat.params)
        self.note_versions()


class DDP(YourModel, ddp.DDP):
    """Here `weights` are the model's own parameters."""

    technique = "DDP"
    must_publish = False


class ZeRO1(YourModel, zero.ZeRO1):
    technique = "ZeRO-1"
    must_publish = True


class ZeRO2(YourModel, zero.ZeRO2):
    technique = "ZeRO-2"
    must_publish = True


# ---- ZeRO-3 ----


def unchanged(tensor, version):
    """A tensor that autograd has saved. (With hooks around it, autograd itself does not check.)"""
    if tensor._version != version:
        raise RuntimeError("one of the variables needed for gradient computation has been modified "
                           "by an inplace operation")
    return tensor


class ZeRO3(YourModel, zero.ZeRO3):
    """Gathers weights when a module is called, and frees them after its forward: those of a layer
    (layers_of) or, by a module around layers, those that are in no layer. In backward the nodes of
    autograd's graph that have saved a weight gather it again. No layer runs twice."""

    technique = "ZeRO-3"
    must_publish = False

    def __init__(self, model, mesh):
        super().__init__(model, mesh)
        self.running = Counter()  # Flat -> how many modules that use it are in their forward
        self.hooks = []  # of the modules in their forward: hooks on what autograd saves
        self.node = None  # of the graph: the last one to read weights
        self.flats = self.trained_flats + self.frozen_flats
        self.at = {flat.weights.untyped_storage()._cdata: flat for flat in self.flats}
        self.beside = {flat: {flat} for flat in self.flats}  # Flats of the same modules
        for module in model.modules():
            if module in self.layers or module not in self.in_layers:
                parts = [module, *(one for one in module.modules() if one not in self.in_layers)]
                params = [param for part in parts for param in self.params_of(part)]
                self.watch_module(module, [*dict.fromkeys(self.home[param] for param in params)])
        self.classes = {param: type(param) for param in self.home}
        for param in self.home:
            param.__class__ = Freed

    def watch_module(self, module, flats):
        @torch.compiler.disable  # else model.compile() would trace messages
        def enter(module, args):
            self.running.update(flats)
            self.hooks.append(self.saving())
            self.hooks[-1].__enter__()
            for flat in flats:
                self.make_whole(flat)

        @torch.compiler.disable
        def leave(module, args, out):
            self.hooks.pop().__exit__()
            self.running.subtract(flats)
            if any(self.flat_of(x) for x in tree_leaves(out)):  # an output that is a weight
                out = tree_map(self.apart, out)
            if torch._C._current_graph_task_id() == -1:  # else backward reads the weights next
                self.free_all_but(())
            return out

        for flat in flats:
            self.beside[flat].update(flats)
        # The first and the last hook: yours may read the weights
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)

    def flat_of(self, tensor):
        """The Flat in whose memory a tensor lies, or None."""
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            return self.at.get(tensor.untyped_storage()._cdata)

    def apart(self, out):
        return out.clone() if self.flat_of(out) else out

    def saving(self):
        """Hooks on what autograd saves in a forward. What is no weight goes on to the hooks around
        these, such as those of torch.utils.checkpoint."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor):
            flat = self.flat_of(tensor)
            if flat:
                return partial(self.again, flat, tensor.detach(), self.chunks[flat]._version)
            if outer:
                return partial(outer[1], outer[0](tensor))
            return partial(unchanged, tensor.detach(), tensor._version)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda read: read())

    def again(self, flat, tensor, version):
        """Called by a node of the graph for a weight that was saved."""
        if self.chunks[flat]._version != version:
            raise RuntimeError(f"ZeRO-3: {flat.params[0].tag.name} was stepped between a forward "
                               "and its backward: step after both")
        self.watch_backward()
        if torch._C._current_autograd_node() is not self.node:  # else the node needs what it has
            self.node = torch._C._current_autograd_node()
            self.free_all_but(self.beside[flat])
        self.make_whole(flat)
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
        super().free(flats)
        for flat in flats:
            for param in flat.params:
                param.__class__ = Freed

    def free_all_but(self, flats):
        """Free all weights but these and those of modules in their forward."""
        self.free([flat for flat in self.gathers if flat not in flats and not self.running[flat]])
