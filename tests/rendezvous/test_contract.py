"""The contract between agent and rendezvous, and a node's record, are small: a feature adds a topic of the board instead."""

from dataclasses import fields

from elastic_ext.rendezvous.contract import Rendezvous, RoundPart
from elastic_ext.rendezvous.round_records import Node


def members(protocol):
    return {name for name in {**vars(protocol), **protocol.__annotations__} if not name.startswith("_")}


def test_the_contract_is_small():
    assert len(members(Rendezvous)) + len(members(RoundPart)) <= 28


def test_a_nodes_record_is_small():
    assert len(fields(Node)) <= 14
