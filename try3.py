import sys, time, tempfile, pathlib, re, torch
from tests.harness import config, VOCAB, mesh_of
from tests import bugs
from tests.planted import planted
from tests.pool import pool
from tests.runs import random_corpus
from run.config import check
import train
from data.batches import Data
from run.doctor.dump import read_dump
from run.doctor.record import write_run
from run.doctor.diagnose import diagnose
from run.doctor.words import lines

def _dump(rank, cfg, changes):
    with planted(*changes):
        trainer = train.Trainer(cfg, mesh_of(cfg), VOCAB)
        write_run(trainer, Data(cfg))

def make(corpus, folder, changes, **flags):
    cfg = config(corpus, steps=10, dump=str(folder), **flags)
    world = check(cfg, 1)
    pool(world, _dump, cfg, changes)
    return read_dump(folder)

if __name__ == "__main__":
    dtype = sys.argv[1]; pat = sys.argv[2] if len(sys.argv) > 2 else "."
    tmp = pathlib.Path(tempfile.mkdtemp())
    corpus = random_corpus(tmp, train=4000, val=400)
    refs = {}
    tot = named = 0
    t00=time.time()
    for bug in bugs.BUGS:
        if not re.search(pat, bug.name): continue
        for layout in bug.layouts:
            flags = bugs.flags_of(layout)
            modelflags = {k: v for k, v in flags.items() if k in ("experts", "top_k", "arch", "n_kv_head", "n_layer", "batch_size", "block_size", "balance")}
            pp, ch = flags.get("pp",1), flags.get("chunks",1)
            modelflags.setdefault("n_layer", max(3, pp, pp*ch-2))
            key = str(sorted(modelflags.items())) + str(bug.setting)
            try:
                if key not in refs:
                    refs[key] = make(corpus, tmp / f"ref{len(refs)}", bug.setting, **modelflags)
                t0=time.time()
                mine = make(corpus, tmp / "mine", (*bug.setting, *bug.changes), **{**flags, "dtype": dtype, "n_layer": modelflags["n_layer"]})
                t1=time.time()
                found = list(diagnose(refs[key], mine))
                t2=time.time()
            except Exception as e:
                import traceback; traceback.print_exc()
                print("ERR", bug.name, layout, repr(e)[:200]); tot += 1; continue
            tot += 1
            ok = any(f.causes for f in found); named += ok
            print(f"{'NAMED' if ok else 'no   '} [{bug.stage}] {bug.name} | {layout} ({t1-t0:.1f}s {t2-t1:.1f}s)")
            for line, eq in lines(found):
                if not eq: print("        ", line[:230])
    print(named, "of", tot, f"{time.time()-t00:.0f}s")
