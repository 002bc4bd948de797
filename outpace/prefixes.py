"""Prefix cache lookups: the blocks of a request that are on the device, in host memory or in files."""

from outpace.cache.block_pool import BlockPool, block_hashes
from outpace.cache.tiers import Tiers
from outpace.sequence import Sequence
from outpace.step_plan import Totals
from outpace.types import Step


class Prefixes:
    """Finds, loads and registers shared blocks by the hashes of their tokens. It knows nothing of queues."""

    def __init__(self, pool: BlockPool, tiers: Tiers, totals: Totals) -> None:
        self._pool, self._tiers, self._totals = pool, tiers, totals
        self.awaiting: dict[int, list[Sequence]] = {}
        """Sequences waiting for each copy, by copy id."""

    def hash(self, sequence: Sequence) -> None:
        """Compute the hashes of its full blocks that are missing."""
        if self._pool.enable_prefix_caching:
            block_hashes(sequence.tokens, self._pool.block_size, sequence.salt, sequence.hashes)

    def register(self, sequence: Sequence, full: int) -> None:
        """Register its first `full` blocks, which are full and computed, in the pool."""
        if self._pool.enable_prefix_caching:
            self.hash(sequence)
            for index in range(sequence.num_registered, full):
                self._pool.register(sequence.blocks[index], sequence.hashes[index])
                self._tiers.add_full(sequence.blocks[index], sequence.hashes[index])
            sequence.num_registered = full

    def find(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Cached blocks on the device that it can share, and the host memory blocks that follow them."""
        if sequence.host_blocks:
            return [], sequence.host_blocks
        keys = sequence.hashes[: self._most(sequence)]
        cached = self._pool.match(keys)
        return cached, self._tiers.host.match(keys[len(cached) :])

    def read_files(self, sequence: Sequence, cached: list[int], found: list[int], step: Step) -> bool:
        """Start reading from files what follows the found blocks, once per sequence; False: files do not have it."""
        if sequence.host_blocks or sequence.num_fetched_after is not None:
            return False
        start = len(cached) + len(found)
        copy_id = self._tiers.read(found, sequence.hashes[start : self._most(sequence)], step)
        if copy_id is None:
            return False
        sequence.num_fetched_after = start
        self.awaiting.setdefault(copy_id, []).append(sequence)
        return True

    def give(self, sequence: Sequence, cached: list[int], found: list[int], blocks: list[int], step: Step) -> None:
        """Give an admitted sequence its blocks: cached ones, and new ones into which host memory blocks are loaded.

        The references are already counted. The sequence is in flight until the loads are done.
        """
        loads = self._tiers.loading(cached)
        if found:
            loads.add(self._tiers.load(found, blocks, step))
        sequence.blocks = cached + blocks
        if sequence.host_blocks:
            self._tiers.host.release(sequence.host_blocks)
            sequence.host_blocks, sequence.swapping = [], None
        else:
            self.let_fetched_go(sequence)
            self._count_hits(sequence, len(cached), len(found))
            for block, key in zip(blocks, sequence.hashes[len(cached) :], strict=False):
                self._pool.register(block, key)  # sequences admitted meanwhile wait for the same load
            sequence.num_registered = len(sequence.blocks)
            sequence.num_computed = len(sequence.blocks) * self._pool.block_size
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
        for copy_id in loads:
            self.awaiting.setdefault(copy_id, []).append(sequence)
        sequence.in_flight += len(loads)

    def hold_fetched(self, sequence: Sequence) -> None:
        """Hold the blocks of its prompt that are now in host memory until it is admitted."""
        found = (self._tiers.host.find(key) for key in sequence.hashes[: self._most(sequence)])
        sequence.fetched_blocks = [block for block in found if block is not None]
        self._tiers.host.share(sequence.fetched_blocks)

    def let_fetched_go(self, sequence: Sequence) -> None:
        """Release the blocks held for it."""
        self._tiers.host.release(sequence.fetched_blocks)
        sequence.fetched_blocks = []

    def _most(self, sequence: Sequence) -> int:
        """Most blocks that it can share. At least one token must be computed, for some requests the whole prompt."""
        return 0 if sequence.request.reads_whole_prompt else (len(sequence.tokens) - 1) // self._pool.block_size

    def _count_hits(self, sequence: Sequence, cached: int, found: int) -> None:
        """Count cache queries and hits on each level."""
        totals, size, tokens = self._totals, self._pool.block_size, len(sequence.tokens)
        start = sequence.num_fetched_after
        fetched = 0 if start is None else max(0, cached + found - max(start, cached))
        totals.prefix_queries += tokens
        totals.prefix_hits += (cached + found) * size
        if self._tiers.keep_prefixes:
            totals.tiers.host_queries += tokens - cached * size
            totals.tiers.host_hits += (found - fetched) * size
        if self._tiers.files.num_blocks:
            totals.tiers.file_queries += tokens - (cached + found - fetched) * size
            totals.tiers.file_hits += fetched * size
