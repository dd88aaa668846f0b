"""leases.py ENDPOINT COUNT SECONDS: holds leases of 10 s, each with a client of its own, and prints how many were lost."""

import sys
import time

from elastic_ext.etcd import EtcdClient, LeaseSession

endpoint, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
clients = [EtcdClient(endpoint) for _ in range(count)]
sessions = [LeaseSession(client, 10) for client in clients]
print("held", flush=True)
sys.stdin.readline()
time.sleep(seconds)
print(f"lost {sum(session.lost.is_set() or session.alive_until < time.monotonic() for session in sessions)}", flush=True)
