"""Our contract with LMCache's server is the server's own, as far as it goes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from baton.stack import lmcache_server
from protos.lmcache.mp import server_pb2


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    protos = "lib/python*/site-packages/lmcache/v1/multiprocess/transport/grpc_impl/protos/*.proto"
    files = sorted(lmcache_server.ENVIRONMENT.glob(protos))
    if not files:
        pytest.skip("LMCache is not installed (`make lmcache`)")
    out = tmp_path_factory.mktemp("protos") / "lmcache.bin"
    spec = find_spec("grpc_tools")
    assert spec is not None
    assert spec.origin is not None
    includes = [f"-I{files[0].parent}", f"-I{Path(spec.origin).parent / '_proto'}"]
    # A process of its own: protoc's C++ library and NIXL's don't live in one (the second to load aborts).
    protoc = [sys.executable, "-m", "grpc_tools.protoc"]
    subprocess.run([*protoc, *includes, f"--descriptor_set_out={out}", *map(str, files)], check=True)
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def ours() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    server_pb2.DESCRIPTOR.CopyToProto(file)
    return file


def fields(message: descriptor_pb2.DescriptorProto) -> dict[str, tuple[object, ...]]:
    return {
        field.name: (field.number, field.type, field.label, field.type_name, field.proto3_optional)
        for field in message.field
    }


def test_messages(theirs: descriptor_pb2.FileDescriptorSet) -> None:
    known = {f"{file.package}.{message.name}": message for file in theirs.file for message in file.message_type}
    assert len(ours().message_type) > 10
    for message in ours().message_type:
        assert fields(message) == fields(known[f"lmcache.mp.{message.name}"]), message.name


def test_methods(theirs: descriptor_pb2.FileDescriptorSet) -> None:
    known = {
        (file.package, service.name, method.name): method
        for file in theirs.file
        for service in file.service
        for method in service.method
    }
    assert len(ours().service) == 3
    for service in ours().service:
        for method in service.method:
            assert method == known["lmcache.mp", service.name, method.name]
