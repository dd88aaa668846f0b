"""Each node's parts of the copies in memory, kept by one other node as well: so that a lost node costs a step or two, too.

A thread of each agent listens for the agents of other nodes, another for the agent's own workers. As soon as a worker has written
its part, it asks its agent to send it to the node's peer, and commits the copy once that is done, or has failed. So a committed
copy is as a rule on two nodes; if the peer cannot be reached, on its own node only, and the log says so once. If a worker's own
agent does not answer, nothing is committed: it has been killed, and the last copy is all that the node leaves. A node that starts
without parts that its ranks need (a replacement, or one whose ranks have changed) gets them before its workers start.

plan.py      which node keeps whose parts (pure)
wire.py      one connection: who may speak, one request, the bytes of one file
keep.py      the parts of other nodes in this node's directory: bounded, checked, and complete or not there
send.py      to the peer
fetch.py     from other nodes, before the workers start
callers.py   those who have not proved yet that they are of the round
service.py   the threads of the agent
request.py   what a worker asks of its agent

The bytes never go through etcd or the round's store; the key with which agents prove to each other that they are of this round
does. The bytes are not encrypted, no more than those of collectives.
"""
