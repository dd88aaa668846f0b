"""Errors of a node's work on the records of a job."""

from __future__ import annotations

from elastic_ext.base.errors import ElasticExtError


class LostRace(ElasticExtError):
    """Another node wrote first. `TaskRunner` tries the work again, on what is there by then."""


class Refused(ElasticExtError):
    """This host was told to leave the job and may not come back yet."""
