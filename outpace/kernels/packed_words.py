"""Products of a few rows with values of 4 and 8 bits that are read as words of 32: the sum of a chunk of columns.

A value becomes a float without a conversion, which would take longer than reading it: its bits are put into the
fraction of a float whose exponent gives the last of them the value 1, and 2**exponent is subtracted from the sum. With
the exponents 7, 8 and 11 that costs at most 12 of a float's 24 bits, so this is for x of 16 bits.
"""
# mypy: disallow-untyped-decorators=False

from outpace.kernels.triton_stub import tl, triton


@triton.jit
def _halves(x: tl.tensor) -> tl.tensor:
    """[..., 2P] → its even and odd columns [..., P]."""
    pairs: tl.constexpr = [x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.shape[4] // 2, 2]
    return tl.split(tl.reshape(x, pairs))


@triton.jit
def four(x: tl.tensor) -> tl.tensor:
    """[..., 4] → four of [...]."""
    even, odd = _halves(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _float(word: tl.tensor, mask: tl.constexpr, bits: tl.tensor) -> tl.tensor:
    """The masked bits of a word and `bits`, as a float.

    If the compiler knows `bits`, it takes two instructions, each with a constant, otherwise one. So callers subtract
    the program's number in a dimension that no grid here has, which is 0.
    """
    return ((word & mask) | bits).to(tl.float32, bitcast=True)


@triton.jit
def _add_int8(part: tl.tensor, word: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """part + four values of 8 bits, each 384 too large, times a, b, c, d."""
    base = 0x43800000 - tl.program_id(2)
    word ^= 0x80808080 - (1 << 32)  # from signed to unsigned
    part = tl.fma(a, _float(word << 15, 0x7F8000, base), part)
    part = tl.fma(b, _float(word << 7, 0x7F8000, base), part)
    part = tl.fma(c, _float(word >> 1, 0x7F8000, base), part)
    return tl.fma(d, _float(word >> 9, 0x7F8000, base), part)


@triton.jit
def _add_int4(
    part: tl.tensor, word: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor,
    f: tl.tensor, g: tl.tensor, h: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """part + eight values of 4 bits times a to h: those times b, d and f 2048 too large, the others 128."""
    base = 0x43000000 - tl.program_id(2)
    larger = 0x45000000 - tl.program_id(2)
    part = tl.fma(a, _float(word << 16, 0xF0000, base), part)
    part = tl.fma(b, _float(word << 8, 0xF000, larger), part)
    part = tl.fma(c, _float(word << 8, 0xF0000, base), part)
    part = tl.fma(d, _float(word, 0xF000, larger), part)
    part = tl.fma(e, _float(word, 0xF0000, base), part)
    part = tl.fma(f, _float(word >> 8, 0xF000, larger), part)
    part = tl.fma(g, _float(word >> 8, 0xF0000, base), part)
    return tl.fma(h, _float(word >> 12, 0xF0000, base), part)


@triton.jit
def add_words(
    acc: tl.tensor,  # [M, N, G, C]
    x: tl.tensor,  # [M, 1, G, C, 8], fp32
    word: tl.tensor,  # int32 [1, N, G, C]
    second: tl.tensor,  # of int8: the next word, else None
    zero: tl.tensor,  # [1, N, G, 1], or a number
) -> tl.tensor:
    """acc + (values - zero) * x of eight columns."""
    even, odd = _halves(x)
    a, c, e, g = four(even)
    b, d, f, h = four(odd)
    if second is None:
        part = acc - ((a + c) + (e + g) + h) * (zero + 128.0) - ((b + d) + f) * (zero + 2048.0)
        part = _add_int4(part, word, a, b, c, d, e, f, g, h)
    else:
        part = acc - (((a + c) + (e + g)) + ((b + d) + (f + h))) * (zero + 384.0)
        part = _add_int8(_add_int8(part, word, a, b, c, d), second, e, f, g, h)
    return part
