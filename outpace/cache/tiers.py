"""The levels of the prefix cache below the device: which blocks host memory and files hold, and the copies between
the levels. Ids and hashes only; no torch.

Going down: a device block is stored in host memory as soon as it is full and computed, so that evicting it later costs
nothing. A host block is written to files while it is one of the next to be evicted. Both are limited per step; a block
that is evicted before its copy was made is lost to the lower level, as in any cache. Coming up: when a request is
admitted, its blocks are read from files to host memory, then copied from host memory to the device.

References: a copy holds a reference to each host and file block that it reads or writes until it is reported done, so
none of them is reused before. It holds none to device blocks, which must stay free for requests: a step that reuses a
device block which is still being stored runs after that copy (`Step.after`). Loaded blocks belong to their requests,
which keep them until the load is done, even if they end earlier.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outpace.cache.block_pool import BlockPool
from outpace.types import Copy, Step, Way

MAX_STORING = 64  # blocks being copied to host memory at a time
MAX_WRITING = 16  # blocks being written to files at a time
MAX_CLEAN = 256  # blocks written to files ahead of their eviction from host memory


@dataclass(slots=True)
class TierTotals:
    """Counters of the levels below the device."""

    host_hits: int = 0
    """Tokens found in host memory."""
    host_queries: int = 0
    """Tokens looked up in host memory: those not found on the device."""
    file_hits: int = 0
    """Tokens found in files."""
    file_queries: int = 0
    """Tokens looked up in files: those not found in host memory either."""
    copied: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    """Blocks copied, by route."""
    failed: int = 0
    """Blocks whose read from or write to a file failed."""


@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy in flight, and the hashes of the blocks it writes."""

    copy: Copy
    keys: tuple[bytes, ...]
    kept: tuple[int, ...] = ()
    """Further host memory blocks that must not be evicted until it is done."""


class Tiers:
    """Blocks in host memory and files below a device's `pool`, and the copies in flight. Not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        num_host_blocks: int = 0,
        num_file_blocks: int = 0,
        *,
        keep_prefixes: bool = False,
        totals: TierTotals | None = None,
    ) -> None:
        """keep_prefixes: host memory is a level of the prefix cache; False: it only holds preempted requests."""
        self.keep_prefixes = keep_prefixes and pool.enable_prefix_caching and num_host_blocks > 0
        self.pool = pool
        self.host = BlockPool(num_host_blocks, pool.block_size, enable_prefix_caching=self.keep_prefixes)
        self.files = BlockPool(num_file_blocks, pool.block_size, enable_prefix_caching=self.keep_prefixes)
        self.totals = totals or TierTotals()
        self._copying: dict[int, _Copying] = {}
        self._copied: list[int] = []  # copies reported done since the last step
        self._full: dict[int, bytes] = {}  # device blocks to store in host memory
        self._storing: dict[int, set[int]] = {}  # device blocks, and the copies that read them
        self._loading: dict[int, int] = {}  # device blocks, and the copy that writes them
        self._arriving: dict[bytes, int] = {}  # being read into host memory, and by which copy
        self._writing: set[bytes] = set()  # being written to files
        self._num_copies = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._copying)

    @property
    def num_loading(self) -> int:
        """Blocks being copied up, towards the device."""
        return self._num_on(Way.LOAD) + self._num_on(Way.READ)

    def begin(self, step: Step) -> None:
        """Tell a new step which copies are done, and add the copies that go down a level."""
        step.copied, self._copied = self._copied, []
        self._store_full(step)
        self._write_idle(step)

    def add_full(self, block: int, key: bytes) -> None:
        """Queue a full, computed device block to be stored in host memory."""
        if self.keep_prefixes and key not in self.host:
            self._full[block] = key

    def reuse(self, blocks: Sequence[int], step: Step) -> None:
        """Make a step that writes these device blocks wait for the copies that still read them."""
        if self._storing:
            busy = {copy_id for block in blocks for copy_id in self._storing.get(block, ())}
            step.after += sorted(busy.difference(step.after))

    def swap_out(self, blocks: Sequence[int], step: Step) -> tuple[list[int], int | None] | None:
        """Copy the device blocks of a preempted request to host blocks; None: no room.

        Also returns the copy that must finish before they are read; None if host memory already had them all.
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
        """Start copying host blocks to the device; the copy takes over a reference to each. Returns its id."""
        return self._add(step, Way.LOAD, zip(sources, blocks, strict=True)).copy_id

    def loading(self, blocks: Sequence[int]) -> set[int]:
        """Copies that still write these device blocks."""
        return {self._loading[block] for block in blocks if block in self._loading} if self._loading else set()

    def is_in_flight(self, copy_id: int | None) -> bool:
        """Whether a copy has not been reported done."""
        return copy_id in self._copying

    def read(self, found: Sequence[int], keys: Sequence[bytes], step: Step) -> int | None:
        """Start reading the longest run of these hashes that files have. Keeps the host blocks `found` before them.

        Returns the id of the copy, which may be one that another request started; None: nothing to read, or no room.
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
        """Record which copies are done and which of their pairs failed; returns their ids in the order they began."""
        found = sorted(copied)
        for copy_id in found:
            self._end(self._copying.pop(copy_id), frozenset(copied[copy_id]))
        self._copied += found
        return found

    def check(self, held: Counter[int]) -> None:
        """Assert every invariant. held: the references to host blocks that requests hold."""
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
        """Store queued device blocks, unless their contents have changed since."""
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
        """Write the blocks that host memory will evict next to files."""
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
        """Number of blocks in flight on this route."""
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
        """Release what a copy held, and add what it wrote to the prefix cache."""
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
        # blocks written to a file stay first in line for eviction
        self.host.release(targets if copy.way in (Way.STORE, Way.READ) else sources, stale=copy.way is Way.WRITE)
