"""See the package. A report of each job is written to OUT/KIND/report.jsonl, and a table at the end."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.kills.apart import ApartCampaign
from tests.chaos.kills.campaign import Campaign
from tests.chaos.kills.local import LocalCampaign
from tests.s3 import S3Server

PLAIN = ["own", "copy", "inplace", "inplace_only", "parts", "named", "dcp", "dcp_inplace", "dcp_async", "dcp_local"]
LIBRARIES = {"trainer": "transformers", "peft": "peft", "accelerate": "accelerate", "lightning": "lightning"}
REMOTE = ["s3_own", "s3_dcp"]
APART = ["shards", "parts", "named", "file", "own", "dcp"]
HEAD = ("kind", "kills", "cut", "right", "wrong", "older", "asked", "ended", "all right", "all older", "all wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", help="default: all that there are")
    parser.add_argument("--kills", type=int, default=100, help="of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all-every", type=int, default=12, help="each so many kills, the agent and all workers are killed")
    parser.add_argument("--limit", type=float, default=900, help="of each job, in seconds")
    parser.add_argument("--local", type=Path, help="the jobs save in a local_dir below this directory, in save_dir()")
    parser.add_argument("--nodes", type=int, default=1, help="several: each saves in a local_dir of its own, in save_dir()")
    parser.add_argument("--ranks", type=int, default=1, help="of each of several nodes")
    parser.add_argument("--out", type=Path, help="where the reports go, an empty directory")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the agent is ended, too
    out = args.out or Path(tempfile.mkdtemp(prefix="kills-"))
    rows = [HEAD]
    wrong = 0
    every = APART if args.nodes > 1 else [*PLAIN, *LIBRARIES, *REMOTE]
    for kind in args.jobs.split(",") if args.jobs else every:
        if kind in LIBRARIES and importlib.util.find_spec(LIBRARIES[kind]) is None:
            print(f"{kind}: {LIBRARIES[kind]} is not installed")
            continue
        began = time.monotonic()
        campaign = run(kind, out / kind, args)
        counts = campaign.counts()
        rows.append((kind, *(str(counts[name]) for name in HEAD[1:])))
        wrong += counts["wrong"] + counts["older"] + counts["ended"]
        print(f"{kind}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True)
    for row in rows:
        print(" | ".join(row))
    print(f"reports: {out}")
    return int(wrong > 0)


def run(kind: str, folder: Path, args: argparse.Namespace) -> Campaign:
    server = None
    environ, bucket = {}, ""
    if kind in REMOTE:
        import s3fs

        server = S3Server()
        environ = server.environ
        os.environ.update(environ)
        s3fs.S3FileSystem.clear_instance_cache()  # each keeps the endpoint that it was made with
        bucket = server.bucket()
    try:
        if args.nodes > 1:
            apart = ApartCampaign(kind, folder, args.seed, args.nodes, args.ranks)
            apart.run(args.kills, args.limit)
            print(f"{kind}: steps passed over: {[each for each in apart.lost() if each[1]]}")
            return apart
        if args.local:
            with tempfile.TemporaryDirectory(prefix="kills-", dir=args.local) as local:
                campaign: Campaign = LocalCampaign(kind, folder, args.seed, Path(local))
                campaign.run(args.kills, args.limit)
        else:
            campaign = Campaign(kind, folder, args.seed, environ, bucket, args.all_every)
            campaign.run(args.kills, args.limit)
    finally:
        if server is not None:
            server.stop()
    return campaign


if __name__ == "__main__":
    raise SystemExit(main())
