"""The local directories of all nodes, seen as one: where a script saves on several nodes, each has a part of a save.

catalogue.py    what one node has, in one message
merging.py      which entries of all nodes are one, and what they lack (pure)
all_nodes.py    the same as a `Storage`, so that what chooses a checkpoint sees one directory
part_requests.py the wire protocol: who proves what to whom, and what is asked for
part_server.py  serves one node's directory to the others
peers.py        asks another node's server
fetching.py     makes the chosen save complete on this node
mirror_plan.py  which part of a save a node keeps for another one (pure)
mirrored.py     the parts that it keeps
"""
