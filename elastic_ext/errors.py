"""The errors that a script may want to catch. `elastic_ext.base.errors` defines all errors of this package."""

from elastic_ext.base.errors import ElasticExtError, RanksMissing, UsageError

__all__ = ["ElasticExtError", "RanksMissing", "UsageError"]
