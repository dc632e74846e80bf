"""Who is decoded next: tenants share the rows alike, each in the order its requests came."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Waiting(Generic[Item]):
    """Lines of things that wait, one a tenant."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def push(self, tenant: str, items: Iterable[Item]) -> None:
        """Put things at the end of a tenant's line."""
        self._lines.setdefault(tenant, deque()).extend(items)

    def remove(self, tenant: str, unwanted: Callable[[Item], bool]) -> None:
        """Take out of a tenant's line what is not wanted any more."""
        kept = deque(item for item in self._lines.get(tenant, ()) if not unwanted(item))
        self._set(tenant, kept)

    def draw(self, running: Counter[str]) -> Iterator[Item]:
        """Take things out: next comes the tenant that has least, counting what is drawn.

        Args:
            running: how many each tenant has already; a tie goes to whose line is older.

        A caller that stops early has taken what it was given last: see `put_back`.
        """
        have = Counter(running)
        while self._lines:
            tenant = min(self._lines, key=lambda name: have[name])
            line = self._lines[tenant]
            item = line.popleft()
            self._set(tenant, line)
            have[tenant] += 1
            yield item

    def put_back(self, tenant: str, item: Item) -> None:
        """Put the thing drawn last back in front of its line."""
        self._lines.setdefault(tenant, deque()).appendleft(item)

    def _set(self, tenant: str, line: deque[Item]) -> None:
        if line:
            self._lines[tenant] = line
        else:
            self._lines.pop(tenant, None)
