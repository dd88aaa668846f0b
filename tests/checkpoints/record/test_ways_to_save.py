"""Ways in which training scripts save, each killed at marked places: what must be proved there, and what must not."""

from __future__ import annotations

import pytest

from elastic_ext.checkpoints.record.proof import prove
from tests.checkpoints.record.test_proof import CHILD, journals

# Lines as in test_proof; `R c N` sets the count of a rank; `=> +a -b` ends a line: killed here, a is proved and b is not.
WAYS = {
    "nanoGPT: one file in place": """
        1 c 5
        0 w 5 ckpt.pt => -ckpt.pt
        0 s 6 => -ckpt.pt
        1 c 6 => +ckpt.pt
        0 w 10 ckpt.pt => -ckpt.pt
        0 s 11
        1 c 11 => +ckpt.pt""",
    "HF Trainer: rotation after, two ranks": """
        0 w 5 checkpoint-5/model
        0 w 5 checkpoint-5/rng_0
        1 w 5 checkpoint-5/rng_1
        0 s 6 => -checkpoint-5
        1 s 6 => +checkpoint-5
        0 w 10 checkpoint-10/model
        1 w 10 checkpoint-10/rng_1
        0 w 10 checkpoint-10/rng_0
        0 d 10 checkpoint-5/model => -checkpoint-10
        0 d 10 checkpoint-5
        1 s 11 => +checkpoint-10""",
    "HF Trainer of old: rank 0 renames": """
        0 w 5 tmp-checkpoint-5/model
        1 w 5 tmp-checkpoint-5/rng_1
        0 m 5 tmp-checkpoint-5 checkpoint-5 => -checkpoint-5
        1 s 6 => +checkpoint-5""",
    "Lightning: new file, old one removed": """
        0 w 5 epoch=0-step=5.ckpt
        0 s 6 => +epoch=0-step=5.ckpt
        0 w 10 epoch=1-step=10.ckpt => +epoch=0-step=5.ckpt -epoch=1-step=10.ckpt
        0 d 10 epoch=0-step=5.ckpt => +epoch=1-step=10.ckpt""",
    "DeepSpeed: pieces, then a text file latest": """
        0 w 5 global_step5/mp_rank_00
        0 w 5 global_step5/zero_0
        1 w 5 global_step5/zero_1
        0 w 5 latest => -global_step5
        0 s 6 => -global_step5
        1 s 6 => +global_step5""",
    "Megatron: a forked child writes, main writes the tracker later": """
        0 w 5 iter_5/common.pt
        900 w 5 iter_5/0.distcp
        0 s 6 => -iter_5
        900 x 6
        0 s 7 => +iter_5
        0 w 7 iter_5/metadata.json => -iter_5""",
    "timm: tmp, unlink last, rename, link": """
        0 w 5 tmp.pth
        0 m 5 tmp.pth last.pth => +last.pth
        0 w 5 checkpoint-5.pth => +last.pth
        0 s 6 => +checkpoint-5.pth
        0 w 10 tmp.pth => +last.pth -tmp.pth
        0 d 10 last.pth => +checkpoint-5.pth
        0 m 10 tmp.pth last.pth => +last.pth""",
    "detectron2: a file and last_checkpoint": """
        0 w 5 model_5.pth
        0 w 5 last_checkpoint => -model_5.pth
        0 s 6 => +model_5.pth""",
    "mmengine: the old one is removed first": """
        0 w 5 epoch_1.pth
        0 s 6
        0 d 10 epoch_1.pth => -epoch_1.pth
        0 w 10 epoch_2.pth => -epoch_2.pth
        0 s 11 => +epoch_2.pth""",
    "the old one is removed before the new one, two files": """
        0 w 5 s_5/a
        0 w 5 s_5/b
        0 s 6
        0 d 10 s_5/a => -s_5
        0 d 10 s_5/b
        0 d 10 s_5
        0 w 10 s_10/a => -s_10
        0 w 10 s_10/b => -s_10
        0 s 11 => +s_10""",
    "old is renamed away, new is written, old is removed": """
        0 w 5 last/a
        0 w 5 last/b
        0 s 6
        0 m 10 last prev => +prev
        0 w 10 last/a => +prev -last
        0 w 10 last/b => +prev -last
        0 d 10 prev/a => +last""",
    "two renames: new in, old out": """
        0 w 5 tmp/a
        0 m 5 tmp last
        0 s 6
        0 w 10 tmp/a => +last -tmp
        0 m 10 last old => +old
        0 m 10 tmp last => +last
        0 d 10 old/a => +last""",
    "shutil.move from another disk": """
        0 m 5 - s_5
        0 u 5 s_5 => -s_5
        0 w 5 s_5/a => -s_5
        0 w 5 s_5/b => -s_5
        0 s 6 => +s_5""",
    "each file by tmp and replace": """
        0 w 5 s_5/a.tmp
        0 m 5 s_5/a.tmp s_5/a => -s_5
        0 w 5 s_5/b.tmp
        0 m 5 s_5/b.tmp s_5/b => -s_5
        0 s 6 => +s_5""",
    "atexit saves": """
        0 w 5 s_5
        0 s 6
        0 x 8
        0 w 8 final => +s_5 -final""",
    "main ends, a thread goes on": """
        0 w 5 s_5 @2
        0 x 6 => -s_5
        0 e 6 @2 => +s_5""",
    "the late rank has not begun its piece": """
        0 w 5 s_5/r0
        0 s 6
        1 c 5 => -s_5
        1 w 5 s_5/r1 => -s_5
        1 s 6 => +s_5""",
    "GAN: another optimizer steps after it": """
        0 s 2 #2
        0 w 10 s_5 => -s_5
        0 s 11 #2 => +s_5""",
    "an optimizer is made anew for each phase": """
        0 w 5 s_5
        0 s 6 #6 => -s_5
        0 s 7 #6
        0 w 10 s_10
        0 s 11 #6 => +s_10""",
    "a rank leaves early, the others go on": """
        1 x 3
        1 c 3
        0 w 5 s_5
        0 s 6 => +s_5""",
    "a cleaner's thread removes while main writes": """
        0 w 5 s_5/a
        0 s 6
        0 w 10 s_10/a => -s_10
        0 d 10 s_5/a @2 => -s_10
        0 s 11 => +s_10""",
    "another rank removes while rank 0 writes": """
        0 w 5 s_5/a
        1 w 5 s_5/b
        0 s 6
        1 s 6 => +s_5
        0 w 10 s_10/a
        1 w 10 s_10/b
        1 d 10 s_5/b => -s_10
        0 s 11 => +s_10""",
    "a work item failed and is tried again": """
        0 w 5 s_5/a @2
        0 f 5 @2
        0 s 6 => -s_5
        0 w 6 s_5/a @3
        0 e 6 @3
        0 s 7 => +s_5""",
    "async: thread per save, step goes on, two ranks": """
        0 w 5 s_5/r0 @2
        1 w 5 s_5/r1 @2
        0 s 6
        1 s 6 => -s_5
        0 e 6 @2 => -s_5
        1 e 6 @2 => +s_5""",
    "two writers share a queue": """
        0 w 5 s_5/a @2
        0 w 5 s_5/b @3
        0 s 6
        0 w 10 s_10/a @2 => -s_5
        0 s 11
        0 w 10 s_10/b @3 => +s_5 -s_10""",
    "a pool, an item a file: the ends are noted when it has nothing to do": """
        0 w 5 s_5/a @2
        0 s 6 => -s_5
        0 w 6 s_5/b @3 => -s_5
        0 s 7 => -s_5
        0 e 7 @2 => -s_5
        0 e 7 @3 => +s_5""",
    "in place, names with the step, and a save that failed": """
        0 w 5 last/model_5
        0 w 5 last/opt_5
        0 s 6 => +last
        0 w 10 last/model_10
        0 s 11 => -last""",
    "after a whole save, all leave before rank 1 has begun its piece": """
        0 w 5 s_5/r0
        1 w 5 s_5/r1
        0 s 6
        1 s 6
        0 w 10 s_10/r0
        0 x 10
        1 x 10 => +s_5 -s_10""",
    "the script trains in a thread": """
        0 s 2 @2
        0 w 5 s_5 @2 => -s_5
        0 s 6 @2 => +s_5
        0 w 10 s_10 @2 => -s_10""",
    "a thread that lives on writes single files": """
        0 w 5 s_5 @2
        0 w 5 s_6 @2 => -s_5 -s_6
        0 s 6 => +s_5 -s_6""",
    "a rank makes fewer steps (uneven data), saves follow": """
        1 c 4
        0 w 5 s_5
        0 s 6
        1 c 5
        0 w 10 s_10
        0 s 11
        1 c 9 => +s_5 -s_10""",
    "a log at the top": """
        0 w 0 run.log
        0 w 5 s_5
        0 w 5 run.log
        0 s 6 => +s_5
        0 w 6 run.log => +s_5""",
    "best is copied from the newest": """
        0 w 5 s_5
        0 w 5 best
        0 s 6 => +s_5 +best
        0 w 10 s_10
        0 w 10 best => +s_5 -s_10 -best
        0 s 11 => +s_10 +best""",
    "a child per save, killed within": """
        900 w 5 s_5/a
        0 s 6 => -s_5
        0 s 7 => -s_5""",
    "retry into the same folder": """
        0 w 5 s_5/a
        0 w 5 s_5/a
        0 w 5 s_5/b
        0 s 6 => +s_5""",
    "in place with a copy first": """
        0 w 5 last/a
        0 w 5 last/b
        0 s 6 => +last
        0 r 10 last/a
        0 w 10 backup/a
        0 w 10 backup/b => +last
        0 w 10 last/a => -last
        0 w 10 last/b
        0 s 11 => +last +backup""",
    "removed whole, then written again under the name": """
        0 w 5 last/a
        0 w 5 last/b
        0 s 6
        0 d 10 last/a
        0 d 10 last/b
        0 d 10 last => -last
        0 w 10 last/a => -last
        0 s 11 => -last""",
    "a save on SIGTERM in the loop, then the end": """
        0 w 5 s_5
        1 c 5
        0 s 6
        1 c 6
        0 w 8 s_8
        0 x 8
        1 c 8 => +s_5
        1 x 8 => +s_8""",
    "one rank's exception at the end": """
        0 w 5 s_5/r0
        1 w 5 s_5/r1
        0 x 5
        1 c 5 => -s_5""",
    "a reported save of one rank of two": """
        0 w 5 s_5/r0
        1 w 5 s_5/r1
        0 k 5
        0 w 10 s_10/r0 => -s_10""",
}


def _wrong(text: str) -> list[str]:
    """Return each expectation that does not hold, with what the record says."""
    wrong: list[str] = []
    so_far, counts = ["0 s 1"] + ["1 s 1"] * ("\n        1 " in text), dict[int, int]()
    for line in filter(None, map(str.strip, text.splitlines())):
        event, _, wanted = line.partition(" => ")
        rank, kind, count, *_ = event.split()
        if int(rank) < CHILD:
            counts[int(rank)] = max(counts.get(int(rank), 0), int(count))
        if kind != "c":
            so_far.append(event)
        last = {each.entry.path: each for each in prove(journals("\n".join(so_far)), counts).saves if not each.gone}
        for each in wanted.split():
            save = last.get(each[1:])
            if (save is not None and save.proved) != (each[0] == "+"):
                wrong.append(f"{event}: {each}: {save.why if save is not None else 'no record'}")
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_marked_places(way: str) -> None:
    assert _wrong(WAYS[way]) == []
