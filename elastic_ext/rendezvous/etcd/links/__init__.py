"""Links between agents: TCP connections that end when a node dies as a whole, so that the others know at once.

If only the agent is killed, its reaper takes the node out of the job. If the agent, its reaper and its workers die at one instant
(`kubectl delete --force`, a container out of memory, SIGKILL to a job step), only the lease would tell. But the kernel of that
host lives on and closes their connections. So each agent keeps a link to one or two other nodes of its round
(`rounds.neighbors`), and suspects a node whose link ends without a goodbye. It then connects again:

    the node answers              something reset the link: nothing happens
    accepted, but no answer       the agent is dead and its reaper still works: the end of this connection is the next event
    refused                       neither lives: unless the node has written a sign of life to etcd, its lease is revoked
    anything else                 the network may be cut: only the lease can tell

Invariants:
    The listening socket is open as long as the agent or its reaper lives: the reaper inherits it.
    A node whose incoming link ends without a goodbye writes a sign of life to etcd at once: it counts them in its record. So
    if something between two living hosts resets and then refuses connections, a node that reaches etcd within CONFIRM_S is
    not declared dead. If it is too late, it registers again, and the next round waits until it has stopped its workers, as
    after any record that was deleted. Through its other links a node tells the new count: an old sign must not hide its death.
    One node declares another dead once at most; after that, only its lease counts.

A host that loses its power closes nothing: there, only the lease tells.
"""
