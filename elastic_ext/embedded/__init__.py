"""The rendezvous `ext_c10d`. A job on one machine (`one_machine`) needs no store. For up to 64 nodes it is the embedded store:
etcd's v3 API in memory, in one process on the host that `--rdzv-endpoint` names.

    What it keeps               keyspace: pure
    How it is reached           service, with the watches of its streams
    Its process                 process, plan, snapshot
    The agent beside it         hosting

Importing this package imports none of them.
"""
