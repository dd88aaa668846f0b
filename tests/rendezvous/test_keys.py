"""The keys of a job: versions of this package that share an etcd must agree on them."""

from elastic_ext.rendezvous.keys import JobKeys


def test_the_keys_of_a_job():
    keys = JobKeys("j")
    assert [keys.job, keys.header, keys.last_node, keys.ledger] == [
        f"/elastic_ext/j/{name}" for name in ("job", "round", "last", "ledger")
    ]
    assert keys.node("a") == "/elastic_ext/j/nodes/a"
    assert keys.assignment("a") == "/elastic_ext/j/assign/a"
    assert keys.offer("s", 3) == "/elastic_ext/j/offers/s/3"
    assert keys.charge(4) == "/elastic_ext/j/charges/4"
    assert keys.refusal("h") == "/elastic_ext/j/refused/h"


def test_every_prefix_is_one_of_its_keys():
    keys = JobKeys("j")
    for folder, key in (
        (keys.nodes, keys.node("a")),
        (keys.assignments, keys.assignment("a")),
        (keys.offers("s"), keys.offer("s", 3)),
        (keys.charges, keys.charge(4)),
        (keys.refusals, keys.refusal("h")),
    ):
        assert key.startswith(folder)
        assert folder.startswith(keys.prefix)
