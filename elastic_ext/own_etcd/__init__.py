"""An etcd that the job brings: `--rdzv-endpoint=job:` starts it on the job's own hosts, and it ends with the job.

    endpoint            what `job:...` asks for
    job                 what a keeper is given: which host this one is, and etcd's program
    certificates        what keeps strangers out: the job's secret, and what is made from it
    folder, member      the place of its files and its locks, one running member
    keeper, launch      the process that runs a member, and the agent's end of it
    cluster             what the keepers of a job know of each other, and the keys by which they report it
    housekeeping        what a keeper does in etcd while it runs
    decisions           when a keeper ends; when a member is replaced: pure
    saved_keys          what outlives the job, in a file

The first hosts run a member each: one where there are fewer than three, else three. Every host of the job has a keeper: one
process that all agents of that host share (`keeper`). The rest of the program sees endpoints and TLS files, as of any etcd.
"""
