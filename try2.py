import torch, time
from run.doctor import step as st, causes, diagnose
from model import build
from sizes import GPTConfig
from run.doctor.step import Step
config = GPTConfig(67, 8, 3, 12, 24)
m = build(config, 0, torch.double)
w = {n: p.detach() + .1*torch.randn_like(p)*(n.endswith("bias") or ".ln_" in n) for n, p in m.canonical_parameters()}
for n,p in m.canonical_parameters(): p.data.copy_(w[n])
ids = torch.randint(0, 67, (2, 3, 4, 8)); tg = torch.randint(0,67,(2,3,4,8))
loss = m(ids.flatten(0,2), tg.flatten(0,2)); loss.backward()
for lay in [dict(), dict(tp=3), dict(tp=2, sp=True), dict(cp=2), dict(cp=2,cp_attention="all-to-all"), dict(tp=2,cp=2,sp=True), dict(pp=3)]:
    layout = dict(dp=2, ep=1, pp=1, cp=1, tp=1, sp=False, cp_attention="ring", zero=0, schedule="1f1b", chunks=1, microbatches=3); layout.update(lay)
    s = Step(config, layout, 0.01, w, ids, tg)
    t = time.time(); terms = s.run(); dt = time.time()-t
    err = max((terms.full[n]-p.grad).norm()/max(p.grad.norm(), 1e-3) for n,p in m.canonical_parameters())
    print(lay, "loss", abs(terms.losses.sum().item()-loss.item()), "grad", err.item(), f"{dt:.2f}s")
    t=time.time(); ch = causes.changes(s); n=0; bad=[]
    for c in ch:
        try:
            tt = s.run(c)
            dl = (tt.losses.sum()-terms.losses.sum()).abs().item()
            dg = max((causes.gradient(tt, n, causes.RIGHT)-causes.gradient(terms, n, causes.RIGHT)).norm().item() for n in terms.full)
            if (dl > 1e-9) != c.forward or dg < 1e-9: bad.append((c.words, c.forward, dl, dg))
        except Exception as e: bad.append((c.words, repr(e)[:100]))
    print(len(ch), "changes", f"{time.time()-t:.1f}s", *bad, sep="\n   ")
