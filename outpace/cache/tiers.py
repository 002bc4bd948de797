"""The levels of the prefix cache below the device's pages: which blocks host memory and files hold, and what is copied
between the levels. Ids and hashes only; no torch here.

What goes down. A block of the device is stored in host memory as soon as it is full and computed, so that evicting it
later costs nothing; a block of host memory is written to files while it is among those that will be evicted next. Both
are bounded, and what is evicted before its turn came is lost to the lower level: these are caches. What comes up is
asked for by a request that comes in: files to host memory, host memory to the device.

What a copy uses. Every copy holds a reference to each block of host memory and of files that it reads or writes until
it is reported done, so none of these is reused meanwhile. It holds none to blocks of the device, which must stay free
for requests: a step that reuses a block that is being stored runs after that copy (`Step.after`). Blocks that are
loaded belong to requests, which keep them until the load is done, even if they end before.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outpace.cache.block_pool import BlockPool
from outpace.types import Copy, Step, Way

MAX_STORING = 64  # blocks on their way to host memory; more wait for their turn
MAX_WRITING = 16  # blocks on their way to files
MAX_CLEAN = 256  # of the blocks that host memory evicts next, so many are written to files beforehand


@dataclass(slots=True)
class TierTotals:
    """What the levels below the device did so far."""

    host_hits: int = 0
    """Tokens that a request found in host memory."""
    host_queries: int = 0
    """Tokens that were looked for there, since the device did not have them."""
    file_hits: int = 0
    """Tokens that a request found in files."""
    file_queries: int = 0
    """Tokens that were looked for there, since host memory did not have them either."""
    copied: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    """Blocks by the way they took."""
    failed: int = 0
    """Blocks that could not be read from a file, or written to one."""


@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy on its way, and the hashes under which what it writes will be found."""

    copy: Copy
    keys: tuple[bytes, ...]
    kept: tuple[int, ...] = ()
    """Further blocks of host memory that must not be evicted meanwhile."""


class Tiers:
    """Blocks of host memory and of files, beside a device's `pool`, and the copies on their way. For one thread."""

    def __init__(
        self,
        pool: BlockPool,
        num_host_blocks: int = 0,
        num_file_blocks: int = 0,
        *,
        keep_prefixes: bool = False,
        totals: TierTotals | None = None,
    ) -> None:
        """keep_prefixes: host memory is a level of the prefix cache, and not for preempted requests alone."""
        self.keep_prefixes = keep_prefixes and pool.enable_prefix_caching and num_host_blocks > 0
        self.pool = pool
        self.host = BlockPool(num_host_blocks, pool.block_size, enable_prefix_caching=self.keep_prefixes)
        self.files = BlockPool(num_file_blocks, pool.block_size, enable_prefix_caching=self.keep_prefixes)
        self.totals = totals or TierTotals()
        self._copying: dict[int, _Copying] = {}
        self._copied: list[int] = []  # reported done since the last step
        self._full: dict[int, bytes] = {}  # blocks of the device that are to be stored
        self._storing: dict[int, set[int]] = {}  # blocks of the device, and the copies that read them
        self._loading: dict[int, int] = {}  # blocks of the device, and the copy that writes them
        self._arriving: dict[bytes, int] = {}  # on their way to host memory, and the copy that brings them
        self._writing: set[bytes] = set()  # on their way to files
        self._num_copies = 0

    @property
    def num_in_flight(self) -> int:
        """Copies on their way."""
        return len(self._copying)

    @property
    def num_loading(self) -> int:
        """Blocks on their way up."""
        return self._num_on(Way.LOAD) + self._num_on(Way.READ)

    def begin(self, step: Step) -> None:
        """Put into a new step which copies are done, and those that go down."""
        step.copied, self._copied = self._copied, []
        self._store_full(step)
        self._write_idle(step)

    def add_full(self, block: int, key: bytes) -> None:
        """A block of the device that is full and computed: host memory gets a copy when there is time."""
        if self.keep_prefixes and key not in self.host:
            self._full[block] = key

    def reuse(self, blocks: Sequence[int], step: Step) -> None:
        """Blocks of the device that a step, or a copy of it, writes to: that must wait for copies which read them."""
        if self._storing:
            busy = {copy_id for block in blocks for copy_id in self._storing.get(block, ())}
            step.after += sorted(busy.difference(step.after))

    def swap_out(self, blocks: Sequence[int], step: Step) -> tuple[list[int], int | None] | None:
        """Host blocks with what these blocks of the device hold, for a request that gives way; None: no room.

        With them the copy that has to be done before they are read, unless host memory had them all.
        """
        found = [self.host.find(self.pool.key_of(block)) for block in blocks]
        shared = [place for place in found if place is not None]
        self.host.share(shared)
        fresh = self.host.allocate(len(blocks) - len(shared))
        if fresh is None:
            self.host.release(shared)
            return None
        missing = [block for block, place in zip(blocks, found, strict=True) if place is None]
        copy_id = None
        if missing:
            self.host.share(fresh)
            copy_id = self._add(step, Way.STORE, zip(missing, fresh, strict=True)).copy_id
        rest = iter(fresh)
        return [next(rest) if place is None else place for place in found], copy_id

    def load(self, sources: Sequence[int], blocks: Sequence[int], step: Step) -> int:
        """Begin to load host blocks, to each of which the copy takes over a reference; its id."""
        return self._add(step, Way.LOAD, zip(sources, blocks, strict=True)).copy_id

    def loading(self, blocks: Sequence[int]) -> set[int]:
        """Copies that still write to these blocks of the device."""
        return {self._loading[block] for block in blocks if block in self._loading} if self._loading else set()

    def is_in_flight(self, copy_id: int | None) -> bool:
        """Whether a copy has not been reported done."""
        return copy_id in self._copying

    def read(self, found: Sequence[int], keys: Sequence[bytes], step: Step) -> int | None:
        """Begin to read the first of these hashes, as far as files have them, and keep what host memory has `found`.

        The id of the copy, which may be another request's; None: there is nothing to read, or no room.
        """
        if not keys or not self.files.num_blocks:
            return None
        if keys[0] in self._arriving:
            return self._arriving[keys[0]]
        self.host.share(found)
        blocks = self.files.match(keys)[: self.host.num_free]
        if not blocks:
            self.host.release(found)
            return None
        self.files.share(blocks)
        targets = self.host.allocate(len(blocks))
        assert targets is not None, "there is room"
        pairs = zip(blocks, targets, strict=True)
        return self._add(step, Way.READ, pairs, keys[: len(blocks)], tuple(found)).copy_id

    def take(self, copied: Mapping[int, tuple[int, ...]]) -> list[int]:
        """Take in which copies are done, and which of their pairs failed; their ids, in the order they began."""
        found = sorted(copied)
        for copy_id in found:
            self._end(self._copying.pop(copy_id), frozenset(copied[copy_id]))
        self._copied += found
        return found

    def check(self, held: Counter[int]) -> None:
        """Assert every invariant; `held`: references to host blocks that requests have."""
        held, files = Counter(held), Counter[int]()
        for each in self._copying.values():
            sources, targets = zip(*each.copy.pairs, strict=True)
            held.update(each.kept)
            held.update(targets if each.copy.way in (Way.STORE, Way.READ) else sources)
            if each.copy.way in (Way.WRITE, Way.READ):
                files.update(targets if each.copy.way is Way.WRITE else sources)
            written = [target for target in targets if each.copy.way in (Way.STORE, Way.READ)]
            assert all(self.host.key_of(block) is None for block in written), "a block is found before it is written"
        self.host.check(held)
        self.files.check(files)
        for block, copy_id in self._loading.items():
            assert any(target == block for _, target in self._copying[copy_id].copy.pairs)
        stored = {each.copy.copy_id: each.copy.pairs for each in self._copying.values() if each.copy.way is Way.STORE}
        expected = {(block, copy_id) for copy_id, pairs in stored.items() for block, _ in pairs}
        assert expected == {(block, copy_id) for block, ids in self._storing.items() for copy_id in ids}
        assert set(self._arriving.values()) <= self._copying.keys()

    def _store_full(self, step: Step) -> None:
        """Store blocks of the device that are full, as long as they are what they were."""
        room = min(MAX_STORING - self._num_on(Way.STORE), self.host.num_free)
        chosen: dict[int, bytes] = {}
        while self._full and len(chosen) < room:
            block, key = next(iter(self._full.items()))
            del self._full[block]
            wanted = key not in self.host and key not in self._arriving
            if wanted and self.pool.key_of(block) == key and block not in self._loading:
                chosen[block] = key
        targets = self.host.allocate(len(chosen))
        assert targets is not None, "there is room"
        if targets:
            self._add(step, Way.STORE, zip(chosen, targets, strict=True), tuple(chosen.values()))

    def _write_idle(self, step: Step) -> None:
        """Write those blocks to files that host memory will evict next."""
        room = min(MAX_WRITING - self._num_on(Way.WRITE), self.files.num_free)
        window = min(MAX_CLEAN, -(-self.host.num_blocks // 2)) - self.host.num_empty
        if room <= 0 or window <= 0:
            return
        next_ones = islice(self.host.idle(), window)
        dirty = ((block, key) for block, key in next_ones if key not in self.files and key not in self._writing)
        chosen = dict(islice(dirty, room))
        targets = self.files.allocate(len(chosen))
        assert targets is not None, "there is room"
        if targets:
            self.host.share(chosen)
            self._add(step, Way.WRITE, zip(chosen, targets, strict=True), tuple(chosen.values()))

    def _num_on(self, way: Way) -> int:
        """Blocks on this way."""
        return sum(len(each.copy.pairs) for each in self._copying.values() if each.copy.way is way)

    def _add(
        self,
        step: Step,
        way: Way,
        pairs: Iterable[tuple[int, int]],
        keys: Sequence[bytes] = (),
        kept: tuple[int, ...] = (),
    ) -> Copy:
        copy = Copy(self._num_copies, way, tuple(pairs))
        self._num_copies += 1
        self._copying[copy.copy_id] = _Copying(copy, tuple(keys), kept)
        step.copies.append(copy)
        if way is Way.STORE:
            for block, _ in copy.pairs:
                self._storing.setdefault(block, set()).add(copy.copy_id)
        elif way is Way.LOAD:
            self._loading.update((block, copy.copy_id) for _, block in copy.pairs)
        if way is Way.WRITE:
            self._writing.update(keys)
        else:
            self._arriving.update(dict.fromkeys(keys, copy.copy_id))
        return copy

    def _end(self, copying: _Copying, failed: frozenset[int]) -> None:
        """Give back what a copy held, and let what it wrote be found."""
        copy, keys = copying.copy, copying.keys
        sources, targets = zip(*copy.pairs, strict=True)
        self.totals.copied[copy.way] += len(copy.pairs) - len(failed)
        self.totals.failed += len(failed)
        if copy.way is Way.STORE:
            for block in sources:
                self._storing[block].remove(copy.copy_id)
                if not self._storing[block]:
                    del self._storing[block]
        elif copy.way is Way.LOAD:
            for block in targets:
                del self._loading[block]
        elif copy.way is Way.READ:
            for place in failed:
                self.files.forget(sources[place])
        below = self.files if copy.way is Way.WRITE else self.host
        for place, key in enumerate(keys):
            if place not in failed:
                below.register(targets[place], key)
            if copy.way is Way.WRITE:
                self._writing.discard(key)
            elif self._arriving.get(key) == copy.copy_id:
                del self._arriving[key]
        self.host.release(copying.kept)
        if copy.way in (Way.READ, Way.WRITE):
            self.files.release(sources if copy.way is Way.READ else targets)
        # what was written to a file stays among those that are evicted next
        self.host.release(targets if copy.way in (Way.STORE, Way.READ) else sources, stale=copy.way is Way.WRITE)
