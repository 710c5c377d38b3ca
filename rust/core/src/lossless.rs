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
//! | 3 ceil(n / 8) | in three bits each, how far the exponent is below the largest; 7: it has one of its own |
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
            let mut at = 0;
            for block in values.chunks(BLOCK) {
                at += encode_block(block, &mut out[at..]);
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
    let (mut any, mut top) = (0u32, 0u8);
    for k in 0..BLOCK {
        let u = bits[k];
        any |= u;
        exponents[k] = (u >> 23) as u8;
        heads[k] = ((u >> 24) as u8 & 0x80) | ((u >> 16) as u8 & 0x7f);
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
    for (at, eight) in codes.chunks_exact(8).enumerate() {
        // Few groups have any, and going through all values would take most of the time.
        if has_own(u64::from_le_bytes(eight.try_into().unwrap_or_default())) {
            for k in 8 * at..8 * at + 8 {
                own[count] = exponents[k];
                count += usize::from(codes[k] == OWN);
            }
        }
    }
    let packed = 3 * n.div_ceil(8);
    let size = HEAD + n + packed + low * n + count;
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
    let (place, rest) = rest.split_at_mut(packed);
    for (three, eight) in place.chunks_exact_mut(3).zip(codes.chunks_exact(8)) {
        let mut x = u64::from_le_bytes(eight.try_into().unwrap_or_default());
        x = (x | x >> 5) & 0x003f_003f_003f_003f;
        x = (x | x >> 10) & 0x0000_0fff_0000_0fff;
        x |= x >> 20;
        three.copy_from_slice(&x.to_le_bytes()[..3]);
    }
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

/// Whether one of eight distances is [`OWN`].
#[inline(always)]
fn has_own(eight: u64) -> bool {
    eight & eight >> 1 & eight >> 2 & 0x0101_0101_0101_0101 != 0
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
            let mut code = code;
            for block in out.chunks_mut(BLOCK) {
                code = decode_block(code, block, then)?;
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
            let (packed, rest) = rest.split_at_checked(3 * n.div_ceil(8))?;
            let (lows, rest) = rest.split_at_checked(low * n)?;
            let (own, rest) = rest.split_at_checked(count)?;
            let (mut codes, mut places, mut found) = ([0u8; BLOCK], [0u8; BLOCK], 0);
            for (at, (eight, three)) in codes.chunks_exact_mut(8).zip(packed.chunks_exact(3)).enumerate() {
                let mut x = u64::from(u32::from_le_bytes([three[0], three[1], three[2], 0]));
                x = (x | x << 20) & 0x0000_0fff_0000_0fff;
                x = (x | x << 10) & 0x003f_003f_003f_003f;
                x = (x | x << 5) & 0x0707_0707_0707_0707;
                eight.copy_from_slice(&x.to_le_bytes());
                if has_own(x) {
                    for (k, &code) in eight.iter().enumerate() {
                        places[found] = (8 * at + k) as u8;
                        found += usize::from(code == OWN);
                    }
                }
            }
            let (mut exponents, mut whole) = ([0u8; BLOCK], [0u8; BLOCK]);
            whole[..n].copy_from_slice(heads);
            for k in 0..BLOCK {
                exponents[k] = top.wrapping_sub(codes[k]);
            }
            (found == count).then_some(())?;
            for (&place, &exponent) in places[..found].iter().zip(own) {
                exponents[usize::from(place)] = exponent;
            }
            for k in 0..BLOCK {
                let (head, exponent) = (u32::from(whole[k]), u32::from(exponents[k]));
                bits[k] = (head & 0x80) << 24 | exponent << 23 | (head & 0x7f) << 16;
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
    match then {
        Then::Write => out.iter_mut().zip(&bits).for_each(|(value, &u)| *value = f32::from_bits(u)),
        Then::Add => out.iter_mut().zip(&bits).for_each(|(value, &u)| *value += f32::from_bits(u)),
        Then::Mean(ranks) => {
            let ranks = ranks as f32;
            out.iter_mut().zip(&bits).for_each(|(value, &u)| *value = (*value + f32::from_bits(u)) / ranks);
        }
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
