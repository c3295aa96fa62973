"""What gRPC server reflection looks symbols up in."""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor


class ReflectionPool:
    """Python's default descriptor pool, and the one kind of symbol that it does not find: methods.

    The reflection protocol lets clients ask for the file that holds `package.Service.Method`, and some ask for nothing
    else.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        """Raises KeyError if there is no such symbol."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file

    def FindFileByName(self, file_name: str) -> FileDescriptor:  # noqa: N802
        return self._pool.FindFileByName(file_name)

    def FindMessageTypeByName(self, full_name: str) -> Descriptor:  # noqa: N802
        return self._pool.FindMessageTypeByName(full_name)

    def FindExtensionByNumber(self, message: Descriptor, number: int) -> FieldDescriptor:  # noqa: N802
        return self._pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Descriptor) -> list[FieldDescriptor]:  # noqa: N802
        return self._pool.FindAllExtensions(message)
