"""The errors that a script may want to catch; all of this package are in `elastic_ext.base.errors`."""

from elastic_ext.base.errors import ElasticExtError, RanksMissing, UsageError

__all__ = ["ElasticExtError", "RanksMissing", "UsageError"]
