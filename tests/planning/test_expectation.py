"""The closed form: known formulas are special cases, and shares add up. A simulation checks it, too: test_simulate."""

import math
import random

import pytest

from elastic_ext.planning.advice import (
    LOST_STEPS,
    STALLS,
    WAITING,
    FailureClass,
    Supply,
    expect,
    most_within,
    out_for_repair,
    spares_for,
    waiting_share,
)

RATE_S = 2048 * 3.79e-3 / 86400


def one(recovery_s: float = 60.0, every_s: float = 300.0, **more) -> FailureClass:
    return FailureClass("a failure", 1.0, {"restart": recovery_s}, every_s, **more)


def test_dalys_complete_model_is_a_special_case():
    """The time of a segment of T with a save that takes w, where a restart takes R: exp(R/M) M (exp((T+w)/M) - 1)."""
    useful_s, save_s, restart_s, between_s = 600.0, 30.0, 120.0, 3000.0
    segment_s = math.exp(restart_s / between_s) * between_s * math.expm1((useful_s + save_s) / between_s)
    stalled = save_s / (useful_s + save_s)
    found = expect([one(restart_s, useful_s + save_s)], 1 / between_s, 1, stalled)
    assert found.productive == pytest.approx(useful_s / segment_s)


@pytest.mark.parametrize("nodes", [128, 512, 2048])
def test_metas_formula_is_its_first_order(nodes):
    """arXiv 2410.21680, where saves cost nothing."""
    rate = 6.5e-3
    found = expect([one(60.0, 600.0)], nodes * rate / 86400, nodes)
    assert found.productive == pytest.approx(1.0 - nodes * rate / 86400 * (60.0 + 600.0 / 2), rel=0.01)


def test_the_shares_add_up_to_one():
    choose = random.Random(1)
    for _ in range(200):
        shares = [choose.random() for _ in range(3)]
        classes = [
            FailureClass(
                str(number),
                share / sum(shares),
                {"found": 60 * choose.random(), "load": 600 * choose.random()},
                1 + 1000 * choose.random(),
                60 * choose.random(),
                choose.random() < 0.5,
            )
            for number, share in enumerate(shares)
        ]
        supply = Supply(choose.randrange(50), 1e5 * choose.random())
        found = expect(classes, choose.random() / 300, 100, choose.random() / 10, supply)
        assert found.productive + sum(found.lost.values()) == pytest.approx(1.0)
        assert min(found.productive, *found.lost.values()) >= 0
        assert found.held == pytest.approx(found.productive * 100 / (100 + supply.spares))


def test_each_loss_grows_with_what_causes_it():
    base = expect([one()], RATE_S, 2048)
    assert expect([one(every_s=600.0)], RATE_S, 2048).lost[LOST_STEPS] > 1.9 * base.lost[LOST_STEPS]
    assert expect([one(ready_s=150.0)], RATE_S, 2048).lost[LOST_STEPS] == pytest.approx(2 * base.lost[LOST_STEPS], rel=0.02)
    assert expect([one(recovery_s=120.0)], RATE_S, 2048).lost["restart"] == pytest.approx(2 * base.lost["restart"], rel=0.02)
    assert expect([one()], RATE_S, 2048, stalled=0.01).lost[STALLS] == pytest.approx(0.01, rel=0.02)
    assert base.dominates == LOST_STEPS
    assert expect([FailureClass("a failure", 1.0, {}, 0.0)], RATE_S, 2048).dominates == ""


def test_without_a_spare_each_repair_is_awaited():
    """One server: out / (1 + out)."""
    assert waiting_share(0.25, 0) == pytest.approx(0.2)
    found = expect([one(replaces=True)], RATE_S, 2048, supply=Supply(0, 0.25 / RATE_S))
    assert found.lost[WAITING] == pytest.approx(0.2)
    assert out_for_repair([one(replaces=True)], RATE_S, Supply(0, 0.25 / RATE_S)) == pytest.approx(0.25)
    assert waiting_share(5.0, None) == 0.0


@pytest.mark.parametrize(("out", "share"), [(0.01, 1e-3), (3.0, 1e-2), (32.7, 1e-3), (440.0, 1e-3)])
def test_as_many_spares_as_needed_and_no_more(out, share):
    spares = spares_for(out, share)
    assert waiting_share(out, spares) <= share < waiting_share(out, spares - 1) or spares == 0


@pytest.mark.parametrize(("mean", "risk"), [(0.01, 1e-3), (0.5, 1e-6), (20.0, 1e-3), (300.0, 1e-3)])
def test_a_budget_is_exceeded_as_rarely_as_asked(mean, risk):
    def above(most: int) -> float:
        return 1 - sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(most + 1))

    most = most_within(mean, risk)
    assert above(most) <= risk * 1.001
    assert most == 0 or above(most - 1) > risk
