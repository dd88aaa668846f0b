"""The rendezvous on etcd v3. `keys` lists every key; each module has one subject.

    What the agent uses         handler, connection (what outlives every round), round_store, exchange, fence, condition,
                                agent_policy
    One node in the job         participant, made of tasks, registration, header_record, own_assignment, own_watches, election,
                                recovery, outage, job_records
    Links to other nodes        links
    The leader's work           leader, made of node_records, members, job_upkeep, verdict
    From outside the job        save_request, job_status, connect

Importing this package imports none of them.
"""
