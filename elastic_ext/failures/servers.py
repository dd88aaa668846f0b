"""What a server has answered, as its client's exception says it: a status of HTTP, or an error code of the service. Pure.

Words change with each client and version, codes do not: so a rule asks for the code, and for the classes of clients.
"""

from __future__ import annotations

import re

STORAGE_CLIENTS = (
    "botocore.", "boto3.", "s3fs.", "gcsfs.", "fsspec.", "aiobotocore.", "s3transfer.", "google.api_core.",
    "google.cloud.storage", "google.resumable_media.", "azure.core.", "azure.storage", "adlfs.", "s3torchconnectorclient.",
)  # fmt: skip
# Hubs, trackers and other servers of HTTP or gRPC.
SERVICE_CLIENTS = (
    "requests.", "urllib3.", "urllib.error.", "http.client.", "aiohttp.", "httpx.", "httpcore.", "grpc.", "google.auth.",
    "huggingface_hub.", "openai.", "wandb.", "neptune.", "comet_ml.", "clearml.", "mlflow.",
)  # fmt: skip
CLIENTS = (*STORAGE_CLIENTS, *SERVICE_CLIENTS)
# Classes of clients by their bare names, as a traceback or an old record may have them; transformers raises the hub's answer as
# a bare OSError.
CLIENT_ERRORS = frozenset(
    {"OSError", "HTTPError", "ClientError", "HfHubHTTPError", "HttpError", "HttpResponseError", "RestException",
     "MlflowException", "_InactiveRpcError", "CommError"}
)  # fmt: skip

UNREACHABLE = frozenset({"unavailable", "deadline_exceeded", "aborted", "internal", "unknown", "cancelled"})  # of gRPC
EXPIRED = frozenset({"expiredtoken", "expiredtokenexception", "tokenrefreshrequired", "requestexpired"})
BUSY = "busy"  # "Try again later": the server says something of itself
REFUSED = "refused"  # the request itself: credentials, a name, a parameter. Another try gets the same answer
# Parts of codes. A code that has none of them says neither: another try may show.
_BUSY_CODES = frozenset({"408", "425", "429", "operationaborted"})
_BUSY_PARTS = ("throttl", "limitexceeded", "limit_exceeded", "slowdown", "unavailable", "internal", "timeout", "timedout", "busy",
               "toomany", "notinitialized")  # fmt: skip
_REFUSED_CODES = frozenset({"400", "401", "403", "404", "410", "422"})
_REFUSED_PARTS = ("denied", "auth", "invalid", "nosuch", "notfound", "not_found", "not_exist", "missing", "malformed",
                  "signature", "forbidden")  # fmt: skip
_SUCCESS = re.compile(r"[123]\d\d")

_CODE = r"([1-5]\d\d)"
_HTTP = re.compile(
    "|".join(
        (
            rf"\b{_CODE} (?:client|server) error\b",  # requests, huggingface_hub
            rf"\b(?:client|server) error '{_CODE} ",  # httpx
            rf"\bhttp error {_CODE}\b",  # urllib
        )
    )
)
_STATUS = re.compile(
    "|".join(
        (
            rf"\A{_CODE}(?:, message=| [a-z])",  # aiohttp, google.api_core
            rf"\bhttp {_CODE}\b",
            rf"\bstatus(?:[ _]code)?:? ?{_CODE}\b",
            rf"\berror(?: code)?:? \(?{_CODE}\b",  # openai, mlflow, W&B
            rf", {_CODE}\Z",  # gcsfs
        )
    )
)
_ERROR_CODE = re.compile(
    "|".join(
        (
            r"\ban error occurred \((\w{1,80})\)",  # botocore
            r"\A\((\w{1,80})\) ",  # azure.core, and botocore cut short
            r"\berrorcode:\s?(\w{1,80})",  # azure.core
            r"\bstatuscode\.(\w{1,80})",  # grpc
            r"<code>(\w{1,80})</code>",  # the XML of an object store
            r"\A([a-z]{1,40}_[a-z_]{1,80}): ",  # mlflow
        )
    )
)


def answers(message: str, words: str, of_client: bool) -> frozenset[str]:
    """Return the status and the error codes that a client's exception names, with BUSY and REFUSED for what they mean.

    message: in lower case. words: the same without what is in quotes or paths. of_client: whether its class is a client's own;
        else only a status of HTTP counts.
    """
    patterns = ((_HTTP, message), (_STATUS, words), (_ERROR_CODE, message)) if of_client else ((_HTTP, message),)
    found = (next(filter(None, each.groups())) for pattern, text in patterns for each in pattern.finditer(text))
    said = {answer for answer in found if not _SUCCESS.fullmatch(answer)}
    busy = {each for each in said - UNREACHABLE if _is_busy(each)}
    refused = {each for each in said - busy - UNREACHABLE - EXPIRED if _is_refused(each)}
    return frozenset(said | ({BUSY} if busy else set()) | ({REFUSED} if refused else set()))


def _is_busy(code: str) -> bool:
    return code in _BUSY_CODES or (code[0] == "5" and code.isdecimal()) or any(part in code for part in _BUSY_PARTS)


def _is_refused(code: str) -> bool:
    return code in _REFUSED_CODES or any(part in code for part in _REFUSED_PARTS)
