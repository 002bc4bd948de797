"""The KV cache's block ids: which are free, in use, or cached prefixes that can be shared. No torch."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

from outpace.errors import ConfigError


def block_hashes(
    tokens: Sequence[int], block_size: int, salt: str = "", known: list[bytes] | None = None
) -> list[bytes]:
    """A hash for each full block, of the salt and all tokens up to its end; extends `known`, the first hashes."""
    hashes = [] if known is None else known
    # "surrogatepass": the salt is user text, and no text may crash the scheduler.
    parent = hashes[-1] if hashes else sha256(salt.encode("utf-8", "surrogatepass")).digest()
    for end in range((len(hashes) + 1) * block_size, len(tokens) + 1, block_size):
        parent = sha256(parent + array("q", tokens[end - block_size : end]).tobytes()).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks with reference counts. An unreferenced block with a cached prefix stays until its space is needed."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ConfigError(f"num_blocks={num_blocks}, block_size={block_size}: must be at least 0 and 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: empty ones and those that can be evicted."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_empty(self) -> int:
        """Free blocks without cached contents."""
        return len(self._empty)

    @property
    def num_used(self) -> int:
        """Blocks with contents: in use, or a cached prefix."""
        return self.num_blocks - len(self._empty)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. Call `share` to keep them."""
        blocks = []
        for key in hashes:
            block = self._cached.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks to write to, each with one reference, or None if there are not enough."""
        if count > self.num_free:
            return None
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int], *, stale: bool = False) -> None:
        """Drop a reference to each. The last blocks of a sequence are evicted before its first.

        stale: evict those that are now unreferenced before all others.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None
                    if stale:
                        self._evictable.move_to_end(block, last=False)

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """How many blocks would become free if these were released, each as often as it is listed."""
        return sum(self._references[block] == count for block, count in Counter(blocks).items())

    def register(self, block: int, key: bytes) -> None:
        """Add a full, computed block to the prefix cache; the first block with a hash keeps it."""
        assert self._references[block] > 0, f"block {block} has no reference"
        if self.enable_prefix_caching and self._hashes[block] is None and key not in self._cached:
            self._hashes[block] = key
            self._cached[key] = block

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached

    def find(self, key: bytes | None) -> int | None:
        """The cached block with this hash. Call `share` to keep it."""
        return None if key is None else self._cached.get(key)

    def key_of(self, block: int) -> bytes | None:
        """The hash under which a block is cached."""
        return self._hashes[block]

    def idle(self) -> Iterator[tuple[int, bytes]]:
        """Unreferenced blocks with their hashes, in order of eviction."""
        for block in self._evictable:
            key = self._hashes[block]
            assert key is not None
            yield block, key

    def forget(self, block: int) -> None:
        """Remove a block in use from the prefix cache: its contents do not match its hash."""
        assert self._references[block] > 0, f"block {block} has no reference"
        self._uncache(block)

    def check(self, held: Mapping[int, int] | None = None) -> None:
        """Assert every invariant; with `held`, also that these are all the references."""
        kinds = Counter(self._empty) + Counter(self._evictable.keys())
        for block, (references, key) in enumerate(zip(self._references, self._hashes, strict=True)):
            assert references >= 0
            assert kinds[block] == (references == 0), f"block {block} has {references} references and is free or lost"
            assert (block in self._evictable) == (references == 0 and key is not None)
            assert key is None or self._cached[key] == block
            assert held is None or held.get(block, 0) == references, f"block {block}: {references} references"
        assert len(self._cached) == sum(key is not None for key in self._hashes)
        assert self.enable_prefix_caching or not self._cached

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._uncache(block)
        return block

    def _uncache(self, block: int) -> None:
        if (key := self._hashes[block]) is not None:
            del self._cached[key]
            self._hashes[block] = None
