import torch, time
from run.doctor.threads import World
from model import GPT, build
from sizes import GPTConfig
from shard import tag_whole
from tensor_parallel import tensor_parallel
cfg = GPTConfig(67, 8, 3, 12, 24)
ids = torch.randint(0, 67, (4, 8)); 
m = build(cfg, 0, torch.double); m(ids, ids).backward()
ref = {n: p.grad for n, p in m.canonical_parameters()}
def fn(mesh):
    model = build(cfg, 0, torch.double); tag_whole(model, mesh.group("cp")); tensor_parallel(model, mesh.group("tp"))
    loss = model(ids, ids); loss.backward(); return loss.item(), {p.shard.name: p.grad - p.shard.slice(ref[p.shard.name]) for p in model.parameters()}
t=time.time()
out = World({"cp": 1, "tp": 3}).run(fn)
print(time.time()-t, [o[0] for o in out], max(x.abs().max().item() for o in out for x in o[1].values()))
