"""Wrong changes of one line each, and the tests that should notice them: does your fork still test?

    python tests/mutants.py              all of them, each against the tests named beside it
    python tests/mutants.py zero.py      those with "zero.py" in `FILE: OLD -> NEW`
    python tests/mutants.py --all        where those tests notice nothing: the whole suite

Each is put into a copy of the tracked files, and is killed if a test fails there or hangs; else it
lives, and a test is missing. Takes an hour or more; neither pytest nor CI runs this file. Left out,
as equivalent (no test can tell them from the code, or only by the time they take):
    engine/ddp.py `bucket.sum_at_end[:1]`: no parameter has two sums at the end
    engine/group.py, a send posted before its receive: on gloo they do not block each other
    checkpoint.py, every replica saves its slices: the same bytes to the same places
    sample.py, caches dropped a token early
    schedules.py `event[:2]`: another order of independent messages
    llama.py `return turned`: torch 2.13 gives contiguous heads on CPUs anyway
    run/routing.py, loads that T ranks count T times: `busiest` is a ratio of loads
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

# {file: [(old text, found once; new text; "NAME:K" for test_NAME.py -k K)]}
MUTANTS = {
    "collectives.py": [
        ("combine(into, received)\n    return", "into.copy_(received)\n    return",
         "collectives:definition"),
        ("(r - 2 - hop) % N", "(r - 1 - hop) % N", "collectives:definition"),
        ("outputs[r].copy_(inputs[r])", "pass", "collectives:definition"),
        ("if not tensor.is_contiguous():", "if False:", "collectives:cannot_take"),
        ("if not len(outputs) == len(inputs) == N:", "if len(outputs) != N:",
         "collectives:cannot_take"),
        ("other_start < stop", "other_start <= start", "collectives:cannot_take"),
        ("ranges[i + 1 :]", "ranges[N:]", "collectives:cannot_take"),
        ("return all_gather(scatter(tensor, group, root), group)",
         "return all_gather(tensor, group)", "collectives:definition"),
        ("return gather(reduce_scatter(tensor, group, combine), group, root)",
         "return all_reduce(tensor, group, combine)", "collectives:formula")],
    "ddp.py": [
        ('name = name.removeprefix("0.") if layers is not model else name',
         'name = name.removeprefix("0.")', "your_own:bytes_are_those"),
        ("        for group in param.tag.sum_over:", "        for group in ():",
         "layouts:root_parts"),
        ("grad, param.grad = param.grad, None", "grad = param.grad", "layouts:root_parts"),
        ("        for group in param.tag.sum_over:", "        for group in param.tag.sum_over[:1]:",
         "layouts:root_parts"),
        ("broadcast(param.data, replicas)", "pass", "your_own:Mlp"),
        ("param.data = param.data.contiguous()", "pass", "your_own:ChannelsLast"),
        ("(all_reduce(used, replicas) > 0)", "(used > 0)", "your_own:OneReplica")],
    "zero.py": [
        ("self.waiting = self.params[::-1]", "self.waiting = self.params[:]", "parts:table"),
        ("module.register_forward_hook(after, always_call=True)",
         "module.register_forward_hook(after)", "your_own:forward_that_failed"),
        ("module.register_forward_pre_hook(before, prepend=True)",
         "module.register_forward_pre_hook(before)", "your_own:Hooked"),
        ("(chunk.data, chunk.tag, start_of[chunk]) for",
         "(chunk.data, chunk.tag, 0) for", "layouts:frozen"),
        ("self.sums.get(param, 0) + chunk", "chunk.clone()", "layouts:root_parts"),
        ("own_chunk(reduce_scatter(whole, replicas), replicas).clone()",
         "own_chunk(whole, replicas).clone()", "layouts:root_parts"),
        ("            all_gather(param.data, param.tag.sum_over[0])", " " * 12 + "pass",
         "layouts:root_parts"),
        ("owner.register_parameter(name, chunk_of[param][0])", "pass", "parts:table"),
        ("return recompute(lambda *args, **kwargs: self.run(next(buffers), args, kwargs),\n"
         + " " * 25 + "*args, **kwargs)", "return self.run({}, args, kwargs)", "parts:table"),
        ("        all_reduce(chunk, group)\n    return", "        pass\n    return",
         "layouts:root_parts"),
        ("chain([{}], repeat(copies))", "repeat({})", "your_own:Normed"),
        ("self.seen.clear()", "pass", "your_own:TwoHeads"),
        ("if theirs.item() != number:", "if False:", "your_own:refuses"),
        ("gathered[layers[i]]\n", "layers[i]\n", "parts:table"),
        ("clone(), param.requires_grad)", "clone())", "layouts:frozen")],
    "recompute.py": [
        ("        if saved.value is None:\n", "        if True:\n", "parts:repeats"),
        ("                raise Enough\n", "                pass\n", "parts:repeats"),
        ("torch.set_rng_state(random_state)", "pass", "parts:repeats"),
        ("weakref.ref(saved)", "lambda saved=saved: saved", "parts:repeats"),
        ("if [x._version for x in tensors] != versions:", "if False:", "parts:repeats"),
        ("(repeating, autocast, ", "(repeating, ", "parts:autocast"),
        ("args, kwargs = tree_unflatten(alone, form)", "args = alone", "your_own:Keywords")],
    "optimizer.py": [
        (".clamp(max=1.0)", "", "values:clipping"),
        ("square().sum() / n", "square().sum()", "layouts:root_parts"),
        ("        if not norm.isfinite():\n            return\n", "", "values:gives_up_after"),
        ("self.weights.copy_(self.master)", "pass", "parts:rounding"),
        ("torch.promote_types(weights.dtype, torch.float32)", "weights.dtype",
         "values:small_steps"),
        ("(1 - beta2**num_steps)", "1", "layouts:root_parts"),
        ("(step + 1) / (cfg", "step / (cfg", "values:rate"),
        ("(step - cfg.warmup_steps) /", "step /", "values:rate"),
        ('> 1 and tag.name.endswith("weight")', "> 1", "layouts:experts")],
    "tensor_parallel.py": [
        ("f, block.attn.parts)", "f)", "layouts:root_parts"),
        ("f, block.mlp.parts)", "f)", "layouts:root_parts and llama"),
        ("lambda grad: sum_of_copy(grad, group)", "lambda grad: grad", "layouts:root_parts"),
        ("losses.masked_fill(targets == ABSENT, 0)", "losses", "parts:padding"),
        ("logits.to(torch.promote_types(logits.dtype, torch.float))", "logits", "parts:padding"),
        ("at_target.masked_fill(outside, 0)", "at_target", "parts:padding"),
        ("config.vocab_size < group.size", "False", "parts:refused"),
        ('getattr(config, "n_kv_head", config.n_head)', "config.n_head", "parts:refused")],
    "sequence_parallel.py": [
        ("sum_gradients=True", "sum_gradients=False", "layouts:root_parts"),
        ("lambda grad: all_tokens(grad, group)", "lambda grad: grad", "layouts:root_parts"),
        ("own_chunk(positions(idx), group)", "positions(idx)", "layouts:root_parts")],
    "context_parallel.py": [
        ("numerator * shrink", "numerator", "layouts:root_parts"),
        ("lambda grad: move(grad, group.prev, group.next)", "lambda grad: grad",
         "layouts:root_parts"),
        ("[*early, *reversed(late)]", "[*early, *late]", "layouts:cp"),
        ("kv.repeat_interleave(shared_by, dim=2)", "kv.repeat(1, 1, shared_by, 1, 1)",
         "layouts:root_parts and llama")],
    "llama.py": [
        ("rotate(self.ln_k(k), angles), v.contiguous()",
         "rotate(self.ln_k(k), angles), v", "llama:contiguous_heads"),
        ("self.ln_f = nn.RMSNorm(config.n_embd, config.norm_eps)",
         "self.ln_f = nn.RMSNorm(config.n_embd)", "llama:by_its_formulas"),
        ("torch.promote_types(x.dtype, torch.float)  # angles", "x.dtype  # angles",
         "llama:late_positions"),
        (".clamp(0, 1)  # 0", ".clamp(min=0)  # 0", "llama:by_its_formulas"),
        ("((turns - low) / (high - low))", "((turns - low) / high)", "llama:by_its_formulas"),
        ("rotate(self.ln_q(q)", "rotate(self.ln_k(q)", "llama:by_its_formulas"),
        ("bias=config.qkv_bias", "bias=False", "llama:by_its_formulas"),
        ("    hs = config.hs\n", "    hs = config.n_embd // config.n_head\n",
         "llama:by_its_formulas"),
        ("frequency / factor\n    low", "frequency * factor\n    low", "llama:by_its_formulas"),
        ("rotate(self.ln_q(q), angles)", "self.ln_q(rotate(q, angles))", "llama:by_its_formulas")],
    "expert_parallel.py": [
        ("        if rest:\n", "        if False:\n", "parts:refused"),
        ("return outputs[order.argsort()]", "return outputs", "layouts:experts"),
        ("minlength=group.size * experts.c_fc.weight.size(0)", "minlength=0",
         "experts:without_tokens"),
        ("gates.flatten()[order]", "gates.flatten()", "layouts:root_parts"),
        ("sum_over=(same_experts, *others)", "sum_over=full.tag.sum_over", "layouts:root_parts")],
    "pipeline.py": [
        ("in_flight.popleft()", "in_flight.pop()", "layouts:root_parts"),
        ("        wait_all(grad_sends)\n", "", "layouts:root_parts"),
        ("weight.tag.sum_over += (group,)", "pass", "layouts:layout_equals")],
    "engine/ddp.py": [
        ("reduction(bucket.grad,", "reduction(bucket.grad.div_(2),", "layouts:layout_equals"),
        ("wait_all(self.works)", "", "collectives:change_nothing"),
        ("where[0]  # a tied", "where[-1]  # a tied", "layouts:zb-v"),
        ("view.zero_()", "view", "zero:unused"),
        ("torch.zeros_like(piece) if param.grad is None else param.grad", "param.grad",
         "zero:unused"),
        ("missing <= 0", "missing <= 1", "layouts:layout_equals"),
        ("            bucket.grad.zero_()", " " * 12 + "pass", "zero:sum_its_gradients"),
        ("yield param.tag, param.detach().clone()\n        self.gather_weights([])",
         "yield param.tag, param.detach().clone()", "zero:frees_the_last"),
        ("max(start - self.offset, 0)", "start - self.offset", "layouts:layout_equals"),
        ("sum_over, param.requires_grad, ", "sum_over, ", "layouts:frozen"),
        ("param.requires_grad, param.dtype)", "param.requires_grad)", "your_own:TwoDtypes"),
        ("            self.used.add(param)\n", "", "your_own:Mlp"),
        ("            self.expect(0, last=True, params=())", "            pass", "your_own:Mlp")],
    "engine/zero.py": [
        ("31 * self.order + 1 + self.index[bucket]", "self.order + 1 + self.index[bucket]",
         "your_own:another_order"),
        ("x.register_hook(lambda grad: self.gather_weights([]))", "pass", "zero:frees_the_last"),
        ("grad_shard.add_(", "grad_shard.copy_(", "layouts:layout_equals"),
        ("        self.lacking.remove(param)\n        into", "        into", "zero:sum_its"),
        ("bucket.view(full, param).zero_()", "pass", "zero:unused"),
        ("tuple(where), param.requires_grad", "tuple(where)", "layouts:frozen"),
        ("        if bucket.grad is None or bucket is self.reducing:",
         "        if bucket.grad is None:", "layouts:layout_equals"),
        ("full = self.full_gradient(bucket)\n        for", "full = bucket.grad\n        for",
         "zero:unused"),
        ("bucket is self.reducing or not bucket.group.runs_on_streams", "True",
         "first_gpu:zero_2_reduces"),
        ("bucket.grad_shard.zero_()", "pass", "layouts:layout_equals"),
        ("self.gathered[bucket].wait()", "pass", "collectives:change_nothing"),
        ("self.gathered.pop(bucket).wait()", "self.gathered.pop(bucket)", "zero:is_freed"),
        ("self.works.pop().wait()", "self.works.pop()", "streams:ring_zero2"),
        ("= all_gather(bucket.full, bucket.group, async_op=True)\n        if",
         "= Work()\n        if", "layouts:layout_equals"),
        ("self.gathered.pop(self.home[param], Work()).wait()", "pass", "zero:new_weights"),
        ("self.gather_weights(self.layers)", "pass", "your_own:Mlp"),
        ("if self.in_backward:  # act", "if False:  # act", "your_own:Segments"),
        ("not next_layers and not self.in_backward:", "not next_layers:", "your_own:Checkpointed"),
        ("[*self.pinned, *layers]", "layers", "your_own:Tied"),
        ("!= self.order * self.replicas.size:", "is None:", "your_own:refuses")],
    "engine/optimizer.py": [
        ("square() / self.holders).sum()", "square()).sum()", "layouts:layout_equals"),
        ("exact_norms(grads, self.wide)", "exact_norms(grads, grads[0].dtype)", "values:norm"),
        ("x.flatten().split(1 << 16)", "(x.flatten(),)", "zero:many_elements"),
        ("found_inf=skip", "found_inf=None", "faults:nan_in_one"),
        ("square / self.scale.value.double().square()", "square", "values:of_16_bits"),
        ("/ self.scale.value\n", "\n", "values:of_16_bits"),
        ("% 1000 == 0, 2.0", "% 1000 == 0, 1.0", "values:scale"),
        ("(self.good_steps + 1) * finite", "self.good_steps + 1", "values:scale"),
        (".clamp_(min=1.0)", "", "values:scale"),
        ("            room -= self.weights[i].numel()\n", "",
         "planner:converts_gradients"),
        ("+= finite", "+= 1", "faults:five_steps"),
        ("[grad * factor.view(1) for grad in grads]", "[grad.float() for grad in grads]",
         "values:of_16_bits"),
        ("eps=1e-8", "eps=1e-6", "layouts:layout_equals"),
        ("torch._foreach_copy_(self.weights, self.masters)", "pass", "values:of_16_bits"),
        ("weight_decay * decays(", "weight_decay * bool(", "layouts:layout_equals")],
    "engine/parts.py": [
        ("int(cfg.bucket_mb * 2**20)", "int(cfg.bucket_mb * 10**6)", "zero:mebibytes")],
    "extras/doctor/dump.py": [
        ("padding=(ABSENT, -1)", "padding=(ABSENT,)", "dump:padding"),
        ("return tensor.masked_fill(absent, ABSENT)", "return tensor", "dump:padding"),
        ("tokens.min() < 0", "tokens.min() < ABSENT", "dump:padding")],
    "engine/tensor_parallel.py": [
        ("    refuse_too_many_ranks(model.config, group)\n", "", "parts:refused"),
        ("param is not None and param.requires_grad", "param is not None", "layouts:frozen"),
        ("now_or_later, attn.parts)", "now_or_later)", "layouts:layout_equals")],
    "engine/vocabulary_parallel.py": [
        ("weight.new_empty(shape), weight.requires_grad)", "weight.new_empty(shape))",
         "layouts:frozen"),
        ('grad_weight.device.type != "cpu"', "False", "first_gpu:one_kernel"),
        ("torch.addmm(grad_weight, grad.t()", "torch.addmm(grad_weight.new_zeros(()), grad.t()",
         "first_gpu:in_32_bits"),
        ("own - of_ranks.logsumexp(0)", "own - of_ranks[0]", "layouts:layout_equals"),
        ("-1, dtype=torch.promote_types(logits.dtype, torch.float))", "-1)", "values:in_32"),
        ("torch.where(outside, of_target.exp(), of_target.expm1())", "of_target.expm1()",
         "layouts:layout_equals"),
        ("masked_fill(outside, 0).sum()", "sum()", "layouts:layout_equals"),
        ("(0, 1) * present", "(0, 1)", "values:chunks"),
        ("(grad @ weight) * present", "(grad @ weight)", "values:chunks"),
        ("logits[:, num_words:] = -torch.inf", "pass", "layouts:pad_vocab"),
        ("CHUNK // (weight", "0 // (weight", "first_gpu:fifth"),
        ("i : i + n] = leaving", "0:n] = leaving", "values:chunks"),
        ("inputs / power), alpha=power", "inputs), alpha=1", "values:range"),
        ("if torch.compiler.is_compiling():", "if False:", "first_gpu:compiled_the_loss"),
        ("return even[-1] if even else -(-length // num_chunks)", "return most",
         "first_gpu:one_shape")],
    "engine/sequence_parallel.py": [
        ("work.wait()\n            return tensor", "pass\n            return tensor",
         "collectives:change_nothing"),
        ("contiguous_format)), region.enter)", "contiguous_format)), lambda grad: grad)",
         "layouts:sp")],
    "engine/context_parallel.py": [
        ("if key_rank < rank", "if key_rank > rank", "layouts:cp"),
        ("            kv, next_kv = next_kv, kv", "            kv = next_kv", "layouts:cp"),
        ("grad_kv, next_grad_kv = next_grad_kv, grad_kv", "grad_kv = next_grad_kv",
         "collectives:change_nothing and cp"),
        ('{what} {i}"', '{what} {i} {id(like)}"', "sequences:four_tensors"),
        ("passing_grad.wait()\n                grad", "grad", "collectives:change_nothing"),
        ("passing_grad.wait()\n        grad_k", "grad_k", "streams:ring"),
        ("passing.wait()\n            kv, next", "kv, next", "streams:ring"),
        ("torch.sigmoid(part_lse - lse)", "torch.sigmoid(lse - part_lse)", "layouts:cp"),
        ("x[:, :, : x.size(2) // 2]", "x", "sequences:each_hop"),
        ("chosen in (CUDNN, FLASH) else", "chosen == FLASH else", "sequences:hands"),
        ("lse.squeeze(-1), rest", "lse, rest", "sequences:hands"),
        ("lse.contiguous().unsqueeze(-1)", "lse.unsqueeze(-1)", "sequences:hands"),
        ("torch.promote_types(q.dtype, torch.float)  #", "q.dtype  #", "sequences:rounds"),
        ("x if x.stride(-1) == 1 else x.contiguous()", "x", "sequences:strides")],
    "engine/expert_parallel.py": [
        ("if layer.n_experts % (group", "if 0 % (group", "parts:refused"),
        ("(cp, tp) if sp else (cp,)", "(cp,)", "layouts:experts"),
        ('sum_over=(mesh.group("shard", "cp"), *rep)', "sum_over=full.tag.sum_over",
         "layouts:experts")],
    "run/routing.py": [
        ("mean(1)).max()", "mean(1)).mean()", "layouts:experts"),
        ("flatten() / self.copies", "flatten()", "layouts:experts"),
        ("mlp.balance_weight = cfg.balance", "pass", "layouts:experts")],
    "schedules.py": [
        ("m > depth * (P - 1)", "m >= depth * (P - 1)", "schedules:published"),
        ("min(P - 1 - rank, m)  # one", "min(P - rank, m)  # one", "schedules:published"),
        ("+= 2 * (P - 1 - rank)", "+= P - 1 - rank", "schedules:published"),
        ("lag = min(depth * rank, m)", "lag = min(rank, m)", "schedules:published"),
        ("Ib Ia Wb Wa", "Wb Wa Ib Ia", "schedules:published"),
        (" or held < 2 * P)", " or held < 3 * P)", "schedules:published"),
        ("Event(end, start, rank", "Event(end, end + 1, rank", "schedules:deadlock"),
        ("got[rank, a] != 1", "got[rank, a] < 1", "schedules:damaged"),
        ('"B" if kind == "I" else kind', "kind", "schedules:whole_and_split"),
        ("k = deferred[chunk].popleft()", "k = deferred[chunk].pop()",
         "schedules:order_of_the_input")],
    "engine/dropout.py": [
        (" / (1 - self.rate)", "", "dropout:independent"),
        ("[self.positions]", "[: len(self.positions)]", "dropout:dropout_equals"),
        ("if self.first is None:", "if self.first == 0:", "dropout:resumed"),
        ("self.at(self.first)", "nullcontext()", "dropout:dropout_equals"),
        ("dropout {place} {number}", "dropout {number}", "dropout:independent"),
        ('places[f"{i} MLP"] = block.mlp', "pass", "dropout:everywhere")],
    "engine/pipeline.py": [
        ("        self.dropout.first = first\n", "", "dropout:dropout_equals"),
        ("remaining[param] == 0", "remaining[param] <= 1", "schedules:twice"),
        ("extra is None else y.detach().clone()", "True else y", "parts:pipelines"),
        ("sum(losses) * self.scale.value", "sum(losses)", "values:of_16_bits"),
        ("work.wait()\n        return tensor", "pass\n        return tensor", "collectives:late"),
        ("work.wait()\n        tensor.", "tensor.", "streams:zb_v"),
        ("len(self.sends) > 2", "len(self.sends) > 200", "schedules:was_sent"),
        ("tensor.untyped_storage().resize_(0)", "pass", "schedules:freed"),
        ("if outputs[-1].requires_grad:", "if True:", "layouts:frozen")],
    "engine/collectives.py": [
        ("return gather(reduce_scatter(tensor, group, op), group, root)",
         "return gather(reduce_scatter(tensor, group), group, root)", "collectives:definition"),
        ("works.popleft().wait()", "works.popleft()", "collectives:change_no_collective"),
        ("    wait_all(works)\n\n\n#", "\n\n#", "collectives:change_no_collective"),
        ("min(2, num_pieces)", "2", "collectives:change_no_collective"),
        ("OPS[op][0] if hop < N - 1 else None", "OPS[op][0]", "collectives:definition"),
        ("    refuse_wrong_lists(outputs, inputs, group)\n", "", "collectives:cannot_take"),
        ("return all_gather(scatter(tensor, group, root), group)",
         "return all_gather(tensor, group)", "collectives:definition")],
    "engine/shared_memory.py": [
        ("length.bit_length() - 4", "length.bit_length()", "shared_memory:an_eighth"),
        ("            self.neighbours.full.discard(self)\n", "", "shared_memory:never_waits"),
        ("while self.unsent:\n                self.neighbours.sleep([], deadline)",
         "if self.unsent:\n                self.neighbours.sleep([], deadline)",
         "shared_memory:last_number"),
        ("(reached & reached.T).nonzero()", "reached.nonzero()",
         "shared_memory:definition and pair"),
        ("user != os.getuid() or ", "", "shared_memory:one_line"),
        ("not secrets.compare_digest(token, self.token)", "False", "shared_memory:strangers"),
        ("        self.read.append(number)\n", "", "shared_memory:never_waits"),
        ("if length != receive.content.numel():", "if False:", "shared_memory:another_length"),
        ("if number >= len(self.buffers):", "if False:", "shared_memory:wrong_number"),
        ("except ConnectionResetError:", "except ZeroDivisionError:",
         "shared_memory:before_its_end"),
        ("self.posted[0]", "receive", "shared_memory:in_the_order"),
        ("(peer, group), None)", "(peer, 'world'), None)", "shared_memory:strangers")],
    "group.py": [
        ("waits, self.waits = self.waits, ()", "waits = self.waits", "collectives:waits_once"),
        ("send.numel() * send.element_size()", "send.numel()", "parts:table"),
        ("*last_error.strip().splitlines()[:1]", "", "first_gpu:own_reason")],
    "engine/group.py": [
        ("            flat(tensor)\n", "            pass\n", "collectives:cannot_take"),
        ("future.result()", "pass", "collectives:change_nothing"),
        ("inside = group.is_running_job()", "inside = False", "collectives:collective_of"),
        ("if async_op and not inside:", "if async_op:", "collectives:collective_of"),
        ("with self.lock, naming(self.what):", "with naming(self.what):", "collectives:thread"),
        ("group.last.wait()", "pass", "streams:experts_1f1b"),
        ("if self.executor and not self.is_running_job():", "if False:",
         "collectives:wait_for_the_jobs"),
        ("out.numel() * out.element_size()", "out.numel()", "collectives:formula"),
        ("receive from rank {self.ranks[source]}", "receive from rank {source}",
         "queues:numbers_ranks")],
    "engine/nccl_group.py": [
        ("gathers_in_place = True", "gathers_in_place = False", "first_gpu:from_its_place"),
        ("self.side_stream.wait_stream(torch.cuda.current_stream())", "pass", "streams:zb_v"),
        ("torch.cuda.current_stream().wait_event(event)", "pass", "streams:zb_v"),
        ("            return job\n", "", "streams:job_holds"),
        ("[work.wait, use]", "[work.wait]", "streams:zb_v"),
        ("[work.wait, use]", "[use]", "streams:zb_v"),
        ("        work.wait()\n    return", "        [part.wait() for part in posted]\n    return",
         "collectives:waited_for"),
        ("while not copied.query():", "while False:", "queues:device_has_copied"),
        ("is_done(*pending[0])", "is_done(*pending[-1])", "queues:forgotten"),
        ("before = deque(self.mesh.pending)", "before = self.mesh.pending", "queues:names_none"),
        ("if pending and waited", "if waited", "queues:any_time"),
        ("if waited > 0.001:", "if True:", "queues:at_once"),
        ("torch.cuda.current_stream() == self.side_stream)", "False)", "queues:inside_a_job"),
        ("with naming(work.what):", "if True:", "queues:operation_that_failed"),
        ("        host.copy_(tensor, non_blocking=True)\n        copied = self.record_event()\n",
         "        copied = self.record_event()\n        host.copy_(tensor, non_blocking=True)\n",
         "streams:zb_h1"),
        ("dist.batch_isend_irecv(operations) if operations else []",
         "[work for each in operations for work in dist.batch_isend_irecv([each])]",
         "queues:one_batch"),
        ("is_completed=self.ran_native.query", "is_completed=lambda: True",
         "queues:native_collective"),
        ("self.receive_stream.wait_event(self.ran_native)", "pass", "streams:experts_1f1b"),
        ("is_shared = True", "is_shared = False", "first_gpu:communicator")],
    "engine/mesh.py": [
        ("len(ranks) == dist.get_world_size()", "False", "first_gpu:communicator")],
    "mesh.py": [
        ("timedelta(seconds=2 * timeout)", "timedelta(seconds=timeout)", "first_gpu:watchdog"),
        ("is_high_priority_stream=True", "is_high_priority_stream=False", "first_gpu:priority"),
        ("{row[0], row[-1]}", "{row[0], row[1]}", "collectives:coordinate"),
        ("list(range(-len(dims), 0))", "list(range(len(dims)))", "collectives:coordinate")],
    "shard.py": [
        ("min(group.rank, more)", "more", "layouts:layout_equals"),
        ("* inner + (run_start - position)", "* inner", "checkpoint:float64"),
        ("            if sum_gradients:", "            if True:", "layouts:layout_equals"),
        ('elif hasattr(param, "sees_own_heads"):', "elif False:", "layouts:layout_equals")],
    "model.py": [
        ("ABSENT = -100", "ABSENT = -1", "parts:padding"),
        ('self.c_fc(x), approximate="tanh"', "self.c_fc(x)", "values:formulas"),
        ("k, v, is_causal=q.size(2) > 1", "k, v, is_causal=False", "values:formulas"),
        ("math.sqrt(2 * config.n_layer)", "math.sqrt(config.n_layer)", "values:initial"),
        ('f"{seed} {name}"', 'f"{name}"', "values:initial"),
        ("logits.float() if logits.element_size() == 2 else", "", "values:in_32")],
    "experts.py": [
        ("torch.promote_types(x.dtype, torch.float)", "x.dtype", "values:in_32")],
    "engine/ahead.py": [
        ("len(computing) > threads", "len(computing) > threads + 1", "first_gpu:three_at_a_time"),
        ("ThreadPoolExecutor(threads)", "ThreadPoolExecutor(1)", "first_gpu:three_at_a_time"),
        ("computing.popleft().result()\n        while", "computing.pop().result()\n        while",
         "first_gpu:three_at_a_time"),
        ("cores // int(os.environ.get(\"LOCAL_WORLD_SIZE\", 1))", "cores",
         "first_gpu:share_of_the_cores")],
    "train.py": [
        ("        self.grads = []  # free those of the step before\n",
         "", "values:gradients_of_the_step"),
        ("tokens = len(self.positions) //",
         "tokens = cfg.block_size //", "layouts:layout_equals and cp"),
        ("if num_asked > 0:\n                return None",
         "if self.stop_asked:\n                return None", "values:signal_to_another"),
        ("nothing_new = log.done == first and log.saved ", "nothing_new = log.done == first ",
         "weights:starts_from"),
        ("return interval > 0 and step > 0 and step % interval == 0",
         "return interval > 0 and step % interval == 0", "commands:relaunches_itself"),
        ("checkpoint.save(trainer, step + 1, data.folder)",
         "checkpoint.save(trainer, step + 1, cfg.data)", "values:name_the_folder"),
        ("if cfg.eval_interval and not log.is_over:",
         "if cfg.eval_interval:", "values:gives_up_after_five"),
        ("trainer.validate(data, log, cfg.eval_batches)",
         "trainer.validate(data, log)", "values:read_one_step_late"),
        ("torch.where(loss.isfinite(), square.sqrt(), math.nan)", "square.sqrt()",
         "faults:five_steps"),
        ("batch_size / windows /", "batch_size / len(data.val) * 8 /", "sequences:validation"),
        ("data.ahead(cfg, mesh, first)", "data.ahead(cfg, mesh, 0)", "faults:storm"),
        ("loss / self.cfg.tp, asked", "loss, asked", "layouts:layout_equals"),
        ("        self.reducer.publish()  #", "        #", "layouts:root_parts"),
        ('rep=mesh.group("rep"))', "rep=None)", "layouts:root_parts"),
        ("        self.routing.clear()\n", "", "layouts:experts"),
        ("self.where[0] != self.where[-1]", "False", "layouts:layout_equals")],
    "extras/exercises/break_it.py": [
        ("abs(loss - right) > spread", "loss - right > spread", "wrong_lines:apart"),
        ("if all(apart[i : i + IN_A_ROW])", "if apart[i]", "wrong_lines:apart"),
        ("elif not torch.equal(held, part) and", "elif False and", "wrong_lines:copies"),
        ("max(0, i + 1 - SMOOTH)", "max(0, i - SMOOTH)", "wrong_lines:apart"),
        ("changes, random_value, 2)", "changes, initial_value, 2)", "wrong_lines:two_steps")],
    "run/copies.py": [
        ("differ[name] |= is_unequal", "pass", "zero:one_bit"),
        ("(tag.sum_over[0], *tag.shared_by)", "shard.shared_by", "zero:bit"),
        ("whole[start : start + piece.numel()]", "whole[: piece.numel()]", "dump:any_layout"),
        ("if reducer.sharded:", "if False:", "dump:any_layout")],
    "extras/forks/large_batches.py": [
        ("square() / self.holders)", "square())", "large_batches:each_layout"),
        ("all_reduce(squares, self.world)", "squares", "large_batches:each_layout"),
        ("grad + self.cfg.weight_decay * weight", "grad", "large_batches:each_layout"),
        ("& (numerator > 0)", "", "large_batches:each_layout"),
        ("& (given > 0)", "", "large_batches:each_layout"),
        (".clamp(min=1)", "", "large_batches:skipped"),
        (".masked_fill_(~finite, 0.0)", "", "large_batches:skipped"),
        ("addcmul_(change, go.to(change.dtype), value=-1)", "sub_(change)",
         "large_batches:skipped"),
        ('cfg.scale_lr = "none"', "pass", "large_batches:rates"),
        ("= round(cfg.warmup_tokens", "= int(cfg.warmup_tokens", "large_batches:rates")],
    "extras/doctor/record.py": [
        (" and tag.sum_over[0].rank == 0", "", "dump:copies"),
        ("in held:\n            values", "in list(held):\n            values", "dump:holds_one"),
        (".div_(scale)", "", "dump:16_bits")],
    "run/checkpoint.py": [
        ("            if (folder / MANIFEST).exists():\n                raise  #",
         "            if True:\n                raise  #", "accidents:pruned"),
        ("        os.truncate(file, 0)\n", "", "checkpoint:other_bytes"),
        ("> cfg.steps:", "> cfg.steps + 1:", "values:past_the_last"),
        ("value.fill_(manifest[name])", "value.fill_(1)", "values:keeps"),
        ("used != cfg.optimizer", "False", "large_batches:refused"),
        ("trainer.reducer.publish()  #", "#", "zero:new_weights"),
        ("1 + max(complete(cfg.out), default=(0,))[0]", "step", "values:past_the_last"),
        ("whole[:-keep]", "whole[: -keep - 1]", "accidents:users_file"),
        ('"False" in all_gather_text(str(is_finite(trainer)), world)', "not is_finite(trainer)",
         "checkpoint:one_ranks_shard"),
        ("*frozen, *(values for kind in states for values in kind)]", "*frozen]",
         "checkpoint:one_ranks_shard"),
        ('os.rename(final, f"{final}.old.tmp")', "remove(final)", "checkpoint:two_renames"),
        ("for path in (*folder.iterdir(), folder):", "for path in (folder,):",
         "checkpoint:on_the_disk"),
        ("os.write(file, os.urandom(8))", 'os.write(file, b"12345678")',
         "checkpoint:marks_its_folder"),
        ('fits(config.n_embd % config.n_head == 0, "n_head")', "pass", "checkpoint:forged_value"),
        ('"data": TEXT, ', "", "checkpoint:forged_value"),
        ("if moved < len(run):", "if False:", "checkpoint:after_its_check"),
        ('        fits(config.hs % 2 == 0, "n_head")\n', "", "checkpoint:forged_value"),
        ("**numbers_of(trainer)}", '**numbers_of(trainer), "updates": step}', "values:keeps")],
    "run/config.py": [
        ('cfg.grad_dtype == "same" or cfg.dtype != "float64"', "True", "commands:one_line"),
        ('whole="dp" if cfg.shard == cfg.dp else "shard")',
         'whole="dp")', "commands:one_line and shard"),
        ("(cfg.experts - cfg.top_k) *", "cfg.experts *", "commands:machines_share"),
        ("if cfg.head_dim * cfg.n_head == cfg.n_embd:", "if False:", "llama:usual_width"),
        ("zigzag = 2 * cfg.cp if", "zigzag = cfg.cp if", "commands:one_line and cp"),
        ("m % wanted == 0, m))", "m % wanted == 0, -m))", "values:left_out"),
        ("max(1, world // model_ranks)", "max(1, world // cfg.tp)", "values:left_out"),
        ("need = share * cfg.n_layer", "need = cfg.n_layer", "commands:machines_share"),
        ("cfg.steps >= 3,", "cfg.steps >= 2,", "commands:one_line and trace")],
    "run/log.py": [
        ("is_first = step - self.start < 10", "is_first = step < 10", "values:mfu"),
        ("if now != was:", "if False:", "faults:rate_jumps"),
        ("self.say(grid(mesh.sizes))", "pass", "parts:other_rooms"),
        ('"GPU" if mesh.device.type == "cuda" else', '"GPU" if True else', "parts:other_rooms"),
        ("loss / math.log(2) / self", "loss / self", "values:bits"),
        ('["step"] < step', '["step"] <= step', "values:bits"),
        ("self.tokens / seconds", "cfg.batch_size / seconds", "commands:relaunches"),
        (" or scale > 1 else", " else", "values:float16_gives_up"),
        ("2 <= step - self.start < 5", "2 <= step - self.start < 4", "values:third_to_the_fifth"),
        ("            self.unread.clear()\n", "", "values:gives_up_after"),
        ("self.saved = folder or self.saved", "self.saved = folder", "values:last_good"),
        ("predicted[fullest]", "predicted[0]", "values:fullest_rank"),
        ("[1]) * 1024 for", "[1]) * 1000 for", "values:kilobytes"),
        ("(cfg.steps - 1 - step) * step_seconds", "(cfg.steps - step) * step_seconds",
         "values:seconds_left"),
        ("(cfg.steps - 1) // cfg.eval_interval", "cfg.steps // cfg.eval_interval",
         "values:seconds_left"),
        ("v if math.isfinite(v) else None", "v", "values:null"),
        ("if last and gzip:", "if gzip:", "values:mfu"),
        ("flops = rate * self", "flops = self.trainer.tokens * self", "values:mfu")],
    "run/hugging_face.py": [
        ("max(most, config.block_size)", "most", "weights:how_long"),
        ("int(numbers[-1])", "numbers[-1]", "weights:how_long"),
        ('                "resid_pdrop": 0.0,  # dropout\n', "", "weights:becomes_a_hugging"),
        ('"qwen3": {"num_key_value_heads": 32, "head_dim": 128}', '"qwen3": {}', "weights:config"),
        ('"mistral": {"sliding_window": 4096, "num_key_value_heads": 8}', '"mistral": {}',
         "weights:config or refused"),
        ('    if others:\n', '    if False:\n', "llama:foreign_folders"),
        ('head_dim if head_dim * flags["n_head"] != flags["n_embd"] else 0', "head_dim",
         "weights:config"),
        ('"head_dim": config.hs', '"head_dim": config.head_dim', "llama:bit_for_bit"),
        ('("attn.c_attn.weight", "attn.c_proj.weight", ', '("attn.c_attn.weight", ',
         "weights:starts_from or exported"),
        ('number(given, "rms_norm_eps", 1e-6)', 'number(given, "rms_norm_eps", 1e-5)',
         "weights:config"),
        ('given.get("tie_word_embeddings", False)', 'given.get("tie_word_embeddings", True)',
         "weights:config"),
        ('if given.get("num_key_value_heads") is not None:', "if True:", "weights:config"),
        ('("num_attention_heads", 12)', '("num_attention_heads", 4)', "weights:config"),
        ('("max_position_embeddings", 1024)', '("block_size", 1024)', "weights:config"),
        (',\n            **(given.get("rope_parameters") or {})}', "}", "weights:config"),
        ('rope.get("rope_type", rope.get("type", "default"))', 'rope.get("rope_type", "default")',
         "weights:config"),
        ('"scale_attn_by_inverse_layer_idx": False,', "", "weights:config"),
        (', "mlp_bias": False}', "}", "weights:config"),
        ('if name == "n_inner" and value == 4 * gpt2_flags(given)["n_embd"]:', "if False:",
         "weights:config"),
        (":.15g}", ":g}", "weights:config"),
        ('"rms_norm_eps": config.norm_eps', '"rms_norm_eps": 1e-5', "llama:flags_say")],
    "extras/doctor/foreign.py": [
        ("heads[:, of_q], heads[:, of_q + 1]", "heads[:, of_q + 1], heads[:, of_q]",
         "foreign:megatrons"),
        ("return tensor[: shape[0]]", "return tensor", "foreign:megatrons"),
        ("name = name.replace(fused, apart)", "pass", "foreign:megatrons")],
    "extras/doctor/diagnose.py": [
        ("if examined.distance > FAR:", "if False:", "foreign:from_other_weights")],
    "extras/doctor/examined.py": [
        ("torch.finfo(self.dtype).eps + self.distance", "torch.finfo(self.dtype).eps",
         "foreign:as_much_as_the_weights"),
        ("least = 1e-2 * max(sizes.values())", "least = 0.0", "foreign:exact_arithmetic"),
        ("self.floor * (1 - 1 / NOISE)", "self.floor", "doctor:equal_in_float64")],
    "extras/doctor/gradients.py": [
        ("[check_loss(examined, number, of_loss), finding]",
         "[check_loss(examined, number, []), finding]", "foreign:shifted_twice"),
        ("if of_both:\n        return of_both, of_both\n    return causes_of_loss(examined, loss),",
         "return list(shares),", "doctor:cause_explains"),
        ("wrong, known) if known else {}", "wrong, known)", "doctor:cause_is_unknown")],
    "extras/doctor/inputs.py": [
        ("torch.cat([dump.ids(number), dump.targets(number)], dim=-1)", "dump.ids(number)",
         "doctor:other_sequences"),
        ("given[name].shape != right[name].shape\n             or", "", "foreign:another_shape")],
    "extras/doctor/norm.py": [
        ("grad.chunk(D)", "grad.chunk(1)", "foreign:ranks_shards")],
    "extras/doctor/changes/model.py": [
        ("targets[:, 1:]) * S / (S - 1)", "targets[:, 1:])", "foreign:shifted_twice")],
    "run/weights.py": [
        ("[:1], default=0) if", "[:2], default=0) if", "weights:fewer_rows"),
        ("entries[name].shape[:1]", "entries[name].shape[:2]", "weights:fewer_rows"),
        ("if name not in entries or entries[name].path != path / file:",
         "if name not in entries:", "llama:foreign_folders"),
        ('        if cfg.resume != "no":\n', "        if False:\n", "first_gpu:draws_no"),
        ("if part not in WRAPPERS", "", "foreign:wrappers"),
        ('wanted["transformer.h.0.mlp.experts.c_fc.weight"] = (config.n_experts, *expert)', "pass",
         "weights:larger_than_their_file"),
        ("if not param.isfinite().all():", "if False:", "weights:not_finite"),
        ('(".rotary_emb.inv_freq",)', "()", "llama:several_files"),
        (', ".attn.masked_bias")', ",)", "weights:starts_from"),
        ("if had < entry.end - entry.begin:", "if False:", "weights:cut_off_after"),
        ("return torch.zeros(shape)", "return torch.ones(shape)", "weights:without_biases"),
        ("[: shape[0]]", "[-shape[0] :]", "weights:without_biases")],
    "run/timeline.py": [
        ("actions[-1].end - actions[0].start",
         "actions[-1].end - min(e[2] for every_rank in every for e in every_rank "
         'if e[4]["step"] == step)', "schedules:ratio_of_1"),
        ("min(max(sent_at - wait.start, 0.0), wait.seconds)", "max(sent_at - wait.start, 0.0)",
         "schedules:wait_is_bubble"),
        ("(asked + answered) / 2 - answer", "answered - answer", "schedules:fastest_ping"),
        ("ahead = min(found", "ahead = max(found", "schedules:fastest_ping"),
        ("(stages_per_rank * mean.get", "(mean.get", "schedules:ratio_of_1")],
    "data/foreign.py": [
        ("if level:", "if False:", "strangers:no_json_object"),
        ("if len(values) < len(pairs):", "if False:", "strangers:no_json_object"),
        ("value.isprintable()", "True", "strangers:no_file_has"),
        ("file.read(MAX_JSON + 1)", "file.read()", "strangers:place_of_a_file and zeros"),
        ("        file.close()\n", "", "strangers:leaves_no_file"),
        ("type(value) is int and least", "int(value) == value and least",
         "strangers:another_type")],
    "data/batches.py": [
        ("if ids.max() >= self.vocab_size:", "if ids.max() > self.vocab_size:", "commands:beyond"),
        ("max(0, len(tokens) - length), 64)", "max(0, len(tokens) - length) // 2, 64)",
         "values:fingerprints"),
        ("default_rng([cfg.seed, step])", "default_rng([cfg.seed])", "layouts:layout_equals"),
        ("step * cfg.batch_size)", "0)", "dropout:dropout_equals"),
        ("row = index * len(own_starts)", "row = 0", "dropout:dropout_equals"),
        ("            row += len(part)\n", "", "dropout:dropout_equals"),
        ("len(self.train) - self.block,", "len(self.train) - self.block - 1,", "layouts:equals"),
        ("(len(self.val) - 1) // self", "len(self.val) // self", "values:windows"),
        ('mesh.place("dp")', 'mesh.place("shard")', "layouts:experts"),
        ("in (self.train, self.val):\n            digest", "in (self.train,):\n            digest",
         "values:fingerprints"),
        ("if size // width <= self.block:", "if size // 2 < self.block:", "values:shorter_than"),
        ("if tokens_of_meta and size != width * tokens_of_meta:", "if False:",
         "values:shorter_than"),
        ("if not meta.exists() and local_rank == 0:", "if not meta.exists():",
         "values:others_wait")],
    "sample.py": [
        ("(top - top[:, :1]).double()", "top.double()", "weights:top_k_0"),
        ('vars(block.attn).pop("attend", None)', "pass", "llama:kept_keys"),
        ("length > window:  #", "length > window + 1:  #", "weights:sampling"),
        (".double() / temperature", ".double()", "weights:sampling"),
        ("args.top_k, args.seed)", "args.top_k)", "weights:seed_decides"),
        ("top_k or V", "top_k or 50", "weights:top_k_0"),
        ("if tokenizer.n_vocab != model.config.vocab_size:", "if False:", "weights:models_own"),
        ("        all_gather(parts, self.group)\n", "", "sample:draws_the_tokens"),
        ("max(self.counts))", "own.size(-1))", "sample:draws_the_tokens"),
        ("if not values.isfinite().all():", "if False:", "sample:not_finite"),
        ("if mesh.rank == 0:", "if True:", "sample:tp_2_prints")],
    "extras/planner/memory.py": [
        ("experts * E, matrix)", "experts, matrix)", "planner:under_zero"),
        ("CONVERTED + largest, everything)", "CONVERTED + largest, 1e12)", "planner:copies"),
        ("per_other = bytes_each(layout.replicas)", "per_other = bytes_each(layout.dp)",
         "planner:zero_paper"),
        ("3: 2 * gw + 2 * w}", "3: 2 * gw}", "planner:step_allocates"),
        ("copy = wide if w == 2 else 0", "copy = 0", "planner:heads_buffers"),
        ("(2 * job.width + 2 * max", "(2 * job.width + max", "planner:ring_attention"),
        ("(3 * 8 + 2 * wide)", "(2 * 8 + 2 * wide)", "planner:saves_the_bytes"),
        ("up * (inner + shared)", "up * (inner - shared)", "planner:mlp_beside")],
    "extras/planner/search.py": [
        ("if tp > self.device.node and", "if tp >= self.device.node and", "planner:limits_that"),
        ("S // cp < 512 and", "S // cp <= 512 and", "planner:limits_that"),
        ("for v in range(2, 17) if", "for v in range(2, 16) if", "planner:limits_that"),
        ("for b in range(1, 17) if", "for b in range(1, 16) if", "planner:limits_that")],
    "extras/planner/measure.py": [
        ("2 * (n - 1) / n * long.nbytes", "(n - 1) / n * long.nbytes", "planner:measured_links"),
        (" / hops(world)", "", "planner:measured_links")],
    "run/tensorfile.py": [
        ('text += b" " * (-len(text) % 8)  #', "#", "weights:multiple_of_8"),
        ('{"__metadata__": {"format": "pt"}}', "{}", "weights:exported_file")],
    "run/export.py": [
        ("if 50257 <= config", "if 50256 <= config", "weights:own_tokenizer_ends")],
    "run/watch.py": [
        ('[(send, dst, recv, src), *options.get("more", ())]', "[(send, dst, recv, src)]",
         "watch:every_message"),
        ("        self.become(usual)", "        pass", "watch:every_message"),
        ("done[key] + more", "done[key]", "watch:ticks"),
        ("which in ends or which", "which", "watch:part_of_the_whole"),
        ('    "group.py", "engine/group.py",', '    "engine/group.py",', "watch:my_own"),
        ("carrier or collective or method", "collective or method", "watch:every_message"),
        ("self.here.what = what", "pass", "watch:every_message")],
    "extras/show/eight_ranks.py": [
        ("(start + first) * DOWN", "start * DOWN", "eight_ranks:picture")],
    "run/processes.py": [
        ('options["device_id"] =', "device =", "first_gpu:connects_at_init")],
    "run/launch.py": [
        ('not in ("", "0", "1")', 'not in ("", "1")', "commands:batch_script"),
        ("max(1, (os.cpu_count() or 1) // size)", "max(1, os.cpu_count() or 1)",
         "faults:launcher_ends"),
        ("{**defaults, **os.environ, **place}", "{**os.environ, **defaults, **place}",
         "faults:launcher_waits"),
        ("deadline = min(deadline, time.monotonic() + grace)",
         "deadline = time.monotonic() + grace", "faults:launcher_ends"),
        ("max(1, *codes) if any", "max(codes) if any", "faults:killed_is_exit")],
    "run/signals.py": [
        ("least <= int(text) <= most", "True", "commands:environment_that"),
        ("text.isascii() and ", "", "commands:environment_that"),
        ('not store.endswith(f"?rank={rank}&world_size={size}")', "False",
         "commands:environment_that"),
        ("        return launched().local_rank\n", "        return 0\n", "commands:counted"),
        ("under_nohup = number == signal.SIGHUP and", "under_nohup = False and",
         "faults:second_signal"),
        ("        signal.signal(number, signal.SIG_DFL)\n\n    on_stop(ask)", "\n    on_stop(ask)",
         "faults:second_signal")],
    "data/prepare.py": [
        ("if isinstance(error, OSError) else str(error)", "if False else str(error)",
         "strangers:of_prepare"),
        ('if path.suffix == ".json" and not texts:',
         'if path.suffix == ".json":', "commands:json_lines"),
        ('if mark.read_bytes() != files["meta.json"]:', "if True:", "commands:half_replaced"),
        ('"<u2" if vocab_size <= 2**16', '"<u2" if vocab_size < 2**16', "commands:16_bits"),
        ("encode_special_tokens = True", "encode_special_tokens = False", "weights:128256"),
        ("max(self.tokenizer.get_vocab().values(), default=0) + 1",
         "self.tokenizer.get_vocab_size()", "weights:without_a_tokenizer"),
        ("list(dict.fromkeys(text for _, text in sorted(docs)))",
         "[text for _, text in sorted(docs)]", "commands:share_no_text"),
        ("cut = newline + 1 if", "cut = newline if", "commands:end_of_a_line"),
        ("                    mark.unlink()", "                    pass", "commands:half_replaced"),
        ("8 * gzip_bytes / len", "gzip_bytes / len", "commands:gzips_bits")],
    "extras/planner/costs.py": [
        ("return max(inside, outside) + (size", "return inside + outside + (size",
         "planner:textbooks"),
        ("members - 1 + math.ceil(math.log2(size / members))", "size - 1",
         "planner:trees_latency"),
        ("operands + 2 * gradients", "operands + 2 * weights", "planner:adds_to_gradients")],
    "extras/planner/hardware.py": [
        ("self.gb * (1 - self.reserve)", "self.gb", "advice:first_row")],
    "extras/planner/habits.py": [
        ('Price(8, "tensor ranks', 'Price(0, "tensor ranks', "advice:first_row")],
    "extras/planner/programs.py": [
        ('"t*{part.blocks}" if part', '"t*{part.blocks - 1}" if part', "advice:megatrons_stages")],
    "extras/planner/calibrate.py": [
        ("times[SKIPPED:]", "times", "advice:flags_or_a_file"),
        ("not choices or flags[name] in choices", "True", "advice:wrong_text")],
    "extras/planner/folder.py": [
        ("wide * heads != sizes", "wide * heads == sizes", "advice:folders_model"),
        ('* chosen["top_k"]}', "}", "advice:named_model"),
        ("heads % kv_heads == 0", "True", "advice:wrong_config")],
    "extras/planner/report.py": [
        ("* row['step_s'] / 86400", "* row['step_s'] / 3600", "planner:speed_and_days")],
    "sizes.py": [
        ("12 * self.n_layer * self.query_width", "12 * self.n_layer * self.n_embd", "llama:flops"),
        ("attention = 4 * self.query_width", "attention = 4 * C", "llama:flops"),
        ("+ 12 * self.n_layer * self", "+ 6 * self.n_layer * self",
         "planner:llm_foundry"),
        ("return 3 * self.n_embd * (", "return 2 * self.n_embd * (",
         "llama:flops_and_parameters")],
    "docs/lab.html": [
        ('[[1e9, "GB"], [1e6', '[[2**30, "GB"], [1e6', "lab:powers_of_ten"),
        ("(100 * x).toFixed(1)", "(100 * x).toFixed(0)", "lab:powers_of_ten"),
        ("(rank - hop + N) % N", "(rank + hop) % N", "lab:computes"),
        ("[rank, 2 * N - 1 - rank]", "[rank, N + rank]", "lab:computes"),
        ("Math.floor(expert * E / n_experts)", "expert % E", "lab:computes"),
        ("microbatch = late.shift();", "microbatch = late.pop();", "lab:computes"),
        ('a.got ? "doubled" : "missing"', '"missing"', "lab:computes")],
}


def test_file(name):
    """test_NAME.py, in tests/ or in the tests of a folder of extras/. AssertionError unless there
    is one."""
    name = f"test_{name}.py"
    found = [*HERE.glob(f"tests/{name}"), *HERE.glob(f"extras/*/tests/{name}")]
    assert len(found) == 1, f"{name}: {len(found)} files"
    return str(found[0].relative_to(HERE))


def mutant(file, old, new):
    """The text of a file with one place changed. AssertionError if it has not one such place."""
    text = Path(HERE, file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    changed = text.replace(old, new)
    if file.endswith(".py"):
        compile(changed, file, "exec")
    return changed


def killer(file, old, new, tests, limit):
    """The test that notices: run pytest in a copy of the tracked files; "" if all tests pass."""
    listed = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in listed.stdout.splitlines():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / path, Path(folder, path))
        Path(folder, file).write_text(mutant(file, old, new))
        run = subprocess.Popen([sys.executable, "-m", "pytest", "-x", "-q", *tests], cwd=folder,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
        try:
            out, _ = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"a hang of {limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # ranks that outlive their test
    assert run.returncode in (0, 1, 2), out  # 5: there are no such tests
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w.]+(?:\[.*\])?)(?: - .*)?$", out, re.MULTILINE)
    return (failed[1] if failed else out[-300:]) if run.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="part of `FILE: OLD -> NEW`")
    parser.error = lambda message: parser.exit(2, f"mutants.py: {message}\n")
    parser.add_argument("--all", action="store_true", help="the suite, where those notice nothing")
    args = parser.parse_args()
    verdicts = {}
    for file, old, new, tests in ((file, *row) for file, rows in MUTANTS.items() for row in rows):
        name = re.sub(r"\s+", " ", f"{file}: {old} -> {new or 'nothing'}")
        if args.name in name:
            where, expression = tests.split(":")
            if Path(HERE, file).read_text().count(old) != 1:  # a fork has changed the line
                print(f"{name}    NO SUCH PLACE, or several", flush=True)
                continue
            found = killer(file, old, new, [test_file(where), "-k", expression], 300)
            if args.all and not found:
                found = killer(file, old, new, ["tests", "extras"], 3600)
            verdicts[name] = f"killed by {found}" if found else "LIVES"
            print(f"{name}    {verdicts[name]}", flush=True)
    living = [name for name, verdict in verdicts.items() if verdict == "LIVES"]
    print(f"{len(verdicts) - len(living)} of {len(verdicts)} killed; living: {living or 'none'}")
    sys.exit(bool(living))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    from run.signals import end_quietly
    end_quietly()
    main()
