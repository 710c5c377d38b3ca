//! Exact codes of `float32` values, shorter where values allow it.
//!
//! Gradients of a training under `autocast` are 16-bit numbers in 32 bits, and neighbours have about the same exponent.
//! So a code has, for each block of values, only the bytes of the fractions that are not all zero, and exponents as
//! distances from the largest one of the block. The length of a code is known only when it is written.
//!
//! The format of a block of n values, at most [`BLOCK`]:
//!
//! | bytes | |
//! |---|---|
//! | 1 | kind: low bytes of fractions that follow (0, 1 or 2), or `ZERO`, or `RAW` |
//! | 1 | the largest exponent |
//! | 2 | how many values have an exponent of their own |
//! | n | sign (high bit) and the first seven bits of the fraction |
//! | 96 | in three bits each, how far the exponent is below the largest; 7: it has one of its own; see `pack` |
//! | kind n | the low bytes of the fractions |
//! | one each | the exponents of their own |
//!
//! Of `ZERO` (all bits are zero) only the first byte is there, and of `RAW` the first byte and the values.

use crate::error::{Error, Result};

/// Values of a block.
pub const BLOCK: usize = 256;
/// The kind of a block of zeros.
const ZERO: u8 = 0xfe;
/// The kind of a block whose code would be longer than its values.
const RAW: u8 = 0xff;
const HEAD: usize = 4;
/// The distance of an exponent that is in the list.
const OWN: u8 = 7;
/// The bits of the exponent.
const EXPONENT: u32 = 0x7f80_0000;
/// Values of a row: the distances of a block are packed as eight rows.
const ROW: usize = BLOCK / 8;

/// The most bytes that `n` values can take.
pub fn worst(n: usize) -> usize {
    4 * n + n.div_ceil(BLOCK)
}

/// Writes the code of `values` to the beginning of `out`; its length in bytes.
///
/// # Errors
///
/// [`Error::Misuse`] if `out` has fewer bytes than [`worst`] says.
pub fn encode(values: &[f32], out: &mut [u8]) -> Result<usize> {
    if out.len() < worst(values.len()) {
        let (n, has, wants) = (values.len(), out.len(), worst(values.len()));
        return Err(Error::misuse(format!(
            "lossless: the code of {n} values may take {wants} bytes, not {has}"
        )));
    }
    Ok(crate::vector::unit().dispatch(
        #[inline(always)]
        move || {
            // Whole blocks have a loop of their own, whose length the compiler knows.
            let ((blocks, rest), mut at) = (values.as_chunks::<BLOCK>(), 0);
            for block in blocks {
                at += encode_block(block, &mut out[at..]);
            }
            if !rest.is_empty() {
                at += encode_block(rest, &mut out[at..]);
            }
            at
        },
    ))
}

#[inline(always)]
fn encode_block(values: &[f32], out: &mut [u8]) -> usize {
    let n = values.len();
    // All loops are over whole blocks, whose length the compiler knows.
    let (mut bits, mut exponents, mut heads) = ([0u32; BLOCK], [0u8; BLOCK], [0u8; BLOCK]);
    for (u, value) in bits.iter_mut().zip(values) {
        *u = value.to_bits();
    }
    let (mut any, mut top, mut uppers) = (0u32, 0u8, [0u16; BLOCK]);
    for k in 0..BLOCK {
        let u = bits[k];
        any |= u;
        uppers[k] = (u >> 16) as u16;
    }
    for (k, &upper) in uppers.iter().enumerate() {
        exponents[k] = (upper >> 7) as u8;
        heads[k] = (upper >> 8) as u8 & 0x80 | upper as u8 & 0x7f;
    }
    for exponent in exponents {
        top = top.max(exponent);
    }
    if any == 0 {
        out[0] = ZERO;
        return 1;
    }
    let low = if any & 0xffff == 0 {
        0
    } else if any & 0xff == 0 {
        1
    } else {
        2
    };
    let (mut codes, mut own, mut count) = ([0u8; BLOCK], [0u8; BLOCK], 0);
    for k in 0..BLOCK {
        codes[k] = (top - exponents[k]).min(OWN);
    }
    codes[n..].fill(0);
    each_own(&codes, |k| {
        own[count % BLOCK] = exponents[k]; // at most `BLOCK` are found, which this tells the compiler
        count += 1;
    });
    let size = HEAD + n + 3 * ROW + low * n + count;
    if size > 4 * n {
        out[0] = RAW;
        for (bytes, u) in out[1..].chunks_exact_mut(4).zip(&bits[..n]) {
            bytes.copy_from_slice(&u.to_le_bytes());
        }
        return 1 + 4 * n;
    }
    out[0] = low as u8;
    out[1] = top;
    out[2..4].copy_from_slice(&(count as u16).to_le_bytes());
    let (place, rest) = out[HEAD..size].split_at_mut(n);
    place.copy_from_slice(&heads[..n]);
    let (place, rest) = rest.split_at_mut(3 * ROW);
    place.copy_from_slice(pack(&codes).as_flattened());
    let (place, rest) = rest.split_at_mut(low * n);
    match low {
        1 => place.iter_mut().zip(&bits[..n]).for_each(|(byte, u)| *byte = (u >> 8) as u8),
        2 => place
            .chunks_exact_mut(2)
            .zip(&bits[..n])
            .for_each(|(two, u)| two.copy_from_slice(&u.to_le_bytes()[..2])),
        _ => {}
    }
    rest.copy_from_slice(&own[..count]);
    size
}

/// The distances of a block in three bits each. The first row is in the lowest bits, and rows lie above each other, not
/// side by side, so that one instruction packs as many values as a vector has bytes.
#[inline(always)]
fn pack(codes: &[u8; BLOCK]) -> [[u8; ROW]; 3] {
    let (rows, mut out) = (codes.as_chunks::<ROW>().0, [[0; ROW]; 3]);
    for k in 0..ROW {
        out[0][k] = rows[0][k] | rows[1][k] << 3 | rows[2][k] << 6;
        out[1][k] = rows[2][k] >> 2 | rows[3][k] << 1 | rows[4][k] << 4 | rows[5][k] << 7;
        out[2][k] = rows[5][k] >> 1 | rows[6][k] << 2 | rows[7][k] << 5;
    }
    out
}

/// The inverse of [`pack`].
#[inline(always)]
fn unpack(packed: &[[u8; ROW]; 3]) -> [u8; BLOCK] {
    let [a, b, c] = packed;
    let mut rows = [[0; ROW]; 8];
    for k in 0..ROW {
        rows[0][k] = a[k] & 7;
        rows[1][k] = a[k] >> 3 & 7;
        rows[2][k] = (a[k] >> 6 | b[k] << 2) & 7;
        rows[3][k] = b[k] >> 1 & 7;
        rows[4][k] = b[k] >> 4 & 7;
        rows[5][k] = (b[k] >> 7 | c[k] << 1) & 7;
        rows[6][k] = c[k] >> 2 & 7;
        rows[7][k] = c[k] >> 5;
    }
    bytemuck::cast(rows)
}

/// Calls `found` with the place of each distance that is [`OWN`], once and in order. Few are, so groups of eight that have some are
/// looked for first, without a branch.
#[inline(always)]
fn each_own(codes: &[u8; BLOCK], mut found: impl FnMut(usize)) {
    let eights = codes.as_chunks::<8>().0;
    let marks = |eight: &[u8; 8]| {
        let x = u64::from_le_bytes(*eight);
        x & x >> 1 & x >> 2 & 0x0101_0101_0101_0101
    };
    let mut groups = 0u32;
    for (k, eight) in eights.iter().enumerate() {
        groups |= u32::from(marks(eight) != 0) << k;
    }
    while groups != 0 {
        let group = groups.trailing_zeros() as usize;
        groups &= groups - 1;
        let mut left = marks(&eights[group]);
        while left != 0 {
            found(8 * group + left.trailing_zeros() as usize / 8);
            left &= left - 1;
        }
    }
}

/// What becomes of decoded values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// They are written.
    Write,
    /// They are added to what is there.
    Add,
    /// They are added, and the sums are divided by this many ranks: the last of them has come.
    Mean(u32),
}

/// Reads the code of as many values as `out` has, which may be anything; `from` is the rank that is blamed.
///
/// # Errors
///
/// [`Error::Corrupt`] if the bytes are not exactly such a code. Some values have been written then.
pub fn decode(code: &[u8], out: &mut [f32], then: Then, from: u32) -> Result<()> {
    let values = out.len();
    let rest = crate::vector::unit().dispatch(
        #[inline(always)]
        move || {
            let ((blocks, rest), mut code) = (out.as_chunks_mut::<BLOCK>(), code);
            for block in blocks {
                code = decode_block(code, block, then)?;
            }
            if !rest.is_empty() {
                code = decode_block(code, rest, then)?;
            }
            Some(code.len())
        },
    );
    match rest {
        Some(0) => Ok(()),
        _ => Err(Error::Corrupt { rank: from, what: format!("it is no lossless code of {values} values") }),
    }
}

/// Decodes a block; the rest of the code.
#[inline(always)]
fn decode_block<'a>(code: &'a [u8], out: &mut [f32], then: Then) -> Option<&'a [u8]> {
    let n = out.len();
    let mut bits = [0u32; BLOCK];
    // The places of values whose exponents are in the list, and this.
    let (mut places, mut found, mut exponents) = ([0u8; BLOCK], 0, &[][..]);
    let (&kind, after) = code.split_first()?;
    let rest = match kind {
        ZERO => after,
        RAW => {
            let (values, rest) = after.split_at_checked(4 * n)?;
            for (u, bytes) in bits.iter_mut().zip(values.chunks_exact(4)) {
                *u = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
            }
            rest
        }
        low @ 0..=2 => {
            let low = usize::from(low);
            let (head, rest) = after.split_at_checked(HEAD - 1)?;
            let (top, count) = (head[0], usize::from(u16::from_le_bytes([head[1], head[2]])));
            let (heads, rest) = rest.split_at_checked(n)?;
            let (packed, rest) = rest.split_first_chunk::<{ 3 * ROW }>()?;
            let (lows, rest) = rest.split_at_checked(low * n)?;
            let (own, rest) = rest.split_at_checked(count)?;
            let codes = unpack(&bytemuck::cast(*packed));
            each_own(&codes, |k| {
                places[found % BLOCK] = k as u8;
                found += 1;
            });
            (found == count && places[..found].iter().all(|&k| usize::from(k) < n)).then_some(())?;
            exponents = own;
            let mut whole = [0u8; BLOCK];
            whole[..n].copy_from_slice(heads);
            // The upper halves first: a vector has twice as many of them.
            let mut upper = [0u16; BLOCK];
            for k in 0..BLOCK {
                let (head, exponent) = (u16::from(whole[k]), u16::from(top.wrapping_sub(codes[k])));
                upper[k] = (head & 0x80) << 8 | exponent << 7 | head & 0x7f;
            }
            for (u, upper) in bits.iter_mut().zip(upper) {
                *u = u32::from(upper) << 16;
            }
            match low {
                1 => bits.iter_mut().zip(lows).for_each(|(u, &byte)| *u |= u32::from(byte) << 8),
                2 => {
                    let pairs = lows.chunks_exact(2);
                    bits.iter_mut()
                        .zip(pairs)
                        .for_each(|(u, two)| *u |= u32::from(u16::from_le_bytes([two[0], two[1]])));
                }
                _ => {}
            }
            rest
        }
        _ => return None,
    };
    // These few are done alone. In their places among the bits, all that reads these would wait for the writes.
    let mut before = [0f32; BLOCK];
    for (value, &k) in before.iter_mut().zip(&places[..found]) {
        *value = out[usize::from(k)];
    }
    match then {
        Then::Write => out.iter_mut().zip(&bits).for_each(|(value, &u)| *value = f32::from_bits(u)),
        Then::Add => out.iter_mut().zip(&bits).for_each(|(value, &u)| *value += f32::from_bits(u)),
        Then::Mean(ranks) => {
            let ranks = ranks as f32;
            out.iter_mut().zip(&bits).for_each(|(value, &u)| *value = (*value + f32::from_bits(u)) / ranks);
        }
    }
    for ((&k, &exponent), before) in places[..found].iter().zip(exponents).zip(before) {
        let k = usize::from(k);
        let value = f32::from_bits(bits[k] & !EXPONENT | u32::from(exponent) << 23);
        out[k] = match then {
            Then::Write => value,
            Then::Add => before + value,
            Then::Mean(ranks) => (before + value) / ranks as f32,
        };
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    fn code_of(values: &[f32]) -> Vec<u8> {
        let mut out = vec![0; worst(values.len())];
        let size = encode(values, &mut out).unwrap();
        out.truncate(size);
        out
    }

    fn check(values: &[f32]) -> usize {
        let code = code_of(values);
        let mut read = vec![7f32; values.len()];
        decode(&code, &mut read, Then::Write, 0).unwrap();
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&read), bits(values));
        code.len()
    }

    /// Roughly normal, by a sum of twelve draws of a small generator.
    fn normal(n: usize) -> Vec<f32> {
        let mut state = 1u64;
        let mut draw = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..n).map(|_| (0..12).map(|_| draw()).sum::<f32>() - 6.0).collect()
    }

    #[test]
    fn sixteen_bits_in_thirty_two_take_eleven() {
        let values: Vec<f32> =
            normal(100_000).into_iter().map(|x| bf16::from_f32(0.01 * x).to_f32()).collect();
        let part = check(&values) as f64 / 400_000.0;
        assert!(part < 0.37, "{part}");
        let part = check(&normal(100_000)) as f64 / 400_000.0;
        assert!(part < 0.88, "{part}");
    }

    #[test]
    fn what_cannot_be_shorter_is_raw() {
        let values: Vec<f32> = (0..1000u32).map(|k| f32::from_bits(k.wrapping_mul(2654435761))).collect();
        assert!(check(&values) <= worst(1000));
        assert_eq!(check(&[0.0; 1000]), 4);
        check(&[-0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 2.0, 1.0, 0.0]);
        check(&[]);
    }

    #[test]
    fn added_to_what_is_there() {
        let (a, b) = (normal(1000), normal(2000).split_off(1000));
        let mut sum = a.clone();
        decode(&code_of(&b), &mut sum, Then::Add, 0).unwrap();
        assert!(sum.iter().zip(a.iter().zip(&b)).all(|(s, (a, b))| *s == a + b));
        let mut mean = a.clone();
        decode(&code_of(&b), &mut mean, Then::Mean(3), 0).unwrap();
        assert!(mean.iter().zip(&sum).all(|(m, s)| *m == s / 3.0));
    }

    #[test]
    fn a_code_that_is_cut_or_too_long_is_corrupt() {
        let mut code = code_of(&normal(300));
        let mut out = [0f32; 300];
        for end in 0..code.len() {
            decode(&code[..end], &mut out, Then::Write, 3).unwrap_err();
        }
        code.push(0);
        assert!(matches!(decode(&code, &mut out, Then::Write, 3), Err(Error::Corrupt { rank: 3, .. })));
    }

    proptest! {
        #[test]
        fn any_bits_come_back(bits in proptest::collection::vec(any::<u32>(), 0..900), zeros in 0u32..25) {
            let values: Vec<f32> = bits.iter().map(|u| f32::from_bits(u >> zeros << zeros)).collect();
            check(&values);
        }

        #[test]
        fn any_bytes_are_numbers_or_corrupt(code in proptest::collection::vec(any::<u8>(), 0..2000), n in 0usize..600) {
            let mut out = vec![0f32; n];
            let _ = decode(&code, &mut out, Then::Add, 0);
        }
    }
}
