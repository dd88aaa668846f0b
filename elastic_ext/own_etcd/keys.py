"""Every key that the keepers of a job have in its etcd, which belongs to that job alone.

hosts/HOST      a HostRecord of `decisions`. Lease: of that host's keeper.
                Written by that keeper; watched by the keepers that run a member.
seen/MEMBER     "": the member of this id (in hex) has served. Written by its keeper, read by the others.
shared/call/HOST  JSON: the host is to run a member of this `name`, in this `cluster` (as --initial-cluster).
                Written by the keeper that replaces a member; deleted by the one of that host once it serves.
shared/endpoints  the members' client URLs, separated by commas; none: those of the start.
                Written by the keeper of a new member. All keepers watch what is shared.
saved           a Beginning of `saved_keys`. Written and read by the keepers of the first members.
"""

from __future__ import annotations

ROOT = "/elastic_ext_keepers/"
HOSTS = ROOT + "hosts/"
SEEN = ROOT + "seen/"
SHARED = ROOT + "shared/"
CALLS = SHARED + "call/"
ENDPOINTS = SHARED + "endpoints"
SAVED = ROOT + "saved"
