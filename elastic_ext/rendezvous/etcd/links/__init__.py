"""Links between agents: TCP connections that end when a node dies as a whole, so that the others know at once.

If only the agent is killed, its reaper takes the node out of the job. If the agent, its reaper and its workers die at one instant
(`kubectl delete --force`, a container out of memory, SIGKILL to a job step), only the lease would tell. But the kernel of that
host lives on and closes their connections. So each agent keeps a link to one or two other nodes of its round
(`rounds.neighbors`), and suspects a node that closes its link without a goodbye. It then connects again:

    the node answers              it has not died: nothing happens
    accepted, but no answer       the reaper still runs, or the agent is frozen: the end of this connection is the next event
    refused                       probably dead: the agent writes its doubt to etcd, where a living node removes it at once. If
                                  it is still there after CONFIRM_S, the record of the node is deleted and its lease revoked
    anything else                 the network may be cut: only the lease can tell

A link that is reset or times out makes nobody a suspect: a dead process closes its connections, something on the way resets them.
The record is deleted in a transaction that compares the doubt. So a node either removes the doubt or is removed, and learns
which.

Invariants:
    The listening socket is open as long as the agent or its reaper lives: the reaper inherits it. Nobody links to an agent that
    has no reaper, because its workers could outlive it.
    A node that reaches etcd within CONFIRM_S is not declared dead, whatever something between the hosts closes or refuses.
    A node is declared dead within DECIDE_S after the end of its link or not at all, and only by a node that is in the job itself.
    A node that is declared dead though it lives learns that from its next event from etcd, and kills its workers without grace.
    A node that has lost a link from another one, which does not link again, and that etcd does not answer, does the same, because
    it may have been declared dead (unless all others are in trouble, too: see `fence`). It looks for longer than DECIDE_S.
    One node declares another dead once at most; after that, only its lease counts.

Only the lease tells of a host that loses its power, which closes nothing, and of a node that dies before anybody has linked to
it. Not covered: something closes the link to a node on one side only (a proxy may), refuses connections to it, and cuts it from
etcd at the same time. Its workers then run until its lease ends, next to a round of the others.
"""
