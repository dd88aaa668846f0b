"""The part of etcd's v3 wire protocol used here, as tables: messages with their fields, enums, and calls.

Source: api/etcdserverpb/rpc.proto and api/mvccpb/kv.proto of etcd 3.4 and 3.5. Only field numbers, types and the paths of the
calls go over the wire; package and file names do not, so all messages share one private package here.

The classes are built at run time in a descriptor pool of our own: generated code would be tied to a range of protobuf
versions, and the default pool refuses a second `auth.proto` (aetcd, pyetcd and etcd3 itself would clash with ours).
"""

from __future__ import annotations

import functools
import types
from typing import Any, TypeAlias

Message: TypeAlias = Any
"""An object of a class that is made here at run time: a type checker knows none of its fields."""

# message, then field:type=number. `type[]` is repeated; a trailing `|name` makes the field a member of that oneof.
_MESSAGES = """
KeyValue key:bytes=1 create_revision:int64=2 mod_revision:int64=3 version:int64=4 value:bytes=5 lease:int64=6
Event type:Event.EventType=1 kv:KeyValue=2
ResponseHeader cluster_id:uint64=1 member_id:uint64=2 revision:int64=3 raft_term:uint64=4

RangeRequest key:bytes=1 range_end:bytes=2 limit:int64=3 revision:int64=4 sort_order:RangeRequest.SortOrder=5
    sort_target:RangeRequest.SortTarget=6 serializable:bool=7 keys_only:bool=8 count_only:bool=9
    max_create_revision:int64=13
RangeResponse header:ResponseHeader=1 kvs:KeyValue[]=2 more:bool=3 count:int64=4
PutRequest key:bytes=1 value:bytes=2 lease:int64=3
PutResponse header:ResponseHeader=1
DeleteRangeRequest key:bytes=1 range_end:bytes=2
DeleteRangeResponse header:ResponseHeader=1 deleted:int64=2

Compare result:Compare.CompareResult=1 target:Compare.CompareTarget=2 key:bytes=3 version:int64=4|target_union
    create_revision:int64=5|target_union mod_revision:int64=6|target_union value:bytes=7|target_union lease:int64=8|target_union
    range_end:bytes=64
RequestOp request_range:RangeRequest=1|request request_put:PutRequest=2|request
    request_delete_range:DeleteRangeRequest=3|request request_txn:TxnRequest=4|request
ResponseOp response_range:RangeResponse=1|response response_put:PutResponse=2|response
    response_delete_range:DeleteRangeResponse=3|response response_txn:TxnResponse=4|response
TxnRequest compare:Compare[]=1 success:RequestOp[]=2 failure:RequestOp[]=3
TxnResponse header:ResponseHeader=1 succeeded:bool=2 responses:ResponseOp[]=3

WatchRequest create_request:WatchCreateRequest=1|request_union cancel_request:WatchCancelRequest=2|request_union
WatchCreateRequest key:bytes=1 range_end:bytes=2 start_revision:int64=3 progress_notify:bool=4
    filters:WatchCreateRequest.FilterType[]=5 watch_id:int64=7
WatchCancelRequest watch_id:int64=1
WatchResponse header:ResponseHeader=1 watch_id:int64=2 created:bool=3 canceled:bool=4 compact_revision:int64=5
    cancel_reason:string=6 events:Event[]=11

LeaseGrantRequest TTL:int64=1 ID:int64=2
LeaseGrantResponse header:ResponseHeader=1 ID:int64=2 TTL:int64=3 error:string=4
LeaseRevokeRequest ID:int64=1
LeaseRevokeResponse header:ResponseHeader=1
LeaseKeepAliveRequest ID:int64=1
LeaseKeepAliveResponse header:ResponseHeader=1 ID:int64=2 TTL:int64=3
LeaseTimeToLiveRequest ID:int64=1 keys:bool=2
LeaseTimeToLiveResponse header:ResponseHeader=1 ID:int64=2 TTL:int64=3 grantedTTL:int64=4 keys:bytes[]=5

Member ID:uint64=1 name:string=2 peerURLs:string[]=3 clientURLs:string[]=4
MemberListRequest
MemberListResponse header:ResponseHeader=1 members:Member[]=2
MemberAddRequest peerURLs:string[]=1
MemberAddResponse header:ResponseHeader=1 member:Member=2 members:Member[]=3
MemberRemoveRequest ID:uint64=1
MemberRemoveResponse header:ResponseHeader=1 members:Member[]=2
AlarmRequest action:AlarmRequest.AlarmAction=1 memberID:uint64=2 alarm:AlarmType=3
AlarmMember memberID:uint64=1 alarm:AlarmType=2
AlarmResponse header:ResponseHeader=1 alarms:AlarmMember[]=2
StatusRequest
StatusResponse header:ResponseHeader=1 version:string=2 dbSize:int64=3 leader:uint64=4 raftIndex:uint64=5 raftTerm:uint64=6
AuthenticateRequest name:string=1 password:string=2
AuthenticateResponse header:ResponseHeader=1 token:string=2
"""

# enum, then its values, numbered from 0
_ENUMS = """
AlarmType NONE NOSPACE CORRUPT
AlarmRequest.AlarmAction GET ACTIVATE DEACTIVATE
Event.EventType PUT DELETE
RangeRequest.SortOrder NONE ASCEND DESCEND
RangeRequest.SortTarget KEY VERSION CREATE MOD VALUE
Compare.CompareResult EQUAL GREATER LESS NOT_EQUAL
Compare.CompareTarget VERSION CREATE MOD VALUE LEASE
WatchCreateRequest.FilterType NOPUT NODELETE
"""

# service.method request response; `*` marks a stream. KV.Put is for benchmarks; etcd3 needs the stub of Cluster.
_CALLS = """
KV.Range RangeRequest RangeResponse
KV.Put PutRequest PutResponse
KV.Txn TxnRequest TxnResponse
Watch.Watch *WatchRequest *WatchResponse
Lease.LeaseGrant LeaseGrantRequest LeaseGrantResponse
Lease.LeaseRevoke LeaseRevokeRequest LeaseRevokeResponse
Lease.LeaseKeepAlive *LeaseKeepAliveRequest *LeaseKeepAliveResponse
Lease.LeaseTimeToLive LeaseTimeToLiveRequest LeaseTimeToLiveResponse
Cluster.MemberList MemberListRequest MemberListResponse
Cluster.MemberAdd MemberAddRequest MemberAddResponse
Cluster.MemberRemove MemberRemoveRequest MemberRemoveResponse
Maintenance.Alarm AlarmRequest AlarmResponse
Maintenance.Status StatusRequest StatusResponse
Auth.Authenticate AuthenticateRequest AuthenticateResponse
"""

_PACKAGE = "elastic_ext_etcdpb"


@functools.lru_cache(maxsize=1)
def etcdrpc() -> types.ModuleType:
    """Return a module with the message classes, the values of AlarmType and the stubs, named as in etcd3's own `etcdrpc`."""
    from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]

    file = file_descriptor()
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    module = types.ModuleType("etcd3.etcdrpc")
    for message in file.message_type:
        descriptor = pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}")
        if hasattr(message_factory, "GetMessageClass"):
            message_class = message_factory.GetMessageClass(descriptor)
        else:  # protobuf before 4.22
            message_class = message_factory.MessageFactory(pool).GetPrototype(descriptor)
        setattr(module, message.name, message_class)
    for enum in file.enum_type:
        for value in enum.value:
            setattr(module, value.name, value.number)
    for service, methods in calls().items():
        setattr(module, f"{service}Stub", _stub_class(module, service, methods))
    return module


def file_descriptor() -> Message:
    """Return the tables as one FileDescriptorProto."""
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto(name="elastic_ext_etcd.proto", package=_PACKAGE, syntax="proto3")
    messages: dict[str, Message] = {}
    for words in _rows(_MESSAGES):
        messages[words[0]] = file.message_type.add(name=words[0])
    enums = {words[0]: words[1:] for words in _rows(_ENUMS)}
    for path, names in enums.items():
        owner, _, name = path.rpartition(".")
        enum = messages[owner].enum_type.add(name=name) if owner else file.enum_type.add(name=name)
        for number, value in enumerate(names):
            enum.value.add(name=value, number=number)
    for words in _rows(_MESSAGES):
        for text in words[1:]:
            _add_field(messages[words[0]], text, enums)
    return file


def _add_field(message: Message, text: str, enums: dict[str, list[str]]) -> None:
    field_text, _, oneof = text.partition("|")
    name, _, rest = field_text.partition(":")
    type_name, _, number = rest.partition("=")
    field = message.field.add(name=name, number=int(number), label="LABEL_OPTIONAL")
    if type_name.endswith("[]"):
        type_name = type_name[:-2]
        field.label = field.LABEL_REPEATED
    if type_name in ("bytes", "string", "bool", "int64", "uint64"):
        field.type = field.Type.Value(f"TYPE_{type_name.upper()}")
    else:
        field.type = field.TYPE_ENUM if type_name in enums else field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{type_name}"
    if oneof:
        if oneof not in [declared.name for declared in message.oneof_decl]:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = [declared.name for declared in message.oneof_decl].index(oneof)


def _rows(table: str) -> list[list[str]]:
    """Split each row into words; an indented line continues the row above."""
    return [row.split() for row in table.replace("\n    ", " ").splitlines() if row]


def calls() -> dict[str, list[tuple[str, str, str]]]:
    services: dict[str, list[tuple[str, str, str]]] = {}
    for path, request, response in _rows(_CALLS):
        service, _, method = path.partition(".")
        services.setdefault(service, []).append((method, request, response))
    return services


def _stub_class(module: types.ModuleType, service: str, methods: list[tuple[str, str, str]]) -> type:
    def connect(self: Any, channel: Any) -> None:
        for method, request, response in methods:
            multi = channel.stream_stream if request.startswith("*") else channel.unary_unary
            serialize = getattr(module, request.lstrip("*")).SerializeToString
            parse = getattr(module, response.lstrip("*")).FromString
            path = f"/etcdserverpb.{service}/{method}"
            setattr(self, method, multi(path, request_serializer=serialize, response_deserializer=parse))

    return type(f"{service}Stub", (), {"__init__": connect})
