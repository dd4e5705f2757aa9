"""Bytes of all tensors that are alive, each storage once: of what is rehearsed, after every operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from fourfold.collectives.operations import Operations


class LiveBytes(Operations):
    """While it is entered, every tensor that an operation gives is counted until its storage is gone or emptied.

    now, most: bytes alive, and the most there were since `begin`. at: the number of the operation, since `begin`, after
    which that was so. A kernel's own workspace is no tensor, and is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.at = 0
        self._operation = 0
        self._size: dict[int, int] = {}
        self._look: tuple[int, Callable[[], None]] | None = None
        self._patched = ExitStack()

    def elsewhere(self, tensor: Tensor) -> None:
        """It, and its views, take no memory: they lie in a file."""
        self._know(tensor)
        self._set(tensor.untyped_storage()._cdata, 0)

    def begin(self, look_at: int = 0, look: Callable[[], None] | None = None) -> None:
        """Count operations, and the most, anew. look: called right after operation `look_at`."""
        self.most, self.at, self._operation = self.now, 0, 0
        self._look = None if look is None else (look_at, look)
        self._look_if_due()

    def __enter__(self) -> Self:
        # A storage that is emptied and filled again, as FSDP2 does with what it gathers, is no operation of torch.
        resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._size:
                self._set(storage._cdata, size)

        UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        self._patched.callback(setattr, UntypedStorage, "resize_", resize)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patched.close()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Operations.run`."""
        result = super().run(func, args, kwargs)
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor) and leaf.device.type != "meta"
            ):  # which has no memory, as of other stages
                self._know(leaf)
        self._operation += 1
        if self.now > self.most:
            self.most, self.at = self.now, self._operation
        self._look_if_due()
        return result

    def _look_if_due(self) -> None:
        if self._look is not None and self._operation == self._look[0]:
            self._look[1]()

    def _know(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._size:
            self._size[place] = 0
            weakref.finalize(storage, self._gone, place)
            self._set(place, storage.nbytes())

    def _set(self, place: int, size: int) -> None:
        self.now += size - self._size[place]
        self._size[place] = size

    def _gone(self, place: int) -> None:
        self.now -= self._size.pop(place)
