"""The codecs of docs/algorithms.md once more, in NumPy, a float32 operation at a time: bytes and numbers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

F32 = np.float32
MAX = np.finfo(F32).max
NOTHING = F32(1e-36)  # integer blocks of a smaller range become zeros
NOTHING_FP8 = F32(1e-35)  # of fp8; 1/scale is finite above
GOLDEN = 0x9E3779B97F4A7C15
U64 = (1 << 64) - 1

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Codec:
    """What all have in common."""

    def size(self, n: int) -> int:
        raise NotImplementedError

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        raise NotImplementedError

    def decode(self, encoded: Bytes, n: int) -> Floats:
        raise NotImplementedError

    def apply(
        self, src: Floats, residual: Floats, feedback: bool, seed: int = 0
    ) -> tuple[Bytes, Floats, Floats]:
        """The bytes, what they decode to, and what is left: a residual, finite, or a remainder, as it is."""
        with np.errstate(all="ignore"):
            m = src + residual if feedback else src
            encoded = self.encode(m, seed)
            decoded = self.decode(encoded, len(src))
            lost = m - decoded
        return encoded, decoded, np.where(np.isfinite(lost), lost, F32(0)) if feedback else lost


class Half(Codec):
    """bf16 and f16."""

    def __init__(self, name: str) -> None:
        self.name = name

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        if self.name == "f16":
            with np.errstate(all="ignore"):
                return x.astype("<f2").view(np.uint8)
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        quiet = bits >> 16 | 0x40  # a NaN whose payload is all in the low bits must not become an infinity
        return np.where(np.isnan(x), quiet, rounded).astype("<u2").view(np.uint8)

    def decode(self, encoded: Bytes, n: int) -> Floats:
        if self.name == "f16":
            return encoded.view("<f2").astype(F32)
        return (encoded.view("<u2").astype(np.uint32) << 16).view(F32)


class Blocks(Codec):
    """A header of 4 bytes and the codes, block by block; the last block may be shorter."""

    def __init__(self, block: int, bits: int) -> None:
        self.block, self.bits = block, bits

    def payload(self, values: int) -> int:
        return -(-values * self.bits // 8)

    def size(self, n: int) -> int:
        whole, rest = divmod(n, self.block)
        return whole * (4 + self.payload(self.block)) + (4 + self.payload(rest) if rest else 0)

    def quantise(self, rows: Floats, there: npt.NDArray[np.bool_]) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """Headers and a code per value, of finite blocks padded with 0; `there` says what is no padding."""
        raise NotImplementedError

    def values(self, headers: Floats, codes: npt.NDArray[np.uint8]) -> Floats:
        raise NotImplementedError

    def blocks(self, n: int) -> int:
        return -(-n // self.block)

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        n, count = len(x), self.blocks(len(x))
        rows = np.zeros((count, self.block), F32)
        rows.reshape(-1)[:n] = x
        there = np.arange(count * self.block).reshape(rows.shape) < n
        bad = ~np.isfinite(rows).all(axis=1)
        with np.errstate(all="ignore"):
            headers, codes = self.quantise(np.where(bad[:, None], F32(0), rows), there)
        headers = np.where(bad, F32("nan"), headers)
        codes = np.where(there & ~bad[:, None], codes, 0).astype(np.uint8)
        width = self.payload(self.block)
        out = np.zeros((count, 4 + width), np.uint8)
        out[:, :4] = headers.astype("<f4").reshape(count, 1).view(np.uint8)
        bits = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, : self.bits]
        out[:, 4:] = np.packbits(bits.reshape(count, -1), axis=1, bitorder="little")
        return out.reshape(-1)[: self.size(n)]

    def split(self, encoded: Bytes, n: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """Headers and codes of all blocks; zeros where there is nothing."""
        count, width = self.blocks(n), self.payload(self.block)
        raw = np.zeros((count, 4 + width), np.uint8)
        raw.reshape(-1)[: len(encoded)] = encoded
        bits = np.unpackbits(raw[:, 4:], axis=1, bitorder="little")[:, : self.block * self.bits]
        codes = np.packbits(bits.reshape(count, self.block, self.bits), axis=2, bitorder="little")
        return raw[:, :4].copy().view("<f4").reshape(count).astype(F32), codes.reshape(count, self.block)

    def decode(self, encoded: Bytes, n: int) -> Floats:
        with np.errstate(all="ignore"):
            return self.values(*self.split(encoded, n)).astype(F32, copy=False).reshape(-1)[:n]


class Integers(Blocks):
    """int8 and int4."""

    def __init__(self, block: int, bits: int) -> None:
        super().__init__(block, bits)
        self.most = (1 << bits) - 1

    def quantise(self, rows: Floats, there: npt.NDArray[np.bool_]) -> tuple[Floats, npt.NDArray[np.uint8]]:
        most, mask = F32(self.most), np.uint32(self.most)
        lo = np.minimum(rows.min(axis=1), F32(0))
        hi = np.maximum(rows.max(axis=1), F32(0))
        step = hi / most - lo / most
        assert step.dtype == F32
        step = ((step.view(np.uint32) + mask) & ~mask).view(F32)
        inverse = F32(1) / step
        zero = np.clip(np.rint(-lo * inverse), F32(0), most)
        codes = np.clip(np.rint(rows * inverse[:, None]) + zero[:, None], F32(0), most)
        nothing = hi - lo < NOTHING
        bits = step.view(np.uint32) | np.where(nothing, 0, zero).astype(np.uint32)
        bits = np.where(nothing, np.uint32(0), bits)
        return bits.view(F32), np.where(nothing[:, None], 0, codes).astype(np.uint8)

    def parts(self, headers: Floats) -> tuple[Floats, Floats]:
        """Step and zero point."""
        bits, mask = headers.view(np.uint32), np.uint32(self.most)
        return (bits & ~mask).view(F32), (bits & mask).astype(F32)

    def values(self, headers: Floats, codes: npt.NDArray[np.uint8]) -> Floats:
        step, zero = self.parts(headers)
        return np.clip((codes.astype(F32) - zero[:, None]) * step[:, None], -MAX, MAX)

    def steps(self, encoded: Bytes, n: int) -> Floats:
        """The step that each value was rounded to."""
        return np.repeat(self.parts(self.split(encoded, n)[0])[0], self.block)[:n]


def e4m3() -> npt.NDArray[np.float64]:
    """The numbers of codes 0 to 0x7e: sign 0, 4 bits of exponent biased by 7, 3 of mantissa."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7)
    )


class Fp8(Blocks):
    """e4m3fn, scaled so that the block's largest is 448."""

    TABLE = e4m3()

    def __init__(self, block: int) -> None:
        super().__init__(block, 8)

    def nearest(self, x: Floats) -> npt.NDArray[np.uint8]:
        """Codes; halfway goes to the even one."""
        size = np.abs(x).astype(np.float64)
        middle = (self.TABLE[1:] + self.TABLE[:-1]) / 2
        below = np.searchsorted(middle, size, side="left")  # how many middles are smaller
        tie = (below < len(middle)) & (middle[np.minimum(below, len(middle) - 1)] == size)
        code = below + (tie & (below & 1 == 1))
        return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)

    def quantise(self, rows: Floats, there: npt.NDArray[np.bool_]) -> tuple[Floats, npt.NDArray[np.uint8]]:
        largest = np.abs(rows).max(axis=1)
        nothing = largest < NOTHING_FP8
        scale = np.where(nothing, F32(1), largest / F32(448))
        scaled = np.clip(rows * (F32(1) / scale)[:, None], F32(-448), F32(448))
        codes = np.where(nothing[:, None], 0, self.nearest(scaled))
        return np.where(nothing, F32(0), scale), codes

    def values(self, headers: Floats, codes: npt.NDArray[np.uint8]) -> Floats:
        table = np.append(self.TABLE, np.nan).astype(F32)
        return np.concatenate([table, -table])[codes] * headers[:, None]


class Sign(Blocks):
    """A bit per value and the block's mean size."""

    def __init__(self, block: int) -> None:
        super().__init__(block, 1)

    def quantise(self, rows: Floats, there: npt.NDArray[np.bool_]) -> tuple[Floats, npt.NDArray[np.uint8]]:
        total = np.abs(rows).astype(np.float64).sum(axis=1)
        return (total / there.sum(axis=1)).astype(F32), (rows < 0).astype(np.uint8)

    def values(self, headers: Floats, codes: npt.NDArray[np.uint8]) -> Floats:
        return np.where(codes == 1, -headers[:, None], headers[:, None])


def kept(fraction: float, n: int) -> int:
    return max(1, math.ceil(fraction * n))


class Places:
    """k ascending places below n as Elias-Fano."""

    def __init__(self, n: int, k: int) -> None:
        self.k, self.b = k, 0
        while k << (self.b + 1) <= n:
            self.b += 1
        self.bits = k + (n - 1 >> self.b) + 1  # of the bitmap
        self.low = (k * self.b + 7) // 8
        self.size = self.low + (self.bits + 7) // 8

    def write(self, places: npt.NDArray[np.int64]) -> Bytes:
        """Any ascending places, beyond n also."""
        low = (places[:, None] >> np.arange(self.b)[None, :] & 1).astype(np.uint8).reshape(-1)
        bitmap = np.zeros(-(-self.bits // 8) * 8, np.uint8)
        bitmap[(places >> self.b) + np.arange(self.k)] = 1
        return np.concatenate([np.packbits(low, bitorder="little"), np.packbits(bitmap, bitorder="little")])

    def read(self, encoded: Bytes) -> npt.NDArray[np.int64]:
        low = np.unpackbits(encoded[: self.low], bitorder="little")[: self.k * self.b]
        ones = np.flatnonzero(np.unpackbits(encoded[self.low :], bitorder="little"))
        assert len(ones) == self.k, f"{len(ones)} bits are set, not {self.k}"
        high = ones - np.arange(self.k)
        lows = low.reshape(self.k, self.b).astype(np.int64) << np.arange(self.b)
        return (high << self.b) + lows.sum(axis=1)


def largest(x: Floats, k: int) -> npt.NDArray[np.int64]:
    """The places of the k largest by size, ascending; of equal values the first."""
    size = np.where(np.isnan(x), np.uint32(0x7F800001), np.abs(x).view(np.uint32)).astype(np.int64)
    return np.sort(np.argsort(-size, kind="stable")[:k])


class TopK(Codec):
    """The largest, and where they are."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def shape(self, n: int) -> tuple[int, int, int]:
        """How many values, low bits of each index, bits of the bitmap."""
        places = Places(n, kept(self.fraction, n))
        return places.k, places.b, places.bits

    def size(self, n: int) -> int:
        k = kept(self.fraction, n)
        return 4 * k + Places(n, k).size

    def write(self, values: Floats, indices: npt.NDArray[np.int64], n: int) -> Bytes:
        """Any values at any ascending indices, beyond n also."""
        places = Places(n, kept(self.fraction, n)).write(indices)
        return np.concatenate([values.astype("<f4").view(np.uint8), places])

    def read(self, encoded: Bytes, n: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Values and indices."""
        k = kept(self.fraction, n)
        values = encoded[: 4 * k].copy().view("<f4").astype(F32)
        return values, Places(n, k).read(encoded[4 * k :])

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        indices = largest(x, kept(self.fraction, len(x)))
        return self.write(x[indices], indices, len(x))

    def decode(self, encoded: Bytes, n: int) -> Floats:
        values, indices = self.read(encoded, n)
        out = np.zeros(n, F32)
        out[indices] = values
        return out


class ChunkTopK(Codec):
    """Of each chunk the largest: where they are, their signs, and which of two magnitudes."""

    CHUNK = 4096

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def size(self, n: int) -> int:
        whole, rest = divmod(n, self.CHUNK)
        return whole * self.of_one(self.CHUNK) + (self.of_one(rest) if rest else 0)

    def of_one(self, length: int) -> int:
        """Bytes of a chunk."""
        k = kept(self.fraction, length)
        return 8 + (2 * k + 7) // 8 + Places(length, k).size

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        chunks = [self.encode_one(x[at : at + self.CHUNK]) for at in range(0, len(x), self.CHUNK)]
        return np.concatenate([np.zeros(0, np.uint8), *chunks])

    def encode_one(self, x: Floats) -> Bytes:
        good, k = bool(np.isfinite(x).all()), kept(self.fraction, len(x))
        x = x if good else np.zeros_like(x)
        places = largest(x, k)
        sizes = np.abs(x[places]).astype(np.float64)
        large = sizes > sizes.cumsum()[-1] / k  # cumsum adds in order
        low = np.where(large, 0, sizes).cumsum()[-1] / (k - large.sum())
        high = np.where(large, sizes, 0).cumsum()[-1] / large.sum() if large.any() else low
        header = np.array([low, high] if good else [np.nan, np.nan]).astype("<f4").view(np.uint8)
        kinds = np.stack([x[places] < 0, large], 1).astype(np.uint8).reshape(-1)
        return np.concatenate(
            [header, np.packbits(kinds, bitorder="little"), Places(len(x), k).write(places)]
        )

    def decode(self, encoded: Bytes, n: int) -> Floats:
        out, at = np.zeros(n, F32), 0
        for start in range(0, n, self.CHUNK):
            part = out[start : start + self.CHUNK]
            size = self.of_one(len(part))
            self.decode_one(encoded[at : at + size], part)
            at += size
        return out

    def decode_one(self, encoded: Bytes, out: Floats) -> None:
        k = kept(self.fraction, len(out))
        low, high = encoded[:8].copy().view("<f4").astype(F32)
        if np.isnan(low):
            out[:] = np.nan
            return
        end = 8 + (2 * k + 7) // 8
        negative, large = np.unpackbits(encoded[8:end], bitorder="little")[: 2 * k].reshape(k, 2).T
        sizes = np.where(large == 1, high, low)
        out[Places(len(out), k).read(encoded[end:])] = np.where(negative == 1, -sizes, sizes)


def splitmix(z: int) -> int:
    """The last steps of splitmix64, which mix a state."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & U64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & U64
    return z ^ z >> 31


class RandomK(Codec):
    """One of each of k parts, told by a seed alone."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def size(self, n: int) -> int:
        return 12 + 4 * kept(self.fraction, n)

    def chosen(self, seed: int, n: int) -> npt.NDArray[np.int64]:
        k, out = kept(self.fraction, n), []
        for i in range(k):
            start, end = i * n // k, (i + 1) * n // k
            r = splitmix((seed + (i + 1) * GOLDEN) & U64) >> 32
            out.append(start + (r * (end - start) >> 32))
        return np.array(out, np.int64)

    def encode(self, x: Floats, seed: int = 0) -> Bytes:
        poison = F32(0) if np.isfinite(x).all() else F32("nan")
        head = np.array([seed], "<u8").view(np.uint8), np.array([poison], "<f4").view(np.uint8)
        return np.concatenate([*head, x[self.chosen(seed, len(x))].astype("<f4").view(np.uint8)])

    def decode(self, encoded: Bytes, n: int) -> Floats:
        seed, poison = int(encoded[:8].copy().view("<u8")[0]), encoded[8:12].copy().view("<f4")[0]
        if np.isnan(poison):
            return np.full(n, np.nan, F32)
        out = np.zeros(n, F32)
        out[self.chosen(seed, n)] = encoded[12:].copy().view("<f4")
        return out


def find(name: str, block: int | None = None) -> Codec:
    """The same names as trigram's."""
    kind, _, fraction = name.partition(":")
    match kind:
        case "bf16" | "f16":
            return Half(kind)
        case "int8":
            return Integers(block or 512, 8)
        case "int4":
            return Integers(block or 32, 4)
        case "fp8":
            return Fp8(block or 128)
        case "sign":
            return Sign(block or 256)
        case "topk":
            return TopK(float(fraction))
        case "randomk":
            return RandomK(float(fraction))
        case "chunktopk":
            return ChunkTopK(float(fraction))
    raise AssertionError(name)
