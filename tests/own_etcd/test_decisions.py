"""What decides about the job's own etcd: where its members sit, when a keeper ends, which member is replaced by whom."""

from __future__ import annotations

import fnmatch

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.own_etcd import decisions, folder
from elastic_ext.own_etcd.decisions import KeeperRecord, KnownMember, Replacement, Situation
from elastic_ext.own_etcd.endpoint import early_options, is_job, make_plan, port_of
from elastic_ext.own_etcd.job import Program, parse_version

SLURM = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("endpoint", "listed", "hosts", "others"),
    [
        ("job:", SLURM, ("n1", "n2", "n3"), ("n4",)),
        ("job:", ("n1", "n2"), ("n1",), ("n2",)),
        ("job:localhost", (), ("localhost",), ()),
        ("job:localhost", SLURM, ("localhost",), ()),
        ("job:127.0.0.1,localhost,[::1]", (), ("127.0.0.1",), ()),
        ("job:a,b,c", (), ("a", "b", "c"), ()),
        (" job: a , b ,c,d ", (), ("a", "b", "c"), ("d",)),
        ("job:n3,n2,n1", SLURM, ("n3", "n2", "n1"), ("n4",)),
        ("job:a,a,b", (), ("a",), ("b",)),
        ("job:[fd00::1],fd00.example,c.example", (), ("fd00::1", "fd00.example", "c.example"), ()),
    ],
)
def test_one_member_below_three_hosts_else_three(endpoint, listed, hosts, others):
    assert is_job(endpoint)
    plan = make_plan(endpoint, "job1", listed)
    assert (plan.hosts, plan.others) == (hosts, others)
    assert plan.client_port == port_of("job1")


def test_a_clients_port_precedes_the_peers_port():
    plan = make_plan("job:a,b,[::2]:7000", "job1", ())
    assert plan.endpoints == "https://a:7000,https://b:7000,https://[::2]:7000"
    assert plan.initial_cluster == "a=https://a:7001,b=https://b:7001,::2=https://[::2]:7001"
    assert make_plan("job::7000", "job1", SLURM).client_port == 7000


def test_default_ports_are_below_those_of_the_kernel():
    ports = {port_of(f"job{number}") for number in range(2000)}
    assert len(ports) > 1500
    assert min(ports) >= 20000
    assert max(ports) + 1 < 32768
    assert all(port % 2 == 0 for port in ports)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("job:", "no hosts are named, and Slurm lists none"),
        ("job:a,localhost,b", "localhost means another machine on each host"),
        ("job:a,b c,d", "'b c' is no host"),
        ("job:http://a", "no host"),
        ("job:a:65535", "a port from 1 to 65534"),
        ("job:a:0", "a port from 1 to 65534"),
        ("job:u:secret@a", "no host"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(endpoint, said):
    with pytest.raises(UsageError, match=said) as error:
        make_plan(endpoint, "job1", ())
    assert "\n" not in str(error.value)


def test_an_ordinary_endpoint_is_none_of_ours():
    for endpoint in ("etcd0:2379", "localhost:0", "job:2379", "jobs:2379", "https://job:2379", "job1:2379"):
        assert not is_job(endpoint)


def situation(**more: object) -> Situation:
    known = {"agents": 0, "had_agents": True, "is_member": True, "over": True, "elsewhere": False, "orderly": False}
    return Situation(started=100.0, **{**known, **more})


@pytest.mark.parametrize(
    ("seen", "now", "ends"),
    [
        (situation(agents=1), 1e6, False),
        (situation(agents=1, signalled=100.0, silent=100.0), 1e6, False),  # its agent may still need it
        (situation(), 101.0, True),
        (situation(elsewhere=True), 1e6, False),
        (situation(over=False), 1e6, False),  # its agent was killed, and may be started again
        (situation(over=False, orderly=True), 101.0, True),
        (situation(over=False, elsewhere=True, orderly=True), 1e6, False),
        (situation(over=False, signalled=100.0), 101.0, True),  # by the keeper of the next run
        (situation(is_member=False, over=False, elsewhere=True), 101.0, True),
        (situation(had_agents=False), 129.0, False),
        (situation(had_agents=False), 130.0, True),
        (situation(over=False, silent=200.0), 229.0, False),
        (situation(over=False, silent=200.0), 230.0, True),
        (situation(elsewhere=True, signalled=200.0), 209.0, False),
        (situation(elsewhere=True, signalled=200.0, silent=150.0), 210.0, True),
    ],
)
def test_a_keeper_ends_when_nobody_needs_it(seen, now, ends):
    life = decisions.decide_end(seen, now)
    assert life.ends is ends
    if not ends and life.look_again is not None:
        assert life.look_again > now
        assert decisions.decide_end(seen, life.look_again).ends


@pytest.mark.parametrize(
    ("seen", "members", "now", "forgets"),
    [
        (situation(agents=1, silent=200.0), 3, 259.0, False),
        (situation(agents=1, silent=200.0), 3, 260.0, True),
        (situation(agents=1, silent=200.0), 1, 1e6, False),
        (situation(agents=1), 3, 1e6, False),
        (situation(agents=0, silent=200.0), 3, 260.0, False),  # it ends
        (situation(agents=1, silent=200.0, is_member=False), 3, 260.0, False),
    ],
)
def test_a_member_without_a_majority_forgets_its_data(seen, members, now, forgets):
    assert decisions.forgets_data(seen, members, now) is forgets


def host(number: int, member: bool = True) -> KeeperRecord:
    return KeeperRecord(f"peer{number}", f"client{number}", member, 1)


def known(number: int, started: bool = True, seen: bool = True) -> KnownMember:
    return KnownMember(number, f"peer{number}", started, seen)


ALL = [known(1), known(2), known(3)]
ORDER = ("h1", "h2", "h3", "h4", "h5")


@pytest.mark.parametrize(
    ("members", "hosts", "step"),
    [
        (ALL, {"h1": host(1), "h2": host(2), "h3": host(3), "h4": host(4, False)}, None),  # all live
        (ALL, {"h1": host(1), "h2": host(2)}, None),  # nobody could take its place: the majority holds
        (ALL, {"h1": host(1), "h2": host(2), "h4": host(4, False)}, (3, "")),
        (ALL, {"h1": host(1), "h4": host(4, False), "h5": host(5, False)}, None),  # no majority: nothing can be done
        (ALL[:2], {"h1": host(1), "h2": host(2), "h5": host(5, False), "h4": host(4, False)}, (0, "h4")),
        (ALL[:2], {"h1": host(1), "h2": host(2), "zz": host(9, False), "x": host(8, False)}, (0, "x")),
        # Called, not yet started: one step at a time.
        ([*ALL[:2], known(4, False, False)], {"h1": host(1), "h2": host(2), "h4": host(4, False), "h5": host(5, False)}, None),
        # Called, and lost before it started.
        ([*ALL[:2], known(4, False, False)], {"h1": host(1), "h2": host(2), "h5": host(5, False)}, (4, "")),
        # Called, and it has turned out that it cannot run one: the next host is.
        (
            [*ALL[:2], known(4, False, False)],
            {"h1": host(1), "h2": host(2), "h4": KeeperRecord("", "", False, 1), "h5": host(5, False)},
            (4, ""),
        ),
        (ALL, {"h1": host(1), "h2": host(2), "h4": KeeperRecord("", "", False, 1)}, None),  # the only other host has no etcd
        # A new machine under the old name.
        (ALL, {"h1": host(1), "h2": host(2), "h3": host(3, False)}, (3, "")),
    ],
)
def test_a_waiting_host_replaces_a_lost_member(members, hosts, step):
    found = decisions.next_step(3, members, hosts, ORDER, patient=False)
    assert (found and (found.remove, found.add)) == step


def test_a_never_seen_member_may_start_late():
    late = [*ALL[:2], known(3, seen=False)]
    hosts = {"h1": host(1), "h2": host(2), "h4": host(4, False)}
    assert decisions.next_step(3, late, hosts, ORDER, patient=True) is None
    assert decisions.next_step(3, late, hosts, ORDER, patient=False) is not None


def test_a_cluster_of_one_is_never_touched():
    assert decisions.next_step(1, [known(1)], {"h2": host(2, False)}, ORDER, patient=False) is None


def test_one_step_at_a_time_keeps_majorities():
    """Whatever is lost one after the other, while the rest is put right: after each step most members of the list live."""
    hosts = {f"h{number}": host(number, number <= 3) for number in range(1, 7)}
    members = list(ALL)
    for lost in range(1, 4):
        del hosts[f"h{lost}"]
        while (step := decisions.next_step(3, members, hosts, (), patient=False)) is not None:
            assert isinstance(step, Replacement)
            if step.remove:
                members = [each for each in members if each.member_id != step.remove]
            else:
                number = int(step.add[1:])
                members.append(known(number))
                hosts[step.add] = host(number)
            living = {record.peer for record in hosts.values() if record.member}
            assert sum(each.peer in living for each in members) > len(members) // 2
        assert len(members) == 3


def test_the_newest_good_program_is_taken():
    assert parse_version("etcd Version: 3.5.17\nGit SHA: x\n") == (3, 5, 17)
    assert parse_version("3.5.17") is None
    bad = {(3, 4, 30): False, (3, 5, 0): True, (3, 5, 2): True, (3, 5, 3): False, (3, 6, 0): False}
    assert {version: Program("", version, "").may_lose_writes for version in bad} == bad


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ("--rdzv-backend=ext_etcd --rdzv-endpoint=job:a --rdzv-id=r x.py --rdzv-id=other", ("job:a", "r")),
        ("--rdzv_backend ext_etcd --rdzv-endpoint job:a --nnodes 1:3 --rdzv_id r -m pkg.main", ("job:a", "r")),
        ("--rdzv-backend=ext_c10d --rdzv-endpoint=job:a --rdzv-id=r x.py", None),
        ("--rdzv-backend=ext_etcd --rdzv-endpoint=job:a x.py --rdzv-id=r", None),
        ("--rdzv-backend=ext_etcd --rdzv-endpoint=job:a --rdzv-id=r --rdzv-conf=broken x.py", None),
        ("x.py", None),
        ("", None),
    ],
)
def test_the_options_are_read_before_torch_is(argv, found):
    options = early_options(argv.split(), {})
    assert (options and (options.endpoint, options.run_id)) == found


def test_kubeflows_environment_is_read_the_command_line_wins():
    environ = {"PET_RDZV_BACKEND": "ext_etcd", "PET_RDZV_ENDPOINT": "job:a", "PET_RDZV_ID": "r", "PET_RDZV_CONF": "a=b, c=d"}
    options = early_options(["--rdzv-id=mine", "x.py"], environ)
    assert options is not None
    assert (options.endpoint, options.run_id, options.rdzv_conf) == ("job:a", "mine", {"a": "b", "c": "d"})


def test_a_predecessor_is_another_run_on_this_host():
    """Not the keeper of another host: several may share a machine's memory, and would end each other."""
    hosts = ("a", "b", "c")
    mine = folder.folder_of("job", hosts, "a", {})
    others = {
        "another host": folder.folder_of("job", hosts, "b", {}),
        "another job": folder.folder_of("job2", hosts, "a", {}),
        "before the requeue": folder.folder_of("job", hosts, "a", {"SLURM_RESTART_COUNT": "1"}),
        "with other hosts": folder.folder_of("job", ("a", "d", "e"), "a", {}),
    }
    assert [name for name, each in others.items() if fnmatch.fnmatch(each.name, folder.run_pattern(mine))] == [
        "before the requeue",
        "with other hosts",
    ]


def test_a_keepers_socket_path_fits_any_tmpdir(monkeypatch, tmp_path):
    """The kernel takes 107 bytes; the largest user id and the longest names of a run make the longest path."""
    monkeypatch.setattr(folder, "IN_MEMORY", str(tmp_path / "missing"))
    monkeypatch.setattr(folder.os, "geteuid", lambda: 2**32 - 2)
    monkeypatch.setattr(folder.tempfile, "tempdir", str(tmp_path))  # longer than 32 characters
    place = folder.folder_of("r" * 250, ("h" * 250,) * 3, "h" * 250, {"SLURM_RESTART_COUNT": "1" * 10})
    assert len(str(place / "socket.part")) <= 107


def test_members_of_two_runs_are_no_cluster():
    """On the same hosts and ports, with the same secret: what is left of the run before a requeue must not be joined."""
    hosts = ("a", "b", "c")
    before, after = (folder.folder_of("job", hosts, "a", {"SLURM_RESTART_COUNT": count}) for count in "01")
    assert folder.run_of(before) != folder.run_of(after)
    assert folder.run_of(after) == folder.run_of(folder.folder_of("job", hosts, "b", {"SLURM_RESTART_COUNT": "1"}))
