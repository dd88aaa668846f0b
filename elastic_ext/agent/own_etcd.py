"""The agent's side of `--rdzv-endpoint=job:`: it waits for the etcd that the job brings, before its rendezvous connects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base import log_records
from elastic_ext.base.helper_process import HelperFailed
from elastic_ext.base.settings import Settings
from elastic_ext.failures.policy import EX_TRY_AGAIN, exit_code_for
from elastic_ext.own_etcd import bring
from elastic_ext.own_etcd.attachment import Attachment
from elastic_ext.rendezvous.contract import JOIN_TIMEOUT_S


def exit_for(error: Exception, settings: Settings) -> SystemExit:
    """Say what is wrong; return what ends the command: the exit code says that it may be tried again."""
    log_records.say(f"elastic_ext: {error}")
    return SystemExit(exit_code_for(EX_TRY_AGAIN, settings.exit_codes))


@contextmanager
def brought(
    attachment: Attachment, params: RendezvousParameters, settings: Settings
) -> Iterator[tuple[RendezvousParameters, Settings]]:
    """Give the parameters and settings of a rendezvous with the job's own etcd, once that serves.

    Raises:
        SystemExit: the members do not come up in time: the exit code says that it may be tried again.
    """
    try:
        access = attachment.await_access(float(params.config.get("join_timeout", JOIN_TIMEOUT_S)))
        changed = copy.copy(params)
        changed.endpoint = access.endpoints
        changed.local_addr = params.local_addr or attachment.own_address
        yield changed, bring.with_access(settings, access)
    except HelperFailed as error:
        attachment.close()
        raise exit_for(error, settings) from error
    except BaseException:
        attachment.close()
        raise
